"""The workers of a job in this process, a thread each, over gloo: what the driver does, without Ray."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from service.scheduler.job import JobCosts, answer_json, plan_job
from worker.actor import Worker
from worker.data.sampler import BatchSampler
from worker.data.text import ByteWindows
from worker.driver.planned_times import planned_seconds, planned_starts
from worker.engine import SlotLimits
from worker.failure import AttemptFailure, first_cause
from worker.job import Job
from worker.transport import Topology
from worker.transport.rendezvous import host_store


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
    return answer_json(plan_job(read, JobCosts.from_json(costs, read), budget_s=budget_s))


class Workers:
    """All workers of `job`, planned and loaded; closes their engines at the end."""

    def __init__(self, job: dict[str, Any]):
        resources = job["resources"]
        meshes = [f"m{i}" for i in range(resources["meshes"])]
        per_mesh = resources.get("workers_per_mesh", 1)
        self.workers = [
            Worker(job=Job.from_json(job), mesh=mesh, worker=w, device="cpu")
            for mesh in meshes
            for w in range(per_mesh)
        ]
        for worker in self.workers:  # one after the other: torch seeds for a whole process
            counts = list(worker.prepare(per_mesh))
        first, *others = self.workers
        costs = {
            "profiles": [{"microbatches": count, "profile": first.profile(count)} for count in counts],
            "network": {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-5},
            "optimizer": asdict(first.optimizer_state()),
            "update": first.update_costs().to_json(),
        }
        self.planned = planned = plan_of(job, costs)
        spec, plan = planned["spec"], planned["plan"]
        first.trace(spec["microbatches"])
        for worker in others:
            worker.take_graph(first.graph(), spec["microbatches"])
            worker.trace(spec["microbatches"])  # nothing to do, unless the graph could not be sent
        self.store = host_store("127.0.0.1")
        seconds = planned_seconds(plan, [stage["name"] for stage in spec["stages"]])
        starts = planned_starts(plan, [stage["name"] for stage in spec["stages"]])
        mesh_of_stage = [stage["mesh"] for stage in spec["stages"]]
        weights = {
            mesh: first.weights(planned["begins"], [i for i, m in enumerate(mesh_of_stage) if m == mesh])
            for mesh in meshes
        }
        self.call(
            lambda w: w.load(
                weights=None if w is first else weights[w._mesh],
                begins=planned["begins"],
                mesh_of_stage=[stage["mesh"] for stage in spec["stages"]],
                program=plan["programs"][w._mesh],
                recomputed=[i for i, stage in enumerate(plan["stages"]) if stage["recomputed"]],
                planned_s=seconds[w._mesh],
                planned_starts_s=starts[w._mesh],
                topology=Topology(tuple(meshes), per_mesh),
                store=("127.0.0.1", self.store.port),
                host="127.0.0.1",
                connect_s=60.0,
                slot_limits=SlotLimits(factor=20.0, floor_s=60.0),
                planned_bytes=1234567,
                microbatches=spec["microbatches"],
            )
        )

    def step(self, number: int) -> list[dict[str, Any]]:
        return self.call(lambda w: w.run_step(number))

    def losses(self, steps: range) -> list[float]:
        """The mean loss of each step, over its microbatches and workers."""
        found = []
        for number in steps:
            losses = [loss for result in self.step(number) for loss in result["losses"]]
            found.append(sum(losses) / len(losses))
        return found

    def call(self, function: Callable[[Worker], Any]) -> list[Any]:
        """What `function` returns for every worker, all at once; raises the first error."""
        results: list[Any] = [None] * len(self.workers)
        errors: list[BaseException] = []

        def run(index: int, worker: Worker) -> None:
            try:
                results[index] = function(worker)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=item) for item in enumerate(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            known = [error for error in errors if isinstance(error, AttemptFailure)]
            raise first_cause(known) if len(known) == len(errors) else errors[0]
        return results

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.call(lambda w: w.close())
