"""Two views of a chain's compute order in unit clocks: the slot table and the event table.

The notation is ONNX Runtime's (FW FS FR BW BS BR and a two-digit microbatch). Compute of clock t
stands in column 2t; the Send and the Recv of what it consumes stand in column 2t-1 on both sides.
These numbers count cells of the table; they are not the events of a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.scheduler.model.spec import SpecError

MAX_STAGES = 100
MAX_MICROBATCHES = 100
CELL_WIDTH = 8

ComputeOrder = Sequence[tuple[str, int]]  # ("F" or "B", microbatch) in the order of one stage


@dataclass(frozen=True)
class _Task:
    """One task of a cell. `consumer` is the stage whose computation the tensor is for."""

    name: str
    microbatch: int
    consumer: int

    def __str__(self) -> str:
        return f"{self.name}{self.microbatch:02d}"


def slot_table(orders: Sequence[ComputeOrder]) -> str:
    """One line a stage, one cell of eight characters a time slot, blanks where nothing runs.

    `orders[s]` is the compute order of stage s of a chain. Raises SpecError when an action is
    neither F nor B, the chain is too large, the orders deadlock, or a cell would need three tasks.
    """
    table = _cells(orders)
    width = 1 + max((column for cells in table for column in cells), default=-1)
    lines = []
    for cells in table:
        row = ("".join(str(task) for task in cells.get(column, ())) for column in range(width))
        lines.append("".join(cell.ljust(CELL_WIDTH) for cell in row))
    return "\n".join(lines) + "\n"


def event_table(orders: Sequence[ComputeOrder]) -> dict[str, dict[str, list[list[int]]]]:
    """Stage → forward and backward → microbatch → (waited, recorded) of Recv, Compute and Send.

    The cells of a stage that are not empty are numbered k = 0, 1, ...; cell k waits for event k-1
    (-1 for the first) and records k. An operation that does not exist has -1, -1.
    """
    out: dict[str, dict[str, list[list[int]]]] = {}
    for stage, cells in enumerate(_cells(orders)):
        numbers: dict[tuple[str, int], tuple[int, int]] = {}
        for k, column in enumerate(sorted(cells)):
            for task in cells[column]:
                numbers[task.name, task.microbatch] = (k - 1, k)
        microbatches = 1 + max((m for _, m in orders[stage]), default=-1)
        out[str(stage)] = {
            direction: [
                [n for name in names for n in numbers.get((name, m), (-1, -1))] for m in range(microbatches)
            ]
            for direction, names in (("forward", ("FR", "FW", "FS")), ("backward", ("BR", "BW", "BS")))
        }
    return out


def unit_clocks(orders: Sequence[ComputeOrder]) -> list[dict[tuple[str, int], int]]:
    """Clock of every action of every stage, each as early as its order and its inputs allow."""
    stages = len(orders)
    clocks: list[dict[tuple[str, int], int]] = [{} for _ in orders]
    position = [0] * stages
    free = [0] * stages
    moved = True
    while moved:
        moved = False
        for s, order in enumerate(orders):
            while position[s] < len(order):
                action, m = order[position[s]]
                before = _inputs(action, m, s, stages)
                if any(key not in clocks[stage] for stage, key in before):
                    break
                clock = max([free[s]] + [clocks[stage][key] + 1 for stage, key in before])
                clocks[s][action, m] = clock
                free[s] = clock + 1
                position[s] += 1
                moved = True
    if stuck := [(s, orders[s][position[s]]) for s in range(stages) if position[s] < len(orders[s])]:
        stage, (action, m) = stuck[0]
        raise SpecError(
            f"the orders deadlock: stage {stage} waits at {stage}{action}{m} for an action that never runs; "
            "put each action after what it needs"
        )
    return clocks


def _inputs(action: str, microbatch: int, stage: int, stages: int) -> list[tuple[int, tuple[str, int]]]:
    """What an action of a chain consumes: (stage, action)."""
    if action == "F":
        return [(stage - 1, ("F", microbatch))] if stage else []
    own = [(stage, ("F", microbatch))]
    return own if stage == stages - 1 else [*own, (stage + 1, ("B", microbatch))]


def _cells(orders: Sequence[ComputeOrder]) -> list[dict[int, list[_Task]]]:
    """Per stage: column → its tasks, in ascending stage of the consumer."""
    _check(orders)
    stages = len(orders)
    cells: list[dict[int, list[_Task]]] = [{} for _ in orders]

    def add(stage: int, column: int, name: str, microbatch: int, consumer: int) -> None:
        cells[stage].setdefault(column, []).append(_Task(name, microbatch, consumer))

    for s, clocks in enumerate(unit_clocks(orders)):
        for (action, m), clock in clocks.items():
            add(s, 2 * clock, f"{action}W", m, s)
            producer = s - 1 if action == "F" else s + 1
            if 0 <= producer < stages:
                add(s, 2 * clock - 1, f"{action}R", m, s)
                add(producer, 2 * clock - 1, f"{action}S", m, s)
    for s, row in enumerate(cells):
        for column, tasks in row.items():
            tasks.sort(key=lambda task: task.consumer)
            if len(tasks) > 2:
                raise SpecError(
                    f"column {column} of stage {s} would hold {len(tasks)} tasks "
                    f"({' '.join(map(str, tasks))}) and a cell has room for two; use --format chrome for this order"
                )
    return cells


def _check(orders: Sequence[ComputeOrder]) -> None:
    microbatches = max((len({m for _, m in order}) for order in orders), default=0)
    if len(orders) > MAX_STAGES or microbatches > MAX_MICROBATCHES:
        raise SpecError(
            f"{len(orders)} stages and {microbatches} microbatches: this view has room for at most "
            f"{MAX_STAGES} and {MAX_MICROBATCHES}; use --format csv or chrome"
        )
    for s, order in enumerate(orders):
        for action, m in order:
            if action not in ("F", "B"):
                raise SpecError(
                    f"stage {s} runs {s}{action}{m}: this view knows F and B only; use --format csv or chrome, "
                    "or set split_backward to false"
                )
