"""Writes a plan as a Chrome/Perfetto trace: a process per mesh, a thread per lane, an arrow per transfer.

Perfetto binds each end of an arrow to the slice that encloses its time on its thread (an end needs `bp: e` for
that), reads ids that are strings as hexadecimal, and cuts times to nanoseconds. So both ends lie inside their
slots by two nanoseconds, and ids are whole numbers, given once for the whole trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.contract.buckets import REDUCE_LANE

NANOSECOND_US = 1e-3
"""A nanosecond in microseconds, the unit of traces. No slot is drawn shorter: an arrow could not end inside it."""


@dataclass(frozen=True)
class _TransferEnd:
    """One end of a drawn transfer: its process and thread, and its times in microseconds."""

    process: int
    thread: int
    start: float
    end: float


@dataclass
class TransferArrows:
    """Collects the halves of transfers while slots are drawn; `events` are the arrows between them."""

    _sent: dict[tuple[Any, ...], _TransferEnd] = field(default_factory=dict)
    _received: dict[tuple[Any, ...], _TransferEnd] = field(default_factory=dict)

    def add(
        self,
        side: str,
        mesh: str,
        action: str,
        peer_mesh: str | None,
        edge: int | None,
        microbatch: int | None,
        *,
        process: int,
        thread: int,
        start: float,
        end: float,
    ) -> None:
        """A slot that was drawn from `start` to `end` (microseconds); compute slots are ignored.

        `side` distinguishes the timelines of one trace: planned and measured transfers have the same names.
        """
        direction = action.partition("_")[2]
        if not direction:
            return
        sends = action.startswith("SEND")
        meshes = (mesh, peer_mesh) if sends else (peer_mesh, mesh)
        halves = self._sent if sends else self._received
        halves[side, direction, edge, microbatch, *meshes] = _TransferEnd(process, thread, start, end)

    def events(self) -> Iterator[dict[str, Any]]:
        """The arrows of all transfers with both ends, from the end of the SEND to the end of the RECV.

        A RECV that ended first (clocks differ by a little) draws the beginning back: no arrow points into the past.
        """
        for number, (key, sent) in enumerate(self._sent.items(), start=1):
            received = self._received.get(key)
            if received is None:
                continue
            end = max(received.start, received.end - 2 * NANOSECOND_US)
            begin = max(sent.start, min(sent.end - 2 * NANOSECOND_US, end))
            if begin <= end:
                yield _arrow_end("s", number, sent, begin)
                yield _arrow_end("f", number, received, end) | {"bp": "e"}


def _arrow_end(phase: str, number: int, half: _TransferEnd, at: float) -> dict[str, Any]:
    return {
        "name": "transfer",
        "cat": "transfer",
        "ph": phase,
        "id": number,
        "pid": half.process,
        "tid": half.thread,
        "ts": at,
    }


def chrome_trace(slots: Iterable[Mapping[str, Any]]) -> str:
    """The trace of slots in their JSON form (planned or measured); times become microseconds."""
    events: list[dict[str, Any]] = []
    lanes: dict[tuple[str, str], tuple[int, int]] = {}
    meshes: dict[str, int] = {}
    arrows = TransferArrows()
    for slot in slots:
        mesh, lane, action = slot["mesh"], slot["lane"], slot["action"]
        if mesh not in meshes:
            meshes[mesh] = len(meshes)
            events.append(_metadata("process_name", meshes[mesh], 0, {"name": mesh}))
            events.append(_metadata("process_sort_index", meshes[mesh], 0, {"sort_index": meshes[mesh]}))
        process = meshes[mesh]
        if (mesh, lane) not in lanes:
            thread = sum(1 for other, _ in lanes if other == mesh)
            lanes[mesh, lane] = (process, thread)
            events.append(_metadata("thread_name", process, thread, {"name": lane}))
            events.append(_metadata("thread_sort_index", process, thread, {"sort_index": thread}))
        thread = lanes[mesh, lane][1]
        start = slot["start_s"] * 1e6
        length = max(NANOSECOND_US, slot["end_s"] * 1e6 - start)
        keys = ("stage", "microbatch", "peer_stage", "peer_mesh", "edge")
        stage, microbatch = slot.get("stage"), slot.get("microbatch")
        events.append(
            {
                "name": " ".join([action, *_stage_label(stage, microbatch)]),
                "cat": "transfer" if "_" in action else "reduce" if lane == REDUCE_LANE else "compute",
                "ph": "X",
                "pid": process,
                "tid": thread,
                "ts": start,
                "dur": length,
                "args": {key: slot[key] for key in keys if slot.get(key) is not None},
            }
        )
        arrows.add(
            "planned",
            mesh,
            action,
            slot.get("peer_mesh"),
            slot.get("edge"),
            microbatch,
            process=process,
            thread=thread,
            start=start,
            end=start + length,
        )
    events += arrows.events()
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n"


def _stage_label(stage: str | None, microbatch: int | None) -> list[str]:
    if stage is None:
        return []
    return [stage if microbatch is None else f"{stage}/{microbatch}"]


def _metadata(name: str, process: int, thread: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": dict(args)}
