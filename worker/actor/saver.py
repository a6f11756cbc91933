"""Saves and restores one worker's checkpoint shard, synchronously or from a host snapshot written by a thread.

At most one checkpoint is being written at a time. HostSnapshots copies tensors into reused host memory (pinned, on a
side stream for CUDA), so that training may change the state while the copy is written; the memory of the previous
copy must not be in use any more. BackgroundTask runs work on a daemon thread that process exit does not wait for.
The file format is worker/checkpoint/format.py; when to save and which checkpoint counts is decided by the driver.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from worker.actor.batch_feed import StageReader
from worker.actor.model_host import JobModel
from worker.actor.telemetry import PeakMemory, memory_limit
from worker.checkpoint import format as checkpoint_format
from worker.checks.replicas import named_tensors
from worker.contract.failures import AttemptFailure, attributed_to
from worker.contract.job import Job
from worker.contract.profile import OptimizerState
from worker.contract.reasons import Reason
from worker.engine.engine import Engine
from worker.engine.optim.state_dict import without_implementation_flags

Result = TypeVar("Result")


class BackgroundTask(Generic[Result]):
    """`work()` on a daemon thread that begins now: a process that ends does not wait for it."""

    def __init__(self, work: Callable[[], Result], name: str):
        self._work = work
        self._result: Result | None = None
        self._error: BaseException | None = None
        self.seconds = 0.0
        """How long the work took, once it is done."""
        self._ended = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def result(self, limit_s: float) -> Result:
        """What the work returned, or raises what it raised. TimeoutError after `limit_s` seconds."""
        if not self._ended.wait(limit_s):
            raise TimeoutError(f"not done within {limit_s:g} s")
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        self.seconds = time.monotonic() - began
        self._ended.set()


_TreePath = tuple[Any, ...]


class HostSnapshots:
    """Copies of one state, one after the other, in the same memory: the one before must not be in use any more.

    Tensors of CUDA go to pinned memory, on a stream beside those of the step. `cuda` is torch.cuda unless a test
    brings its own.
    """

    def __init__(self, device: str, cuda: Any = torch.cuda):
        self._cuda = cuda if device == "cuda" else None
        self._stream: Any = None
        self._buffers: dict[_TreePath, torch.Tensor] = {}
        self._used: dict[_TreePath, torch.Tensor] = {}

    @property
    def copied_bytes(self) -> int:
        """What the copies take of the host's memory."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._buffers.values())

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """`state` with its tensors copied and all else its own; when this returns the copy is whole.

        Only tensors are copied side by side with what the device does: the wait at the end is for the copies.
        """
        self._used = {}
        if self._cuda is None:
            copied = self._copied(state, ())
        else:
            self._stream = self._stream or self._cuda.Stream()
            self._stream.wait_stream(self._cuda.current_stream())  # the step's last writes come first
            with self._cuda.stream(self._stream):
                copied = self._copied(state, ())
                event = self._cuda.Event()
                event.record(self._stream)
            event.synchronize()
        self._buffers, self._used = self._used, {}
        return copied

    def _copied(self, value: Any, path: _TreePath) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach(), path)
        if isinstance(value, Mapping):
            return {key: self._copied(entry, (*path, key)) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            entries = [self._copied(entry, (*path, index)) for index, entry in enumerate(value)]
            return entries if isinstance(value, list) else tuple(entries)
        return copy.deepcopy(value)

    def _tensor(self, tensor: torch.Tensor, path: _TreePath) -> torch.Tensor:
        there = self._buffers.get(path)
        if there is None or not _same_layout(there, tensor):
            there = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        there.copy_(tensor, non_blocking=tensor.is_cuda)
        self._used[path] = there
        return there


def _same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()


# How long a save waits for one before it of the same worker; the driver waits, and asks, before it begins another.
_PREVIOUS_WRITE_LIMIT_S = 600.0

ShardState = Mapping[str, Any]


@dataclass(frozen=True)
class ShardWriteResult:
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
        state: Callable[[int], ShardState],
        rest: Mapping[str, ShardState],
        *,
        device: str = "cpu",
        held: Callable[[int], None] = lambda held_bytes: None,
    ):
        self._mesh, self._state, self._constant_shards, self._report_copied_bytes = mesh, state, rest, held
        self._snapshots = HostSnapshots(device)
        self._writing: BackgroundTask[None] | None = None

    def save(self, uri: str, step: int) -> list[str]:
        """Write now; the names of shards beside the mesh's."""
        self._finish_previous()
        self._write(uri, step, self._state(step))
        return list(self._constant_shards)

    def begin(self, uri: str, step: int) -> None:
        """Copy the state and have a thread write it; see `saved`."""
        self._finish_previous()
        copied = self._snapshots.take(self._state(step))
        self._report_copied_bytes(self._snapshots.copied_bytes)
        self._writing = BackgroundTask(
            functools.partial(self._write, uri, step, copied), "slotline-checkpoint"
        )

    def saved(self) -> ShardWriteResult | None:
        """How the one begun last ended; None while it is being written. Never waits."""
        if self._writing is None:
            return ShardWriteResult()
        if not self._writing.done:
            return None
        try:
            self._writing.result(0.0)
        except Exception as error:
            return ShardWriteResult(
                error=f"mesh {self._mesh}: {type(error).__name__}: {error}", write_s=self._writing.seconds
            )
        return ShardWriteResult(tuple(self._constant_shards), None, self._writing.seconds)

    def _write(self, uri: str, step: int, state: ShardState) -> None:
        checkpoint_format.save_shard(uri, step=step, shard=self._mesh, state=state)
        for shard, rest in self._constant_shards.items():
            checkpoint_format.save_shard(uri, step=step, shard=shard, state=rest)

    def _finish_previous(self) -> None:
        """Nobody may write into the memory of a copy, or the same files, while a thread does."""
        if self._writing is None:
            return
        try:
            self._writing.result(_PREVIOUS_WRITE_LIMIT_S)
        except TimeoutError:
            raise AttemptFailure(
                Reason.CHECKPOINT_FAILED,
                f"mesh {self._mesh}: the checkpoint before is still being written after {_PREVIOUS_WRITE_LIMIT_S:.0f} s "
                f"(process {os.getpid()}): is the storage stuck?",
            ) from None
        except Exception:
            pass  # was told by `saved`
        self._writing = None


@dataclass(frozen=True)
class SnapshotMemory:
    """The bytes of a copy of a worker's state, and what its process may still take of the host's memory, where that is
    not what its plan is made for (None: unknown)."""

    bytes: int
    host_bytes: int | None


class CheckpointCalls:
    """The calls of a worker that save and restore. Part of `Worker` (worker/actor/actor.py)."""

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
        checkpoint_format.check_writable(uri)

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def restore(self, uri: str) -> int:
        """Load this worker's part of a checkpoint; the number of the step that it was taken after."""
        state, step = checkpoint_format.load_checkpoint(uri, names={*named_tensors(self._stages)})
        self._reader.load_state(step, state)
        state["optimizer_groups"] = without_implementation_flags(state.get("optimizer_groups") or [])
        self._engine.load_state(state)
        return step

    def snapshot_memory(self, sharing: int) -> SnapshotMemory:
        """What a copy of the state takes on this worker, one of `sharing` on its node; nothing where it saves nothing."""
        if self._contributes_to_state() or self._worker != 0:
            return SnapshotMemory(0, None)
        state, kept = self._engine.state(), self.optimizer_state()
        parameters = list(state["parameters"].values())
        size = sum(tensor.nbytes for tensor in [*parameters, *state["buffers"].values()])
        size += math.ceil(sum(tensor.nbytes for tensor in parameters) * kept.bytes_per_parameter_byte)
        size += len(parameters) * kept.bytes_per_tensor
        return SnapshotMemory(size, memory_limit("cpu", sharing) if self._device == "cuda" else None)

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def save(self, uri: str, step: int) -> list[str]:
        """Write this mesh's shard of a checkpoint (worker 0 of a mesh only; the others hold the same, or give it their
        part, at the same time). The names of other shards that it wrote."""
        self._contributes_to_state()
        return self._shard_saver().save(uri, step) if self._worker == 0 else []

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def begin_save(self, uri: str, step: int) -> None:
        """As `save`, but only the state is copied meanwhile: a thread writes the copy. `saved` says how it ended."""
        self._contributes_to_state()
        if self._worker == 0:
            self._shard_saver().begin(uri, step)

    def saved(self) -> ShardWriteResult | None:
        """How what `begin_save` began has ended; None while it is being written. Never waits."""
        return self._shard_saver().saved() if self._worker == 0 else ShardWriteResult()

    def _contributes_to_state(self) -> bool:
        """Where workers of a mesh share matrices, or the optimizer's state, those beside worker 0 ask for the state when it
        does: it is put together from their parts. Whether this one did."""
        gives = self._worker < self._job.tp_size(self._mesh) or self._mesh in self._job.sharded
        if gives and self._worker > 0:
            self._engine.state()
        return gives and self._worker > 0

    def _shard_saver(self) -> ShardSaver:
        if self._saver is None:
            self._saver = ShardSaver(
                self._mesh,
                lambda step: {**self._engine.state(), **self._reader.state(step)},
                self._model.unused_state(),
                device=self._device,
                held=self._memory.exclude_bytes,
            )
        return self._saver
