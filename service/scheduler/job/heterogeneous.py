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
from service.scheduler.resharding.resharding_plan import PlannedResharding
from worker.contract.costs import Shape, batch_dimension, global_shape
from worker.contract.profile import CutError, LayerEdge, LayerProfile

MAX_RESHARDING_MESSAGES = 64
"""The most messages of one resharding: each has a fixed cost that links measured with large tensors do not show."""
_ASSUMED_BYTES_PER_S = 1e10
_PLAN_CACHE_SIZE = 4096


@dataclass(frozen=True, slots=True)
class MeshGroups:
    """Sizes of the data- and tensor-parallel groups of a mesh: `data` parts of a microbatch, each on `tensor` workers.

    `nodes` holds the node of every worker.
    """

    name: str
    data: int
    tensor: int
    nodes: tuple[str, ...]

    def same_parallelism(self, other: MeshGroups) -> bool:
        """True where worker w of one mesh has the same part of a tensor as worker w of the other."""
        return (self.data, self.tensor) == (other.data, other.tensor)

    def transfers_in_pairs(self, other: MeshGroups) -> bool:
        """True where worker w of one mesh sends all tensors to worker w of the other: both have the same part, which no
        other worker has or which need not leave its node."""
        return self.same_parallelism(other) and (self.tensor == 1 or self.nodes == other.nodes)

    def needs_resharding(self, other: MeshGroups, shape: Shape | None) -> bool:
        """True where a tensor, of which each worker has `shape`, is resharded between the meshes.

        Uniform meshes send it in pairs where a plan could not tell parts from wholes: an empty tensor, or a scalar of each
        part.
        """
        if self.transfers_in_pairs(other):
            return False
        return not self.same_parallelism(other) or (
            shape is not None and 0 not in shape and (self.data == 1 or shape != ())
        )


@dataclass(frozen=True, slots=True)
class HeterogeneousProfile(LayerProfile):
    """The profile of the slowest mesh, with the profile and the parallelism of each mesh; uniform meshes share one."""

    mesh_profiles: tuple[LayerProfile, ...] = ()
    parallelism: tuple[MeshGroups, ...] = ()

    def corrected(self) -> HeterogeneousProfile:
        """Every profile corrected by its own factor."""
        slowest = LayerProfile.corrected(self)
        corrected = {id(profile): profile.corrected() for profile in self.mesh_profiles}
        return replace(slowest, mesh_profiles=tuple(corrected[id(profile)] for profile in self.mesh_profiles))


def profile_of_mesh(profile: LayerProfile, mesh: int) -> LayerProfile:
    """The profile of a mesh, by its number."""
    return profile.mesh_profiles[mesh] if isinstance(profile, HeterogeneousProfile) else profile


def heterogeneous_profile(
    mesh_profiles: Sequence[LayerProfile], parallelism: Sequence[MeshGroups]
) -> HeterogeneousProfile:
    """The profiles of all meshes as one; SpecError where they are not of one model."""
    slowest = max(mesh_profiles, key=lambda profile: sum(layer.compute_s for layer in profile.layers))
    for profile in mesh_profiles:
        if [_edge_key(edge) for edge in profile.edges] != [_edge_key(edge) for edge in slowest.edges] or any(
            edge.shape is None for edge in profile.edges
        ):
            raise SpecError(
                "the profiles of heterogeneous meshes are of different tensors: the model may depend on the "
                "number of rows of its inputs. Give all meshes the same number of workers"
            )
    return _profile_with_meshes(slowest, mesh_profiles, parallelism)


def uniform_profile(profile: LayerProfile, parallelism: Sequence[MeshGroups]) -> LayerProfile:
    """The profile of uniform meshes; with their parallelism where a tensor would not go in pairs between all of them."""
    if all(mesh.transfers_in_pairs(parallelism[0]) for mesh in parallelism):
        return profile
    return _profile_with_meshes(profile, [profile] * len(parallelism), parallelism)


def _profile_with_meshes(
    slowest: LayerProfile, mesh_profiles: Sequence[LayerProfile], parallelism: Sequence[MeshGroups]
) -> HeterogeneousProfile:
    own = {name: getattr(slowest, name) for name in LayerProfile.__dataclass_fields__}
    return HeterogeneousProfile(**own, mesh_profiles=tuple(mesh_profiles), parallelism=tuple(parallelism))


def card_bandwidth(network: NetworkSpec, source: MeshGroups, target: MeshGroups) -> float | None:
    """Bytes a second over the network cards between two meshes, by the link that was measured between their first workers.

    A link within one node says nothing of the cards that other workers of the meshes use: these are then taken to be as
    slow as the slowest link that was measured.
    """
    bandwidth, _ = link_costs(network)(source.name, target.name)
    if source.nodes[0] != target.nodes[0] or len({*source.nodes, *target.nodes}) == 1:
        return bandwidth
    return min(
        (known for known in (bandwidth, network.bandwidth_bytes_per_s) if known is not None), default=None
    )


def reshard_edge(
    profile: HeterogeneousProfile, edge: int, meshes: tuple[int, int], network: NetworkSpec
) -> PlannedResharding:
    """The plan by which the tensor of the profile's edge goes from the first of two meshes to the second; SpecError where
    its shapes do not show how it is sharded."""
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
    sides: tuple[MeshGroups, MeshGroups],
    network: NetworkSpec,
    *,
    differentiable: bool,
) -> PlannedResharding:
    """The plan by which tensor `name` goes from the first mesh of `sides` to the second; `shapes` are those of a worker's
    part on each. SpecError where the shapes do not show how it is sharded."""
    source, target = sides
    along = _batch_dimension(name, shapes, (source.data, target.data), differentiable)
    tensor = Tensor(global_shape(shapes[0], along, source.data), element_bytes)
    links = _resharding_links(network, source, target)
    return _cached_resharding(tensor, _layout_on_mesh(source, along), _layout_on_mesh(target, along), links)


def _edge_key(edge: LayerEdge) -> tuple[int, int, int, str]:
    return edge.source, edge.target, edge.order, edge.tensor


def _batch_dimension(
    name: str, shapes: tuple[Shape, Shape], data: tuple[int, int], differentiable: bool
) -> int | None:
    """The dimension along which the tensor is sharded; None where each worker has all of it."""
    if data[0] != data[1]:
        try:
            return batch_dimension(name, shapes, data, differentiable=differentiable)
        except CutError as error:
            raise SpecError(str(error)) from None
    if data[0] == 1:
        return None
    if not shapes[0]:
        raise SpecError(
            f"tensor {name!r} is a single number of each of {data[0]} parts of a microbatch: it cannot be sharded "
            "between meshes of different tensor parallelism; keep the stages that make and use it on one mesh (pipeline.cut)"
        )
    return 0  # parts go whole, so any dimension tells them apart


def _layout_on_mesh(mesh: MeshGroups, along: int | None) -> Layout:
    """The layout whose parts lie on neighbours; a tensor-parallel group has the same samples, each worker a whole part."""
    if mesh.tensor == 1:
        return mesh_layout(mesh.name, mesh=(mesh.data,), split=(along,), hosts=mesh.nodes)
    return mesh_layout(mesh.name, mesh=(mesh.data, mesh.tensor), split=(along, None), hosts=mesh.nodes)


def _resharding_links(network: NetworkSpec, source: MeshGroups, target: MeshGroups) -> Links:
    bandwidth, latency_s = link_costs(network)(source.name, target.name)
    if source.nodes[0] != target.nodes[0]:
        return Links(bandwidth or _ASSUMED_BYTES_PER_S, latency_s=latency_s)
    card = card_bandwidth(network, source, target) or _ASSUMED_BYTES_PER_S
    return Links(card, bandwidth or _ASSUMED_BYTES_PER_S, latency_s, latency_s)


@functools.lru_cache(maxsize=_PLAN_CACHE_SIZE)
def _cached_resharding(tensor: Tensor, source: Layout, target: Layout, links: Links) -> PlannedResharding:
    return plan_resharding(tensor, source, target, links, messages=MAX_RESHARDING_MESSAGES)
