"""Whole attempts in this process: the driver's own way from its question for the attempt to its last report, with the
actors' own class in threads, over gloo. Only Ray is not there: nothing is placed, and no process can be lost.

What a driver and its workers give each other is pickled on its way, as by Ray.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tests.worker.driver.control_plane import ControlPlane
from worker.actor.actor import Worker
from worker.actor.loaded import LoadedWorker
from worker.contract.tasks import JobCheck
from worker.driver import __main__ as driver
from worker.driver import control_plane_client
from worker.driver.gang import drains, gang, lost_workers
from worker.driver.gang.reservation import Reservation
from worker.driver.limits import Limits
from worker.driver.stopping import RunningCheck
from worker.machine.node import WorkerAddress

HERE = "127.0.0.1"
NODE = "node 0"
TOGETHER = {
    *("measure_links", "measure_collectives", "measure_engine", "load", "restore", "resume"),
    *("warm_up", "run_step", "evaluate", "save"),
}
"""Methods in which workers wait for each other. Of all others one runs at a time: torch's modes and seeds are those of a
process."""
_ONE_AT_A_TIME = threading.RLock()
_END_S = 60.0


def pickled(value: Any) -> Any:
    """A copy of the value, as another process gets it."""
    return ray.cloudpickle.loads(ray.cloudpickle.dumps(value))


class LocalActor:
    """A worker on a thread of its own, which makes its calls one after the other."""

    def __init__(self, worker: Worker, name: str):
        self.worker = worker
        self._actor_id = name.encode()
        self.call = SimpleNamespace(remote=self._call)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"slotline-worker-{name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Close the worker when the calls that were made have ended."""
        self._calls.put(None)

    def join(self) -> None:
        """Wait until it is closed."""
        self._thread.join(_END_S)
        assert not self._thread.is_alive(), f"worker {self._actor_id.decode()} does not end"

    def _call(self, method: str, *given: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        given, named = [_sent(value) for value in given], {key: _sent(value) for key, value in named.items()}

        def make() -> None:
            try:
                arguments = [_received(value) for value in given]
                keywords = {key: _received(value) for key, value in named.items()}
                if method in TOGETHER:
                    result = self.worker.call(method, *arguments, **keywords)
                else:
                    with _ONE_AT_A_TIME:
                        result = self.worker.call(method, *arguments, **keywords)
                future.set_result(pickled(result))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(make)
        return future

    def _run(self) -> None:
        while (make := self._calls.get()) is not None:
            make()
        self.worker.close()


def _sent(value: Any) -> Any:
    return value if isinstance(value, Future) else pickled(value)


def _received(value: Any) -> Any:
    return pickled(value.result()) if isinstance(value, Future) else value


class ThreadRay:
    """What the gang takes of Ray for calls: waiting for them, and their results."""

    exceptions = ray.exceptions

    @staticmethod
    def wait(
        refs: Sequence[Future[Any]], *, num_returns: int, timeout: float
    ) -> tuple[list[Future[Any]], list[Future[Any]]]:
        """Those that are done, and the others, once there are `num_returns` of them or `timeout` seconds are over."""
        until = time.monotonic() + timeout
        while True:
            done = [ref for ref in refs if ref.done()]
            left_s = until - time.monotonic()
            if len(done) >= num_returns or left_s <= 0:
                return done, [ref for ref in refs if ref not in done]
            wait([ref for ref in refs if ref not in done], left_s, return_when=FIRST_COMPLETED)

    @staticmethod
    def get(ref: Future[Any]) -> Any:
        """The result; raises what the call raised, as Ray does."""
        try:
            return ref.result()
        except Exception as error:
            raise ray.exceptions.RayTaskError("call", "", error) from None


class ThreadGang(gang.Gang):
    """The driver's gang, whose workers are threads."""

    def start(
        self,
        actor_class: Any,
        make_arguments: Callable[[str, int], dict[str, Any]],
        earlier: Any = None,
        *,
        spares: int = 0,
    ) -> None:
        meshes, addresses = [], []
        for mesh, size in zip(self._names, self._sizes, strict=True):
            workers = [
                LocalActor(Worker(**pickled(make_arguments(mesh, index))), f"{mesh}/{index}")
                for index in range(size)
            ]
            meshes.append(gang.Mesh(mesh, tuple(workers)))
            addresses += [WorkerAddress(mesh, index, HERE, NODE, 1, "cpu") for index in range(size)]
        self.meshes, self.addresses, self._bundles = tuple(meshes), tuple(addresses), range(len(addresses))
        self._reservation = Reservation(None, len(addresses), None)

    def stop(self) -> None:
        """End all workers: those that wait for one that has failed go on when it is closed."""
        workers, self.meshes, self.addresses = self.workers, (), ()
        for worker in workers:
            worker.end()
        for worker in workers:
            worker.join()


class NoSignals:
    """SIGTERM is the test process's own."""

    requested = False

    def listen(self) -> None:
        pass


def run_attempt(
    spec: dict[str, Any],
    number: int = 1,
    *,
    resume: dict[str, Any] | None = None,
    profiles: dict[str, Any] | None = None,
    control: Callable[..., ControlPlane] = ControlPlane,
    limits: Limits | None = None,
    recorded: Sequence[dict[str, Any]] = (),
    check: JobCheck | RunningCheck = JobCheck(),
    **changes: Any,
) -> tuple[ControlPlane, int]:
    """Run an attempt of a job to its end: (its control plane, the exit code of its driver). `recorded` are steps of
    attempts before it; `check` is what its driver finds where it checks the job, or what answers that."""
    steps = max((step["step"] for step in recorded), default=-1)
    plane = control(
        {
            "job_id": "job",
            "number": number,
            "job": spec,
            "device": "cpu",
            "resume": resume,
            "recorded": {"steps": steps},
            **changes,
        },
        profiles,
    )
    running = check
    if isinstance(check, JobCheck):
        running = SimpleNamespace(answer=lambda wait_s: check, end=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "ray", SimpleNamespace(init=lambda *_, **__: None, shutdown=lambda: None))
        patch.setattr("worker.driver.trainer.Gang", ThreadGang)
        patch.setattr("worker.driver.trainer.start_check", lambda *_, **__: running)
        patch.setattr("worker.driver.trainer.cluster_nodes", list)
        for module in (gang, lost_workers):
            patch.setattr(module, "ray", ThreadRay)
        patch.setattr(LoadedWorker, "collect_between_steps", lambda worker: None)  # for this whole process
        patch.setattr(drains, "draining_nodes", dict)
        patch.setattr(gang, "lost_nodes", lambda _: {})
        for module in ("__main__", "trainer", "benchmarks", "step_loop"):
            patch.setattr(f"worker.driver.{module}.own_node_address", lambda: HERE)
        client = control_plane_client.ControlPlaneClient(plane.url, f"job-{number}", "secret")
        try:
            attempt = driver.attempt_from(client.attempt(), limits or Limits(linger_s=0.0))
            return plane, driver.run_to_end(attempt, client, NoSignals(), protocol=None).code
        finally:
            client.close()
            plane.close()
