"""Draws a plan as SVG: a band per mesh with its lanes inside, colours by action, transfers as links."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from xml.sax.saxutils import escape

from service.scheduler.problem.spec import PipelineSpec, SpecError
from service.scheduler.programs.plan import Plan, Slot

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
}
MAX_DRAWN_SLOTS = 20_000
_LEFT, _TOP, _COMPUTE_LANE_HEIGHT, _TRANSFER_LANE_HEIGHT, _GAP = 92, 34, 24, 7, 12
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


def plan_svg(spec: PipelineSpec, plan: Plan) -> str:
    """SVG text; raises SpecError where the plan has more slots than a picture can show."""
    if len(plan.slots) > MAX_DRAWN_SLOTS:
        raise SpecError(
            f"a picture shows at most {MAX_DRAWN_SLOTS} slots, this plan has {len(plan.slots)}: use --format chrome"
        )
    makespan = max([plan.makespan_s, *(s.end_s for s in plan.slots if s.action == "REDUCE")]) or 1.0
    shortest = min(
        (s.end_s - s.start_s for s in plan.slots if s.lane == "compute" and s.end_s > s.start_s), default=1.0
    )
    width = min(max(900.0, 22.0 * makespan / shortest), 12_000.0)
    scale = width / makespan
    tops, bands, height = _lane_layout(spec, plan)
    chart = LaneChart(_LEFT, width, height, right_margin=20, bottom_margin=44)
    parts = [chart.band(name, top, bottom, top + 16) for name, (top, bottom) in bands.items()]
    for (_mesh, lane), top in tops.items():
        if lane != "compute":
            label = lane.replace("send:", "→ ").replace("recv:", "← ")
            parts.append(chart.lane_label(label, top + _TRANSFER_LANE_HEIGHT))
    links = [_transfer_svg(slot, tops, scale) for slot in plan.slots if slot.action.startswith("SEND")]
    parts.append(f'<g stroke="#888888" stroke-width="0.7" fill="none" opacity="0.7">{"".join(links)}</g>')
    parts += [_slot_svg(slot, tops[slot.mesh, slot.lane], scale) for slot in plan.slots]
    parts += chart.axis(makespan)
    parts += _legend(plan, height)
    return chart.document(_title(plan), parts)


def _title(plan: Plan) -> str:
    proof = "optimal" if plan.proven_optimal else f"bound {plan.lower_bound_s:g} s"
    return f"{plan.chosen}: makespan {plan.makespan_s:g} s ({proof}), bubble {plan.bubble_ratio:.1%}"


def _lane_layout(
    spec: PipelineSpec, plan: Plan
) -> tuple[dict[tuple[str, str], int], dict[str, tuple[int, int]], int]:
    """Top of every lane, (top, bottom) of every mesh's band, and the height of all."""
    lanes: dict[str, list[str]] = {mesh.name: [] for mesh in spec.meshes}
    for slot in plan.slots:
        if slot.lane not in lanes[slot.mesh]:
            lanes[slot.mesh].append(slot.lane)
    tops, bands, y = {}, {}, _TOP
    for mesh, names in lanes.items():
        top = y
        y += 2
        for name in names:
            tops[mesh, name] = y
            y += _COMPUTE_LANE_HEIGHT + 2 if name == "compute" else _TRANSFER_LANE_HEIGHT + 2
        bands[mesh] = (top, y)
        y += _GAP
    return tops, bands, y


def _slot_svg(slot: Slot, top: int, scale: float) -> str:
    x, width = _LEFT + slot.start_s * scale, (slot.end_s - slot.start_s) * scale
    height = _COMPUTE_LANE_HEIGHT if slot.lane == "compute" else _TRANSFER_LANE_HEIGHT
    microbatch = "" if slot.microbatch is None else f" microbatch {slot.microbatch}"
    label = f"{slot.action} {slot.stage}{microbatch}: {slot.start_s:g} to {slot.end_s:g} s"
    box = (
        f'<rect x="{x:.2f}" y="{top}" width="{max(width, 0.5):.2f}" height="{height}" '
        f'fill="{ACTION_COLOURS[slot.action]}" stroke="#ffffff" stroke-width="0.5"><title>{escape(label)}</title></rect>'
    )
    if slot.lane == "compute" and width >= 11:
        ink = "#333333" if slot.action == "W" else "#ffffff"
        box += (
            f'<text x="{x + width / 2:.2f}" y="{top + 16}" text-anchor="middle" fill="{ink}" '
            f'pointer-events="none">{slot.microbatch}</text>'
        )
    return box


def _transfer_svg(slot: Slot, tops: dict[tuple[str, str], int], scale: float) -> str:
    x1, x2 = _LEFT + slot.start_s * scale, _LEFT + slot.end_s * scale
    y1 = tops[slot.mesh, slot.lane] + _TRANSFER_LANE_HEIGHT / 2
    y2 = tops[str(slot.peer_mesh), f"recv:{slot.mesh}"] + _TRANSFER_LANE_HEIGHT / 2
    return f'<path d="M{x1:.2f} {y1}L{x2:.2f} {y2}"/>'


def _legend(plan: Plan, height: int) -> list[str]:
    used = [action for action in ACTION_COLOURS if any(slot.action == action for slot in plan.slots)]
    names = {"SEND_F": "forward transfer", "SEND_B": "gradient transfer", "REDUCE": "sum of gradients"}
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
