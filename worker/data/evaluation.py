"""The job's evaluation data, dealt to one worker: in its own order, once, in whole microbatches of the trained shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

from worker.batches import Batches, Rows
from worker.data.source import Order
from worker.failure import attributed_to
from worker.job import Job
from worker.reasons import Reason


@dataclass(frozen=True)
class EvaluationSize:
    """Runs of the program for one evaluation, the samples that count, and those behind the last whole microbatch."""

    batches: int
    samples: int
    left_out: int


class EvaluationBatches(Batches):
    """As Batches: batch k has the samples from k * training.global_batch on, in order.

    What is left behind the last whole microbatch is left out: traced stages take no smaller one.
    """

    def __init__(self, job: Job, *, worker: int, workers_per_mesh: int, microbatches: int):
        self._limit = job.evaluation.steps
        training = replace(job, data=job.evaluation.data)
        super().__init__(
            training, worker=worker, workers_per_mesh=workers_per_mesh, microbatches=microbatches
        )

    @property
    def whole(self) -> int:
        """How many microbatches are evaluated."""
        wanted = None if self._limit is None else self._limit * self.microbatches
        if self._source.samples is None:
            return wanted
        whole = self._source.samples // self._samples_of_a_microbatch
        return whole if wanted is None else min(whole, wanted)

    @property
    def size(self) -> EvaluationSize:
        done = self.whole * self._samples_of_a_microbatch
        wanted = done if self._source.samples is None else self._source.samples
        if self._limit is not None:
            wanted = min(wanted, self._limit * self._job.training.global_batch)
        batches = -(-self.whole // self.microbatches)  # microbatches of the last one may count for nothing
        return EvaluationSize(batches, done, wanted - done)

    @attributed_to(Reason.DATA_FAILED)
    def check_like(self, trained: Batches) -> None:
        """ValueError where samples are others than those that the model was traced for."""
        for what, mine, theirs in (
            ("inputs", self.keywords or "by position", trained.keywords or "by position"),
            ("shapes", _shapes(self.sample), _shapes(trained.sample)),
        ):
            if mine != theirs:
                raise ValueError(
                    f"a microbatch of evaluation.data {self._job.data.factory!r} has the {what} {mine}, one of the "
                    f"training data {theirs}: give both the same"
                )

    @property
    def _samples_of_a_microbatch(self) -> int:
        """Over all workers."""
        return self._job.training.global_batch // self.microbatches

    def counted(self, batch: int) -> int:
        """How many of a batch's microbatches count."""
        return min(self.microbatches, self.whole - batch * self.microbatches)

    def _deal(self, microbatches: int) -> None:
        super()._deal(microbatches)
        samples, size = self._source.samples, self._samples_of_a_microbatch
        if samples is None and self._limit is None:
            raise ValueError(
                f"evaluation.data {self._job.data.factory!r} is a stream, of which nobody knows the end: give "
                "evaluation.steps, the batches that are evaluated"
            )
        if samples is not None and samples < size:
            raise ValueError(
                f"evaluation.data {self._job.data.factory!r} has {samples} samples, a microbatch {size}: give it at least "
                "as many, or train with more microbatches"
            )

    def _order(self, microbatches: int) -> Order:
        return replace(super()._order(microbatches), first_step=0, once=True)

    def _last_step(self) -> int:
        return self.size.batches - 1


def _shapes(rows: Rows) -> str:
    inputs, _ = rows
    return ", ".join(f"{list(tensor.shape)} {tensor.dtype}" for tensor in inputs)
