"""Draws a plan or a job's timeline as SVG: a band per mesh with its lanes inside, colours by action, transfers as links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol
from xml.sax.saxutils import escape

from service.scheduler.problem.spec import PipelineSpec, SpecError
from service.scheduler.programs.plan import Plan
from worker.contract.program import COMPUTE_LANE, SEND_OPS, receive_lane

ACTION_COLOURS = {
    "F": "#4e79a7",
    "B": "#59a14f",
    "I": "#76b7b2",
    "W": "#edc948",
    "SEND_F": "#a0c4e8",
    "RECV_F": "#a0c4e8",
    "SEND_B": "#a9d6a3",
    "RECV_B": "#a9d6a3",
    "REDUCE": "#b07aa1",
    "STEP": "#9c755f",
}
MAX_DRAWN_SLOTS = 20_000
_LEFT, _TOP, _COMPUTE_LANE_HEIGHT, _TRANSFER_LANE_HEIGHT, _GAP, _HEADING_HEIGHT = 92, 34, 24, 7, 12, 20
_AXIS_INTERVALS = 10


@dataclass(frozen=True)
class LaneChart:
    """The frame of an SVG time chart, in pixels: a title, bands with their lanes below each other, and a time axis.

    Bands begin at x = `left`, are `width` wide and end at y = `height`; the margins lie right of them and below.
    """

    left: int
    width: float
    height: int
    right_margin: int
    bottom_margin: int

    def document(self, title: str, parts: Iterable[str]) -> str:
        """SVG text of the title and of `parts`."""
        width, height = f"{self.left + self.width + self.right_margin:.0f}", self.height + self.bottom_margin
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="Helvetica, Arial, sans-serif" '
            'font-size="11">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<text x="{self.left}" y="20" font-size="13">{escape(title)}</text>',
            *parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def band(self, name: str, top: int, bottom: int, baseline: int) -> str:
        """The background of a band and its name, written at y = `baseline`."""
        return (
            f'<rect x="{self.left}" y="{top}" width="{self.width:.2f}" height="{bottom - top}" fill="#f4f4f4"/>'
            f'<text x="{self.left - 8}" y="{baseline}" text-anchor="end" font-weight="bold">{escape(name)}</text>'
        )

    def lane_label(self, label: str, baseline: int) -> str:
        return (
            f'<text x="{self.left - 8}" y="{baseline}" text-anchor="end" font-size="8" fill="#666666">'
            f"{escape(label)}</text>"
        )

    def axis(self, length: float, unit: str = "") -> list[str]:
        """The time axis from 0 to `length`; `unit` follows its last number."""
        y = self.height
        right = f"{self.left + self.width:.2f}"
        parts = [f'<line x1="{self.left}" y1="{y}" x2="{right}" y2="{y}" stroke="#333333"/>']
        for tick in range(_AXIS_INTERVALS + 1):
            x = self.left + self.width * tick / _AXIS_INTERVALS
            label = f"{length * tick / _AXIS_INTERVALS:.4g}{unit if tick == _AXIS_INTERVALS else ''}"
            parts.append(
                f'<line x1="{x:.2f}" y1="{y}" x2="{x:.2f}" y2="{y + 4}" stroke="#333333"/>'
                f'<text x="{x:.2f}" y="{y + 16}" text-anchor="middle">{label}</text>'
            )
        return parts


class DrawnSlot(Protocol):
    """A slot of a plan, or a measured one, REDUCE and STEP too, which have no microbatch."""

    mesh: str
    lane: str
    action: str
    stage: str | None
    microbatch: int | None
    peer_mesh: str | None
    start_s: float
    end_s: float


def plan_svg(spec: PipelineSpec, plan: Plan) -> str:
    """SVG text; raises SpecError where the plan has more slots than a picture can show."""
    if len(plan.slots) > MAX_DRAWN_SLOTS:
        raise SpecError(
            f"a picture shows at most {MAX_DRAWN_SLOTS} slots, this plan has {len(plan.slots)}: use --format chrome"
        )
    end_s = max([plan.makespan_s, *(s.end_s for s in plan.slots if s.action == "REDUCE")]) or 1.0
    shortest_s = min(_compute_seconds(plan.slots), default=1.0)
    meshes = [mesh.name for mesh in spec.meshes]
    return _draw(_title(plan), {"": plan.slots}, meshes, end_s, 22.0 * end_s / shortest_s)


def timeline_svg(title: str, sides: Mapping[str, Sequence[DrawnSlot]]) -> str:
    """SVG text of timelines below each other on one scale, each under its name (planned, measured).

    Raises ValueError where there is no slot, or more than a picture can show.
    """
    slots = [slot for side in sides.values() for slot in side]
    if not 0 < len(slots) <= MAX_DRAWN_SLOTS:
        raise ValueError(f"a picture shows 1 to {MAX_DRAWN_SLOTS} slots, this timeline has {len(slots)}")
    end_s = max(slot.end_s for slot in slots) or 1.0
    typical_s = median(_compute_seconds(slots) or [end_s])
    meshes = list(dict.fromkeys(slot.mesh for slot in slots))
    return _draw(title, sides, meshes, end_s, 22.0 * end_s / typical_s)


def _compute_seconds(slots: Iterable[DrawnSlot]) -> list[float]:
    return [s.end_s - s.start_s for s in slots if s.lane == COMPUTE_LANE and s.end_s > s.start_s]


def _draw(
    title: str,
    sides: Mapping[str, Sequence[DrawnSlot]],
    meshes: Sequence[str],
    end_s: float,
    wanted_width: float,
) -> str:
    width = min(max(900.0, wanted_width), 12_000.0)
    headings, layouts, bottom = [], [], _TOP
    for name, slots in sides.items():
        if name:
            headings.append(f'<text x="{_LEFT}" y="{bottom + 12}" font-weight="bold">{escape(name)}</text>')
            bottom += _HEADING_HEIGHT
        tops, bands, bottom = _lane_layout(meshes, slots, bottom)
        layouts.append((slots, tops, bands))
    chart = LaneChart(_LEFT, width, bottom, right_margin=20, bottom_margin=44)
    parts = headings
    for slots, tops, bands in layouts:
        parts += _lanes_svg(chart, tops, bands)
        sent = [slot for slot in slots if slot.action in SEND_OPS and _receiving_lane(slot) in tops]
        links = [_transfer_svg(slot, tops, width / end_s) for slot in sent]
        parts.append(f'<g stroke="#888888" stroke-width="0.7" fill="none" opacity="0.7">{"".join(links)}</g>')
        parts += [_slot_svg(slot, tops[slot.mesh, slot.lane], width / end_s) for slot in slots]
    parts += chart.axis(end_s)
    parts += _legend([slot for slots in sides.values() for slot in slots], bottom)
    return chart.document(title, parts)


def _lanes_svg(
    chart: LaneChart, tops: Mapping[tuple[str, str], int], bands: Mapping[str, tuple[int, int]]
) -> list[str]:
    parts = [chart.band(name, top, bottom, top + 16) for name, (top, bottom) in bands.items()]
    for (_mesh, lane), top in tops.items():
        if lane != COMPUTE_LANE:
            label = lane.replace("send:", "→ ").replace("recv:", "← ")
            parts.append(chart.lane_label(label, top + _TRANSFER_LANE_HEIGHT))
    return parts


def _title(plan: Plan) -> str:
    proof = "optimal" if plan.proven_optimal else f"bound {plan.lower_bound_s:g} s"
    return f"{plan.chosen}: makespan {plan.makespan_s:g} s ({proof}), bubble {plan.bubble_ratio:.1%}"


def _lane_layout(
    meshes: Sequence[str], slots: Sequence[DrawnSlot], y: int
) -> tuple[dict[tuple[str, str], int], dict[str, tuple[int, int]], int]:
    """Top of every lane, (top, bottom) of every mesh's band, and the bottom of all, from `y` on."""
    lanes: dict[str, list[str]] = {mesh: [] for mesh in meshes}
    for slot in slots:
        if slot.lane not in lanes[slot.mesh]:
            lanes[slot.mesh].append(slot.lane)
    tops, bands = {}, {}
    for mesh, names in lanes.items():
        top = y
        y += 2
        for name in names:
            tops[mesh, name] = y
            y += _COMPUTE_LANE_HEIGHT + 2 if name == COMPUTE_LANE else _TRANSFER_LANE_HEIGHT + 2
        bands[mesh] = (top, y)
        y += _GAP
    return tops, bands, y


def _slot_svg(slot: DrawnSlot, top: int, scale: float) -> str:
    x, width = _LEFT + slot.start_s * scale, (slot.end_s - slot.start_s) * scale
    height = _COMPUTE_LANE_HEIGHT if slot.lane == COMPUTE_LANE else _TRANSFER_LANE_HEIGHT
    microbatch = "" if slot.microbatch is None else f" microbatch {slot.microbatch}"
    stage = "" if slot.stage is None else f" {slot.stage}"
    label = f"{slot.action}{stage}{microbatch}: {slot.start_s:g} to {slot.end_s:g} s"
    box = (
        f'<rect x="{x:.2f}" y="{top}" width="{max(width, 0.5):.2f}" height="{height}" '
        f'fill="{ACTION_COLOURS[slot.action]}" stroke="#ffffff" stroke-width="0.5"><title>{escape(label)}</title></rect>'
    )
    if slot.lane == COMPUTE_LANE and slot.microbatch is not None and width >= 11:
        ink = "#333333" if slot.action == "W" else "#ffffff"
        box += (
            f'<text x="{x + width / 2:.2f}" y="{top + 16}" text-anchor="middle" fill="{ink}" '
            f'pointer-events="none">{slot.microbatch}</text>'
        )
    return box


def _receiving_lane(slot: DrawnSlot) -> tuple[str, str]:
    return str(slot.peer_mesh), receive_lane(slot.mesh)


def _transfer_svg(slot: DrawnSlot, tops: Mapping[tuple[str, str], int], scale: float) -> str:
    x1, x2 = _LEFT + slot.start_s * scale, _LEFT + slot.end_s * scale
    y1 = tops[slot.mesh, slot.lane] + _TRANSFER_LANE_HEIGHT / 2
    y2 = tops[_receiving_lane(slot)] + _TRANSFER_LANE_HEIGHT / 2
    return f'<path d="M{x1:.2f} {y1}L{x2:.2f} {y2}"/>'


def _legend(slots: Iterable[DrawnSlot], height: int) -> list[str]:
    shown = {slot.action for slot in slots}
    used = [action for action in ACTION_COLOURS if action in shown]
    names = {"SEND_F": "forward transfer", "SEND_B": "gradient transfer", "REDUCE": "sum of gradients"}
    names["STEP"] = "optimizer step"
    words = {"F": "F forward", "B": "B backward", "I": "I input gradient", "W": "W weight gradient"}
    parts, x = [], _LEFT
    for action in used:
        if action.startswith("RECV"):
            continue
        label = words.get(action) or names[action]
        parts.append(
            f'<rect x="{x}" y="{height + 25}" width="12" height="12" fill="{ACTION_COLOURS[action]}"/>'
            f'<text x="{x + 16}" y="{height + 35}">{label}</text>'
        )
        x += 30 + 7 * len(label)
    return parts
