"""Arrows between the two ends of each transfer in a Chrome/Perfetto trace.

Perfetto binds each end of an arrow to the slice that encloses its time on its thread (an end needs `bp: e` for
that), reads ids that are strings as hexadecimal, and cuts times to nanoseconds. So both ends lie inside their
slots by two, and ids are whole numbers, told once for the whole trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

NANOSECOND = 1e-3
"""In microseconds, which is what traces count. No slot is drawn shorter: nothing could lie inside it."""


@dataclass(frozen=True)
class _Half:
    """One end of a transfer as it was drawn: its place, and its times in microseconds."""

    process: int
    thread: int
    start: float
    end: float


@dataclass
class Arrows:
    """Collects the halves of transfers while slots are drawn; `events` are the arrows between them."""

    _sent: dict[tuple[Any, ...], _Half] = field(default_factory=dict)
    _received: dict[tuple[Any, ...], _Half] = field(default_factory=dict)

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
        """A slot that was drawn from `start` to `end` (microseconds); what is no transfer is left out.

        `side` tells timelines of one trace apart: planned and measured transfers have the same names.
        """
        direction = action.partition("_")[2]
        if not direction:
            return
        sends = action.startswith("SEND")
        way = (mesh, peer_mesh) if sends else (peer_mesh, mesh)
        halves = self._sent if sends else self._received
        halves[side, direction, edge, microbatch, *way] = _Half(process, thread, start, end)

    def events(self) -> Iterator[dict[str, Any]]:
        """For each transfer with both ends: from the end of the SEND to the end of the RECV.

        A RECV that ended first (clocks differ by a little) draws the beginning back: no arrow points into the past.
        """
        for number, (key, sent) in enumerate(self._sent.items(), start=1):
            received = self._received.get(key)
            if received is None:
                continue
            end = max(received.start, received.end - 2 * NANOSECOND)
            begin = max(sent.start, min(sent.end - 2 * NANOSECOND, end))
            if begin <= end:
                yield _end("s", number, sent, begin)
                yield _end("f", number, received, end) | {"bp": "e"}


def _end(phase: str, number: int, half: _Half, at: float) -> dict[str, Any]:
    return {
        "name": "transfer",
        "cat": "transfer",
        "ph": phase,
        "id": number,
        "pid": half.process,
        "tid": half.thread,
        "ts": at,
    }
