"""The network as a job's workers see it: cards shared by pairs of workers, and all-reduces that span meshes.

Links are measured between pairs of nodes, one after the other while all others are idle; in a step all workers of a
node send at once and share its card. Across meshes, gradient norms and tied parameters are summed behind the
last backward, as part of REDUCE: small sums by trees, large ones in rings, where each of k workers sends and
receives 2 (k - 1) / k of the bytes (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms").
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from service.scheduler.job.heterogeneous import (
    HeterogeneousProfile,
    MeshGroups,
    card_bandwidth,
    profile_of_mesh,
)
from service.scheduler.problem.spec import LinkSpec, NetworkSpec, link_costs
from worker.contract.costs import MeshUpdate
from worker.contract.profile import LayerProfile


@dataclass(frozen=True)
class CrossMeshAllReduce:
    """Prices all-reduces that span meshes.

    Worker w of all `uniform` meshes form a group, over the network of a pair; else all `workers` of each mesh form one.
    """

    network: NetworkSpec
    workers: Mapping[str, int]
    uniform: bool
    _links: dict[tuple[str, ...], tuple[float | None, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def with_all_reduces(
        self, update: Sequence[MeshUpdate], profile: LayerProfile, layers: Sequence[Collection[int]]
    ) -> tuple[MeshUpdate, ...]:
        """`update` of all meshes, each of which holds `layers`, with the all-reduces across meshes in their REDUCE."""
        names = [mesh.mesh for mesh in update]
        if len(names) < 2:
            return tuple(update)
        across_s = dict.fromkeys(names, self._all_reduce_s(names, 0))
        for holders, size_bytes in self._tied_parameters(profile, layers):
            tied_s = self._all_reduce_s([names[index] for index in holders], size_bytes)
            for index in holders:
                across_s[names[index]] += tied_s
        return tuple(replace(mesh, reduce_s=mesh.reduce_s + across_s[mesh.mesh]) for mesh in update)

    def _all_reduce_s(self, meshes: Sequence[str], size_bytes: int) -> float:
        if (key := tuple(meshes)) not in self._links:  # the same for every cut
            self._links[key] = _worst_link(self.network, key)
        return _link_all_reduce_s(self._links[key], key, size_bytes, self.workers, uniform=self.uniform)

    def _tied_parameters(
        self, profile: LayerProfile, layers: Sequence[Collection[int]]
    ) -> list[tuple[tuple[int, ...], int]]:
        """(numbers of the meshes, bytes that a worker sums) of every trained parameter that several meshes hold.

        A worker sums its part of the parameter, or all of it where meshes are heterogeneous.
        """
        holders: dict[str, list[int]] = {}
        for mesh, mesh_layers in enumerate(layers):
            for name in {name for index in mesh_layers for name in profile.layers[index].parameters}:
                holders.setdefault(name, []).append(mesh)
        return [
            (
                tuple(meshes),
                max(_parameter_bytes_on(profile, mesh, name, whole=not self.uniform) for mesh in meshes),
            )
            for name, meshes in sorted(holders.items())
            if len(meshes) > 1 and name not in profile.frozen_parameters
        ]


def cross_mesh_all_reduce_s(
    network: NetworkSpec,
    meshes: Collection[str],
    size_bytes: int,
    workers: Mapping[str, int],
    *,
    uniform: bool,
) -> float:
    """Seconds of one all-reduce of `size_bytes` over `meshes`; a link of unknown bandwidth takes its latency alone."""
    return _link_all_reduce_s(_worst_link(network, meshes), meshes, size_bytes, workers, uniform=uniform)


def _worst_link(network: NetworkSpec, meshes: Collection[str]) -> tuple[float | None, float]:
    """(least known bandwidth, largest latency) of all links between `meshes`."""
    of_pair = link_costs(network)
    costs = [of_pair(*pair) for pair in itertools.permutations(meshes, 2)]
    slowest = min((bandwidth for bandwidth, _ in costs if bandwidth is not None), default=None)
    return slowest, max(latency_s for _, latency_s in costs)


def _link_all_reduce_s(
    link: tuple[float | None, float],
    meshes: Collection[str],
    size_bytes: int,
    workers: Mapping[str, int],
    *,
    uniform: bool,
) -> float:
    slowest, latency_s = link
    count = len(meshes) if uniform else sum(workers[mesh] for mesh in meshes)
    moving_s = 0.0 if slowest is None else 2 * (count - 1) / count * size_bytes / slowest
    return 2 * math.ceil(math.log2(count)) * latency_s + moving_s


def _parameter_bytes_on(profile: LayerProfile, mesh: int, parameter: str, *, whole: bool) -> int:
    mesh_profile = profile_of_mesh(profile, mesh)
    parts = 1
    if whole and isinstance(profile, HeterogeneousProfile) and parameter in mesh_profile.split_parameters:
        parts = profile.parallelism[mesh].tensor
    return mesh_profile.parameter_sizes[parameter] * parts


NodeLinks = Mapping[tuple[str, str], float]
"""The measured bytes a second of single transfers, by the nodes from which and to which they go."""


def network_per_worker_pair(
    network: NetworkSpec,
    parallelism: Sequence[MeshGroups],
    node_links: NodeLinks = MappingProxyType({}),
    *,
    sums: bool = False,
) -> NetworkSpec:
    """The network in which the bandwidth between two meshes is that of one pair of workers, where tensors go in pairs.

    With `sums` between all meshes, since all-reduces go in pairs of workers too. Resharded tensors share the cards by
    their own plans.
    """
    mesh_pairs = list(itertools.permutations(parallelism, 2))
    resharded = [not sums and not source.transfers_in_pairs(target) for source, target in mesh_pairs]
    of_pair, links, same = link_costs(network), [], True
    own = {(link.source, link.target): link.contention for link in network.links}
    for (source, target), by_plan in zip(mesh_pairs, resharded, strict=True):
        before, latency_s = of_pair(source.name, target.name)
        bandwidth = before if by_plan else _pair_bandwidth(network, source, target, node_links)
        same = same and bandwidth == before
        links.append(
            LinkSpec(
                source=source.name,
                target=target.name,
                bandwidth_bytes_per_s=bandwidth,
                latency_s=latency_s,
                contention=own.get((source.name, target.name)),
            )
        )
    if same:
        return network
    rest = network.bandwidth_bytes_per_s
    if not any(resharded):
        rest = min((link.bandwidth_bytes_per_s for link in links if link.bandwidth_bytes_per_s), default=None)
    return network.model_copy(update={"bandwidth_bytes_per_s": rest, "links": links})


def _pair_bandwidth(
    network: NetworkSpec, source: MeshGroups, target: MeshGroups, node_links: NodeLinks
) -> float | None:
    """Bytes a second of the slowest pair of workers, while all pairs send at once.

    Pairs on the same two nodes share their link, those of a node its card: the card of the node with most pairs, where
    not all of their links were measured.
    """
    away = [(here, there) for here, there in zip(source.nodes, target.nodes, strict=False) if here != there]
    if not away:
        return link_costs(network)(source.name, target.name)[0]
    if node_links.keys() >= {*away}:
        return min(
            *(node_links[nodes] / count for nodes, count in Counter(away).items()),
            *(_card_share(node_links, side, nodes) for side, nodes in enumerate(zip(*away, strict=True))),
        )
    card = card_bandwidth(network, source, target)
    fullest = max(count for side in zip(*away, strict=True) for count in Counter(side).values())
    return None if card is None else card / fullest


def _card_share(node_links: NodeLinks, side: int, nodes: Sequence[str]) -> float:
    """The least share of a card with one transfer for each of `nodes`, which send (`side` 0) or receive (1).

    A card is taken to be as fast as the fastest transfer that was measured over it.
    """
    cards: dict[str, float] = {}
    for ends, bandwidth in node_links.items():
        cards[ends[side]] = max(bandwidth, cards.get(ends[side], 0.0))
    return min(cards[node] / count for node, count in Counter(nodes).items())
