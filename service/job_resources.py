"""`resources` of a job: how many meshes of how many workers, how they share the work, and on what.

Values only. What lists of meshes say stands in service/job_meshes.py.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from service.job_meshes import Shard, check_listed, check_tensor, check_tensors, short_form
from service.job_values import Part, Pattern

MAX_BYTES = 2**53  # what every reader of JSON takes as it is


def _memory(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_BYTES):
        return value
    raise ValueError(
        f"memory_per_worker is {value!r}: write auto, or a whole number of bytes from 1 to {MAX_BYTES}"
    )


MemoryPerWorker = Annotated[Literal["auto"] | int, BeforeValidator(_memory)]


class Resources(Part):
    meshes: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None,
        description="One a stage if null; also a list of meshes, {workers, parallel, shard} each",
    )
    workers_per_mesh: Annotated[int, Field(ge=1, le=1024)] = 1
    workers: list[Annotated[int, Field(ge=1, le=1024)]] | None = Field(
        default=None,
        description="Of each mesh, where they are not alike; workers_per_mesh is then the largest",
    )
    shard: Shard | list[Shard] = Field(
        default="none",
        description="optimizer: the workers of a mesh share its state, each keeps and updates its part; also one a mesh",
    )
    tensor: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1,
        description="Among how many workers of a mesh its matrices are shared (tensor parallel); the rest is data parallel",
    )
    tensors: list[Annotated[int, Field(ge=1, le=1024)]] | None = Field(
        default=None,
        description="Of each mesh, where they are not alike; tensor is then the largest",
    )
    tensor_plan: dict[Pattern, Literal["colwise", "rowwise", "vocab", "replicate"]] | None = Field(
        default=None,
        description="Module-name patterns and how their matrices are shared; null: the plan of the known model families",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    memory_per_worker: MemoryPerWorker = Field(
        default="auto",
        description="Bytes that the plan of one worker may use; auto is what its accelerator has free, less a margin",
    )

    @model_validator(mode="before")
    @classmethod
    def _listed_meshes(cls, data: object) -> object:
        return short_form(data) if isinstance(data, dict) and isinstance(data.get("meshes"), list) else data

    @model_validator(mode="after")
    def _workers_of_each_mesh(self) -> Self:
        if self.workers is not None:
            check_listed(self.meshes, self.workers_per_mesh, self.workers)
        if self.tensors is not None:
            check_tensors(self.tensors, self.meshes, self.tensor)
        check_tensor(self.mesh_sizes, self.mesh_tensors, self.tensor_plan)
        return self

    @property
    def unlike(self) -> bool:
        """Whether meshes have unlike numbers of workers, or share their matrices unlike."""
        return self.workers is not None or self.tensors is not None

    @property
    def mesh_sizes(self) -> list[int]:
        """The number of workers of each mesh."""
        return self.workers or [self.workers_per_mesh] * (self.meshes or 1)

    @property
    def mesh_tensors(self) -> list[int]:
        """Among how many of its workers each mesh shares its matrices."""
        return self.tensors or [self.tensor] * (self.meshes or 1)
