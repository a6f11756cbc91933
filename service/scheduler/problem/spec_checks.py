"""Reads a pipeline spec, and refuses one that no schedule can serve: names, edges, totals, memory of one microbatch.

A SpecError says that no plan can satisfy the spec, names the value and the least change that helps. Knows nothing of
plans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from service.scheduler.problem.spec import (
    RECOMPUTE_FIELDS,
    EdgeCosts,
    EdgeSpec,
    PipelineSpec,
    SpecError,
    StageCosts,
    StageSpec,
    edge_costs,
    rematerialised_bytes,
    single_bucket_spec,
    topological_order,
)

__all__ = ["check_spec", "load_spec"]

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
        for method, field in RECOMPUTE_FIELDS.items():
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
        plain = single_bucket_spec(spec, index)
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
