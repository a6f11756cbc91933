"""`resources.meshes` as a list: one entry a mesh, with its workers and how they share its work (DESIGN section 12).

Workers of a mesh share its samples (data parallel) or its matrices (tensor parallel). A list of meshes that are all alike is
the short form written out; where they have unlike numbers of workers, `workers` says them, and `shard` which of them share
the optimizer's state. What cannot run together is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

LARGEST = 1024
NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
Count = Annotated[int, Field(ge=1, le=LARGEST)]


Shard = Literal["none", "optimizer"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Parallel(_Part):
    """data times tensor is the workers of the mesh; `data` is what tensor leaves where it is not given."""

    data: Count | None = None
    tensor: Count = 1


class MeshEntry(_Part):
    """One mesh: so many workers, how they share, and whether they share the state of the optimizer too."""

    workers: Count = 1
    parallel: Parallel = Parallel()
    shard: Shard = "none"


def short_form(resources: Mapping[str, Any]) -> dict[str, Any]:
    """`resources` with meshes and workers_per_mesh as numbers; raises ValueError for a list that cannot run (yet)."""
    listed = resources["meshes"]
    for field in ("workers_per_mesh", "workers", "tensor", "tensors"):
        if resources.get(field) is not None:
            raise ValueError(
                f"meshes is a list and {field} is given too: each entry says its own, leave it out"
            )
    if not 1 <= len(listed) <= LARGEST:
        raise ValueError(f"meshes lists {len(listed)} meshes: list 1 to {LARGEST}")
    entries = [_entry(f"meshes.{k}", one) for k, one in enumerate(listed)]
    for k, entry in enumerate(entries):
        _check_sizes(f"meshes.{k}", entry)
    shards = [entry.shard for entry in entries]
    if resources.get("shard") is not None and any("shard" in one for one in listed):
        raise ValueError("shard is given in entries of meshes and beside them: leave it out beside them")
    if {*shards} != {"none"}:
        resources = {**resources, "shard": shards[0] if len({*shards}) == 1 else shards}
    return {
        **resources,
        "meshes": len(entries),
        **tensors_of([entry.parallel.tensor for entry in entries]),
        **sizes_of([entry.workers for entry in entries]),
    }


def tensors_of(tensors: Sequence[int]) -> dict[str, Any]:
    """The fields of resources that say among how many workers each mesh shares its matrices."""
    return {"tensor": max(tensors), "tensors": list(tensors) if len({*tensors}) > 1 else None}


def sizes_of(workers: Sequence[int]) -> dict[str, Any]:
    """The fields of resources that say how many workers each mesh has."""
    unlike = len({*workers}) > 1
    return {"workers_per_mesh": max(workers), "workers": list(workers) if unlike else None}


def check_shard(shard: str | Sequence[str], meshes: int | None, optimizer: str) -> None:
    """Raise ValueError unless `shard` is one for all meshes or for each, and the optimizer (its factory) may be shared;
    one of a user's own is tried by the workers."""
    if not isinstance(shard, str) and len(shard) != meshes:
        raise ValueError(
            f"resources.shard lists {len(shard)} meshes and there are {meshes}: write none or optimizer for all, or "
            "meshes as a list, one entry {workers: N, shard: optimizer} a mesh"
        )
    if "optimizer" in (shard, *shard) and (name := _not_elementwise(optimizer)):
        raise ValueError(
            f"resources.shard is optimizer, and {name} does not update each element by itself: its state cannot be shared "
            "over the workers of a mesh; set shard to none, or choose another optimizer (torch.optim:AdamW, ...)"
        )


def check_split_optimizer(tensor: int, optimizer: str) -> None:
    """Raise ValueError unless the optimizer may update what each of `tensor` workers has of a matrix; one of a user's own
    is tried by the workers."""
    if tensor > 1 and (name := _not_elementwise(optimizer)):
        raise ValueError(
            f"resources.tensor is {tensor}, and {name} does not update each element by itself: of a part of a matrix it "
            "would make something else than of the whole; set tensor to 1, or choose another optimizer "
            "(torch.optim:AdamW, ...)"
        )


def _not_elementwise(optimizer: str) -> str | None:
    """The name of one of torch's own (by its factory) that looks at more of a parameter than the element it updates."""
    name = optimizer.rpartition(":")[2].rpartition(".")[2]
    return name if optimizer.startswith("torch.") and name in NOT_ELEMENTWISE else None


def check_listed(meshes: int | None, largest: int, workers: Sequence[int]) -> None:
    """Raise ValueError unless `workers` are one number for each mesh, not all alike, the largest of them `largest`."""
    if meshes != len(workers) or sizes_of(workers) != {"workers_per_mesh": largest, "workers": list(workers)}:
        raise ValueError(
            f"workers {list(workers)} does not say how many workers each of {meshes} meshes has, with workers_per_mesh "
            f"{largest}: write meshes as a list, one entry {{workers: N}} a mesh, and leave both out"
        )


def check_tensors(tensors: Sequence[int], meshes: int | None, largest: int) -> None:
    """Raise ValueError unless `tensors` are one number for each mesh, not all alike, the largest of them `largest`."""
    if meshes != len(tensors) or tensors_of(tensors) != {"tensor": largest, "tensors": list(tensors)}:
        raise ValueError(
            f"tensors {list(tensors)} does not say among how many workers each of {meshes} meshes shares its matrices, with "
            f"tensor {largest}: write meshes as a list, one entry {{workers: N, parallel: {{tensor: N}}}} a mesh, and leave "
            "both out"
        )


def check_tensor(workers: Sequence[int], tensors: Sequence[int], plan: Mapping[str, str] | None) -> None:
    """Raise ValueError unless meshes of so many workers can share their matrices among `tensors` of them."""
    tensor = max(tensors)
    if tensor == 1:
        if plan is not None:
            raise ValueError(
                "tensor_plan says how matrices are shared, and tensor is 1: set tensor, or leave the plan out"
            )
        return
    if plan is not None and {*plan.values()} <= {"replicate"}:
        raise ValueError(
            f"tensor_plan shares no matrix and tensor is {tensor}: say which are colwise, rowwise or vocab, leave the plan "
            "out for that of the known model families, or set tensor to 1"
        )
    for size, among in zip(workers, tensors, strict=True):
        if size % among:
            raise ValueError(
                f"tensor {among} does not divide workers_per_mesh {size}: use one of {_divisors(size)}, or a multiple of "
                f"{among} workers"
            )


def check_shared(batch: int, microbatches: int | None, sizes: Sequence[int]) -> None:
    """Raise ValueError unless the workers of every mesh can have equally many samples of a microbatch, naming what fits;
    `microbatches` None: their number is still to be chosen."""
    step = math.lcm(*sizes)
    unlike = len({*sizes}) > 1
    whom = f"meshes of {list(sizes)} workers" if unlike else f"resources.workers_per_mesh {step}"
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
    if unlike:
        raise ValueError(
            f"a microbatch of {size} samples cannot be shared by {whom}, each mesh among its own: give microbatches of a "
            f"multiple of {step} samples, with training.global_batch {-(-size // step) * step * microbatches}, or give "
            f"each mesh a divisor of {size}: {_divisors(size)}"
        )
    raise ValueError(
        f"a microbatch of {size} samples cannot be shared by {whom}: "
        f"choose a divisor of {size}, or raise training.global_batch"
    )


def _entry(place: str, data: Any) -> MeshEntry:
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


def _check_sizes(place: str, entry: MeshEntry) -> None:
    """data times tensor is workers; else the sizes that fit are named."""
    workers, tensor = entry.workers, entry.parallel.tensor
    if workers % tensor:
        raise ValueError(
            f"{place}.parallel.tensor {tensor} does not divide {place}.workers {workers}: use one of {_divisors(workers)}, "
            f"or a multiple of {tensor} workers"
        )
    data = workers // tensor if entry.parallel.data is None else entry.parallel.data
    if data * tensor != workers:
        raise ValueError(
            f"{place}.parallel shares among data {data} x tensor {tensor} = {data * tensor} workers, "
            f"and there are {workers}: "
            f"set data to {workers // tensor}, or workers to {data * tensor}"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
