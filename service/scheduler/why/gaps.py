"""Assigns a reason to every idle gap of a compute lane, in planned and in measured timelines.

Pure: a PipelineSpec and the slots of one step in, gaps out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import Protocol

from service.scheduler.problem.spec import PipelineSpec
from worker.contract.program import COMPUTE_LANE

_BACKWARD_OPS = ("B", "I")
_TOLERANCE = 1e-9


class IdleReason(StrEnum):
    """The reason why a compute lane was idle."""

    UPSTREAM = "waits upstream"
    DOWNSTREAM = "waits downstream"
    TRANSFER = "exposed transfer"
    MEMORY = "memory limit"
    HELD = "held"
    """Inputs are there and no limit forbids the action: the engine's overhead, or an order that waits on purpose."""
    DONE = "done"
    """The mesh has finished its part of the step; others have not."""


class TimedSlot(Protocol):
    """A slot of a Plan, or a measured one, from which the reason of a gap is read."""

    mesh: str
    lane: str
    action: str
    stage: str | None
    microbatch: int | None
    edge: int | None
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Gap:
    """An idle stretch of one mesh's compute lane, in seconds from the start of the step."""

    mesh: str
    start_s: float
    end_s: float
    reason: IdleReason
    detail: str
    link: tuple[str, str] | None = None
    """(sending mesh, receiving mesh) of an exposed transfer, or of a delayed one."""


@dataclass(frozen=True, slots=True)
class _ActionInput:
    """One input of a compute action: who makes it, and when it is here (None: no slot tells)."""

    producer: str
    made_s: float | None
    sent_s: float | None
    here_s: float
    backward: bool
    link: tuple[str, str] | None


def find_gaps(
    spec: PipelineSpec, slots: Sequence[TimedSlot], *, end_s: float, start_s: float = 0.0
) -> list[Gap]:
    """The gaps of every compute lane between two times, in order of mesh and time.

    A stretch is split where its reason changes: it waits for the maker of its last input
    (upstream for a forward, downstream for a backward), then for the transfer, and then it is
    held, by a memory limit or otherwise. A stretch in which a forward stood ready but would
    have broken a limit of the spec is the memory limit's, whatever came next. On every mesh,
    gaps and compute slots together cover the time exactly (but for a billionth of it). Slots
    that are not of this spec (measured under an earlier plan) are left out.
    """
    timeline = _SlotIndex(spec, slots)
    shortest_s = _TOLERANCE * (end_s - start_s)
    gaps: list[Gap] = []
    for mesh in spec.meshes:
        lane = timeline.compute[mesh.name]
        at_s = start_s
        for place, slot in enumerate(lane):
            if slot.start_s - at_s > shortest_s:
                gaps += timeline.explain(mesh.name, at_s, slot.start_s, place)
            at_s = max(at_s, slot.end_s)
        if end_s - at_s > shortest_s:
            detail = f"{mesh.name} has done its part" if lane else f"{mesh.name} has nothing to compute"
            gaps.append(Gap(mesh.name, at_s, end_s, IdleReason.DONE, detail))
    return gaps


class _SlotIndex:
    """The slots of one step, arranged by what is asked of them."""

    def __init__(self, spec: PipelineSpec, slots: Iterable[TimedSlot]) -> None:
        self._spec = spec
        self._mesh = {mesh.name: mesh for mesh in spec.meshes}
        self._stage = {stage.name: stage for stage in spec.stages}
        self._into: dict[str, list[int]] = defaultdict(list)
        self._out_of: dict[str, list[int]] = defaultdict(list)
        for index, edge in enumerate(spec.edges):
            self._into[edge.target].append(index)
            self._out_of[edge.source].append(index)
        self._shared = _shared_transfers(spec)
        self.compute: dict[str, list[TimedSlot]] = defaultdict(list)
        self._transfers: dict[str, list[TimedSlot]] = defaultdict(list)
        self._computed: dict[tuple[str, str, int], TimedSlot] = {}
        self._received: dict[tuple[str, int, int], TimedSlot] = {}
        for slot in sorted(slots, key=lambda slot: (slot.start_s, slot.end_s)):
            if not self._belongs(slot):
                continue
            if slot.lane != COMPUTE_LANE:
                self._transfers[slot.mesh].append(slot)
                if slot.action.startswith("RECV") and slot.edge is not None:
                    self._received[slot.action, self._shared[slot.edge][0], slot.microbatch] = slot
            else:
                self.compute[slot.mesh].append(slot)
                self._computed[slot.action, slot.stage, slot.microbatch] = slot

    def _belongs(self, slot: TimedSlot) -> bool:
        """False for REDUCE and STEP, and for what another plan of the same job has measured."""
        stage = self._stage.get(slot.stage or "")
        known = slot.edge is None or slot.edge in self._shared
        return stage is not None and stage.mesh == slot.mesh and slot.microbatch is not None and known

    def explain(self, mesh: str, start_s: float, end_s: float, place: int) -> Iterator[Gap]:
        """Split the gap before the slot at `place` of the mesh's compute lane by reason."""
        lane = self.compute[mesh]
        blocked = self._blocked_forward(islice(lane, place + 1, None), start_s)
        for gap in self._stretches(mesh, start_s, end_s, lane[place]):
            if blocked is None or gap.reason is IdleReason.MEMORY or blocked[0] >= gap.end_s:
                yield gap
                continue
            ready_s, detail = blocked
            if ready_s > gap.start_s:
                yield replace(gap, end_s=ready_s)
            yield Gap(
                mesh, max(ready_s, gap.start_s), gap.end_s, IdleReason.MEMORY, f"{detail}; {gap.detail}"
            )

    def _stretches(self, mesh: str, start_s: float, end_s: float, slot: TimedSlot) -> Iterator[Gap]:
        name = _slot_name(slot)
        at_s = start_s
        last = max(self._needs(slot), key=lambda need: need.here_s, default=None)
        if last is not None and last.here_s > start_s:
            made_s = last.here_s if last.made_s is None else last.made_s
            if made_s > at_s:
                reason = IdleReason.DOWNSTREAM if last.backward else IdleReason.UPSTREAM
                at_s = min(made_s, end_s)
                yield Gap(mesh, start_s, at_s, reason, f"{name} needs {last.producer}, which is not ready")
            if min(last.here_s, end_s) > at_s:
                yield from self._transfer(mesh, at_s, min(last.here_s, end_s), name, last)
                at_s = min(last.here_s, end_s)
        if at_s < end_s:
            yield from self._held(mesh, at_s, end_s, slot)

    def _transfer(
        self, mesh: str, start_s: float, end_s: float, name: str, need: _ActionInput
    ) -> Iterator[Gap]:
        """From the end of the maker to the arrival: the wait for a turn, then the wire.

        A receive that began late because every receive buffer was in use is the memory limit's.
        """
        sent_s = start_s if need.sent_s is None else need.sent_s
        limit = self._mesh[mesh].receive_buffer_limit
        late = need.made_s is not None and sent_s > need.made_s
        if late and limit is not None and self._receive_buffers(mesh, sent_s) >= limit:
            detail = f"{name} needs {need.producer}: all {limit} receive buffers were in use"
            yield Gap(mesh, start_s, end_s, IdleReason.MEMORY, detail, need.link)
            return
        sent_s = min(max(sent_s, start_s), end_s)
        if sent_s > start_s:
            detail = f"{name} needs {need.producer}: its transfer waits for its turn"
            yield Gap(mesh, start_s, sent_s, IdleReason.TRANSFER, detail, need.link)
        if end_s > sent_s:
            detail = f"{name} needs {need.producer}, which is on its way"
            yield Gap(mesh, sent_s, end_s, IdleReason.TRANSFER, detail, need.link)

    def _held(self, mesh: str, start_s: float, end_s: float, slot: TimedSlot) -> Iterator[Gap]:
        """`slot` has all it needs: a transfer may hold the lane (overlap off), or a limit the forward."""
        name = _slot_name(slot)
        if slot.action == "F" and (limit := self._limit_against(slot, (start_s + end_s) / 2)):
            yield Gap(mesh, start_s, end_s, IdleReason.MEMORY, f"{name} is ready but {limit}")
            return
        at_s = start_s
        for transfer in () if self._spec.overlap else self._transfers[mesh]:
            begin_s, done_s = max(transfer.start_s, at_s), min(transfer.end_s, end_s)
            if done_s <= begin_s:
                continue
            if begin_s > at_s:
                yield Gap(mesh, at_s, begin_s, IdleReason.HELD, f"{name} is ready")
            detail = f"{_slot_name(transfer)} holds the lane (overlap is off)"
            yield Gap(mesh, begin_s, done_s, IdleReason.TRANSFER, detail, _link_of(transfer))
            at_s = done_s
        if at_s < end_s:
            yield Gap(mesh, at_s, end_s, IdleReason.HELD, f"{name} is ready")

    def _blocked_forward(self, later: Iterable[TimedSlot], start_s: float) -> tuple[float, str] | None:
        """The first later forward that an explicit limit kept from filling the gap: when ready, and why not."""
        for slot in later:
            if slot.action != "F":
                continue
            ready_s = max((need.here_s for need in self._needs(slot)), default=0.0)
            if limit := self._limit_against(slot, max(ready_s, start_s)):
                return max(ready_s, start_s), f"{_slot_name(slot)} is ready but {limit}"
            return None
        return None

    def _needs(self, slot: TimedSlot) -> list[_ActionInput]:
        """The inputs of a compute action that come from other meshes or stages."""
        if slot.stage is None or slot.microbatch is None:
            return []
        if slot.action == "F":
            edges = self._into[slot.stage]
            return [n for edge in edges if (n := self._forward_need(edge, slot.microbatch))]
        if slot.action in _BACKWARD_OPS:
            edges = self._out_of[slot.stage]
            return [n for edge in edges if (n := self._backward_need(edge, slot.microbatch))]
        return []

    def _forward_need(self, index: int, microbatch: int) -> _ActionInput | None:
        source = self._spec.edges[index].source
        made = self._ran(("F",), source, microbatch)
        return self._need("RECV_F", index, microbatch, made, backward=False)

    def _backward_need(self, index: int, microbatch: int) -> _ActionInput | None:
        users = [self._spec.edges[edge].target for edge in self._shared[index]]
        made = [slot for user in users for slot in self._ran(_BACKWARD_OPS, user, microbatch)]
        return self._need("RECV_B", index, microbatch, made, backward=True)

    def _need(
        self, action: str, index: int, microbatch: int, made: Sequence[TimedSlot], *, backward: bool
    ) -> _ActionInput | None:
        last = max(made, key=lambda slot: slot.end_s, default=None)
        received = self._received.get((action, self._shared[index][0], microbatch))
        here_s = received.end_s if received else last.end_s if last else None
        if here_s is None:
            return None
        producer = f"{_slot_name(last)} of {last.mesh}" if last else "a tensor"
        return _ActionInput(
            producer,
            last.end_s if last else None,
            received.start_s if received else None,
            here_s,
            backward,
            None if received is None else _link_of(received),
        )

    def _limit_against(self, slot: TimedSlot, at_s: float) -> str | None:
        """The limit of the spec that starting this forward at `at_s` would break, in words."""
        stage = self._stage[slot.stage or ""]
        cap = self._spec.max_in_flight
        if cap is not None and not self._into[stage.name] and slot.microbatch is not None:
            before = slot.microbatch - cap
            freed = self._backward_end(stage.name, before) if before >= 0 else 0.0
            if freed > at_s:
                return f"at most {cap} microbatches may be in flight"
        limit = self._mesh[stage.mesh].activation_limit_bytes
        if limit is None:
            return None
        held = self._activation_bytes(stage.mesh, at_s)
        if held + stage.activation_bytes > limit * (1 + _TOLERANCE):
            return f"activations hold {held:g} of {limit:g} bytes and it needs {stage.activation_bytes:g}"
        return None

    def _activation_bytes(self, mesh: str, at_s: float) -> float:
        """Bytes of activations held on `mesh` at `at_s`; what ends then is free."""
        held = 0.0
        for slot in self.compute[mesh]:
            if slot.action != "F" or slot.start_s > at_s or slot.microbatch is None or slot.stage is None:
                continue
            stage = self._stage[slot.stage]
            split = self._computed.get(("I", slot.stage, slot.microbatch))
            weight = self._computed.get(("W", slot.stage, slot.microbatch))
            if split is not None and split.end_s <= at_s:
                held += stage.weight_stash_bytes if weight is None or weight.end_s > at_s else 0
            elif self._backward_end(slot.stage, slot.microbatch) > at_s:
                held += stage.activation_bytes
        return held

    def _backward_end(self, stage: str, microbatch: int) -> float:
        """The end of a microbatch's backward on the stage; infinite if it is not in the timeline."""
        ran = self._ran(("B", "I", "W"), stage, microbatch)
        return max((slot.end_s for slot in ran), default=float("inf"))

    def _ran(self, actions: Iterable[str], stage: str, microbatch: int) -> list[TimedSlot]:
        found = (self._computed.get((action, stage, microbatch)) for action in actions)
        return [slot for slot in found if slot is not None]

    def _receive_buffers(self, mesh: str, before_s: float) -> int:
        """Buffers of `mesh` that hold a received tensor just before `before_s`."""
        used = 0
        for transfer in self._transfers[mesh]:
            if (
                not transfer.action.startswith("RECV")
                or transfer.start_s >= before_s
                or transfer.edge is None
            ):
                continue
            edges = [self._spec.edges[edge] for edge in self._shared[transfer.edge]]
            forward = transfer.action == "RECV_F"
            users = {edge.target if forward else edge.source for edge in edges}
            actions = ("F",) if forward else _BACKWARD_OPS
            ran = [slot for user in users for slot in self._ran(actions, user, transfer.microbatch or 0)]
            used += max((slot.end_s for slot in ran), default=float("inf")) >= before_s
        return used


def _shared_transfers(spec: PipelineSpec) -> Mapping[int, tuple[int, ...]]:
    """For each edge, all edges whose tensor travels in the same transfer, in order (itself among them)."""
    mesh = {stage.name: stage.mesh for stage in spec.stages}
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, edge in enumerate(spec.edges):
        key = (index,) if edge.tensor is None else (edge.source, edge.tensor, mesh[edge.target])
        groups[key].append(index)
    return {index: tuple(group) for group in groups.values() for index in group}


def _link_of(transfer: TimedSlot) -> tuple[str, str]:
    """The mesh that sends and the one that receives, by the lane of either end."""
    way, _, peer = transfer.lane.partition(":")
    return (transfer.mesh, peer) if way == "send" else (peer, transfer.mesh)


def _slot_name(slot: TimedSlot) -> str:
    """`s2 F0`: stage, action, microbatch."""
    return f"{slot.stage} {slot.action}{slot.microbatch}"
