"""Draws a plan as SVG: a band per mesh with its lanes inside, colours by action, transfers as links."""

from __future__ import annotations

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
MAX_DRAWN_SLOTS = 20_000  # slots
_LEFT, _TOP, _COMPUTE_LANE_HEIGHT, _TRANSFER_LANE_HEIGHT, _GAP = 92, 34, 24, 7, 12


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
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + width + 20:.0f} {height + 44}" '
        f'width="{_LEFT + width + 20:.0f}" height="{height + 44}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="13">{escape(_title(plan))}</text>',
    ]
    for name, (top, bottom) in bands.items():
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{width:.2f}" height="{bottom - top}" fill="#f4f4f4"/>'
            f'<text x="{_LEFT - 8}" y="{top + 16}" text-anchor="end" font-weight="bold">{escape(name)}</text>'
        )
    for (_mesh, lane), top in tops.items():
        if lane != "compute":
            label = lane.replace("send:", "→ ").replace("recv:", "← ")
            parts.append(
                f'<text x="{_LEFT - 8}" y="{top + _TRANSFER_LANE_HEIGHT}" text-anchor="end" font-size="8" fill="#666666">'
                f"{escape(label)}</text>"
            )
    links = [_transfer_svg(slot, tops, scale) for slot in plan.slots if slot.action.startswith("SEND")]
    parts.append(f'<g stroke="#888888" stroke-width="0.7" fill="none" opacity="0.7">{"".join(links)}</g>')
    parts += [_slot_svg(slot, tops[slot.mesh, slot.lane], scale) for slot in plan.slots]
    parts += _axis(makespan, scale, height)
    parts += _legend(plan, height)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


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
    whose = "" if slot.microbatch is None else f" microbatch {slot.microbatch}"
    label = f"{slot.action} {slot.stage}{whose}: {slot.start_s:g} to {slot.end_s:g} s"
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


def _axis(makespan: float, scale: float, height: int) -> list[str]:
    parts = [
        f'<line x1="{_LEFT}" y1="{height}" x2="{_LEFT + makespan * scale:.2f}" y2="{height}" stroke="#333333"/>'
    ]
    for tick in range(11):
        time = makespan * tick / 10
        x = _LEFT + time * scale
        parts.append(
            f'<line x1="{x:.2f}" y1="{height}" x2="{x:.2f}" y2="{height + 4}" stroke="#333333"/>'
            f'<text x="{x:.2f}" y="{height + 16}" text-anchor="middle">{time:.4g}</text>'
        )
    return parts


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
