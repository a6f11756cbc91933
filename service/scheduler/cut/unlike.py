"""Meshes of unlike sizes: costs of the layers on each, and what a tensor takes between two of them.

A worker of a smaller mesh has more samples of each microbatch: its layers take longer, and keep more. A tensor between two
such meshes is resharded (service/scheduler/resharding): the transfer lasts as long as that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from service.scheduler.model.spec import NetworkSpec, SpecError, link_costs
from service.scheduler.resharding import Layout, Links, ReshardingPlan, Tensor, layout, plan_resharding
from worker.model.errors import CutError
from worker.model.profile import LayerEdge, LayerProfile
from worker.model.sharing import shared_dimension, whole_shape

MESSAGES = 64
"""Of one resharding at most: each has its own word between two workers, which links measured by large tensors hide."""
_UNKNOWN_BYTES_PER_S = 1e10
_KEPT = 4096


@dataclass(frozen=True, slots=True)
class UnlikeProfile(LayerProfile):
    """The profile of the slowest mesh, and with it that of each mesh, its number of workers and their nodes."""

    of_mesh: tuple[LayerProfile, ...] = ()
    sizes: tuple[int, ...] = ()
    nodes: tuple[tuple[str, ...], ...] = ()

    def corrected(self) -> UnlikeProfile:
        """Each by its own factor."""
        own = LayerProfile.corrected(self)
        return replace(own, of_mesh=tuple(one.corrected() for one in self.of_mesh))


def unlike_profile(
    of_mesh: Sequence[LayerProfile], sizes: Sequence[int], nodes: Sequence[Sequence[str]]
) -> UnlikeProfile:
    """One value of the profiles of meshes of these sizes; SpecError where they are not of one model."""
    slowest = max(of_mesh, key=lambda profile: sum(layer.compute_s for layer in profile.layers))
    for profile in of_mesh:
        if [_place(edge) for edge in profile.edges] != [_place(edge) for edge in slowest.edges] or any(
            edge.shape is None for edge in profile.edges
        ):
            raise SpecError(
                "the profiles of meshes of unlike sizes are of different tensors: does the model ask how many rows it is "
                "given? Give all meshes the same number of workers"
            )
    own = {name: getattr(slowest, name) for name in LayerProfile.__dataclass_fields__}
    return UnlikeProfile(
        **own, of_mesh=tuple(of_mesh), sizes=tuple(sizes), nodes=tuple(tuple(one) for one in nodes)
    )


def resharding_between(
    profile: UnlikeProfile, edge: int, meshes: tuple[int, int], names: tuple[str, str], network: NetworkSpec
) -> ReshardingPlan:
    """The plan by which the tensor of the profile's edge goes from the first of two meshes to the second; SpecError where
    its shapes do not tell how it is shared."""
    here, there = (profile.of_mesh[mesh].edges[edge] for mesh in meshes)
    sizes = profile.sizes[meshes[0]], profile.sizes[meshes[1]]
    try:
        along = shared_dimension(
            here.tensor, (here.shape, there.shape), sizes, differentiable=here.differentiable
        )
    except CutError as error:
        raise SpecError(str(error)) from None
    sides = (_side(name, profile.nodes[mesh], along) for name, mesh in zip(names, meshes, strict=True))
    tensor = Tensor(whole_shape(here.shape, along, sizes[0]), here.bytes // max(1, math.prod(here.shape)))
    near = profile.nodes[meshes[0]][0] == profile.nodes[meshes[1]][0]
    return _planned(tensor, *sides, _links(network, names, near))


def _place(edge: LayerEdge) -> tuple[int, int, int, str]:
    return edge.source, edge.target, edge.order, edge.tensor


def _side(name: str, nodes: tuple[str, ...], along: int | None) -> Layout:
    return layout(name, mesh=(len(nodes),), split=(along,), hosts=nodes)


def _links(network: NetworkSpec, names: tuple[str, str], near: bool) -> Links:
    """By the link that was measured between the first workers of both, which are `near`: on one host."""
    bandwidth, latency_s = link_costs(network)(*names)
    bandwidth = bandwidth or _UNKNOWN_BYTES_PER_S
    if near:
        return Links(bandwidth, bandwidth, latency_s, latency_s)
    return Links(bandwidth, latency_s=latency_s)


@functools.lru_cache(maxsize=_KEPT)
def _planned(tensor: Tensor, source: Layout, target: Layout, links: Links) -> ReshardingPlan:
    return plan_resharding(tensor, source, target, links, messages=MESSAGES)
