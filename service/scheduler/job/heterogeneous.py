"""Layer costs on heterogeneous meshes, and the resharding of a tensor between two of them.

A worker of a smaller mesh has more samples of each microbatch: its layers take longer and keep more. A transfer
between meshes of different data or tensor parallelism lasts as long as its resharding. So does one between
uniform tensor-parallel meshes on different nodes: sent in pairs, each byte would cross once for every worker
that has it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from service.scheduler.problem.spec import NetworkSpec, SpecError, link_costs
from service.scheduler.resharding.layout import Layout, Links, Tensor, mesh_layout
from service.scheduler.resharding.resharding import plan_resharding
from service.scheduler.resharding.resharding_plan import ReshardingPlan
from worker.contract.costs import Shape, batch_dimension, global_shape
from worker.contract.profile import CutError, LayerEdge, LayerProfile

MAX_RESHARDING_MESSAGES = 64
"""Of one resharding at most: each has its own word between two workers, which links measured by large tensors hide."""
_ASSUMED_BYTES_PER_S = 1e10
_PLAN_CACHE_SIZE = 4096


@dataclass(frozen=True, slots=True)
class MeshParallelism:
    """How the workers of a mesh share its work: `data` parts of a microbatch, each on `tensor` workers that share matrices;
    `nodes` are where they run, one a worker."""

    name: str
    data: int
    tensor: int
    nodes: tuple[str, ...]

    def same_parallelism(self, other: MeshParallelism) -> bool:
        """Whether worker w of one has what worker w of the other has."""
        return (self.data, self.tensor) == (other.data, other.tensor)

    def transfers_in_pairs(self, other: MeshParallelism) -> bool:
        """Whether worker w of one sends all tensors to worker w of the other: they have the same, and what they have nobody
        else has, or it need not leave its node."""
        return self.same_parallelism(other) and (self.tensor == 1 or self.nodes == other.nodes)

    def needs_resharding(self, other: MeshParallelism, shape: Shape | None) -> bool:
        """Whether a tensor, of which each worker has `shape`, is resharded between them. It is not where a plan could not
        tell parts from wholes, and meshes that are alike can do without: of a single number of each part, or nothing."""
        if self.transfers_in_pairs(other):
            return False
        return not self.same_parallelism(other) or (
            shape is not None and 0 not in shape and (self.data == 1 or shape != ())
        )


@dataclass(frozen=True, slots=True)
class HeterogeneousProfile(LayerProfile):
    """The profile of the slowest mesh, and with it that of each mesh, and how its workers share its work. Of meshes that
    share alike, all have one."""

    mesh_profiles: tuple[LayerProfile, ...] = ()
    parallelism: tuple[MeshParallelism, ...] = ()

    def corrected(self) -> HeterogeneousProfile:
        """Each by its own factor."""
        own = LayerProfile.corrected(self)
        found = {id(one): one.corrected() for one in self.mesh_profiles}
        return replace(own, mesh_profiles=tuple(found[id(one)] for one in self.mesh_profiles))


def profile_of_mesh(profile: LayerProfile, mesh: int) -> LayerProfile:
    """That of a mesh, by its number."""
    return profile.mesh_profiles[mesh] if isinstance(profile, HeterogeneousProfile) else profile


def heterogeneous_profile(
    of_mesh: Sequence[LayerProfile], shares: Sequence[MeshParallelism]
) -> HeterogeneousProfile:
    """One value of the profiles of meshes that share so; SpecError where they are not of one model."""
    slowest = max(of_mesh, key=lambda profile: sum(layer.compute_s for layer in profile.layers))
    for profile in of_mesh:
        if [_edge_key(edge) for edge in profile.edges] != [_edge_key(edge) for edge in slowest.edges] or any(
            edge.shape is None for edge in profile.edges
        ):
            raise SpecError(
                "the profiles of meshes of unlike sizes are of different tensors: does the model ask how many rows it is "
                "given? Give all meshes the same number of workers"
            )
    return _profile_with_meshes(slowest, of_mesh, shares)


def uniform_profile(profile: LayerProfile, shares: Sequence[MeshParallelism]) -> LayerProfile:
    """The profile of meshes that share alike; with their shares where a tensor would not go in pairs between all."""
    if all(one.transfers_in_pairs(shares[0]) for one in shares):
        return profile
    return _profile_with_meshes(profile, [profile] * len(shares), shares)


def _profile_with_meshes(
    slowest: LayerProfile, of_mesh: Sequence[LayerProfile], shares: Sequence[MeshParallelism]
) -> HeterogeneousProfile:
    own = {name: getattr(slowest, name) for name in LayerProfile.__dataclass_fields__}
    return HeterogeneousProfile(**own, mesh_profiles=tuple(of_mesh), parallelism=tuple(shares))


def card_bandwidth(network: NetworkSpec, one: MeshParallelism, other: MeshParallelism) -> float | None:
    """Bytes a second over the network cards between two meshes, by the link that was measured between their first workers.

    Where these are on one node and others are not, that says nothing of cards: they are then taken to be as slow as the
    slowest link that was measured."""
    bandwidth, _ = link_costs(network)(one.name, other.name)
    if one.nodes[0] != other.nodes[0] or len({*one.nodes, *other.nodes}) == 1:
        return bandwidth
    return min(
        (known for known in (bandwidth, network.bandwidth_bytes_per_s) if known is not None), default=None
    )


def reshard_edge(
    profile: HeterogeneousProfile, edge: int, meshes: tuple[int, int], network: NetworkSpec
) -> ReshardingPlan:
    """The plan by which the tensor of the profile's edge goes from the first of two meshes to the second; SpecError where
    its shapes do not tell how it is shared."""
    here, there = (profile.mesh_profiles[mesh].edges[edge] for mesh in meshes)
    return reshard_tensor(
        here.tensor,
        (here.shape, there.shape),
        here.bytes // max(1, math.prod(here.shape)),
        (profile.parallelism[meshes[0]], profile.parallelism[meshes[1]]),
        network,
        differentiable=here.differentiable,
    )


def reshard_tensor(
    name: str,
    shapes: tuple[Shape, Shape],
    element_bytes: int,
    sides: tuple[MeshParallelism, MeshParallelism],
    network: NetworkSpec,
    *,
    differentiable: bool,
) -> ReshardingPlan:
    """The plan by which tensor `name`, of which each worker of the two meshes has one of `shapes`, goes from the first to
    the second; SpecError where the shapes do not tell how it is shared."""
    one, other = sides
    along = _batch_dimension(name, shapes, (one.data, other.data), differentiable)
    tensor = Tensor(global_shape(shapes[0], along, one.data), element_bytes)
    links = _resharding_links(network, one, other)
    return _cached_resharding(tensor, _layout_on_mesh(one, along), _layout_on_mesh(other, along), links)


def _edge_key(edge: LayerEdge) -> tuple[int, int, int, str]:
    return edge.source, edge.target, edge.order, edge.tensor


def _batch_dimension(
    name: str, shapes: tuple[Shape, Shape], data: tuple[int, int], differentiable: bool
) -> int | None:
    """The dimension of the whole along which the parts lie; None where each worker has the whole."""
    if data[0] != data[1]:
        try:
            return batch_dimension(name, shapes, data, differentiable=differentiable)
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


def _layout_on_mesh(share: MeshParallelism, along: int | None) -> Layout:
    """Its parts lie on neighbours; workers that share matrices see the same samples, and have the whole of a part."""
    if share.tensor == 1:
        return mesh_layout(share.name, mesh=(share.data,), split=(along,), hosts=share.nodes)
    return mesh_layout(share.name, mesh=(share.data, share.tensor), split=(along, None), hosts=share.nodes)


def _resharding_links(network: NetworkSpec, one: MeshParallelism, other: MeshParallelism) -> Links:
    bandwidth, latency_s = link_costs(network)(one.name, other.name)
    if one.nodes[0] != other.nodes[0]:
        return Links(bandwidth or _ASSUMED_BYTES_PER_S, latency_s=latency_s)
    card = card_bandwidth(network, one, other) or _ASSUMED_BYTES_PER_S
    return Links(card, bandwidth or _ASSUMED_BYTES_PER_S, latency_s, latency_s)


@functools.lru_cache(maxsize=_PLAN_CACHE_SIZE)
def _cached_resharding(tensor: Tensor, source: Layout, target: Layout, links: Links) -> ReshardingPlan:
    return plan_resharding(tensor, source, target, links, messages=MAX_RESHARDING_MESSAGES)
