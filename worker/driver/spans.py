"""What an attempt did, as spans below its own: phases of its start, checkpoints, profiled steps.

They go to the control plane with the reports, which exports them: a driver needs no collector, no credentials and no
packages for that. Knows nothing of OpenTelemetry.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from worker.driver.step_record import StepRecord
from worker.logs import TraceParent
from worker.program import COMPUTE_LANE

_SHOWN = (
    *("loss", "step_s", "makespan_s", "bubble_ratio", "exposed_transfer_s", "overlap_ratio"),
    *("grad_norm", "learning_rate"),
)


class Spans:
    """`send` is given each span as an item of a report; without one nothing is made."""

    def __init__(
        self, trace: TraceParent | None, send: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self._trace, self._send = trace, send

    @classmethod
    def from_environment(cls, send: Callable[[dict[str, Any]], None]) -> Spans:
        """SLOTLINE_TRACEPARENT is the attempt's span; with SLOTLINE_SPANS the control plane exports them."""
        wanted = os.environ.get("SLOTLINE_SPANS") == "1"
        return cls(TraceParent.read(os.environ.get("SLOTLINE_TRACEPARENT")), send if wanted else None)

    def ended(self, name: str, seconds: float) -> None:
        """Something that took so long is over now."""
        if self._trace is not None and self._send is not None:
            now = time.time()
            self._send(_span(self._trace.child().span_id, name, now - seconds, now, {}))

    def step(self, record: StepRecord, *, profiled: bool) -> dict[str, str]:
        """A finished step: a span where it is profiled. What finds it from a metric: the labels of an exemplar."""
        if self._trace is None:
            return {}
        labels = {"trace_id": self._trace.trace_id, "step": str(record.report["step"])}
        if not profiled or self._send is None:
            return labels
        step = self._trace.child().span_id
        began = record.timeline["started_at"]
        ends = began + max(slot["end_s"] for slot in record.timeline["slots"])
        shown = {name: record.report.get(name) for name in _SHOWN}
        self._send(_span(step, "step", began, ends, {"step": record.report["step"]} | shown))
        for mesh, slots in _by_mesh(record.timeline).items():
            lengths: dict[str, float] = defaultdict(float)
            for slot in slots:
                lane = "compute_s" if slot["lane"] == COMPUTE_LANE else "transfer_s"
                lengths[lane] += slot["end_s"] - slot["start_s"]
            first, last = min(slot["start_s"] for slot in slots), max(slot["end_s"] for slot in slots)
            about = {"step": record.report["step"], "mesh": mesh, "slots": len(slots)} | lengths
            own = self._trace.child().span_id
            self._send(_span(own, f"step on {mesh}", began + first, began + last, about, parent=step))
        return labels | {"span_id": step}


def _by_mesh(timeline: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    slots: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for slot in timeline["slots"]:
        slots[slot["mesh"]].append(slot)
    return dict(slots)


def _span(
    span_id: str,
    name: str,
    started_at: float,
    ended_at: float,
    attributes: Mapping[str, Any],
    *,
    parent: str | None = None,
) -> dict[str, Any]:
    return {
        "name": name,
        "span_id": span_id,
        "parent_id": parent,
        "started_at": started_at,
        "ended_at": ended_at,
        "attributes": {f"slotline.{name}": value for name, value in attributes.items()},
    }
