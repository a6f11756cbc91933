"""PipelineSpec: the planning problem as a user writes it (DESIGN section 4), and placement shapes.

Knows stages, edges, meshes, costs and limits; nothing of orders or times. It is read and checked in spec_checks.py. Field
names are JSON: they stay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool

from worker.contract.planned import RecomputeMethod, recompute_method


def _reject_quoted_number(value: Any) -> Any:
    if isinstance(value, bool | str):
        raise ValueError("write a number, without quotes")
    return value


Float = Annotated[float, BeforeValidator(_reject_quoted_number)]
Integer = Annotated[int, BeforeValidator(_reject_quoted_number)]
Seconds = Annotated[Float, Field(ge=0, allow_inf_nan=False)]
Bandwidth = Annotated[Float, Field(gt=0, allow_inf_nan=False)]
MAX_JSON_INTEGER = 2**53  # what every reader of JSON takes as it is
Bytes = Annotated[Integer, Field(ge=0, le=MAX_JSON_INTEGER)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Contention = Literal["none", "link", "full-duplex", "half-duplex"]


class SpecError(ValueError):
    """A spec that no plan can satisfy; the message names the value and the least change that helps."""


class _FrozenModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MeshSpec(_FrozenModel):
    """A group of accelerators; all limits are optional. `memory_bytes` is for everything that a mesh holds."""

    name: Name
    activation_limit_bytes: Bytes | None = None
    memory_bytes: Bytes | None = None
    receive_buffer_limit: Annotated[Integer, Field(ge=0, le=MAX_JSON_INTEGER)] | None = None


class RecomputeSpec(_FrozenModel):
    """The bytes that a stage keeps when it drops its activations, and the seconds by which its B or I grows.

    `rematerialised_bytes` come back for B (or from I to W): the rest of its activations where null. With
    `required` the stage recomputes under every schedule; else `auto` may choose it. A `selective` one keeps the results
    of its products (matrix products, convolutions, attention), and does not compute them again; `by_block` keeps the
    inputs of its blocks, and has the activations of one at a time.
    """

    activation_bytes: Bytes
    extra_s: Seconds
    rematerialised_bytes: Bytes | None = None
    required: StrictBool = False
    selective: StrictBool = False
    by_block: StrictBool = False


RECOMPUTE_FIELDS: dict[RecomputeMethod, str] = {
    "whole": "recompute",
    "selective": "recompute_selectively",
    "by_block": "recompute_by_block",
}


class StageSpec(_FrozenModel):
    """A piece of the model on one mesh; costs are of one microbatch.

    `backward_s` is how long B lasts where that was measured; null means as long as I and W together.
    `static_bytes` (weights, gradients, optimizer state) are held always; `rematerialised_bytes` besides the
    activation from the start of B or I to its end (what then is still held of both is the weight stash);
    `recompute` may be chosen by `auto`, and `recompute_selectively` or `recompute_by_block` in its place.
    """

    name: Name
    mesh: Name
    forward_s: Seconds
    backward_input_s: Seconds = 0.0
    backward_weight_s: Seconds = 0.0
    backward_s: Seconds | None = None
    activation_bytes: Bytes = 0
    weight_stash_bytes: Bytes = 0
    rematerialised_bytes: Bytes = 0
    static_bytes: Bytes = 0
    recompute: RecomputeSpec | None = None
    recompute_selectively: RecomputeSpec | None = None
    recompute_by_block: RecomputeSpec | None = None

    @property
    def recompute_options(self) -> dict[RecomputeMethod, RecomputeSpec]:
        """The ways in which the stage may recompute, by their method."""
        options = (self.recompute, self.recompute_selectively, self.recompute_by_block)
        return {recompute_method(dict(option)): option for option in options if option is not None}

    def with_recompute_options(self, options: Iterable[RecomputeSpec]) -> StageSpec:
        """The stage with these ways to recompute in place of its own; alone, any one is `recompute`."""
        by_method = {recompute_method(dict(option)): option for option in options}
        if len(by_method) == 1:
            by_method = {"whole": next(iter(by_method.values()))}
        return self.model_copy(
            update={field: by_method.get(method) for method, field in RECOMPUTE_FIELDS.items()}
        )

    @property
    def whole_backward_s(self) -> float:
        """Seconds of B."""
        split_s = self.backward_input_s + self.backward_weight_s
        return split_s if self.backward_s is None else self.backward_s

    def shortest_split(self) -> StageSpec:
        """The stage with I and W that last no longer together than its B, each as large a part as it is."""
        split_s = self.backward_input_s + self.backward_weight_s
        part = min(1.0, self.whole_backward_s / split_s) if split_s else 1.0
        shorter = {
            "backward_input_s": self.backward_input_s * part,
            "backward_weight_s": self.backward_weight_s * part,
            "backward_s": None,
        }
        return self.model_copy(update=shorter)


class EdgeSpec(_FrozenModel):
    """A tensor from one stage to another: its transfer times, or its sizes. With times, `held_bytes` is what each end
    holds of it meanwhile."""

    source: Name
    target: Name
    forward_s: Seconds | None = None
    backward_s: Seconds | None = None
    forward_bytes: Bytes | None = None
    backward_bytes: Bytes | None = None
    tensor: str | None = None
    held_bytes: Bytes | None = None


class LinkSpec(_FrozenModel):
    """One directed pair of meshes; what is null is as in the rest of the network.

    Transfers of different `contention` share nothing, also where they meet on one mesh: they use other wires.
    """

    source: Name
    target: Name
    bandwidth_bytes_per_s: Bandwidth | None = None
    latency_s: Seconds | None = None
    contention: Literal["link", "full-duplex", "half-duplex"] | None = None


class NetworkSpec(_FrozenModel):
    """The resources that transfers share, and the seconds of a byte; `links` are the pairs that differ from the rest."""

    contention: Contention = "none"
    bandwidth_bytes_per_s: Bandwidth | None = None
    latency_s: Seconds = 0.0
    links: list[LinkSpec] = []


class StageCosts(_FrozenModel):
    """Costs of one microbatch of a length bucket at one stage; the fields are those of the stage."""

    forward_s: Seconds
    backward_input_s: Seconds = 0.0
    backward_weight_s: Seconds = 0.0
    backward_s: Seconds | None = None
    activation_bytes: Bytes = 0
    weight_stash_bytes: Bytes = 0
    rematerialised_bytes: Bytes = 0


class EdgeCosts(_FrozenModel):
    """Times or sizes of a transfer of one microbatch of a length bucket; the fields are those of the edge."""

    forward_s: Seconds | None = None
    backward_s: Seconds | None = None
    forward_bytes: Bytes | None = None
    backward_bytes: Bytes | None = None
    held_bytes: Bytes | None = None


class LengthBucket(_FrozenModel):
    """Costs of a microbatch of one length: at each stage and each edge, in the order of the spec's own."""

    stages: list[StageCosts]
    edges: list[EdgeCosts] = []


class PipelineSpec(_FrozenModel):
    """Stages, edges, meshes and costs: what `make_plan` turns into a Plan.

    With `length_buckets` microbatch m costs what bucket `bucket_of[m]` says; stages and edges themselves then say the
    most of any bucket.
    """

    microbatches: Annotated[Integer, Field(ge=1, le=1_000_000)]
    meshes: Annotated[list[MeshSpec], Field(min_length=1)]
    stages: Annotated[list[StageSpec], Field(min_length=1)]
    edges: list[EdgeSpec] = []
    network: NetworkSpec = NetworkSpec()
    overlap: StrictBool = True
    schedule: str = "auto"
    orders: dict[str, list[str]] | None = None
    split_backward: StrictBool | None = None
    max_in_flight: Annotated[Integer, Field(ge=1, le=MAX_JSON_INTEGER)] | None = None
    # not written where there are none: older readers know no such fields
    length_buckets: list[LengthBucket] = Field(default=[], exclude_if=lambda buckets: not buckets)
    bucket_of: list[Annotated[Integer, Field(ge=0)]] | None = Field(
        default=None, exclude_if=lambda given: given is None
    )


def one_stage_per_mesh(spec: PipelineSpec) -> bool:
    """Every mesh holds one stage."""
    return len(spec.stages) == len(spec.meshes)


def is_chain(spec: PipelineSpec) -> bool:
    """Stage i feeds stage i+1, once, and nothing else."""
    names = [stage.name for stage in spec.stages]
    pairs = [(edge.source, edge.target) for edge in spec.edges]
    return sorted(pairs) == sorted(itertools.pairwise(names))


def is_looped(spec: PipelineSpec) -> bool:
    """Stage i is on mesh i mod P, with two or more whole rounds of stages."""
    meshes = len(spec.meshes)
    return (
        len(spec.stages) >= 2 * meshes
        and len(spec.stages) % meshes == 0
        and all(stage.mesh == spec.meshes[i % meshes].name for i, stage in enumerate(spec.stages))
        and _edges_go_forward(spec)
    )


def is_v_shaped(spec: PipelineSpec) -> bool:
    """Stages i and 2P−1−i are on mesh i."""
    meshes = len(spec.meshes)
    return (
        len(spec.stages) == 2 * meshes
        and all(
            stage.mesh == spec.meshes[min(i, 2 * meshes - 1 - i)].name for i, stage in enumerate(spec.stages)
        )
        and _edges_go_forward(spec)
    )


def _edges_go_forward(spec: PipelineSpec) -> bool:
    index = {stage.name: i for i, stage in enumerate(spec.stages)}
    return all(index[edge.source] < index[edge.target] for edge in spec.edges)


__all__ = [
    "RECOMPUTE_FIELDS",
    "EdgeCosts",
    "EdgeSpec",
    "LengthBucket",
    "LinkSpec",
    "MeshSpec",
    "NetworkSpec",
    "PipelineSpec",
    "RecomputeSpec",
    "SpecError",
    "StageCosts",
    "StageSpec",
    "bucket_specs",
    "change_costs",
    "edge_costs",
    "link_contention",
    "link_costs",
    "rematerialised_bytes",
    "single_bucket_spec",
    "topological_order",
]


def bucket_specs(spec: PipelineSpec) -> tuple[list[PipelineSpec], list[int]]:
    """(specs without buckets, the index of its spec for each microbatch): one for each kind of microbatch that there is.

    Buckets of equal costs are one kind: microbatches of a kind are interchangeable.
    """
    if spec.bucket_of is None:
        return [spec], [0] * spec.microbatches
    kinds: list[LengthBucket] = []
    kind_of = {}
    for index in sorted(set(spec.bucket_of)):
        bucket = spec.length_buckets[index]
        if bucket not in kinds:
            kinds.append(bucket)
        kind_of[index] = kinds.index(bucket)
    specs = [single_bucket_spec(spec, spec.length_buckets.index(bucket)) for bucket in kinds]
    return specs, [kind_of[index] for index in spec.bucket_of]


def single_bucket_spec(spec: PipelineSpec, index: int) -> PipelineSpec:
    """The spec in which every microbatch is of one bucket."""
    bucket = spec.length_buckets[index]
    stages = [
        stage.model_copy(update=vars(costs)) for stage, costs in zip(spec.stages, bucket.stages, strict=True)
    ]
    edges = [
        edge.model_copy(update=vars(costs)) for edge, costs in zip(spec.edges, bucket.edges, strict=True)
    ]
    return spec.model_copy(update={"stages": stages, "edges": edges, "length_buckets": [], "bucket_of": None})


def change_costs(
    spec: PipelineSpec,
    *,
    stage: Callable[[StageSpec], StageSpec] = lambda stage: stage,
    edge: Callable[[EdgeSpec], EdgeSpec] = lambda edge: edge,
) -> PipelineSpec:
    """The spec with the costs of all stages and edges changed, in its length buckets too."""
    buckets = []
    for index in range(len(spec.length_buckets)):
        plain = single_bucket_spec(spec, index)
        stages = [
            StageCosts(**{field: getattr(changed, field) for field in StageCosts.model_fields})
            for changed in map(stage, plain.stages)
        ]
        edges = [
            EdgeCosts(**{field: getattr(changed, field) for field in EdgeCosts.model_fields})
            for changed in map(edge, plain.edges)
        ]
        buckets.append(LengthBucket(stages=stages, edges=edges))
    update = {"stages": [stage(s) for s in spec.stages], "edges": [edge(e) for e in spec.edges]}
    return spec.model_copy(update={**update, **({"length_buckets": buckets} if buckets else {})})


def link_costs(network: NetworkSpec) -> Callable[[str, str], tuple[float | None, float]]:
    """(bandwidth in bytes a second or None, latency in seconds) of a directed pair of meshes."""
    links = {(link.source, link.target): link for link in network.links}

    def of_pair(source: str, target: str) -> tuple[float | None, float]:
        bandwidth, latency_s = network.bandwidth_bytes_per_s, network.latency_s
        link = links.get((source, target))
        if link is not None and link.bandwidth_bytes_per_s is not None:
            bandwidth = link.bandwidth_bytes_per_s
        if link is not None and link.latency_s is not None:
            latency_s = link.latency_s
        return bandwidth, latency_s

    return of_pair


def link_contention(network: NetworkSpec) -> Callable[[str, str], Contention]:
    """The contention of the transfers of a directed pair of meshes."""
    own = {
        (link.source, link.target): link.contention for link in network.links if link.contention is not None
    }
    return lambda source, target: own.get((source, target), network.contention)


def edge_costs(spec: PipelineSpec) -> Callable[[int], tuple[float, float]]:
    """(forward, backward) seconds of the transfers of an edge, from its times, or from its bytes and its link.

    The returned function raises SpecError for an edge whose costs are missing, double or endless.
    """
    mesh_of = {stage.name: stage.mesh for stage in spec.stages}
    of_pair = link_costs(spec.network)

    def one_way(index: int, direction: str, source: str, target: str) -> float:
        edge = spec.edges[index]
        seconds, size = getattr(edge, f"{direction}_s"), getattr(edge, f"{direction}_bytes")
        if seconds is not None and size is not None:
            raise SpecError(
                f"edge {index} gives both {direction}_s {seconds} and {direction}_bytes {size}: keep one of them"
            )
        if seconds is not None:
            return float(seconds)
        if size is None:
            if direction == "backward" and spec.schedule == "inference":
                return 0.0
            raise SpecError(f"edge {index} has no {direction} cost: give {direction}_s or {direction}_bytes")
        bandwidth, latency_s = of_pair(source, target)
        if bandwidth is None:
            raise SpecError(
                f"edge {index} is given in bytes: set network.bandwidth_bytes_per_s, or that of the link "
                f"{source!r} -> {target!r} in network.links"
            )
        seconds = latency_s + size / bandwidth
        if not math.isfinite(seconds):
            raise SpecError(
                f"edge {index} takes {seconds} seconds from {source!r} to {target!r}: raise the bandwidth of the network"
            )
        return float(seconds)

    def transfer_seconds(index: int) -> tuple[float, float]:
        here, there = mesh_of[spec.edges[index].source], mesh_of[spec.edges[index].target]
        return one_way(index, "forward", here, there), one_way(index, "backward", there, here)

    return transfer_seconds


def topological_order(spec: PipelineSpec) -> list[int]:
    """Stage indices so that every edge goes forward, ties by index; raises SpecError naming a cycle."""
    index = {stage.name: i for i, stage in enumerate(spec.stages)}
    successors: list[list[int]] = [[] for _ in spec.stages]
    missing = [0] * len(spec.stages)
    for edge in spec.edges:
        successors[index[edge.source]].append(index[edge.target])
        missing[index[edge.target]] += 1
    ready = [i for i, count in enumerate(missing) if not count]
    order = []
    while ready:
        ready.sort(reverse=True)
        stage = ready.pop()
        order.append(stage)
        for target in successors[stage]:
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    if len(order) < len(spec.stages):
        cycle = _find_cycle(successors, set(range(len(spec.stages))) - set(order))
        names = [spec.stages[i].name for i in cycle]
        raise SpecError(
            f"stages {' -> '.join([*names, names[0]])} form a cycle: remove the edge {names[-1]!r} -> {names[0]!r}"
        )
    return order


def _find_cycle(successors: list[list[int]], left: set[int]) -> list[int]:
    # every stage of `left` has a predecessor in `left`: walk backwards until one repeats
    predecessors = {t: s for s in sorted(left, reverse=True) for t in successors[s] if t in left}
    path, stage = [], min(left)
    while stage not in path:
        path.append(stage)
        stage = predecessors[stage]
    return path[path.index(stage) :][::-1]


def rematerialised_bytes(stage: StageSpec, option: RecomputeSpec) -> int:
    """Bytes that are there again for the backward of a stage when it recomputes as `option` says."""
    if option.rematerialised_bytes is not None:
        return option.rematerialised_bytes
    return max(0, stage.activation_bytes - option.activation_bytes)
