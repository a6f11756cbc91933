"""What a mesh does behind its last backward, REDUCE and STEP, and how long that takes for given parameters.

Pure values that travel as JSON, light: no torch. How they are measured is worker/update_measure.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from worker.model.profile import LayerProfile


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

    The meshes `alone` have one worker where others have several: their gradients' norm takes `norm`.
    """

    reduce: LinearCost = LinearCost()
    step: LinearCost = LinearCost()
    norm: LinearCost = LinearCost()
    alone: tuple[str, ...] = ()

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
        return {**found, "norm": asdict(self.norm), "alone": list(self.alone)} if self.alone else found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> UpdateCosts:
        """Inverse of `to_json`; what is missing costs nothing."""
        costs = {name: LinearCost(**data[name]) for name in ("reduce", "step", "norm") if data.get(name)}
        return cls(**costs, alone=tuple(data.get("alone") or ()))


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
    reduce = costs.norm if mesh in costs.alone else costs.reduce
    return MeshUpdate(
        mesh, reduce.seconds(len(trained), size_bytes), costs.step.seconds(len(trained), size_bytes)
    )
