"""Reshardings: the transfers that all workers of both meshes carry out together, not in pairs.

The plan says which transfers these are (all between heterogeneous meshes, and others that it reshards) and
which rows go where; parallel/resharding.py carries it out. Must not know stages, lanes or time.

It cannot deadlock. Take every transfer as one event of both meshes, which begins when all their workers have
reached it: so the programs end (the scheduler's verifier). A worker begins its part when it reaches it itself,
never later; each message waits only for earlier ones of its transfer; and messages that share a connection have
tags of their own. On streams there are no tags: all messages from one mesh to another have one connection, on
which the lane keeps one order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from worker.contract.planned import ReshardingPlans
from worker.contract.resharding import ReshardingPlan
from worker.engine.lanes.base import Finish
from worker.engine.routes import Route
from worker.parallel.resharding import Resharder, ReshardingRun, StreamResharder
from worker.transport.base import Lane, Topology, Transport

_MAX_TAG = 2**31 - 2
"""The last one that gloo takes, but for the one by which it is aborted."""

# How many times a slot's limit a resharding waits by itself: the watch over slots names who is missing before.
_SLOT_LIMIT_FACTOR = 4


class Reshardings:
    """This worker's part of all resharded transfers; `slot_limit_s` is the limit of the longest slot."""

    def __init__(
        self,
        plans: ReshardingPlans,
        transport: Transport,
        *,
        transfers: int,
        slot_limit_s: float,
        streams: bool = False,
    ):
        """`transfers`: how many tags the transfers of a step have. ValueError where they do not fit. With `streams` a
        transfer is enqueued on the current one."""
        topology = transport.topology
        name = topology.name(topology.rank(transport.mesh, transport.worker))
        self._plans, self._transport = plans, transport
        self._streams = streams
        self._stride = max((len(plan.messages) for plan in plans.values()), default=1)
        if not streams and self._stride * transfers > _MAX_TAG:
            raise ValueError(
                f"{transfers} transfers of up to {self._stride} messages are more than a step can tell apart: "
                "use fewer microbatches"
            )
        own = {key: plan for key, plan in plans.items() if name in plan.sources or name in plan.targets}
        self._ends = (
            {}
            if streams
            else {
                key: Resharder(plan, name, transport, limit_s=_SLOT_LIMIT_FACTOR * slot_limit_s)
                for key, plan in own.items()
            }
        )
        self._on_streams = (
            {key: StreamResharder(plan, name, resharding_group(plan)) for key, plan in own.items()}
            if streams
            else {}
        )
        self._running: dict[tuple[int, bool, int], ReshardingRun] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._ends or key in self._on_streams

    @property
    def planned(self) -> ReshardingPlans:
        """The plans of all resharded transfers, of other workers too."""
        return self._plans

    def lanes(self) -> tuple[Lane, ...]:
        """The directed pairs of workers that exchange messages, in the order in which all workers connect; on streams with
        the group that carries them."""
        return tuple(
            sorted(
                {
                    (*lane, resharding_group(plan)) if self._streams else lane
                    for plan in self._plans.values()
                    for lane in plan.lanes()
                }
            )
        )

    def start(self, key: tuple[int, bool], microbatch: int, tag: int, tensor: torch.Tensor) -> Finish | None:
        """Start this worker's part of a transfer with that tag: `tensor` is sent, or filled."""
        if self._streams:
            self._on_streams[key].enqueue(tensor, self._transport)
            return None
        run = self._running[*key, microbatch] = self._ends[key].begin(tensor, tag * self._stride)

        def finish() -> None:
            run.finish()
            del self._running[*key, microbatch]

        return finish

    def missing(self, edge: int, backward: bool, microbatch: int) -> tuple[str, ...]:
        """The workers for whose messages a running transfer waits: not yet received, or not yet taken."""
        run = self._running.get((edge, backward, microbatch))
        return () if run is None else run.missing()


class MeshSize(NamedTuple):
    """The number of workers of a mesh, and its tensor-parallel size: between meshes of one size workers may transfer in
    pairs."""

    workers: int
    tensor: int = 1

    def __str__(self) -> str:
        return str(self.workers) if self.tensor == 1 else f"{self.workers // self.tensor} x {self.tensor}"


def mesh_sizes(topology: Topology) -> dict[str, MeshSize]:
    """The size of each mesh."""
    return {mesh: MeshSize(topology.workers(mesh), topology.tensor(mesh)) for mesh in topology.meshes}


def resharding_group(plan: ReshardingPlan) -> str:
    """The name of the group of workers in which the messages of a transfer travel: one for each way between two meshes,
    since that is what a lane has one order for."""
    source, target = (next(iter(ends)).rpartition("/")[0] for ends in (plan.sources, plan.targets))
    return f"transfers/{source}>{target}"


def check_resharding_plans(
    plans: ReshardingPlans, routes: Mapping[int, Route], topology: Topology, *, training: bool
) -> None:
    """ValueError where a transfer between meshes of different sizes has no resharding plan, or has one of other workers."""
    sizes = mesh_sizes(topology)
    for index, route in routes.items():
        for backward in (False, True) if training and route.differentiable else (False,):
            ends = (route.source_mesh, route.target_mesh)[:: -1 if backward else 1]
            plan = plans.get((index, backward))
            if plan is not None:
                _check_planned_workers(plan, route, ends, sizes)
            elif sizes[route.source_mesh] != sizes[route.target_mesh]:
                way = "back from" if backward else "to"
                raise ValueError(
                    f"tensor {route.tensor!r} of mesh {route.source_mesh} ({sizes[route.source_mesh]} workers) goes {way} "
                    f"mesh {route.target_mesh} ({sizes[route.target_mesh]}), and no resharding of it was planned"
                )


def _check_planned_workers(
    plan: ReshardingPlan, route: Route, ends: tuple[str, str], sizes: Mapping[str, MeshSize]
) -> None:
    """ValueError for a plan of other workers: some would run the resharding, and wait for others that do not."""
    for mesh, planned in zip(ends, (plan.sources, plan.targets), strict=True):
        if {*planned} != {f"{mesh}/{worker}" for worker in range(sizes[mesh].workers)}:
            raise ValueError(
                f"the resharding of tensor {route.tensor!r} from mesh {ends[0]} to mesh {ends[1]} was planned for workers "
                f"{', '.join(planned)}, and mesh {mesh} has {sizes[mesh].workers}: plan the job anew"
            )
