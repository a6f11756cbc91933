"""Writes slots, planned or measured, as a Chrome/Perfetto trace: process per mesh, thread per lane, arrow per transfer.

Perfetto binds each end of an arrow to the slice that encloses its time on its thread (an end needs `bp: e` for
that), reads ids that are strings as hexadecimal, and cuts times to nanoseconds. So both ends lie inside their
slots by two nanoseconds, and ids are whole numbers, given once for the whole trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.contract.buckets import REDUCE_LANE
from worker.contract.program import COMPUTE_LANE

_MICROSECONDS = 1e6
_NANOSECOND_US = 1e-3
"""A nanosecond in microseconds, the unit of traces. No slot is drawn shorter: an arrow could not end inside it."""


def chrome_trace(sides: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, Any]:
    """The trace of slots in their JSON form, times in microseconds from the step's start.

    `sides` are the timelines of one trace by their name (planned, measured), which the names of their processes begin
    with; "" for one alone.
    """
    events: list[dict[str, Any]] = []
    arrows = _TransferArrows()
    process = 0
    for side, slots in sides.items():
        meshes: dict[str, list[Mapping[str, Any]]] = {}
        for slot in slots:
            meshes.setdefault(slot["mesh"], []).append(slot)
        for mesh, of_mesh in meshes.items():
            process += 1
            events += _metadata("process", process, 0, name=f"{side} {mesh}".strip(), index=process)
            lanes = sorted({slot["lane"] for slot in of_mesh}, key=lambda lane: (lane != COMPUTE_LANE, lane))
            threads = {lane: thread for thread, lane in enumerate(lanes)}
            for lane, thread in threads.items():
                events += _metadata("thread", process, thread, name=lane, index=thread)
            for slot in of_mesh:
                event = _slot_event(slot, process, threads[slot["lane"]])
                events.append(event)
                arrows.add(side, slot, event)
    return {"displayTimeUnit": "ms", "traceEvents": [*events, *arrows.events()]}


def _slot_event(slot: Mapping[str, Any], process: int, thread: int) -> dict[str, Any]:
    action, start = slot["action"], slot["start_s"] * _MICROSECONDS
    category = "transfer" if "_" in action else "reduce" if slot["lane"] == REDUCE_LANE else "compute"
    keys = ("stage", "microbatch", "peer_stage", "peer_mesh", "edge")
    return {
        "name": " ".join([action, *_stage_label(slot.get("stage"), slot.get("microbatch"))]),
        "cat": category,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": max(_NANOSECOND_US, slot["end_s"] * _MICROSECONDS - start),
        "args": {key: slot[key] for key in keys if slot.get(key) is not None},
    }


def _stage_label(stage: str | None, microbatch: int | None) -> list[str]:
    if stage is None:
        return []
    return [stage if microbatch is None else f"{stage}/{microbatch}"]


def _metadata(kind: str, process: int, thread: int, *, name: str, index: int) -> Iterator[dict[str, Any]]:
    """The name of a process or thread, and its place among the others."""
    for suffix, arguments in (("name", {"name": name}), ("sort_index", {"sort_index": index})):
        yield {"name": f"{kind}_{suffix}", "ph": "M", "pid": process, "tid": thread, "args": arguments}


@dataclass
class _TransferArrows:
    """Collects the slot events of transfers; `events` are the arrows between them."""

    _sent: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
    _received: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)

    def add(self, side: str, slot: Mapping[str, Any], event: dict[str, Any]) -> None:
        """A slot that was drawn as `event`; compute slots are ignored.

        `side` distinguishes the timelines of one trace: planned and measured transfers have the same names.
        """
        operation, _, direction = slot["action"].partition("_")
        if not direction:
            return
        mesh, peer = slot["mesh"], slot.get("peer_mesh")
        sends = operation == "SEND"
        meshes = (mesh, peer) if sends else (peer, mesh)
        ends = self._sent if sends else self._received
        ends[side, direction, slot.get("edge"), slot.get("microbatch"), *meshes] = event

    def events(self) -> Iterator[dict[str, Any]]:
        """The arrows of all transfers with both ends, from the end of the SEND to the end of the RECV.

        A RECV that ended first (clocks differ by a little) draws the beginning back: no arrow points into the past.
        """
        for number, (key, sent) in enumerate(self._sent.items(), start=1):
            received = self._received.get(key)
            if received is None:
                continue
            end = max(received["ts"], received["ts"] + received["dur"] - 2 * _NANOSECOND_US)
            begin = max(sent["ts"], min(sent["ts"] + sent["dur"] - 2 * _NANOSECOND_US, end))
            if begin <= end:
                yield _arrow_end("s", number, sent, begin)
                yield _arrow_end("f", number, received, end) | {"bp": "e"}


def _arrow_end(phase: str, number: int, slot: Mapping[str, Any], at: float) -> dict[str, Any]:
    return {
        "name": "transfer",
        "cat": "transfer",
        "ph": phase,
        "id": number,
        "pid": slot["pid"],
        "tid": slot["tid"],
        "ts": at,
    }
