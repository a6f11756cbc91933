"""`resources` of a job: number and sizes of meshes, data and tensor parallelism, ZeRO-1, device, memory.

Workers of a mesh are data parallel or tensor parallel (DESIGN section 12). `meshes` as a list has one entry a mesh;
it is normalized to numbers: uniform meshes to the short form, heterogeneous ones to `workers` and `tensors` lists.
What cannot run together is refused by name, with the values that fit. Values only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.json_schema import SkipJsonSchema

from service.spec.values import Pattern, SpecPart

MAX_MESHES = 1024
NON_ELEMENTWISE_OPTIMIZERS = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
MeshCount = Annotated[int, Field(ge=1, le=MAX_MESHES)]


ShardMode = Literal["none", "optimizer"]


class _MeshPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Parallel(_MeshPart):
    """Sizes of the dp and tp groups of a mesh: data x tensor = workers; `data` follows where it is not given."""

    data: MeshCount | None = None
    tensor: MeshCount = 1


class MeshEntry(_MeshPart):
    """One mesh of a list: its number of workers, their dp and tp sizes, and ZeRO-1 (`shard: optimizer`)."""

    workers: MeshCount = 1
    parallel: Parallel = Parallel()
    shard: ShardMode = "none"


def normalize_meshes(resources: Mapping[str, Any]) -> dict[str, Any]:
    """`resources` with meshes and workers_per_mesh as numbers; ValueError for a list that cannot run."""
    listed = resources["meshes"]
    for field in ("workers_per_mesh", "workers", "tensor", "tensors"):
        if resources.get(field) is not None:
            raise ValueError(
                f"meshes is a list and {field} is given too: each entry says its own, leave it out"
            )
    if not 1 <= len(listed) <= MAX_MESHES:
        raise ValueError(f"meshes lists {len(listed)} meshes: list 1 to {MAX_MESHES}")
    entries = [_parse_entry(f"meshes.{k}", entry) for k, entry in enumerate(listed)]
    for k, entry in enumerate(entries):
        _check_entry_sizes(f"meshes.{k}", entry)
    shards = [entry.shard for entry in entries]
    if resources.get("shard") is not None and any("shard" in entry for entry in listed):
        raise ValueError("shard is given in entries of meshes and beside them: leave it out beside them")
    if {*shards} != {"none"}:
        resources = {**resources, "shard": shards[0] if len({*shards}) == 1 else shards}
    return {
        **resources,
        "meshes": len(entries),
        **tensor_fields([entry.parallel.tensor for entry in entries]),
        **worker_fields([entry.workers for entry in entries]),
    }


class MeshRange(_MeshPart):
    """An elastic job's numbers of meshes: it starts with as many as are free, and changes its number while it trains."""

    min: MeshCount
    max: MeshCount


def normalize_mesh_range(resources: Mapping[str, Any]) -> dict[str, Any]:
    """`resources` with the most meshes as a number and `fewest_meshes` beside it; ValueError for a range that is none."""
    if resources.get("fewest_meshes") is not None:
        raise ValueError("meshes is {min, max} and fewest_meshes is given too: leave fewest_meshes out")
    for field in ("workers", "tensors"):
        if resources.get(field) is not None:
            raise ValueError(
                f"meshes is {{min, max}} and {field} is given too: meshes of a range are all alike"
            )
    try:
        given = MeshRange.model_validate(resources["meshes"])
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(("meshes", *map(str, first["loc"])))
        raise ValueError(f"{field} is wrong ({first['msg']}): write {{min: 2, max: 4}}") from error
    if given.min > given.max:
        raise ValueError(f"meshes.min {given.min} is above meshes.max {given.max}: exchange them")
    return {
        **resources,
        "meshes": given.max,
        "fewest_meshes": given.min if given.min < given.max else None,
    }


def tensor_fields(tensors: Sequence[int]) -> dict[str, Any]:
    """The fields of resources with the tp size of each mesh: `tensor`, and `tensors` for heterogeneous meshes."""
    return {"tensor": max(tensors), "tensors": list(tensors) if len({*tensors}) > 1 else None}


def worker_fields(workers: Sequence[int]) -> dict[str, Any]:
    """The fields of resources with the size of each mesh: `workers_per_mesh`, and `workers` where sizes differ."""
    return {"workers_per_mesh": max(workers), "workers": list(workers) if len({*workers}) > 1 else None}


def check_optimizer_sharding(shard: str | Sequence[str], meshes: int | None, optimizer: str) -> None:
    """Raise ValueError unless `shard` is one mode or one a mesh, and the optimizer (a factory) is elementwise.

    Only torch's own optimizers are known here; the workers try a user's own.
    """
    if not isinstance(shard, str) and len(shard) != meshes:
        raise ValueError(
            f"resources.shard lists {len(shard)} meshes and there are {meshes}: write none or optimizer for all, or "
            "meshes as a list, one entry {workers: N, shard: optimizer} a mesh"
        )
    if "optimizer" in (shard, *shard) and (name := _non_elementwise_name(optimizer)):
        raise ValueError(
            f"resources.shard is optimizer, and {name} does not update each element by itself: its state cannot be sharded "
            "over the workers of a mesh; set shard to none, or choose another optimizer (torch.optim:AdamW, ...)"
        )


def check_elementwise_by_name(tensor: int, optimizer: str) -> None:
    """Raise ValueError unless the optimizer (a factory) may update the shards of a matrix in a tp group of size `tensor`.

    Only torch's own optimizers are known here; the workers try a user's own.
    """
    if tensor > 1 and (name := _non_elementwise_name(optimizer)):
        raise ValueError(
            f"parallelism.tp is {tensor}, and {name} does not update each element by itself: of a part of a matrix it "
            "would make something else than of the whole; set tp to 1, or choose another optimizer "
            "(torch.optim:AdamW, ...)"
        )


def _non_elementwise_name(optimizer: str) -> str | None:
    """The name of one of torch's own (by its factory) that looks at more of a parameter than the element it updates."""
    name = optimizer.rpartition(":")[2].rpartition(".")[2]
    return name if optimizer.startswith("torch.") and name in NON_ELEMENTWISE_OPTIMIZERS else None


def check_worker_list(meshes: int | None, largest: int, workers: Sequence[int]) -> None:
    """Raise ValueError unless `workers` has one number for each mesh, not all equal, the largest of them `largest`."""
    if meshes != len(workers) or worker_fields(workers) != {
        "workers_per_mesh": largest,
        "workers": list(workers),
    }:
        raise ValueError(
            f"workers {list(workers)} does not say how many workers each of {meshes} meshes has, with workers_per_mesh "
            f"{largest}: write meshes as a list, one entry {{workers: N}} a mesh, and leave both out"
        )


def check_mesh_range(fewest: int, most: int | None, *, heterogeneous: bool) -> None:
    """Raise ValueError unless `fewest` is below `most` meshes, all of one size."""
    if heterogeneous:
        raise ValueError(
            "meshes differ in size, and a range adds and takes whole ones: write meshes all alike"
        )
    if most is None or fewest >= most:
        raise ValueError(f"fewest_meshes is {fewest} of {most} meshes: write meshes: {{min: 2, max: 4}}")


def check_tensor_list(tensors: Sequence[int], meshes: int | None, largest: int) -> None:
    """Raise ValueError unless `tensors` has one number for each mesh, not all equal, the largest of them `largest`."""
    if meshes != len(tensors) or tensor_fields(tensors) != {"tensor": largest, "tensors": list(tensors)}:
        raise ValueError(
            f"tensors {list(tensors)} does not give the tensor parallel size of each of {meshes} meshes, with "
            f"tensor {largest}: write meshes as a list, one entry {{workers: N, parallel: {{tensor: N}}}} a mesh, and leave "
            "both out"
        )


def check_tensor_parallel(
    workers: Sequence[int], tensors: Sequence[int], plan: Mapping[str, str] | None
) -> None:
    """Raise ValueError unless the tp sizes `tensors` divide the meshes' sizes `workers`, and `plan` splits a matrix."""
    tensor = max(tensors)
    if tensor == 1:
        if plan is not None:
            raise ValueError(
                "tensor_plan says how matrices are split, and tensor parallelism is 1: set parallelism.tp, or leave the "
                "plan out"
            )
        return
    if plan is not None and {*plan.values()} <= {"replicate"}:
        raise ValueError(
            f"tensor_plan splits no matrix and tensor is {tensor}: say which are colwise, rowwise or vocab, leave the plan "
            "out for that of the known model families, or set tp to 1"
        )
    for size, tensor in zip(workers, tensors, strict=True):
        if size % tensor:
            raise ValueError(
                f"tensor {tensor} does not divide the {size} workers of a mesh: use one of {_divisors_text(size)}, "
                f"or a multiple of {tensor} workers"
            )


def check_batch_divides(batch: int, microbatches: int | None, sizes: Sequence[int]) -> None:
    """Raise ValueError, with numbers that fit, unless every mesh's dp size divides the samples of a microbatch.

    `microbatches` None: their number is chosen by planning.
    """
    step = math.lcm(*sizes)
    heterogeneous = len({*sizes}) > 1
    whom = f"meshes of {list(sizes)} workers" if heterogeneous else f"{step} data-parallel workers of a mesh"
    if microbatches is None:
        if batch % step:
            raise ValueError(
                f"training.global_batch {batch} cannot be shared by {whom}, "
                f"whatever training.microbatches is: set global_batch to a multiple of {step}"
            )
        return
    size = batch // microbatches
    if size % step == 0:
        return
    if heterogeneous:
        raise ValueError(
            f"a microbatch of {size} samples cannot be shared by {whom}, each mesh among its own: give microbatches of a "
            f"multiple of {step} samples, with training.global_batch {-(-size // step) * step * microbatches}, or give "
            f"each mesh a divisor of {size}: {_divisors_text(size)}"
        )
    raise ValueError(
        f"a microbatch of {size} samples cannot be shared by {whom}: "
        f"choose a divisor of {size} for parallelism.dp, or raise training.global_batch"
    )


def _parse_entry(place: str, data: Any) -> MeshEntry:
    try:
        return MeshEntry.model_validate(data)
    except ValidationError as error:
        problems = []
        for item in error.errors():
            where = ".".join([place, *map(str, item["loc"])])
            if item["type"] == "extra_forbidden":
                problems.append(
                    f"{where} is not a field of a mesh: it has workers, parallel (data, tensor) and shard"
                )
            else:
                problems.append(f"{where} is {item['input']!r}: {item['msg'][:1].lower()}{item['msg'][1:]}")
        raise ValueError("; ".join(problems)) from None


def _check_entry_sizes(place: str, entry: MeshEntry) -> None:
    """Raise ValueError, with sizes that fit, unless data x tensor = workers."""
    workers, tensor = entry.workers, entry.parallel.tensor
    if workers % tensor:
        raise ValueError(
            f"{place}.parallel.tensor {tensor} does not divide {place}.workers {workers}: "
            f"use one of {_divisors_text(workers)}, or a multiple of {tensor} workers"
        )
    data = workers // tensor if entry.parallel.data is None else entry.parallel.data
    if data * tensor != workers:
        raise ValueError(
            f"{place}.parallel is data {data} x tensor {tensor} = {data * tensor} workers, "
            f"and there are {workers}: "
            f"set data to {workers // tensor}, or workers to {data * tensor}"
        )


def _divisors_text(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


MAX_JSON_INTEGER = 2**53  # what every reader of JSON takes as it is


def _check_memory(value: object) -> object:
    if value == "auto" or (
        isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_JSON_INTEGER
    ):
        return value
    raise ValueError(
        f"memory_per_worker is {value!r}: write auto, or a whole number of bytes from 1 to {MAX_JSON_INTEGER}"
    )


MemoryPerWorker = Annotated[Literal["auto"] | int, BeforeValidator(_check_memory)]


def stored_mesh_sizes(resources: Mapping[str, Any]) -> list[int]:
    """The number of workers of each mesh of a stored job, by its `resources`."""
    return resources.get("workers") or [resources["workers_per_mesh"]] * (resources["meshes"] or 1)


class ResourcesSection(SpecPart):
    """Meshes and their parallelism, device, and memory of a worker.

    `fewest_meshes`, `workers_per_mesh`, `workers`, `tensor` and `tensors` are of the stored form; no schema has them, and
    users write `parallelism` or `meshes` (short_forms.py).
    """

    meshes: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None,
        description="One a stage if null; also {min: 2, max: 4}, as many as are free, or a list of meshes, "
        "{workers, parallel, shard} each",
    )
    fewest_meshes: SkipJsonSchema[Annotated[int, Field(ge=1, le=1024)] | None] = None
    """Of an elastic job, the least number of meshes with which it trains; `meshes` is then the most."""
    workers_per_mesh: SkipJsonSchema[Annotated[int, Field(ge=1, le=1024)]] = 1
    workers: SkipJsonSchema[list[Annotated[int, Field(ge=1, le=1024)]] | None] = None
    """Workers of each mesh, where sizes differ; workers_per_mesh is then the largest."""
    shard: ShardMode | list[ShardMode] = Field(
        default="none",
        description="optimizer: ZeRO-1, each worker of a mesh keeps and updates its shard of the state; also one a mesh",
    )
    tensor: SkipJsonSchema[Annotated[int, Field(ge=1, le=1024)]] = 1
    """Size of tensor parallel groups in a mesh; its workers are data x tensor."""
    tensors: SkipJsonSchema[list[Annotated[int, Field(ge=1, le=1024)]] | None] = None
    """Of each mesh, where sizes differ; tensor is then the largest."""
    tensor_plan: dict[Pattern, Literal["colwise", "rowwise", "vocab", "replicate"]] | None = Field(
        default=None,
        description="Module-name patterns and the split of their matrices; null: the plan of the known model families",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    accelerator: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,63}$")] | None = Field(
        default=None,
        description="The accelerator type of its nodes, as Ray names it (H100, A100-80G, ...); null: any, all of one type",
    )
    spares: Annotated[int, Field(ge=0, le=64)] = Field(
        default=0,
        description="Accelerators, beside those of the meshes, whose processes wait to take the place of lost workers",
    )
    memory_per_worker: MemoryPerWorker = Field(
        default="auto",
        description="Bytes that the plan of one worker may use; auto: the free memory of its accelerator, less a margin",
    )

    @model_validator(mode="before")
    @classmethod
    def _listed_meshes(cls, data: object) -> object:
        if isinstance(data, dict) and isinstance(data.get("meshes"), list):
            return normalize_meshes(data)
        if isinstance(data, dict) and isinstance(data.get("meshes"), dict):
            return normalize_mesh_range(data)
        return data

    @model_validator(mode="after")
    def _workers_of_each_mesh(self) -> Self:
        if self.workers is not None:
            check_worker_list(self.meshes, self.workers_per_mesh, self.workers)
        if self.tensors is not None:
            check_tensor_list(self.tensors, self.meshes, self.tensor)
        check_tensor_parallel(self.mesh_sizes, self.mesh_tensors, self.tensor_plan)
        if self.fewest_meshes is not None:
            check_mesh_range(self.fewest_meshes, self.meshes, heterogeneous=self.heterogeneous)
            if self.spares:
                raise ValueError(
                    f"spares is {self.spares} and meshes a range, which goes on with fewer: give one of both"
                )
        return self

    @property
    def heterogeneous(self) -> bool:
        """True where meshes differ in size or in tensor parallelism."""
        return self.workers is not None or self.tensors is not None

    @property
    def mesh_sizes(self) -> list[int]:
        """The number of workers of each mesh."""
        return self.workers or [self.workers_per_mesh] * (self.meshes or 1)

    @property
    def mesh_tensors(self) -> list[int]:
        """The tensor parallel size of each mesh."""
        return self.tensors or [self.tensor] * (self.meshes or 1)
