"""A spec as flat arrays: tasks, their costs, what they wait for and what they occupy.

The one form on which timeline, search, bounds and verify compute. A *kind* is (stage, F/backward/W)
or (transfer, direction); a task is a kind and a microbatch: task = kind * microbatches + microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from service.scheduler.spec import PipelineSpec, check_spec, topological_order
from service.scheduler.transfers import Transfer, find_transfers

FORWARD, BACKWARD, WEIGHT = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Problem:
    """One planning problem. `fused[s, m]` says that the backward of (s, m) is one B, not I and W."""

    spec: PipelineSpec
    inference: bool
    fused: np.ndarray
    transfers: tuple[Transfer, ...]
    mesh_of_stage: np.ndarray
    depth: np.ndarray  # stages on the longest path from a stage to a sink
    order: tuple[int, ...]  # stages in topological order
    sources: tuple[tuple[int, ...], ...]  # stages that feed a stage
    targets: tuple[tuple[int, ...], ...]  # stages that a stage feeds
    microbatches: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "microbatches", self.spec.microbatches)

    @property
    def stages(self) -> int:
        return len(self.spec.stages)

    @property
    def meshes(self) -> int:
        return len(self.spec.meshes)

    @property
    def kinds(self) -> int:
        return 3 * self.stages + 2 * len(self.transfers)

    @property
    def tasks(self) -> int:
        return self.kinds * self.microbatches

    @property
    def compute_tasks(self) -> int:
        return 3 * self.stages * self.microbatches

    @property
    def splits(self) -> bool:
        """Whether any backward is two actions."""
        return not self.inference and not bool(self.fused.all())

    def kind(self, stage: int, op: int) -> int:
        return 3 * stage + op

    def transfer_kind(self, transfer: int, backward: int) -> int:
        return 3 * self.stages + 2 * transfer + backward

    def task(self, stage: int, op: int, microbatch: int) -> int:
        return (3 * stage + op) * self.microbatches + microbatch

    @cached_property
    def exists(self) -> np.ndarray:
        """bool[kinds, microbatches]."""
        exists = np.ones((self.kinds, self.microbatches), dtype=bool)
        compute = exists[: 3 * self.stages].reshape(self.stages, 3, self.microbatches)
        if self.inference:
            compute[:, 1:] = False
            exists[3 * self.stages + 1 :: 2] = False
        else:
            compute[:, WEIGHT] = ~self.fused
        return exists

    @cached_property
    def duration(self) -> np.ndarray:
        """float[kinds, microbatches], seconds."""
        duration = np.zeros((self.kinds, self.microbatches))
        for index, stage in enumerate(self.spec.stages):
            duration[3 * index] = stage.forward_s
            duration[3 * index + 1] = np.where(
                self.fused[index], stage.backward_input_s + stage.backward_weight_s, stage.backward_input_s
            )
            duration[3 * index + 2] = stage.backward_weight_s
        for index, transfer in enumerate(self.transfers):
            duration[self.transfer_kind(index, 0)] = transfer.forward_s
            duration[self.transfer_kind(index, 1)] = transfer.backward_s
        return np.where(self.exists, duration, 0.0)

    @cached_property
    def dependencies(self) -> list[list[int]]:
        """For each kind the kinds that must end before it, microbatch by microbatch."""
        needs: list[list[int]] = [[] for _ in range(self.kinds)]
        arrival: dict[tuple[int, int], int] = {}
        departure: dict[tuple[int, int], int] = {}
        for index, transfer in enumerate(self.transfers):
            forward, backward = self.transfer_kind(index, 0), self.transfer_kind(index, 1)
            needs[forward].append(self.kind(transfer.source, FORWARD))
            for edge, target in zip(transfer.edges, transfer.targets, strict=True):
                arrival[edge, target] = forward
                departure[edge, transfer.source] = backward
                if not self.inference and self.kind(target, BACKWARD) not in needs[backward]:
                    needs[backward].append(self.kind(target, BACKWARD))
        stage_index = {stage.name: i for i, stage in enumerate(self.spec.stages)}
        for index, edge in enumerate(self.spec.edges):
            source, target = stage_index[edge.source], stage_index[edge.target]
            incoming = arrival.get((index, target), self.kind(source, FORWARD))
            outgoing = departure.get((index, source), self.kind(target, BACKWARD))
            if incoming not in needs[self.kind(target, FORWARD)]:
                needs[self.kind(target, FORWARD)].append(incoming)
            if not self.inference and outgoing not in needs[self.kind(source, BACKWARD)]:
                needs[self.kind(source, BACKWARD)].append(outgoing)
        if not self.inference:
            for stage in range(self.stages):
                needs[self.kind(stage, BACKWARD)].append(self.kind(stage, FORWARD))
                needs[self.kind(stage, WEIGHT)].append(self.kind(stage, BACKWARD))
        return needs

    @cached_property
    def kind_rank(self) -> np.ndarray:
        """A topological number for each kind: it is larger than those of the kinds it waits for."""
        rank = np.full(self.kinds, -1, dtype=np.int64)
        remaining = [len(needs) for needs in self.dependencies]
        pointer, dependents = self.dependent_arrays
        ready = [kind for kind, count in enumerate(remaining) if not count]
        for number in range(self.kinds):
            kind = ready.pop()
            rank[kind] = number
            for after in dependents[pointer[kind] : pointer[kind + 1]].tolist():
                remaining[after] -= 1
                if not remaining[after]:
                    ready.append(after)
        return rank

    @cached_property
    def reaches(self) -> np.ndarray:
        """bool[kinds, kinds]: whether microbatch by microbatch the first must end before the second starts."""
        reaches = np.eye(self.kinds, dtype=bool)
        for kind in np.argsort(self.kind_rank).tolist():
            for need in self.dependencies[kind]:
                reaches[:, kind] |= reaches[:, need]
        return reaches

    @cached_property
    def dependency_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """(pointer, kinds) of `dependencies` in compressed rows."""
        return _compress(self.dependencies)

    @cached_property
    def dependent_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """(pointer, kinds): for each kind the kinds that wait for it."""
        after: list[list[int]] = [[] for _ in range(self.kinds)]
        for kind, needs in enumerate(self.dependencies):
            for need in needs:
                after[need].append(kind)
        return _compress(after)

    @cached_property
    def resources(self) -> np.ndarray:
        """int[kinds, 2]: what a kind occupies, −1 for nothing; resource p < meshes is the compute lane of p."""
        occupied = np.full((self.kinds, 2), -1, dtype=np.int64)
        for stage in range(self.stages):
            occupied[3 * stage : 3 * stage + 3, 0] = self.mesh_of_stage[stage]
        for index, transfer in enumerate(self.transfers):
            here, there = transfer.source_mesh, transfer.target_mesh
            occupied[self.transfer_kind(index, 0)] = self._transfer_resources(here, there)
            occupied[self.transfer_kind(index, 1)] = self._transfer_resources(there, here)
        return occupied

    def _transfer_resources(self, sender: int, receiver: int) -> tuple[int, int]:
        # with overlap off both compute lanes are taken, which implies every contention model
        meshes, contention = self.meshes, self.spec.network.contention
        if not self.spec.overlap:
            return sender, receiver
        if contention == "none":
            return -1, -1
        if contention == "link":
            return meshes + sender * meshes + receiver, -1
        if contention == "full-duplex":
            return meshes + sender, 2 * meshes + receiver
        return meshes + sender, meshes + receiver

    @cached_property
    def resource_count(self) -> int:
        return int(self.resources.max(initial=self.meshes - 1)) + 1

    @property
    def contended(self) -> bool:
        """Whether transfers occupy anything."""
        return bool(self.transfers) and bool((self.resources[3 * self.stages :] >= 0).any())

    @cached_property
    def sender_of_kind(self) -> np.ndarray:
        """Mesh that runs a kind (a transfer: the sending mesh)."""
        return self._ends[0]

    @cached_property
    def receiver_of_kind(self) -> np.ndarray:
        """Mesh at which a transfer arrives; for compute kinds the mesh itself."""
        return self._ends[1]

    @cached_property
    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        sender, receiver = np.empty(self.kinds, dtype=np.int64), np.empty(self.kinds, dtype=np.int64)
        sender[: 3 * self.stages] = receiver[: 3 * self.stages] = np.repeat(self.mesh_of_stage, 3)
        for index, transfer in enumerate(self.transfers):
            pair = transfer.source_mesh, transfer.target_mesh
            sender[self.transfer_kind(index, 0)], receiver[self.transfer_kind(index, 0)] = pair
            receiver[self.transfer_kind(index, 1)], sender[self.transfer_kind(index, 1)] = pair
        return sender, receiver

    @cached_property
    def activation(self) -> np.ndarray:
        return np.array([stage.activation_bytes for stage in self.spec.stages], dtype=np.int64)

    @cached_property
    def stash(self) -> np.ndarray:
        return np.array([stage.weight_stash_bytes for stage in self.spec.stages], dtype=np.int64)

    @cached_property
    def activation_limit(self) -> np.ndarray:
        """int[meshes], −1 where there is none."""
        limits = [mesh.activation_limit_bytes for mesh in self.spec.meshes]
        return np.array([-1 if limit is None else limit for limit in limits], dtype=np.int64)

    @cached_property
    def receive_limit(self) -> np.ndarray:
        """int[meshes], −1 where there is none."""
        limits = [mesh.receive_buffer_limit for mesh in self.spec.meshes]
        return np.array([-1 if limit is None else limit for limit in limits], dtype=np.int64)

    def with_fused(self, fused: np.ndarray) -> Problem:
        """The same problem with other backwards fused."""
        return replace(self, fused=fused)


def build_problem(spec: PipelineSpec, *, split: bool | None = None, inference: bool | None = None) -> Problem:
    """Check the spec and flatten it; `split` and `inference` override what the spec says."""
    check_spec(spec)
    split = bool(spec.split_backward) if split is None else split
    inference = spec.schedule == "inference" if inference is None else inference
    meshes = {mesh.name: i for i, mesh in enumerate(spec.meshes)}
    index = {stage.name: i for i, stage in enumerate(spec.stages)}
    order = topological_order(spec)
    sources: list[list[int]] = [[] for _ in spec.stages]
    targets: list[list[int]] = [[] for _ in spec.stages]
    for edge in spec.edges:
        source, target = index[edge.source], index[edge.target]
        if target not in targets[source]:
            targets[source].append(target)
            sources[target].append(source)
    depth = [1] * len(order)
    for stage in reversed(order):
        depth[stage] = 1 + max((depth[target] for target in targets[stage]), default=0)
    return Problem(
        spec=spec,
        inference=inference,
        fused=np.full((len(order), spec.microbatches), inference or not split),
        transfers=find_transfers(spec),
        mesh_of_stage=np.array([meshes[stage.mesh] for stage in spec.stages], dtype=np.int64),
        depth=np.array(depth, dtype=np.int64),
        order=tuple(order),
        sources=tuple(tuple(sorted(s)) for s in sources),
        targets=tuple(tuple(sorted(t)) for t in targets),
    )


def _compress(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    pointer = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=pointer[1:])
    return pointer, np.array([item for row in rows for item in row], dtype=np.int64)
