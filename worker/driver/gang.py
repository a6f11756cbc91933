"""Starts, calls and ends the actors of an attempt in one placement group, and explains a lost worker.

A mesh is a group of workers, one worker an accelerator. All calls of an actor run on one thread, as the current CUDA
device belongs to a thread. When a worker died its crash report is read on its node for the message.
Owns where actors run and how they end; must not know what they compute.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from worker.actor.device import WorkerAddress
from worker.contract.failures import (
    AttemptFailure,
    CrashReport,
    as_failure,
    first_cause,
    read_crash_report,
    remove_crash_report,
)
from worker.contract.job import placement_group_name
from worker.contract.reasons import Reason

log = logging.getLogger(__name__)

_CRASH_REPORT_LIMIT_S = 10.0


def with_crash_report(failure: AttemptFailure, address: WorkerAddress) -> AttemptFailure:
    """`failure`, of the worker at `address`, with what its process left; as it is where nothing can be read."""
    try:
        strategy = NodeAffinitySchedulingStrategy(address.node_id, soft=False)
        ref = _read_crash_report.options(num_cpus=0, scheduling_strategy=strategy).remote(address.process_id)
        found = ray.get(ref, timeout=_CRASH_REPORT_LIMIT_S)
    except Exception as error:  # the node may be gone as well
        log.debug("no last words of %s: %s", address, error)
        return failure
    return failure if found is None else add_crash_report(failure, found)


def add_crash_report(failure: AttemptFailure, found: CrashReport) -> AttemptFailure:
    """`failure` with the action and the native error of a process that left `found`."""
    where = f" in {found.action}" if found.action else ""
    if found.signal is None:
        message = f"{failure.message}; it was{where}" if where else failure.message
        return AttemptFailure(failure.reason, message, failure.details)
    return AttemptFailure(
        failure.reason,
        f"{failure.message}; its process died in native code ({found.signal}){where}: an operator of torch or of "
        "another library that the model calls crashed, which is no error that Python sees; the log has the Python "
        "stack, whose first lines are the call",
        f"{failure.details}\n{found.stack}".strip(),
    )


@ray.remote(max_retries=0)
def _read_crash_report(process_id: int) -> CrashReport | None:
    return read_crash_report(process_id)


CPU_RESOURCE = "slotline_worker"
POLL_S = 0.25
KILL_GRACE_S = 3.0
CAUSE_GRACE_S = 5.0
_WORKER_LOST_ERRORS = (
    ray.exceptions.RayActorError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
)


@dataclass(frozen=True)
class Mesh:
    """The workers of one mesh, in order."""

    name: str
    workers: tuple[ray.actor.ActorHandle, ...]


class Gang:
    """All meshes of an attempt, of so many workers each; a context that leaves neither actor nor placement group behind."""

    def __init__(
        self,
        *,
        sizes: Sequence[int],
        device: str,
        start_timeout_s: float,
        workers_per_gpu: int = 1,
    ):
        if workers_per_gpu < 1:
            raise ValueError(f"workers_per_gpu is {workers_per_gpu}; a GPU serves 1 worker or more")
        self._names = tuple(f"m{i}" for i in range(len(sizes)))
        self._sizes = tuple(sizes)
        self._device = device
        self._workers_per_gpu = workers_per_gpu
        self._start_timeout_s = start_timeout_s
        self._group: PlacementGroup | None = None
        self.meshes: tuple[Mesh, ...] = ()
        self.addresses: tuple[WorkerAddress, ...] = ()

    @property
    def workers(self) -> list[ray.actor.ActorHandle]:
        """All actors, mesh by mesh: the order of ranks."""
        return [worker for mesh in self.meshes for worker in mesh.workers]

    def start(
        self,
        actor_class: Any,
        make_arguments: Callable[[str, int], dict[str, Any]],
        interrupted: Callable[[], None] | None = None,
    ) -> None:
        """Reserve every accelerator at once, then start one actor on each.

        `make_arguments(mesh, worker)` gives the keyword arguments of the actor's constructor; the
        actor has a method `address()`. `interrupted` is as in `call`. Raises AttemptFailure: ACCELERATORS_TAKEN
        where they are not to be had, START_TIMEOUT where the actors do not come up.
        """
        deadline = time.monotonic() + self._start_timeout_s
        count = sum(self._sizes)
        bundle = {"GPU": self._gpu_share()} if self._device == "cuda" else {CPU_RESOURCE: 1.0}
        name = placement_group_name(
            os.environ.get("SLOTLINE_ATTEMPT_ID", "")
        )  # by which the control plane knows it as its own
        self._group = placement_group([dict(bundle) for _ in range(count)], strategy="PACK", name=name)
        while not self._group.wait(timeout_seconds=POLL_S):
            if interrupted is not None:
                interrupted()
            if time.monotonic() > deadline:
                raise AttemptFailure(
                    Reason.ACCELERATORS_TAKEN,
                    f"the cluster did not offer {count} × {bundle} within {self._start_timeout_s:.0f} s "
                    f"(free now: {_free_resources(next(iter(bundle)))}); ask for fewer meshes or add nodes",
                )
        meshes = []
        bundles = iter(range(count))
        for name, size in zip(self._names, self._sizes, strict=True):
            workers = []
            for w in range(size):
                options: dict[str, Any] = {
                    "num_cpus": 0,
                    "max_restarts": 0,
                    "max_concurrency": 1,  # all calls on one thread: a current CUDA device is a thread's own
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(
                        self._group, placement_group_bundle_index=next(bundles)
                    ),
                }
                if self._device == "cuda":
                    options |= self._gpu_options(name, w)
                else:
                    options["resources"] = {CPU_RESOURCE: 1}
                workers.append(actor_class.options(**options).remote(**make_arguments(name, w)))
            meshes.append(Mesh(name, tuple(workers)))
        self.meshes = tuple(meshes)
        self.addresses = tuple(
            self.call(
                [w.address.remote() for w in self.workers],
                what="start",
                limit_s=max(1.0, deadline - time.monotonic()),
                timeout_reason=Reason.START_TIMEOUT,
                interrupted=interrupted,
            )
        )

    def workers_sharing_memory(self, address: WorkerAddress) -> int:
        """How many workers of the gang have the same memory as the one at `address`, itself included."""
        if self._device == "cuda":
            return self._workers_per_gpu
        return sum(other.node_id == address.node_id for other in self.addresses)

    def call(
        self,
        refs: Sequence[ray.ObjectRef],
        *,
        what: str,
        limit_s: float,
        timeout_reason: Reason = Reason.SLOT_STALLED,
        interrupted: Callable[[], None] | None = None,
    ) -> list[Any]:
        """The results of one call a worker, in order.

        Raises AttemptFailure: with `timeout_reason` naming the workers that did not answer within `limit_s`,
        WORKER_LOST when one died, or what a worker raised. After a first failure the others get
        CAUSE_GRACE_S to say theirs, and the one that explains the rest is raised. `interrupted` is
        called about four times a second and may raise.
        """
        deadline = time.monotonic() + limit_s
        waiting = list(refs)
        failures: list[AttemptFailure] = []
        found: dict[ray.ObjectRef, Any] = {}
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S)
            for ref in done:
                try:
                    found[ref] = ray.get(ref)
                except Exception as error:
                    if not failures:
                        deadline = time.monotonic() + CAUSE_GRACE_S
                    failures.append(self._failure(error, refs.index(ref), what))
            if waiting and interrupted is not None:
                interrupted()
            if waiting and time.monotonic() > deadline:
                if failures:
                    break
                names = ", ".join(self.name(refs.index(ref)) for ref in waiting)
                raise AttemptFailure(timeout_reason, f"{what}: no answer from {names} within {limit_s:.0f} s")
        if failures:
            for failure in failures if len(failures) > 1 else ():
                log.error("who waited for whom: %s", failure.message)
            raise first_cause(failures)
        return [found[ref] for ref in refs]

    def stop(self) -> None:
        """End every actor, also a stopped (SIGSTOP) one, and give the accelerators back."""
        for worker in self.workers:
            try:
                ray.kill(worker, no_restart=True)
            except Exception as error:
                log.debug("kill: %s", error)
        self._end_processes()
        self.meshes = ()
        if self._group is not None:
            group, self._group = self._group, None
            remove_placement_group(group)

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _failure(self, error: Exception, index: int, what: str) -> AttemptFailure:
        """Why call `index` of those made together failed; of a worker that is gone, with what it was doing."""
        lost = getattr(error, "actor_id", None)  # the calls may be those of some workers only
        if lost is not None:
            ids = [worker._actor_id.hex() for worker in self.workers]
            index = ids.index(lost) if lost in ids else index
        failure = call_failure(error, self.name(index), what)
        if failure.reason is Reason.WORKER_LOST and index < len(self.addresses):
            return with_crash_report(failure, self.addresses[index])
        return failure

    def _gpu_share(self) -> float:
        return int(10_000 / self._workers_per_gpu) / 10_000  # as fine as Ray counts

    def _gpu_options(self, mesh: str, worker: int) -> dict[str, Any]:
        options: dict[str, Any] = {"num_gpus": self._gpu_share()}
        if self._workers_per_gpu > 1:
            # NCCL takes two ranks on one GPU of one host for a mistake: each says that it is a host of its own
            options["runtime_env"] = {"env_vars": {"NCCL_HOSTID": f"slotline-{mesh}-{worker}"}}
        return options

    def name(self, index: int) -> str:
        """The worker at `index` of `workers`, for messages."""
        left = index
        for mesh, size in zip(self._names, self._sizes, strict=True):
            if left < size:
                return f"worker {left} of mesh {mesh}"
            left -= size
        return f"call {index}"

    def _end_processes(self) -> None:
        """Ray asks a process to end; one that is stopped never answers, so it is killed on its node."""
        by_node: dict[str, list[int]] = {}
        for address in self.addresses:
            by_node.setdefault(address.node_id, []).append(address.process_id)
        self.addresses = ()
        refs = [
            _kill_processes.options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
            ).remote(ids, KILL_GRACE_S)
            for node_id, ids in by_node.items()
            if node_id in _alive_node_ids()
        ]
        if not refs:
            return
        done, late = ray.wait(refs, num_returns=len(refs), timeout=KILL_GRACE_S + 10.0)
        for ref in late:
            ray.cancel(ref, force=True)
        for ref in done:
            try:
                if killed := ray.get(ref):
                    log.warning("worker processes %s did not end when asked and were killed", killed)
            except Exception as error:
                log.warning("could not look for left-over worker processes: %s", error)


def call_failure(error: Exception, worker: str, what: str) -> AttemptFailure:
    """Why a call of an actor failed: what it raised, or that `worker` is lost while it did `what`."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, AttemptFailure) else as_failure(cause, Reason.INTERNAL)
    if isinstance(error, ray.exceptions.GetTimeoutError):
        return AttemptFailure(Reason.SLOT_STALLED, f"{what}: no answer from {worker}")
    if isinstance(error, _WORKER_LOST_ERRORS):
        return AttemptFailure(Reason.WORKER_LOST, f"{what}: {worker} is gone: {_one_line(error)}")
    return as_failure(error, Reason.INTERNAL)


@ray.remote(max_retries=0)
def _kill_processes(process_ids: Sequence[int], grace_s: float) -> list[int]:
    """Wait until the processes of this node's workers are gone; kill and name those that stay."""
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(_is_ray_worker(p) for p in process_ids):
        time.sleep(0.05)
    left = [p for p in process_ids if _is_ray_worker(p)]
    for process_id in left:
        os.kill(process_id, signal.SIGKILL)
    for process_id in process_ids:
        remove_crash_report(process_id)
    return left


def _is_ray_worker(process_id: int) -> bool:
    """Whether this is still a Ray worker's process (ids are reused, so its command line is looked at)."""
    try:
        with open(f"/proc/{process_id}/cmdline", "rb") as file:
            command = file.read()
    except OSError:
        return False
    return b"ray::" in command or b"default_worker.py" in command


def _alive_node_ids() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _free_resources(resource: str) -> str:
    return f"{ray.available_resources().get(resource, 0.0):g} of {ray.cluster_resources().get(resource, 0.0):g} {resource}"


def _one_line(error: BaseException) -> str:
    text = str(error).strip()
    return " ".join(text.split())[:500]
