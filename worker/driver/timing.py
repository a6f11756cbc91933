"""One clock for many processes: offsets between monotonic clocks, with a stated uncertainty.

Must not know Ray, transports or torch; a caller brings the function that asks the other clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from worker.program import SEND_OPS
from worker.slots import MeasuredSlot


@dataclass(frozen=True)
class ClockOffset:
    """Remote clock minus local clock, in seconds; the truth lies within ± `uncertainty_s`."""

    offset_s: float
    uncertainty_s: float


def estimate_offset(
    remote_now: Callable[[], float], rounds: int = 15, local_now: Callable[[], float] = time.monotonic
) -> ClockOffset:
    """Ask the remote clock `rounds` times and trust the fastest answer (Cristian 1989): the remote reading
    was taken somewhere within that round trip, so half of it bounds the error."""
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; ask the clock at least once")
    best: ClockOffset | None = None
    for _ in range(rounds):
        asked = local_now()
        remote = remote_now()
        answered = local_now()
        uncertainty = (answered - asked) / 2
        if best is None or uncertainty < best.uncertainty_s:
            best = ClockOffset(remote - (asked + answered) / 2, uncertainty)
    return best


def to_driver_clock(slots: Sequence[MeasuredSlot], offset: ClockOffset) -> list[MeasuredSlot]:
    """Slots of a worker on the clock of the process that estimated `offset` of that worker."""
    if offset.offset_s == 0.0:
        return list(slots)
    return [slot.at(slot.start_s - offset.offset_s, slot.end_s - offset.offset_s) for slot in slots]


def rendezvous_times(slots_of: Mapping[str, Sequence[MeasuredSlot]]) -> dict[str, list[MeasuredSlot]]:
    """Give both halves of each transfer the same times: from when both ends were ready to when the
    receiver had the tensor. `slots_of`: slots by mesh, on one clock. A half that waits for the other end
    is not a running transfer; a transfer with one half only keeps its times."""
    sent: dict[tuple, MeasuredSlot] = {}
    received: dict[tuple, MeasuredSlot] = {}
    for slots in slots_of.values():
        for slot in slots:
            if slot.edge is not None:
                halves = sent if slot.action in SEND_OPS else received
                halves[slot.edge, slot.microbatch, slot.action[-1]] = slot

    def aligned(slot: MeasuredSlot) -> MeasuredSlot:
        if slot.edge is None:
            return slot
        key = (slot.edge, slot.microbatch, slot.action[-1])
        if key not in sent or key not in received:
            return slot
        end = received[key].end_s
        return slot.at(min(max(sent[key].start_s, received[key].start_s), end), end)

    return {mesh: [aligned(slot) for slot in slots] for mesh, slots in slots_of.items()}
