"""A timeline as a Chrome trace (also read by Perfetto): planned and measured side by side."""

from __future__ import annotations

from typing import Any

from service.api.schemas import SlotView, TimelineView
from service.scheduler.views.flows import NANOSECOND, Arrows

_MICROSECONDS = 1e6


def chrome_trace(view: TimelineView) -> dict[str, Any]:
    """One process a side and mesh, one thread a lane, an arrow for each transfer; times in microseconds from the
    step's start."""
    events: list[dict[str, Any]] = []
    arrows = Arrows()
    number = 0
    for side, timeline in (("planned", view.planned), ("measured", view.measured)):
        slots = [] if timeline is None else timeline.slots
        for mesh in dict.fromkeys(slot.mesh for slot in slots):
            number += 1
            of_mesh = [slot for slot in slots if slot.mesh == mesh]
            events += _mesh_events(number, f"{side} {mesh}", of_mesh, side, arrows)
    events += arrows.events()
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "job": view.job_id,
            "step": view.step,
            "started_at": view.started_at,
            "uncertainty_s": view.uncertainty_s,
        },
    }


def _mesh_events(
    number: int, name: str, slots: list[SlotView], side: str, arrows: Arrows
) -> list[dict[str, Any]]:
    lanes = {
        lane: i for i, lane in enumerate(sorted({s.lane for s in slots}, key=lambda x: (x != "compute", x)))
    }
    events = [_named("process_name", number, 0, name), _sorted("process_sort_index", number, 0, number)]
    for lane, thread in lanes.items():
        events.append(_named("thread_name", number, thread, lane))
        events.append(_sorted("thread_sort_index", number, thread, thread))
    for slot in slots:
        label = "" if slot.microbatch is None else f" {slot.microbatch}"
        start, length = slot.start_s * _MICROSECONDS, (slot.end_s - slot.start_s) * _MICROSECONDS
        if slot.peer_mesh is not None:
            length = max(length, NANOSECOND)
        arrows.add(
            side,
            slot.mesh,
            slot.action,
            slot.peer_mesh,
            slot.edge,
            slot.microbatch,
            process=number,
            thread=lanes[slot.lane],
            start=start,
            end=start + length,
        )
        events.append(
            {
                "name": f"{slot.action}{label}",
                "cat": slot.action,
                "ph": "X",
                "pid": number,
                "tid": lanes[slot.lane],
                "ts": start,
                "dur": length,
                "args": slot.model_dump(
                    include={"stage", "peer_stage", "peer_mesh", "edge", "microbatch"}, exclude_none=True
                ),
            }
        )
    return events


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _sorted(kind: str, process: int, thread: int, index: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"sort_index": index}}
