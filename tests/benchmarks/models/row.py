"""One model in one process: trained by Slotline in some layouts, and as it is; how far apart they end.

`python -m tests.benchmarks.models.row NAME ENDS_AT LAYOUT [LAYOUT ...]` prints one line of JSON for each layout, after
its mark, and shortly before it will be ended (Unix time) where its threads stand.
The pipeline is the job's own: searched plan, programs, engine and transport, all workers in this process. The plain
side is a loop as the libraries' own examples have it, of a model built anew; only where a model draws random numbers in
its forward it is made to draw those that the pipeline drew.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from service.scheduler.job.plan_job import JobCosts, job_plan_json, plan_job
from tests.benchmarks.models.catalogue import ENTRIES
from tests.benchmarks.models.doubled import in_double
from tests.benchmarks.models.entry import Entry
from tests.benchmarks.models.operators import declare
from worker.contract.job import Job
from worker.contract.planned import PlannedJob, parse_planned_job
from worker.data.sampler import BatchSampler
from worker.model.factory import build_model, call_factory
from worker.model.rng_ops import RngKey, RngOp, replay_rng, traced_rng_ops
from worker.verify.local_gang import LoadedWorker, LocalGang, prepare_workers

MARK = "MODEL_ROW "
STEPS = 4
LAYOUTS = {"4 on 4": (4, 4), "4 on 2": (4, 2), "2 on 2": (2, 2)}
PLAN_S = 0.2


# Beyond these two trainings in single precision are compared in double precision too.
EQUAL_LOSS, EQUAL_MOVED = 1e-5, 1e-3
# What is still apart there is no rounding: this is a ten-millionth of what rounding in single precision makes.
EQUAL_DOUBLE = 1e-6


@dataclass(frozen=True)
class Distance:
    """Of two trainings: the greatest relative difference of a step's loss, of a parameter after the last step as a part
    of what it moved in all (`worst`: which), and of a buffer."""

    loss: float
    moved: float
    worst: str
    buffers: float

    def within(self, loss: float, moved: float) -> bool:
        return self.loss <= loss and self.moved <= moved and self.buffers <= moved


@dataclass(frozen=True)
class Result:
    """How far a layout's training is from the plain one, or why there is none. `split`: the plan splits backwards.

    `rounding` is how far plain training is from itself when it takes each step's microbatches in the other order: what
    comes of rounding alone, which batch norms over a few values enlarge a millionfold. Where the layout is far off in
    single precision, `double` is how far in double precision.
    """

    layout: str
    seconds: float = 0.0
    refused: str = ""
    split: bool = False
    apart: Distance | None = None
    rounding: Distance | None = None
    double: Distance | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        parts = {key: data[key] and Distance(**data[key]) for key in ("apart", "rounding", "double")}
        return cls(**{**data, **parts})

    @property
    def equal(self) -> bool:
        if self.double is not None:
            return self.double.within(EQUAL_DOUBLE, EQUAL_DOUBLE)
        return self.apart is not None and self.apart.within(EQUAL_LOSS, EQUAL_MOVED)


@dataclass(frozen=True)
class _Trained:
    losses: Sequence[float]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def compare(entry: Entry, layout: str) -> Result:
    """Train `entry` in `layout` and as it is."""
    began = time.monotonic()
    stages, meshes = LAYOUTS[layout]
    spec = entry.job(stages=stages, meshes=meshes, steps=STEPS)
    try:
        apart, rounding, split = _distances(spec)
        double = None if apart.within(EQUAL_LOSS, EQUAL_MOVED) else _distances(in_double(spec))[0]
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Result(layout, time.monotonic() - began, refused=text.splitlines()[0])
    return Result(layout, time.monotonic() - began, "", split, apart, rounding, double)


def _distances(spec: dict[str, Any]) -> tuple[Distance, Distance, bool]:
    found, calls, split = _pipeline(spec)
    before, plain = _plain(spec, calls)
    _, other = _plain(spec, calls, other_order=True)
    return _apart(before, plain, found), _apart(before, plain, other), split


def _apart(before: Mapping[str, Tensor], plain: _Trained, found: _Trained) -> Distance:
    loss = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(found.losses, plain.losses, strict=True))
    moved, worst = _moved(before, plain.parameters, found.parameters)
    buffers = [_of_size(t, found.buffers[name]) for name, t in plain.buffers.items() if name in found.buffers]
    return Distance(loss, moved, worst, max(buffers, default=0.0))


def _pipeline(spec: dict[str, Any]) -> tuple[_Trained, list[RngOp], bool]:
    job = Job.from_json(spec)
    workers = prepare_workers(job)
    planned = _planned(spec, job, workers[0], list(workers[0].profile_keys()))
    calls: list[RngOp] = []
    with LocalGang(workers, planned, look=lambda traced: calls.extend(traced_rng_ops(traced))) as gang:
        losses = []
        for step in range(1, STEPS + 1):
            own = [loss for result in gang.step(step) for loss in result.losses]
            losses.append(sum(own) / len(own))
        parameters: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        for stage in (stage for worker in gang.workers for stage in worker.stages.values()):
            parameters |= {stage.original_names[local]: p.detach() for local, p in stage.named_parameters()}
            buffers |= {
                stage.original_names[local]: stage.get_buffer(local)
                for local in stage.updated_buffers
                if local in stage.original_names
            }
    split = any(one["op"] == "W" for program in planned.plan["programs"].values() for one in program)
    return _Trained(losses, parameters, buffers), calls, split


def _planned(spec: dict[str, Any], job: Job, first: LoadedWorker, counts: Sequence[int]) -> PlannedJob:
    """The plan that a control plane would give."""
    costs = {
        "profiles": [{"microbatches": count, "profile": first.profile(count)} for count in counts],
        "network": {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-5},
        "optimizer": asdict(first.optimizer_state()),
        "update": first.update_costs().to_json(),
    }
    return parse_planned_job(job_plan_json(plan_job(job, JobCosts.from_json(costs, job), budget_s=PLAN_S)))


def _plain(
    spec: dict[str, Any], calls: Sequence[RngOp], *, other_order: bool = False
) -> tuple[dict[str, Tensor], _Trained]:
    """Initial parameters, and what training the model as it is ends in; `other_order`: the last microbatch first."""
    training = spec["training"]
    model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=training["seed"])
    data = call_factory(spec["data"]["factory"], spec["data"]["args"])
    loss = call_factory(spec["loss"]["factory"], {}) if "loss" in spec else None
    count = training["microbatches"]
    sampler = BatchSampler(len(data), training["global_batch"], count, seed=training["seed"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, **spec["optimizer"]["args"])
    means = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        losses = []
        for m in reversed(range(count)) if other_order else range(count):
            batch = _stacked([data[index] for index in sampler.indices(step, m)])
            with replay_rng(model, calls, RngKey(training["seed"], worker=0, step=step, microbatch=m)):
                found = _loss(model, batch, loss, spec["model"].get("output"))
            (found / count).backward()
            losses.append(found.item())
        torch.nn.utils.clip_grad_norm_(trained, training["clip_grad_norm"])
        optimizer.step()
        means.append(sum(losses) / count)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return before, _Trained(means, parameters, dict(model.named_buffers()))


def _loss(model: nn.Module, batch: Any, loss: nn.Module | None, output: str | None) -> Tensor:
    if loss is None:
        return model(**batch).loss
    inputs, target = batch
    made = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return loss(made[output] if output else made, target)


def _stacked(samples: Sequence[Any]) -> Any:
    return torch.utils.data.default_collate(list(samples))


def _moved(
    before: Mapping[str, Tensor], plain: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> tuple[float, str]:
    """By which part of what a parameter moved in plain training the pipeline's is elsewhere; what hardly moves beside
    the others counts as a thousandth of what moved most. A parameter that is in no stage has not moved."""
    steps = {name: float((p - before[name]).double().norm()) for name, p in plain.items()}
    if not any(steps.values()):
        raise RuntimeError("no parameter moved in plain training: the comparison says nothing")
    least = 1e-3 * max(steps.values())
    apart = {
        name: float((found.get(name, before[name]) - p).double().norm()) / max(steps[name], least)
        for name, p in plain.items()
    }
    worst = max(apart, key=lambda name: apart[name])
    return apart[worst], worst


def _of_size(expected: Tensor, found: Tensor) -> float:
    """The difference as a part of the root mean square, or of a thousandth: a running mean may be nought but rounding."""
    difference, count = (expected.double() - found.double()).norm(), expected.numel()
    return float(difference / expected.double().norm().clamp_min(1e-3 * count**0.5)) if count else 0.0


_LAST_S = 10.0


def main(name: str, ends_at: float, layouts: Sequence[str]) -> int:
    torch.set_num_threads(1)
    # by the clock: on a busy machine the imports above alone take longer than the threads are told before the end
    faulthandler.dump_traceback_later(max(ends_at - time.time() - _LAST_S, 1.0))
    declare()
    entry = ENTRIES[name]
    for layout in layouts:
        print(f"\n{MARK}{json.dumps(asdict(compare(entry, layout)))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
