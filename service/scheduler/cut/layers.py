"""What a cut of layers costs a stage: its tensors, its transfers, the bytes it keeps.

Knows the costs of layers and the tensors between them; nothing of how a cut is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from service.scheduler.cut.unlike import UnlikeProfile
from service.scheduler.model.spec import MeshSpec, NetworkSpec
from worker.model.profile import LayerProfile


@dataclass(frozen=True)
class CutProblem:
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

    def on(self, stage: int) -> CutProblem:
        """The same with the costs of the mesh of a stage, where each mesh has its own."""
        return self._of_mesh[self.mesh_of_stage[stage]] if isinstance(self.profile, UnlikeProfile) else self

    @cached_property
    def _of_mesh(self) -> list[CutProblem]:
        found = {id(profile): replace(self, profile=profile) for profile in self.profile.of_mesh}
        return [found[id(profile)] for profile in self.profile.of_mesh]

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

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors between layers, each once."""
        return _find_tensors(self)

    def kept_bytes(self, first: int) -> list[int]:
        """What layers first..end-1 keep together, for every end from first + 1 on.

        A tensor that several of them save is kept once.
        """
        kept, total, saved = [], 0, set()
        for layer in range(first, len(self.profile.layers)):
            total += self.profile.layers[layer].activation_bytes
            for index in self._saved_by_layer[layer]:
                total -= self.tensors[index].size if index in saved else 0
                saved.add(index)
            kept.append(max(0, total))
        return kept

    @cached_property
    def _saved_by_layer(self) -> list[list[int]]:
        rows: list[list[int]] = [[] for _ in self.profile.layers]
        for index, tensor in enumerate(self.tensors):
            for layer in tensor.saved_at:
                rows[layer].append(index)
        return rows


@dataclass(frozen=True)
class Tensor:
    """A tensor between layers: where it is made and used, and what sending it and its gradient takes."""

    source: int
    targets: tuple[int, ...]
    forward_s: float
    backward_s: float
    size: int
    saved_at: frozenset[int]


def _find_tensors(problem: CutProblem) -> list[Tensor]:
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
            Tensor(
                source=first.source,
                targets=tuple(sorted(edge.target for edge in edges)),
                forward_s=seconds,
                backward_s=seconds if first.differentiable and problem.schedule != "inference" else 0.0,
                size=first.bytes,
                saved_at=frozenset(saved),
            )
        )
    return found


def layer_ranges(begins: Sequence[int], layers: int) -> Iterator[tuple[int, int]]:
    """(first layer, layer after the last) of every stage."""
    return zip(begins, [*begins[1:], layers], strict=True)


def stage_of_layer(begins: Sequence[int], layers: int) -> list[int]:
    """The stage of every layer."""
    return [
        stage for stage, (first, end) in enumerate(layer_ranges(begins, layers)) for _ in range(first, end)
    ]
