"""A cut by formula: dynamic programming over stages that are judged alone, then single moves of borders
that also see what stages share (meshes, and tensors that go to several stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.scheduler.cut.layers import CutProblem, Tensor, layer_ranges, stage_of_layer
from service.scheduler.model.spec import SpecError

# At most so many bottlenecks between the smallest and the one that is no longer worth it are tried.
_CANDIDATES = 100


def best_cut(problem: CutProblem) -> list[int]:
    """The first layers of the stages of the best cut by the formula; raises SpecError where none fits the limits."""
    layers = len(problem.profile.layers)
    tables = _Tables.make(problem)
    for limited in (problem.in_flight, lambda _: min(1, problem.in_flight(0))):
        allowed = [tables.allowed(problem, stage, limited(stage)) for stage in range(problem.stages)]
        bottleneck = _smallest_bottleneck(tables.load, allowed)
        if np.isfinite(bottleneck):
            begins = _best_estimate(problem, tables, allowed, bottleneck)
            return _move_borders(problem, tables, allowed, begins)
    least = min(
        (problem.profile.layers[layer].activation_bytes, problem.profile.layers[layer].name)
        for layer in range(layers)
    )
    limits = ", ".join(f"{mesh.name}: {mesh.activation_limit_bytes}" for mesh in problem.meshes)
    raise SpecError(
        f"no cut into {problem.stages} stages keeps one microbatch of every stage within activation_limit_bytes "
        f"({limits}); the smallest layer {least[1]!r} keeps {least[0]}: raise the limits, use more stages, "
        "or make microbatches smaller"
    )


@dataclass(frozen=True)
class _Tables:
    """For a stage of layers first..end-1, at [first, end]: its load, its incoming transfers, its memory."""

    load: np.ndarray
    transfers: np.ndarray
    activation: np.ndarray

    @classmethod
    def make(cls, problem: CutProblem) -> _Tables:
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
                load[first, end] = _load(problem, compute, arriving, leaving)
                transfers[first, end] = arriving.sum()
        return cls(load=load, transfers=transfers, activation=activation)

    def allowed(self, problem: CutProblem, stage: int, in_flight: float) -> np.ndarray:
        """Where a stage may lie so that its part of its mesh's memory is enough."""
        mesh = problem.mesh_of_stage[stage]
        limit = problem.meshes[mesh].activation_limit_bytes
        if limit is None:
            return np.isfinite(self.load)
        share = limit / problem.mesh_of_stage.count(mesh)
        return np.isfinite(self.load) & (self.activation * in_flight <= share)


def _load(problem: CutProblem, compute: float, arriving: np.ndarray, leaving: np.ndarray) -> float:
    """Time for which one microbatch keeps the busiest resource of a mesh busy.

    `arriving` and `leaving` are (forward, backward) seconds of the tensors that come in and go out;
    gradients travel the other way.
    """
    received, sent = arriving[0] + leaving[1], arriving[1] + leaving[0]
    if not problem.overlap:
        return float(compute + received + sent)
    if problem.network.contention == "half-duplex":
        return float(max(compute, received + sent))
    if problem.network.contention == "full-duplex":
        return float(max(compute, received, sent))
    return float(max(compute, *arriving, *leaving))


def _smallest_bottleneck(load: np.ndarray, allowed: Sequence[np.ndarray]) -> float:
    """The smallest possible load of the busiest stage; infinite when no cut is allowed."""
    best = np.full(len(load), np.inf)
    best[0] = 0.0
    for stage in allowed:
        best = np.maximum(best[:, None], np.where(stage, load, np.inf)).min(axis=0)
    return float(best[-1])


def _cheapest(
    transfers: np.ndarray, load: np.ndarray, allowed: Sequence[np.ndarray], bottleneck: float
) -> list[int]:
    """The cut with the least transfers of which no stage has more load than `bottleneck`, which is possible."""
    best = np.full(len(load), np.inf)
    best[0] = 0.0
    choices = []
    for stage in allowed:
        costs = best[:, None] + np.where(stage & (load <= bottleneck), transfers, np.inf)
        choices.append(costs.argmin(axis=0))
        best = costs.min(axis=0)
    begins, end = [], len(load) - 1
    for choice in reversed(choices):
        end = int(choice[end])
        begins.append(end)
    return begins[::-1]


def _best_estimate(
    problem: CutProblem, tables: _Tables, allowed: Sequence[np.ndarray], bottleneck: float
) -> list[int]:
    def total(begins: Sequence[int]) -> tuple[float, float]:
        ranges = list(layer_ranges(begins, len(problem.profile.layers)))
        busiest = max(tables.load[place] for place in ranges)
        moved = sum(tables.transfers[place] for place in ranges)
        return (problem.microbatches - 1) * busiest + moved, busiest

    best = _cheapest(tables.transfers, tables.load, allowed, bottleneck)
    found, _ = total(best)
    # no bottleneck above this can be better
    worth = found / (problem.microbatches - 1) if problem.microbatches > 1 else np.inf
    possible = np.unique(tables.load[np.isfinite(tables.load)])
    possible = possible[(possible > bottleneck) & (possible <= worth)]
    if len(possible) > _CANDIDATES:
        possible = possible[np.linspace(0, len(possible) - 1, _CANDIDATES).astype(int)]
    for candidate in possible:
        other = _cheapest(tables.transfers, tables.load, allowed, float(candidate))
        if total(other) < total(best):
            best = other
    return best


def _move_borders(
    problem: CutProblem, tables: _Tables, allowed: Sequence[np.ndarray], begins: list[int]
) -> list[int]:
    """Move single borders by one layer as long as the whole pipeline's estimate gets better."""
    count = len(problem.profile.layers)
    best, cost = begins, _estimate(problem, problem.tensors, begins)
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
                other_cost = _estimate(problem, problem.tensors, other)
                if other_cost < cost * (1 - 1e-9):
                    best, cost, improved = other, other_cost, True
    return best


def _estimate(problem: CutProblem, tensors: Sequence[Tensor], begins: Sequence[int]) -> float:
    """Estimated step time of a cut, with all that stages of one mesh share."""
    layers = problem.profile.layers
    stage_of = stage_of_layer(begins, len(layers))
    mesh_of_layer = [problem.mesh_of_stage[stage] for stage in stage_of]
    compute = np.zeros(len(problem.meshes))
    for mesh, layer in zip(mesh_of_layer, layers, strict=True):
        compute[mesh] += layer.compute_s
    arriving, leaving = np.zeros((len(problem.meshes), 2)), np.zeros((len(problem.meshes), 2))
    for tensor in tensors:
        source = mesh_of_layer[tensor.source]
        for target in {mesh_of_layer[layer] for layer in tensor.targets} - {source}:
            seconds = np.array((tensor.forward_s, tensor.backward_s))
            arriving[target] += seconds
            leaving[source] += seconds
    busiest = max(_load(problem, *mesh) for mesh in zip(compute, arriving, leaving, strict=True))
    return float((problem.microbatches - 1) * busiest + arriving.sum())
