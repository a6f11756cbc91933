"""Renders the slots of the last profiled step and of the plan as Prometheus gauges for a separate endpoint.

There are thousands of them. A scrape sees one snapshot or the next, never a mix. Slots beyond MAX_SLOTS are left out
and counted; sums and lengths are made in metrics.py from all slots.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

MAX_SLOTS = 4096
_SLOT_LABELS = ("mesh", "lane", "stage", "action", "microbatch")


@dataclass(frozen=True, slots=True)
class _Slot:
    """One slot as it is exposed: its labels, its start (Unix time, or from the step's start), its length."""

    labels: Mapping[str, str]
    start_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class SlotSnapshot:
    """The slots of one step; never changed, only replaced as a whole. `step` is None for a plan."""

    step: int | None
    started_at: float
    slots: tuple[_Slot, ...]
    dropped: int


class SlotPage:
    """The slots of one job as text for Prometheus; each snapshot is written once, however often it is asked for."""

    def __init__(self, job: str) -> None:
        self._labels = {"job": job}
        self.measured: SlotSnapshot | None = None
        self.planned: SlotSnapshot | None = None
        self._written: dict[int, tuple[SlotSnapshot, bytes]] = {}

    def text(self) -> bytes:
        """The current `measured` and `planned` slots in Prometheus's text format."""
        shown = self.measured, self.planned
        return b"".join(self._text(place, slots) for place, slots in enumerate(shown) if slots is not None)

    def _text(self, place: int, shown: SlotSnapshot) -> bytes:
        written = self._written.get(place)
        if written is None or written[0] is not shown:
            written = shown, generate_latest(_FixedCollector(self._families(shown)))
            self._written[place] = written
        return written[1]

    def _families(self, shown: SlotSnapshot) -> list[Metric]:
        metrics = [
            _gauge_family(*gauge) for gauge in (_PLANNED_GAUGES if shown.step is None else _MEASURED_GAUGES)
        ]
        starts, durations = metrics[:2]
        for slot in shown.slots:
            labels = {**self._labels, **slot.labels}
            starts.add_sample(starts.name, labels, slot.start_s)
            durations.add_sample(durations.name, labels, slot.duration_s)
        if shown.step is not None:
            for metric, value in zip(metrics[2:], (shown.step, shown.started_at), strict=True):
                metric.add_sample(metric.name, self._labels, value)
        return metrics


@dataclass(frozen=True)
class _FixedCollector(Collector):
    """A collector of finished metrics."""

    metrics: list[Metric]

    def collect(self) -> list[Metric]:
        return self.metrics


_MEASURED_GAUGES = (
    ("slot_start_timestamp_seconds", "Start of a slot of the last profiled step, as Unix time.", "seconds"),
    ("slot_duration_seconds", "Length of a slot of the last profiled step.", "seconds"),
    ("slots_step", "The profiled step to which the slots beside it belong.", ""),
    ("slots_start_timestamp_seconds", "Start of that step's first slot, as Unix time.", "seconds"),
)
_PLANNED_GAUGES = (
    ("plan_slot_start_seconds", "Start of a slot by the plan, from the start of the step.", "seconds"),
    ("plan_slot_duration_seconds", "Length of a slot by the plan.", "seconds"),
)


def _gauge_family(name: str, text: str, unit: str) -> Metric:
    return Metric(f"slotline_{name}", text, "gauge", unit)


def slot_snapshot(
    slots: Sequence[Mapping[str, Any]],
    rows: Mapping[str, str],
    *,
    step: int | None = None,
    started_at: float = 0.0,
) -> SlotSnapshot:
    """The first `MAX_SLOTS` of `slots` (which are in order of start), each with labels of its own.

    `rows` says how a mesh is called in the label `row`, see `row_names`. Two tensors that one stage sends to one mesh
    for one microbatch share all labels; such slots carry their `edge` as one more, since Prometheus keeps one of two
    equal series.
    """
    exposed = slots[:MAX_SLOTS]
    labels = [{name: text(slot.get(name)) for name in _SLOT_LABELS} for slot in exposed]
    times = Counter(tuple(label.values()) for label in labels)
    out = []
    for slot, label in zip(exposed, labels, strict=True):
        if times[tuple(label.values())] > 1:
            label["edge"] = text(slot.get("edge"))
        label["row"] = f"{rows.get(slot['mesh'], slot['mesh'])} {slot['lane']}"
        out.append(_Slot(label, started_at + slot["start_s"], slot["end_s"] - slot["start_s"]))
    return SlotSnapshot(step, started_at, tuple(out), len(slots) - len(exposed))


def row_names(meshes: Sequence[str]) -> dict[str, str]:
    """Names for meshes, given in the order of the pipeline, that stand in this order when they are sorted as text.

    Numbers are padded: m2 is m02 beside m10. Where that is not enough the place in the pipeline goes before the name.
    """
    width = max((len(number) for mesh in meshes for number in re.findall(r"\d+", mesh)), default=0)
    padded = {mesh: re.sub(r"\d+", lambda number: number[0].zfill(max(2, width)), mesh) for mesh in meshes}
    if list(padded.values()) == sorted(set(padded.values())):
        return padded
    digits = len(str(len(meshes) - 1))
    return {mesh: f"{place:0{digits}} {mesh}" for place, mesh in enumerate(meshes)}


def text(value: Any) -> str:
    """A label's value; empty for None."""
    return "" if value is None else str(value)
