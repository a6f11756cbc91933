"""What the meshes of a job sum together behind their last backward, from the links between them: the norm of the gradients,
and those of parameters that several meshes hold. A part of their REDUCE, which a plan counts.

As algorithms that are the best known: small sums by trees, large ones in rings, in which each of k workers sends and
receives 2 (k - 1) / k of the bytes (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from service.scheduler.cut.layers import layer_ranges
from service.scheduler.cut.unlike import UnlikeProfile, profile_of_mesh
from service.scheduler.joint import JobPlan, longest
from service.scheduler.model.spec import NetworkSpec, link_costs
from worker.model.profile import LayerProfile


def planned_across(
    found: JobPlan, profile: LayerProfile, network: NetworkSpec, workers: Mapping[str, int], *, alike: bool
) -> JobPlan:
    """`found` with what its meshes sum together in their REDUCE. Where meshes are `alike` equal workers of all of them sum;
    else all `workers` of each."""
    names = [mesh.name for mesh in found.partition.spec.meshes]
    if len(names) < 2 or not found.update:
        return found
    more = dict.fromkeys(names, across_s(network, names, 0, workers, alike=alike))
    for holders, size_bytes in _tied(found, profile, names, whole=not alike):
        for mesh in holders:
            more[mesh] += across_s(network, holders, size_bytes, workers, alike=alike)
    update = tuple(replace(one, reduce_s=one.reduce_s + more[one.mesh]) for one in found.update)
    longer_s = longest(update) - longest(found.update)
    update_s = None if found.update_s is None else found.update_s + longer_s
    return replace(found, update=update, update_s=update_s)


def across_s(
    network: NetworkSpec, meshes: Collection[str], size_bytes: int, workers: Mapping[str, int], *, alike: bool
) -> float:
    """Seconds of one sum of so many bytes over these meshes; a link of unknown bandwidth takes its latency alone."""
    costs = [link_costs(network)(*pair) for pair in itertools.permutations(meshes, 2)]
    count = len(meshes) if alike else sum(workers[mesh] for mesh in meshes)
    latency_s = 2 * math.ceil(math.log2(count)) * max(latency_s for _, latency_s in costs)
    slowest = min((bandwidth for bandwidth, _ in costs if bandwidth is not None), default=None)
    return latency_s + (0.0 if slowest is None else 2 * (count - 1) / count * size_bytes / slowest)


def _tied(
    found: JobPlan, profile: LayerProfile, names: Sequence[str], *, whole: bool
) -> list[tuple[tuple[str, ...], int]]:
    """Of each trained parameter that several meshes hold these, in their order, and the bytes that a worker sums: what it
    has, or the `whole` where meshes share their matrices unlike."""
    layers = [layer.name for layer in profile.layers]
    begins = [layers.index(begin) for begin in found.partition.begins]
    holders: dict[str, set[str]] = {}
    for stage, (first, end) in zip(
        found.partition.spec.stages, layer_ranges(begins, len(layers)), strict=True
    ):
        for layer in profile.layers[first:end]:
            for parameter in layer.parameters:
                holders.setdefault(parameter, set()).add(stage.mesh)
    return [
        (
            tuple(mesh for mesh in names if mesh in held),
            max(_bytes_on(profile, names.index(mesh), parameter, whole) for mesh in held),
        )
        for parameter, held in sorted(holders.items())
        if len(held) > 1 and parameter not in profile.frozen_parameters
    ]


def _bytes_on(profile: LayerProfile, mesh: int, parameter: str, whole: bool) -> int:
    own = profile_of_mesh(profile, mesh)
    parts = 1
    if whole and isinstance(profile, UnlikeProfile) and parameter in own.split_parameters:
        parts = profile.shares[mesh].tensor
    return own.parameter_sizes[parameter] * parts
