"""ReshardingSpec: the user's YAML of a tensor, two layouts and the links between them, and its checks."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from service.scheduler.problem.spec import Bandwidth, Integer, Seconds, SpecError
from service.scheduler.resharding.layout import Layout, Links, Tensor, mesh_layout

MAX_MESH_WORKERS = 1024
MAX_TILES = 4096
"""Workers of a mesh, and tiles: more would not be planned in seconds."""
MAX_COPIES = 8192
"""Pieces of the source times workers of the target: each may be a copy in flight; this many take half a minute to plan."""
MAX_FLOW_PRODUCT = 2**61
"""Elements times the square of all workers: the planner's flows count in 64 bits."""

Dtype = Literal["bool", "uint8", "int8", "float16", "bfloat16", "float32", "int32", "float64", "int64"]
Count = Annotated[Integer, Field(ge=1)]
ELEMENT_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "int32": 4,
    "float64": 8,
    "int64": 8,
}


class _SpecModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorSpec(_SpecModel):
    """`dtype` or `element_bytes`, not both; float32 where neither is given."""

    shape: tuple[Count, ...]
    dtype: Dtype | None = None
    element_bytes: Count | None = None

    @model_validator(mode="after")
    def _one_size(self) -> TensorSpec:
        if self.dtype is not None and self.element_bytes is not None:
            raise ValueError("dtype and element_bytes say the same thing: give one of them")
        return self


@dataclass(frozen=True)
class DimensionSplit:
    """A dimension of the mesh that splits one of the tensor; `sizes` are the lengths of the pieces."""

    dimension: int
    sizes: tuple[int, ...] | None = None


def _hosts_field(value: Any) -> int | tuple[str, ...]:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) and name for name in value):
        if all(name.isprintable() for name in value):
            return tuple(value)
        raise ValueError("a name holds characters that cannot be printed: leave them out")
    raise ValueError("write the number of hosts, or a list with the name of each worker's host")


def _placement_field(value: Any) -> DimensionSplit | None:
    if value == "replicate":
        return None
    if isinstance(value, str) and (found := re.fullmatch(r"split\(\s*(\d+)\s*\)", value)):
        return DimensionSplit(int(found[1]))
    if isinstance(value, Mapping) and set(value) <= {"split", "sizes"} and _is_natural(value.get("split")):
        sizes = value.get("sizes")
        if sizes is None or (isinstance(sizes, list | tuple) and all(map(_is_natural, sizes))):
            return DimensionSplit(value["split"], None if sizes is None else tuple(sizes))
    raise ValueError("write replicate, split(DIMENSION) or {split: DIMENSION, sizes: [LENGTH, ...]}")


def _is_natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class LayoutSpec(_SpecModel):
    """`hosts` counts them or names the host of each worker; `mesh` is [hosts, accelerators] where it is not given."""

    hosts: Annotated[int | tuple[str, ...], PlainValidator(_hosts_field)] = 1
    accelerators: Count | None = None
    mesh: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    placement: tuple[Annotated[DimensionSplit | None, PlainValidator(_placement_field)], ...]


class LinksSpec(_SpecModel):
    card_bytes_per_s: Bandwidth
    local_bytes_per_s: Bandwidth | None = None
    latency_s: Seconds = 0.0
    local_latency_s: Seconds = 0.0
    cards_per_host: Count = 1


class ReshardingSpec(_SpecModel):
    """Without `links` one second is the whole tensor over one card, and copies inside a host are free."""

    tensor: TensorSpec
    source: LayoutSpec
    target: LayoutSpec
    links: LinksSpec | None = None


@dataclass(frozen=True)
class Resharding:
    """A checked specification as the planner's values."""

    tensor: Tensor
    source: Layout
    target: Layout
    links: Links


def load_resharding(data: Mapping[str, Any]) -> Resharding:
    """The values of a specification; raises SpecError, which names the field, its value and the way out."""
    try:
        spec = ReshardingSpec.model_validate(data)
    except ValidationError as error:
        raise SpecError("; ".join(_describe(item) for item in error.errors())) from error
    tensor_spec = spec.tensor
    size = tensor_spec.element_bytes or ELEMENT_BYTES[tensor_spec.dtype or "float32"]
    tensor = Tensor(tensor_spec.shape, size)
    source = _checked_layout("source", spec.source, tensor_spec.shape)
    target = _checked_layout("target", spec.target, tensor_spec.shape)
    most = MAX_FLOW_PRODUCT // (source.workers + target.workers) ** 2
    if tensor.elements > most:
        raise SpecError(
            f"tensor.shape is {list(tensor_spec.shape)}, {tensor.elements} elements: at most {most} are planned for "
            f"{source.workers + target.workers} workers; take a slice of it, times are proportional"
        )
    boxes = [len(set(side.boxes(tensor_spec.shape))) for side in (source, target)]
    if boxes[0] * boxes[1] > MAX_TILES:
        raise SpecError(
            f"{boxes[0]} pieces of the source and {boxes[1]} of the target may make {boxes[0] * boxes[1]} tiles, "
            f"and at most {MAX_TILES} are planned: split fewer ways"
        )
    if boxes[0] * target.workers > MAX_COPIES:
        raise SpecError(
            f"{boxes[0]} pieces of the source for {target.workers} workers of the target may make "
            f"{boxes[0] * target.workers} copies, and at most {MAX_COPIES} are planned: split fewer ways, or give the "
            "target fewer workers"
        )
    links = Links(float(tensor.bytes)) if spec.links is None else Links(**spec.links.model_dump())
    return Resharding(tensor, source, target, links)


def _checked_layout(name: str, layout_spec: LayoutSpec, shape: tuple[int, ...]) -> Layout:
    mesh = _mesh_shape(name, layout_spec)
    if len(layout_spec.placement) != len(mesh):
        raise SpecError(
            f"{name}.placement has {len(layout_spec.placement)} entries for a mesh of {len(mesh)} dimensions "
            f"({' x '.join(map(str, mesh))}): give one for each, replicate or split(DIMENSION)"
        )
    for d, split in enumerate(layout_spec.placement):
        if split is not None and split.dimension >= len(shape):
            raise SpecError(
                f"{name}.placement.{d} splits dimension {split.dimension}, and the tensor has {len(shape)}: "
                "they count from 0"
            )
    layout = mesh_layout(
        name,
        mesh=mesh,
        split=tuple(None if split is None else split.dimension for split in layout_spec.placement),
        hosts=_host_names(name, layout_spec, math.prod(mesh)),
        sizes=tuple(None if split is None else split.sizes for split in layout_spec.placement),
    )
    _check_sizes(layout, shape)
    return layout


def _mesh_shape(name: str, layout_spec: LayoutSpec) -> tuple[int, ...]:
    if layout_spec.mesh is not None and layout_spec.accelerators is not None:
        raise SpecError(
            f"{name} has mesh and accelerators: give one of them, mesh says how many workers there are"
        )
    if layout_spec.mesh is not None:
        mesh = layout_spec.mesh
    elif isinstance(layout_spec.hosts, tuple):
        raise SpecError(f"{name}.hosts names the host of each worker: give mesh, its shape, as well")
    else:
        mesh = (layout_spec.hosts, layout_spec.accelerators or 1)
    if math.prod(mesh) > MAX_MESH_WORKERS:
        raise SpecError(
            f"{name} has {math.prod(mesh)} workers, at most {MAX_MESH_WORKERS} are planned: take a smaller mesh"
        )
    return mesh


def _host_names(name: str, layout_spec: LayoutSpec, workers: int) -> tuple[str, ...]:
    if isinstance(layout_spec.hosts, int):
        if workers % layout_spec.hosts:
            fitting = ", ".join(str(n) for n in range(1, workers + 1) if workers % n == 0)
            raise SpecError(
                f"{name}.hosts is {layout_spec.hosts}, which does not divide {workers} workers: use one of {fitting}, "
                "or name the host of each worker"
            )
        return tuple(f"{name}:{w * layout_spec.hosts // workers}" for w in range(workers))
    if len(layout_spec.hosts) != workers:
        raise SpecError(
            f"{name}.hosts names {len(layout_spec.hosts)} hosts for {workers} workers: name one for each worker"
        )
    return layout_spec.hosts


def _check_sizes(made: Layout, shape: tuple[int, ...]) -> None:
    """Sizes are one for each place of the mesh, and their sum is the length of whatever they cut."""
    lengths = [{length} for length in shape]
    for d, dimension in enumerate(made.split):
        if dimension is None:
            continue
        place, sizes, pieces = f"{made.name}.placement.{d}.sizes", made.sizes[d], made.mesh[d]
        if sizes is None:
            lengths[dimension] = {
                piece
                for length in lengths[dimension]
                for k in range(pieces)
                for piece in [max(0, min(-(-length // pieces), length - k * -(-length // pieces)))]
            }
            continue
        if len(sizes) != pieces:
            raise SpecError(f"{place} has {len(sizes)} lengths for {pieces} workers: give one for each")
        if lengths[dimension] != {sum(sizes)}:
            found = " or ".join(str(length) for length in sorted(lengths[dimension]))
            raise SpecError(
                f"{place} is {list(sizes)}, {sum(sizes)} together, and what it cuts of dimension {dimension} is {found} "
                "long: give lengths with that sum"
            )
        lengths[dimension] = set(sizes)


def _describe(item: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in item["loc"]) or "the specification"
    if item["type"] == "extra_forbidden":
        return f"{place} is not a field of a resharding: remove it"
    if item["type"] == "missing":
        return f"{place} is missing: give it"
    message = item["msg"].removeprefix("Value error, ")
    return f"{place} is {_abbreviated(item['input'])}: {message[:1].lower()}{message[1:]}"


def _abbreviated(value: Any) -> str:
    """The value's repr, shortened: a file may hold lists of lists by reference, millions of them in ten lines."""
    short = reprlib.Repr()
    short.maxlevel, short.maxlist, short.maxdict, short.maxstring, short.maxother = 3, 12, 12, 200, 200
    return short.repr(value)
