"""Cuts layers into stages by formula: costs of a cut, dynamic programming over cuts, start cuts and neighbours.

`best_cut` prices stages alone by dynamic programming, then moves single borders with what stages share in view
(meshes, tensors that go to several stages). `equal_layers_cut`, `balanced_cut` and `neighbour_cuts` feed the
joint search. Knows layer costs and the tensors between layers; simulates no schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from service.scheduler.job.heterogeneous import HeterogeneousProfile
from service.scheduler.problem.spec import MeshSpec, NetworkSpec, SpecError
from service.scheduler.schedules.registry import AUTO
from worker.contract.profile import LayerProfile, OptimizerState

Recompute = Literal["auto", "none", "all", "selective", "by_block"] | Sequence[str]
"""Stages that recompute: the schedule's choice, none, all, all but their products, or the names of stages and modules."""


@dataclass(frozen=True)
class PipelineSetup:
    """Everything of a pipeline that is the same for all cuts of its layers.

    `optimizer` gives the bytes that its state adds to a stage, `action_s` the seconds that the engine takes for every
    action besides its layers.
    """

    meshes: Sequence[MeshSpec]
    network: NetworkSpec = field(default_factory=NetworkSpec)
    schedule: str = AUTO
    overlap: bool = True
    split_backward: bool | None = None
    max_in_flight: int | None = None
    recompute: Recompute = "none"
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    action_s: float = 0.0


@dataclass(frozen=True)
class CutProblem:
    """The layers, the meshes of the stages, and all that a cut is priced by."""

    profile: LayerProfile
    setup: PipelineSetup
    mesh_of_stage: list[int]
    microbatches: int

    @property
    def stages(self) -> int:
        return len(self.mesh_of_stage)

    def on(self, stage: int) -> CutProblem:
        """The problem with the costs of the mesh of a stage, where each mesh has its own."""
        return (
            self._by_mesh[self.mesh_of_stage[stage]]
            if isinstance(self.profile, HeterogeneousProfile)
            else self
        )

    @cached_property
    def _by_mesh(self) -> list[CutProblem]:
        problems = {id(profile): replace(self, profile=profile) for profile in self.profile.mesh_profiles}
        return [problems[id(profile)] for profile in self.profile.mesh_profiles]

    def transfer_s(self, size: int) -> float:
        """Seconds of one transfer of `size` bytes; without a bandwidth only its latency."""
        network = self.setup.network
        bandwidth = network.bandwidth_bytes_per_s
        return network.latency_s + (size / bandwidth if bandwidth else 0.0)

    def in_flight(self, stage: int) -> float:
        """Microbatches whose activations a stage of a chain holds at most, under the schedule."""
        schedule, width = self.setup.schedule, len(self.setup.meshes)
        if schedule == "inference":
            return 0
        depth, count = self.stages - stage, self.microbatches
        if schedule in ("gpipe", "csv"):
            return count
        if schedule == "eager-1f1b":
            return min(count, 2 * depth - 1)
        if self.stages == width:
            return min(count, depth)
        # several stages a mesh: the microbatches that the mesh keeps in flight, spread over its stages
        rounds = self.stages / width
        if schedule == "interleaved-1f1b":
            return min(
                count, (2 * (width - self.mesh_of_stage[stage] - 1) + (rounds - 1) * width + 1) / rounds
            )
        return min(count, width)

    @cached_property
    def tensors(self) -> list[LayerTensor]:
        """The tensors between layers, each once."""
        return _find_tensors(self)

    def kept_bytes(self, first: int) -> list[int]:
        """Bytes that layers first..end-1 keep together, for every end from first + 1 on.

        A tensor that several layers save is kept once.
        """
        sizes, total, saved = [], 0, set()
        for layer in range(first, len(self.profile.layers)):
            total += self.profile.layers[layer].activation_bytes
            for index in self._saved_by_layer[layer]:
                total -= self.tensors[index].size if index in saved else 0
                saved.add(index)
            sizes.append(max(0, total))
        return sizes

    def saved_input_bytes(self, layer: int) -> int:
        """Bytes that a layer saves for its backward of tensors that earlier layers made."""
        saved = (self.tensors[index] for index in self._saved_by_layer[layer])
        return sum(tensor.size for tensor in saved if tensor.source < layer)

    @cached_property
    def _saved_by_layer(self) -> list[list[int]]:
        rows: list[list[int]] = [[] for _ in self.profile.layers]
        for index, tensor in enumerate(self.tensors):
            for layer in tensor.saved_at:
                rows[layer].append(index)
        return rows


@dataclass(frozen=True)
class LayerTensor:
    """A tensor between layers: its source and targets, and the seconds of its transfer and of its gradient's."""

    source: int
    targets: tuple[int, ...]
    forward_s: float
    backward_s: float
    size: int
    saved_at: frozenset[int]


def _find_tensors(problem: CutProblem) -> list[LayerTensor]:
    by_name: dict[str, list] = {}
    for edge in problem.profile.edges:
        by_name.setdefault(edge.tensor, []).append(edge)
    tensors = []
    for edges in by_name.values():
        first = edges[0]
        saved = {edge.target for edge in edges if edge.saved_by_target}
        if first.saved_by_source:
            saved.add(first.source)
        seconds = problem.transfer_s(first.bytes)
        tensors.append(
            LayerTensor(
                source=first.source,
                targets=tuple(sorted(edge.target for edge in edges)),
                forward_s=seconds,
                backward_s=seconds if first.differentiable and problem.setup.schedule != "inference" else 0.0,
                size=first.bytes,
                saved_at=frozenset(saved),
            )
        )
    return tensors


def layer_ranges(stage_starts: Sequence[int], layers: int) -> Iterator[tuple[int, int]]:
    """(first layer, layer after the last) of every stage."""
    return zip(stage_starts, [*stage_starts[1:], layers], strict=True)


def stage_of_layer(stage_starts: Sequence[int], layers: int) -> list[int]:
    """The stage of every layer."""
    return [
        stage
        for stage, (first, end) in enumerate(layer_ranges(stage_starts, layers))
        for _ in range(first, end)
    ]


_MAX_BOTTLENECKS = 100  # tried between the smallest one and the largest that could still pay


def best_cut(problem: CutProblem) -> list[int]:
    """The first layers of the stages of the best cut by the formula; raises SpecError where none fits the limits."""
    layers = len(problem.profile.layers)
    tables = _StageTables.make(problem)
    for limited in (problem.in_flight, lambda _: min(1, problem.in_flight(0))):
        allowed = [tables.allowed(problem, stage, limited(stage)) for stage in range(problem.stages)]
        bottleneck = _smallest_bottleneck(tables.load, allowed)
        if np.isfinite(bottleneck):
            stage_starts = _best_bottleneck_cut(problem, tables, allowed, bottleneck)
            return _move_borders(problem, tables, allowed, stage_starts)
    least = min(
        (problem.profile.layers[layer].activation_bytes, problem.profile.layers[layer].name)
        for layer in range(layers)
    )
    limits = ", ".join(f"{mesh.name}: {mesh.activation_limit_bytes}" for mesh in problem.setup.meshes)
    raise SpecError(
        f"no cut into {problem.stages} stages keeps one microbatch of every stage within activation_limit_bytes "
        f"({limits}); the smallest layer {least[1]!r} keeps {least[0]}: raise the limits, use more stages, "
        "or make microbatches smaller"
    )


@dataclass(frozen=True)
class _StageTables:
    """For a stage of layers first..end-1, at [first, end]: its load, its incoming transfers, its memory."""

    load: np.ndarray
    transfers: np.ndarray
    activation: np.ndarray

    @classmethod
    def make(cls, problem: CutProblem) -> _StageTables:
        layers = problem.profile.layers
        count = len(layers)
        tensors = problem.tensors
        load = np.full((count + 1, count + 1), np.inf)
        transfers = np.full((count + 1, count + 1), np.inf)
        activation = np.zeros((count + 1, count + 1))
        sources = np.array([tensor.source for tensor in tensors], dtype=int)
        last_use = np.array([max(tensor.targets) for tensor in tensors], dtype=int)
        seconds = np.array([(tensor.forward_s, tensor.backward_s) for tensor in tensors]).reshape(-1, 2)
        used_by: list[list[int]] = [[] for _ in layers]
        for index, tensor in enumerate(tensors):
            for target in tensor.targets:
                used_by[target].append(index)
        for first in range(count):
            compute, arriving = 0.0, np.zeros(2)
            received: set[int] = set()
            activation[first, first + 1 :] = problem.kept_bytes(first)
            for end in range(first + 1, count + 1):
                layer = layers[end - 1]
                compute += layer.compute_s
                for index in used_by[end - 1]:
                    if tensors[index].source < first and index not in received:
                        received.add(index)
                        arriving = arriving + seconds[index]
                leaving = seconds[(sources >= first) & (sources < end) & (last_use >= end)].sum(axis=0)
                load[first, end] = _resource_load_s(problem, compute, arriving, leaving)
                transfers[first, end] = arriving.sum()
        return cls(load=load, transfers=transfers, activation=activation)

    def allowed(self, problem: CutProblem, stage: int, in_flight: float) -> np.ndarray:
        """bool[layers + 1, layers + 1]: True at [first, end] where the stage fits into its part of its mesh's memory."""
        mesh = problem.mesh_of_stage[stage]
        limit = problem.setup.meshes[mesh].activation_limit_bytes
        if limit is None:
            return np.isfinite(self.load)
        share = limit / problem.mesh_of_stage.count(mesh)
        return np.isfinite(self.load) & (self.activation * in_flight <= share)


def _resource_load_s(problem: CutProblem, compute: float, arriving: np.ndarray, leaving: np.ndarray) -> float:
    """Seconds for which one microbatch keeps the busiest resource of a mesh busy.

    `arriving` and `leaving` are float[2], the (forward, backward) seconds of the tensors that come in and go out;
    gradients travel the other way.
    """
    received, sent = arriving[0] + leaving[1], arriving[1] + leaving[0]
    if not problem.setup.overlap:
        return float(compute + received + sent)
    if problem.setup.network.contention == "half-duplex":
        return float(max(compute, received + sent))
    if problem.setup.network.contention == "full-duplex":
        return float(max(compute, received, sent))
    return float(max(compute, *arriving, *leaving))


def _smallest_bottleneck(load: np.ndarray, allowed: Sequence[np.ndarray]) -> float:
    """The smallest possible load of the busiest stage; infinite when no cut is allowed."""
    best = np.full(len(load), np.inf)
    best[0] = 0.0
    for stage in allowed:
        best = np.maximum(best[:, None], np.where(stage, load, np.inf)).min(axis=0)
    return float(best[-1])


def _least_transfers_cut(
    transfers: np.ndarray, load: np.ndarray, allowed: Sequence[np.ndarray], bottleneck: float
) -> list[int]:
    """The cut with the least transfers among all whose stages have at most the load `bottleneck`; there is one."""
    best = np.full(len(load), np.inf)
    best[0] = 0.0
    choices = []
    for stage in allowed:
        costs = best[:, None] + np.where(stage & (load <= bottleneck), transfers, np.inf)
        choices.append(costs.argmin(axis=0))
        best = costs.min(axis=0)
    stage_starts, end = [], len(load) - 1
    for choice in reversed(choices):
        end = int(choice[end])
        stage_starts.append(end)
    return stage_starts[::-1]


def _best_bottleneck_cut(
    problem: CutProblem, tables: _StageTables, allowed: Sequence[np.ndarray], bottleneck: float
) -> list[int]:
    def total(stage_starts: Sequence[int]) -> tuple[float, float]:
        ranges = list(layer_ranges(stage_starts, len(problem.profile.layers)))
        busiest = max(tables.load[place] for place in ranges)
        moved = sum(tables.transfers[place] for place in ranges)
        return (problem.microbatches - 1) * busiest + moved, busiest

    best = _least_transfers_cut(tables.transfers, tables.load, allowed, bottleneck)
    step_s, _ = total(best)
    # no bottleneck above this can be better
    worth = step_s / (problem.microbatches - 1) if problem.microbatches > 1 else np.inf
    possible = np.unique(tables.load[np.isfinite(tables.load)])
    possible = possible[(possible > bottleneck) & (possible <= worth)]
    if len(possible) > _MAX_BOTTLENECKS:
        possible = possible[np.linspace(0, len(possible) - 1, _MAX_BOTTLENECKS).astype(int)]
    for candidate in possible:
        other = _least_transfers_cut(tables.transfers, tables.load, allowed, float(candidate))
        if total(other) < total(best):
            best = other
    return best


def _move_borders(
    problem: CutProblem, tables: _StageTables, allowed: Sequence[np.ndarray], stage_starts: list[int]
) -> list[int]:
    """Move single borders by one layer as long as the whole pipeline's estimate gets better."""
    count = len(problem.profile.layers)
    best, cost = stage_starts, _estimated_step_s(problem, problem.tensors, stage_starts)
    improved = True
    while improved:
        improved = False
        for border in range(1, len(best)):
            for step in (-1, 1):
                other = [*best[:border], best[border] + step, *best[border + 1 :]]
                ranges = list(layer_ranges(other, count))
                if any(first >= end for first, end in ranges):
                    continue
                if not all(allowed[stage][place] for stage, place in enumerate(ranges)):
                    continue
                other_cost = _estimated_step_s(problem, problem.tensors, other)
                if other_cost < cost * (1 - 1e-9):
                    best, cost, improved = other, other_cost, True
    return best


def _estimated_step_s(
    problem: CutProblem, tensors: Sequence[LayerTensor], stage_starts: Sequence[int]
) -> float:
    """Estimated seconds of a step: stages of one mesh share its resources, and a tensor goes to a mesh once."""
    layers = problem.profile.layers
    stage_of = stage_of_layer(stage_starts, len(layers))
    mesh_of_layer = [problem.mesh_of_stage[stage] for stage in stage_of]
    compute = np.zeros(len(problem.setup.meshes))
    for mesh, layer in zip(mesh_of_layer, layers, strict=True):
        compute[mesh] += layer.compute_s
    arriving, leaving = np.zeros((len(problem.setup.meshes), 2)), np.zeros((len(problem.setup.meshes), 2))
    for tensor in tensors:
        source = mesh_of_layer[tensor.source]
        for target in {mesh_of_layer[layer] for layer in tensor.targets} - {source}:
            seconds = np.array((tensor.forward_s, tensor.backward_s))
            arriving[target] += seconds
            leaving[source] += seconds
    busiest = max(_resource_load_s(problem, *mesh) for mesh in zip(compute, arriving, leaving, strict=True))
    return float((problem.microbatches - 1) * busiest + arriving.sum())


def equal_layers_cut(layers: int, stages: int) -> tuple[int, ...]:
    """The cut into stages of equal numbers of layers; where these differ by one, the larger stages come first."""
    size, larger = divmod(layers, stages)
    sizes = [size + (stage < larger) for stage in range(stages)]
    return tuple(int(start) for start in np.cumsum([0, *sizes[:-1]]))


def balanced_cut(profile: LayerProfile, stages: int) -> tuple[int, ...]:
    """The cut whose busiest stage computes least, transfers aside (dynamic programming over prefixes)."""
    work = np.array([layer.compute_s for layer in profile.layers])
    total = np.concatenate(([0.0], np.cumsum(work)))
    layers = len(work)
    load = np.where(np.arange(layers + 1)[:, None] < np.arange(layers + 1), total - total[:, None], np.inf)
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    choices = []
    for _ in range(stages):
        costs = np.maximum(best[:, None], load)
        choices.append(costs.argmin(axis=0))
        best = costs.min(axis=0)
    stage_starts, end = [], layers
    for choice in reversed(choices):
        end = int(choice[end])
        stage_starts.append(end)
    return tuple(stage_starts[::-1])


def neighbour_cuts(stage_starts: tuple[int, ...], layers: int) -> Iterator[tuple[int, ...]]:
    """The cuts with one border moved by one layer, or by two."""
    for step in (1, -1, 2, -2):
        for border in range(1, len(stage_starts)):
            other = (*stage_starts[:border], stage_starts[border] + step, *stage_starts[border + 1 :])
            if all(a < b for a, b in zip(other, (*other[1:], layers), strict=True)):
                yield other
