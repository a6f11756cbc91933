"""LayerProfile: measured time and memory of each layer for one microbatch, the input of the partition.

Plain data that travels as JSON between worker and control plane; PROFILE_FORMAT counts the JSON and the meaning
of its numbers, and a stored profile of another format is measured anew. Includes the cost of collectives inside a
layer (CollectiveCost) and the errors of a model that cannot be built, traced or cut. Light: no torch at import.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from worker.contract.codec import OMIT_EMPTY, from_json, to_json


class ModelError(ValueError):
    """A model that cannot be built, traced or cut; the message says what to change."""


class FactoryError(ModelError):
    """An import path that leads nowhere, or a factory that returns or raises the wrong thing."""


class TraceError(ModelError):
    """A model that torch.export cannot trace, or whose graph has no pipeline form."""


class CutError(ModelError):
    """A cut that the model does not admit: too many stages, unknown or unordered names."""


LatencyBandwidth = tuple[float, float]
"""Seconds to begin, and bytes of the whole tensor a second."""


@dataclass(frozen=True)
class CollectiveCost:
    """The cost of an all-reduce; and of a reduce-scatter and an all-gather, where they were measured.

    Each of these moves half as much as an all-reduce.
    """

    reduce: LatencyBandwidth
    scatter: LatencyBandwidth | None = None
    gather: LatencyBandwidth | None = None

    def seconds(self, way: str, count: int, size_bytes: int) -> float:
        """Seconds of `count` collectives of the kind `way` over `size_bytes` in all; as all-reduces if not measured."""
        latency_s, bandwidth = getattr(self, way) or self.reduce
        return count * latency_s + size_bytes / bandwidth


@dataclass(frozen=True)
class MeshCollectiveCosts:
    """The collective costs of one mesh, of its data-parallel (`data`) and tensor-parallel (`tensor`) groups; None
    for a group of one rank. `connection_bytes` is what the connections of its groups hold of an accelerator.
    """

    data: CollectiveCost | None = None
    tensor: CollectiveCost | None = None
    connection_bytes: int = 0


def slowest_collective_cost(found: Sequence[CollectiveCost | None]) -> CollectiveCost | None:
    """The latest to begin and the slowest of each way."""
    known = [one for one in found if one is not None]
    if not known:
        return None
    by_kind = ([one.reduce for one in known], [one.scatter for one in known], [one.gather for one in known])
    return CollectiveCost(
        *(
            None if None in pairs else (max(a for a, _ in pairs), min(b for _, b in pairs))
            for pairs in by_kind
        )
    )


# Of the JSON and of what its numbers mean: a stored profile of another format is measured anew.
PROFILE_FORMAT = 10


@dataclass(frozen=True, slots=True)
class HostCost:
    """Processor seconds in which the host enqueues the actions of one layer on CUDA, for one microbatch."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    backward_s: float

    @property
    def compute_s(self) -> float:
        """Forward and backward, this in the way that takes less."""
        return self.forward_s + min(self.backward_input_s + self.backward_weight_s, self.backward_s)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Costs of one layer for one microbatch.

    Seconds are those of the device; on CPU of the processor, so that they do not depend on who else used it. On CUDA `host`
    has those of the host, which enqueues the layer while the device computes another: it takes whichever is longer.
    `backward_s` is a backward in one piece, which takes less than its two parts; None: as much.
    `activation_bytes` is what autograd keeps from forward to backward, a saved input among it;
    `weight_stash_bytes` what I keeps for W, gradients among it: it may be more. `cast_bytes` is what
    autocast's copies of its weights take, one for all microbatches of a step. `flops` are the operations of a forward and
    a backward without recomputation; None: not counted. Selective recomputation keeps `selective_bytes` beside the
    inputs, the results of products, of which autograd keeps all but `selective_only_bytes` anyway, and takes
    `selective_s` more; None: the layer does not run so.
    `parameters` and `buffers` are original names, so that what several layers use shows in each of them. `sums` are those
    over workers that share the layer's matrices, which its times leave out: of a time's name and a way to sum (SumCosts)
    how many, and bytes in all. `norm_sums` are those that its batch norms would make over all workers of a mesh
    (training.sync_batch_norm): of a time's name how many, and bytes in all.
    """

    name: str
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    activation_bytes: int
    weight_stash_bytes: int
    parameter_bytes: int
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    backward_s: float | None = None
    cast_bytes: int = 0
    flops: int | None = None
    selective_s: float | None = field(default=None, metadata=OMIT_EMPTY)
    selective_bytes: int = field(default=0, metadata=OMIT_EMPTY)
    selective_only_bytes: int = field(default=0, metadata=OMIT_EMPTY)
    sums: tuple[tuple[str, str, int, int], ...] = ()
    norm_sums: tuple[tuple[str, int, int], ...] = field(default=(), metadata=OMIT_EMPTY)
    host: HostCost | None = field(default=None, metadata=OMIT_EMPTY)

    def with_bytes_of(self, other: LayerCost) -> LayerCost:
        """The cost with at least the bytes that `other` takes of activations."""
        names = ("activation_bytes", "weight_stash_bytes", "selective_bytes", "selective_only_bytes")
        return replace(self, **{name: max(getattr(self, name), getattr(other, name)) for name in names})

    def with_tensor_parallel_sums(self, between: CollectiveCost) -> LayerCost:
        """The cost with `sums` made part of its times, each as long as measured between these ranks."""
        return replace(self._with_collectives(self.sums, between), sums=())

    def with_sync_batch_norm_sums(self, between: CollectiveCost) -> LayerCost:
        """The cost with `norm_sums` made part of its times."""
        sums = [(name, "reduce", count, size) for name, count, size in self.norm_sums]
        return replace(self._with_collectives(sums, between), norm_sums=())

    def _with_collectives(
        self, sums: Iterable[tuple[str, str, int, int]], between: CollectiveCost
    ) -> LayerCost:
        longer: dict[str, float] = {}
        for name, way, count, size in sums:
            # a forward that runs again sums again
            for time in (name, "selective_s") if name == "forward_s" else (name,):
                alone_s = self.whole_backward_s if time == "backward_s" else getattr(self, time)
                if alone_s is not None:
                    longer[time] = longer.get(time, alone_s) + between.seconds(way, count, size)
        return replace(self, **longer)

    @property
    def whole_backward_s(self) -> float:
        """Seconds of a backward in one piece."""
        split_s = self.backward_input_s + self.backward_weight_s
        return split_s if self.backward_s is None else self.backward_s

    @property
    def compute_s(self) -> float:
        """Forward and backward, this in the way that takes less; of the host where that takes longer."""
        split_s = self.backward_input_s + self.backward_weight_s
        device_s = self.forward_s + min(split_s, self.whole_backward_s)
        return device_s if self.host is None else max(device_s, self.host.compute_s)


@dataclass(frozen=True, slots=True)
class LayerEdge:
    """A tensor that layer `source` makes and layer `target` uses.

    `order` is the tensor's place among all tensors in order of production. `saved_by_source` and
    `saved_by_target` say whose activation_bytes contain it. `shape` is that of one worker's part of a microbatch, as it
    travels; None where it was not told.
    """

    source: int
    target: int
    tensor: str
    bytes: int
    differentiable: bool
    order: int = 0
    saved_by_source: bool = False
    saved_by_target: bool = False
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state that an optimizer keeps of trained parameters: bytes for each of their bytes, and for each tensor."""

    bytes_per_parameter_byte: float = 0.0
    bytes_per_tensor: int = 0

    def on(self, mesh: str) -> OptimizerState:
        """The state that one worker of `mesh` keeps."""
        return self


@dataclass(frozen=True, slots=True)
class Zero1OptimizerState(OptimizerState):
    """The state of an optimizer that some meshes shard (ZeRO-1) over `workers` ranks each."""

    workers: Mapping[str, int] = field(default_factory=dict)

    def on(self, mesh: str) -> OptimizerState:
        each = self.bytes_per_parameter_byte / self.workers.get(mesh, 1)
        return OptimizerState(each, self.bytes_per_tensor)


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """The layers of a model in execution order and the tensors between them.

    `parameter_sizes` and `buffer_sizes` are bytes by original name; `frozen_parameters` get no gradient,
    `updated_buffers` are changed by forward. The model itself asks to recompute the layers `checkpointed`. Those
    `compiled` were measured so (training.compile), all others as traced. Of the parameters `split_parameters` each worker
    of several that share matrices has its part; of all others it has the whole.
    `joined` leads from a module that cannot begin a stage to the buffer, updated by forward, that it shares with others.
    `activation_factor` corrects all activation bytes, where an attempt has met more than were measured.
    """

    layers: tuple[LayerCost, ...]
    edges: tuple[LayerEdge, ...]
    device_type: str
    microbatch: str
    parameter_sizes: Mapping[str, int]
    frozen_parameters: tuple[str, ...] = ()
    buffer_sizes: Mapping[str, int] = field(default_factory=dict)
    updated_buffers: frozenset[str] = frozenset()
    checkpointed: frozenset[str] = frozenset()
    activation_factor: float = 1.0
    compiled: frozenset[str] = field(default=frozenset(), metadata=OMIT_EMPTY)
    split_parameters: frozenset[str] = field(default=frozenset(), metadata=OMIT_EMPTY)
    joined: Mapping[str, str] = field(default_factory=dict, metadata=OMIT_EMPTY)

    def static_bytes(self, first: int, end: int, optimizer: OptimizerState) -> int:
        """Bytes that a stage of the layers first..end-1 always holds: parameters, those of their gradients,
        the optimizer's state and buffers, each once however many layers use it, and the casts of weights that
        autocast keeps through a step (a weight that several layers use is counted in each).
        """
        layers = self.layers[first:end]
        parameters = {name for layer in layers for name in layer.parameters}
        trained = parameters - set(self.frozen_parameters)
        trained_bytes = sum(self.parameter_sizes[name] for name in trained)
        state = trained_bytes * optimizer.bytes_per_parameter_byte + len(trained) * optimizer.bytes_per_tensor
        buffers = {name for layer in layers for name in layer.buffers}
        return (
            sum(self.parameter_sizes[name] for name in parameters)
            + trained_bytes
            + math.ceil(state)
            + sum(layer.cast_bytes for layer in layers)
            + sum(self.buffer_sizes[name] for name in buffers)
        )

    def corrected(self) -> LayerProfile:
        """The profile with `activation_factor` made part of the layers' bytes."""

        def more(size: int) -> int:
            return math.ceil(size * self.activation_factor)

        layers = (
            replace(
                layer,
                activation_bytes=more(layer.activation_bytes),
                weight_stash_bytes=more(layer.weight_stash_bytes),
                selective_bytes=more(layer.selective_bytes),
                selective_only_bytes=more(layer.selective_only_bytes),
            )
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers), activation_factor=1.0)

    def with_bytes_of(self, others: Iterable[LayerProfile]) -> LayerProfile:
        """The profile with at least the bytes of `others`, which are of this model for microbatches of other shapes; those
        with other layers or edges are left out."""
        found = self
        for other in others:
            if [layer.name for layer in other.layers] == [layer.name for layer in self.layers]:
                layers = zip(found.layers, other.layers, strict=True)
                found = replace(found, layers=tuple(layer.with_bytes_of(like) for layer, like in layers))
            if [(edge.source, edge.target) for edge in other.edges] == [
                (edge.source, edge.target) for edge in self.edges
            ]:
                edges = zip(found.edges, other.edges, strict=True)
                found = replace(
                    found,
                    edges=tuple(replace(edge, bytes=max(edge.bytes, like.bytes)) for edge, like in edges),
                )
        return found

    def with_tensor_parallel_sums(self, between: CollectiveCost) -> LayerProfile:
        """The profile with tensor-parallel sums made part of the layers' times."""
        return replace(self, layers=tuple(layer.with_tensor_parallel_sums(between) for layer in self.layers))

    def with_sync_batch_norm_sums(self, between: CollectiveCost) -> LayerProfile:
        """The profile with the sums of synchronized batch norms made part of the layers' times."""
        return replace(self, layers=tuple(layer.with_sync_batch_norm_sums(between) for layer in self.layers))

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` is its inverse."""
        return to_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LayerProfile:
        """Inverse of `to_json`; raises ValueError naming a missing or unknown field."""
        profile = from_json(cls, data)
        for field_name, sizes in (("parameters", "parameter_sizes"), ("buffers", "buffer_sizes")):
            used = {name for layer in profile.layers for name in getattr(layer, field_name)}
            if lost := sorted(used - set(getattr(profile, sizes))):
                raise ValueError(f"LayerProfile's {sizes} lack {', '.join(lost)}, which its layers use")
        return profile


def mean_profile(profiles: Sequence[LayerProfile]) -> LayerProfile:
    """One profile with the mean times of several workers' profiles of the same layers.

    Workers that share cores and measure at the same time slow each other down as they will when
    they train. Raises ValueError when the layers differ.
    """
    first = profiles[0]
    if any([c.name for c in other.layers] != [c.name for c in first.layers] for other in profiles):
        raise ValueError("the workers' profiles are of different layers: do all build the same model?")

    def mean(index: int, name: str) -> float | None:
        times = [getattr(profile.layers[index], name) for profile in profiles]
        return None if None in times else sum(times) / len(times)

    times = ("forward_s", "backward_input_s", "backward_weight_s", "backward_s", "selective_s")
    layers = (
        replace(
            layer,
            **{name: mean(i, name) for name in times},
            host=_mean_host([p.layers[i].host for p in profiles]),
        )
        for i, layer in enumerate(first.layers)
    )
    return replace(first, layers=tuple(layers))


def _mean_host(costs: Sequence[HostCost | None]) -> HostCost | None:
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(costs):
        return None
    return HostCost(
        **{one.name: sum(getattr(cost, one.name) for cost in known) / len(known) for one in fields(HostCost)}
    )


def slowest_profile(profiles: Sequence[LayerProfile]) -> LayerProfile:
    """The profile whose layers take longest in sum, of one model's profiles on several kinds of accelerators.

    Stages are cut before it is known which kind runs which: a plan with these times is late nowhere. The
    largest correction of activations goes with it. Raises ValueError when the layers differ.
    """
    mean_profile(profiles)
    slowest = max(
        profiles,
        key=lambda profile: sum(layer.compute_s for layer in profile.layers),
    )
    return replace(slowest, activation_factor=max(profile.activation_factor for profile in profiles))


def resolve_stage_starts(
    layers: Sequence[str], names: Sequence[str], joined: Mapping[str, str] | None = None
) -> list[str]:
    """The layers that begin the stages of a cut given by names, the first layer always first.

    A name is a layer, or a module that contains layers (its first layer is meant). `joined` as of LayerProfile. Raises
    CutError for an unknown name, one given twice, names out of execution order, or one of a joined module.
    """
    if not layers:
        raise CutError("the model has no layers to cut")
    found = [_find_layer(layers, name, joined or {}) for name in names]
    if not found or found[0] != 0:
        found = [0, *found]
        names = [layers[0], *names]
    for (before, first), (after, second) in zip(
        zip(found, names, strict=True), zip(found[1:], names[1:], strict=True), strict=False
    ):
        if after == before:
            raise CutError(f"cut names {second!r} and {first!r} begin the same stage: remove one")
        if after < before:
            raise CutError(
                f"cut name {second!r} comes after {first!r}, but the model runs it earlier: "
                "name the modules in execution order"
            )
    return [layers[index] for index in found]


def check_stage_count(layers: Sequence[str], stages: int, joined: Mapping[str, str] | None = None) -> None:
    """Raise CutError when the model has fewer layers than `stages`, or `stages` is below 1; `joined` as of LayerProfile."""
    if stages < 1:
        raise CutError(f"{stages} stages asked for: ask for at least 1")
    if stages > len(layers):
        raise CutError(
            f"{stages} stages asked for, but the model has only {len(layers)} modules that may begin a stage "
            f"({_shown(layers, 12)}){_joined_reason(joined or {})}: ask for at most {len(layers)} stages, or "
            + (
                "give each of these modules a buffer of its own"
                if joined
                else "split the model into more modules (one that runs as it is, as a note on the model says, is not cut)"
            )
        )


def _joined_reason(joined: Mapping[str, str]) -> str:
    """The buffers that keep modules together in one stage, in words; empty without."""
    modules: dict[str, list[str]] = {}
    for module, buffer in joined.items():
        modules.setdefault(buffer, []).append(module)
    reasons = [
        f"{_shown(names, 6)} cannot, since buffer {buffer!r}, which forward updates, is used by modules before and at or "
        "behind them, and all that runs from its first use to its last is one stage"
        for buffer, names in modules.items()
    ]
    return "".join(f"; {reason}" for reason in reasons)


def _shown(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _find_layer(layers: Sequence[str], name: str, joined: Mapping[str, str]) -> int:
    if name in layers:
        return list(layers).index(name)
    if name in joined:
        raise CutError(
            f"module {name!r} cannot begin a stage: it lies between the first and the last use of buffer "
            f"{joined[name]!r}, which forward updates, so that all of that is one stage; give each module a buffer of its "
            "own, or cut elsewhere"
        )
    for index, layer in enumerate(layers):
        if layer.startswith(f"{name}."):
            return index
    near = difflib.get_close_matches(name, layers, n=3) or list(layers[:8])
    raise CutError(f"cut name {name!r} is no module that may begin a stage: did you mean {', '.join(near)}?")
