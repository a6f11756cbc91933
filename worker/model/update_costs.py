"""What a mesh does behind its last backward, REDUCE and STEP, and how long that takes for given parameters.

Pure values that travel as JSON, light: no torch. How they are measured is worker/update_measure.py's.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from worker.buckets import Gradient, together
from worker.model.profile import LayerProfile

_LINEAR = ("reduce", "step", "norm", "scatter", "gather", "sums", "agree")


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds of something that is done with trained parameters: `fixed_s`, and more for each tensor and byte."""

    fixed_s: float = 0.0
    per_tensor_s: float = 0.0
    per_byte_s: float = 0.0

    def seconds(self, tensors: int, size_bytes: int) -> float:
        """How long it takes for so many tensors of so many bytes in all."""
        return self.fixed_s + self.per_tensor_s * tensors + self.per_byte_s * size_bytes

    def of_part(self, parts: int) -> LinearCost:
        """With one of so many parts of every tensor."""
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

    def with_agreeing(self, tensor: Mapping[str, int], between: tuple[float, float]) -> UpdateCosts:
        """The same where so many workers of the meshes `tensor` share matrices; latency and bandwidth of an all-reduce
        between them, as measured there."""
        latency_s, speed = between
        return replace(self, agree=LinearCost(latency_s, 0.0, 1.0 / speed), tensor=dict(tensor))

    def agreeing_s(self, mesh: str, whole: Sequence[int]) -> float:
        """What the workers of `mesh` that share matrices sum of gradients of so many bytes, which each of them has whole: a
        bucket's bytes at a time, and the norm (TensorShare.agree). Where they share the optimizer's state too each has
        its part."""
        if mesh not in self.tensor:
            return 0.0
        parts = self.shared.get(mesh, 1)
        sizes = [-(-size // parts) for size in whole]
        sums = together([Gradient("", (), size, "") for size in sizes])
        return (len(sums) + 1) * self.agree.fixed_s + self.agree.per_byte_s * sum(sizes)

    def with_sharing(
        self, shared: Mapping[str, int], scatter: tuple[float, float], gather: tuple[float, float]
    ) -> UpdateCosts:
        """The same where so many workers of the meshes `shared` share the optimizer's state; latency and bandwidth of a
        reduce-scatter and of an all-gather, by the bytes of whole parameters, as measured there."""
        scattered, gathered = (
            LinearCost(latency_s, 0.0, 1.0 / speed) for latency_s, speed in (scatter, gather)
        )
        return replace(self, scatter=scattered, gather=gathered, shared=dict(shared))

    def sum_of(self, mesh: str) -> LinearCost | None:
        """What a sum over the workers of `mesh` takes; None where nothing is summed, or nobody measured it alone."""
        if mesh in self.alone or self.sums == LinearCost():
            return None
        return self.scatter if mesh in self.shared else self.sums

    def alone_of(self, mesh: str) -> LinearCost:
        """What a worker of `mesh` does of REDUCE by itself; with the sums where nobody measured them alone."""
        whole = self.reduce if self.sums == LinearCost() and mesh not in self.alone else self.norm
        return whole.of_part(self.shared.get(mesh, 1))

    def step_of(self, mesh: str) -> LinearCost:
        """STEP of a worker of `mesh`, with the parameters that it gets from others."""
        if mesh not in self.shared:
            return self.step
        own, gathered = self.step.of_part(self.shared[mesh]), self.gather
        return LinearCost(
            own.fixed_s + gathered.fixed_s,
            own.per_tensor_s + gathered.per_tensor_s,
            own.per_byte_s + gathered.per_byte_s,
        )

    def with_sum(
        self, latency_s: float, bandwidth_bytes_per_s: float, alone: tuple[str, ...] = ()
    ) -> UpdateCosts:
        """The same with gradients that are summed over the workers of a mesh, as measured there; not in those `alone`."""
        whole = LinearCost(
            self.reduce.fixed_s + latency_s,
            self.reduce.per_tensor_s,
            self.reduce.per_byte_s + 1.0 / bandwidth_bytes_per_s,
        )
        sums = LinearCost(latency_s, 0.0, 1.0 / bandwidth_bytes_per_s)
        return replace(self, reduce=whole, norm=self.reduce, alone=alone, sums=sums)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` is its inverse."""
        found = {"reduce": asdict(self.reduce), "step": asdict(self.step)}
        if self.sums != LinearCost():
            found |= {"norm": asdict(self.norm), "alone": list(self.alone), "sums": asdict(self.sums)}
        if self.tensor:
            found |= {"agree": asdict(self.agree), "tensor": dict(self.tensor)}
        if self.shared:
            found |= {
                "scatter": asdict(self.scatter),
                "gather": asdict(self.gather),
                "shared": dict(self.shared),
            }
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> UpdateCosts:
        """Inverse of `to_json`; what is missing costs nothing."""
        costs = {name: LinearCost(**data[name]) for name in _LINEAR if data.get(name)}
        named = {name: dict(data.get(name) or {}) for name in ("shared", "tensor")}
        return cls(**costs, alone=tuple(data.get("alone") or ()), **named)


@dataclass(frozen=True, slots=True)
class MeshUpdate:
    """The planned seconds of one mesh's REDUCE and STEP."""

    mesh: str
    reduce_s: float
    step_s: float

    @property
    def whole_s(self) -> float:
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
    reduce_s = costs.alone_of(mesh).seconds(len(trained), size_bytes)
    late = [name for name in trained if name not in early]
    if late and (sums := costs.sum_of(mesh)) is not None:
        reduce_s += sums.seconds(len(late), sum(profile.parameter_sizes[name] for name in late))
    reduce_s += costs.agreeing_s(
        mesh,
        [
            size
            for name, size in profile.parameter_sizes.items()
            if name in trained - profile.split_parameters
        ],
    )
    return MeshUpdate(mesh, reduce_s, costs.step_of(mesh).seconds(len(trained), size_bytes))
