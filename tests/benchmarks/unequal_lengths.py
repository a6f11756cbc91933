"""Samples per second of microbatches padded to their own buckets, beside padding all to the longest, and beside packing.

`python -m tests.benchmarks.unequal_lengths`: a GPT in four meshes, 16 microbatches, for log-normal lengths (σ 0.8) and for
the paragraphs of Python's documentation. Packed rows have the longest length, are filled by best fit decreasing over all
documents, and attend within documents only; samples per second are then its documents' tokens per second over the mean
length. All workers are in this process. The three jobs are loaded at once and make their steps in turn, so that what else
the machine does meets all; rates are of medians, and the first losses of each are compared with a loop over the same
documents one by one. Then, by the costs that were measured, the steps as planned for meshes with cores of their own, with
and without rate-limited links: by the job's one plan and by plans for the lengths of each step, with the time of planning
one. `--memory STEPS`: instead a job of that many steps through the whole product, its peak memory beside the plan.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from service.cli.serve import LocalServer
from service.client.client import Client
from service.client.job_spec import zip_folder
from service.orchestrator.ray.local_ray import free_ports
from service.scheduler.job.step_plans import StepPlanner
from service.scheduler.planner import compile_kernels, make_plan
from service.spec.states import JobState
from tests.benchmarks.unequal_models import unequal_models
from tests.benchmarks.unequal_models.unequal_models import LONGEST, PackedTexts, Texts
from tests.worker.workers import Workers, mean_loss, plan_of
from worker.data.sampler import BatchSampler
from worker.examples.gpt import Block, build
from worker.model.rng import seeded

STAGES, MICROBATCHES, ROWS = 4, 16, 4
MODEL = {"layers": 8, "width": 128, "heads": 8, "length": LONGEST}
MEMORY_MODEL = {**MODEL, "layers": 4, "width": 64}
SEED, RATE = 3, 0.01
PLANNED = 200
"""Steps that are planned to time planning."""
CHECKED, WARM = 3, 2
"""Steps whose losses are compared with the plain loop, and steps that are not timed."""
TEXTS = {"log-normal": "log_normal", "documentation": "documentation"}
LINKS = {"links of 1 GB/s": 1e9, "links of 10 MB/s": 1e7}
MODELS = Path(unequal_models.__file__).parent
MEMORY_LIMIT_S = 3600.0


def job(texts: str, buckets: Any, steps: int = 100) -> dict[str, Any]:
    """The job with these buckets."""
    return {
        "model": {"factory": "worker.examples.gpt:build", "args": MODEL},
        "data": {"factory": f"unequal_models:{texts}", "lengths": {"buckets": buckets}},
        "loss": {"factory": "torch.nn:CrossEntropyLoss"},
        "optimizer": {"factory": "torch.optim:SGD", "args": {"lr": RATE}},
        "training": {
            "steps": steps,
            "global_batch": MICROBATCHES * ROWS,
            "microbatches": MICROBATCHES,
            "seed": SEED,
            "loss_reduction": "tokens",
        },
        "pipeline": {"stages": STAGES, "schedule": "auto"},
        "resources": {"meshes": STAGES},
    }


def packed_job(texts: str) -> dict[str, Any]:
    """The same with packed rows, one a microbatch: about as many tokens a step."""
    found = job(texts, [LONGEST])
    found["model"] = {"factory": "unequal_models:PackedGPT", "args": MODEL}
    found["data"] = {"factory": f"unequal_models:packed_{texts}"}
    found["training"]["global_batch"] = MICROBATCHES
    return found


def plain_losses(steps: Iterator[list[Any]]) -> Iterator[float]:
    """The losses of a loop in plain torch over the documents of each step one by one, weighed by tokens."""
    with seeded(SEED):
        model = build(**MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for documents in steps:
        tokens = sum(len(target) for _, target in documents)
        optimizer.zero_grad()
        losses = [
            functional.cross_entropy(model(inputs[None]), target[None], reduction="sum") / tokens
            for inputs, target in documents
        ]
        sum(losses).backward()
        optimizer.step()
        yield sum(loss.item() for loss in losses)


def documents_of(texts: Texts, step: int, packed: PackedTexts | None = None) -> list[Any]:
    """The documents of a step, by the order of samples or of packed rows."""
    batch, samples = (MICROBATCHES * ROWS, len(texts)) if packed is None else (MICROBATCHES, len(packed))
    indices = BatchSampler(samples, batch, 1, seed=SEED).indices(step, 0)
    own = indices if packed is None else [document for row in indices for document in packed.rows[row]]
    return [texts[index] for index in own]


def attention_share() -> float:
    """The share of attention in the time of a layer at the longest length."""
    width, heads = MODEL["width"], MODEL["heads"]
    block, x = Block(width, heads, 0.0), torch.randn(ROWS, LONGEST, width, requires_grad=True)
    parts = torch.randn(ROWS, heads, LONGEST, width // heads, requires_grad=True)

    def seconds(run: Callable[[], torch.Tensor]) -> float:
        taken = []
        for _ in range(12):
            began = time.perf_counter()
            run().sum().backward()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[2:])

    attend = functional.scaled_dot_product_attention
    return seconds(lambda: attend(parts, parts, parts, is_causal=True)) / seconds(lambda: block(x))


@dataclass
class Side:
    """One way of making microbatches: its workers, the documents of its steps, and what was measured."""

    name: str
    run: Workers
    documents: Callable[[int], list[Any]]
    seconds: list[float]
    tokens: int = 0
    computed: int = 0

    def step(self, number: int) -> float:
        """Run a step, timed unless it warms up; its loss."""
        began = time.perf_counter()
        results = self.run.step(number)
        taken = time.perf_counter() - began
        if number > WARM:
            lengths = results[0].lengths
            self.seconds.append(taken)
            self.tokens += sum(len(target) for _, target in self.documents(number))
            self.computed += MICROBATCHES * LONGEST if lengths is None else lengths.padded_tokens
        return mean_loss(results)

    def rate(self, mean_length: float) -> float:
        """Samples per second, by the median step."""
        return self.tokens / len(self.seconds) / mean_length / statistics.median(self.seconds)


def compare(name: str, steps: int) -> None:
    """Print the three sides for these texts, measured and planned."""
    factory = TEXTS[name]
    texts, rows = getattr(unequal_models, factory)(), getattr(unequal_models, f"packed_{factory}")()
    mean_length = statistics.fmean(texts.lengths)
    print(
        f"\n{name}: {len(texts)} samples of {mean_length:.1f} tokens on average, the longest {max(texts.lengths)}; packed: "
        f"{len(rows)} rows, {sum(texts.lengths) / len(rows) / LONGEST:.1%} full"
    )
    jobs = (job(factory, "auto"), job(factory, [LONGEST]), packed_job(factory))
    began = time.perf_counter()
    with Workers(jobs[0]) as own:
        print(
            f"buckets {', '.join(map(str, own.workers[0].batches.buckets))}, prepared and loaded in "
            f"{time.perf_counter() - began:.0f} s"
        )
        with Workers(jobs[1]) as longest, Workers(jobs[2]) as packed:
            sides = (
                Side("own buckets", own, lambda step: documents_of(texts, step), []),
                Side("padded", longest, lambda step: documents_of(texts, step), []),
                Side("packed", packed, lambda step: documents_of(texts, step, rows), []),
            )
            measure(sides, steps, mean_length)
            for links, bandwidth in LINKS.items():
                compare_plans(sides, jobs, links, bandwidth, mean_length, steps)


def measure(sides: tuple[Side, ...], steps: int, mean_length: float) -> None:
    """Print the rates of the sides, whose steps are made in turn, and compare their losses with plain loops."""
    plain = [plain_losses(map(side.documents, range(1, CHECKED + 1))) for side in sides]
    worst = 0.0
    for step in range(1, steps + WARM + 1):
        for side, expected in zip(sides, plain, strict=True):
            loss = side.step(step)
            if step <= CHECKED:
                wanted = next(expected)
                worst = max(worst, abs(loss - wanted) / wanted)
                assert worst <= 1e-4, (side.name, step, loss, wanted)
    print(
        f"measured over {steps} steps each; the first {CHECKED} losses are the plain loop's within {worst:.0e}"
    )
    ours = sides[0].rate(mean_length)
    for side in sides:
        rate = side.rate(mean_length)
        print(
            f"  {side.name:>11}: {rate:7.1f} samples/s, {1e3 * statistics.median(side.seconds):6.0f} ms a step, padding "
            f"{1 - side.tokens / side.computed:5.1%}; own buckets {ours / rate:.2f} times as many"
        )


def compare_plans(
    sides: tuple[Side, ...],
    jobs: tuple[dict[str, Any], ...],
    links: str,
    bandwidth: float,
    mean_length: float,
    steps: int,
) -> None:
    """Print what the plans of the sides say for meshes with cores of their own, by the costs that were measured."""
    answers = []
    for side, spec in zip(sides, jobs, strict=True):
        costs = dict(side.run._costs)
        costs["network"] = {**costs["network"], "bandwidth_bytes_per_s": bandwidth}
        answers.append(plan_of(spec, costs))
    planner, batches = StepPlanner.from_json(answers[0]["step_planner"]), sides[0].run.workers[0].batches
    by_job_s, by_own_s, differs = [], [], 0
    for step in range(1, steps + 1):
        bucket_of = batches.bucket_numbers(step)
        by_job_s.append(planner.makespan_by_job_plan(planner.spec_of(bucket_of)))
        found = planner.plan(bucket_of)
        by_own_s.append(by_job_s[-1] if found is None else found[1].programs_makespan_s)
        differs += found is not None
    samples = MICROBATCHES * ROWS
    rates = {
        "own plans": samples / statistics.fmean(by_own_s),
        "job's plan": samples / statistics.fmean(by_job_s),
        "padded": samples / answers[1]["plan"]["makespan_s"],
        "packed": sides[2].tokens / len(sides[2].seconds) / mean_length / answers[2]["plan"]["makespan_s"],
    }
    print(f"planned, {links}, meshes with cores of their own:")
    for name, rate in rates.items():
        print(f"  {name:>11}: {rate:7.1f} samples/s; own plans {rates['own plans'] / rate:.2f} times as many")
    print(
        f"  {differs} of {steps} steps have a plan of their own, and take {1e3 * statistics.fmean(by_own_s):.0f} ms"
    )
    compare_planning(planner, [batches.bucket_numbers(step) for step in range(1, PLANNED + 1)])


def compare_planning(planner: StepPlanner, steps: list[tuple[int, ...]]) -> None:
    """Print how long planning these steps takes, and how their makespans and peaks compare with plans for which less memory
    is looked for in any case."""
    taken, makespans, above = {"wall": [], "CPU": []}, [], 0
    for bucket_of in steps:
        began, began_cpu = time.perf_counter(), time.thread_time()
        found = planner.plan(bucket_of)
        taken["wall"].append(time.perf_counter() - began)
        taken["CPU"].append(time.thread_time() - began_cpu)
        if found is not None:
            saving = make_plan(found[0], budget_s=0.0)
            makespans.append(found[1].programs_makespan_s / saving.programs_makespan_s)
            peaks = [mesh.peak_memory_bytes for mesh in found[1].meshes]
            above += any(peak > most for peak, most in zip(peaks, planner.job_plan_bytes, strict=True))
    for clock, seconds in taken.items():
        ordered = sorted(seconds)
        print(
            f"  planning a step, {clock} time over {len(steps)}: median {1e3 * statistics.median(ordered):.0f} ms, p99 "
            f"{1e3 * ordered[int(0.99 * (len(ordered) - 1))]:.0f}, longest {1e3 * ordered[-1]:.0f}"
        )
    if not makespans:
        print("  no step has a plan of its own")
        return
    print(
        f"  makespans beside plans of least memory {min(makespans):.6f} to {max(makespans):.6f}; {above} plans hold more "
        "on a mesh than the job's own"
    )


def compare_memory(steps: int) -> int:
    """Print the peak memory of each mesh over all steps of a job, as the product measures it, beside its plan; 1 where one
    is above."""
    spec = job("log_normal", "auto", steps) | {"name": "unequal-lengths"}
    spec["model"] = {"factory": spec["model"]["factory"], "args": MEMORY_MODEL}
    spec["pipeline"]["replan"] = "off"  # the plan that is read at the end is then that of all steps
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        with (
            LocalServer(directory=directory, port=free_ports(1)[0], log=directory / "serve.log") as server,
            Client(server.url) as client,
        ):
            package = client.upload_package(zip_folder(MODELS)).uri
            job_id = client.submit(spec | {"code": {"working_dir": package, "pip": []}}).id
            deadline = time.monotonic() + MEMORY_LIMIT_S
            while not (view := client.job(job_id)).state.final:
                if time.monotonic() > deadline:
                    raise SystemExit(f"{steps} steps did not end within {MEMORY_LIMIT_S:.0f} s: {view.state}")
                time.sleep(0.5)
            if view.state is not JobState.SUCCEEDED:
                raise SystemExit(f"the job {view.state}: {view.reason}: {view.message}")
            plan, seen = client.plan(job_id).plan, view.attempts[-1].peak_memory_bytes or {}
    above = 0
    for mesh in plan["meshes"]:
        planned, measured = mesh["peak_memory_bytes"], seen.get(mesh["name"], 0)
        above += measured > planned
        print(
            f"{mesh['name']}: planned {planned / 1e6:6.1f} MB, the most of {steps} steps {measured / 1e6:6.1f} MB, "
            f"{measured / planned:.2f} of it"
        )
    return int(above > 0)


def main() -> int:
    """Print the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--texts", nargs="*", choices=list(TEXTS), default=list(TEXTS))
    parser.add_argument("--memory", type=int, metavar="STEPS")
    given = parser.parse_args()
    if given.memory:
        return compare_memory(given.memory)
    sys.path.insert(0, str(MODELS))
    compile_kernels()
    print(
        f"load {os.getloadavg()[0]:.1f}; attention takes {attention_share():.0%} of a layer's time at length {LONGEST}"
    )
    for name in given.texts:
        compare(name, given.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
