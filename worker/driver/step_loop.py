"""Runs the training steps: calls all workers once a step, records results, evaluates, saves and stops when due.

While a step runs the workers have been asked for the next one, never for more: they begin it at once, and the driver
records the one before meanwhile. Where the state after a step is wanted, or clocks are measured, the next one waits.
With data.at_end: stop every worker that reads is asked before each step whether its data goes on; all must agree.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from worker.actor.device import own_node_address
from worker.contract.failures import AttemptFailure
from worker.contract.job import Job
from worker.contract.logs import bind_process_fields
from worker.contract.planned import PlannedJob
from worker.contract.reasons import Reason
from worker.driver.checkpoints import Checkpoints
from worker.driver.evaluation import Evaluations
from worker.driver.gang import Gang, call_failure
from worker.driver.limits import Limits
from worker.driver.metrics import JobMetrics
from worker.driver.reporter import Reporter, Spans
from worker.driver.step_record import ClockOffset, StepRecord, estimate_clock_offset, record_step
from worker.driver.stopping import save_and_stop


class DataEnd:
    """`reached(step)` says why there is no such step, or None. Where data begins again nobody is asked."""

    def __init__(self, job: Job, *, gang: Gang, limit_s: float, interrupted: Callable[[], None]):
        self.enabled = job.data.at_end == "stop"
        self._job, self._gang = job, gang
        self._limit_s, self._interrupted = limit_s, interrupted

    def end_reason(self, step: int) -> str | None:
        """Raises AttemptFailure DATA_FAILED where reading failed, or where workers see different ends."""
        if not self.enabled or step > self._job.training.steps:
            return None
        found = self._gang.call(
            [worker.has_data.remote(step) for worker in self._gang.workers],
            what=f"reading the samples of step {step}",
            limit_s=self._limit_s,
            interrupted=self._interrupted,
        )
        ends = [at for at, has in enumerate(found) if has is False]
        others = [at for at, has in enumerate(found) if has is True]
        if ends and others:
            raise AttemptFailure(
                Reason.DATA_FAILED,
                f"data {self._job.data.factory!r} ends before step {step} on {self._names(ends)}, and goes on on "
                f"{self._names(others)}: give all workers the same data",
            )
        if not ends:
            return None
        return f"data {self._job.data.factory} ended after step {step - 1} (data.at_end: stop)"

    def _names(self, workers: list[int]) -> str:
        return ", ".join(self._gang.name(at) for at in workers)


CLOCK_ROUNDS = 9
CLOCK_EVERY_S = 30.0
CLOCK_LIMIT_S = 30.0


def run_steps(
    first: int,
    last: int,
    *,
    samples: int,
    planned: PlannedJob,
    gang: Gang,
    reporter: Reporter,
    metrics: JobMetrics,
    checkpoints: Checkpoints,
    limits: Limits,
    interrupted: Callable[[], None],
    stopping: Callable[[], bool] = lambda: False,
    evaluations: Evaluations | None = None,
    data_end: DataEnd | None = None,
    spans: Spans = Spans(None),
) -> str | None:
    """Run the steps `first` to `last`, report each, evaluate and save when it is time to; why it ended before, if so.

    `samples` are those of a step. A step's time is from the end of the one before (or from when it was asked for) to
    its own. `interrupted` is called before each step and within, and may raise. Raises AttemptFailure of the first
    step that failed, and AskedToStop after a checkpoint where `stopping`.
    """
    if evaluations is not None:
        evaluations.before(first)
        if evaluations.ended and first <= last:
            return evaluations.ended
    if data_end is not None and first <= last and (ended_early := data_end.end_reason(first)):
        return ended_early
    asker = _StepCaller(planned, gang, limits, interrupted, checkpoints.poll_behind)
    clocks = _ClockOffsets(gang)
    next_timeline, skipped, ended = 0.0, False, 0.0
    asked: _StepCall | None = None
    for step in range(first, last + 1):
        bind_process_fields(step=step)
        interrupted()
        if asked is None:
            clocks.refresh()
            asked = asker.ask(step)
        # The workers find the next step in their queue when this one ends; whatever must see the state in
        # between, or wants their attention, goes before it.
        alone = step == last or checkpoints.due(step, last=False) or clocks.due() or stopping()
        alone = alone or (evaluations is not None and evaluations.due(step, last=False))
        alone = alone or (data_end is not None and data_end.enabled)
        following = None if alone else asker.ask(step + 1)
        results = asker.results(asked)
        ended, before = time.monotonic(), ended
        record = record_step(
            step=step,
            meshes=[mesh.name for mesh in gang.meshes],
            stage_names=planned.stage_names,
            results=results,
            sizes=[len(mesh.workers) for mesh in gang.meshes],
            offsets=clocks.offsets,
            step_s=ended - max(before, asked.at_s),
            clock=(time.time(), time.monotonic()),
            samples=samples,
        )
        # The first step is cold and the second is not: both are shown, then one now and then, and the last.
        keep_timeline = step in (first, last) or time.monotonic() >= next_timeline
        if keep_timeline and step > first:
            next_timeline = time.monotonic() + limits.profile_every_s
        _publish(record, reporter, metrics, spans, keep_timeline)
        if record.scaling.overflowed:
            reporter.event("loss_scale_lowered", record.scaling.overflow_message(step))
        skipped_before, skipped = skipped, record.scaling.not_finite
        if skipped and not skipped_before:
            reporter.event(
                "step_skipped", f"step {step}: a loss or the gradient norm is not finite; no update"
            )
        if evaluations is not None:
            evaluations.after(step, last=step == last)
        ended_early = evaluations.ended if evaluations is not None else None
        if data_end is not None and step < last:
            ended_early = ended_early or data_end.end_reason(step + 1)
        checkpoints.after(step, last=step == last or ended_early is not None, evaluations=evaluations)
        if ended_early:
            return ended_early if step < last else None
        if step != last and following is None and stopping():
            save_and_stop(step, checkpoints, evaluations)
        asked = following
    return None


@dataclass(frozen=True)
class _StepCall:
    """A step that every worker has been asked for, and since when."""

    step: int
    refs: list[ray.ObjectRef]
    at_s: float


class _StepCaller:
    """Asks all workers for a step, and waits for what they answer. `behind` may ask them for more, behind it."""

    def __init__(
        self,
        planned: PlannedJob,
        gang: Gang,
        limits: Limits,
        interrupted: Callable[[], None],
        behind: Callable[[int], None],
    ):
        self._gang, self._interrupted, self._behind = gang, interrupted, behind
        self._limit_s = limits.step_s(planned.step_s)

    def ask(self, step: int) -> _StepCall:
        refs = [worker.run_step.remote(step) for worker in self._gang.workers]
        self._behind(step)
        return _StepCall(step, refs, time.monotonic())

    def results(self, asked: _StepCall) -> list[Any]:
        return self._gang.call(
            asked.refs, what=f"step {asked.step}", limit_s=self._limit_s, interrupted=self._interrupted
        )


def _publish(
    record: StepRecord, reporter: Reporter, metrics: JobMetrics, spans: Spans, keep_timeline: bool
) -> None:
    reporter.step(record.report)
    metrics.observe_step(record.report, spans.step(record, profiled=keep_timeline))
    metrics.observe_usage(record.usage)
    metrics.observe_scaling(record.scaling)
    if record.gpus:
        metrics.observe_gpus(record.gpus)
    if keep_timeline:
        reporter.timeline(record.timeline)
        metrics.set_timeline(record.timeline)


class _ClockOffsets:
    """Each worker's clock against the driver's, measured again now and then."""

    def __init__(self, gang: Gang):
        self._gang = gang
        self._due = 0.0
        self.offsets: list[ClockOffset] = []

    def due(self) -> bool:
        """Whether it is time to measure; the workers must be idle for that."""
        return time.monotonic() >= self._due

    def refresh(self) -> None:
        if not self.due():
            return
        own_node = own_node_address()
        self.offsets = [
            ClockOffset(0.0, 0.0)
            if address.node == own_node  # one host, one monotonic clock
            else estimate_clock_offset(functools.partial(self._ask, index), rounds=CLOCK_ROUNDS)
            for index, address in enumerate(self._gang.addresses)
        ]
        self._due = time.monotonic() + CLOCK_EVERY_S

    def _ask(self, index: int) -> float:
        try:
            return ray.get(self._gang.workers[index].clock.remote(), timeout=CLOCK_LIMIT_S)
        except Exception as error:
            raise call_failure(error, self._gang.name(index), "reading the clock") from None
