"""Problem: a checked spec as flat arrays of tasks, their costs, dependencies, resources and memory.

The one form on which timeline, search, bounds and verification compute. A kind is (stage, F / backward / W) or
(transfer, direction); a task is a kind and a microbatch (`kind` and `task` number both). Limits are −1 where there
is none. There is one transfer for each edge between meshes; a tensor that several stages share goes once per
using mesh. `local_actions` is the one table of what each mesh does of a kind (op, lane, peer): slots, programs
and their decoder all read it. The order of transfers is not decided here but by the timeline.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from service.scheduler.kernels import BACKWARD, FORWARD, OPS, WEIGHT, Rows, Tasks
from service.scheduler.problem.spec import (
    Contention,
    PipelineSpec,
    bucket_specs,
    edge_costs,
    link_contention,
    topological_order,
)
from service.scheduler.problem.spec_checks import check_spec
from worker.contract.program import COMPUTE_LANE, receive_lane, send_lane


class MemoryArrays:
    """Sizes and limits in bytes, −1 where there is no limit."""

    spec: PipelineSpec
    inference: bool
    mesh_of_stage: np.ndarray
    most_bytes: np.ndarray

    cost_specs: tuple[PipelineSpec, ...]
    bucket_of_microbatch: np.ndarray
    bucket_sizes: np.ndarray

    def _stage_bytes(self, field: str) -> np.ndarray:
        """int[stages, buckets]: a field of the stages."""
        values = [[getattr(stage, field) for stage in spec.stages] for spec in self.cost_specs]
        return np.array(values, dtype=np.int64).T

    @cached_property
    def _activations(self) -> np.ndarray:
        return self._stage_bytes("activation_bytes")

    @cached_property
    def _whole_stashes(self) -> np.ndarray:
        return self._stage_bytes("weight_stash_bytes")

    @cached_property
    def _stashes(self) -> np.ndarray:
        return np.minimum(self._whole_stashes, self._activations)

    @cached_property
    def _rematerialised(self) -> np.ndarray:
        again = self._stage_bytes("rematerialised_bytes")
        return np.zeros_like(again) if self.inference else again

    @cached_property
    def activation(self) -> np.ndarray:
        """int[stages]: of the microbatch that holds most."""
        return self._activations.max(axis=1)

    @cached_property
    def activation_by_microbatch(self) -> np.ndarray:
        """int[stages, microbatches]."""
        return self._activations[:, self.bucket_of_microbatch]

    @cached_property
    def stash(self) -> np.ndarray:
        """int[stages]: of what is held from F on, the part that is held until W; of the microbatch with the most."""
        return self._stashes.max(axis=1)

    @cached_property
    def stash_by_microbatch(self) -> np.ndarray:
        """int[stages, microbatches]."""
        return self._stashes[:, self.bucket_of_microbatch]

    @cached_property
    def whole_stash(self) -> np.ndarray:
        """int[stages]: what is held from I to W; of a stage that recomputes it may be more than it keeps from F on."""
        return self._whole_stashes.max(axis=1)

    @cached_property
    def whole_stash_by_microbatch(self) -> np.ndarray:
        """int[stages, microbatches]."""
        return self._whole_stashes[:, self.bucket_of_microbatch]

    @cached_property
    def rematerialised(self) -> np.ndarray:
        """int[stages]: held besides while B or I runs; of the microbatch with the most."""
        return self._rematerialised.max(axis=1)

    @cached_property
    def rematerialised_by_microbatch(self) -> np.ndarray:
        """int[stages, microbatches]."""
        return self._rematerialised[:, self.bucket_of_microbatch]

    @cached_property
    def stages_that_stash_more(self) -> np.ndarray:
        """bool[stages]: a microbatch leaves more from I to W than it keeps from F on."""
        return (self._whole_stashes > self._activations).any(axis=1)

    @cached_property
    def most_activation_of_mesh(self) -> np.ndarray:
        """int[meshes]: activations of all stages of a mesh, of the one microbatch that holds most there."""
        held = np.zeros((len(self.spec.meshes), len(self.cost_specs)), dtype=np.int64)
        np.add.at(held, self.mesh_of_stage, self._activations)
        return held.max(axis=1)

    @cached_property
    def workspace(self) -> np.ndarray:
        """int[meshes]: the most that comes back for one backward; a mesh runs one at a time."""
        most = np.zeros(len(self.spec.meshes), dtype=np.int64)
        np.maximum.at(most, self.mesh_of_stage, self.rematerialised)
        return most

    @cached_property
    def relaxed_activation_limit(self) -> np.ndarray:
        """int[meshes], −1 where there is none: what forwards fill at most in any plan, for bounds.

        The workspace counts where a mesh has one stage (see `activation_limit_is_exact`): the least of any microbatch,
        as that may be the one whose backward comes next.
        """
        shared = np.bincount(self.mesh_of_stage, minlength=len(self.spec.meshes)) > 1
        least = np.zeros(len(self.spec.meshes), dtype=np.int64)
        np.maximum.at(least, self.mesh_of_stage, self._rematerialised.min(axis=1))
        alone = np.maximum(self.activation_capacity - least, 0)
        return np.where(shared | (self.activation_capacity < 0), self.activation_capacity, alone)

    @property
    def activation_limit_is_exact(self) -> bool:
        """True where `activation_limit` rules out nothing that fits: it keeps the workspace free all the time.

        With one stage a mesh it does: after the forward that holds the most comes a backward, which needs all of it.
        Not where the microbatches need different amounts.
        """
        shared = np.bincount(self.mesh_of_stage, minlength=len(self.spec.meshes)) > 1
        differ = bool((self._rematerialised.min(axis=1) < self.rematerialised).any())
        return not differ and not bool((self.workspace[shared] > 0).any())

    @cached_property
    def static_bytes(self) -> np.ndarray:
        """int[meshes]: what the stages of a mesh hold always."""
        held = np.zeros(len(self.spec.meshes), dtype=np.int64)
        np.add.at(held, self.mesh_of_stage, [stage.static_bytes for stage in self.spec.stages])
        return held

    @cached_property
    def memory_limit(self) -> np.ndarray:
        """int[meshes]: bytes for everything, −1 where there is no limit or one that no timeline reaches."""
        limit = _optional_limits([mesh.memory_bytes for mesh in self.spec.meshes])
        return np.where(self.most_bytes <= limit, -1, limit)

    @cached_property
    def activation_limit(self) -> np.ndarray:
        """int[meshes], −1 where there is none: what forwards may fill, `activation_capacity` less `workspace`."""
        room = self.activation_capacity
        return np.where(room < 0, room, np.maximum(room - self.workspace, 0))

    @cached_property
    def activation_capacity(self) -> np.ndarray:
        """int[meshes], −1 where there is none: never more than memory_bytes leave beside what is static."""
        limit = _optional_limits([mesh.activation_limit_bytes for mesh in self.spec.meshes])
        left = self.memory_limit - self.static_bytes
        both = np.where(limit < 0, left, np.minimum(limit, left))
        return np.where(self.memory_limit < 0, limit, np.maximum(both, 0))

    @cached_property
    def receive_limit(self) -> np.ndarray:
        """int[meshes], −1 where there is none."""
        return _optional_limits([mesh.receive_buffer_limit for mesh in self.spec.meshes])


def _optional_limits(values: Sequence[int | None]) -> np.ndarray:
    return np.array([-1 if value is None else value for value in values], dtype=np.int64)


@dataclass(frozen=True)
class Transfer:
    """A tensor that one stage sends to another mesh; its gradient comes back the same way.

    `edges` are the merged edges, first the one that names the transfer; `targets` are their
    target stages, all on `target_mesh`. Stages and meshes are indices, times are seconds.
    """

    source: int
    source_mesh: int
    target_mesh: int
    edges: tuple[int, ...]
    targets: tuple[int, ...]
    forward_s: float
    backward_s: float
    forward_bytes: int  # 0 where the edge is given in seconds only
    backward_bytes: int

    @property
    def edge(self) -> int:
        """The edge whose index stands in slots and instructions."""
        return self.edges[0]


def find_transfers(spec: PipelineSpec) -> tuple[Transfer, ...]:
    """All transfers of one microbatch, in the order of their first edges."""
    stages = {stage.name: i for i, stage in enumerate(spec.stages)}
    meshes = {mesh.name: i for i, mesh in enumerate(spec.meshes)}
    seconds = edge_costs(spec)
    groups: dict[tuple, list[int]] = {}
    for index, edge in enumerate(spec.edges):
        here, there = spec.stages[stages[edge.source]].mesh, spec.stages[stages[edge.target]].mesh
        if here == there:
            continue
        key = (index,) if edge.tensor is None else (edge.source, edge.tensor, there)
        groups.setdefault(key, []).append(index)
    found = []
    for edges in groups.values():
        first = spec.edges[edges[0]]
        source = stages[first.source]
        targets = tuple(stages[spec.edges[edge].target] for edge in edges)
        forward_s, backward_s = seconds(edges[0])
        found.append(
            Transfer(
                source=source,
                source_mesh=meshes[spec.stages[source].mesh],
                target_mesh=meshes[spec.stages[targets[0]].mesh],
                edges=tuple(edges),
                targets=targets,
                forward_s=forward_s,
                backward_s=backward_s,
                forward_bytes=first.forward_bytes or first.held_bytes or 0,
                backward_bytes=first.backward_bytes or (first.held_bytes or 0 if backward_s else 0),
            )
        )
    return tuple(found)


__all__ = ["BACKWARD", "FORWARD", "OPS", "WEIGHT", "Problem", "build_problem", "to_rows"]

Index = TypeVar("Index", int, np.ndarray)


@dataclass(frozen=True, eq=False)
class Problem(MemoryArrays):
    """One planning problem. `fused[s, m]` says that the backward of (s, m) is one B, not I and W.

    Microbatches of one bucket (buckets of equal costs are one) are interchangeable; without buckets there is one.
    """

    spec: PipelineSpec
    inference: bool
    fused: np.ndarray
    cost_specs: tuple[PipelineSpec, ...]  # for each bucket the spec with its costs
    bucket_of_microbatch: np.ndarray
    transfers: tuple[Transfer, ...]
    transfer_costs: tuple[tuple[Transfer, ...], ...]  # `transfers` of each bucket
    mesh_of_stage: np.ndarray
    depth: np.ndarray  # stages on the longest path from a stage to a sink
    stage_order: tuple[int, ...]  # topological
    sources: tuple[tuple[int, ...], ...]  # stages that feed a stage
    targets: tuple[tuple[int, ...], ...]  # stages that a stage feeds
    microbatches: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "microbatches", self.spec.microbatches)

    @property
    def interchangeable(self) -> bool:
        """True where all microbatches are interchangeable."""
        return len(self.cost_specs) == 1

    @cached_property
    def bucket_sizes(self) -> np.ndarray:
        """int[buckets]: the number of each."""
        return np.bincount(self.bucket_of_microbatch, minlength=len(self.cost_specs))

    @cached_property
    def representatives(self) -> np.ndarray:
        """int[buckets]: the first microbatch of each."""
        if self.interchangeable:
            return np.zeros(1, dtype=np.int64)
        return np.unique(self.bucket_of_microbatch, return_index=True)[1]

    @cached_property
    def previous_in_bucket(self) -> np.ndarray:
        """int[microbatches]: the one before it of the same bucket, −1 for none."""
        previous = np.full(self.microbatches, -1, dtype=np.int64)
        for bucket in range(len(self.cost_specs)):
            members = np.flatnonzero(self.bucket_of_microbatch == bucket)
            previous[members[1:]] = members[:-1]
        return previous

    @property
    def stages(self) -> int:
        return len(self.spec.stages)

    @property
    def meshes(self) -> int:
        return len(self.spec.meshes)

    @property
    def compute_kinds(self) -> int:
        """Kinds from this number on are transfers."""
        return OPS * self.stages

    @property
    def kinds(self) -> int:
        return self.compute_kinds + 2 * len(self.transfers)

    @property
    def tasks(self) -> int:
        return self.kinds * self.microbatches

    @property
    def compute_tasks(self) -> int:
        return self.compute_kinds * self.microbatches

    @property
    def splits(self) -> bool:
        """True where any backward is two actions."""
        return not self.inference and not bool(self.fused.all())

    def kind(self, stage: Index, op: int) -> Index:
        """The kind of an operation of a stage (or of each stage of an array)."""
        return OPS * stage + op

    def transfer_kind(self, transfer: int, backward: int) -> int:
        return self.compute_kinds + 2 * transfer + backward

    def task(self, stage: int, op: int, microbatch: int) -> int:
        return self.kind(stage, op) * self.microbatches + microbatch

    def stage_and_op(self, kind: Index) -> tuple[Index, Index]:
        """(stage, FORWARD, BACKWARD or WEIGHT) of a compute kind (or of each kind of an array)."""
        return kind // OPS, kind % OPS

    def transfer_and_direction(self, kind: int) -> tuple[int, int]:
        """(transfer, whether it is its gradient: 0 or 1) of a transfer's kind."""
        return divmod(kind - self.compute_kinds, 2)

    @cached_property
    def exists(self) -> np.ndarray:
        """bool[kinds, microbatches]."""
        exists = np.ones((self.kinds, self.microbatches), dtype=bool)
        compute = exists[: self.compute_kinds].reshape(self.stages, OPS, self.microbatches)
        if self.inference:
            compute[:, BACKWARD:] = False
            exists[self.compute_kinds + 1 :: 2] = False
        else:
            compute[:, WEIGHT] = ~self.fused
        return exists

    @cached_property
    def most_bytes(self) -> np.ndarray:
        """int[meshes]: all that a mesh ever holds, as if it held it at once."""
        most = self.static_bytes.copy()
        each = np.maximum(self._activations + self._rematerialised, self._whole_stashes)
        np.add.at(most, self.mesh_of_stage, (each * self.bucket_sizes).sum(axis=1))
        travelling = self.size * self.exists.sum(axis=1)
        if not self.interchangeable:
            travelling = (self.size_by_microbatch * self.exists).sum(axis=1)
        travelling = travelling[self.compute_kinds :]
        for ends in (self.receiver_of_kind, self.sender_of_kind):
            np.add.at(most, ends[self.compute_kinds :], travelling)
        return most

    @cached_property
    def duration(self) -> np.ndarray:
        """float[kinds, microbatches], seconds."""
        duration = np.zeros((self.kinds, self.microbatches))
        for number, (spec, transfers) in enumerate(zip(self.cost_specs, self.transfer_costs, strict=True)):
            here = (
                slice(None) if self.interchangeable else np.flatnonzero(self.bucket_of_microbatch == number)
            )
            for index, stage in enumerate(spec.stages):
                duration[self.kind(index, FORWARD), here] = stage.forward_s
                duration[self.kind(index, BACKWARD), here] = np.where(
                    self.fused[index, here], stage.whole_backward_s, stage.backward_input_s
                )
                duration[self.kind(index, WEIGHT), here] = stage.backward_weight_s
            for index, transfer in enumerate(transfers):
                duration[self.transfer_kind(index, 0), here] = transfer.forward_s
                duration[self.transfer_kind(index, 1), here] = transfer.backward_s
        return np.where(self.exists, duration, 0.0)

    @cached_property
    def shortest_s(self) -> float:
        """The shortest action or transfer that takes any time; 0 where none does."""
        lasting = self.duration[self.duration > 0]
        return float(lasting.min()) if len(lasting) else 0.0

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
    def dependency_edges(self) -> tuple[np.ndarray, np.ndarray]:
        """(causes, effects): every dependency between tasks that exist."""
        column = np.arange(self.microbatches, dtype=np.int64)
        causes, effects = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for kind, needs in enumerate(self.dependencies):
            for need in needs:
                both = self.exists[kind] & self.exists[need]
                causes.append((need * self.microbatches + column)[both])
                effects.append((kind * self.microbatches + column)[both])
        return np.concatenate(causes), np.concatenate(effects)

    @cached_property
    def missing(self) -> np.ndarray:
        """int32[tasks]: how many tasks each one waits for."""
        return np.bincount(self.dependency_edges[1], minlength=self.tasks).astype(np.int32)

    @cached_property
    def kind_rank(self) -> np.ndarray:
        """A topological number for each kind: larger than the numbers of all kinds that it waits for."""
        rank = np.full(self.kinds, -1, dtype=np.int64)
        remaining = [len(needs) for needs in self.dependencies]
        dependents = self.dependents
        ready = [kind for kind, count in enumerate(remaining) if not count]
        for number in range(self.kinds):
            kind = ready.pop()
            rank[kind] = number
            for after in dependents[kind]:
                remaining[after] -= 1
                if not remaining[after]:
                    ready.append(after)
        return rank

    @cached_property
    def precedes(self) -> np.ndarray:
        """bool[kinds, kinds]: whether microbatch by microbatch the first must end before the second starts."""
        precedes = np.eye(self.kinds, dtype=bool)
        for kind in np.argsort(self.kind_rank).tolist():
            for need in self.dependencies[kind]:
                precedes[:, kind] |= precedes[:, need]
        return precedes

    @cached_property
    def dependents(self) -> list[list[int]]:
        """For each kind the kinds that wait for it."""
        after: list[list[int]] = [[] for _ in range(self.kinds)]
        for kind, needs in enumerate(self.dependencies):
            for need in needs:
                after[need].append(kind)
        return after

    @cached_property
    def dependency_rows(self) -> Rows:
        """`dependencies` in compressed rows."""
        return to_rows(self.dependencies)

    @cached_property
    def dependent_rows(self) -> Rows:
        """`dependents` in compressed rows."""
        return to_rows(self.dependents)

    @cached_property
    def resources(self) -> np.ndarray:
        """int[kinds, 2]: what a kind occupies, −1 for nothing; resource p < meshes is the compute lane of p."""
        occupied = np.full((self.kinds, 2), -1, dtype=np.int64)
        contention = link_contention(self.spec.network)
        for stage in range(self.stages):
            occupied[self.kind(stage, FORWARD) : self.kind(stage + 1, FORWARD), 0] = self.mesh_of_stage[stage]
        for index, transfer in enumerate(self.transfers):
            here, there = transfer.source_mesh, transfer.target_mesh
            for direction, ends in enumerate(((here, there), (there, here))):
                own = contention(*(self.spec.meshes[mesh].name for mesh in ends))
                occupied[self.transfer_kind(index, direction)] = self._transfer_resources(*ends, own)
        return occupied

    def _transfer_resources(self, sender: int, receiver: int, contention: Contention) -> tuple[int, int]:
        # with overlap off both compute lanes are taken, which implies every contention model
        meshes = self.meshes
        if not self.spec.overlap:
            return sender, receiver
        if contention == "none":
            return -1, -1
        first = self._first_resources[contention]
        if contention == "link":
            return first + sender * meshes + receiver, -1
        if contention == "full-duplex":
            return first + sender, first + meshes + receiver
        return first + sender, first + receiver

    @cached_property
    def _first_resources(self) -> dict[Contention, int]:
        """The first resource of each contention model of the network; transfers of different ones share none."""
        network, meshes = self.spec.network, self.meshes
        sizes: dict[Contention, int] = {
            "none": 0,
            "link": meshes * meshes,
            "full-duplex": 2 * meshes,
            "half-duplex": meshes,
        }
        own = {link.contention for link in network.links}
        models = [
            network.contention,
            *(model for model in sizes if model in own and model != network.contention),
        ]
        starts = itertools.accumulate((sizes[model] for model in models), initial=meshes)
        return dict(zip(models, starts, strict=False))

    def contention_of(self, kind: int) -> Contention:
        """The contention model of a transfer of this kind; the network's for compute."""
        names = [self.spec.meshes[mesh[kind]].name for mesh in (self.sender_of_kind, self.receiver_of_kind)]
        return link_contention(self.spec.network)(*names)

    @cached_property
    def exclusive_resources(self) -> list[int]:
        """The numbers of all resources that anything occupies."""
        return np.unique(self.resources[self.resources >= 0]).tolist()

    def kinds_on(self, resource: int) -> np.ndarray:
        """bool[kinds]: what occupies a resource."""
        return (self.resources == resource).any(axis=1)

    @cached_property
    def resource_count(self) -> int:
        return int(self.resources.max(initial=self.meshes - 1)) + 1

    @property
    def contended(self) -> bool:
        """True where transfers occupy a resource."""
        return bool(self.transfers) and bool((self.resources[self.compute_kinds :] >= 0).any())

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
        sender[: self.compute_kinds] = receiver[: self.compute_kinds] = np.repeat(self.mesh_of_stage, OPS)
        for index, transfer in enumerate(self.transfers):
            pair = transfer.source_mesh, transfer.target_mesh
            sender[self.transfer_kind(index, 0)], receiver[self.transfer_kind(index, 0)] = pair
            receiver[self.transfer_kind(index, 1)], sender[self.transfer_kind(index, 1)] = pair
        return sender, receiver

    @cached_property
    def arrays(self) -> Tasks:
        """The problem as the kernels read it."""
        kinds_of_mesh: list[list[int]] = [[] for _ in range(self.meshes)]
        for stage, mesh in enumerate(self.mesh_of_stage.tolist()):
            kinds_of_mesh[mesh] += [self.kind(stage, op) for op in (FORWARD, BACKWARD, WEIGHT)]
        return Tasks(
            microbatches=self.microbatches,
            stages=self.stages,
            meshes=self.meshes,
            resource_count=self.resource_count,
            exists=self.exists.reshape(-1),
            duration=self.duration.reshape(-1),
            missing=self.missing,
            dependents=self.dependent_rows,
            needs=self.dependency_rows,
            resources=self.resources,
            receiver=self.receiver_of_kind,
            kinds_of_mesh=to_rows(kinds_of_mesh),
        )

    @cached_property
    def _sizes(self) -> np.ndarray:
        """int[kinds, buckets]: bytes that a transfer carries, 0 for compute."""
        size = np.zeros((self.kinds, len(self.cost_specs)), dtype=np.int64)
        for number, transfers in enumerate(self.transfer_costs):
            for index, transfer in enumerate(transfers):
                size[self.transfer_kind(index, 0), number] = transfer.forward_bytes
                size[self.transfer_kind(index, 1), number] = transfer.backward_bytes
        return size

    @cached_property
    def size(self) -> np.ndarray:
        """int[kinds]: bytes that a transfer carries, 0 for compute; of the microbatch with the most."""
        return self._sizes.max(axis=1)

    @cached_property
    def least_size(self) -> np.ndarray:
        """int[kinds]: bytes that a transfer carries, 0 for compute; of the microbatch with the least."""
        return self._sizes.min(axis=1)

    @cached_property
    def size_by_microbatch(self) -> np.ndarray:
        """int[kinds, microbatches]: bytes that a transfer carries, 0 for compute."""
        return self._sizes[:, self.bucket_of_microbatch]

    def with_fused(self, fused: np.ndarray) -> Problem:
        """The same problem with other backwards fused."""
        return replace(self, fused=fused)

    def all_split(self) -> Problem:
        """The problem with every backward split that no plan of this one beats: as long in sum as B, where fused.

        B of a length is I and W back to back that last as long together, so each plan of this problem is one of that.
        """
        names = {
            stage.name for stage, fused in zip(self.spec.stages, self.fused.any(axis=1), strict=True) if fused
        }

        def split(spec: PipelineSpec) -> PipelineSpec:
            stages = [s.shortest_split() if s.name in names else s for s in spec.stages]
            return spec.model_copy(update={"stages": stages})

        return replace(
            self,
            spec=split(self.spec),
            cost_specs=tuple(split(spec) for spec in self.cost_specs),
            fused=np.zeros_like(self.fused),
        )

    def in_form(self, spec: PipelineSpec, *, split: bool, inference: bool) -> Problem:
        """The problem of `spec`, which differs in split_backward alone, with all backwards split or all whole: as
        build_problem makes it, without checking costs and limits anew."""
        fused = np.full_like(self.fused, inference or not split)
        return replace(self, spec=spec, inference=inference, fused=fused)


def build_problem(spec: PipelineSpec, *, split: bool | None = None, inference: bool | None = None) -> Problem:
    """Check the spec and flatten it; `split` and `inference` override what the spec says."""
    check_spec(spec)
    split = bool(spec.split_backward) if split is None else split
    inference = spec.schedule == "inference" if inference is None else inference
    meshes = {mesh.name: i for i, mesh in enumerate(spec.meshes)}
    index = {stage.name: i for i, stage in enumerate(spec.stages)}
    stage_order = topological_order(spec)
    sources: list[list[int]] = [[] for _ in spec.stages]
    targets: list[list[int]] = [[] for _ in spec.stages]
    for edge in spec.edges:
        source, target = index[edge.source], index[edge.target]
        if target not in targets[source]:
            targets[source].append(target)
            sources[target].append(source)
    depth = [1] * len(stage_order)
    for stage in reversed(stage_order):
        depth[stage] = 1 + max((depth[target] for target in targets[stage]), default=0)
    cost_specs, bucket_of = bucket_specs(spec)
    transfers = find_transfers(spec)
    return Problem(
        spec=spec,
        cost_specs=tuple(cost_specs),
        bucket_of_microbatch=np.array(bucket_of, dtype=np.int64),
        inference=inference,
        fused=np.full((len(stage_order), spec.microbatches), inference or not split),
        transfers=transfers,
        transfer_costs=tuple(transfers if plain is spec else find_transfers(plain) for plain in cost_specs),
        mesh_of_stage=np.array([meshes[stage.mesh] for stage in spec.stages], dtype=np.int64),
        depth=np.array(depth, dtype=np.int64),
        stage_order=tuple(stage_order),
        sources=tuple(tuple(sorted(s)) for s in sources),
        targets=tuple(tuple(sorted(t)) for t in targets),
    )


def to_rows(rows: Sequence[Sequence[int] | np.ndarray]) -> Rows:
    """A list of lists in compressed form."""
    pointer = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=pointer[1:])
    parts = [np.asarray(row, dtype=np.int64) for row in rows]
    return Rows(pointer, np.concatenate(parts) if parts else np.empty(0, dtype=np.int64))


COMPUTE_RANK = -1


@dataclass(frozen=True, slots=True)
class LocalAction:
    """One kind as one mesh sees it; peer fields are None for compute.

    `op` is an op of the programs; a backward is called I here, also where it is one B.
    Stages, meshes and edges are indices. `stage` is the sender's or the receiver's own.
    """

    kind: int
    mesh: int
    op: str
    stage: int
    lane: str
    lane_rank: int  # lanes of a mesh in order: compute, then by peer, sends before receives
    receives: bool = False
    edge: int | None = None
    peer: int | None = None
    peer_stage: int | None = None


def local_actions(problem: Problem) -> list[LocalAction]:
    """Every kind once for each mesh that takes part in it, by kind; of a transfer the sending mesh first."""
    return [action for kind in range(problem.kinds) for action in _actions_of_kind(problem, kind)]


def actions_of_mesh(problem: Problem, mesh: int) -> dict[int, LocalAction]:
    """The actions of one mesh by kind."""
    return {action.kind: action for action in local_actions(problem) if action.mesh == mesh}


def _actions_of_kind(problem: Problem, kind: int) -> list[LocalAction]:
    if kind < problem.compute_kinds:
        stage, op = problem.stage_and_op(kind)
        mesh = int(problem.mesh_of_stage[stage])
        return [LocalAction(kind, mesh, "FIW"[op], stage, COMPUTE_LANE, COMPUTE_RANK)]
    index, backward = problem.transfer_and_direction(kind)
    transfer = problem.transfers[index]
    maker, user = transfer.source, transfer.targets[0]
    sending, receiving = (user, maker) if backward else (maker, user)
    sender, receiver = int(problem.sender_of_kind[kind]), int(problem.receiver_of_kind[kind])
    names = [mesh.name for mesh in problem.spec.meshes]
    suffix = "B" if backward else "F"
    return [
        LocalAction(
            kind=kind,
            mesh=sender,
            op=f"SEND_{suffix}",
            stage=sending,
            lane=send_lane(names[receiver]),
            lane_rank=2 * receiver,
            edge=transfer.edge,
            peer=receiver,
            peer_stage=receiving,
        ),
        LocalAction(
            kind=kind,
            mesh=receiver,
            op=f"RECV_{suffix}",
            stage=receiving,
            lane=receive_lane(names[sender]),
            lane_rank=2 * sender + 1,
            receives=True,
            edge=transfer.edge,
            peer=sender,
            peer_stage=sending,
        ),
    ]
