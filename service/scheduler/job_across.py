"""What the meshes of a job sum together behind their last backward, from the links between them: the norm of the gradients,
and those of parameters that several meshes hold. A part of their REDUCE, which a plan counts.

As algorithms that are the best known: small sums by trees, large ones in rings, in which each of k workers sends and
receives 2 (k - 1) / k of the bytes (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from service.scheduler.cut.unlike import UnlikeProfile, profile_of_mesh
from service.scheduler.model.spec import NetworkSpec, link_costs
from worker.model.profile import LayerProfile
from worker.model.update_costs import MeshUpdate


@dataclass(frozen=True)
class SumsAcross:
    """Where meshes are `alike` equal workers of all of them sum, over the network of a pair; else all `workers` of each."""

    network: NetworkSpec
    workers: Mapping[str, int]
    alike: bool
    _links: dict[tuple[str, ...], tuple[float | None, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def added(
        self, update: Sequence[MeshUpdate], profile: LayerProfile, layers: Sequence[Collection[int]]
    ) -> tuple[MeshUpdate, ...]:
        """`update` of all meshes, each of which holds `layers`, with what they sum together in their REDUCE."""
        names = [one.mesh for one in update]
        if len(names) < 2:
            return tuple(update)
        more = dict.fromkeys(names, self._sum_s(names, 0))
        for holders, size_bytes in self._tied(profile, layers):
            tied_s = self._sum_s([names[index] for index in holders], size_bytes)
            for index in holders:
                more[names[index]] += tied_s
        return tuple(replace(one, reduce_s=one.reduce_s + more[one.mesh]) for one in update)

    def _sum_s(self, meshes: Sequence[str], size_bytes: int) -> float:
        if (key := tuple(meshes)) not in self._links:  # the same for every cut that is judged
            self._links[key] = _worst_link(self.network, key)
        return _sum_s(self._links[key], key, size_bytes, self.workers, alike=self.alike)

    def _tied(
        self, profile: LayerProfile, layers: Sequence[Collection[int]]
    ) -> list[tuple[tuple[int, ...], int]]:
        """Of each trained parameter that several meshes hold these, by number, and the bytes that a worker sums: what it
        has, or the whole where meshes are unlike."""
        holders: dict[str, list[int]] = {}
        for mesh, held in enumerate(layers):
            for name in {name for index in held for name in profile.layers[index].parameters}:
                holders.setdefault(name, []).append(mesh)
        return [
            (tuple(held), max(_bytes_on(profile, mesh, name, whole=not self.alike) for mesh in held))
            for name, held in sorted(holders.items())
            if len(held) > 1 and name not in profile.frozen_parameters
        ]


def across_s(
    network: NetworkSpec, meshes: Collection[str], size_bytes: int, workers: Mapping[str, int], *, alike: bool
) -> float:
    """Seconds of one sum of so many bytes over these meshes; a link of unknown bandwidth takes its latency alone."""
    return _sum_s(_worst_link(network, meshes), meshes, size_bytes, workers, alike=alike)


def _worst_link(network: NetworkSpec, meshes: Collection[str]) -> tuple[float | None, float]:
    """The least bandwidth that is known, and the most latency, of all links between these."""
    of_pair = link_costs(network)
    costs = [of_pair(*pair) for pair in itertools.permutations(meshes, 2)]
    slowest = min((bandwidth for bandwidth, _ in costs if bandwidth is not None), default=None)
    return slowest, max(latency_s for _, latency_s in costs)


def _sum_s(
    link: tuple[float | None, float],
    meshes: Collection[str],
    size_bytes: int,
    workers: Mapping[str, int],
    *,
    alike: bool,
) -> float:
    slowest, latency_s = link
    count = len(meshes) if alike else sum(workers[mesh] for mesh in meshes)
    moving_s = 0.0 if slowest is None else 2 * (count - 1) / count * size_bytes / slowest
    return 2 * math.ceil(math.log2(count)) * latency_s + moving_s


def _bytes_on(profile: LayerProfile, mesh: int, parameter: str, *, whole: bool) -> int:
    own = profile_of_mesh(profile, mesh)
    parts = 1
    if whole and isinstance(profile, UnlikeProfile) and parameter in own.split_parameters:
        parts = profile.shares[mesh].tensor
    return own.parameter_sizes[parameter] * parts
