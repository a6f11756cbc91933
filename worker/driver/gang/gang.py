"""Starts, calls and ends the actors of an attempt, and explains a lost one.

A mesh is a group of workers, one worker an accelerator. All calls of an actor run on one thread, as the current CUDA
device belongs to a thread. The phase of a call sets its time limit, the reason of a timeout and what may interrupt it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from worker.contract.failures import AttemptFailure, first_cause
from worker.contract.job import gpu_share
from worker.contract.reasons import Reason
from worker.driver.gang.drains import DrainWatch
from worker.driver.gang.lost_workers import (
    WORKER_LOST_ERRORS,
    CrashReports,
    call_failure,
    end_left_over,
    one_line,
)
from worker.driver.gang.phases import Phase
from worker.driver.gang.reservation import CPU_RESOURCE, POLL_S, AcceleratorDemand, Placer, Reservation
from worker.driver.limits import Limits
from worker.driver.stopping import Interruption
from worker.machine.node import WorkerAddress, cluster_nodes, lost_nodes

log = logging.getLogger(__name__)
_SPARE = "spare"
"""In place of the mesh of a worker that has none."""
CAUSE_GRACE_S = 5.0
START_OVER_S = 5.0
"""For the workers that are left, behind the loss of others, to be as new."""
TAKE_PLACE_S = 2.0
"""For a spare to take the place of a worker."""
LOSS_GRACE_S = 0.5
"""Behind the loss of a worker, which explains what the others raise."""
_SILENT_NAMED = 4
"""The workers that a message names."""
_MAY_FOLLOW_FROM_A_LOST_NODE = (
    Reason.WORKER_LOST,
    Reason.SLOT_STALLED,
    Reason.START_TIMEOUT,
    Reason.INTERNAL,
)


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
            log.info("a spare has not come up: %s", one_line(error))
            return None


@dataclass(frozen=True)
class _Places:
    """The places of a gang: the bundle of each and, where there is one already, its worker; and the spares by bundle."""

    reservation: Reservation
    bundles: Sequence[int]
    workers: Mapping[int, ray.actor.ActorHandle] = field(default_factory=dict)
    spares: Mapping[int, _Spare] = field(default_factory=dict)


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
        self._limits, self._interruption = limits, interruption
        self._drains = DrainWatch(report_draining)
        self._demand = AcceleratorDemand(
            sizes,
            device=device,
            workers_per_gpu=workers_per_gpu,
            place=place,
            drains=self._drains,
            raise_if_interrupted=lambda: self.raise_if_interrupted(Phase.START),
        )
        self._interpreter = interpreter
        self._reservation: Reservation | None = None
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
        places = None if earlier is None else earlier._give_up_places()
        if places is None:
            places = _Places(self._demand.reserve(spares, limit_s), range(sum(self._sizes)))
        self._reservation, self._bundles = places.reservation, places.bundles
        self._spares = dict(places.spares)
        self.taken_over = tuple(places.workers.values())
        workers = []
        for place, ((name, index), bundle) in enumerate(zip(self._numbered, places.bundles, strict=True)):
            if (worker := places.workers.get(place)) is None:
                options = self._actor_options(name, index, bundle)
                worker = actor_class.options(**options).remote(**make_arguments(name, index))
            workers.append(worker)
        rest = iter(workers)
        self.meshes = tuple(
            Mesh(name, tuple(islice(rest, size))) for name, size in zip(self._names, self._sizes, strict=True)
        )
        self.addresses = tuple(self._results(self.ask("address"), Phase.START, "start", limit_s))
        self._node_names = {node.node_id: node.name for node in cluster_nodes()}
        placed = places.reservation.node_ids or ()
        for index, (address, node_id) in enumerate(zip(self.addresses, placed, strict=False)):
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
        for bundle in sorted({*range(self._reservation.accelerators)} - {*self._bundles, *self._spares}):
            options = self._actor_options(_SPARE, bundle, bundle)
            worker = actor_class.options(**options).remote(**make_arguments(_SPARE, bundle))
            address = worker.call.remote("address")  # before any other call: it takes its device
            self._spares[bundle] = _Spare(worker, address, worker.call.remote("check_accelerator"))
            if environment:
                worker.call.remote("set_environment", environment)
            worker.call.remote("import_code")

    @property
    def _numbered(self) -> list[tuple[str, int]]:
        """The mesh of each worker, and its number in the mesh."""
        return [(name, i) for name, size in zip(self._names, self._sizes, strict=True) for i in range(size)]

    def _actor_options(self, mesh: str, worker: int, bundle: int) -> dict[str, Any]:
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_restarts": 0,
            "max_concurrency": 1,  # all calls on one thread: a current CUDA device is a thread's own
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._reservation.group, placement_group_bundle_index=bundle
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
        reports = CrashReports(self.addresses)
        results: dict[ray.ObjectRef, Any] = {}
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S)
            if done and not failures and phase is Phase.START:  # a node starts few processes at once
                deadline = time.monotonic() + limit_s
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
                since = " behind the last one that answered" if results and phase is Phase.START else ""
                message = f"{what}: no answer from {names} within {limit_s:.0f} s{since}"
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
        reports: CrashReports | None = None,
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
            found = (reports or CrashReports(self.addresses)).added_to(failures)
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
        if self._reservation is not None:
            reservation, self._reservation = self._reservation, None
            reservation.give_back()

    @property
    def kept(self) -> bool:
        """True while the workers that are left wait for the gang of another attempt: `stop` ends them."""
        return bool(self._starting_over)

    def keep_workers(self) -> None:
        """Have the workers that are left start over, for the gang of this driver's next attempt, without waiting for them.
        Nothing where not all of them had come up."""
        if len(self.addresses) == len(self.workers):
            self._starting_over = [worker.start_over.remote() for worker in self.workers]

    def _give_up_places(self) -> _Places | None:
        """The places with the workers that have started over, of all accelerators; all else of this gang is ended. None, and
        everything is ended, where one is neither gone nor as new in START_OVER_S, where a node is gone, or where all workers
        are."""
        refs, self._starting_over = self._starting_over, []
        _, late = ray.wait(refs, num_returns=len(refs), timeout=START_OVER_S) if refs else ([], [])
        workers, lost = dict(enumerate(self.workers)), []
        why = f"{len(late)} of {len(refs)} workers did not start over in {START_OVER_S:g} s" if late else ""
        for index, ref in enumerate(refs if not late else ()):
            try:
                ray.get(ref)
            except WORKER_LOST_ERRORS:
                lost.append(index)
                del workers[index]
            except Exception as error:
                why = f"{self._located_name(index)} cannot start over: {one_line(error)}"
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
        reservation = replace(self._reservation, node_ids=[address.node_id for address in self.addresses])
        kept = _Places(reservation, bundles, workers, self._spares)
        self._reservation, self.meshes, self._spares = None, (), {}
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
                ray.get(spare.worker.take_place.remote(*self._numbered[place]), timeout=TAKE_PLACE_S)
            except Exception as error:
                log.info(
                    "a spare does not take the place of %s: %s", self._located_name(place), one_line(error)
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
        if index >= len(self._numbered):
            return f"call {index}"
        mesh, worker = self._numbered[index]
        return f"worker {worker} of mesh {mesh}"

    def _located_name(self, index: int) -> str:
        """The worker with the name of its node, once it has one."""
        if index >= len(self.addresses):
            return self.name(index)
        node_id = self.addresses[index].node_id
        return f"{self.name(index)} on node {self._node_names.get(node_id, self.addresses[index].node)}"

    def _end_processes(self) -> None:
        addresses, self.addresses = self.addresses, ()
        end_left_over(addresses, lost_nodes=self._lost_nodes)
