"""Places, starts, calls and ends the actors of an attempt in one placement group, and explains a lost worker.

Each worker has a bundle of the group, pinned to the node that the placement has for it.
A mesh is a group of workers, one worker an accelerator. All calls of an actor run on one thread, as the current CUDA
device belongs to a thread. The phase of a call sets its time limit, the reason of a timeout and what may interrupt it.
When a worker died its crash report is read on its node for the message.
Owns where actors run and how they end; must not know what they compute.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from types import MappingProxyType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from worker.contract.failures import (
    AttemptFailure,
    CrashReport,
    as_failure,
    first_cause,
    read_crash_report,
    remove_crash_report,
)
from worker.contract.job import gpu_share, placement_group_name
from worker.contract.reasons import Reason
from worker.driver.limits import Limits
from worker.driver.stopping import Interruption
from worker.machine.node import (
    ClusterNode,
    WorkerAddress,
    cluster_nodes,
    draining_nodes,
    end_mps_clients,
    lost_nodes,
    offered_nodes,
    own_node_id,
    spare_nodes,
)

log = logging.getLogger(__name__)

CPU_RESOURCE = "slotline_worker"
POLL_S = 0.25
DRAIN_POLL_S = 2.0
RESERVE_S = 20.0
"""After this time without its accelerators a placement is made anew: what seemed free was taken."""
_PLACE_AGAIN_S = 1.0
_NODE_ID_LABEL = "ray.io/node-id"
_SPARE = "spare"
"""In place of the mesh of a worker that has none."""
KILL_GRACE_S = 3.0
CAUSE_GRACE_S = 5.0
START_OVER_S = 5.0
"""For the workers that are left, behind the loss of others, to be as new."""
TAKE_PLACE_S = 2.0
"""For a spare to take the place of a worker."""
LOSS_GRACE_S = 0.5
"""Behind the loss of a worker, which explains what the others raise."""
_SILENT_NAMED = 4
"""The workers that a message names."""
_CRASH_REPORT_LIMIT_S = (
    30.0  # of all together, on nodes that answer: a process of Ray may have to start first
)
_MAY_FOLLOW_FROM_A_LOST_NODE = (
    Reason.WORKER_LOST,
    Reason.SLOT_STALLED,
    Reason.START_TIMEOUT,
    Reason.INTERNAL,
)
_WORKER_LOST_ERRORS = (
    ray.exceptions.RayActorError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
)


class Phase(Enum):
    """A phase of an attempt in which workers are called."""

    START = "start"
    PREPARE = "prepare"
    """Build, trace, profile, plan and load."""
    BENCHMARK = "benchmark"
    """Workers connect to each other and measure."""
    CHECK = "check"
    """Comparisons and dry runs between loading and the first step."""
    SETUP = "setup"
    """A value handed over or looked up; the worker computes nothing."""
    STEP = "step"
    CHECKPOINT = "checkpoint"

    @property
    def timeout_reason(self) -> Reason:
        """The reason of an attempt that ends because a worker did not answer in time."""
        starting = (Phase.START, Phase.PREPARE, Phase.BENCHMARK)
        return Reason.START_TIMEOUT if self in starting else Reason.SLOT_STALLED

    @property
    def stops_at_once(self) -> bool:
        """True where a graceful stop interrupts a call; steps and checkpoints are finished first."""
        return self in (Phase.START, Phase.PREPARE, Phase.BENCHMARK, Phase.CHECK)

    def limit_s(self, limits: Limits, planned_step_s: float) -> float:
        """The seconds that a call may take."""
        if self is Phase.STEP:
            return limits.step_s(planned_step_s)
        return {
            Phase.START: limits.start_s,
            Phase.PREPARE: limits.prepare_s,
            Phase.BENCHMARK: 2 * limits.connect_s,
            Phase.CHECK: limits.prepare_s,
            Phase.SETUP: limits.start_s,
            Phase.CHECKPOINT: limits.checkpoint_s,
        }[self]


class PerWorker:
    """An argument of a call of several workers with a value of its own for each, in the order of the workers."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = tuple(values)


@dataclass(frozen=True)
class Mesh:
    """The workers of one mesh, in order."""

    name: str
    workers: tuple[ray.actor.ActorHandle, ...]


def _tell_nobody(_: str) -> None:
    """Tell nobody of a lost worker: the others have not met yet, or are gone."""


@dataclass(frozen=True)
class _Spare:
    """A process that waits on an accelerator to take the place of a worker; its address and the check of its accelerator
    are there once it has come up."""

    worker: ray.actor.ActorHandle
    address: ray.ObjectRef
    checked: ray.ObjectRef

    def come_up(self) -> WorkerAddress | None:
        """Its address; None where it has none yet, is gone, or has an accelerator that no job can trust."""
        try:
            address, _ = ray.get([self.address, self.checked], timeout=0)
            return address
        except ray.exceptions.GetTimeoutError:
            return None
        except Exception as error:
            log.info("a spare has not come up: %s", _one_line(error))
            return None


@dataclass(frozen=True)
class _Placed:
    """The places of a gang in a placement group of so many accelerators: the node (None: as Ray has them), the bundle and,
    where there is one already, the worker of each, and the spares by their bundles."""

    group: PlacementGroup
    accelerators: int
    node_ids: Sequence[str] | None
    bundles: Sequence[int]
    workers: Mapping[int, ray.actor.ActorHandle] = field(default_factory=dict)
    spares: Mapping[int, _Spare] = field(default_factory=dict)


class DrainWatch:
    """The nodes that Ray drains, by id, each with the Unix time of its end; `report` is called when they have changed."""

    def __init__(self, report: Callable[[Mapping[str, float]], None]) -> None:
        self.nodes: Mapping[str, float] = {}
        self._report = report
        self._asked_at_s = -math.inf
        self._thread: threading.Thread | None = None

    def read(self) -> None:
        """Ask Ray now; as long as its head is away this does not return."""
        try:
            nodes = draining_nodes()
        except Exception as error:
            log.debug("Ray does not say which nodes it drains: %s", error)
            return
        if nodes != self.nodes:
            self.nodes = nodes
            self._report(nodes)

    def poll(self) -> None:
        """Have a thread of its own ask, every DRAIN_POLL_S at most: training goes on while the head is away."""
        asks = self._thread is not None and self._thread.is_alive()
        if asks or time.monotonic() - self._asked_at_s < DRAIN_POLL_S:
            return
        self._asked_at_s = time.monotonic()
        self._thread = threading.Thread(target=self.read, name="slotline-drains", daemon=True)
        self._thread.start()


Placer = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any] | None]
"""From JSON of the offered nodes to `workers`, the node id of each worker by mesh, or why they do not fit: `refused`, and
`final` where waiting is of no use. None where Ray is to place them."""


class Gang:
    """All meshes of an attempt, with their numbers of workers (`sizes`); a context that leaves neither actor nor placement
    group behind.

    `interpreter` are the words of a shell that run workers on CPU; None: those that Ray takes.
    """

    def __init__(
        self,
        *,
        sizes: Sequence[int],
        device: str,
        limits: Limits,
        interruption: Interruption,
        workers_per_gpu: int = 1,
        place: Placer = lambda nodes: None,
        report_draining: Callable[[Mapping[str, float]], None] = lambda nodes: None,
        interpreter: str | None = None,
    ):
        if workers_per_gpu < 1:
            raise ValueError(f"workers_per_gpu is {workers_per_gpu}; a GPU serves 1 worker or more")
        self._names = tuple(f"m{i}" for i in range(len(sizes)))
        self._sizes = tuple(sizes)
        self._device = device
        self._workers_per_gpu = workers_per_gpu
        self._limits, self._interruption, self._place = limits, interruption, place
        self._drains = DrainWatch(report_draining)
        self._interpreter = interpreter
        self._group: PlacementGroup | None = None
        self._accelerators = sum(self._sizes)
        self._bundles: Sequence[int] = ()
        self._spares: dict[int, _Spare] = {}
        self._planned_step_s = 0.0
        self.meshes: tuple[Mesh, ...] = ()
        self.addresses: tuple[WorkerAddress, ...] = ()
        self._lost_nodes: set[str] = set()
        self._node_names: Mapping[str, str] = {}
        self._starting_over: list[ray.ObjectRef] = []
        self.announce_loss: Callable[[str], None] = _tell_nobody
        """Tells the workers, which wait for each other, who of them is lost; held as long as they may wait."""
        self.taken_over: tuple[ray.actor.ActorHandle, ...] = ()
        """The workers that were of an earlier gang."""
        self.replaced: list[str] = []
        """The lost workers whose places spares have in the next gang, which has those that are left."""

    @property
    def workers(self) -> list[ray.actor.ActorHandle]:
        """All actors, mesh by mesh: the order of ranks."""
        return [worker for mesh in self.meshes for worker in mesh.workers]

    def expect_steps(self, planned_s: float) -> None:
        """Limit calls in Phase.STEP by steps of `planned_s` seconds from now on."""
        self._planned_step_s = planned_s

    def start(
        self,
        actor_class: Any,
        make_arguments: Callable[[str, int], dict[str, Any]],
        earlier: Gang | None = None,
        *,
        spares: int = 0,
    ) -> None:
        """Reserve every accelerator at once, and of `spares` more as many as are free, then start one actor on each but
        these; with the accelerators and the workers of an `earlier` gang that was kept, where these are of use, start only
        the others.

        `make_arguments(mesh, worker)` gives the keyword arguments of the actor's constructor; the
        actor answers `call("address")`. Raises AttemptFailure: ACCELERATORS_TAKEN where they are not to be had,
        PLAN_INFEASIBLE where they never will be, START_TIMEOUT where the actors do not come up.
        """
        limit_s = Phase.START.limit_s(self._limits, self._planned_step_s)
        deadline = time.monotonic() + limit_s
        kept = None if earlier is None else earlier._give_up_workers()
        placed = self._reserve(deadline, limit_s, spares) if kept is None else kept
        self._group, self._accelerators = placed.group, placed.accelerators
        self._bundles, self._spares = placed.bundles, dict(placed.spares)
        self.taken_over = tuple(placed.workers.values())
        workers = []
        for place, ((name, index), bundle) in enumerate(zip(self._places, placed.bundles, strict=True)):
            if (worker := placed.workers.get(place)) is None:
                options = self._actor_options(name, index, bundle)
                worker = actor_class.options(**options).remote(**make_arguments(name, index))
            workers.append(worker)
        rest = iter(workers)
        self.meshes = tuple(
            Mesh(name, tuple(islice(rest, size))) for name, size in zip(self._names, self._sizes, strict=True)
        )
        left_s = max(1.0, deadline - time.monotonic())
        self.addresses = tuple(self._results(self.ask("address"), Phase.START, "start", left_s))
        self._node_names = {node.node_id: node.name for node in cluster_nodes()}
        for index, (address, node_id) in enumerate(zip(self.addresses, placed.node_ids or (), strict=False)):
            if address.node_id != node_id:
                raise AttemptFailure(
                    Reason.INTERNAL,
                    f"Ray started {self.name(index)} on node {address.node_id}; it was placed on {node_id}",
                )

    def start_spares(
        self,
        actor_class: Any,
        make_arguments: Callable[[str, int], dict[str, Any]],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start a process on each accelerator that has none, without waiting for it: where a worker on its node is lost, it
        takes that worker's place in the gang of this driver's next attempt."""
        for bundle in sorted({*range(self._accelerators)} - {*self._bundles, *self._spares}):
            options = self._actor_options(_SPARE, bundle, bundle)
            worker = actor_class.options(**options).remote(**make_arguments(_SPARE, bundle))
            address = worker.call.remote("address")  # before any other call: it takes its device
            self._spares[bundle] = _Spare(worker, address, worker.call.remote("check_accelerator"))
            if environment:
                worker.call.remote("set_environment", environment)
            worker.call.remote("import_code")

    @property
    def _places(self) -> list[tuple[str, int]]:
        """The mesh of each worker, and its number in the mesh."""
        return [(name, i) for name, size in zip(self._names, self._sizes, strict=True) for i in range(size)]

    def _reserve(self, deadline: float, limit_s: float, spares: int) -> _Placed:
        """Wait until the placement group has all its accelerators, with those of so many spares at most.

        A placement is made of what is free on each node now, and made anew while it cannot be had.
        """
        resource, share = (
            ("GPU", gpu_share(self._workers_per_gpu)) if self._device == "cuda" else (CPU_RESOURCE, 1.0)
        )
        bundle = {resource: share}
        # by this name the control plane knows it as its own
        name = placement_group_name(os.environ.get("SLOTLINE_ATTEMPT_ID", ""))
        why = ""
        while True:
            self.raise_if_interrupted(Phase.START)
            free = ray._private.state.available_resources_per_node()
            self._drains.read()
            nodes = offered_nodes(cluster_nodes(), free, resource, share, self._drains.nodes)
            answer = self._place(nodes) or {}
            why = answer.get("refused") or ""
            if why and answer.get("final"):
                raise AttemptFailure(Reason.PLAN_INFEASIBLE, why)
            if not why:
                placed = [node_id for mesh in answer.get("workers") or () for node_id in mesh]
                with_spares = [*placed, *spare_nodes(placed, nodes, spares)]
                number = len(with_spares) if placed else sum(self._sizes) + spares
                self._group = placement_group(
                    [bundle] * number,
                    strategy="PACK",
                    name=name,
                    bundle_label_selector=[{_NODE_ID_LABEL: node_id} for node_id in with_spares] or None,
                )
                until = min(deadline, time.monotonic() + RESERVE_S) if placed else deadline
                if self._is_reserved(until):
                    return _Placed(self._group, number, placed or None, range(sum(self._sizes)))
                self._remove_group()
            if time.monotonic() > deadline:
                raise AttemptFailure(
                    Reason.ACCELERATORS_TAKEN,
                    f"the cluster did not offer {sum(self._sizes)} × {bundle} within {limit_s:.0f} s "
                    f"(free now: {_free_resources(resource)}); ask for fewer meshes or add nodes"
                    + (f"; {why}" if why else ""),
                )
            time.sleep(_PLACE_AGAIN_S)

    def _is_reserved(self, until: float) -> bool:
        """True once the placement group has its accelerators, False if it has not by `until`."""
        while not self._group.wait(timeout_seconds=POLL_S):
            self.raise_if_interrupted(Phase.START)
            if time.monotonic() > until:
                return False
        return True

    def _remove_group(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            remove_placement_group(group)

    def _actor_options(self, mesh: str, worker: int, bundle: int) -> dict[str, Any]:
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_restarts": 0,
            "max_concurrency": 1,  # all calls on one thread: a current CUDA device is a thread's own
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
        }
        if self._device == "cuda":
            return options | self._gpu_options(mesh, worker)
        if self._interpreter is not None:
            options["runtime_env"] = {"py_executable": self._interpreter}
        return options | {"resources": {CPU_RESOURCE: 1}}

    def workers_sharing_memory(self, address: WorkerAddress) -> int:
        """The number of workers of the gang that share the memory of the worker at `address`, itself included."""
        if self._device == "cuda":
            return self._workers_per_gpu
        return sum(other.node_id == address.node_id for other in self.addresses)

    def call(
        self,
        method: str,
        *arguments: Any,
        phase: Phase,
        what: str,
        extra_s: float = 0.0,
        workers: Sequence[ray.actor.ActorHandle] | None = None,
        **named: Any,
    ) -> list[Any]:
        """The results of `method` of every worker (or of `workers`), in order; arguments of `ask`, errors of `wait`."""
        refs = self.ask(method, *arguments, workers=workers, **named)
        return self.wait(refs, phase=phase, what=what, extra_s=extra_s)

    def ask(
        self,
        method: str,
        *arguments: Any,
        workers: Sequence[ray.actor.ActorHandle] | None = None,
        **named: Any,
    ) -> list[ray.ObjectRef]:
        """Call `method` of every worker (or of `workers`) without waiting. A PerWorker among the arguments gives each
        worker its own value."""
        workers = self.workers if workers is None else workers

        def own(value: Any, index: int) -> Any:
            return value.values[index] if isinstance(value, PerWorker) else value

        return [
            worker.call.remote(
                method,
                *(own(value, index) for value in arguments),
                **{name: own(value, index) for name, value in named.items()},
            )
            for index, worker in enumerate(workers)
        ]

    def wait(
        self, refs: Sequence[ray.ObjectRef], *, phase: Phase, what: str, extra_s: float = 0.0
    ) -> list[Any]:
        """The results of one call a worker, in order; `what` names the call in messages, and it may take `extra_s` longer
        than `phase` allows.

        Raises AttemptFailure: with the phase's timeout reason naming the workers that did not answer in time, NODE_LOST
        when a node is gone, WORKER_LOST when a worker died, or what a worker raised. After a first failure the others get
        CAUSE_GRACE_S to report theirs, LOSS_GRACE_S behind a lost worker, and the one that explains the rest is raised.
        Raises what interrupts the phase, which is looked for about four times a second.
        """
        limit_s = phase.limit_s(self._limits, self._planned_step_s) + extra_s
        return self._results(refs, phase, what, limit_s)

    def _results(self, refs: Sequence[ray.ObjectRef], phase: Phase, what: str, limit_s: float) -> list[Any]:
        deadline = time.monotonic() + limit_s
        waiting = list(refs)
        failures: list[tuple[int, AttemptFailure]] = []
        reports = _CrashReports(self.addresses)
        results: dict[ray.ObjectRef, Any] = {}
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S)
            for ref in done:
                try:
                    results[ref] = ray.get(ref)
                except Exception as error:
                    index = self._index(error, refs.index(ref))
                    failure = call_failure(error, self._located_name(index), what)
                    lost = failure.reason is Reason.WORKER_LOST
                    if lost and not failures:
                        self.announce_loss(self._located_name(index))
                        reports.request(index)
                    until = time.monotonic() + (LOSS_GRACE_S if lost else CAUSE_GRACE_S)
                    deadline = min(deadline, until) if failures else until
                    failures.append((index, failure))
            self._drains.poll()  # also where all have answered at once: steps may be short
            if waiting:
                self.raise_if_interrupted(phase)
            if waiting and time.monotonic() > deadline:
                if failures:
                    break
                late = [refs.index(ref) for ref in waiting]
                names = ", ".join(map(self._located_name, late))
                message = f"{what}: no answer from {names} within {limit_s:.0f} s"
                raise self._cause([(late[0], AttemptFailure(phase.timeout_reason, message))], what)
        if failures:
            for _, failure in failures if len(failures) > 1 else ():
                log.error("who waited for whom: %s", failure.message)
            cause = self._cause(failures, what, reports)
            if waiting and cause.reason is Reason.SLOT_STALLED:
                raise self._with_silent_workers(cause, [refs.index(ref) for ref in waiting])
            raise cause
        return [results[ref] for ref in refs]

    def failure(self, error: Exception, index: int, what: str) -> AttemptFailure:
        """The failure that explains the error of a call of worker `index`: of its node, of itself, or what it raised."""
        index = self._index(error, index)
        return self._cause([(index, call_failure(error, self._located_name(index), what))], what)

    def _cause(
        self,
        failures: Sequence[tuple[int, AttemptFailure]],
        what: str,
        reports: _CrashReports | None = None,
    ) -> AttemptFailure:
        """The failure that explains the others: NODE_LOST where a node of the gang is gone, and a lost worker with its
        crash report, of those that were requested or is read now."""
        found = [failure for _, failure in failures]
        if any(failure.reason in _MAY_FOLLOW_FROM_A_LOST_NODE for failure in found):
            lost = lost_nodes(address.node_id for address in self.addresses)
            self._lost_nodes |= set(lost)
            if lost:
                failure = AttemptFailure(Reason.NODE_LOST, f"{what}: {self._lost_text(lost)}")
                failure.nodes = tuple(lost)
                return first_cause([failure, *found])
        if first_cause(found).reason is Reason.WORKER_LOST:
            found = (reports or _CrashReports(self.addresses)).added_to(failures)
        cause = first_cause(found)
        index, _ = failures[found.index(cause)]
        if cause.reason is Reason.ACCELERATOR_FAILED and index < len(self.addresses):
            located = f"{self._located_name(index)}: {cause.message}"
            cause = AttemptFailure(cause.reason, located, cause.details)
            cause.nodes = (self.addresses[index].node_id,)
        return cause

    def _with_silent_workers(self, stall: AttemptFailure, silent: Sequence[int]) -> AttemptFailure:
        """`stall`, which others report, with the workers that said nothing: one that is frozen or hangs is among them."""
        names = ", ".join(map(self._located_name, silent[:_SILENT_NAMED]))
        left = len(silent) - _SILENT_NAMED
        more = f" and {left} more" if left > 0 else ""
        return AttemptFailure(stall.reason, f"{stall.message}; no word from {names}{more}", stall.details)

    def _lost_text(self, lost: Mapping[str, tuple[str, str]]) -> str:
        parts = []
        for node_id, (name, why) in lost.items():
            workers = [self.name(i) for i, address in enumerate(self.addresses) if address.node_id == node_id]
            parts.append(f"node {name} with {', '.join(workers)} is gone: {why}")
        return "; ".join(parts)

    def raise_if_interrupted(self, phase: Phase) -> None:
        """Raise Cancelled, or where a graceful stop interrupts `phase` GracefulStop, when the control plane asked for it."""
        if phase.stops_at_once:
            self._interruption.raise_if_stopping()
        else:
            self._interruption.raise_if_cancelled()

    def stop(self) -> None:
        """End every actor, also a stopped (SIGSTOP) one, and give the accelerators back."""
        self._starting_over = []
        spares, self._spares = self._spares, {}
        self.addresses += tuple(address for spare in spares.values() if (address := spare.come_up()))
        for worker in [*self.workers, *(spare.worker for spare in spares.values())]:
            try:
                ray.kill(worker, no_restart=True)
            except Exception as error:
                log.debug("kill: %s", error)
        self._end_processes()
        self.meshes, self.announce_loss = (), _tell_nobody
        self._remove_group()

    @property
    def kept(self) -> bool:
        """True while the workers that are left wait for the gang of another attempt: `stop` ends them."""
        return bool(self._starting_over)

    def keep_workers(self) -> None:
        """Have the workers that are left start over, for the gang of this driver's next attempt, without waiting for them.
        Nothing where not all of them had come up."""
        if len(self.addresses) == len(self.workers):
            self._starting_over = [worker.start_over.remote() for worker in self.workers]

    def _give_up_workers(self) -> _Placed | None:
        """The workers that have started over, with all accelerators; all else of this gang is ended. None, and everything is
        ended, where one is neither gone nor as new in START_OVER_S, where a node is gone, or where all workers are."""
        refs, self._starting_over = self._starting_over, []
        _, late = ray.wait(refs, num_returns=len(refs), timeout=START_OVER_S) if refs else ([], [])
        workers, lost = dict(enumerate(self.workers)), []
        why = f"{len(late)} of {len(refs)} workers did not start over in {START_OVER_S:g} s" if late else ""
        for index, ref in enumerate(refs if not late else ()):
            try:
                ray.get(ref)
            except _WORKER_LOST_ERRORS:
                lost.append(index)
                del workers[index]
            except Exception as error:
                why = f"{self._located_name(index)} cannot start over: {_one_line(error)}"
        if not why and lost_nodes(address.node_id for address in self.addresses):
            why = "a node is gone"
        if why or not workers:
            log.info("all workers are started anew: %s", why or "none is left")
            self.stop()
            return None
        ended = [self.addresses[place] for place in lost]
        bundles = list(self._bundles)
        for place in lost:
            if (taken := self._take_spare(place, ended)) is not None:
                bundles[place], workers[place] = taken
        node_ids = [address.node_id for address in self.addresses]
        kept = _Placed(self._group, self._accelerators, node_ids, bundles, workers, self._spares)
        self._group, self.meshes, self._spares = None, (), {}
        self.announce_loss = _tell_nobody
        self.addresses = tuple(ended)
        # nobody waits for it: they are gone
        threading.Thread(target=self._end_processes, name="slotline-ended", daemon=True).start()
        return kept

    def _take_spare(self, place: int, ended: list[WorkerAddress]) -> tuple[int, ray.actor.ActorHandle] | None:
        """The bundle and the process of a spare on the node of the lost worker at `place`, which takes that place; None
        where none has come up there. Those that do not answer are `ended`."""
        for bundle, spare in [*self._spares.items()]:
            address = spare.come_up()
            if address is None or address.node_id != self.addresses[place].node_id:
                continue
            del self._spares[bundle]
            try:
                ray.get(spare.worker.take_place.remote(*self._places[place]), timeout=TAKE_PLACE_S)
            except Exception as error:
                log.info(
                    "a spare does not take the place of %s: %s", self._located_name(place), _one_line(error)
                )
                ray.kill(spare.worker, no_restart=True)
                ended.append(address)
                continue
            self.replaced.append(self._located_name(place))
            return bundle, spare.worker
        return None

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.kept:
            self.stop()

    def _index(self, error: Exception, index: int) -> int:
        """The worker that an error of call `index` names, as calls may be of some workers only; else `index`."""
        ids = [worker._actor_id.hex() for worker in self.workers]
        lost = getattr(error, "actor_id", None)
        return ids.index(lost) if lost in ids else index

    def _gpu_options(self, mesh: str, worker: int) -> dict[str, Any]:
        environment: dict[str, Any] = {}
        if self._workers_per_gpu > 1:
            # NCCL takes two ranks on one GPU of one host for a mistake: each says that it is a host of its own
            environment["env_vars"] = {"NCCL_HOSTID": f"slotline-{mesh}-{worker}"}
        if self._interpreter is not None:  # no process that uses a GPU is forked, as the driver may be
            environment["py_executable"] = sys.executable
        options: dict[str, Any] = {"num_gpus": gpu_share(self._workers_per_gpu)}
        return options | ({"runtime_env": environment} if environment else {})

    def name(self, index: int) -> str:
        """The worker at `index` of `workers`, for messages."""
        if index >= len(self._places):
            return f"call {index}"
        mesh, worker = self._places[index]
        return f"worker {worker} of mesh {mesh}"

    def _located_name(self, index: int) -> str:
        """The worker with the name of its node, once it has one."""
        if index >= len(self.addresses):
            return self.name(index)
        node_id = self.addresses[index].node_id
        return f"{self.name(index)} on node {self._node_names.get(node_id, self.addresses[index].node)}"

    def _end_processes(self) -> None:
        """End what is left of the workers' processes on their nodes, and remove their crash reports: Ray asks a process to
        end, and one that is stopped never answers."""
        by_node: dict[str, list[int]] = {}
        for address in self.addresses:
            by_node.setdefault(address.node_id, []).append(address.process_id)
        self.addresses = ()
        if not by_node:
            return
        alive = {node.node_id for node in cluster_nodes() if node.alive} - self._lost_nodes
        here = by_node.pop(own_node_id(), [])
        refs = [
            _on_node(node_id, _kill_processes).remote(ids, KILL_GRACE_S)
            for node_id, ids in by_node.items()
            if node_id in alive
        ]
        killed = []
        with _logged("could not look for left-over worker processes"):
            killed += end_processes(here, KILL_GRACE_S)
        done, late = ray.wait(refs, num_returns=len(refs), timeout=KILL_GRACE_S + 10.0) if refs else ([], [])
        for ref in late:
            ray.cancel(ref, force=True)
        for ref in done:
            with _logged("could not look for left-over worker processes"):
                killed += ray.get(ref)
        if killed:
            log.warning("worker processes %s did not end when asked and were killed", killed)


_PARTS_NAMED = 40


def placement_text(addresses: Sequence[WorkerAddress], nodes: Sequence[ClusterNode]) -> str:
    """Says which meshes are on which node, and which of them are spread over several."""
    names = _node_names(addresses, nodes)
    nodes_of: dict[str, list[str]] = {}
    for address in addresses:
        nodes_of.setdefault(address.mesh, []).append(address.node_id)
    whole: dict[str, list[str]] = {}
    spread = []
    for mesh, ids in nodes_of.items():
        if len(set(ids)) == 1:
            whole.setdefault(ids[0], []).append(mesh)
        else:
            counts = [f"{_workers(ids.count(node_id))} on {names[node_id]}" for node_id in dict.fromkeys(ids)]
            spread.append(f"{mesh} is spread over {len(counts)} nodes: {', '.join(counts)}")
    parts = [*(f"{', '.join(meshes)} on {names[node_id]}" for node_id, meshes in whole.items()), *spread]
    left = len(parts) - _PARTS_NAMED
    return (
        f"{_workers(len(addresses))} on {len(names)} node{'s' if len(names) > 1 else ''}: "
        f"{'; '.join(parts[:_PARTS_NAMED])}" + (f"; and {left} more" if left > 0 else "")
    )


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count > 1 else ''}"


def _node_names(addresses: Sequence[WorkerAddress], nodes: Sequence[ClusterNode]) -> dict[str, str]:
    """The names of the workers' nodes by id; nodes of Ray on one machine have their id beside it."""
    known = {node.node_id: node.name for node in nodes}
    names = {address.node_id: known.get(address.node_id, address.node) for address in addresses}
    seen = list(names.values())
    return {
        node_id: name if seen.count(name) == 1 else f"{name} node {node_id[:8]}"
        for node_id, name in names.items()
    }


def call_failure(error: Exception, worker: str, what: str) -> AttemptFailure:
    """The failure of an actor's call: the error that it raised, or the loss of `worker` during `what`."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, AttemptFailure) else as_failure(cause, Reason.INTERNAL)
    if isinstance(error, ray.exceptions.GetTimeoutError):
        return AttemptFailure(Reason.SLOT_STALLED, f"{what}: no answer from {worker}")
    if isinstance(error, _WORKER_LOST_ERRORS):
        return AttemptFailure(Reason.WORKER_LOST, f"{what}: {worker} is gone: {_one_line(error)}")
    return as_failure(error, Reason.INTERNAL)


class _CrashReports:
    """The crash reports of workers at these addresses, each read on the worker's node."""

    def __init__(self, addresses: Sequence[WorkerAddress]) -> None:
        self._addresses = addresses
        self._requested: dict[int, ray.ObjectRef] = {}
        self._read: dict[int, CrashReport | None] = {}

    def request(self, index: int) -> None:
        """Begin to read the report of worker `index`, without waiting for it; nothing where it never came up."""
        if index in self._requested or index in self._read or index >= len(self._addresses):
            return
        address = self._addresses[index]
        if address.node_id == own_node_id():
            self._read[index] = read_crash_report(address.process_id)
        else:
            self._requested[index] = _on_node(address.node_id, _read_crash_report).remote(address.process_id)

    def added_to(self, failures: Sequence[tuple[int, AttemptFailure]]) -> list[AttemptFailure]:
        """The failures by numbers of workers, those of lost workers with the reports that their processes left."""
        for index, failure in failures:
            if failure.reason is Reason.WORKER_LOST:
                self.request(index)
        refs = list(self._requested.values())
        done, late = (
            ray.wait(refs, num_returns=len(refs), timeout=_CRASH_REPORT_LIMIT_S) if refs else ([], [])
        )
        for ref in late:
            ray.cancel(ref, force=True)
        return [self._added_to(index, failure, done) for index, failure in failures]

    def _added_to(self, index: int, failure: AttemptFailure, done: Sequence[ray.ObjectRef]) -> AttemptFailure:
        if failure.reason is not Reason.WORKER_LOST:
            return failure
        report, ref = self._read.get(index), self._requested.get(index)
        if ref in done:
            try:
                report = ray.get(ref)
            except Exception as error:  # the node may be gone by now
                log.debug("no crash report of worker %s: %s", index, error)
        return failure if report is None else add_crash_report(failure, report)


def add_crash_report(failure: AttemptFailure, report: CrashReport) -> AttemptFailure:
    """`failure` with the action and the native error of a process that left `report`."""
    where = f" in {report.action}" if report.action else ""
    if report.signal is None:
        message = f"{failure.message}; it was{where}" if where else failure.message
        return AttemptFailure(failure.reason, message, failure.details)
    return AttemptFailure(
        failure.reason,
        f"{failure.message}; its process died in native code ({report.signal}){where}: an operator of torch or of "
        "another library that the model calls crashed, which is no error that Python sees; the log has the Python "
        "stack, whose first lines are the call",
        f"{failure.details}\n{report.stack}".strip(),
    )


def end_processes(process_ids: Sequence[int], grace_s: float) -> list[int]:
    """Wait until the processes of this node's workers are gone; kill and return the remaining ones."""
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(_is_ray_worker(p) for p in process_ids):
        time.sleep(0.05)
    left = [p for p in process_ids if _is_ray_worker(p)]
    end_mps_clients(left)
    for process_id in left:
        os.kill(process_id, signal.SIGKILL)
    for process_id in process_ids:
        remove_crash_report(process_id)
    return left


_read_crash_report = ray.remote(max_retries=0)(read_crash_report)
_kill_processes = ray.remote(max_retries=0)(end_processes)


def _on_node(node_id: str, task: Any) -> Any:
    """The task on that node, for which Ray may have to start a process; what is of this node needs none."""
    return task.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log what the body raises."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %s", what, error)


def _is_ray_worker(process_id: int) -> bool:
    """True while this is a Ray worker's process; ids are reused, so its command line is read."""
    try:
        with open(f"/proc/{process_id}/cmdline", "rb") as file:
            command = file.read()
    except OSError:
        return False
    return b"ray::" in command or b"default_worker.py" in command


def _free_resources(resource: str) -> str:
    return f"{ray.available_resources().get(resource, 0.0):g} of {ray.cluster_resources().get(resource, 0.0):g} {resource}"


def _one_line(error: BaseException) -> str:
    text = str(error).strip()
    return " ".join(text.split())[:500]
