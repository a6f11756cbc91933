"""ModelSignature: the layers, parameter sizes and edges of a model that a plan is valid for; no times.

A saved plan carries the signature of its model, and a driver compares its own model with it before using the
plan. Plain data that travels as JSON. Light: no torch at import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.contract.codec import from_json, to_json
from worker.contract.profile import LayerProfile


@dataclass(frozen=True)
class LayerSignature:
    """A layer, and the bytes of the parameters that it uses, by original name."""

    name: str
    parameters: Mapping[str, int]


@dataclass(frozen=True)
class EdgeSignature:
    """A tensor that layer `source` makes and layer `target` uses, as one microbatch of it travels."""

    source: int
    target: int
    tensor: str
    bytes: int


@dataclass(frozen=True)
class ModelSignature:
    """Layers in execution order, and the tensors between them by source, target and order of production."""

    layers: tuple[LayerSignature, ...]
    edges: tuple[EdgeSignature, ...]

    @classmethod
    def of_profile(cls, profile: LayerProfile, *, whole: bool = True) -> ModelSignature:
        """That of measured layers; not `whole`: of workers that share matrices, whose parameters are left out."""
        sizes = profile.parameter_sizes
        return cls(
            tuple(
                LayerSignature(layer.name, {name: sizes[name] for name in layer.parameters if whole})
                for layer in profile.layers
            ),
            tuple(EdgeSignature(edge.source, edge.target, edge.tensor, edge.bytes) for edge in profile.edges),
        )

    def difference(self, wanted: ModelSignature) -> str | None:
        """The first thing in which this is not as it was `wanted`, in words; None where all is."""
        if len(self.layers) != len(wanted.layers):
            return f"the model has {len(self.layers)} layers, and not {len(wanted.layers)}"
        for number, (layer, other) in enumerate(zip(self.layers, wanted.layers, strict=True)):
            if layer.name != other.name:
                return f"layer {number} is {layer.name}, and not {other.name}"
            if dict(layer.parameters) != dict(other.parameters):
                return f"layer {layer.name} has {_describe_parameters(layer)}, and not {_describe_parameters(other)}"
        if len(self.edges) != len(wanted.edges):
            return f"{len(self.edges)} tensors travel between layers, and not {len(wanted.edges)}"
        for edge, other in zip(self.edges, wanted.edges, strict=True):
            if edge != other:
                return f"{self._describe_edge(edge)} travels between layers, and not {wanted._describe_edge(other)}"
        return None

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` is its inverse."""
        return to_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelSignature:
        """Inverse of `to_json`."""
        return from_json(cls, data, ignore_unknown=True)

    def _describe_edge(self, edge: EdgeSignature) -> str:
        ends = f"{self.layers[edge.source].name} to {self.layers[edge.target].name}"
        return f"{edge.tensor} of {edge.bytes} bytes from {ends}"


def _describe_parameters(layer: LayerSignature) -> str:
    named = ", ".join(f"{name} ({size} bytes)" for name, size in sorted(layer.parameters.items())[:4])
    more = len(layer.parameters) - 4
    return (named or "no parameters") + (f" and {more} more" if more > 0 else "")
