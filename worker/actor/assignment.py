"""Assignment: what one worker of a planned job loads and runs, made by the driver for every worker.

Also the options by which its engine runs. Must not know the driver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from worker.contract.job import Job, LossScaling
from worker.contract.planned import MeshProgram, PlannedJob
from worker.engine.results import RunOptions, SlotLimits
from worker.model.pytree import Target
from worker.transport.base import Topology, topology_of


@dataclass(frozen=True)
class Assignment:
    """One worker's place in a planned job.

    The model is cut before the layers `stage_starts`, one stage each; `mesh_of_stage` says where each stage runs.
    `program` trains, `evaluation` has forwards only. Workers meet at `store` (host and port) within `join_s` seconds, the
    time that loading may take, reach this one at `host`, and are connected `connect_s` later. `planned_bytes` is the most
    that the mesh holds by the plan (None: unknown), for messages.
    """

    mesh: str
    stage_starts: tuple[str, ...]
    mesh_of_stage: tuple[str, ...]
    program: MeshProgram
    topology: Topology
    store: tuple[str, int]
    host: str
    join_s: float
    connect_s: float
    slot_limits: SlotLimits
    planned_bytes: int | None = None
    evaluation: MeshProgram | None = None

    def __post_init__(self) -> None:
        if len(self.stage_starts) != len(self.mesh_of_stage):
            raise ValueError(
                f"the plan begins {len(self.stage_starts)} stages and places {len(self.mesh_of_stage)}: plan the job anew"
            )
        if unknown := sorted({self.mesh, *self.mesh_of_stage} - {*self.topology.meshes}):
            raise ValueError(
                f"the plan uses meshes {', '.join(unknown)}, and the gang has {', '.join(self.topology.meshes)}: plan the "
                "job anew"
            )

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that this worker's mesh runs."""
        return tuple(index for index, mesh in enumerate(self.mesh_of_stage) if mesh == self.mesh)


@dataclass(frozen=True)
class LoadLimits:
    """Seconds in which workers meet (`join_s`, the time that loading may take) and are then connected, and the limits of
    their slots."""

    join_s: float
    connect_s: float
    slots: SlotLimits


def make_assignments(
    planned: PlannedJob,
    places: Sequence[tuple[str, str]],
    *,
    tensors: tuple[int, ...],
    store: tuple[str, int],
    limits: LoadLimits,
    planned_bytes: Mapping[str, int | None] | None = None,
    evaluation: Mapping[str, MeshProgram] | None = None,
) -> list[Assignment]:
    """The assignment of each worker of `places`, in their order: the mesh and host of every worker, mesh by mesh.

    `tensors` has the number of tensor-parallel ranks of each mesh; `planned_bytes` and `evaluation` are by mesh.
    """
    topology = topology_of(Counter(mesh for mesh, _ in places), tensors)
    programs = planned.programs()
    return [
        Assignment(
            mesh,
            tuple(planned.stage_starts),
            tuple(planned.mesh_of_stage),
            programs[mesh],
            topology,
            store,
            host,
            limits.join_s,
            limits.connect_s,
            limits.slots,
            (planned_bytes or {}).get(mesh),
            (evaluation or {}).get(mesh),
        )
        for mesh, host in places
    ]


def run_options(
    job: Job,
    mesh: str,
    *,
    limits: SlotLimits,
    device: str,
    count_targets: Callable[[Target], torch.Tensor] | None = None,
) -> RunOptions:
    """The options by which the engine of a worker of `mesh` trains `job`, whose microbatches weigh by `count_targets`."""
    training = job.training
    summed = job.tp_size(mesh) > 1 or training.sync_batch_norm  # inside a forward, with other workers
    return RunOptions(
        precision=training.precision,
        transfers=training.transfers,
        clip_grad_norm=training.clip_grad_norm,
        non_finite=training.non_finite,
        count_targets=count_targets,
        seed=training.seed,
        tensor=job.tp_size(mesh),
        sync_batch_norm=training.sync_batch_norm,
        loss_scaling=training.loss_scaling or LossScaling(),
        limits=limits,
        device=device,
        sharded=job.sharded,
        spot_check_until=training.steps if training.check_trace and not summed else None,
    )
