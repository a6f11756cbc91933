"""What a step was: each instruction's times as a slot, with the stage at the other end of a transfer, and its result."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from worker.engine.exchange import Exchange
from worker.engine.results import StepResult
from worker.engine.routes import Route
from worker.engine.update import UpdateResult
from worker.program import TRANSFER_OPS, Instruction, Program
from worker.slots import MeasuredSlot


def step_result(
    step: int, started_s: float, exchange: Exchange, updated: UpdateResult, slots: list[MeasuredSlot]
) -> StepResult:
    """The step that began at `started_s` of time.monotonic() and ends now."""
    return StepResult(
        step=step,
        losses=exchange.losses_in_order(),
        metrics=exchange.metrics_by_name(),
        outputs=exchange.outputs_in_order(),
        slots=slots,
        grad_norm=updated.grad_norm,
        skipped=updated.skipped,
        started_s=started_s,
        ended_s=time.monotonic(),
        loss_scale=updated.loss_scale,
        overflowed=updated.overflowed,
    )


def measured_slots(
    mesh: str, routes: Mapping[int, Route], program: Program, measured: Iterable[tuple[float, float]]
) -> list[MeasuredSlot]:
    """The slots of `program` on `mesh`, each from start to end of time.monotonic()."""
    return [
        measured_slot(mesh, routes, instruction, start_s, end_s)
        for instruction, (start_s, end_s) in zip(program, measured, strict=True)
    ]


def measured_slot(
    mesh: str, routes: Mapping[int, Route], instruction: Instruction, start_s: float, end_s: float
) -> MeasuredSlot:
    """The slot of `instruction` of `mesh`, from `start_s` to `end_s` of time.monotonic()."""
    peer_stage = None
    if instruction.op in TRANSFER_OPS:
        route = routes[instruction.edge]
        peer_stage = route.consumers[0] if mesh == route.source_mesh else route.source
    return MeasuredSlot(
        lane=instruction.lane,
        action=instruction.op,
        stage=instruction.stage,
        microbatch=instruction.microbatch,
        edge=instruction.edge,
        peer_mesh=instruction.peer,
        peer_stage=peer_stage,
        start_s=start_s,
        end_s=end_s,
    )
