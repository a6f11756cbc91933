"""A resharding plan as a picture: a band a host, its cards and local links inside, colours by tile."""

from __future__ import annotations

from xml.sax.saxutils import escape

from service.scheduler.model.spec import SpecError
from service.scheduler.resharding.plan import PlannedMessage, PlannedWorker, ReshardingPlan

COLOURS = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2"),
    *("#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#86bcb6"),
)
LARGEST = 20_000  # messages
_LEFT, _TOP, _LANE, _GAP, _WIDTH, _RIGHT = 150, 34, 12, 12, 900.0, 50
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))

Lane = tuple[str, str]
"""(host, what of it): "card 0 sends", "target/3 copies in", …"""


def picture(plan: ReshardingPlan) -> str:
    """SVG text; raises SpecError where the plan has more messages than a picture can show."""
    if len(plan.messages) > LARGEST:
        raise SpecError(
            f"a picture shows at most {LARGEST} messages, this plan has {len(plan.messages)}: use --format json"
        )
    scale = _WIDTH / (plan.makespan_s or 1.0)
    workers = {worker.name: worker for worker in plan.workers}
    lanes = [_lanes(workers[message.sender], workers[message.receiver], message) for message in plan.messages]
    tops, bands, height = _layout(plan, {lane for pair in lanes for lane in pair})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + _RIGHT:.0f} {height + 24}" '
        f'width="{_LEFT + _WIDTH + _RIGHT:.0f}" height="{height + 24}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="13">{escape(_title(plan))}</text>',
    ]
    for host, (top, bottom) in bands.items():
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH:.2f}" height="{bottom - top}" fill="#f4f4f4"/>'
            f'<text x="{_LEFT - 8}" y="{top + 12}" text-anchor="end" font-weight="bold">{escape(host)}</text>'
        )
    for (_, name), top in tops.items():
        parts.append(
            f'<text x="{_LEFT - 8}" y="{top + 10}" text-anchor="end" font-size="8" fill="#666666">{escape(name)}</text>'
        )
    for message, pair in zip(plan.messages, lanes, strict=True):
        parts += [_box(message, tops[lane], scale) for lane in pair]
    parts += _axis(plan.makespan_s, height)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _title(plan: ReshardingPlan) -> str:
    proof = "optimal" if plan.proven_optimal else f"bound {plan.lower_bound_s:.6g} s"
    return f"{plan.strategy}: makespan {plan.makespan_s:.6g} s ({proof}), {len(plan.tiles)} tiles"


def _lanes(giver: PlannedWorker, taker: PlannedWorker, message: PlannedMessage) -> tuple[Lane, Lane]:
    if message.local:
        return (giver.host, f"{giver.name} copies out"), (taker.host, f"{taker.name} copies in")
    return (giver.host, f"card {giver.card} sends"), (taker.host, f"card {taker.card} receives")


def _layout(
    plan: ReshardingPlan, lanes: set[Lane]
) -> tuple[dict[Lane, int], dict[str, tuple[int, int]], int]:
    """Top of every lane, (top, bottom) of every host's band, and the height of all."""
    tops, bands, y = {}, {}, _TOP
    for host in dict.fromkeys(worker.host for worker in plan.workers):
        top, y = y, y + 16
        for lane in sorted(lane for lane in lanes if lane[0] == host):
            tops[lane] = y
            y += _LANE + 2
        bands[host] = (top, y)
        y += _GAP
    return tops, bands, y


def _box(message: PlannedMessage, top: int, scale: float) -> str:
    x, width = _LEFT + message.start_s * scale, (message.end_s - message.start_s) * scale
    label = (
        f"tile {message.tile} [{message.begin}:{message.end}] {message.sender} to {message.receiver}: "
        f"{message.start_s:.6g} to {message.end_s:.6g} s"
    )
    box = (
        f'<rect x="{x:.2f}" y="{top}" width="{max(width, 0.5):.2f}" height="{_LANE}" '
        f'fill="{COLOURS[message.tile % len(COLOURS)]}" stroke="#ffffff" stroke-width="0.5">'
        f"<title>{escape(label)}</title></rect>"
    )
    if width >= 14:
        box += (
            f'<text x="{x + width / 2:.2f}" y="{top + 10}" text-anchor="middle" fill="#ffffff" font-size="9" '
            f'pointer-events="none">{message.tile}</text>'
        )
    return box


def _axis(makespan_s: float, height: int) -> list[str]:
    unit_s, unit = next((one for one in _UNITS if makespan_s >= one[0] / 10), _UNITS[0])
    parts = [f'<line x1="{_LEFT}" y1="{height}" x2="{_LEFT + _WIDTH:.2f}" y2="{height}" stroke="#333333"/>']
    for tick in range(11):
        x, told = _LEFT + _WIDTH * tick / 10, f"{makespan_s / unit_s * tick / 10:.4g}"
        parts.append(
            f'<line x1="{x:.2f}" y1="{height}" x2="{x:.2f}" y2="{height + 4}" stroke="#333333"/>'
            f'<text x="{x:.2f}" y="{height + 16}" text-anchor="middle">{told}{f" {unit}" if tick == 10 else ""}</text>'
        )
    return parts
