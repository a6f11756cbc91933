"""Transfers between meshes of unlike sizes: each is the resharding of its tensor, which all workers of both meshes run.

Which worker sends which rows to which is the plan's, that it is carried out worker/resharding.py's. Must not know stages,
lanes or time.

It cannot deadlock. Take every transfer as one event of both meshes, which begins when all their workers have come to
it: so the programs end (service/scheduler/programs/verify.py). Here a worker begins its part when it comes to it itself,
which is never later; each message waits only for earlier ones of its transfer; and messages that share a connection
have tags of their own, so that whichever comes first is never taken for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from worker.engine.lanes import Finish
from worker.engine.routes import Route
from worker.resharding import Resharder, Run
from worker.resharding_plan import ReshardingPlan
from worker.transport.base import Topology, Transport

_LAST_TAG = 2**31 - 2
"""The last one that gloo takes, but for the one by which it is aborted."""

Plans = Mapping[tuple[int, bool], ReshardingPlan]
"""By the first edge of a route, and whether it is the way back, of gradients."""


class Reshardings:
    """This worker's part of all of them; `limit_s` is long: the watch over the step's slots says earlier who is missing."""

    def __init__(self, plans: Plans, transport: Transport, *, transfers: int, limit_s: float):
        """`transfers`: how many tags the transfers of a step have. ValueError where they do not fit."""
        topology = transport.topology
        mine = topology.name(topology.rank(transport.mesh, transport.worker))
        self._plans = plans
        self._stride = max((len(plan.messages) for plan in plans.values()), default=1)
        if self._stride * transfers > _LAST_TAG:
            raise ValueError(
                f"{transfers} transfers of up to {self._stride} messages are more than a step can tell apart: "
                "use fewer microbatches"
            )
        self._ends = {
            key: Resharder(plan, mine, transport, limit_s=limit_s)
            for key, plan in plans.items()
            if mine in plan.sources or mine in plan.targets
        }
        self._running: dict[tuple[int, bool, int], Run] = {}

    def __contains__(self, key: tuple[int, bool]) -> bool:
        return key in self._ends

    def lanes(self) -> tuple[tuple[str, str], ...]:
        """The directed pairs of workers that exchange messages, in the one order in which everybody connects."""
        return tuple(sorted({lane for plan in self._plans.values() for lane in plan.lanes()}))

    def start(self, key: tuple[int, bool], microbatch: int, tag: int, tensor: torch.Tensor) -> Finish:
        """Start this worker's part of a transfer with that tag: `tensor` is sent, or filled."""
        run = self._running[*key, microbatch] = self._ends[key].begin(tensor, tag * self._stride)

        def finish() -> None:
            run.finish()
            del self._running[*key, microbatch]

        return finish

    def missing(self, edge: int, backward: bool, microbatch: int) -> tuple[str, ...]:
        """The workers whose messages of a transfer that runs have not come or not been taken."""
        run = self._running.get((edge, backward, microbatch))
        return () if run is None else run.missing()


class MeshSize(NamedTuple):
    """How many workers a mesh has, and how many of them share matrices: of meshes of one size workers go in pairs."""

    workers: int
    tensor: int = 1

    def __str__(self) -> str:
        return str(self.workers) if self.tensor == 1 else f"{self.workers // self.tensor} x {self.tensor}"


def mesh_sizes(topology: Topology) -> dict[str, MeshSize]:
    """The size of each mesh."""
    return {mesh: MeshSize(topology.workers(mesh), topology.tensor(mesh)) for mesh in topology.meshes}


def check_plans(
    plans: Plans, routes: Mapping[int, Route], sizes: Mapping[str, MeshSize], *, training: bool
) -> None:
    """Raise ValueError where a transfer between meshes of unlike sizes has no plan."""
    for index, route in routes.items():
        if sizes[route.source_mesh] == sizes[route.target_mesh]:
            continue
        for backward in (False, True) if training and route.differentiable else (False,):
            if (index, backward) not in plans:
                way = "back from" if backward else "to"
                raise ValueError(
                    f"tensor {route.tensor!r} of mesh {route.source_mesh} ({sizes[route.source_mesh]} workers) goes {way} "
                    f"mesh {route.target_mesh} ({sizes[route.target_mesh]}), and no resharding of it was planned"
                )
