"""What an instruction's times become: a slot, with the stage at the other end of a transfer."""

from __future__ import annotations

from collections.abc import Mapping

from worker.engine.routes import Route
from worker.program import TRANSFER_OPS, Instruction
from worker.slots import MeasuredSlot


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
