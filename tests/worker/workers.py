"""The workers of a job in this process, a thread each, over gloo: what the driver does, without Ray."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from service.scheduler.job.forwards import plan_forwards
from service.scheduler.job.plan_job import JobCosts, job_plan_json, plan_job
from worker.contract.job import Job
from worker.contract.planned import parse_planned_job
from worker.data.sampler import BatchSampler
from worker.driver.evaluation import evaluation_programs, evaluation_spec, mesh_parallelisms
from worker.driver.step_record import EvaluationResult, combine_batches
from worker.examples.text import ByteWindows
from worker.verify.local_gang import LocalGang, make_workers


class NanInStep(torch.nn.Module):
    """Cross entropy, but not a number for all microbatches of one step."""

    def __init__(self, step: int, microbatches: int):
        super().__init__()
        self._calls, self._step, self._microbatches = 0, step, microbatches

    def forward(self, output, target):
        self._calls += 1
        bad = (self._calls - 1) // self._microbatches == self._step - 1
        return torch.nn.functional.cross_entropy(output, target) * (float("nan") if bad else 1.0)


class TooLargeAfter(torch.nn.Module):
    """Cross entropy, but after so many calls it wants more memory than any machine has."""

    def __init__(self, calls: int):
        super().__init__()
        self._left = calls

    def forward(self, output, target):
        self._left -= 1
        if self._left < 0:
            torch.empty(1 << 50)
        return torch.nn.functional.cross_entropy(output, target)


class DiesAfter(torch.nn.Module):
    """Cross entropy, but after so many calls its process dies in native code."""

    def __init__(self, calls: int):
        super().__init__()
        self._left = calls

    def forward(self, output, target):
        self._left -= 1
        if self._left < 0:
            ctypes.string_at(0)
        return torch.nn.functional.cross_entropy(output, target)


class RaisesAt(ByteWindows):
    """Bytes, but the samples of one step cannot be read."""

    def __init__(self, step: int, batch: int, seed: int, **arguments: Any):
        super().__init__(**arguments)
        self._broken = set(BatchSampler(len(self), batch, 1, seed=seed).indices(step, 0))

    def __getitem__(self, index: int) -> Any:
        if index in self._broken:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


class Watched(ByteWindows):
    """Bytes, and the names of the threads that read them."""

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.readers: list[str] = []

    def __getitem__(self, index: int) -> Any:
        self.readers.append(threading.current_thread().name)
        return super().__getitem__(index)


class SeedsAndDraws(ByteWindows):
    """Bytes of which some are masked at random, by torch's own generator, which it seeds for each sample."""

    def __getitem__(self, index: int) -> Any:
        tokens, target = super().__getitem__(index)
        torch.manual_seed(index)
        masks = [torch.rand(tokens.shape) < 0.3 for _ in range(100)]
        return torch.where(masks[-1], 0, tokens), target


def plan_of(job: dict[str, Any], costs: dict[str, Any], budget_s: float = 0.2) -> dict[str, Any]:
    """What the control plane answers to a driver's request for a plan."""
    read = Job.from_json(job)
    return job_plan_json(plan_job(read, JobCosts.from_json(costs, read), budget_s=budget_s))


def mesh_profiles(workers: list[Any], job: Job, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """What a driver sends besides, of meshes of unlike sizes: the layers as each measures them (`measured`: the first)."""
    if not job.heterogeneous:
        return {}
    kinds = {f"m{mesh}": kind for mesh, kind in enumerate(zip(job.mesh_sizes, job.tensors, strict=True))}
    ones = {kinds[worker.mesh]: worker for worker in reversed(workers)}
    found = []
    for of in measured:
        for (size, tensor), one in ones.items():
            count, profile = of["microbatches"], of["profile"]
            if one is not workers[0]:
                workers[0].trace(count)
                one.take_graph(workers[0].graph(size // tensor), count)
                profile = one.profile(count)
            found.append({"microbatches": count, "workers": size, "tensor": tensor, "profile": profile})
    return {"mesh_profiles": found}


_measured: dict[str, dict[str, Any]] = {}


def _update_costs(first: Any, of: str) -> dict[str, Any]:
    """What a worker measures of its optimizer: once a process for each (`of`), since it knows nothing of the model."""
    if of not in _measured:
        _measured[of] = first.update_costs().to_json()
    return _measured[of]


def forward_plan_of(spec: dict[str, Any]) -> dict[str, Any]:
    """What the control plane answers to a driver's request for the plan of an evaluation."""
    return json.loads(json.dumps(plan_forwards(spec).to_json()))


def placed(job: Job, nodes: Mapping[str, str] | None) -> dict[str, Any]:
    """What a driver sends of its workers, all workers of a mesh on the node that `nodes` names; nothing without."""
    workers = [(f"m{mesh}", index) for mesh, size in enumerate(job.mesh_sizes) for index in range(size)]
    found = [{"mesh": mesh, "worker": index, "node": (nodes or {}).get(mesh)} for mesh, index in workers]
    return {"workers": found} if nodes else {}


class Workers(LocalGang):
    """All workers of `job`, planned and loaded; closes their engines at the end. `nodes` are where a plan takes its meshes
    to be (all on one), though they run here; with `pairs` it is stripped of its reshardings, as a plan of before."""

    def __init__(self, job: dict[str, Any], nodes: Mapping[str, str] | None = None, *, pairs: bool = False):
        self._read = read = Job.from_json(job)
        self._nodes = nodes or {}
        workers = make_workers(read)
        for worker in workers:  # one after the other: torch seeds for a whole process
            counts = list(worker.prepare(read.mesh_sizes[int(worker.mesh[1:])]))
        first = workers[0]
        profiles = [{"microbatches": count, "profile": first.profile(count)} for count in counts]
        costs = {
            "profiles": profiles,
            **mesh_profiles(workers, read, profiles),
            "network": {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-5},
            "optimizer": asdict(first.optimizer_state()),
            "update": _update_costs(first, json.dumps([job["optimizer"], job["training"]], sort_keys=True)),
            **placed(read, nodes),
        }
        self.planned = plan_of(job, costs)
        if pairs:
            del self.planned["reshardings"]
        evaluation = self._evaluation_programs if read.evaluation is not None else None
        super().__init__(
            workers, parse_planned_job(self.planned), planned_bytes=1234567, evaluation=evaluation
        )

    def _evaluation_programs(self, edges):
        planned = parse_planned_job(self.planned)
        shares = mesh_parallelisms(
            self._read, ((w.mesh, self._nodes.get(w.mesh, "here")) for w in self.workers)
        )
        self.evaluation_plan = forward_plan_of(evaluation_spec(planned, edges, shares))
        return evaluation_programs(planned, self.evaluation_plan)

    def evaluate(self) -> EvaluationResult:
        """One evaluation: what the driver makes of what the workers measured."""
        size = self.workers[0].evaluation_size()
        return combine_batches(
            [
                result
                for batch in range(size.batches)
                for result in self.call(lambda worker, batch=batch: worker.evaluate(batch))
            ]
        )

    def losses(self, steps: range) -> list[float]:
        """The mean loss of each step, over its microbatches and workers."""
        found = []
        for number in steps:
            losses = [loss for result in self.step(number) for loss in result.losses]
            found.append(sum(losses) / len(losses))
        return found
