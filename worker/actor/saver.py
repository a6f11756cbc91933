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
from worker.actor.telemetry import memory_limit
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
        """The seconds of the work, once it is done."""
        self._ended = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def result(self, limit_s: float) -> Result:
        """The result of the work; raises its error, or TimeoutError after `limit_s` seconds."""
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
    """Copies of one state, one after the other, in the same memory: the copy before must not be in use any more.

    CUDA tensors go to pinned memory, on a stream beside the step's. `cuda` is torch.cuda unless a test brings its own.
    """

    def __init__(self, device: str, cuda: Any = torch.cuda):
        self._cuda = cuda if device == "cuda" else None
        self._stream: Any = None
        self._buffers: dict[_TreePath, torch.Tensor] = {}
        self._used: dict[_TreePath, torch.Tensor] = {}

    @property
    def copied_bytes(self) -> int:
        """The bytes of host memory that the copies take."""
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


# How long a save waits for the one before it; the driver waits for it before it begins another.
_PREVIOUS_WRITE_LIMIT_S = 600.0

ShardState = Mapping[str, Any]


@dataclass(frozen=True)
class ShardWriteResult:
    """The result of writing a worker's shards: names of shards beside its mesh's, the error, and the seconds."""

    shards: tuple[str, ...] = ()
    error: str | None = None
    write_s: float = 0.0


class ShardSaver:
    """Writes the shard `mesh` of `state(step)`, and `constant_shards`, which never change.

    `report_copied_bytes` is called with the bytes that copies take, whenever that may have changed.
    """

    def __init__(
        self,
        mesh: str,
        state: Callable[[int], ShardState],
        constant_shards: Mapping[str, ShardState],
        *,
        device: str = "cpu",
        report_copied_bytes: Callable[[int], None] = lambda copied_bytes: None,
    ):
        self._mesh, self._state, self._constant_shards = mesh, state, constant_shards
        self._report_copied_bytes = report_copied_bytes
        self._snapshots = HostSnapshots(device)
        self._writing: BackgroundTask[None] | None = None

    def save(self, uri: str, step: int) -> list[str]:
        """Write now; the names of shards beside the mesh's."""
        self._finish_previous()
        self._write(uri, step, self._state(step))
        return list(self._constant_shards)

    def begin(self, uri: str, step: int) -> None:
        """Copy the state, and write the copy in a thread; see `saved`."""
        self._finish_previous()
        copied = self._snapshots.take(self._state(step))
        self._report_copied_bytes(self._snapshots.copied_bytes)
        self._writing = BackgroundTask(
            functools.partial(self._write, uri, step, copied), "slotline-checkpoint"
        )

    def saved(self) -> ShardWriteResult | None:
        """The result of the write begun last; None while it is running. Never waits."""
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
        for shard, constant in self._constant_shards.items():
            checkpoint_format.save_shard(uri, step=step, shard=shard, state=constant)

    def _finish_previous(self) -> None:
        """Wait for the thread that writes: it reads the memory of the last copy, and writes the same files."""
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
            pass  # `saved` returned it
        self._writing = None


@dataclass(frozen=True)
class SnapshotMemory:
    """The bytes of a copy of a worker's state, and on CUDA the bytes that its process may still take of the host's memory
    (None: unknown, or planned with)."""

    bytes: int
    host_bytes: int | None


class WorkerCheckpoints:
    """Saves and restores the state of one loaded worker.

    Only worker 0 of a mesh writes; the others hold the same state, or give it their parts. `optimizer_state` measures
    the bytes that the optimizer keeps; `report_copied_bytes` is called with the bytes that host snapshots take.
    """

    def __init__(
        self,
        job: Job,
        *,
        mesh: str,
        worker: int,
        device: str,
        stages: Mapping[int, nn.Module],
        engine: Engine,
        reader: StageReader,
        unused_state: Mapping[str, ShardState],
        optimizer_state: Callable[[], OptimizerState],
        report_copied_bytes: Callable[[int], None],
    ):
        self._stages, self._engine, self._reader = stages, engine, reader
        self._device, self._optimizer_state = device, optimizer_state
        self._leads = worker == 0
        # Tensor-parallel ranks and ZeRO-1 ranks hold parts of the state, which worker 0 puts together.
        self._contributes = not self._leads and (worker < job.tp_size(mesh) or mesh in job.sharded)
        self._saver = ShardSaver(
            mesh,
            lambda step: {**engine.state(), **reader.state(step)},
            unused_state,
            device=device,
            report_copied_bytes=report_copied_bytes,
        )

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def restore(self, uri: str) -> int:
        """Load this worker's shard of a checkpoint; the number of the step after which it was taken."""
        state, step = checkpoint_format.load_checkpoint(uri, names={*named_tensors(self._stages)})
        self._reader.load_state(step, state)
        state["optimizer_groups"] = without_implementation_flags(state.get("optimizer_groups") or [])
        self._engine.load_state(state)
        return step

    def snapshot_memory(self, sharing: int) -> SnapshotMemory:
        """The memory of a host snapshot on this worker, one of `sharing` on its node; none where it writes nothing."""
        self._contribute()
        if not self._leads:
            return SnapshotMemory(0, None)
        state, optimizer = self._engine.state(), self._optimizer_state()
        parameters = list(state["parameters"].values())
        size = sum(tensor.nbytes for tensor in [*parameters, *state["buffers"].values()])
        size += math.ceil(sum(tensor.nbytes for tensor in parameters) * optimizer.bytes_per_parameter_byte)
        size += len(parameters) * optimizer.bytes_per_tensor
        return SnapshotMemory(size, memory_limit("cpu", sharing) if self._device == "cuda" else None)

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def save(self, uri: str, step: int) -> list[str]:
        """Write this mesh's shard now; the names of other shards that were written. All workers call this at the same
        time."""
        self._contribute()
        return self._saver.save(uri, step) if self._leads else []

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def begin_save(self, uri: str, step: int) -> None:
        """Copy the state of this mesh's shard, and write the copy in a thread; see `saved`."""
        self._contribute()
        if self._leads:
            self._saver.begin(uri, step)

    def saved(self) -> ShardWriteResult | None:
        """The result of the write that `begin_save` began; None while it is running. Never waits."""
        return self._saver.saved() if self._leads else ShardWriteResult()

    def _contribute(self) -> None:
        """Ask for the state when worker 0 does, which gathers it."""
        if self._contributes:
            self._engine.state()
