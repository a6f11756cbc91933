"""`resources.meshes` as a list: one entry a mesh, with its workers and how they share its work (DESIGN section 12).

What runs today are meshes that are all alike and data parallel: such a list is the short form written out. Everything else
that a list can say is read, checked against itself, and refused by name until it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

LARGEST = 1024
Count = Annotated[int, Field(ge=1, le=LARGEST)]


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
    shard: Literal["none", "optimizer"] = "none"


def short_form(resources: Mapping[str, Any]) -> dict[str, Any]:
    """`resources` with meshes and workers_per_mesh as numbers; raises ValueError for a list that cannot run (yet)."""
    listed = resources["meshes"]
    if resources.get("workers_per_mesh") is not None:
        raise ValueError(
            "meshes is a list and workers_per_mesh is given too: each entry says its workers, leave it out"
        )
    if not 1 <= len(listed) <= LARGEST:
        raise ValueError(f"meshes lists {len(listed)} meshes: list 1 to {LARGEST}")
    entries = [_entry(f"meshes.{k}", one) for k, one in enumerate(listed)]
    for k, entry in enumerate(entries):
        _check_sizes(f"meshes.{k}", entry)
    for k, entry in enumerate(entries):
        _check_runs(f"meshes.{k}", entry, entries[0])
    return {**resources, "meshes": len(entries), "workers_per_mesh": entries[0].workers}


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


def _check_runs(place: str, entry: MeshEntry, first: MeshEntry) -> None:
    if entry.parallel.tensor > 1:
        raise ValueError(
            f"{place}.parallel.tensor is {entry.parallel.tensor}: tensor parallel cannot run yet; "
            f"set it to 1 and data to {entry.workers}"
        )
    if entry.shard != "none":
        raise ValueError(f"{place}.shard is {entry.shard}: sharded optimizers cannot run yet; set it to none")
    if entry.workers != first.workers:
        raise ValueError(
            f"{place}.workers is {entry.workers} and meshes.0.workers is {first.workers}: meshes of different sizes cannot "
            f"run yet; give all of them {entry.workers} or all {first.workers}"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
