"""Feeds a worker with its rows of every microbatch, prefetched for its stages, and keeps the data position.

Batches splits the global batch into microbatches and these over the data-parallel ranks of the mesh. StageReader
prefetches what the stages of this mesh take, reads nothing where they take no samples, and gives checkpoints the
data position.
Knows the data set and the inputs of stages; no model, no engine. Errors of the data are the user's: DATA_FAILED.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from worker.actor.loss import takes_inputs
from worker.actor.optimizer import IGNORED_TARGET, ignored_target
from worker.actor.step_result import LENGTHS_AHEAD, StepLengths
from worker.contract.failures import AttemptFailure, as_failure, attributed_to
from worker.contract.job import AUTO, SKIP_LIMIT_S, Bucket, Data, Job
from worker.contract.profile import FactoryError
from worker.contract.reasons import Reason
from worker.data.checksum import checksum
from worker.data.dataset import IndexedSource, SampleOrder, StreamSource
from worker.data.loader import LoaderProcesses
from worker.data.microbatches import BatchSlice, Microbatches, MicrobatchTensors, ReadMicrobatch
from worker.data.prefetch import ReadTooSlowError, prefetch_steps
from worker.data.stream import DataEndedError
from worker.model.pytree import target_tensors
from worker.model.stages import StageModule

_INTEGER_DTYPES = (torch.int64, torch.int32)
_FINGERPRINT_SAMPLES = 8


class Batches:
    """The rows of data-parallel rank `worker` in every microbatch; `set_microbatches` changes how the batch is split."""

    examples: Mapping[Bucket, MicrobatchTensors] = MappingProxyType({})
    """With data.lengths rows of the first samples for each bucket, in ascending order; else none."""

    @attributed_to(Reason.DATA_FAILED)
    def __init__(self, job: Job, *, worker: int, workers_per_mesh: int, microbatches: int):
        self._job, self._workers_per_mesh = job, workers_per_mesh
        self._part = BatchSlice(worker, workers_per_mesh)
        self._names: tuple[str, ...] | None = None
        self._loader: LoaderProcesses | None = None
        self._origin: tuple[int, int] | None = None
        self._microbatches: Microbatches | None = None
        self._with_inputs = takes_inputs(job.loss)
        if job.data.lengths is not None and (job.loss is None or job.training.loss_reduction != "tokens"):
            raise ValueError(
                f"data.lengths wants a `loss` and training.loss_reduction tokens, which is {job.training.loss_reduction}"
            )
        self._set_microbatches(microbatches)

    @property
    def keywords(self) -> tuple[str, ...]:
        """The names of the model's inputs, in their order; empty where they go by position."""
        return self._names or ()

    @property
    def data(self) -> Data:
        """The job's settings of this data."""
        return self._job.data

    @property
    def samples_in_all(self) -> int | None:
        """The number of samples of the data; None for a stream."""
        return self._source.samples

    @property
    def ahead(self) -> int:
        """The number of steps that are read ahead; at least one for streams and for loader processes."""
        aside = self.data.loader.workers > 0 or isinstance(self._source, StreamSource)
        return max(self.data.prefetch, 1 if aside else 0)

    @property
    def tokens_per_sample(self) -> int | None:
        """The length of a sample of the first integer input of shape (batch, length); None where there is none, or where
        samples have unequal lengths."""
        if self.examples:
            return None
        inputs, _ = self.sample
        lengths = (
            tensor.shape[1] for tensor in inputs if tensor.ndim == 2 and tensor.dtype in _INTEGER_DTYPES
        )
        return next(lengths, None)

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a batch."""
        return self._microbatches.order.microbatches

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The shapes to which microbatches are padded, ascending; none where all samples have one shape."""
        return self._microbatches.buckets

    def bucket_numbers(self, step: int) -> tuple[int, ...]:
        """The buckets of a step's microbatches, by number from the smallest, from the lengths that the data set tells; none
        where it tells nothing."""
        return tuple(map(self.buckets.index, self._microbatches.buckets_of(step)))

    @attributed_to(Reason.DATA_FAILED)
    def set_microbatches(self, microbatches: int) -> None:
        """Split the batch into this number of microbatches from now on; `sample` has their shapes."""
        if microbatches != self.microbatches:
            self._set_microbatches(microbatches)

    @attributed_to(Reason.DATA_FAILED)
    def begin_at(self, step: int, sample: int) -> None:
        """Have `step` begin at `sample` of the data's order, counted over all epochs, and later steps follow it."""
        self._origin = (step, sample)
        self._set_microbatches(self.microbatches)

    def ignored_targets(self, rows: MicrobatchTensors) -> int:
        """The number of integers of a microbatch that a loss as torch's takes for no target: of its target, or of all inputs
        where the model returns its own loss."""
        loss, (inputs, target) = self._job.loss, rows
        ignored = IGNORED_TARGET if loss is None else ignored_target(loss)
        tensors = inputs if loss is None else target_tensors(target)
        return sum(int((one == ignored).sum()) for one in tensors if one.dtype in _INTEGER_DTYPES)

    def rows(self, microbatches: int) -> int:
        """The number of this worker's samples in each of `microbatches`; with data.lengths on average."""
        return self._job.training.global_batch // microbatches // self._workers_per_mesh

    @property
    def global_batch(self) -> int:
        return self._job.training.global_batch

    def is_first_step(self, step: int) -> bool:
        """True if no step before `step` has samples of this data."""
        order = self._microbatches.order
        return order.begin(step) == order.begin(order.origin[0] if order.origin else order.first_step)

    def microbatch(self, step: int, microbatch: int) -> MicrobatchTensors:
        """This worker's rows of a microbatch: the workers of a mesh have consecutive blocks."""
        return self.read(step, microbatch).rows

    @attributed_to(Reason.DATA_FAILED)
    def read(self, step: int, microbatch: int) -> ReadMicrobatch:
        """`microbatch`, with its bucket and its tokens where samples have unequal lengths."""
        first = self._microbatches.order.first_step
        reads = self._loader if self._loader is not None and step >= first else self._microbatches
        read = reads.read(step, microbatch, self._part)
        self._check_shapes(self._checked(read), step, microbatch, read.bucket)
        return read

    @attributed_to(Reason.DATA_FAILED)
    def samples(self, workers: int) -> list[tuple[torch.Tensor, ...]]:
        """The inputs of the first microbatch on each of `workers` data-parallel ranks."""
        first = self._microbatches.order.first_step - 1
        return [
            self._checked(self._microbatches.read(first, 0, BatchSlice(worker, workers)))[0]
            for worker in range(workers)
        ]

    def further_samples(self, count: int) -> list[MicrobatchTensors]:
        """This worker's rows of at most `count` microbatches behind the first, up to one that cannot be read or has other
        shapes, which training will say; none of a stream, nor of samples of unequal lengths."""
        found: list[MicrobatchTensors] = []
        first = self._microbatches.order.first_step - 1
        if isinstance(self._source, IndexedSource) and not self.examples:
            with contextlib.suppress(Exception):
                for microbatch in range(1, min(count + 1, self.microbatches)):
                    rows = self._checked(self._microbatches.read(first, microbatch, self._part))
                    self._check_shapes(rows, first, microbatch)
                    found.append(rows)
        return found

    @attributed_to(Reason.DATA_FAILED)
    def padded_twice(self) -> list[MicrobatchTensors]:
        """The same rows in two lengths, the longest last; none where all samples have one shape, or there is one bucket."""
        read = self._microbatches.padded_twice(self._microbatches.order.first_step - 1, self._part)
        return [self._checked(one) for one in read]

    @attributed_to(Reason.DATA_FAILED)
    def check_first_step(self, count: int, *, limit_s: float) -> None:
        """Read the first `count` microbatches of training, no further than `limit_s` seconds allow: they are there, and of
        the shapes of the first."""
        began = time.monotonic()
        for microbatch in range(min(count, self.microbatches)):
            self.microbatch(self._microbatches.order.first_step, microbatch)
            if time.monotonic() - began > limit_s:
                return

    @attributed_to(Reason.DATA_FAILED)
    def checksums(self) -> tuple[str, str]:
        """Checksums of the first samples of the data, which all workers read, from two readings."""
        return self._first_samples(again=False), self._first_samples(again=True)

    @attributed_to(Reason.DATA_FAILED)
    def position(self, step: int) -> Mapping[str, Any] | None:
        """The position of the data at the begin of `step`, for a checkpoint; None where it was not reached."""
        if self._loader is not None and isinstance(self._source, StreamSource):
            return self._loader.place(step)
        return self._source.place(step)

    @attributed_to(Reason.DATA_FAILED)
    def go_to(self, step: int, position: Mapping[str, Any] | None) -> None:
        """Go on at the begin of `step`, whose `position` a checkpoint stores."""
        if self._loader is not None:
            self._loader.go_to(step, position)
        if self._loader is None or isinstance(self._source, IndexedSource):
            self._source.go_to(step, position)

    def reading(self) -> str:
        """The data and the process that reads now, for messages."""
        name = self.data.factory
        return f"data {name}" if self._loader is None else f"data {name}: {self._loader.reading()}"

    def close(self) -> None:
        """End the processes that read."""
        if self._loader is not None:
            self._loader.close()

    @property
    def _source(self) -> IndexedSource | StreamSource:
        return self._microbatches.source

    @property
    def _dataset(self) -> Any:
        return getattr(self._source, "dataset", None)  # a stream has none that all workers share

    def _first_samples(self, *, again: bool) -> str:
        order, source = self._microbatches.order, self._source
        first, count = order.first_step - 1, min(order.size, _FINGERPRINT_SAMPLES)
        if again:
            self._microbatches.forget_first_samples()
        if self.examples:  # the lengths of a step are to be the same everywhere
            whole = BatchSlice(0, 1)
            rows = [self._microbatches.read(first, m, whole).rows for m in range(order.microbatches)]
        elif order.data.collate is not None:
            rows = [self._microbatches.read(first, 0, BatchSlice(0, 1)).rows]
        else:
            rows = [self._microbatches.stack_samples(source.rows(first, 0, 0, count)).rows]
        if isinstance(source, IndexedSource) and order.data.collate is None and not self.examples:
            rows.append(self._microbatches.stack_samples([source.example(0, 0)]).rows)
        return checksum(rows)

    def _checked(self, read: ReadMicrobatch) -> MicrobatchTensors:
        """The rows; ValueError where inputs have other names than before."""
        if self._names is not None and read.names != self._names:
            raise ValueError(
                f"a sample of data {self.data.factory!r} has the inputs {', '.join(read.names) or 'by position'}, an "
                f"earlier one {', '.join(self._names) or 'by position'}: return the same fields for every index"
            )
        self._names = read.names
        return read.rows

    def _check_shapes(
        self, rows: MicrobatchTensors, step: int, microbatch: int, bucket: Bucket | None = None
    ) -> None:
        """ValueError where tensors are not like those of the first microbatch (of that `bucket`), for which the model was
        traced."""
        if self.sample is None:
            return
        (inputs, target), (first, first_target) = rows, self.examples.get(bucket, self.sample)
        tensors = (*inputs, *target_tensors(target))
        first_tensors = (*first, *target_tensors(first_target))
        names = [f"input {name}" for name in self._names or range(len(first))]
        names += ["target"] * (len(first_tensors) - len(first))
        if len(inputs) != len(first):
            raise ValueError(
                f"a sample of data {self.data.factory!r} in step {step} has {len(inputs)} inputs, one of the first "
                f"microbatch {len(first)}: return equally many for every index"
            )
        for name, tensor, expected in zip(names, tensors, first_tensors, strict=True):
            if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                raise ValueError(
                    f"{name} of data {self.data.factory!r} is {list(tensor.shape)} of {tensor.dtype} in step {step}, "
                    f"microbatch {microbatch}, and {list(expected.shape)} of {expected.dtype} in the first, for which "
                    "the model was traced: cut or pad all samples to one shape"
                )

    def _set_microbatches(self, microbatches: int) -> None:
        training = self._job.training
        if training.microbatches not in (AUTO, microbatches):
            raise ValueError(
                f"{microbatches} microbatches were planned, but the job says {training.microbatches}"
            )
        self.close()
        dataset = self._dataset if self._microbatches and isinstance(self._source, IndexedSource) else None
        order, own_loss = self._order(microbatches), self._job.loss is None
        self._microbatches = Microbatches(
            order, own_loss=own_loss, with_inputs=self._with_inputs, dataset=dataset
        )
        self.sample = None
        if self._microbatches.buckets:  # chosen once, whatever the number of microbatches
            self._job = replace(self._job, data=self._microbatches.order.data)
        if self.data.loader.workers:
            self._loader = self._processes()
        first = self._microbatches.order.first_step - 1
        if self._microbatches.buckets:
            read = self._microbatches.examples(first, self._part)
            self.examples = {bucket: self._checked(example) for bucket, example in read.items()}
            self.sample = self.examples[self.buckets[-1]]
        else:
            self.sample = self._checked(self._microbatches.read(first, 0, self._part))

    def _processes(self) -> LoaderProcesses:
        if isinstance(self._source, StreamSource) and self.data.loader.workers > 1:
            raise FactoryError(
                f"data {self.data.factory!r} is a stream, and data.loader.workers is {self.data.loader.workers}: its "
                "samples come one after the other, so give 1, or return a map-style data set"
            )
        return LoaderProcesses(
            self._microbatches.order,
            own_loss=self._job.loss is None,
            with_inputs=self._with_inputs,
            last=self._last_step(),
            is_stream=isinstance(self._source, StreamSource),
        )

    def _order(self, microbatches: int) -> SampleOrder:
        training, loss = self._job.training, self._job.loss
        return SampleOrder(
            self.data,
            training.seed,
            training.global_batch,
            microbatches,
            origin=self._origin,
            ignored_target=IGNORED_TARGET if loss is None else ignored_target(loss),
            # where several numbers of microbatches are tried, their plans know one shape each
            row_multiple=None if training.microbatches == AUTO else self._workers_per_mesh,
        )

    def _last_step(self) -> int:
        return self._job.training.steps


StepSamples = tuple[list[tuple[torch.Tensor, ...]], list[torch.Tensor] | None]


_READER_START_S = 60.0
_DATA_STATE_KEY = "data"  # of a checkpoint's state


class StageReader:
    """Prefetches the inputs and targets of a step's microbatches for `stages`; see `prefetch_steps`. Where samples have
    unequal lengths every mesh reads them, to know the shapes of a step before it begins."""

    def __init__(
        self,
        stages: Mapping[int, StageModule],
        batches: Batches,
        *,
        device: str,
        last: int,
        limit_s: float,
        counts_ignored: bool = False,
    ):
        self._batches, self._resumed_at = batches, None
        self._ignored: dict[int, list[int]] = {}
        self._lengths: dict[int, list[tuple[Bucket, int, int]]] = {}
        self._counts_ignored = False
        self._no_inputs = [()] * batches.microbatches
        self.has_output = any("output" in stage.outputs for stage in stages.values())
        inputs = any(name.startswith("input:") for stage in stages.values() for name in stage.inputs)
        self._reader = None
        if inputs or self.has_output or batches.buckets:
            self._counts_ignored = self.has_output and counts_ignored
            loader = batches.data.loader
            limit_s = min(limit_s, loader.timeout_s) if loader.workers else limit_s
            self._first_limit_s = limit_s + _READER_START_S + SKIP_LIMIT_S
            self._reader = prefetch_steps(
                self._read_counted if self._counts_ignored or batches.buckets else batches.microbatch,
                batches.microbatches,
                device=device,
                ahead=batches.ahead,
                last=last,
                limit_s=limit_s,
                reading=batches.reading,
                pinned=loader.pin_memory,
            )

    def take(self, step: int, *, first: bool = False) -> StepSamples:
        """The samples of a step. Raises AttemptFailure DATA_FAILED.

        With `first` the next call returns the same again, and the limit leaves time to start processes and to skip to
        the position of a resume."""
        if self._reader is None:
            return self._no_inputs, None
        self._begin(step)
        for earlier in [known for known in list(self._lengths) if known < step]:
            self._lengths.pop(earlier, None)
        try:
            return self._reader.take(step, keep=first, limit_s=self._first_limit_s if first else None)
        except ReadTooSlowError as error:
            raise as_failure(error, Reason.DATA_FAILED) from None

    def take_ignored(self, step: int) -> list[int]:
        """The numbers of ignored targets in the microbatches of a step that was taken, once; empty where nobody counts."""
        return self._ignored.pop(step, [])

    def lengths(self, step: int) -> StepLengths | None:
        """The lengths of a step that was taken; None where all samples have one shape."""
        if not self._batches.buckets:
            return None
        buckets, tokens, padded = zip(*self._lengths[step], strict=True)
        later = self._batches.bucket_numbers(step + LENGTHS_AHEAD)
        return StepLengths(buckets, sum(tokens), sum(padded), later)

    def _read_counted(self, step: int, microbatch: int) -> MicrobatchTensors:
        read = self._batches.read(step, microbatch)
        counted = [] if microbatch == 0 else self._ignored.get(step, [])
        if self._counts_ignored:
            self._ignored[step] = [*counted, self._batches.ignored_targets(read.rows)]
        if read.bucket is not None:
            before = [] if microbatch == 0 else self._lengths[step]
            padded = read.bucket.length * len(read.rows[0][0])
            self._lengths[step] = [*before, (read.bucket, read.tokens, padded)]
        return read.rows

    def has(self, step: int) -> bool | None:
        """True where there are samples for this step, None where none are read; raises as `take`, and where the data has too
        few for its first step."""
        if self._reader is None:
            return None
        try:
            self.take(step, first=True)
        except DataEndedError as error:
            if self._batches.is_first_step(step):
                raise AttemptFailure(
                    Reason.DATA_FAILED,
                    f"there is no step at all: training.global_batch is {self._batches.global_batch}, and {error.message}",
                ) from None
            return False
        return True

    def ready(self, step: int) -> None:
        """Prefetch the samples of `step` before another mesh waits for this one."""
        if self._reader is not None and self._batches.ahead:
            self.has(step)

    def state(self, step: int) -> dict[str, Any]:
        """The data position behind `step`, for a checkpoint; empty where no samples are read."""
        position = None if self._reader is None else self._batches.position(step + 1)
        return {} if position is None else {_DATA_STATE_KEY: dict(position)}

    def begin_at(self, step: int, sample: int) -> None:
        """Have `step` begin at `sample` of the data's order; before any samples are taken."""
        if self._reader is not None:
            self._batches.begin_at(step, sample)

    def load_state(self, step: int, state: Mapping[str, Any]) -> None:
        """Go on after `step`, whose checkpoint has this state. Raises AttemptFailure DATA_FAILED where the data
        has changed."""
        if self._reader is None:
            return
        position = state.get(_DATA_STATE_KEY)
        if position is not None and "samples" in position:
            self._batches.go_to(step + 1, position)
        else:
            self._resumed_at = (step + 1, position)  # on the way to the first sample: it may take long

    def _begin(self, step: int) -> None:
        resumed_at, self._resumed_at = self._resumed_at, None
        if resumed_at is not None and resumed_at[0] == step and resumed_at[1] is not None:
            self._batches.go_to(*resumed_at)

    def close(self) -> None:
        """End the thread, and processes."""
        self._batches.close()
        if self._reader is not None:
            self._reader.close()
