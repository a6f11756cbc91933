"""Meshes between which tensors are resharded: costs of the layers on each, and what a tensor takes between two of them.

A worker of a smaller mesh has more samples of each microbatch: its layers take longer, and keep more. A tensor between two
such meshes is resharded (service/scheduler/resharding): the transfer lasts as long as that. So is one between meshes
that share matrices alike, if they are on other nodes: in pairs each byte would go there once for every worker that has it.
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
from worker.model.sharing import Shape, shared_dimension, whole_shape

MESSAGES = 64
"""Of one resharding at most: each has its own word between two workers, which links measured by large tensors hide."""
_UNKNOWN_BYTES_PER_S = 1e10
_KEPT = 4096


@dataclass(frozen=True, slots=True)
class MeshShare:
    """How the workers of a mesh share its work: `data` parts of a microbatch, each on `tensor` workers that share matrices;
    `nodes` are where they run, one a worker."""

    name: str
    data: int
    tensor: int
    nodes: tuple[str, ...]

    def like(self, other: MeshShare) -> bool:
        """Whether worker w of one has what worker w of the other has."""
        return (self.data, self.tensor) == (other.data, other.tensor)

    def in_pairs(self, other: MeshShare) -> bool:
        """Whether worker w of one sends all tensors to worker w of the other: they have the same, and what they have nobody
        else has, or it need not leave its node."""
        return self.like(other) and (self.tensor == 1 or self.nodes == other.nodes)

    def deals(self, other: MeshShare, shape: Shape | None) -> bool:
        """Whether a tensor, of which each worker has `shape`, is resharded between them. It is not where a plan could not
        tell parts from wholes, and meshes that are alike can do without: of a single number of each part, or nothing."""
        if self.in_pairs(other):
            return False
        return not self.like(other) or (
            shape is not None and 0 not in shape and (self.data == 1 or shape != ())
        )


@dataclass(frozen=True, slots=True)
class UnlikeProfile(LayerProfile):
    """The profile of the slowest mesh, and with it that of each mesh, and how its workers share its work. Of meshes that
    share alike, all have one."""

    of_mesh: tuple[LayerProfile, ...] = ()
    shares: tuple[MeshShare, ...] = ()

    def corrected(self) -> UnlikeProfile:
        """Each by its own factor."""
        own = LayerProfile.corrected(self)
        found = {id(one): one.corrected() for one in self.of_mesh}
        return replace(own, of_mesh=tuple(found[id(one)] for one in self.of_mesh))


def profile_of_mesh(profile: LayerProfile, mesh: int) -> LayerProfile:
    """That of a mesh, by its number."""
    return profile.of_mesh[mesh] if isinstance(profile, UnlikeProfile) else profile


def unlike_profile(of_mesh: Sequence[LayerProfile], shares: Sequence[MeshShare]) -> UnlikeProfile:
    """One value of the profiles of meshes that share so; SpecError where they are not of one model."""
    slowest = max(of_mesh, key=lambda profile: sum(layer.compute_s for layer in profile.layers))
    for profile in of_mesh:
        if [_place(edge) for edge in profile.edges] != [_place(edge) for edge in slowest.edges] or any(
            edge.shape is None for edge in profile.edges
        ):
            raise SpecError(
                "the profiles of meshes of unlike sizes are of different tensors: does the model ask how many rows it is "
                "given? Give all meshes the same number of workers"
            )
    return _with_shares(slowest, of_mesh, shares)


def alike_profile(profile: LayerProfile, shares: Sequence[MeshShare]) -> LayerProfile:
    """The profile of meshes that share alike; with their shares where a tensor would not go in pairs between all."""
    if all(one.in_pairs(shares[0]) for one in shares):
        return profile
    return _with_shares(profile, [profile] * len(shares), shares)


def _with_shares(
    slowest: LayerProfile, of_mesh: Sequence[LayerProfile], shares: Sequence[MeshShare]
) -> UnlikeProfile:
    own = {name: getattr(slowest, name) for name in LayerProfile.__dataclass_fields__}
    return UnlikeProfile(**own, of_mesh=tuple(of_mesh), shares=tuple(shares))


def card_bandwidth(network: NetworkSpec, one: MeshShare, other: MeshShare) -> float | None:
    """Bytes a second over the network cards between two meshes, by the link that was measured between their first workers.

    Where these are on one node and others are not, that says nothing of cards: they are then taken to be as slow as the
    slowest link that was measured."""
    bandwidth, _ = link_costs(network)(one.name, other.name)
    if one.nodes[0] != other.nodes[0] or len({*one.nodes, *other.nodes}) == 1:
        return bandwidth
    return min(
        (known for known in (bandwidth, network.bandwidth_bytes_per_s) if known is not None), default=None
    )


def resharding_between(
    profile: UnlikeProfile, edge: int, meshes: tuple[int, int], network: NetworkSpec
) -> ReshardingPlan:
    """The plan by which the tensor of the profile's edge goes from the first of two meshes to the second; SpecError where
    its shapes do not tell how it is shared."""
    here, there = (profile.of_mesh[mesh].edges[edge] for mesh in meshes)
    return resharding_of(
        here.tensor,
        (here.shape, there.shape),
        here.bytes // max(1, math.prod(here.shape)),
        (profile.shares[meshes[0]], profile.shares[meshes[1]]),
        network,
        differentiable=here.differentiable,
    )


def resharding_of(
    name: str,
    shapes: tuple[Shape, Shape],
    element_bytes: int,
    sides: tuple[MeshShare, MeshShare],
    network: NetworkSpec,
    *,
    differentiable: bool,
) -> ReshardingPlan:
    """The plan by which tensor `name`, of which each worker of the two meshes has one of `shapes`, goes from the first to
    the second; SpecError where the shapes do not tell how it is shared."""
    one, other = sides
    along = _along(name, shapes, (one.data, other.data), differentiable)
    tensor = Tensor(whole_shape(shapes[0], along, one.data), element_bytes)
    links = _links(network, one, other)
    return _planned(tensor, _side(one, along), _side(other, along), links)


def _place(edge: LayerEdge) -> tuple[int, int, int, str]:
    return edge.source, edge.target, edge.order, edge.tensor


def _along(name: str, shapes: tuple[Shape, Shape], data: tuple[int, int], differentiable: bool) -> int | None:
    """The dimension of the whole along which the parts lie; None where each worker has the whole."""
    if data[0] != data[1]:
        try:
            return shared_dimension(name, shapes, data, differentiable=differentiable)
        except CutError as error:
            raise SpecError(str(error)) from None
    if data[0] == 1:
        return None
    if not shapes[0]:
        raise SpecError(
            f"tensor {name!r} is a single number of each of {data[0]} parts of a microbatch: between meshes that share "
            "their matrices unlike it cannot be dealt; keep the stages that make and use it on one mesh (pipeline.cut)"
        )
    return 0  # no part is cut: any dimension tells them apart


def _side(share: MeshShare, along: int | None) -> Layout:
    """Its parts lie on neighbours; workers that share matrices see the same samples, and have the whole of a part."""
    if share.tensor == 1:
        return layout(share.name, mesh=(share.data,), split=(along,), hosts=share.nodes)
    return layout(share.name, mesh=(share.data, share.tensor), split=(along, None), hosts=share.nodes)


def _links(network: NetworkSpec, one: MeshShare, other: MeshShare) -> Links:
    bandwidth, latency_s = link_costs(network)(one.name, other.name)
    if one.nodes[0] != other.nodes[0]:
        return Links(bandwidth or _UNKNOWN_BYTES_PER_S, latency_s=latency_s)
    card = card_bandwidth(network, one, other) or _UNKNOWN_BYTES_PER_S
    return Links(card, bandwidth or _UNKNOWN_BYTES_PER_S, latency_s, latency_s)


@functools.lru_cache(maxsize=_KEPT)
def _planned(tensor: Tensor, source: Layout, target: Layout, links: Links) -> ReshardingPlan:
    return plan_resharding(tensor, source, target, links, messages=MESSAGES)
