"""The workers of a job in this process, a thread each, over gloo: what the driver does, without Ray."""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from service.jobs.drivers import make_placement
from service.scheduler.job.forwards import plan_forwards
from service.scheduler.job.plan_job import JobCosts, job_plan_json, plan_job, plan_steps
from service.schemas.drivers import PlacementRequest
from worker.benchmark.plan_request import MeshKind, plan_request
from worker.contract.costs import EngineCosts, UpdateCosts
from worker.contract.job import Bucket, Job
from worker.contract.planned import parse_planned_job
from worker.contract.profile import LayerProfile, MeshCollectiveCosts, OptimizerState
from worker.data.sampler import BatchSampler
from worker.driver.evaluation import (
    EvaluationResult,
    combine_batches,
    evaluation_programs,
    evaluation_spec,
    mesh_parallelisms,
)
from worker.engine.results import StepResult
from worker.examples.text import ByteWindows
from worker.verify.local_gang import LocalGang, prepare_workers


class NanInStep(torch.nn.Module):
    """Cross entropy, but not a number for all microbatches of one step."""

    def __init__(self, step: int, microbatches: int):
        super().__init__()
        self._calls, self._step, self._microbatches = 0, step, microbatches

    def forward(self, output, target):
        self._calls += 1
        bad = (self._calls - 1) // self._microbatches == self._step - 1
        return torch.nn.functional.cross_entropy(output, target) * (float("nan") if bad else 1.0)


class LeavesCycles(torch.nn.Module):
    """Cross entropy, each call of which leaves a thousand objects that only a search for cycles finds."""

    class Cycle:
        """An object that holds itself."""

        left = 0

        def __init__(self):
            self.itself = self
            type(self).left += 1

        def __del__(self):
            type(self).left -= 1

    def forward(self, output, target):
        for _ in range(1000):
            self.Cycle()
        return torch.nn.functional.cross_entropy(output, target)


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


class FaultAt(torch.nn.Module):
    """Cross entropy, but at its call of this number the accelerator reports a fault."""

    def __init__(self, call: int):
        super().__init__()
        self._left = call

    def forward(self, output, target):
        self._left -= 1
        if self._left == 0:
            raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
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


class Slow(ByteWindows):
    """Bytes that take their time: a step of them is as long as another process needs to look for a plan."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.04)
        return super().__getitem__(index)


class SeedsAndDraws(ByteWindows):
    """Bytes of which some are masked at random, by torch's own generator, which it seeds for each sample."""

    def __getitem__(self, index: int) -> Any:
        tokens, target = super().__getitem__(index)
        torch.manual_seed(index)
        masks = [torch.rand(tokens.shape) < 0.3 for _ in range(100)]
        return torch.where(masks[-1], 0, tokens), target


def plan_of(job: dict[str, Any], costs: dict[str, Any], budget_s: float = 0.05) -> dict[str, Any]:
    """What the control plane answers to a driver's request for a plan."""
    read = Job.from_json(job)
    return job_plan_json(plan_job(read, JobCosts.from_json(costs, read), budget_s=budget_s))


def step_plans_of(
    job: dict[str, Any], costs: dict[str, Any], running: dict[str, Any], steps: Sequence[Sequence[int]]
) -> list[dict[str, Any] | None]:
    """What the control plane answers to a driver's request for the plans of single steps."""
    read = Job.from_json(job)
    return json.loads(json.dumps(plan_steps(read, JobCosts.from_json(costs, read), running, steps)))


_tried: dict[str, OptimizerState] = {}
_updates: dict[str, UpdateCosts] = {}


class PreparedMeasurements:
    """The Measurements (worker/benchmark/plan_request.py) of workers in this process that are prepared. Layers are measured
    by the first worker, of heterogeneous meshes by one of each kind; links are assumed, collectives count as nothing.

    The optimizer is tried and measured once a process for each that jobs have, as it knows nothing of the model. With
    `nodes` all workers of a mesh are on the node that it names, without them nothing is said of nodes.
    """

    def __init__(
        self,
        job: Job,
        workers: Sequence[Any],
        nodes: Mapping[str, str] | None = None,
        *,
        bandwidth_bytes_per_s: float | None = 1e9,
    ):
        self._job, self._workers, self._first = job, workers, workers[0]
        self._nodes, self._bandwidth_bytes_per_s = nodes, bandwidth_bytes_per_s

    def memory_bytes(self) -> dict[str, int]:
        return {}

    def optimizer_state(self) -> OptimizerState:
        of = repr((self._job.optimizer, self._job.resources, self._job.meshes))
        if of not in _tried:
            _tried[of] = self._first.optimizer_state()
        return _tried[of]

    def profile(self, microbatches: int, bucket: Bucket | None = None) -> LayerProfile:
        return LayerProfile.from_json(self._first.profile(microbatches, bucket))

    def smaller_buckets(self) -> Sequence[Bucket]:
        return self._first.smaller_buckets()

    def tells_lengths(self) -> bool:
        return self._first.tells_lengths()

    def leave_out(self, microbatches: int, why: str) -> None:
        raise AssertionError(f"{microbatches} microbatches are left out: {why}")

    def network(self, *, loops: bool, skips: bool) -> dict[str, Any]:
        return {"bandwidth_bytes_per_s": self._bandwidth_bytes_per_s, "latency_s": 1e-5}

    def collectives(self, network: Mapping[str, Any]) -> MeshCollectiveCosts:
        return MeshCollectiveCosts()

    def update_costs(self) -> UpdateCosts:
        of = repr((self._job.optimizer, self._job.training))
        if of not in _updates:
            _updates[of] = self._first.update_costs()
        return _updates[of]

    def engine_costs(self) -> EngineCosts:
        return EngineCosts()

    def mesh_profiles(self, kind: MeshKind, counts: Sequence[int]) -> dict[int, LayerProfile]:
        """Of the graph that the first worker traced for as many rows as a worker of this kind has."""
        kinds = list(zip(self._job.mesh_sizes, self._job.tensors, strict=True))
        one = next(worker for worker in self._workers if kinds[int(worker.mesh[1:])] == kind)
        size, tensor = kind
        measured = {}
        for count in counts:
            if one is not self._first:
                self._first.trace(count)
                one.take_graph(self._first.graph(size // tensor), count)
            measured[count] = LayerProfile.from_json(one.profile(count))
        return measured

    def workers(self) -> list[dict[str, Any]]:
        if not self._nodes:
            return []
        return [
            {"mesh": f"m{mesh}", "worker": index, "node": self._nodes.get(f"m{mesh}")}
            for mesh, size in enumerate(self._job.mesh_sizes)
            for index in range(size)
        ]


def forward_plan_of(spec: dict[str, Any]) -> dict[str, Any]:
    """What the control plane answers to a driver's request for the plan of an evaluation."""
    return json.loads(json.dumps(plan_forwards(spec).to_json()))


def placement_of(request: dict[str, Any]) -> dict[str, Any]:
    """What the control plane answers to a driver's request for a placement, of a job that has no plan yet."""
    return make_placement(PlacementRequest(**request), None).model_dump()


class Workers(LocalGang):
    """All workers of `job`, planned and loaded; closes their engines at the end. `nodes` are where a plan takes its meshes
    to be (all on one), though they run here; with `pairs` it is stripped of its reshardings, as a plan of before. No
    bandwidth: as where no link was measured."""

    def __init__(
        self,
        job: dict[str, Any],
        nodes: Mapping[str, str] | None = None,
        *,
        pairs: bool = False,
        bandwidth_bytes_per_s: float | None = 1e9,
    ):
        self._read = read = Job.from_json(job)
        self._nodes = nodes or {}
        self._prepared = workers = prepare_workers(read)
        measurements = PreparedMeasurements(read, workers, nodes, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
        self._job, self._costs = job, plan_request(read, measurements)
        self.planned = plan_of(job, self._costs)
        if pairs:
            del self.planned["reshardings"]
        evaluation = self._evaluation_programs if read.evaluation is not None else None
        super().__init__(
            workers, parse_planned_job(self.planned), planned_bytes=1234567, evaluation=evaluation
        )

    def _evaluation_programs(self, edges):
        planned = parse_planned_job(self.planned)
        shares = mesh_parallelisms(
            self._read, ((w.mesh, self._nodes.get(w.mesh, "here")) for w in self._prepared)
        )
        self.evaluation_plan = forward_plan_of(evaluation_spec(planned, edges, shares))
        return evaluation_programs(planned, self.evaluation_plan)

    def plan_step(self, number: int) -> dict[str, Any] | None:
        """The answer to a request for a plan of this step, by the buckets of its microbatches; None where the job's own is
        as short."""
        bucket_of = self.workers[0].batches.bucket_numbers(number)
        (found,) = step_plans_of(self._job, self._costs, self.planned, [bucket_of])
        return found and {**self.planned, **found}

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
            found.append(mean_loss(self.step(number)))
        return found


def mean_loss(results: Sequence[StepResult]) -> float:
    """The mean loss of a step, of what its workers tell."""
    losses = [loss for result in results for loss in result.losses]
    return sum(losses) / len(losses)
