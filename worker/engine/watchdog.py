"""Watchdog of a running step: finds stalled slots and failed peers, and picks the error that names the cause.

Publishes how far this worker is, and asks its peers' progress to name the ranks that have not reached a
collective, a transfer or a resharding. A transfer over its limit waits a little for a live peer: that peer
watches itself, and it or one behind it will name the slot that everybody waits for.
Talks to peers over the transport's store only. Must not know stages, tensors or what an action does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Protocol

from worker.contract.program import COMPUTE_LANE, Instruction, Program
from worker.engine.lanes.base import Lanes, LaneStatus
from worker.engine.results import StallError
from worker.parallel.collectives import Collectives
from worker.transport.base import AbortedError, EngineError, Failure, PeerLostError, PeerProgress, Transport

# How long a lost peer may take to say why it left.
_CAUSE_GRACE_S = 2.0
# A transfer over its limit waits this much longer for a peer that lives: that peer watches itself, and
# it or someone behind it will name the slot that everybody waits for.
_PEER_GRACE_S = 2.0
_PEER_ALIVE_S = 1.0
# In what a worker publishes: it has come to a sum over workers, or to what they gather.
_REACHED = {"REDUCE": re.compile(r"running \d*REDUCE"), "STEP": re.compile(r"running STEP")}


class ReshardingStatus(Protocol):
    """The resharded transfers of a worker by (edge, backward), and the workers for whom a running one waits."""

    def __contains__(self, key: object) -> bool: ...

    def missing(self, edge: int, backward: bool, microbatch: int) -> tuple[str, ...]: ...


class Watchdog:
    """Watches the steps of one mesh.

    `limits_s` has the seconds that each instruction of `program` may take. Transfers in `reshardings` wait for several
    workers; STEP waits for the workers of each set of meshes in `step_waits_for`; an action waits for the ranks of
    the `collectives` that it enters.
    """

    def __init__(
        self,
        *,
        mesh: str,
        program: Program,
        limits_s: Sequence[float],
        transport: Transport,
        lanes: Lanes,
        reshardings: ReshardingStatus | None = None,
        step_waits_for: Sequence[Sequence[str]] = (),
        collectives: Collectives | None = None,
    ):
        self._mesh = mesh
        self._program = program
        self._limits_s = limits_s
        self._transport = transport
        self._lanes = lanes
        self._reshardings = reshardings
        self._step_waits_for = step_waits_for
        self._collectives = collectives
        self.published_s = 0.0

    def publish(self, step: int, statuses: Sequence[LaneStatus]) -> None:
        """Publish the progress of this worker. PeerLostError when the store is gone."""
        now = time.monotonic()
        last = self._lanes.last_compute()
        text = f"step {step}, last finished {'nothing' if last is None else self._program[last]}"
        for status in statuses:
            if status.current is not None and self._is_published(status):
                doing = "running" if status.waits_for is None else "waiting to run"
                text += f", {doing} {self._program[status.current]} for {now - status.since_s:.1f} s"
        text += self._collectives.progress_text() if self._collectives else ""
        self.published_s = now
        try:
            self._transport.publish(text)
        except RuntimeError as error:
            raise PeerLostError(f"the rendezvous store is gone: {error}", "driver") from error

    def check(self, statuses: Sequence[LaneStatus]) -> None:
        """Raise AbortedError when another worker failed, StallError when a slot is over its limit."""
        failure = self._transport.failure()
        if failure is not None:
            raise AbortedError(failure.origin, failure.reason)
        now = time.monotonic()
        for status in statuses:
            if status.current is None or status.waits_for is not None:
                continue
            waited = now - status.since_s
            over = waited - self._limits_s[status.current]
            if over > 0 and not (over < _PEER_GRACE_S and self._peer_is_alive(status.current)):
                raise self._stall(status.current, waited)

    def diagnose(self, error: BaseException) -> BaseException:
        """The error that names the cause of a step that ended with `error`; may wait for a peer to announce it."""
        if isinstance(error, PeerLostError):
            # Whoever broke the connection may have said why; give the word a moment to arrive.
            deadline = time.monotonic() + _CAUSE_GRACE_S
            while time.monotonic() < deadline:
                if failure := self._failure():
                    return AbortedError(failure.origin, failure.reason)
                time.sleep(0.05)
            return self._explain_lost_peer(error)
        if isinstance(error, EngineError):
            return error
        if isinstance(error, Exception):
            return EngineError(f"mesh {self._mesh}: {type(error).__name__}: {error}")
        return error

    def _stall(self, index: int, waited_s: float) -> StallError:
        instruction = self._program[index]
        parts = [
            f"mesh {self._mesh}: {instruction} on lane {instruction.lane} has not ended after {waited_s:.1f} s "
            f"(limit {self._limits_s[index]:.1f} s)"
        ]
        if peers := self._peers(index):
            parts.append(f"it waits for {', '.join(peers)}")
        for peer in peers:
            progress = self._progress(peer)
            parts.append(
                f"{peer} said {progress.age_s:.1f} s ago: {progress.text}"
                if progress
                else f"{peer} has said nothing"
            )
        for status in self._lanes.statuses():
            if status.waits_for is not None:
                waiter = self._program[status.current]
                since = time.monotonic() - status.since_s
                parts.append(
                    f"{waiter} on lane {waiter.lane} waits for event {status.waits_for} "
                    f"({self._recorder(status.waits_for)}) since {since:.1f} s"
                )
        return StallError("; ".join(parts), str(instruction), instruction.lane, waited_s)

    def _recorder(self, event: int) -> str:
        return next((str(i) for i in self._program if i.record == event), "nobody")

    def _explain_lost_peer(self, error: PeerLostError) -> PeerLostError:
        text = f"mesh {self._mesh}: {error}"
        peers = (error.peer,) if self._is_peer(error.peer) else ()
        if self._collectives is not None:
            peers = peers or self._collectives.other_members(error.peer)
        for peer in peers:
            if progress := self._progress(peer):
                text += f"; {peer} said {progress.age_s:.1f} s ago: {progress.text}"
        return PeerLostError(text, error.peer)

    def _is_published(self, status: LaneStatus) -> bool:
        """True for a lane that peers ask about: the compute lane, and sums and reshardings that this worker has entered."""
        instruction = self._program[status.current]
        return status.lane == COMPUTE_LANE or instruction.op == "REDUCE" or self._resharded(instruction)

    def _resharded(self, instruction: Instruction) -> bool:
        """True for a transfer that several workers of a mesh carry out together."""
        key = (instruction.edge, instruction.op.endswith("B"))
        return instruction.peer is not None and self._reshardings is not None and key in self._reshardings

    def _is_peer(self, name: str) -> bool:
        topology = self._transport.topology
        return name in topology.meshes or topology.is_worker(name)

    def _peers(self, index: int) -> tuple[str, ...]:
        """Whom an instruction that does not end waits for: a mesh, or the workers whose part is missing, of a sum inside a
        stage too."""
        instruction, topology = self._program[index], self._transport.topology
        if instruction.lane == COMPUTE_LANE and (late := self._missing_in_collective()):
            return late
        if instruction.op == "REDUCE":
            return self._not_arrived_at("REDUCE", ((self._mesh,), topology.meshes))
        if instruction.op == "STEP" and self._step_waits_for:
            return self._not_arrived_at("STEP", self._step_waits_for)
        if instruction.peer is None:
            return self._not_arrived_at_action(index)
        if not self._resharded(instruction):
            return (instruction.peer,)
        backward = instruction.op.endswith("B")
        missing = self._reshardings.missing(instruction.edge, backward, instruction.microbatch)
        return missing or self._not_arrived_at_transfer(index) or topology.names(instruction.peer)

    def _missing_in_collective(self) -> tuple[str, ...]:
        """The workers that have not entered the in-stage collective in which the compute lane waits, if it does."""
        if self._collectives is None:
            return ()
        return self._collectives.missing(lambda name: getattr(self._progress(name), "text", ""))

    def _not_arrived_at(self, op: str, circles: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """The other workers that have not reached an `op`, of the first of `circles` (groups of meshes) in which one is
        missing."""
        topology = self._transport.topology
        own = topology.name(topology.rank(self._mesh, self._transport.worker))
        for meshes in circles:
            others = [name for mesh in meshes for name in topology.names(mesh) if name != own]
            late = [
                name for name in others if not _REACHED[op].search(getattr(self._progress(name), "text", ""))
            ]
            if late:
                return tuple(late)
        return ()

    def _not_arrived_at_action(self, index: int) -> tuple[str, ...]:
        """The workers with which this one sums inside actions that neither run its present action nor have ended it."""
        instruction = self._program[index]
        over = {str(later) for later in self._program[index:] if later.lane == COMPUTE_LANE}

        def late(name: str) -> bool:
            text = getattr(self._progress(name), "text", "")
            last = re.search(r"last finished (\S+?)(?:,|$)", text)
            return f"running {instruction} " not in text and not (last and last[1] in over)

        return tuple(
            name for name in (self._collectives.in_stage_peers() if self._collectives else ()) if late(name)
        )

    def _not_arrived_at_transfer(self, index: int) -> tuple[str, ...]:
        """The workers of both meshes that have fallen silent, or else all that do not report to be in the resharding."""
        instruction, topology = self._program[index], self._transport.topology
        own = topology.name(topology.rank(self._mesh, self._transport.worker))
        here = re.compile(
            rf"running \d+(?:SEND|RECV)_{instruction.op[-1]}{instruction.microbatch}@\S+/e{instruction.edge} "
        )
        names = [
            name for name in (*topology.names(instruction.peer), *topology.names(self._mesh)) if name != own
        ]
        said = {name: self._progress(name) for name in names}
        silent = [name for name in names if said[name] is None] or [
            name for name in names if said[name].age_s > _PEER_ALIVE_S
        ]
        # a short message may have left before its receiver came: who sent it says no more of it
        return tuple(silent or (name for name in names if not here.search(said[name].text)))

    def _peer_is_alive(self, index: int) -> bool:
        """True where a worker that the instruction waits for has published its progress of late."""
        progresses = [self._progress(peer) for peer in self._peers(index)]
        return any(progress is not None and progress.age_s < _PEER_ALIVE_S for progress in progresses)

    def _progress(self, mesh: str) -> PeerProgress | None:
        try:
            return self._transport.progress(mesh)
        except RuntimeError:
            return None

    def _failure(self) -> Failure | None:
        """The announced failure; a broken connection that the transport has noticed says less."""
        try:
            return self._transport.failure()
        except PeerLostError:
            return None
