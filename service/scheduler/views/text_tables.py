"""Writes a plan as text: a summary for the terminal, and the slot and event tables of a chain in unit clocks.

The tables use ONNX Runtime's notation (FW FS FR BW BS BR and a two-digit microbatch). Compute of clock t stands
in column 2t; the Send and the Recv of what it consumes stand in column 2t-1 on both sides. These numbers count
cells of the table; they are not the events of a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.scheduler.kernels import TOLERANCE
from service.scheduler.problem.spec import PipelineSpec, SpecError
from service.scheduler.programs.plan import Plan


def plan_summary(spec: PipelineSpec, plan: Plan) -> str:
    """Makespan, bound, bubble and, for each mesh, memory and exposed transfer time."""
    gap = plan.makespan_s / plan.lower_bound_s - 1.0 if plan.lower_bound_s > 0 else None
    if plan.proven_optimal:
        quality = "proven optimal"
    elif gap is None:
        quality = "no bound"
    else:
        quality = f"at most {gap:.2%} above the optimum"
    quality += "".join(f"; {note}" for note in plan.notes)
    if plan.truncated:
        quality += ", search cut short by the deadline"
    name = plan.schedule if plan.schedule == plan.chosen else f"{plan.schedule} (chose {plan.chosen})"
    lines = [
        f"schedule      {name}",
        f"size          {len(spec.stages)} stages on {len(spec.meshes)} meshes, {spec.microbatches} microbatches",
        f"makespan      {plan.makespan_s:g} s ({quality}; lower bound {plan.lower_bound_s:g} s)",
        *_order_line(spec, plan),
        *_programs_line(plan),
        f"span          {plan.span_s:g} s",
        f"bubble ratio  {plan.bubble_ratio:.1%}",
        f"overlap       {plan.overlap_ratio:.1%} of the transfer time is hidden",
        "",
    ]
    rows = [("mesh", "activations", "limit", "receive buffers", "compute s", "exposed transfer s")]
    for mesh, given in zip(plan.meshes, spec.meshes, strict=True):
        limit = given.activation_limit_bytes
        rows.append(
            (
                mesh.name,
                str(mesh.peak_activation_bytes),
                "-" if limit is None else str(limit),
                str(mesh.peak_receive_buffers),
                f"{mesh.compute_s:g}",
                f"{mesh.exposed_transfer_s:g}",
            )
        )
    return "\n".join(lines + aligned_columns(rows)) + "\n"


def _order_line(spec: PipelineSpec, plan: Plan) -> list[str]:
    """The order in which the first stage begins its microbatches, where they differ in costs."""
    if spec.bucket_of is None:
        return []
    forwards = sorted((slot for slot in plan.slots if slot.action == "F"), key=lambda slot: slot.start_s)
    begun = [str(slot.microbatch) for slot in forwards if slot.stage == forwards[0].stage]
    more = f" and {len(begun) - MAX_SHOWN_ORDER} more" if len(begun) > MAX_SHOWN_ORDER else ""
    return [f"order         {' '.join(begun[:MAX_SHOWN_ORDER])}{more}"]


def _programs_line(plan: Plan) -> list[str]:
    if plan.programs_makespan_s is None or plan.programs_makespan_s <= plan.makespan_s * (1 + TOLERANCE):
        return []
    return [
        f"programs      {plan.programs_makespan_s:g} s: with contention none transfers of one pair overlap in the plan, "
        "programs run them one by one"
    ]


def aligned_columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows with aligned columns, the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [
            cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


MAX_SHOWN_ORDER = 64
"""Microbatches of an order that a line shows."""
MAX_STAGES = 100
MAX_MICROBATCHES = 100
CELL_WIDTH = 8

ComputeOrder = Sequence[tuple[str, int]]  # ("F" or "B", microbatch) in the order of one stage


@dataclass(frozen=True)
class _CellTask:
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
    table = _table_cells(orders)
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
    for stage, cells in enumerate(_table_cells(orders)):
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
                before = _consumed_actions(action, m, s, stages)
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


def _consumed_actions(
    action: str, microbatch: int, stage: int, stages: int
) -> list[tuple[int, tuple[str, int]]]:
    """The inputs of an action of a chain: (stage, action)."""
    if action == "F":
        return [(stage - 1, ("F", microbatch))] if stage else []
    own = [(stage, ("F", microbatch))]
    return own if stage == stages - 1 else [*own, (stage + 1, ("B", microbatch))]


def _table_cells(orders: Sequence[ComputeOrder]) -> list[dict[int, list[_CellTask]]]:
    """Per stage: column → its tasks, in ascending stage of the consumer."""
    _check_orders(orders)
    stages = len(orders)
    cells: list[dict[int, list[_CellTask]]] = [{} for _ in orders]

    def add(stage: int, column: int, name: str, microbatch: int, consumer: int) -> None:
        cells[stage].setdefault(column, []).append(_CellTask(name, microbatch, consumer))

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


def _check_orders(orders: Sequence[ComputeOrder]) -> None:
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
