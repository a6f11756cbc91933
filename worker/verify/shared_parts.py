"""Checks of what the pipeline and its plain model share, so that no comparison of both sees it.

Both weigh microbatches by the job's own count of targets: here the loss of the whole batch stands beside it. Both read
samples from the beginning: here a stream that goes on from a saved place stands beside itself, over the end of an epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from worker.contract.failures import AttemptFailure
from worker.contract.job import Job
from worker.data.checksum import checksum
from worker.data.dataset import SampleOrder, Source, make_source
from worker.data.stream import DataEndedError
from worker.model.parity import Distance
from worker.verify.comparison import DifferenceFound, WorstDistances
from worker.verify.plain import NotComparableError, PlainModel

LIMIT_S = 10.0
"""How long both are read, at most."""
_ENDED = "the end of the data"


@dataclass(frozen=True)
class _Read:
    """The checksums of a step's samples, or the end of the data; the epoch behind it."""

    samples: tuple[str, ...]
    epoch: int | None


def check_batch_loss(plain: PlainModel, step: int, reduction: str, worst: WorstDistances) -> str | None:
    """A note where the loss of the batch of the step just made cannot be compared with those of its microbatches.

    Raises DifferenceFound where these, as training.loss_reduction (`reduction`) weighs them, do not make the former.
    """
    if reduction == "microbatches":
        return None
    try:
        batch = plain.batch_loss(step)
    except NotComparableError as error:
        return f"the loss of a whole batch was not compared with those of its microbatches: {error}"
    worst.add(
        "losses of whole batches",
        Distance(abs(batch.apart - batch.together) / (abs(batch.together) or 1.0), batch.tolerance),
    )
    if batch.is_equal:
        return None
    raise DifferenceFound(
        f"step {step}: the loss of the whole batch is {batch.together:.8g}, and those of its microbatches, weighed by "
        f"training.loss_reduction {reduction}, make {batch.apart:.8g}: the loss is no mean that is weighed so. If it is one "
        "over targets, set loss_reduction to tokens, and give the loss an attribute count_targets(target) that returns what "
        "it divides by; or to microbatches if each shall be a batch of its own"
    )


def check_resumed_stream(
    job: Job, microbatches: int, *, limit_s: float = LIMIT_S, clock: Callable[[], float] = time.monotonic
) -> str | None:
    """A note where the data was not read to the end of the epoch behind a resume; nothing for data with indices.

    What a data set's own state_dict leads to may differ later than at the next sample, which a resume checks. The resume
    is behind the first step; the data is read twice. Raises DifferenceFound with the first sample that is another.
    """
    training = job.training
    order = SampleOrder(job.data, training.seed, training.global_batch, microbatches)
    through, resumed = make_source(order), make_source(order)
    if through.samples is not None:
        return None
    began, steps = clock(), _read_steps(through, order, first=1)
    next(steps)
    place = through.place(2)
    if place is None:  # its first step is its end
        return None
    try:
        resumed.go_to(2, place)
    except AttemptFailure as failure:
        raise DifferenceFound(
            f"data {job.data.factory} cannot go on behind step 1: {failure.message}"
        ) from failure
    pairs = zip(steps, _read_steps(resumed, order, first=2), strict=False)
    for step, (expected, found) in enumerate(pairs, start=2):
        _compare_step(job, step, expected.samples, found.samples)
        if expected.epoch is None or expected.epoch > place["epoch"] + 1:
            return None
        if clock() - began > limit_s:
            return (
                f"data {job.data.factory} was compared with itself behind a resume up to step {step}, in {limit_s:g} s: a "
                "state_dict that leads elsewhere from a later sample on, or in a later epoch, is not noticed"
            )
    return None


def _read_steps(source: Source, order: SampleOrder, first: int) -> Iterator[_Read]:
    step = first
    while True:
        try:
            samples: list[Any] = []
            for microbatch in range(order.microbatches):
                samples += source.rows(step, microbatch, 0, order.size)
            source.end_step(step)
        except DataEndedError:
            yield _Read((_ENDED,), None)
            return
        place = source.place(step + 1)
        yield _Read(tuple(map(checksum, samples)), None if place is None else place["epoch"])
        step += 1


def _compare_step(job: Job, step: int, expected: tuple[str, ...], found: tuple[str, ...]) -> None:
    if expected == found:
        return
    number = next(
        (k for k, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]),
        min(len(expected), len(found)),
    )
    raise DifferenceFound(
        f"data {job.data.factory}, resumed behind step 1 from its saved place, gives another sample {number} of step {step} "
        "than without a resume: its state_dict() and load_state_dict() do not lead to all that followed; have "
        "load_state_dict count for the present epoch only, or leave both out, and a resume passes over the samples"
    )
