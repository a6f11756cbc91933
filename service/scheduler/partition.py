"""Layers -> stages -> meshes: turns measured layer costs into a PipelineSpec.

PURE. Knows the costs of layers and the tensors between them, not the model; edges come out in the
order in which the worker's cut of the same model lists them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from service.scheduler.model.spec import EdgeSpec, MeshSpec, NetworkSpec, PipelineSpec, SpecError, StageSpec
from worker.model.profile import LayerProfile, check_stage_count, resolve_begins

# At most so many bottlenecks between the smallest and the one that is no longer worth it are tried.
_CANDIDATES = 100


@dataclass(frozen=True)
class PartitionResult:
    """The layers that begin the stages, and the planning problem that this cut makes."""

    begins: list[str]
    spec: PipelineSpec


def partition(
    profile: LayerProfile | Mapping[str, Any],
    *,
    stages: int,
    meshes: Sequence[MeshSpec],
    cut: Literal["auto"] | Sequence[str] = "auto",
    microbatches: int,
    network: NetworkSpec | None = None,
    schedule: str = "auto",
    overlap: bool = True,
    split_backward: bool | None = None,
    max_in_flight: int | None = None,
) -> PartitionResult:
    """Cut the layers of `profile` into `stages` contiguous stages and place them on `meshes`.

    `cut` "auto" minimises the estimated step, (microbatches - 1) times the busiest mesh's time for
    one microbatch plus the transfers of one microbatch, within the meshes' activation limits at the
    number of microbatches that `schedule` keeps in flight. Names give the cut by hand. Raises
    CutError for a cut that the layers do not admit, SpecError for meshes or limits that do not fit.
    """
    if not isinstance(profile, LayerProfile):
        profile = LayerProfile.from_json(profile)
    names = [layer.name for layer in profile.layers]
    mesh_of_stage = place(stages, len(meshes), schedule)
    problem = _Problem(
        profile=profile,
        mesh_of_stage=mesh_of_stage,
        meshes=list(meshes),
        microbatches=microbatches,
        network=network or NetworkSpec(),
        schedule=schedule,
        overlap=overlap,
    )
    if cut == "auto":
        check_stage_count(names, stages)
        begins = _search(problem)
    else:
        given = resolve_begins(names, cut)
        if len(given) != stages:
            raise SpecError(
                f"cut begins {len(given)} stages ({', '.join(given)}), but stages is {stages}: make them agree"
            )
        begins = [names.index(name) for name in given]
    return PartitionResult(
        begins=[names[index] for index in begins],
        spec=PipelineSpec(
            microbatches=microbatches,
            meshes=list(meshes),
            stages=_stage_specs(problem, begins),
            edges=_edge_specs(problem, begins),
            network=problem.network,
            overlap=overlap,
            schedule=schedule,
            split_backward=split_backward,
            max_in_flight=max_in_flight,
        ),
    )


def place(stages: int, meshes: int, schedule: str) -> list[int]:
    """The mesh of every stage: in order; for two stages a mesh a V where `schedule` uses it; else in rounds."""
    if meshes < 1 or stages < meshes:
        raise SpecError(
            f"{stages} stages cannot fill {meshes} meshes: ask for at most {max(stages, 1)} meshes, or for more stages"
        )
    if stages == 2 * meshes and schedule in ("zb-v", "auto"):
        return [min(stage, stages - 1 - stage) for stage in range(stages)]
    return [stage % meshes for stage in range(stages)]


@dataclass(frozen=True)
class _Problem:
    profile: LayerProfile
    mesh_of_stage: list[int]
    meshes: list[MeshSpec]
    microbatches: int
    network: NetworkSpec
    schedule: str
    overlap: bool

    @property
    def stages(self) -> int:
        return len(self.mesh_of_stage)

    def transfer_s(self, size: int) -> float:
        """Time of one transfer; without a bandwidth only its latency."""
        bandwidth = self.network.bandwidth_bytes_per_s
        return self.network.latency_s + (size / bandwidth if bandwidth else 0.0)

    def in_flight(self, stage: int) -> float:
        """Microbatches whose activations a stage of a chain holds at most, under the schedule."""
        if self.schedule == "inference":
            return 0
        depth, count = self.stages - stage, self.microbatches
        if self.schedule in ("gpipe", "csv"):
            return count
        if self.schedule == "eager-1f1b":
            return min(count, 2 * depth - 1)
        if self.stages == len(self.meshes):
            return min(count, depth)
        # several stages a mesh: what the mesh keeps in flight, spread over its stages
        rounds, width = self.stages / len(self.meshes), len(self.meshes)
        if self.schedule == "interleaved-1f1b":
            return min(
                count, (2 * (width - self.mesh_of_stage[stage] - 1) + (rounds - 1) * width + 1) / rounds
            )
        return min(count, width)


@dataclass(frozen=True)
class _Tensor:
    """A tensor between layers: where it is made and used, and what sending it and its gradient takes."""

    source: int
    targets: tuple[int, ...]
    forward_s: float
    backward_s: float
    size: int
    saved_at: frozenset[int]


def _tensors(problem: _Problem) -> list[_Tensor]:
    by_name: dict[str, list] = {}
    for edge in problem.profile.edges:
        by_name.setdefault(edge.tensor, []).append(edge)
    found = []
    for edges in by_name.values():
        first = edges[0]
        saved = {edge.target for edge in edges if edge.saved_by_target}
        if first.saved_by_source:
            saved.add(first.source)
        seconds = problem.transfer_s(first.bytes)
        found.append(
            _Tensor(
                source=first.source,
                targets=tuple(sorted(edge.target for edge in edges)),
                forward_s=seconds,
                backward_s=seconds if first.differentiable and problem.schedule != "inference" else 0.0,
                size=first.bytes,
                saved_at=frozenset(saved),
            )
        )
    return found


def _stage_specs(problem: _Problem, begins: Sequence[int]) -> list[StageSpec]:
    layers = problem.profile.layers
    tensors = _tensors(problem)
    specs = []
    for index, (first, end) in enumerate(_ranges(begins, len(layers))):
        part = layers[first:end]
        activation = _activation_bytes(problem.profile, tensors, first, end)
        specs.append(
            StageSpec(
                name=f"s{index}",
                mesh=problem.meshes[problem.mesh_of_stage[index]].name,
                forward_s=sum(layer.forward_s for layer in part),
                backward_input_s=sum(layer.backward_input_s for layer in part),
                backward_weight_s=sum(layer.backward_weight_s for layer in part),
                activation_bytes=activation,
                weight_stash_bytes=min(activation, sum(layer.weight_stash_bytes for layer in part)),
            )
        )
    return specs


def _edge_specs(problem: _Problem, begins: Sequence[int]) -> list[EdgeSpec]:
    """Edges by source, target and order of production, each tensor once for every pair of stages."""
    stage_of = _stage_of_layer(begins, len(problem.profile.layers))
    found = {}
    for edge in problem.profile.edges:
        source, target = stage_of[edge.source], stage_of[edge.target]
        if source != target:
            found[source, target, edge.order] = edge
    specs = []
    for (source, target, _), edge in sorted(found.items(), key=lambda item: item[0]):
        costs: dict[str, Any] = {}
        for direction in ("forward", "backward"):
            if direction == "backward" and not edge.differentiable:
                costs["backward_s"] = 0.0
            elif problem.network.bandwidth_bytes_per_s is None:
                costs[f"{direction}_s"] = problem.network.latency_s
            else:
                costs[f"{direction}_bytes"] = edge.bytes
        specs.append(EdgeSpec(source=f"s{source}", target=f"s{target}", tensor=edge.tensor, **costs))
    return specs


def _activation_bytes(profile: LayerProfile, tensors: Sequence[_Tensor], first: int, end: int) -> int:
    """What layers first..end-1 keep together: a tensor that several of them save is kept once."""
    total = sum(layer.activation_bytes for layer in profile.layers[first:end])
    for tensor in tensors:
        savers = sum(first <= layer < end for layer in tensor.saved_at)
        total -= tensor.size * max(0, savers - 1)
    return max(0, total)


# The search: dynamic programming over stages that are judged alone, then single moves of borders
# that also see what stages share (meshes, and tensors that go to several stages).


def _search(problem: _Problem) -> list[int]:
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

    tensors: list[_Tensor]
    load: np.ndarray
    transfers: np.ndarray
    activation: np.ndarray

    @classmethod
    def make(cls, problem: _Problem) -> _Tables:
        layers = problem.profile.layers
        count = len(layers)
        tensors = _tensors(problem)
        load = np.full((count + 1, count + 1), np.inf)
        transfers = np.full((count + 1, count + 1), np.inf)
        activation = np.zeros((count + 1, count + 1))
        sources = np.array([tensor.source for tensor in tensors], dtype=int)
        last_use = np.array([max(tensor.targets) for tensor in tensors], dtype=int)
        seconds = np.array([(tensor.forward_s, tensor.backward_s) for tensor in tensors]).reshape(-1, 2)
        used_by: list[list[int]] = [[] for _ in layers]
        saved_by: list[list[int]] = [[] for _ in layers]
        for index, tensor in enumerate(tensors):
            for target in tensor.targets:
                used_by[target].append(index)
            for layer in tensor.saved_at:
                saved_by[layer].append(index)
        for first in range(count):
            compute, kept, arriving = 0.0, 0, np.zeros(2)
            received: set[int] = set()
            saved: set[int] = set()
            for end in range(first + 1, count + 1):
                layer = layers[end - 1]
                compute += layer.forward_s + layer.backward_input_s + layer.backward_weight_s
                kept += layer.activation_bytes
                for index in saved_by[end - 1]:
                    kept -= tensors[index].size if index in saved else 0
                    saved.add(index)
                for index in used_by[end - 1]:
                    if tensors[index].source < first and index not in received:
                        received.add(index)
                        arriving = arriving + seconds[index]
                leaving = seconds[(sources >= first) & (sources < end) & (last_use >= end)].sum(axis=0)
                load[first, end] = _load(problem, compute, arriving, leaving)
                transfers[first, end] = arriving.sum()
                activation[first, end] = max(0, kept)
        return cls(tensors=tensors, load=load, transfers=transfers, activation=activation)

    def allowed(self, problem: _Problem, stage: int, in_flight: float) -> np.ndarray:
        """Where a stage may lie so that its part of its mesh's memory is enough."""
        mesh = problem.mesh_of_stage[stage]
        limit = problem.meshes[mesh].activation_limit_bytes
        if limit is None:
            return np.isfinite(self.load)
        share = limit / problem.mesh_of_stage.count(mesh)
        return np.isfinite(self.load) & (self.activation * in_flight <= share)


def _load(problem: _Problem, compute: float, arriving: np.ndarray, leaving: np.ndarray) -> float:
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
    problem: _Problem, tables: _Tables, allowed: Sequence[np.ndarray], bottleneck: float
) -> list[int]:
    def total(begins: Sequence[int]) -> tuple[float, float]:
        ranges = list(_ranges(begins, len(problem.profile.layers)))
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
    problem: _Problem, tables: _Tables, allowed: Sequence[np.ndarray], begins: list[int]
) -> list[int]:
    """Move single borders by one layer as long as the whole pipeline's estimate gets better."""
    count = len(problem.profile.layers)
    best, cost = begins, _estimate(problem, tables.tensors, begins)
    improved = True
    while improved:
        improved = False
        for border in range(1, len(best)):
            for step in (-1, 1):
                other = [*best[:border], best[border] + step, *best[border + 1 :]]
                ranges = list(_ranges(other, count))
                if any(first >= end for first, end in ranges):
                    continue
                if not all(allowed[stage][place] for stage, place in enumerate(ranges)):
                    continue
                other_cost = _estimate(problem, tables.tensors, other)
                if other_cost < cost * (1 - 1e-9):
                    best, cost, improved = other, other_cost, True
    return best


def _estimate(problem: _Problem, tensors: Sequence[_Tensor], begins: Sequence[int]) -> float:
    """Estimated step time of a cut, with all that stages of one mesh share."""
    layers = problem.profile.layers
    stage_of = _stage_of_layer(begins, len(layers))
    mesh_of_layer = [problem.mesh_of_stage[stage] for stage in stage_of]
    compute = np.zeros(len(problem.meshes))
    for mesh, layer in zip(mesh_of_layer, layers, strict=True):
        compute[mesh] += layer.forward_s + layer.backward_input_s + layer.backward_weight_s
    arriving, leaving = np.zeros((len(problem.meshes), 2)), np.zeros((len(problem.meshes), 2))
    for tensor in tensors:
        source = mesh_of_layer[tensor.source]
        for target in {mesh_of_layer[layer] for layer in tensor.targets} - {source}:
            seconds = np.array((tensor.forward_s, tensor.backward_s))
            arriving[target] += seconds
            leaving[source] += seconds
    busiest = max(_load(problem, *mesh) for mesh in zip(compute, arriving, leaving, strict=True))
    return float((problem.microbatches - 1) * busiest + arriving.sum())


def _ranges(begins: Sequence[int], layers: int) -> Iterator[tuple[int, int]]:
    return zip(begins, [*begins[1:], layers], strict=True)


def _stage_of_layer(begins: Sequence[int], layers: int) -> list[int]:
    return [stage for stage, (first, end) in enumerate(_ranges(begins, layers)) for _ in range(first, end)]
