"""What each mesh does of a kind: its op, lane and peer. The one table for slots, programs and their reading."""

from __future__ import annotations

from dataclasses import dataclass

from service.scheduler.model.problem import Problem
from worker.program import COMPUTE_LANE, receive_lane, send_lane

COMPUTE_RANK = -1


@dataclass(frozen=True, slots=True)
class LocalAction:
    """One kind as one mesh sees it; peer fields are None for compute.

    `op` is an op of the programs; a backward is called I here, also where it is one B.
    Stages, meshes and edges are indices. `stage` is the sender's or the receiver's own.
    """

    kind: int
    mesh: int
    op: str
    stage: int
    lane: str
    lane_rank: int  # lanes of a mesh in order: compute, then by peer, sends before receives
    receives: bool = False
    edge: int | None = None
    peer: int | None = None
    peer_stage: int | None = None


def local_actions(problem: Problem) -> list[LocalAction]:
    """Every kind once for each mesh that takes part in it, by kind; of a transfer the sending mesh first."""
    return [action for kind in range(problem.kinds) for action in _of_kind(problem, kind)]


def actions_of_mesh(problem: Problem, mesh: int) -> dict[int, LocalAction]:
    """What one mesh does, by kind."""
    return {action.kind: action for action in local_actions(problem) if action.mesh == mesh}


def _of_kind(problem: Problem, kind: int) -> list[LocalAction]:
    if kind < problem.compute_kinds:
        stage, op = problem.stage_and_op(kind)
        mesh = int(problem.mesh_of_stage[stage])
        return [LocalAction(kind, mesh, "FIW"[op], stage, COMPUTE_LANE, COMPUTE_RANK)]
    index, backward = problem.transfer_and_direction(kind)
    transfer = problem.transfers[index]
    maker, user = transfer.source, transfer.targets[0]
    sending, receiving = (user, maker) if backward else (maker, user)
    sender, receiver = int(problem.sender_of_kind[kind]), int(problem.receiver_of_kind[kind])
    names = [mesh.name for mesh in problem.spec.meshes]
    suffix = "B" if backward else "F"
    return [
        LocalAction(
            kind=kind,
            mesh=sender,
            op=f"SEND_{suffix}",
            stage=sending,
            lane=send_lane(names[receiver]),
            lane_rank=2 * receiver,
            edge=transfer.edge,
            peer=receiver,
            peer_stage=receiving,
        ),
        LocalAction(
            kind=kind,
            mesh=receiver,
            op=f"RECV_{suffix}",
            stage=receiving,
            lane=receive_lane(names[sender]),
            lane_rank=2 * sender + 1,
            receives=True,
            edge=transfer.edge,
            peer=sender,
            peer_stage=sending,
        ),
    ]
