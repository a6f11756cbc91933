"""Runs the training steps: calls all workers once a step, records results, evaluates, saves and stops when due.

While a step runs the workers have been asked for the next one, never for more: they begin it at once, and the driver
records the one before meanwhile. Where the state after a step is wanted, clocks are measured, or programs are swapped,
the next one waits.
With data.at_end: stop every worker that reads is asked before each step whether its data goes on; all must agree.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import ray

from worker.actor.step_result import WorkerStep
from worker.benchmark.slowdowns import SlotWatch
from worker.contract.failures import AttemptFailure
from worker.contract.job import SKIP_LIMIT_S, Job
from worker.contract.logs import bind_process_fields
from worker.contract.planned import PlannedJob
from worker.contract.reasons import Reason
from worker.contract.timeline import FIRST_PROFILED_STEPS
from worker.driver.checkpoints import Checkpoints
from worker.driver.evaluation import Evaluations
from worker.driver.gang.gang import Gang, PerWorker
from worker.driver.gang.phases import Phase
from worker.driver.metrics import DriverMetrics, ModelFlops
from worker.driver.planning import Replanner, StepPlan, StepPlans
from worker.driver.reporter import LaunchPhases, Reporter, Spans
from worker.driver.step_measurement import ClockOffset, StepMeasurement, estimate_clock_offset, measure_step
from worker.driver.stopping import GracefulStop, Interruption
from worker.driver.tracking.run_tracking import RunTracking
from worker.machine.node import own_node_address

log = logging.getLogger(__name__)


class StepLoop:
    """The training steps of one attempt.

    `samples` are those of a step. `interruption` asks between steps for a graceful stop; the gang raises what ends the
    attempt at once.
    """

    def __init__(
        self,
        planned: PlannedJob,
        *,
        samples: int,
        gang: Gang,
        checkpoints: Checkpoints,
        evaluations: Evaluations,
        data_end: DataEnd,
        publisher: StepPublisher,
        interruption: Interruption,
        replanner: Replanner | None = None,
        step_plans: StepPlans | None = None,
    ):
        self._planned, self._samples, self._gang = planned, samples, gang
        self._replanner, self._step_plans = replanner, step_plans
        self._checkpoints, self._evaluations, self._data_end = checkpoints, evaluations, data_end
        self._publisher, self._interruption = publisher, interruption
        self._clocks = _ClockOffsets(gang)

    def run(self, first: int, last: int) -> str | None:
        """Run the steps `first` to `last`, report each, evaluate and save when due; why training ended before `last`.

        A step's time is from the end of the one before (or from when it was asked for) to its own. Raises
        AttemptFailure of the first step that failed, Cancelled, and GracefulStop after a checkpoint.
        """
        self._evaluations.before(first)
        if first > last:
            return None
        if stop_reason := self._evaluations.stop_reason or self._data_end.end_reason(first):
            return stop_reason
        call: _StepCall | None = None
        ended_s = 0.0
        for step in range(first, last + 1):
            bind_process_fields(step=step)
            self._gang.raise_if_interrupted(Phase.STEP)
            if call is None:
                self._clocks.refresh()
                call = self._ask(step)
            following = None if step == last or self._next_step_waits(step) else self._ask(step + 1)
            results = self._gang.wait(call.refs, phase=Phase.STEP, what=f"step {step}")
            before_s, ended_s = ended_s, time.monotonic()
            self._checkpoints.take_copies([result.copied for result in results])
            record = self._record(step, results, step_s=ended_s - max(before_s, call.at_s))
            if self._step_plans is not None:
                self._step_plans.ran(call.plan)
            profiled = self._publisher.publish(record, first=step == first, last=step == last)
            if self._step_plans is not None and record.lengths is not None:
                if profiled:
                    self._step_plans.profiled(step)
                self._step_plans.observe(step, record.lengths, steps_left=last - step)
            if self._replanner is not None and step < last:
                self._replanner.observe(record.report, profiled=profiled, steps_left=last - step)
            self._evaluations.after(step, last=step == last)
            stop_reason = self._evaluations.stop_reason
            if step < last:
                stop_reason = stop_reason or self._data_end.end_reason(step + 1)
            self._checkpoints.after(
                step, last=step == last or stop_reason is not None, evaluations=self._evaluations
            )
            if stop_reason:
                return stop_reason if step < last else None
            if step != last and following is None and self._interruption.stop_requested():
                self._save_and_stop(step)
            if step != last and following is None and self._replanner is not None:
                self._replanner.before(step + 1)
            call = following
        return None

    def _next_step_waits(self, step: int) -> bool:
        """True where the workers must be idle after `step`. Else they find the next step in their queue when it ends;
        whatever must see the state in between, or wants their attention, goes before it."""
        return (
            self._checkpoints.due(step, last=False)
            or self._clocks.due()
            or self._interruption.stop_requested()
            or self._evaluations.due(step, last=False)
            or self._data_end.enabled
            or (self._replanner is not None and self._replanner.due)
        )

    def _ask(self, step: int) -> _StepCall:
        copy = self._checkpoints.copy_behind(step - 1, self._evaluations)
        plan = None if self._step_plans is None else self._step_plans.take(step)
        own = (
            ()
            if plan is None
            else [PerWorker(plan.programs[address.mesh] for address in self._gang.addresses)]
        )
        refs = self._gang.ask("run_step", step, *own, **({} if copy is None else {"copy": copy}))
        self._checkpoints.poll_behind(step)
        return _StepCall(refs, time.monotonic(), plan)

    def _record(self, step: int, results: Sequence[WorkerStep], *, step_s: float) -> StepMeasurement:
        return measure_step(
            step=step,
            workers={mesh.name: len(mesh.workers) for mesh in self._gang.meshes},
            stage_names=self._planned.stage_names,
            results=results,
            offsets=self._clocks.offsets,
            step_s=step_s,
            clock=(time.time(), time.monotonic()),
            samples=self._samples,
        )

    def _save_and_stop(self, step: int) -> None:
        """Save the state after this step where the job has a place for it, and raise GracefulStop."""
        if self._checkpoints.save(step, self._evaluations):
            raise GracefulStop(f"asked to end: stopped after step {step}, which is saved")
        raise GracefulStop(
            f"asked to end: stopped after step {step}; the job has no `checkpoint`, so it is lost"
        )


@dataclass(frozen=True)
class _StepCall:
    """The pending results of a step that every worker has been asked for, since when, and the plan of its own by which it
    runs, if it has one."""

    refs: list[ray.ObjectRef]
    at_s: float
    plan: StepPlan | None


LOG_EVERY_S = 5.0


class StepLog:
    """Logs the state of training: the first step, the last, and one every few seconds.

    Rates are of the steps since the line before. `last_step` is the job's, `flops` None where they are not known, `now`
    the clock in seconds.
    """

    def __init__(
        self,
        last_step: int,
        flops: ModelFlops | None = None,
        *,
        every_s: float = LOG_EVERY_S,
        now: Callable[[], float] = time.monotonic,
    ):
        self._last_step, self._flops, self._every_s, self._now = last_step, flops, every_s, now
        self._due_s = 0.0
        self._steps, self._seconds, self._samples, self._tokens = 0, 0.0, 0, 0
        self._padded_tokens = 0

    def observe(self, record: StepMeasurement, *, first: bool, last: bool) -> None:
        """Take a finished step, and log a line where one is due."""
        self._steps += 1
        self._seconds += record.report["step_s"]
        self._samples += record.usage.samples
        self._tokens += record.usage.tokens or 0
        self._padded_tokens += record.lengths.padded_tokens if record.lengths is not None else 0
        if not (first or last or self._now() >= self._due_s):
            return
        log.info("%s", self.line(record, timed=not first))
        self._due_s = self._now() + self._every_s
        self._steps, self._seconds, self._samples, self._tokens = 0, 0.0, 0, 0
        self._padded_tokens = 0

    def line(self, record: StepMeasurement, *, timed: bool = True) -> str:
        """The line of a step; without rates and the time that is left where its own time is not typical (`timed`)."""
        report = record.report
        parts = [f"step {report['step']}/{self._last_step}"]
        for name, value in (
            ("loss", report["loss"]),
            *report["metrics"].items(),
            ("grad_norm", report["grad_norm"]),
            ("lr", report["learning_rate"]),
        ):
            if value is not None:
                parts.append(f"{name} {value:.5g}")
        if self._padded_tokens:
            parts.append(f"padding {1 - self._tokens / self._padded_tokens:.1%}")
        if timed and self._seconds > 0:
            parts.append(f"{self._samples / self._seconds:,.4g} samples/s")
            if self._tokens:
                parts.append(f"{self._tokens / self._seconds:,.0f} tokens/s")
            if self._flops is not None and self._flops.peak_per_s:
                share = self._flops.step * self._steps / self._seconds / self._flops.peak_per_s
                parts.append(f"mfu {100 * share:.1f} %")
            left_s = (self._last_step - report["step"]) * self._seconds / self._steps
            parts.append(f"{timedelta(seconds=round(left_s))} left")
        else:
            parts.append(f"{report['step_s']:.3g} s")
        return "  ".join(parts)


_FIRST_PAUSE_S = 1.0


class ProfiledSteps:
    """Says of which steps the slots are reported: the first six, then one after 1 s, 2 s, 4 s, ... until it is one every
    `every_s` seconds, and the last. `now` is the clock in seconds.

    One that is due is the step after the one that ends then: a long step is more likely to be running at any given time.
    """

    def __init__(self, every_s: float, *, now: Callable[[], float] = time.monotonic):
        self._every_s, self._now = every_s, now
        self._seen = 0
        self._pause_s = min(_FIRST_PAUSE_S, every_s)
        self._due_s = float("inf")
        self._next = True

    def includes_next(self, *, last: bool) -> bool:
        """True if the step that has just ended is profiled; called once for each step."""
        included = self._next or last
        self._seen += 1
        if self._seen == FIRST_PROFILED_STEPS:
            self._due_s = self._now() + self._pause_s
        self._next = self._seen < FIRST_PROFILED_STEPS or self._now() >= self._due_s
        if self._next and self._seen >= FIRST_PROFILED_STEPS:
            self._pause_s = min(2 * self._pause_s, self._every_s)
            self._due_s = self._now() + self._pause_s
        return included


class StepPublisher:
    """Gives finished steps to the control plane, Prometheus, the trace, the log and the job's trackers.

    The timelines of ProfiledSteps are kept.
    """

    def __init__(
        self,
        reporter: Reporter,
        metrics: DriverMetrics,
        *,
        profile_every_s: float,
        spans: Spans | None = None,
        step_log: StepLog,
        tracking: RunTracking | None = None,
        watches: Sequence[SlotWatch] = (),
        launch: LaunchPhases | None = None,
    ):
        self._watches, self._launch = watches, launch
        self._reporter, self._metrics, self._spans = reporter, metrics, spans or Spans(None)
        self._step_log, self._tracking = step_log, tracking or RunTracking()
        self._profiled_steps = ProfiledSteps(profile_every_s)
        self._update_skipped = self._without_targets = self._unequal_targets = False
        self._padding_reported = False

    def publish(self, record: StepMeasurement, *, first: bool, last: bool) -> bool:
        """Report a step, and by events what became of its update and where a forward computed again differs; whether its
        slots are reported."""
        reporter, metrics = self._reporter, self._metrics
        if first and self._launch is not None:
            self._launch.end_phase("first step")
        profiled = self._profiled_steps.includes_next(last=last)
        reporter.step(record.report)
        self._step_log.observe(record, first=first, last=last)
        self._tracking.step(record)
        metrics.observe_step(record.report, self._spans.step(record, profiled=profiled))
        metrics.observe_usage(record.usage)
        metrics.observe_scaling(record.scaling)
        if record.gpus:
            metrics.observe_gpus(record.gpus)
        if profiled:
            reporter.timeline(record.timeline)
            metrics.set_timeline(record.timeline)
            for watch in self._watches:
                watch.observe(record.timeline["slots"], record.lengths.buckets if record.lengths else ())
        self._report_skipped_update(record)
        self._report_missing_targets(record)
        self._report_unequal_targets(record)
        self._report_padding(record)
        for difference in record.differences:
            reporter.event("forward_differs", difference)
        return profiled

    def _report_missing_targets(self, record: StepMeasurement) -> None:
        before, self._without_targets = self._without_targets, record.without_targets
        if record.without_targets and not before:
            self._reporter.event(
                "no_targets",
                f"step {record.report['step']}: no microbatch has a target that counts, its loss is 0 and its gradients are "
                "zeros: look at what the data set returns as target",
            )

    def _report_unequal_targets(self, record: StepMeasurement) -> None:
        fewest, most = record.ignored_targets
        if fewest == most or self._unequal_targets:
            return
        self._unequal_targets = True
        self._reporter.event(
            "unequal_targets",
            f"step {record.report['step']}: {fewest:,} to {most:,} of a worker's targets of a microbatch are ignored, and "
            "training.loss_reduction is mean, by which microbatches weigh alike: if the loss is a mean over the other "
            "targets, the step is not that of the whole batch. Set training.loss_reduction to tokens, or to microbatches "
            "where each shall be a batch of its own; said once",
        )

    def _report_padding(self, record: StepMeasurement) -> None:
        if (lengths := record.lengths) is None or self._padding_reported:
            return
        self._padding_reported = True
        longest = max(bucket.length for bucket in lengths.buckets)
        to_longest = record.usage.samples * longest
        shapes = Counter(map(str, lengths.buckets))
        self._reporter.event(
            "padding",
            f"step {record.report['step']}: {1 - lengths.tokens / lengths.padded_tokens:.1%} of its tokens are padding, "
            f"with microbatches of {', '.join(f'{shape} ({n})' for shape, n in shapes.items())}; all of {longest} long, "
            f"{1 - lengths.tokens / to_longest:.1%} would be. Tokens per second are those of samples; said once",
        )

    def _report_skipped_update(self, record: StepMeasurement) -> None:
        step, scaling = record.report["step"], record.scaling
        if scaling.overflowed:
            self._reporter.event("loss_scale_lowered", scaling.overflow_message(step))
        skipped_before, self._update_skipped = self._update_skipped, scaling.not_finite
        if scaling.not_finite and not skipped_before:
            self._reporter.event(
                "step_skipped", f"step {step}: a loss or the gradient norm is not finite; no update"
            )


class DataEnd:
    """The end of the training data, where the job stops there; where data begins again no worker is asked."""

    def __init__(self, job: Job, *, gang: Gang):
        self.enabled = job.data.at_end == "stop"
        self._job, self._gang = job, gang

    def end_reason(self, step: int) -> str | None:
        """Why there is no such step; None where the data goes on. Raises AttemptFailure DATA_FAILED where reading failed,
        or where workers see different ends."""
        if not self.enabled or step > self._job.training.steps:
            return None
        has_data = self._gang.call(
            "has_data",
            step,
            phase=Phase.STEP,
            what=f"reading the samples of step {step}",
            extra_s=SKIP_LIMIT_S,
        )
        ends = [index for index, has in enumerate(has_data) if has is False]
        others = [index for index, has in enumerate(has_data) if has is True]
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
        return ", ".join(self._gang.name(index) for index in workers)


CLOCK_ROUNDS = 9
CLOCK_EVERY_S = 30.0
CLOCK_LIMIT_S = 30.0


class _ClockOffsets:
    """Each worker's clock against the driver's, measured again now and then."""

    def __init__(self, gang: Gang):
        self._gang = gang
        self._due = 0.0
        self.offsets: list[ClockOffset] = []

    def due(self) -> bool:
        """True when it is time to measure; the workers must be idle for that."""
        return time.monotonic() >= self._due

    def refresh(self) -> None:
        """Measure where that is due."""
        if not self.due():
            return
        own_node = own_node_address()
        self.offsets = [
            ClockOffset(0.0, 0.0)
            if address.node == own_node  # one host, one monotonic clock
            else estimate_clock_offset(functools.partial(self._read, index), rounds=CLOCK_ROUNDS)
            for index, address in enumerate(self._gang.addresses)
        ]
        self._due = time.monotonic() + CLOCK_EVERY_S

    def _read(self, index: int) -> float:
        try:
            return ray.get(self._gang.workers[index].call.remote("clock"), timeout=CLOCK_LIMIT_S)
        except Exception as error:
            raise self._gang.failure(error, index, "reading the clock") from None
