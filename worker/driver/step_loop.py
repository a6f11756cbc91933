"""The training itself, as the driver sees it: one call of all workers a step, then what they measured."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import ray

from worker.driver.gang import Gang, failure_of
from worker.driver.limits import Limits
from worker.driver.metrics import JobMetrics
from worker.driver.planning import PlannedJob
from worker.driver.report import Reporter
from worker.driver.saving import Checkpoints
from worker.driver.step_record import StepRecord, record_step
from worker.driver.timing import ClockOffset, estimate_offset
from worker.node import own_node_address

CLOCK_ROUNDS = 9
CLOCK_EVERY_S = 30.0
CLOCK_LIMIT_S = 30.0
TIMELINE_EVERY_S = 1.0


def run_steps(
    first: int,
    last: int,
    *,
    planned: PlannedJob,
    gang: Gang,
    reporter: Reporter,
    metrics: JobMetrics,
    checkpoints: Checkpoints,
    limits: Limits,
    interrupted: Callable[[], None],
) -> None:
    """Run the steps `first` to `last`, report each and save when it is time to.

    `interrupted` is called before each step and within, and may raise. Raises AttemptFailure.
    """
    step_limit_s = limits.step_s(planned.step_s)
    clocks = _Clocks(gang)
    next_timeline, skipped = 0.0, False
    for step in range(first, last + 1):
        interrupted()
        clocks.refresh()
        started_at, started = time.time(), time.monotonic()
        results = gang.call(
            [worker.run_step.remote(step) for worker in gang.workers],
            what=f"step {step}",
            limit_s=step_limit_s,
            interrupted=interrupted,
        )
        record = record_step(
            step=step,
            meshes=[mesh.name for mesh in gang.meshes],
            stage_names=planned.stage_names,
            results=results,
            offsets=clocks.offsets,
            step_s=time.monotonic() - started,
            clock=(started_at, started),
        )
        keep_timeline = step in (first, last) or time.monotonic() >= next_timeline
        if keep_timeline:
            next_timeline = time.monotonic() + TIMELINE_EVERY_S
        _publish(record, reporter, metrics, keep_timeline)
        before, skipped = skipped, any(result["skipped"] for result in results)
        if skipped and not before:
            reporter.event(
                "step_skipped", f"step {step}: a loss or the gradient norm is not finite; no update"
            )
        checkpoints.after(step, last=step == last)


def _publish(record: StepRecord, reporter: Reporter, metrics: JobMetrics, keep_timeline: bool) -> None:
    reporter.step(record.report)
    metrics.observe_step(record.report)
    if keep_timeline:
        reporter.timeline(record.timeline)
        metrics.set_timeline(record.timeline)


class _Clocks:
    """Each worker's clock against the driver's, measured again now and then."""

    def __init__(self, gang: Gang):
        self._gang = gang
        self._due = 0.0
        self.offsets: list[ClockOffset] = []

    def refresh(self) -> None:
        if time.monotonic() < self._due:
            return
        own_node = own_node_address()
        self.offsets = [
            ClockOffset(0.0, 0.0)
            if address.node == own_node  # one host, one monotonic clock
            else estimate_offset(functools.partial(self._ask, index), rounds=CLOCK_ROUNDS)
            for index, address in enumerate(self._gang.addresses)
        ]
        self._due = time.monotonic() + CLOCK_EVERY_S

    def _ask(self, index: int) -> float:
        try:
            return ray.get(self._gang.workers[index].clock.remote(), timeout=CLOCK_LIMIT_S)
        except Exception as error:
            raise failure_of(error, self._gang.name(index), "reading the clock") from None
