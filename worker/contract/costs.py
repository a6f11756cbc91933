"""Measured costs of a job: gradient reduction, optimizer step, batch dimension, and the JSON of a plan request.

Pure values that travel as JSON, light: no torch. A driver with a whole gang or the profile task with one worker
measures them (worker/benchmark). `costs_digest` is equal for jobs whose layers, links and memory cost the same.
Nothing marks a tensor's batch dimension: it is the one that grows with the samples of a rank, seen in the shapes
that meshes of different dp sizes trace; worker/checks/sharding verifies the values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from worker.contract.buckets import Gradient, group_into_buckets
from worker.contract.codec import from_json, to_json
from worker.contract.profile import PROFILE_FORMAT, CutError, LayerProfile, slowest_profile

# worker/tasks/profile.py reads its request from this variable of the environment, and answers in a line with this mark.
PROFILE_REQUEST_VARIABLE = "SLOTLINE_PROFILE_JOB"
PROFILE_RESULT_MARK = "SLOTLINE_COSTS "


def layer_outgrows_memory(found: Mapping[int, LayerProfile], count: int, least_bytes: int | None) -> bool:
    """True if, by the measured profiles, one layer would exceed `least_bytes` with only `count` microbatches."""
    nearest = min(found)
    largest = max((layer.activation_bytes for layer in found[nearest].layers), default=0)
    return least_bytes is not None and largest * nearest / count > least_bytes


def min_memory_bytes(memory: Mapping[str, Any]) -> int | None:
    """The memory limit of the mesh with the least memory, in a request's `memory`; None where it is unknown."""
    return min((one["memory_bytes"] for one in memory["memory"]), default=None)


def profiles_json(profiles: Mapping[int, LayerProfile]) -> dict[str, Any]:
    """The part of a request with the profiles; a single one stands where control planes have always read it."""
    if len(profiles) == 1:
        ((count, profile),) = profiles.items()
        return {"microbatches": count, "profile": profile.to_json()}
    return {
        "profiles": [
            {"microbatches": count, "profile": profile.to_json()} for count, profile in profiles.items()
        ]
    }


def mesh_profiles_json(
    by_key: Mapping[str, LayerProfile],
    keys: Sequence[Mapping[int, str]],
    kinds: Sequence[tuple[int, int]],
    counts: Iterable[int],
) -> dict[str, Any]:
    """The part of a request with the profiles of meshes of unlike sizes, whose workers have unlike numbers of samples:
    of the slowest kind of accelerator of each. `keys` (by microbatches) and `kinds` (the workers of its mesh, and how many
    of them share matrices) are one a worker."""
    if len({*kinds}) <= 1:
        return {}
    found = []
    for count in counts:
        for kind in sorted({*kinds}):
            own = dict.fromkeys(key[count] for key, of in zip(keys, kinds, strict=True) if of == kind)
            found.append(mesh_profile_json(count, kind, slowest_profile([by_key[key] for key in own])))
    return {"mesh_profiles": found}


def mesh_profile_json(microbatches: int, kind: tuple[int, int], profile: LayerProfile) -> dict[str, Any]:
    """The JSON of a profile of meshes of one kind: (workers, tensor-parallel size)."""
    workers, tensor = kind
    shares = {"tensor": tensor} if tensor > 1 else {}
    return {"microbatches": microbatches, "workers": workers, **shares, "profile": profile.to_json()}


def costs_digest(spec: Mapping[str, Any]) -> str:
    """A digest that is equal for jobs (JSON of JobSpecs) whose layers, links and memory cost the same.

    What only planning and the steps read (stages, cut, schedule, microbatches, steps, seed) makes no difference.
    """
    training = spec["training"]
    parts = {name: spec[name] for name in ("model", "data", "loss", "optimizer", "code", "resources")}
    parts["model"] = {name: value for name, value in spec["model"].items() if name != "weights"}
    parts |= {name: spec[name] for name in ("env", "secrets") if spec.get(name)}
    parts["format"] = PROFILE_FORMAT
    parts["training"] = {
        name: training[name] for name in ("global_batch", "precision", "transfers", "clip_grad_norm")
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


Shape = tuple[int, ...]


def batch_dimension(
    tensor: str, shapes: tuple[Shape, Shape], sizes: tuple[int, int], *, differentiable: bool
) -> int | None:
    """The dimension along which the workers of two meshes of unlike `sizes` share a tensor of which each of theirs has
    `shapes`; None where every worker has the whole.

    Raises CutError, naming the tensor, where its shapes do not tell, or where all have it and its gradient would have to
    be summed on the way.
    """
    (one, other), (a, b) = shapes, sizes
    if len(one) == len(other):
        if one == other and not differentiable:
            return None
        grown = [d for d, (x, y) in enumerate(zip(one, other, strict=True)) if x != y]
        if len(grown) == 1 and one[grown[0]] * a == other[grown[0]] * b:
            return grown[0]
    why = (
        "every worker has the whole of it, and its gradient is a sum over workers"
        if one == other
        else "no single dimension is shared among them"
    )
    raise CutError(
        f"tensor {tensor!r} cannot go between a mesh of {a} workers, of which each has {list(one)}, and one of {b} with "
        f"{list(other)} each: {why}; give both meshes the same number of workers, or keep the stages that make and use it "
        "on one mesh (pipeline.cut)"
    )


def global_shape(shape: Shape, dimension: int | None, workers: int) -> Shape:
    """The shape of the whole tensor, of which each of `workers` ranks has `shape`."""
    if dimension is None:
        return shape
    return (*shape[:dimension], shape[dimension] * workers, *shape[dimension + 1 :])


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds of something that is done with trained parameters: `fixed_s`, and more for each tensor and byte."""

    fixed_s: float = 0.0
    per_tensor_s: float = 0.0
    per_byte_s: float = 0.0

    def seconds(self, tensors: int, size_bytes: int) -> float:
        """Seconds for `tensors` tensors of `size_bytes` bytes in all."""
        return self.fixed_s + self.per_tensor_s * tensors + self.per_byte_s * size_bytes

    def per_shard(self, parts: int) -> LinearCost:
        """The cost with one of `parts` equal parts of every tensor."""
        return replace(self, per_byte_s=self.per_byte_s / parts)


@dataclass(frozen=True, slots=True)
class UpdateCosts:
    """`reduce`: the sums over the workers of a mesh, and the gradients' norm; `step`: clipping and the optimizer.

    The meshes `alone` have one worker where others have several: their gradients' norm takes `norm`. In the meshes
    `shared` as many workers share the optimizer's state: their sums take `scatter` in place of `reduce`, and parameters
    are gathered behind the update, `gather`.

    Where sums were measured, `sums` is what those of some gradients take, as a bucket or behind everything, and `norm`
    the rest of `reduce`. In the meshes `tensor` as many workers share matrices: `agree` is what a sum over these takes, of
    gradients of what each of them has whole, and of the norm.
    """

    reduce: LinearCost = LinearCost()
    step: LinearCost = LinearCost()
    norm: LinearCost = LinearCost()
    alone: tuple[str, ...] = ()
    scatter: LinearCost = LinearCost()
    gather: LinearCost = LinearCost()
    shared: Mapping[str, int] = field(default_factory=dict)
    sums: LinearCost = LinearCost()
    agree: LinearCost = LinearCost()
    tensor: Mapping[str, int] = field(default_factory=dict)

    def with_tensor_parallel(self, tensor: Mapping[str, int], between: tuple[float, float]) -> UpdateCosts:
        """The costs where the meshes `tensor` have tensor-parallel groups of these sizes.

        `between` is latency (s) and bandwidth (bytes/s) of an all-reduce in such a group, as measured there.
        """
        latency_s, speed = between
        return replace(self, agree=LinearCost(latency_s, 0.0, 1.0 / speed), tensor=dict(tensor))

    def tensor_parallel_sum_s(self, mesh: str, whole: Sequence[int]) -> float:
        """Seconds in which a tensor-parallel group of `mesh` sums gradients of the bytes `whole`, which each rank has
        whole: one bucket at a time, and the norm. Under ZeRO-1 each rank has its part of them.
        """
        if mesh not in self.tensor:
            return 0.0
        parts = self.shared.get(mesh, 1)
        sizes = [-(-size // parts) for size in whole]
        sums = group_into_buckets([Gradient("", (), size, "") for size in sizes])
        return (len(sums) + 1) * self.agree.fixed_s + self.agree.per_byte_s * sum(sizes)

    def with_zero1(
        self, shared: Mapping[str, int], scatter: tuple[float, float], gather: tuple[float, float]
    ) -> UpdateCosts:
        """The costs where the meshes `shared` shard the optimizer's state over these numbers of ranks (ZeRO-1).

        `scatter` and `gather` are latency (s) and bandwidth (bytes of whole parameters/s) of a reduce-scatter and an
        all-gather, as measured there.
        """
        scattered, gathered = (
            LinearCost(latency_s, 0.0, 1.0 / speed) for latency_s, speed in (scatter, gather)
        )
        return replace(self, scatter=scattered, gather=gathered, shared=dict(shared))

    def collective_cost(self, mesh: str) -> LinearCost | None:
        """The cost of a sum over the workers of `mesh`; None where nothing is summed, or the sum was not measured."""
        if mesh in self.alone or self.sums == LinearCost():
            return None
        return self.scatter if mesh in self.shared else self.sums

    def local_reduce_cost(self, mesh: str) -> LinearCost:
        """The local part of REDUCE on a worker of `mesh`, sums included where they were not measured alone."""
        whole = self.reduce if self.sums == LinearCost() and mesh not in self.alone else self.norm
        return whole.per_shard(self.shared.get(mesh, 1))

    def step_cost(self, mesh: str) -> LinearCost:
        """STEP of a worker of `mesh`, with the parameters that it gets from others."""
        if mesh not in self.shared:
            return self.step
        own, gathered = self.step.per_shard(self.shared[mesh]), self.gather
        return LinearCost(
            own.fixed_s + gathered.fixed_s,
            own.per_tensor_s + gathered.per_tensor_s,
            own.per_byte_s + gathered.per_byte_s,
        )

    def with_all_reduce(
        self, latency_s: float, bandwidth_bytes_per_s: float, alone: tuple[str, ...] = ()
    ) -> UpdateCosts:
        """The costs with gradients summed over the workers of a mesh by a measured all-reduce; not in the meshes
        `alone`, which have one worker.
        """
        whole = LinearCost(
            self.reduce.fixed_s + latency_s,
            self.reduce.per_tensor_s,
            self.reduce.per_byte_s + 1.0 / bandwidth_bytes_per_s,
        )
        sums = LinearCost(latency_s, 0.0, 1.0 / bandwidth_bytes_per_s)
        return replace(self, reduce=whole, norm=self.reduce, alone=alone, sums=sums)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` is its inverse."""
        names = ["reduce", "step"]
        if self.sums != LinearCost():
            names += ["norm", "alone", "sums"]
        if self.tensor:
            names += ["agree", "tensor"]
        if self.shared:
            names += ["scatter", "gather", "shared"]
        return {name: to_json(getattr(self, name)) for name in names}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> UpdateCosts:
        """Inverse of `to_json`; what is missing costs nothing."""
        return from_json(cls, {name: value for name, value in data.items() if value}, ignore_unknown=True)


@dataclass(frozen=True, slots=True)
class MeshUpdate:
    """The planned seconds of one mesh's REDUCE and STEP."""

    mesh: str
    reduce_s: float
    step_s: float

    @property
    def total_s(self) -> float:
        return self.reduce_s + self.step_s


def mesh_update(
    mesh: str, layers: Iterable[int], profile: LayerProfile, costs: UpdateCosts, early: Container[str] = ()
) -> MeshUpdate:
    """REDUCE and STEP of a mesh that holds `layers`; a parameter that several of them use counts once. Gradients of the
    parameters `early` were summed before.

    Without trained parameters both are nothing.
    """
    names = {name for index in layers for name in profile.layers[index].parameters}
    trained = names - set(profile.frozen_parameters)
    if not trained:
        return MeshUpdate(mesh, 0.0, 0.0)
    size_bytes = sum(profile.parameter_sizes[name] for name in trained)
    reduce_s = costs.local_reduce_cost(mesh).seconds(len(trained), size_bytes)
    late = [name for name in trained if name not in early]
    if late and (sums := costs.collective_cost(mesh)) is not None:
        reduce_s += sums.seconds(len(late), sum(profile.parameter_sizes[name] for name in late))
    reduce_s += costs.tensor_parallel_sum_s(
        mesh,
        [
            size
            for name, size in profile.parameter_sizes.items()
            if name in trained - profile.split_parameters
        ],
    )
    return MeshUpdate(mesh, reduce_s, costs.step_cost(mesh).seconds(len(trained), size_bytes))
