"""Summarises a measured timeline by mesh and in all: makespan, span, bubble ratio, exposed transfers, overlap.

The formulas of DESIGN section 4; REDUCE and STEP come after the makespan and are not part of it. The phases of a
launch, which come before the first step, are told by events of kind LAUNCH_EVENT. Pure and light: no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.contract.program import COMPUTE_LANE, COMPUTE_OPS, TRANSFER_OPS

Interval = tuple[float, float]
LAUNCH_EVENT = "launch"
FIRST_PROFILED_STEPS = 6
"""The steps at the start of an attempt whose slots are all reported: a cold one, and five that calibrate the plan."""


def launch_message(phase: str, seconds: float) -> str:
    """The message of the event that a phase of a launch is over."""
    return f"{phase} took {seconds:.3f} s"


def read_launch_message(message: str) -> tuple[str, float] | None:
    """(phase, seconds) of a `launch_message`; None where it is none."""
    found = re.fullmatch(r"(.{1,100}) took (\d{1,9}\.\d{3}) s", message)
    return None if found is None else (found[1], float(found[2]))


@dataclass(frozen=True)
class MeshSummary:
    """One mesh's share of a timeline, in seconds: `first_s` and `last_s` are when it begins and ends to compute,
    `busy_s` is how long it computes between (`compute_s` counts what overlaps twice)."""

    compute_s: float
    span_s: float
    transfer_s: float
    exposed_transfer_s: float
    first_s: float
    last_s: float
    busy_s: float


@dataclass(frozen=True)
class TimelineSummary:
    """A step's timeline in a few numbers; sums run over the meshes."""

    start_s: float
    makespan_s: float
    span_s: float
    bubble_ratio: float
    exposed_transfer_s: float
    overlap_ratio: float
    meshes: dict[str, MeshSummary]


def summarise(slots: Iterable[Mapping[str, Any]]) -> TimelineSummary:
    """Summarise slots (`mesh`, `lane`, `action`, `start_s`, `end_s`); raises ValueError for none.

    `exposed_transfer_s` of a mesh is the time inside its span in which its compute lane is idle
    while at least one of its transfers runs.
    """
    compute: dict[str, list[Interval]] = {}
    transfers: dict[str, list[Interval]] = {}
    for slot in slots:
        interval = (float(slot["start_s"]), float(slot["end_s"]))
        if slot["lane"] == COMPUTE_LANE and slot["action"] in COMPUTE_OPS:
            compute.setdefault(slot["mesh"], []).append(interval)
        elif slot["action"] in TRANSFER_OPS:
            transfers.setdefault(slot["mesh"], []).append(interval)
    if not compute:
        raise ValueError("a timeline without a compute slot has no makespan")
    start = min(s for lane in (compute, transfers) for spans in lane.values() for s, _ in spans)
    end = max(e for lane in (compute, transfers) for spans in lane.values() for _, e in spans)
    meshes = {mesh: _summarise_mesh(compute[mesh], transfers.get(mesh, [])) for mesh in sorted(compute)}
    makespan = end - start
    busy = sum(m.compute_s for m in meshes.values())
    exposed = sum(m.exposed_transfer_s for m in meshes.values())
    moving = sum(m.transfer_s for m in meshes.values())
    return TimelineSummary(
        start_s=start,
        makespan_s=makespan,
        span_s=max(m.span_s for m in meshes.values()),
        bubble_ratio=1.0 - busy / (len(meshes) * makespan) if makespan > 0 else 0.0,
        exposed_transfer_s=exposed,
        overlap_ratio=1.0 - exposed / moving if moving > 0 else 1.0,
        meshes=meshes,
    )


def _summarise_mesh(compute: list[Interval], transfers: list[Interval]) -> MeshSummary:
    busy, moving = merge_intervals(compute), merge_intervals(transfers)
    first, last = busy[0][0], busy[-1][1]
    inside = [(max(s, first), min(e, last)) for s, e in moving if e > first and s < last]
    covered = overlap_s(inside, busy)
    return MeshSummary(
        compute_s=sum(e - s for s, e in compute),
        span_s=last - first,
        transfer_s=sum(e - s for s, e in moving),
        exposed_transfer_s=sum(e - s for s, e in inside) - covered,
        first_s=first,
        last_s=last,
        busy_s=sum(e - s for s, e in busy),
    )


def merge_intervals(intervals: list[Interval]) -> list[Interval]:
    """Disjoint intervals in ascending order that cover the same time."""
    merged: list[Interval] = []
    for s, e in sorted(intervals):
        if merged and s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], e))
        else:
            merged.append((s, e))
    return merged


def overlap_s(ones: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Seconds in which both run; each sequence is disjoint and ascending."""
    total, a, b = 0.0, 0, 0
    while a < len(ones) and b < len(others):
        (start, end), (other_start, other_end) = ones[a], others[b]
        total += max(0.0, min(end, other_end) - max(start, other_start))
        if end < other_end:
            a += 1
        else:
            b += 1
    return total
