"""A gang of workers in this process for the driver's own Planner: every call is made, none of them by Ray."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tests.worker.driver.fake_gang import FakeGang
from tests.worker.workers import plan_of
from worker.actor.prepared import PreparedWorker
from worker.contract.job import Job
from worker.contract.planned import PlannedJob
from worker.driver.benchmarks import GangMeasurements
from worker.driver.limits import Limits
from worker.driver.planning import Planner
from worker.machine.node import WorkerAddress
from worker.verify.local_gang import prepare_workers

HERE = "127.0.0.1"
TOGETHER = ("measure_collectives", "measure_links", "measure_engine")
"""Calls in which workers meet; others come one after the other: torch's modes and seeds are those of a process."""
_LIMIT_S = 300.0


class _Ref:
    """A call that is made once, by whoever needs it first."""

    def __init__(self, name: str, call: Callable[[], Any]):
        self.meets = name in TOGETHER
        self._call, self._found = call, None

    def get(self) -> Any:
        if self._found is None:
            self._found = (self._call(),)
        return self._found[0]


class _Remote:
    """A worker as the driver sees it."""

    def __init__(self, worker: PreparedWorker):
        self._worker = worker
        self.call = SimpleNamespace(remote=self._call)

    def _call(self, name: str, *given: Any, **named: Any) -> _Ref:
        if name == "prepare":  # it is
            return _Ref(name, lambda: None)
        method = getattr(self._worker, name)
        return _Ref(name, lambda: method(*map(_value, given), **{k: _value(v) for k, v in named.items()}))


class PlanningGang(FakeGang):
    """What a Planner asks of a gang."""

    def __init__(self, job: Job):
        self.own = prepare_workers(job)
        self.workers = [_Remote(worker) for worker in self.own]
        self.addresses = [WorkerAddress(w.mesh, w.index, HERE, "node 0", 1, "cpu") for w in self.own]
        names = Counter(worker.mesh for worker in self.own)
        self.meshes = [
            SimpleNamespace(
                name=name,
                workers=[r for r, w in zip(self.workers, self.own, strict=True) if w.mesh == name],
            )
            for name in names
        ]

    def workers_sharing_memory(self, address: WorkerAddress) -> int:
        return len(self.workers)

    def wait(self, refs: Sequence[_Ref], **_: Any) -> list[Any]:
        """What the calls answer; raises what the first raised."""
        if not any(ref.meets for ref in refs):
            return [ref.get() for ref in refs]
        found: list[Any] = [None] * len(refs)
        errors: list[BaseException] = []

        def make(index: int, ref: _Ref) -> None:
            try:
                found[index] = ref.get()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=make, args=item, daemon=True) for item in enumerate(refs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_LIMIT_S)
        assert not any(thread.is_alive() for thread in threads), "a call of the driver has no end"
        if errors:
            raise errors[0]
        return found


class _Control:
    """A control plane that remembers nothing, and plans by what it is asked; `changed` may change the request."""

    def __init__(self, job: dict[str, Any], changed: Callable[[dict[str, Any]], Any]):
        self._job, self._changed = job, changed
        self.request: dict[str, Any] = {}
        self.answer: dict[str, Any] = {}

    def cached_profile(self, key: str) -> None:
        return None

    def store_profile(self, key: str, profile: Any) -> None:
        pass

    def plan(self, request: dict[str, Any]) -> dict[str, Any]:
        self._changed(request)
        self.request, self.answer = request, plan_of(self._job, request)
        return self.answer


def planned_by_the_driver(
    monkeypatch: Any, job: dict[str, Any], changed: Callable[[dict[str, Any]], Any] = lambda request: None
) -> tuple[list[PreparedWorker], PlannedJob, _Control]:
    """The workers of a job, its plan, and what was asked for and answered: all of the driver's way to it, measured here."""
    monkeypatch.setattr("worker.driver.benchmarks.own_node_address", lambda: HERE)
    gang, control = PlanningGang(Job.from_json(job)), _Control(job, changed)
    read, reporter = Job.from_json(job), SimpleNamespace(event=lambda *_: None)
    measurements = GangMeasurements(
        read, gang, control=control, reporter=reporter, device="cpu", limits=Limits()
    )
    planner = Planner(read, measurements, control=control, reporter=reporter)
    return gang.own, planner.plan(), control


def _value(given: Any) -> Any:
    return given.get() if isinstance(given, _Ref) else given
