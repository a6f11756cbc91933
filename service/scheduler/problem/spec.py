"""PipelineSpec: the planning problem as a user writes it (DESIGN section 4), its checks, and placement shapes.

Knows stages, edges, meshes, costs and limits; nothing of orders or times. A SpecError says that no plan can
satisfy the spec, names the value and the least change that helps. Field names are JSON: they stay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, ValidationError

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


_RECOMPUTE_FIELDS: dict[RecomputeMethod, str] = {
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
            update={field: by_method.get(method) for method, field in _RECOMPUTE_FIELDS.items()}
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
    "check_spec",
    "edge_costs",
    "link_contention",
    "link_costs",
    "load_spec",
    "rematerialised_bytes",
    "topological_order",
]

_MAX_TOTAL_BYTES = 2**62  # sums are 64-bit integers


def load_spec(data: Mapping[str, Any] | str | bytes) -> PipelineSpec:
    """The checked spec of JSON data or text; raises SpecError with every problem of its fields in one message."""
    try:
        spec = (
            PipelineSpec.model_validate_json(data)
            if isinstance(data, str | bytes)
            else PipelineSpec.model_validate(data)
        )
    except ValidationError as error:
        raise SpecError("; ".join(_describe_validation_error(item) for item in error.errors())) from error
    if spec.orders is not None and spec.schedule != "csv":
        raise SpecError(
            f"orders are given, but schedule {spec.schedule!r} makes its own: set schedule to 'csv', or remove orders"
        )
    check_spec(spec)
    return spec


def _describe_validation_error(item: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in item["loc"]) or "spec"
    kind = item["type"]
    if kind == "extra_forbidden":
        return f"{place} is not a field of a pipeline spec: remove it"
    if kind == "missing":
        return f"{place} is missing: give it"
    if kind in ("json_invalid", "json_type"):
        return f"the spec is not JSON: {item['msg']}"
    message = item["msg"].removeprefix("Value error, ")
    return f"{place} is {item['input']!r}: {message[:1].lower()}{message[1:]}"


def check_spec(spec: PipelineSpec) -> None:
    """Raise SpecError when the stage graph or the limits admit no plan at all."""
    _check_names(spec)
    _check_edges(spec)
    _check_totals(spec)
    topological_order(spec)
    if spec.length_buckets or spec.bucket_of is not None:
        _check_length_buckets(spec)
    else:
        _check_activation_limits(spec)
    _check_receive_limits(spec)


def _check_names(spec: PipelineSpec) -> None:
    for what, names in (("mesh", [m.name for m in spec.meshes]), ("stage", [s.name for s in spec.stages])):
        repeated = (
            sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        )
        if repeated:
            raise SpecError(
                f"{what} name {repeated[0]!r} is used more than once: give each {what} its own name"
            )
    meshes = {mesh.name for mesh in spec.meshes}
    for stage in spec.stages:
        if stage.mesh not in meshes:
            raise SpecError(
                f"stage {stage.name!r} is on mesh {stage.mesh!r}, which does not exist: "
                f"add that mesh or use one of {', '.join(sorted(meshes))}"
            )
        if stage.weight_stash_bytes > stage.activation_bytes + stage.rematerialised_bytes:
            raise SpecError(
                f"stage {stage.name!r} has weight_stash_bytes {stage.weight_stash_bytes}, a part of its "
                f"activation_bytes {stage.activation_bytes}: lower the stash to at most that"
            )
        for option in stage.recompute_options.values():
            if not option.required and option.activation_bytes > stage.activation_bytes:
                raise SpecError(
                    f"stage {stage.name!r} keeps {option.activation_bytes} bytes when it recomputes, more than "
                    f"its activation_bytes {stage.activation_bytes}: lower recompute.activation_bytes, or leave it out"
                )
        for method, field in _RECOMPUTE_FIELDS.items():
            beside = method != "whole" and getattr(stage, field) is not None
            if beside and (stage.recompute is None or stage.recompute.required):
                raise SpecError(
                    f"stage {stage.name!r} has {field}, which is a choice beside recompute: give recompute too, not "
                    f"required, or name it recompute alone, with {method}: true"
                )
    _check_links(spec, meshes)
    used = {stage.mesh for stage in spec.stages}
    for mesh in spec.meshes:
        if mesh.name not in used:
            raise SpecError(f"mesh {mesh.name!r} holds no stage: place a stage on it or remove the mesh")


def _check_links(spec: PipelineSpec, meshes: set[str]) -> None:
    seen = set()
    for index, link in enumerate(spec.network.links):
        for end, name in (("source", link.source), ("target", link.target)):
            if name not in meshes:
                raise SpecError(
                    f"network.links.{index} has {end} {name!r}, which is no mesh: use one of {', '.join(sorted(meshes))}"
                )
        if link.source == link.target:
            raise SpecError(f"network.links.{index} leads from mesh {link.source!r} to itself: remove it")
        if (link.source, link.target) in seen:
            raise SpecError(
                f"network.links.{index} gives the link {link.source!r} -> {link.target!r} again: give each pair once"
            )
        seen.add((link.source, link.target))
        if link.contention is not None and spec.network.contention == "none":
            raise SpecError(
                f"network.links.{index} has contention {link.contention!r}, and network.contention is 'none': set the "
                "network's to 'link', or remove the link's"
            )


def _check_edges(spec: PipelineSpec) -> None:
    stages = {stage.name: stage for stage in spec.stages}
    seconds = edge_costs(spec)
    merged: dict[tuple[str, str, str], tuple[int, tuple[float, float]]] = {}
    for index, edge in enumerate(spec.edges):
        for end in ("source", "target"):
            if getattr(edge, end) not in stages:
                raise SpecError(
                    f"edge {index} has {end} {getattr(edge, end)!r}, which is no stage: "
                    f"add that stage or use one of {', '.join(stages)}"
                )
        if edge.source == edge.target:
            raise SpecError(f"edge {index} leads from stage {edge.source!r} to itself: remove it")
        costs = seconds(index)
        mesh = stages[edge.target].mesh
        if edge.tensor is None or mesh == stages[edge.source].mesh:
            continue
        first, other = merged.setdefault((edge.source, edge.tensor, mesh), (index, costs))
        if costs != other:
            raise SpecError(
                f"edges {first} and {index} share tensor {edge.tensor!r} on mesh {mesh!r} but cost {other} and "
                f"{costs} seconds: give both the same costs, or another tensor name"
            )


def _check_totals(spec: PipelineSpec) -> None:
    """No step is longer than all its actions and transfers one after the other: that sum must be a number."""
    stages = sum(
        s.forward_s + max(s.backward_input_s + s.backward_weight_s, s.whole_backward_s) for s in spec.stages
    )
    edges = sum(sum(seconds) for seconds in map(edge_costs(spec), range(len(spec.edges))))
    seconds = spec.microbatches * (stages + edges)
    if not math.isfinite(seconds):
        raise SpecError("the times of all actions add up to more than a number holds: give smaller seconds")
    held = sum(s.static_bytes for s in spec.stages) + spec.microbatches * (
        sum(
            s.activation_bytes
            + s.weight_stash_bytes
            + max(
                [
                    s.rematerialised_bytes,
                    *(rematerialised_bytes(s, option) for option in s.recompute_options.values()),
                ]
            )
            for s in spec.stages
        )
        + sum((e.forward_bytes or 0) + (e.backward_bytes or 0) + 2 * (e.held_bytes or 0) for e in spec.edges)
    )
    if held > _MAX_TOTAL_BYTES:
        raise SpecError(
            f"all microbatches together hold {held} bytes, more than {_MAX_TOTAL_BYTES}, the most that can be "
            "counted: give smaller sizes"
        )


def _check_length_buckets(spec: PipelineSpec) -> None:
    """Checks what each bucket says, and that one microbatch of each that is used fits into memory by itself."""
    if not spec.length_buckets or spec.bucket_of is None:
        given, missing = (
            ("length_buckets", "bucket_of") if spec.length_buckets else ("bucket_of", "length_buckets")
        )
        raise SpecError(
            f"{given} is given without {missing}: give both, or none where all microbatches cost the same"
        )
    if len(spec.bucket_of) != spec.microbatches:
        raise SpecError(
            f"bucket_of has {len(spec.bucket_of)} entries, but there are {spec.microbatches} microbatches: give the "
            "index of its length bucket for each of them"
        )
    for microbatch, bucket in enumerate(spec.bucket_of):
        if bucket >= len(spec.length_buckets):
            raise SpecError(
                f"bucket_of.{microbatch} is {bucket}, but there are {len(spec.length_buckets)} length_buckets: "
                f"use 0 to {len(spec.length_buckets) - 1}"
            )
    for stage in spec.stages:
        if stage.recompute_options:
            raise SpecError(
                f"stage {stage.name!r} has recompute, which is not planned together with length_buckets: remove it, "
                "and give the costs and bytes of a stage that recomputes in its buckets"
            )
    for index, bucket in enumerate(spec.length_buckets):
        for what, here, there in (
            ("stages", bucket.stages, spec.stages),
            ("edges", bucket.edges, spec.edges),
        ):
            if len(here) != len(there):
                raise SpecError(
                    f"length_buckets.{index} has costs of {len(here)} {what}, but there are {len(there)}: give those of "
                    "each, in their order"
                )
        for costs, stage in zip(bucket.stages, spec.stages, strict=True):
            _check_costs_within(f"length_buckets.{index}", costs, f"stage {stage.name!r}", stage)
        for number, (costs, edge) in enumerate(zip(bucket.edges, spec.edges, strict=True)):
            _check_costs_within(f"length_buckets.{index}", costs, f"edge {number}", edge)
    for index in sorted(set(spec.bucket_of)):
        plain = _bucket_spec(spec, index)
        try:
            _check_edges(plain)
            _check_activation_limits(plain)
        except SpecError as error:
            raise SpecError(f"length_buckets.{index}: {error}") from error


def _check_costs_within(
    place: str, costs: StageCosts | EdgeCosts, name: str, most: StageSpec | EdgeSpec
) -> None:
    """A bucket says the same fields as the stage or edge itself, and no more in any of them."""
    for field, value in vars(costs).items():
        limit = getattr(most, field)
        if (value is None) != (limit is None):
            raise SpecError(
                f"{place} gives {field} {value!r} for {name}, which itself has {limit!r}: give {field} in both or in none"
            )
        if value is not None and value > limit:
            raise SpecError(
                f"{place} gives {field} {value!r} for {name}, more than the {limit!r} of the {name.split()[0]} itself: "
                f"give the {name.split()[0]} the most of any bucket"
            )


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
    specs = [_bucket_spec(spec, spec.length_buckets.index(bucket)) for bucket in kinds]
    return specs, [kind_of[index] for index in spec.bucket_of]


def _bucket_spec(spec: PipelineSpec, index: int) -> PipelineSpec:
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
        plain = _bucket_spec(spec, index)
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


def _check_activation_limits(spec: PipelineSpec) -> None:
    related = (
        _stages_before_backward(spec)
        if spec.schedule != "inference"
        else [1 << i for i in range(len(spec.stages))]
    )
    for mesh in spec.meshes:
        if mesh.activation_limit_bytes is None and mesh.memory_bytes is None:
            continue
        here = [i for i, stage in enumerate(spec.stages) if stage.mesh == mesh.name]
        least = {i: _least_activation_bytes(spec, spec.stages[i]) for i in here}
        # whatever is recomputed is all there while its own backward runs
        back = {i: _least_backward_bytes(spec, spec.stages[i]) for i in here}
        # the first backward on the mesh needs the forwards of every stage here that is related to it
        first = min(sum(least[j] for j in here if related[i] >> j & 1) - least[i] + back[i] for i in here)
        needed = max(first, *back.values())
        limit = mesh.activation_limit_bytes
        if limit is not None and needed > limit:
            raise SpecError(
                f"mesh {mesh.name!r} has activation_limit_bytes {limit}, less than the "
                f"{needed} that one microbatch needs there: raise the limit to at least {needed}"
            )
        static = sum(spec.stages[i].static_bytes for i in here)
        if mesh.memory_bytes is not None and static + needed > mesh.memory_bytes:
            raise SpecError(
                f"mesh {mesh.name!r} has memory_bytes {mesh.memory_bytes}, less than the {static} that its stages hold "
                f"always and the {needed} of one microbatch: raise memory_bytes to at least {static + needed}, or place "
                "fewer stages there"
            )


def _least_activation_bytes(spec: PipelineSpec, stage: StageSpec) -> int:
    """Least bytes that a stage keeps of a microbatch from F on: it may recompute."""
    if spec.schedule == "inference" or stage.recompute is None:
        return stage.activation_bytes
    kept = min(option.activation_bytes for option in stage.recompute_options.values())
    return kept if stage.recompute.required else min(kept, stage.activation_bytes)


def _least_backward_bytes(spec: PipelineSpec, stage: StageSpec) -> int:
    """Least bytes that a stage holds of a microbatch while its B or I runs."""
    if spec.schedule == "inference":
        return stage.activation_bytes
    whole = stage.activation_bytes + stage.rematerialised_bytes
    if stage.recompute is None:
        return whole
    again = min(
        option.activation_bytes + rematerialised_bytes(stage, option)
        for option in stage.recompute_options.values()
    )
    return again if stage.recompute.required else min(whole, again)


def rematerialised_bytes(stage: StageSpec, option: RecomputeSpec) -> int:
    """Bytes that are there again for the backward of a stage when it recomputes as `option` says."""
    if option.rematerialised_bytes is not None:
        return option.rematerialised_bytes
    return max(0, stage.activation_bytes - option.activation_bytes)


def _check_receive_limits(spec: PipelineSpec) -> None:
    """A stage starts when all its received tensors (or gradients) are there at once."""
    mesh_of = {stage.name: stage.mesh for stage in spec.stages}
    limits = {mesh.name: mesh.receive_buffer_limit for mesh in spec.meshes}
    arriving: dict[tuple[str, bool], set[tuple]] = {}
    for index, edge in enumerate(spec.edges):
        if mesh_of[edge.source] != mesh_of[edge.target]:
            key = (index,) if edge.tensor is None else (edge.source, edge.tensor, mesh_of[edge.target])
            arriving.setdefault((edge.target, False), set()).add(key)
            if spec.schedule != "inference":
                arriving.setdefault((edge.source, True), set()).add(key)
    for (stage, backward), tensors in arriving.items():
        limit = limits[mesh_of[stage]]
        if limit is not None and len(tensors) > limit:
            what = "gradients for the backward" if backward else "tensors for the forward"
            raise SpecError(
                f"mesh {mesh_of[stage]!r} has receive_buffer_limit {limit}, but stage {stage!r} needs {len(tensors)} "
                f"received {what} at once: raise the limit to at least {len(tensors)}"
            )


def _stages_before_backward(spec: PipelineSpec) -> list[int]:
    """Bit set for each stage: the stages whose forward must come before its backward."""
    order = topological_order(spec)
    index = {stage.name: i for i, stage in enumerate(spec.stages)}
    ancestors = [1 << i for i in range(len(spec.stages))]
    incoming: list[list[int]] = [[] for _ in spec.stages]
    outgoing: list[list[int]] = [[] for _ in spec.stages]
    for edge in spec.edges:
        incoming[index[edge.target]].append(index[edge.source])
        outgoing[index[edge.source]].append(index[edge.target])
    for stage in order:
        for source in incoming[stage]:
            ancestors[stage] |= ancestors[source]
    related = list(ancestors)
    for stage in reversed(order):
        for target in outgoing[stage]:
            related[stage] |= related[target]
    return related
