"""Measured costs of a job: gradient reduction, optimizer step, batch dimension.

Pure values that travel as JSON, light: no torch. They are measured on a whole gang or by one worker
(worker/benchmark/plan_request.py). `costs_digest` is equal for jobs whose layers, links and memory cost the same.
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
from worker.contract.profile import PROFILE_FORMAT, CutError, LayerProfile


@dataclass(frozen=True)
class EngineCosts:
    """The costs of the engine itself on a worker: processor seconds for each action, and the bytes of its accelerator that
    connections to other meshes hold."""

    action_s: float = 0.0
    connection_bytes: int = 0


def mean_engine_costs(measured: Sequence[EngineCosts]) -> EngineCosts:
    """The mean seconds of some workers, and the most bytes of any."""
    return EngineCosts(
        sum(costs.action_s for costs in measured) / len(measured),
        max(costs.connection_bytes for costs in measured),
    )


LINK_CACHE_S = 6 * 3600.0
"""Seconds for which measured links hold: what a cloud's network gives one hour it may not give the next day."""

# worker/tasks/profile.py reads its request from this variable of the environment, and answers in a line with this mark.
PROFILE_REQUEST_VARIABLE = "SLOTLINE_PROFILE_JOB"
PROFILE_RESULT_MARK = "SLOTLINE_COSTS "


def costs_digest(spec: Mapping[str, Any]) -> str:
    """A digest that is equal for jobs (JSON of JobSpecs) whose layers, links and memory cost the same.

    What only planning and the steps read (stages, cut, schedule, microbatches, steps, seed) makes no difference, nor do
    spares.
    """
    training = spec["training"]
    parts = {name: spec[name] for name in ("model", "data", "loss", "optimizer", "code", "resources")}
    parts["model"] = {name: value for name, value in spec["model"].items() if name != "weights"}
    parts["resources"] = {name: value for name, value in spec["resources"].items() if name != "spares"}
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
    """The batch dimension of a tensor of which each rank of two meshes, of the data-parallel `sizes`, has `shapes`; None
    where every rank has the whole.

    Raises CutError, naming the tensor, where the shapes are ambiguous, or where every rank has the whole and its
    gradient would have to be summed on the way.
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
    """The costs of REDUCE (`reduce`: gradient all-reduce over a mesh, and the norm) and of STEP (`step`: clipping and the
    optimizer).

    The meshes `alone` have one data-parallel rank where others have several: their REDUCE is `norm`. `shared` has the
    ranks over which meshes shard the optimizer state (ZeRO-1): they reduce-scatter (`scatter`) in place of `reduce`, and
    all-gather parameters behind the update (`gather`).

    Where an all-reduce was measured, `sums` is its cost, for a bucket or for what is left, and `norm` the rest of
    `reduce`. `tensor` has the tensor-parallel sizes of meshes: `agree` is the cost of an all-reduce in such a group, of
    the gradients of replicated parameters and of the norm.
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
        """The cost of a gradient collective in `mesh`; None where there is none, or it was not measured."""
        if mesh in self.alone or self.sums == LinearCost():
            return None
        return self.scatter if mesh in self.shared else self.sums

    def local_reduce_cost(self, mesh: str) -> LinearCost:
        """The local part of REDUCE on a worker of `mesh`, with the collectives where they were not measured alone."""
        whole = self.reduce if self.sums == LinearCost() and mesh not in self.alone else self.norm
        return whole.per_shard(self.shared.get(mesh, 1))

    def step_cost(self, mesh: str) -> LinearCost:
        """STEP of a worker of `mesh`, with the all-gather of ZeRO-1."""
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
