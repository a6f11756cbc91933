"""A resharding plan as text for a terminal: what it takes beside what else it could take, and its cards over time."""

from __future__ import annotations

from collections.abc import Sequence

from service.scheduler.resharding.plan import PlannedMessage, ReshardingPlan

_COLUMNS = 64
_ROWS = 40
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def summary(plan: ReshardingPlan, others: Sequence[ReshardingPlan] = ()) -> str:
    """Makespan, bound and the other plans' makespans; then a line for each card and direction, a letter for each tile."""
    remote = sum(not message.local for message in plan.messages)
    lines = [
        f"makespan      {plan.makespan_s:.6g} s ({_quality(plan)}; lower bound {plan.lower_bound_s:.6g} s)",
        *(f"{other.strategy:<22}{other.makespan_s:.6g} s{_ratio(other, plan)}" for other in others),
        f"routes        {plan.strategy}",
        f"size          {len(plan.tiles)} tiles, {remote} messages over cards, {len(plan.messages) - remote} inside hosts",
        "",
    ]
    return "\n".join([*lines, *_boxes(plan), "", *_cards(plan)]) + "\n"


def _quality(plan: ReshardingPlan) -> str:
    if plan.proven_optimal:
        return "proven optimal"
    if not plan.lower_bound_s:
        return "no bound"
    return f"at most {plan.makespan_s / plan.lower_bound_s - 1:.2%} above the optimum"


def _ratio(other: ReshardingPlan, plan: ReshardingPlan) -> str:
    return f", {other.makespan_s / plan.makespan_s:.3g} times as long" if plan.makespan_s else ""


def _boxes(plan: ReshardingPlan) -> list[str]:
    """Who has what: `[begin:end, …]` of the tensor."""
    width = max(len(worker.name) for worker in plan.workers)
    rows = [
        f"{worker.name:<{width}}  on {worker.host}, card {worker.card}: "
        f"[{', '.join(f'{begin}:{end}' for begin, end in worker.box)}]"
        for worker in plan.workers
    ]
    return _shortened(rows, "workers")


def _cards(plan: ReshardingPlan) -> list[str]:
    """Each card and direction over time; a column shows the tile that goes for most of it."""
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
    rows = [f"{name:<{width}}  {_row(used[key], plan.makespan_s)}" for key, name in names.items()]
    return [f"{'':<{width}}  0{'s':<{_COLUMNS - 10}}{plan.makespan_s:>8.4g} s", *_shortened(rows, "cards")]


def _row(messages: list[PlannedMessage], makespan_s: float) -> str:
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
        cells.append(_DIGITS[most % len(_DIGITS)] if most is not None and busy else ".")
    return "".join(cells)


def _shortened(rows: list[str], what: str) -> list[str]:
    if len(rows) <= _ROWS:
        return rows
    return [*rows[:_ROWS], f"... and {len(rows) - _ROWS} more {what}: --format json has all"]
