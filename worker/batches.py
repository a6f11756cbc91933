"""The job's data, dealt to one worker: its rows of every microbatch.

Knows the data set and how it is dealt; no model, no stages. What goes wrong with the data is the user's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from worker.data.sampler import BatchSampler, collate, input_names, read_sample
from worker.failure import attributed_to
from worker.job import AUTO, Job
from worker.job_loss import takes_inputs
from worker.model import call_factory
from worker.model.errors import FactoryError
from worker.nests import Target
from worker.reasons import Reason
from worker.seeding import seeded
from worker.turns import GENERATORS

_WHOLE_NUMBERS = (torch.int64, torch.int32)
Rows = tuple[tuple[torch.Tensor, ...], Target]


class Batches:
    """What worker `worker` of a mesh computes on; the batch is dealt in `microbatches` until `deal` says another."""

    @attributed_to(Reason.DATA_FAILED)
    def __init__(self, job: Job, *, worker: int, workers_per_mesh: int, microbatches: int):
        self._job, self._worker, self._workers_per_mesh = job, worker, workers_per_mesh
        with seeded(job.training.seed):
            self._dataset = call_factory(job.data.factory, job.data.args)
        for method, means in (
            ("__len__", "how many samples it has"),
            ("__getitem__", "a sample by its index"),
        ):
            if not hasattr(self._dataset, method):
                raise FactoryError(
                    f"data {job.data.factory!r} returned {type(self._dataset).__name__}, which cannot tell {means} "
                    f"({method}): return a map-style data set"
                )
        self._names: tuple[str, ...] | None = None
        self._with_inputs = takes_inputs(job.loss)
        self._deal(microbatches)

    @property
    def keywords(self) -> tuple[str, ...]:
        """How the model's inputs are called, in their order; empty where they go by position."""
        return self._names or ()

    @property
    def tokens_per_sample(self) -> int | None:
        """How long the first input of whole numbers is whose samples are rows of them; None where there is none."""
        inputs, _ = self.sample
        lengths = (one.shape[1] for one in inputs if one.ndim == 2 and one.dtype in _WHOLE_NUMBERS)
        return next(lengths, None)

    @property
    def microbatches(self) -> int:
        """In how many microbatches the batch is dealt."""
        return self._sampler.microbatches

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
        return self._share(step, microbatch, self._worker, self._workers_per_mesh)

    @attributed_to(Reason.DATA_FAILED)
    def samples(self, workers: int) -> list[tuple[torch.Tensor, ...]]:
        """The inputs of the first microbatch, as each worker of a mesh of so many has them."""
        return [self._share(0, 0, worker, workers)[0] for worker in range(workers)]

    def _share(self, step: int, microbatch: int, worker: int, workers: int) -> Rows:
        indices = self._sampler.indices(step, microbatch)
        share = len(indices) // workers
        return self._collate([self.example(step, i) for i in indices[worker * share : (worker + 1) * share]])

    def first_row(self) -> Rows:
        """Sample 0, as step 0 draws it."""
        return self._collate([self.example(0, 0)])

    def _collate(self, samples: Sequence[Any]) -> Rows:
        own_loss = self._job.loss is None
        names = input_names(samples[0], own_loss=own_loss)
        if self._names is not None and names != self._names:
            raise ValueError(
                f"a sample of data {self._job.data.factory!r} has the inputs {', '.join(names) or 'by position'}, an "
                f"earlier one {', '.join(self._names) or 'by position'}: return the same fields for every index"
            )
        self._names = names
        return collate(samples, own_loss=own_loss, with_inputs=self._with_inputs)

    def _deal(self, microbatches: int) -> None:
        training = self._job.training
        if training.microbatches not in (AUTO, microbatches):
            raise ValueError(
                f"{microbatches} microbatches were planned, but the job says {training.microbatches}"
            )
        self._sampler = self._make_sampler(microbatches)
        self.sample = self.microbatch(0, 0)

    def _make_sampler(self, microbatches: int) -> BatchSampler:
        training = self._job.training
        return BatchSampler(len(self._dataset), training.global_batch, microbatches, seed=training.seed)

    def example(self, step: int, index: int) -> Any:
        """Sample `index` as step `step` draws it: the only door to the data set."""
        try:
            with GENERATORS:  # this may be the reading thread: see worker/turns.py
                return read_sample(self._dataset, index, seed=self._job.training.seed, step=step)
        except Exception as error:
            what = f"sample {index} of data {self._job.data.factory}"
            raise RuntimeError(f"{what} raised {type(error).__name__}: {error}") from error
