"""What a mesh does behind its last backward, REDUCE and STEP, and how long that takes for given parameters.

Pure values that travel as JSON, light: no torch. How they are measured is worker/update_measure.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from worker.model.profile import LayerProfile

_LINEAR = ("reduce", "step", "norm", "scatter", "gather")


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds of something that is done with trained parameters: `fixed_s`, and more for each tensor and byte."""

    fixed_s: float = 0.0
    per_tensor_s: float = 0.0
    per_byte_s: float = 0.0

    def seconds(self, tensors: int, size_bytes: int) -> float:
        """How long it takes for so many tensors of so many bytes in all."""
        return self.fixed_s + self.per_tensor_s * tensors + self.per_byte_s * size_bytes


@dataclass(frozen=True, slots=True)
class UpdateCosts:
    """`reduce`: the sums over the workers of a mesh, and the gradients' norm; `step`: clipping and the optimizer.

    The meshes `alone` have one worker where others have several: their gradients' norm takes `norm`. In the meshes
    `shared` as many workers share the optimizer's state: their sums take `scatter` in place of `reduce`, and parameters
    are gathered behind the update, `gather`.
    """

    reduce: LinearCost = LinearCost()
    step: LinearCost = LinearCost()
    norm: LinearCost = LinearCost()
    alone: tuple[str, ...] = ()
    scatter: LinearCost = LinearCost()
    gather: LinearCost = LinearCost()
    shared: Mapping[str, int] = field(default_factory=dict)

    def with_sharing(
        self, shared: Mapping[str, int], scatter: tuple[float, float], gather: tuple[float, float]
    ) -> UpdateCosts:
        """The same where so many workers of the meshes `shared` share the optimizer's state; latency and bandwidth of a
        reduce-scatter and of an all-gather, by the bytes of whole parameters, as measured there. Before `with_sum`."""
        sums = LinearCost(
            self.reduce.fixed_s + scatter[0],
            self.reduce.per_tensor_s,
            self.reduce.per_byte_s / max(shared.values(), default=1) + 1.0 / scatter[1],
        )
        gathers = LinearCost(gather[0], 0.0, 1.0 / gather[1])
        return replace(self, scatter=sums, gather=gathers, shared=dict(shared))

    def of(self, mesh: str) -> tuple[LinearCost, LinearCost]:
        """REDUCE and STEP of a worker of `mesh`, for all that it has."""
        if mesh not in self.shared:
            return (self.norm if mesh in self.alone else self.reduce), self.step
        update, gather = self.step, self.gather
        return self.scatter, LinearCost(
            update.fixed_s + gather.fixed_s,
            update.per_tensor_s + gather.per_tensor_s,
            update.per_byte_s / self.shared[mesh] + gather.per_byte_s,
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
        return replace(self, reduce=whole, norm=self.reduce if alone else self.norm, alone=alone)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` is its inverse."""
        found = {"reduce": asdict(self.reduce), "step": asdict(self.step)}
        if self.alone:
            found |= {"norm": asdict(self.norm), "alone": list(self.alone)}
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
        return cls(**costs, alone=tuple(data.get("alone") or ()), shared=dict(data.get("shared") or {}))


@dataclass(frozen=True, slots=True)
class MeshUpdate:
    """The planned seconds of one mesh's REDUCE and STEP."""

    mesh: str
    reduce_s: float
    step_s: float

    @property
    def whole_s(self) -> float:
        return self.reduce_s + self.step_s


def mesh_update(mesh: str, layers: Iterable[int], profile: LayerProfile, costs: UpdateCosts) -> MeshUpdate:
    """REDUCE and STEP of a mesh that holds `layers`; a parameter that several of them use counts once.

    Without trained parameters both are nothing.
    """
    names = {name for index in layers for name in profile.layers[index].parameters}
    trained = names - set(profile.frozen_parameters)
    if not trained:
        return MeshUpdate(mesh, 0.0, 0.0)
    size_bytes = sum(profile.parameter_sizes[name] for name in trained)
    reduce, step = costs.of(mesh)
    return MeshUpdate(mesh, reduce.seconds(len(trained), size_bytes), step.seconds(len(trained), size_bytes))
