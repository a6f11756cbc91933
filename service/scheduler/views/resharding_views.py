"""Draws a resharding plan as SVG (a band per host, a lane per card and local link) and as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from service.scheduler.problem.spec import SpecError
from service.scheduler.resharding.resharding_plan import PlannedMessage, PlannedResharding, PlannedWorker
from service.scheduler.views.svg import LaneChart

TILE_COLOURS = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2"),
    *("#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#86bcb6"),
)
MAX_DRAWN_MESSAGES = 20_000
_LEFT, _TOP, _LANE, _GAP, _WIDTH, _RIGHT = 150, 34, 12, 12, 900.0, 50
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))

HostLane = tuple[str, str]
"""(host, lane): "card 0 sends", "target/3 copies in", …"""


def resharding_svg(plan: PlannedResharding) -> str:
    """SVG text; raises SpecError where the plan has more messages than a picture can show."""
    if len(plan.messages) > MAX_DRAWN_MESSAGES:
        raise SpecError(
            f"a picture shows at most {MAX_DRAWN_MESSAGES} messages, this plan has {len(plan.messages)}: use --format json"
        )
    scale = _WIDTH / (plan.makespan_s or 1.0)
    workers = {worker.name: worker for worker in plan.workers}
    lanes = [
        _message_lanes(workers[message.sender], workers[message.receiver], message)
        for message in plan.messages
    ]
    tops, bands, height = _lane_layout(plan, {lane for pair in lanes for lane in pair})
    chart = LaneChart(_LEFT, _WIDTH, height, right_margin=_RIGHT, bottom_margin=24)
    parts = [chart.band(host, top, bottom, top + 12) for host, (top, bottom) in bands.items()]
    parts += [chart.lane_label(name, top + 10) for (_, name), top in tops.items()]
    for message, pair in zip(plan.messages, lanes, strict=True):
        parts += [_message_svg(message, tops[lane], scale) for lane in pair]
    unit_s, unit = next((unit for unit in _UNITS if plan.makespan_s >= unit[0] / 10), _UNITS[0])
    parts += chart.axis(plan.makespan_s / unit_s, f" {unit}")
    return chart.document(_title(plan), parts)


def _title(plan: PlannedResharding) -> str:
    proof = "optimal" if plan.proven_optimal else f"bound {plan.lower_bound_s:.6g} s"
    return f"{plan.strategy}: makespan {plan.makespan_s:.6g} s ({proof}), {len(plan.tiles)} tiles"


def _message_lanes(
    sender: PlannedWorker, receiver: PlannedWorker, message: PlannedMessage
) -> tuple[HostLane, HostLane]:
    if message.local:
        return (sender.host, f"{sender.name} copies out"), (receiver.host, f"{receiver.name} copies in")
    return (sender.host, f"card {sender.card} sends"), (receiver.host, f"card {receiver.card} receives")


def _lane_layout(
    plan: PlannedResharding, lanes: set[HostLane]
) -> tuple[dict[HostLane, int], dict[str, tuple[int, int]], int]:
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


def _message_svg(message: PlannedMessage, top: int, scale: float) -> str:
    x, width = _LEFT + message.start_s * scale, (message.end_s - message.start_s) * scale
    label = (
        f"tile {message.tile} [{message.begin}:{message.end}] {message.sender} to {message.receiver}: "
        f"{message.start_s:.6g} to {message.end_s:.6g} s"
    )
    box = (
        f'<rect x="{x:.2f}" y="{top}" width="{max(width, 0.5):.2f}" height="{_LANE}" '
        f'fill="{TILE_COLOURS[message.tile % len(TILE_COLOURS)]}" stroke="#ffffff" stroke-width="0.5">'
        f"<title>{escape(label)}</title></rect>"
    )
    if width >= 14:
        box += (
            f'<text x="{x + width / 2:.2f}" y="{top + 10}" text-anchor="middle" fill="#ffffff" font-size="9" '
            f'pointer-events="none">{message.tile}</text>'
        )
    return box


_COLUMNS = 64
_MAX_ROWS = 40
_TILE_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def resharding_summary(plan: PlannedResharding, others: Sequence[PlannedResharding] = ()) -> str:
    """Makespan, bound and the other plans' makespans; then a line for each card and direction, a letter for each tile."""
    remote = sum(not message.local for message in plan.messages)
    lines = [
        f"makespan      {plan.makespan_s:.6g} s ({_quality(plan)}; lower bound {plan.lower_bound_s:.6g} s)",
        *(f"{other.strategy:<22}{other.makespan_s:.6g} s{_ratio(other, plan)}" for other in others),
        f"routes        {plan.strategy}",
        f"size          {len(plan.tiles)} tiles, {remote} messages over cards, {len(plan.messages) - remote} inside hosts",
        "",
    ]
    return "\n".join([*lines, *_worker_rows(plan), "", *_card_rows(plan)]) + "\n"


def _quality(plan: PlannedResharding) -> str:
    if plan.proven_optimal:
        return "proven optimal"
    if not plan.lower_bound_s:
        return "no bound"
    return f"at most {plan.makespan_s / plan.lower_bound_s - 1:.2%} above the optimum"


def _ratio(other: PlannedResharding, plan: PlannedResharding) -> str:
    return f", {other.makespan_s / plan.makespan_s:.3g} times as long" if plan.makespan_s else ""


def _worker_rows(plan: PlannedResharding) -> list[str]:
    """A row per worker: its box `[begin:end, …]` of the tensor."""
    width = max(len(worker.name) for worker in plan.workers)
    rows = [
        f"{worker.name:<{width}}  on {worker.host}, card {worker.card}: "
        f"[{', '.join(f'{begin}:{end}' for begin, end in worker.box)}]"
        for worker in plan.workers
    ]
    return _shortened(rows, "workers")


def _card_rows(plan: PlannedResharding) -> list[str]:
    """Each card and direction over time; a column shows the tile that is transferred for most of it."""
    place = {worker.name: (worker.host, worker.card) for worker in plan.workers}
    used: dict[tuple[str, int, str], list[PlannedMessage]] = {}
    for message in plan.messages:
        if not message.local:
            used.setdefault((*place[message.sender], "sends"), []).append(message)
            used.setdefault((*place[message.receiver], "receives"), []).append(message)
    if not used:
        return ["nothing crosses a card: every tile is on its host already"]
    names = {
        key: f"{key[0]} card {key[1]} {key[2]}" for key in sorted(used, key=lambda key: (key[1], key[2]))
    }
    width = max(map(len, names.values()))
    rows = [f"{name:<{width}}  {_card_timeline(used[key], plan.makespan_s)}" for key, name in names.items()]
    return [f"{'':<{width}}  0{'s':<{_COLUMNS - 10}}{plan.makespan_s:>8.4g} s", *_shortened(rows, "cards")]


def _card_timeline(messages: list[PlannedMessage], makespan_s: float) -> str:
    shares: list[dict[int, float]] = [{} for _ in range(_COLUMNS)]
    step = makespan_s / _COLUMNS
    for message in messages:
        first, last = int(message.start_s / step), min(int(message.end_s / step), _COLUMNS - 1)
        for column in range(first, last + 1):
            begin, end = max(message.start_s, column * step), min(message.end_s, (column + 1) * step)
            shares[column][message.tile] = shares[column].get(message.tile, 0.0) + end - begin
    cells = []
    for column in shares:
        most = max(column, key=lambda tile: (column[tile], -tile), default=None)
        busy = sum(column.values()) >= step / 2
        cells.append(_TILE_LETTERS[most % len(_TILE_LETTERS)] if most is not None and busy else ".")
    return "".join(cells)


def _shortened(rows: list[str], noun: str) -> list[str]:
    if len(rows) <= _MAX_ROWS:
        return rows
    return [*rows[:_MAX_ROWS], f"... and {len(rows) - _MAX_ROWS} more {noun}: --format json has all"]
