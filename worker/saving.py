"""One worker's part of checkpoints: written while it waits, or from a copy by a thread while it trains.

At most one is being written at a time. What a checkpoint is stands in worker/checkpoint.py; when to save and which
checkpoint counts is the driver's (worker/driver/saving.py).
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from worker import checkpoint
from worker.agreement import named_tensors
from worker.background import Task
from worker.engine import Engine
from worker.engine.optimizer_state import without_implementation
from worker.failure import AttemptFailure, attributed_to
from worker.job import Job
from worker.memory import PeakMemory, memory_limit
from worker.model.profile import OptimizerState
from worker.reading import StageReader
from worker.reasons import Reason
from worker.snapshot import Snapshots
from worker.traced_model import JobModel

# How long a save waits for one before it of the same worker; the driver waits, and asks, before it begins another.
_BEFORE_S = 600.0

State = Mapping[str, Any]


@dataclass(frozen=True)
class Saved:
    """How writing a worker's shards ended: the names of shards beside its mesh's, why it failed, and how long it took."""

    shards: tuple[str, ...] = ()
    error: str | None = None
    write_s: float = 0.0


class ShardSaver:
    """Writes the shard `mesh` of `state(step)`, and those of `rest`, which never change.

    `held` is told the bytes that copies take, whenever that may have changed.
    """

    def __init__(
        self,
        mesh: str,
        state: Callable[[int], State],
        rest: Mapping[str, State],
        *,
        device: str = "cpu",
        held: Callable[[int], None] = lambda held_bytes: None,
    ):
        self._mesh, self._state, self._rest, self._told = mesh, state, rest, held
        self._snapshots = Snapshots(device)
        self._writing: Task[None] | None = None

    def save(self, uri: str, step: int) -> list[str]:
        """Write now; the names of shards beside the mesh's."""
        self._end_before()
        self._write(uri, step, self._state(step))
        return list(self._rest)

    def begin(self, uri: str, step: int) -> None:
        """Copy the state and have a thread write it; see `saved`."""
        self._end_before()
        copied = self._snapshots.take(self._state(step))
        self._told(self._snapshots.held_bytes)
        self._writing = Task(functools.partial(self._write, uri, step, copied), "slotline-checkpoint")

    def saved(self) -> Saved | None:
        """How the one begun last ended; None while it is being written. Never waits."""
        if self._writing is None:
            return Saved()
        if not self._writing.done:
            return None
        try:
            self._writing.result(0.0)
        except Exception as error:
            return Saved(
                error=f"mesh {self._mesh}: {type(error).__name__}: {error}", write_s=self._writing.seconds
            )
        return Saved(tuple(self._rest), None, self._writing.seconds)

    def _write(self, uri: str, step: int, state: State) -> None:
        checkpoint.save_shard(uri, step=step, shard=self._mesh, state=state)
        for shard, rest in self._rest.items():
            checkpoint.save_shard(uri, step=step, shard=shard, state=rest)

    def _end_before(self) -> None:
        """Nobody may write into the memory of a copy, or the same files, while a thread does."""
        if self._writing is None:
            return
        try:
            self._writing.result(_BEFORE_S)
        except TimeoutError:
            raise AttemptFailure(
                Reason.CHECKPOINT_FAILED,
                f"mesh {self._mesh}: the checkpoint before is still being written after {_BEFORE_S:.0f} s "
                f"(process {os.getpid()}): is the storage stuck?",
            ) from None
        except Exception:
            pass  # was told by `saved`
        self._writing = None


@dataclass(frozen=True)
class SnapshotRoom:
    """The bytes of a copy of a worker's state, and what its process may still take of the host's memory, where that is
    not what its plan is made for (None: unknown)."""

    bytes: int
    host_bytes: int | None


class Saving:
    """The calls of a worker that save and restore. Part of `Worker` (worker/actor.py)."""

    _job: Job
    _stages: Mapping[int, nn.Module]
    _mesh: str
    _worker: int
    _device: str
    _model: JobModel
    _memory: PeakMemory
    _engine: Engine | None
    _reader: StageReader | None
    _saver: ShardSaver | None = None

    def optimizer_state(self) -> OptimizerState:
        raise NotImplementedError

    @attributed_to(Reason.CHECKPOINT_UNWRITABLE)
    def try_checkpoints(self, uri: str) -> None:
        """Write and remove a file where checkpoints will go, so that a wrong place is told before training."""
        checkpoint.try_writing(uri)

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def restore(self, uri: str) -> int:
        """Load this worker's part of a checkpoint; the number of the step that it was taken after."""
        state, step = checkpoint.load(uri, names={*named_tensors(self._stages)})
        self._reader.load_state(step, state)
        state["optimizer_groups"] = without_implementation(state.get("optimizer_groups") or [])
        self._engine.load_state(state)
        return step

    def snapshot_room(self, sharing: int) -> SnapshotRoom:
        """What a copy of the state takes on this worker, one of `sharing` on its node; nothing where it saves nothing."""
        if self._gives_its_part() or self._worker != 0:
            return SnapshotRoom(0, None)
        state, kept = self._engine.state(), self.optimizer_state()
        parameters = list(state["parameters"].values())
        size = sum(tensor.nbytes for tensor in [*parameters, *state["buffers"].values()])
        size += math.ceil(sum(tensor.nbytes for tensor in parameters) * kept.bytes_per_parameter_byte)
        size += len(parameters) * kept.bytes_per_tensor
        return SnapshotRoom(size, memory_limit("cpu", sharing) if self._device == "cuda" else None)

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def save(self, uri: str, step: int) -> list[str]:
        """Write this mesh's shard of a checkpoint (worker 0 of a mesh only; the others hold the same, or give it their
        part, at the same time). The names of other shards that it wrote."""
        self._gives_its_part()
        return self._saving().save(uri, step) if self._worker == 0 else []

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def begin_save(self, uri: str, step: int) -> None:
        """As `save`, but only the state is copied meanwhile: a thread writes the copy. `saved` says how it ended."""
        self._gives_its_part()
        if self._worker == 0:
            self._saving().begin(uri, step)

    def saved(self) -> Saved | None:
        """How what `begin_save` began has ended; None while it is being written. Never waits."""
        return self._saving().saved() if self._worker == 0 else Saved()

    def _gives_its_part(self) -> bool:
        """Where workers of a mesh share matrices, or the optimizer's state, those beside worker 0 ask for the state when it
        does: it is put together from their parts. Whether this one did."""
        gives = self._worker < self._job.tensor_of(self._mesh) or self._mesh in self._job.sharded
        if gives and self._worker > 0:
            self._engine.state()
        return gives and self._worker > 0

    def _saving(self) -> ShardSaver:
        if self._saver is None:
            self._saver = ShardSaver(
                self._mesh,
                lambda step: {**self._engine.state(), **self._reader.state(step)},
                self._model.rest(),
                device=self._device,
                held=self._memory.set_aside,
            )
        return self._saver
