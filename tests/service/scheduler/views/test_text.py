"""The slot table and the event table against the laws and the example of ONNX Runtime's planner."""

from __future__ import annotations

import pytest

from service.scheduler.problem.spec import SpecError
from service.scheduler.views.text_tables import event_table, slot_table, unit_clocks

SIZES = [(s, m) for s in range(1, 7) for m in range(1, 9)]


def capped_eager(stages: int, microbatches: int) -> list[list[tuple[str, int]]]:
    """The greedy rule of eager-1f1b with at most `stages` microbatches in flight, played clock by clock."""
    forward: list[dict[int, int]] = [{} for _ in range(stages)]
    backward: list[dict[int, int]] = [{} for _ in range(stages)]
    orders: list[list[tuple[str, int]]] = [[] for _ in range(stages)]
    clock = 0
    while any(len(b) < microbatches for b in backward):
        chosen = []
        for s in range(stages):
            f, b = len(forward[s]), len(backward[s])
            ready_b = b < f and (
                backward[s + 1].get(b, clock) < clock if s < stages - 1 else forward[s].get(b, clock) < clock
            )
            ready_f = f < microbatches and f - b < 2 * (stages - s) - 1
            if s:
                ready_f &= forward[s - 1].get(f, clock) < clock
            else:
                ready_f &= f < stages or backward[0].get(f - stages, clock) < clock
            if ready_b:
                chosen.append((s, "B", b))
            elif ready_f:
                chosen.append((s, "F", f))
        for s, action, m in chosen:
            (forward if action == "F" else backward)[s][m] = clock
            orders[s].append((action, m))
        clock += 1
    return orders


def cells_of(line: str) -> list[str]:
    return [line[i : i + 8] for i in range(0, len(line), 8)]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_rows_and_clocks_follow_the_closed_forms(stages, microbatches):
    orders = capped_eager(stages, microbatches)
    table = slot_table(orders)
    lines = table.splitlines()
    assert len(lines) == stages
    assert {len(line) for line in lines} == {8 * (4 * stages + 4 * microbatches - 5)}
    clocks = unit_clocks(orders)
    for s in range(stages):
        for m in range(microbatches):
            if m >= stages:
                expected = 2 * m + s
            else:
                expected = s + m if m < 2 * (stages - s) - 1 else 2 * m - 2 * stages + 3 * s + 2
            assert clocks[s]["F", m] == expected
            assert clocks[s]["B", m] == 2 * stages - 1 - s + 2 * m


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_a_row_is_all_compute_or_all_communication_and_both_ends_share_a_column(stages, microbatches):
    rows = [cells_of(line) for line in slot_table(capped_eager(stages, microbatches)).splitlines()]
    for column in range(len(rows[0])):
        sends, receives = set(), set()
        for s, row in enumerate(rows):
            tasks = [t for t in (row[column][:4], row[column][4:]) if t.strip()]
            kinds = [t[1] for t in tasks]
            assert all((kind == "W") == (column % 2 == 0) for kind in kinds)
            assert len(kinds) == len(set(kinds)) <= 2
            for t in tasks:
                step = 1 if t[0] == "F" else -1
                if t[1] == "S":
                    sends.add((t[0], t[2:], s + step))
                if t[1] == "R":
                    receives.add((t[0], t[2:], s))
        assert sends == receives


def test_the_published_example_has_its_events():
    events = event_table(capped_eager(3, 5))
    assert events["1"]["forward"][1] == [1, 2, 2, 3, 5, 6]
    assert events["1"]["backward"][0] == [5, 6, 6, 7, 7, 8]
    assert "BR00FS01" in slot_table(capped_eager(3, 5)).splitlines()[1]


def test_stage_zero_exchanges_in_the_published_order():
    row = cells_of(slot_table(capped_eager(3, 5)).splitlines()[0])
    exchange = [
        " ".join(t[1] for t in (cell[:4], cell[4:]) if t.strip())
        for column, cell in enumerate(row)
        if column % 2 and cell.strip()
    ]
    assert exchange == ["S", "S", "S", "R", "R S", "R S", "R", "R"]


def test_operations_that_do_not_exist_have_minus_one():
    events = event_table(capped_eager(2, 2))
    assert events["0"]["forward"][0][:4] == [-1, -1, -1, 0]
    assert events["1"]["forward"][0][4:] == [-1, -1]
    assert events["0"]["backward"][1][4:] == [-1, -1]


def test_split_backward_and_large_chains_are_refused_with_the_way_out():
    with pytest.raises(SpecError, match="0I0"):
        slot_table([[("F", 0), ("I", 0), ("W", 0)]])
    with pytest.raises(SpecError, match="101"):
        slot_table([[("F", m) for m in range(101)]])
    with pytest.raises(SpecError, match="0B0"):
        slot_table([[("B", 0), ("F", 0)]])
