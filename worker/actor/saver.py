"""Saves and restores one worker's checkpoint shard, synchronously or from a host snapshot written by a thread.

At most one checkpoint is being written at a time, and beside it one copy is given to keepers, which are host memory that
outlives this process (worker/checkpoint/copies.py). HostSnapshots copies tensors into reused host memory (pinned, on a
side stream for CUDA), so that training may change the state while the copy is written; the memory of the previous
copy must not be in use any more. BackgroundTask runs work on a daemon thread that process exit does not wait for.
The file format is worker/checkpoint/format.py; when to save and which checkpoint counts is decided by the driver.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from worker.actor.batch_feed import StageReader
from worker.actor.optimizer import (
    learning_rate,
    make_optimizer,
    measure_optimizer_state,
    optimizer_state_keys,
)
from worker.actor.step_result import CopiedShard
from worker.checkpoint import format as checkpoint_format
from worker.checkpoint.chunked import HeldParts
from worker.checkpoint.copies import CopyKey, ShardUpload
from worker.checkpoint.resumption import ResumedWorker, Takeover, mismatch_text
from worker.contract.checkpoint_files import CheckpointError
from worker.contract.failures import AttemptFailure, as_failure, attributed_to
from worker.contract.job import Job
from worker.contract.reasons import Reason
from worker.engine.engine import Engine
from worker.engine.local_stages import named_parameters
from worker.engine.optim.state_dict import class_name, without_implementation_flags
from worker.machine.telemetry import memory_limit
from worker.parallel.shard_spec import ShardSpec

Result = TypeVar("Result")


@contextlib.contextmanager
def reading_checkpoint() -> Iterator[None]:
    """Turns an exception of the body into an AttemptFailure: CHECKPOINT_DAMAGED or CHECKPOINT_FAILED."""
    with attributed_to(Reason.CHECKPOINT_FAILED):
        try:
            yield
        except checkpoint_format.DamagedCheckpointError as error:
            raise as_failure(error, Reason.CHECKPOINT_DAMAGED) from None


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

    It is that of one `rank` of the `ranks` of the mesh that write, and of the tensors in `held` the state has only these
    parts.
    `report_copied_bytes` is called with the bytes that copies take, whenever that may have changed.
    """

    def __init__(
        self,
        mesh: str,
        state: Callable[[int], ShardState],
        constant_shards: Mapping[str, ShardState],
        *,
        held: HeldParts | None = None,
        rank: int = 0,
        ranks: int = 1,
        device: str = "cpu",
        report_copied_bytes: Callable[[int], None] = lambda copied_bytes: None,
    ):
        self._held, self._shard = held, checkpoint_format.rank_shard(mesh, rank)
        self._beside = [checkpoint_format.rank_shard(mesh, other) for other in range(1, ranks) if rank == 0]
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
        checkpoint_format.save_shard(
            uri, step=step, shard=self._shard, state=state, held=self._held, beside=self._beside
        )
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


class ShardCopier:
    """Copies `state(step)`, one worker's shard of the parts in `held`, and gives the copy to `keepers` in a thread.

    The first keeper is that of this node, the others hold the shard too. The shards of the mesh's other workers are
    `beside` that of its first. `report_copied_bytes` is as in ShardSaver.
    """

    def __init__(
        self,
        keepers: Sequence[Any],
        *,
        shard: str,
        state: Callable[[int], ShardState],
        held: HeldParts,
        beside: Sequence[str] = (),
        device: str = "cpu",
        report_copied_bytes: Callable[[int], None] = lambda copied_bytes: None,
    ):
        self._keepers, self._shard, self._state, self._held = keepers, shard, state, held
        self._beside, self._report_copied_bytes = beside, report_copied_bytes
        self._snapshots = HostSnapshots(device)
        self._copying: BackgroundTask[dict[str, Any]] | None = None
        self._failed: CopiedShard | None = None

    def begin(self, key: CopyKey) -> None:
        """Copy the state, and give the copy away in a thread; `take_copied` has the result, also an error of this."""
        if self._copying is not None and not self._copying.done:
            self._failed = CopiedShard(error="the copy before is still on its way to its keepers")
            return
        try:
            copied = self._snapshots.take(self._state(key.step))
        except Exception as error:  # no host memory, say: training goes on without the copy
            self._failed = CopiedShard(error=f"{type(error).__name__}: {error}")
            return
        self._report_copied_bytes(self._snapshots.copied_bytes)
        upload = ShardUpload(self._keepers, key, self._shard)
        self._copying = BackgroundTask(
            functools.partial(upload.write, copied, self._held, self._beside), "slotline-copy"
        )

    def take_copied(self) -> CopiedShard | None:
        """The result of the copy begun last, once; None while it is on its way. Never waits."""
        if self._failed is not None:
            failed, self._failed = self._failed, None
            return failed
        if self._copying is None or not self._copying.done:
            return None
        copying, self._copying = self._copying, None
        try:
            return CopiedShard(self._shard, copying.result(0.0))
        except Exception as error:
            return CopiedShard(error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


@dataclass(frozen=True)
class SnapshotMemory:
    """The bytes of a copy of a worker's state, and on CUDA the bytes that its process may still take of the host's memory
    (None: unknown, or planned with)."""

    bytes: int
    host_bytes: int | None


@dataclass(frozen=True)
class SavedState:
    """The parameters and buffers of a worker that checkpoints hold, by their slices, and the state of the model that no
    stage uses, as the leading worker has it."""

    tensors: Mapping[ShardSpec, torch.Tensor]
    unused: Mapping[str, ShardState]


class WorkerCheckpoints:
    """Saves and restores the state of one loaded worker.

    Of a mesh the first worker writes, and of tensor-parallel ranks each its slices: the first rank all that is whole
    besides. Of the other workers, which hold the same parameters, each writes its partition of the optimizer's state where
    the mesh shards that. `report_copied_bytes` is called with the bytes that host snapshots take.
    """

    def __init__(
        self,
        job: Job,
        *,
        mesh: str,
        worker: int,
        device: str,
        engine: Engine,
        reader: StageReader,
        saved: SavedState,
        report_copied_bytes: Callable[[int], None],
    ):
        self._job, self._device = job, device
        self._engine, self._reader = engine, reader
        self._specs = {spec.name: spec for spec in saved.tensors}
        self._shapes = {spec.name: spec.whole_shape(tensor.shape) for spec, tensor in saved.tensors.items()}
        slices = {name: spec for name, spec in self._specs.items() if spec.dim is not None}
        self._held = HeldParts(slices, engine.partitions)
        self._worker = worker
        self._unused_state = saved.unused if worker == 0 else {}
        self._resumed: dict[str, ResumedWorker] = {}  # by the checkpoint's URI
        self._tensor_ranks = job.tp_size(mesh)
        ranks = job.mesh_sizes[int(mesh[1:])] if mesh in job.sharded else self._tensor_ranks
        self._writes = worker < ranks
        self._mesh, self._ranks = mesh, ranks
        self._report_copied_bytes = report_copied_bytes
        self._copied_bytes: dict[str, int] = {}  # of host snapshots, by what they are for
        self._saver = ShardSaver(
            mesh,
            self._state,
            self._unused_state,
            held=self._held,
            rank=worker,
            ranks=ranks,
            device=device,
            report_copied_bytes=functools.partial(self._report_snapshot, "checkpoints"),
        )
        self._copier: ShardCopier | None = None

    def _report_snapshot(self, use: str, copied_bytes: int) -> None:
        self._copied_bytes[use] = copied_bytes
        self._report_copied_bytes(sum(self._copied_bytes.values()))

    def _state(self, step: int) -> ShardState:
        """The state behind `step` that this worker writes."""
        return {**self._own_state(), **(self._reader.state(step) if self._worker == 0 else {})}

    def _own_state(self) -> ShardState:
        """The state that this worker writes of its engine: the first all of it, another tensor-parallel rank its slices, a
        worker of another data-parallel rank its optimizer state alone."""
        state = self._engine.state()
        if self._worker == 0:
            return state
        parts = (
            ("parameters", "buffers", "optimizer") if self._worker < self._tensor_ranks else ("optimizer",)
        )
        every = self._worker % self._tensor_ranks == 0
        return {
            part: {name: entry for name, entry in state[part].items() if every or name in self._held.slices}
            for part in parts
        }

    @reading_checkpoint()
    def restore(self, uri: str) -> int:
        """Load this worker's part of a checkpoint; the number of the step after which it was taken."""
        loaded = checkpoint_format.load_parts(uri, self._specs.keys(), self._held)
        if message := _mismatch(loaded.shapes, self._shapes):
            raise CheckpointError(f"{uri} is of another model: {message}")
        state, step = loaded.state, loaded.step
        self._reader.load_state(step, state)
        state["optimizer_groups"] = without_implementation_flags(state.get("optimizer_groups") or [])
        self._engine.load_state(state)
        return step

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def resume(self, uri: str, takeover: Takeover) -> ResumedWorker:
        """Load this worker's part of another training's checkpoint, as `takeover` says.

        Raises AttemptFailure RESUME_REFUSED where the checkpoint does not fit this worker's parameters and buffers, or the
        job's schedule cannot reach its step.
        """
        loaded = checkpoint_format.load_parts(uri, self._specs.keys(), self._held)
        state, step = loaded.state, loaded.step
        if uri not in self._resumed:  # else it is asked for again with other data: schedules have moved on
            if message := _mismatch(loaded.shapes, self._shapes):
                raise AttemptFailure(Reason.RESUME_REFUSED, message)
            self._resume_unused_tensors(uri)
            self._resumed[uri] = self._resume_engine(state, step, settings=takeover.settings)
        if takeover.data:
            self._reader.load_state(step, state)
        return self._resumed[uri]

    def _resume_engine(self, state: ShardState, step: int, *, settings: bool) -> ResumedWorker:
        optimizer, groups = self._engine.optimizer, state.get("optimizer_groups") or []
        omitted, new_state = self._optimizer_omissions(state)
        saved_schedule = state.get("lr_schedule")
        settings = settings and not omitted
        self._engine.load_state(
            {
                **state,
                "optimizer": {} if omitted else state.get("optimizer") or {},
                "optimizer_groups": without_implementation_flags(groups) if settings else [],
                "lr_schedule": saved_schedule if settings else None,
            }
        )
        if not settings:
            self._advance_schedule((saved_schedule or {}).get("last_epoch", step))
        rate = next((float(group["lr"]) for group in groups if "lr" in group), None)
        return ResumedWorker(
            step=step,
            optimizer=None if optimizer is None else not omitted,
            omitted=omitted,
            new_state=new_state,
            loss_scale=(state.get("loss_scale") or {}).get("scale"),
            saved_rate=rate,
            rate=None if optimizer is None else learning_rate(optimizer),
        )

    def _optimizer_omissions(self, state: ShardState) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Why the saved state of the optimizer is not taken over (empty where it is), and the trained parameters of which
        the checkpoint has none."""
        optimizer, entries = self._engine.optimizer, state.get("optimizer") or {}
        if optimizer is None:
            return (), ()
        own, saved = class_name(optimizer), state.get("optimizer_class")
        if saved not in (None, own):
            return (f"optimizer state, which is of {saved}, and this job's optimizer is {own}",), ()
        make = functools.partial(make_optimizer, self._job.optimizer)
        keys_of = functools.cache(functools.partial(optimizer_state_keys, make))
        new_state = []
        for name, parameter in named_parameters(self._engine.stages).items():
            if not parameter.requires_grad:
                continue
            keys, kept = keys_of(state["parameters"][name].dim()), entries.get(name)
            if kept is None or keys is None:
                new_state += [name] * bool(keys)
            elif not keys <= kept.keys() or (saved is None and keys != kept.keys()):
                return (
                    f"optimizer state, which has {', '.join(sorted(kept)) or 'nothing'} of {name}, and this job's "
                    f"{own} keeps {', '.join(sorted(keys)) or 'nothing'}",
                ), ()
        return (), tuple(new_state)

    def _advance_schedule(self, steps: int) -> None:
        try:
            self._engine.advance_schedule(steps)
        except Exception as error:  # of whatever schedule: one that ends before
            raise AttemptFailure(
                Reason.RESUME_REFUSED,
                f"optimizer.schedule {self._job.optimizer.schedule.factory} does not reach step {steps} of the checkpoint "
                f"({type(error).__name__}: {error}): give it arguments for all steps of the job, counted from its first",
            ) from None

    @torch.no_grad()
    def _resume_unused_tensors(self, uri: str) -> None:
        """Give the tensors that no stage uses, which the first worker keeps for exports, their saved values."""
        for shard in self._unused_state.values():
            tensors = {**shard.get("parameters", {}), **shard.get("buffers", {})}
            if not tensors:
                continue
            saved, _ = checkpoint_format.load_checkpoint(
                uri, names={*tensors}, parts=("parameters", "buffers")
            )
            values = {**saved.get("parameters", {}), **saved.get("buffers", {})}
            shapes = {name: tuple(value.shape) for name, value in values.items()}
            if message := _mismatch(shapes, {name: tuple(tensor.shape) for name, tensor in tensors.items()}):
                raise AttemptFailure(Reason.RESUME_REFUSED, message)
            for name, value in values.items():
                tensors[name].copy_(value)

    def snapshot_memory(self, sharing: int) -> SnapshotMemory:
        """The memory of a host snapshot on this worker, one of `sharing` on its node; none where it writes nothing."""
        if not self._writes:
            return SnapshotMemory(0, None)
        make = functools.partial(make_optimizer, self._job.optimizer)
        state, optimizer = self._own_state(), measure_optimizer_state(make, self._device)
        tensors = [*state.get("parameters", {}).values(), *state.get("buffers", {}).values()]
        updated = [
            tensor
            for name, tensor in self._engine.updated.items()
            if self._worker % self._tensor_ranks == 0 or name in self._held.slices
        ]
        size = sum(self._copy_bytes(tensor) for tensor in tensors)
        size += math.ceil(sum(map(self._copy_bytes, updated)) * optimizer.bytes_per_parameter_byte)
        size += len(updated) * optimizer.bytes_per_tensor
        return SnapshotMemory(size, memory_limit("cpu", sharing) if self._device == "cuda" else None)

    def _copy_bytes(self, tensor: torch.Tensor) -> int:
        """The bytes of a copy in host memory; torch takes pinned memory in powers of two."""
        return tensor.nbytes if self._device != "cuda" else 1 << max(tensor.nbytes - 1, 0).bit_length()

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def save(self, uri: str, step: int) -> list[str]:
        """Write this worker's shard now; the names of other shards that were written."""
        return self._saver.save(uri, step) if self._writes else []

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def begin_save(self, uri: str, step: int) -> None:
        """Copy the state of this worker's shard, and write the copy in a thread; see `saved`."""
        if self._writes:
            self._saver.begin(uri, step)

    def saved(self) -> ShardWriteResult | None:
        """The result of the write that `begin_save` began; None while it is running. Never waits."""
        return self._saver.saved() if self._writes else ShardWriteResult()

    def copy_to(self, keepers: Sequence[Any]) -> bool:
        """Give copies to these keepers from now on, the first of which is on this node; False where this worker has none to
        give."""
        if self._writes:
            rank_shard = functools.partial(checkpoint_format.rank_shard, self._mesh)
            self._copier = ShardCopier(
                keepers,
                shard=rank_shard(self._worker),
                state=self._state,
                held=self._held,
                beside=[rank_shard(other) for other in range(1, self._ranks) if self._worker == 0],
                device=self._device,
                report_copied_bytes=functools.partial(self._report_snapshot, "keepers"),
            )
        return self._writes

    def begin_copy(self, key: CopyKey) -> None:
        """Copy the state of this worker's shard, and give the copy to its keepers in a thread; see `take_copied`. No error
        of this ends an attempt."""
        if self._copier is not None:
            self._copier.begin(key)

    def take_copied(self) -> CopiedShard | None:
        """The result of the copy that `begin_copy` began, once; None while it is on its way. Never waits."""
        return None if self._copier is None else self._copier.take_copied()


def _mismatch(saved: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The names of `shapes` of which a checkpoint has nothing, or another shape; None where all fit."""
    others = [
        f"{name} {list(saved[name])} (the model's is {list(shape)})"
        for name, shape in shapes.items()
        if name in saved and saved[name] != shape
    ]
    return mismatch_text(missing=[name for name in shapes if name not in saved], shapes=others)
