"""The job's data, dealt to one worker: its rows of every microbatch.

Knows the data set and how it is dealt; no model, no stages. What goes wrong with the data is the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from worker.agreement import checksum
from worker.data.loader import LoaderProcesses
from worker.data.microbatches import Microbatches, Part, Read, Rows
from worker.data.source import IndexedSource, Order, StreamSource
from worker.failure import attributed_to
from worker.job import AUTO, Data, Job
from worker.job_loss import takes_inputs
from worker.model.errors import FactoryError
from worker.nests import all_tensors
from worker.reasons import Reason

_WHOLE_NUMBERS = (torch.int64, torch.int32)
_COMPARED = 8

__all__ = ["Batches", "Rows"]


class Batches:
    """What worker `worker` of a mesh computes on; the batch is dealt in `microbatches` until `deal` says another."""

    @attributed_to(Reason.DATA_FAILED)
    def __init__(self, job: Job, *, worker: int, workers_per_mesh: int, microbatches: int):
        self._job, self._workers_per_mesh = job, workers_per_mesh
        self._part = Part(worker, workers_per_mesh)
        self._names: tuple[str, ...] | None = None
        self._loader: LoaderProcesses | None = None
        self._made: Microbatches | None = None
        self._with_inputs = takes_inputs(job.loss)
        self._deal(microbatches)

    @property
    def keywords(self) -> tuple[str, ...]:
        """How the model's inputs are called, in their order; empty where they go by position."""
        return self._names or ()

    @property
    def data(self) -> Data:
        """The words of the job that this is."""
        return self._job.data

    @property
    def ahead(self) -> int:
        """How many steps are read ahead: what cannot be read twice, or is read elsewhere, at least one."""
        aside = self.data.loader.workers > 0 or isinstance(self._source, StreamSource)
        return max(self.data.prefetch, 1 if aside else 0)

    @property
    def tokens_per_sample(self) -> int | None:
        """How long the first input of whole numbers is whose samples are rows of them; None where there is none."""
        inputs, _ = self.sample
        lengths = (one.shape[1] for one in inputs if one.ndim == 2 and one.dtype in _WHOLE_NUMBERS)
        return next(lengths, None)

    @property
    def microbatches(self) -> int:
        """In how many microbatches the batch is dealt."""
        return self._made.order.microbatches

    @attributed_to(Reason.DATA_FAILED)
    def deal(self, microbatches: int) -> None:
        """Deal the batch in so many microbatches from now on; `sample` has their shapes."""
        if microbatches != self.microbatches:
            self._deal(microbatches)

    def rows(self, microbatches: int) -> int:
        """How many samples of each of so many microbatches are this worker's."""
        return self._job.training.global_batch // microbatches // self._workers_per_mesh

    @attributed_to(Reason.DATA_FAILED)
    def microbatch(self, step: int, microbatch: int) -> Rows:
        """This worker's share of a microbatch: its rows are dealt to the workers of a mesh in blocks."""
        first = self._made.order.first_step
        reads = self._loader if self._loader is not None and step >= first else self._made
        rows = self._checked(reads.read(step, microbatch, self._part))
        self._check_shapes(rows, step, microbatch)
        return rows

    @attributed_to(Reason.DATA_FAILED)
    def samples(self, workers: int) -> list[tuple[torch.Tensor, ...]]:
        """The inputs of the first microbatch, as each worker of a mesh of so many has them."""
        first = self._made.order.first_step - 1
        return [
            self._checked(self._made.read(first, 0, Part(worker, workers)))[0] for worker in range(workers)
        ]

    @attributed_to(Reason.DATA_FAILED)
    def checksums(self) -> tuple[str, str]:
        """Of the first samples, whichever of them are this worker's, read twice."""
        return self._first_samples(again=False), self._first_samples(again=True)

    @attributed_to(Reason.DATA_FAILED)
    def position(self, step: int) -> Mapping[str, Any] | None:
        """What a checkpoint keeps of where `step` begins; None where it was not come to."""
        if self._loader is not None and isinstance(self._source, StreamSource):
            return self._loader.place(step)
        return self._source.place(step)

    @attributed_to(Reason.DATA_FAILED)
    def go_to(self, step: int, position: Mapping[str, Any] | None) -> None:
        """Go on at the begin of `step`, of which a checkpoint kept `position`."""
        if self._loader is not None:
            self._loader.go_to(step, position)
        if self._loader is None or isinstance(self._source, IndexedSource):
            self._source.go_to(step, position)

    def reading(self) -> str:
        """Who reads what at the moment, for messages."""
        name = self.data.factory
        return f"data {name}" if self._loader is None else f"data {name}: {self._loader.reading()}"

    def close(self) -> None:
        """End the processes that read."""
        if self._loader is not None:
            self._loader.close()

    @property
    def _source(self) -> IndexedSource | StreamSource:
        return self._made.source

    @property
    def _dataset(self) -> Any:
        return getattr(self._source, "dataset", None)  # a stream has none that is alike for all

    def _first_samples(self, *, again: bool) -> str:
        order, source = self._made.order, self._source
        first, count = order.first_step - 1, min(order.size, _COMPARED)
        if order.data.collate is not None:
            found = [self._made.read(first, 0, Part(0, 1)).rows]
        elif again and isinstance(source, StreamSource):
            found = [self._made.stacked(source.first_samples_again(count)).rows]
        else:
            found = [self._made.stacked(source.rows(first, 0, 0, count)).rows]
        if isinstance(source, IndexedSource) and order.data.collate is None:
            found.append(self._made.stacked([source.example(0, 0)]).rows)
        return checksum(found)

    def _checked(self, read: Read) -> Rows:
        """The rows; ValueError where they have other names than those before."""
        if self._names is not None and read.names != self._names:
            raise ValueError(
                f"a sample of data {self.data.factory!r} has the inputs {', '.join(read.names) or 'by position'}, an "
                f"earlier one {', '.join(self._names) or 'by position'}: return the same fields for every index"
            )
        self._names = read.names
        return read.rows

    def _check_shapes(self, rows: Rows, step: int, microbatch: int) -> None:
        """ValueError where tensors are not like those of the first microbatch, for which the model was traced."""
        if self.sample is None:
            return
        (inputs, target), (first, first_target) = rows, self.sample
        mine_all, first_all = (
            (*one, *all_tensors(wanted)) for one, wanted in ((inputs, target), (first, first_target))
        )
        names = [f"input {name}" for name in self._names or range(len(first))]
        names += ["target"] * (len(first_all) - len(first))
        if len(inputs) != len(first):
            raise ValueError(
                f"a sample of data {self.data.factory!r} in step {step} has {len(inputs)} inputs, one of the first "
                f"microbatch {len(first)}: return equally many for every index"
            )
        for name, mine, other in zip(names, mine_all, first_all, strict=True):
            if mine.shape != other.shape or mine.dtype != other.dtype:
                raise ValueError(
                    f"{name} of data {self.data.factory!r} is {list(mine.shape)} of {mine.dtype} in step {step}, "
                    f"microbatch {microbatch}, and {list(other.shape)} of {other.dtype} in the first, for which the model "
                    "was traced: cut or pad all samples to one shape"
                )

    def _deal(self, microbatches: int) -> None:
        training = self._job.training
        if training.microbatches not in (AUTO, microbatches):
            raise ValueError(
                f"{microbatches} microbatches were planned, but the job says {training.microbatches}"
            )
        self.close()
        dataset = self._dataset if self._made and isinstance(self._source, IndexedSource) else None
        order, own_loss = self._order(microbatches), self._job.loss is None
        self._made = Microbatches(order, own_loss=own_loss, with_inputs=self._with_inputs, dataset=dataset)
        self.sample = None
        if self.data.loader.workers:
            self._loader = self._processes()
        self.sample = self._checked(self._made.read(self._made.order.first_step - 1, 0, self._part))

    def _processes(self) -> LoaderProcesses:
        if isinstance(self._source, StreamSource) and self.data.loader.workers > 1:
            raise FactoryError(
                f"data {self.data.factory!r} is a stream, and data.loader.workers is {self.data.loader.workers}: its "
                "samples come one after the other, so give 1, or return a map-style data set"
            )
        return LoaderProcesses(
            self._made.order,
            own_loss=self._job.loss is None,
            with_inputs=self._with_inputs,
            last=self._last_step(),
            is_stream=isinstance(self._source, StreamSource),
        )

    def _order(self, microbatches: int) -> Order:
        training = self._job.training
        return Order(self.data, training.seed, training.global_batch, microbatches)

    def _last_step(self) -> int:
        return self._job.training.steps
