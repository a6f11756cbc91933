"""RunTracking: gives the values of an attempt to the job's trackers, each by its own thread and bounded queue.

Training never waits for a tracker: what does not fit into its queue is dropped and counted. One that raises, or does
not answer, is told once by an event; at the end of the attempt all together have a limit.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from worker.contract.job import TrackerSpec
from worker.contract.planned import PlannedJob
from worker.driver.metrics import ModelFlops
from worker.driver.step_measurement import StepMeasurement
from worker.driver.tracking.trackers import FINISH_LIMIT_S, Tracker, check_importable, make_tracker

MAX_WAITING_STEPS = 10_000
SLOW_AFTER_S = 60.0
_ROWS_AT_ONCE = 100
_MAX_ERROR_CHARS = 1_000
_OMITTED_FIELDS = frozenset({"env", "secrets", "notifications"})
"""Sections of a job that may hold what is not for everybody who sees a run."""

Row = tuple[int, Mapping[str, float]]
Event = Callable[[str, str], None]


def step_values(record: StepMeasurement, flops: ModelFlops | None) -> dict[str, float]:
    """The values of a training step by their usual names, without those that are not known: seconds, bytes, rates."""
    report, usage = record.report, record.usage
    step_s, peaks = report["step_s"], report.get("peak_memory_bytes") or {}
    values = {f"train/{name}": value for name, value in report["metrics"].items()}
    values |= {
        "train/loss": report["loss"],
        "train/grad_norm": report["grad_norm"],
        "train/lr": report["learning_rate"],
        "train/loss_scale": record.scaling.loss_scale,
        "perf/step_s": step_s,
        "memory/peak": max(peaks.values(), default=None),
        **{f"memory/peak_{mesh}": peak for mesh, peak in peaks.items()},
    }
    if step_s > 0:
        values["perf/samples_per_s"] = usage.samples / step_s
        if usage.tokens is not None:
            values["perf/tokens_per_s"] = usage.tokens / step_s
        if flops is not None and flops.peak_per_s:
            values["perf/mfu"] = flops.step / step_s / flops.peak_per_s
    return {name: float(value) for name, value in values.items() if value is not None}


def evaluation_values(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """The values of an evaluation, an `evaluations` item of a report."""
    return {f"eval/{name}": value for name, value in evaluation["metrics"].items()} | {
        "eval/loss": evaluation["loss"]
    }


def run_config(job: Mapping[str, Any], planned: PlannedJob) -> dict[str, Any]:
    """The configuration of a run: the job as it was submitted, and the plan of this attempt."""
    plan = planned.plan
    return {
        "job": {name: value for name, value in job.items() if name not in _OMITTED_FIELDS},
        "plan": {
            "schedule": plan.get("chosen"),
            "stages": len(planned.stage_names),
            "stage_starts": list(planned.stage_starts),
            "mesh_of_stage": planned.mesh_of_stage,
            "microbatches": planned.microbatches,
            "makespan_s": plan["makespan_s"],
            "bubble_ratio": plan.get("bubble_ratio"),
            "step_s": planned.step_s,
        },
    }


class RunTracking:
    """The trackers of one attempt: none, until `prepare` names them. Calls return at once, but for `finish`.

    `event` takes kind and message, from any thread.
    """

    def __init__(
        self,
        event: Event = lambda kind, message: None,
        *,
        max_waiting: int = MAX_WAITING_STEPS,
        slow_after_s: float = SLOW_AFTER_S,
        now: Callable[[], float] = time.monotonic,
    ):
        self._event, self._max_waiting, self._slow_after_s, self._now = event, max_waiting, slow_after_s, now
        self._specs: Sequence[TrackerSpec] = ()
        self._threads: list[_TrackerThread] = []
        self._flops: ModelFlops | None = None
        self.abandoned = False
        """True when a tracker still hangs after `finish`: its library's own exit hooks may hang as well."""

    def prepare(self, specs: Sequence[TrackerSpec]) -> None:
        """Take the trackers of the job; raises AttemptFailure CODE_SETUP_FAILED where a library is missing."""
        for spec in specs:
            check_importable(spec)
        self._specs = specs

    def start(
        self, run_id: str, name: str, config: Mapping[str, Any], flops: ModelFlops | None = None
    ) -> None:
        """Start the run on every tracker, or continue it: `run_id` is one for all attempts of a job."""
        self._flops = flops
        for spec in self._specs:
            thread = _TrackerThread(
                spec,
                self._event,
                max_waiting=self._max_waiting,
                slow_after_s=self._slow_after_s,
                now=self._now,
            )
            thread.start(run_id, name, copy.deepcopy(config))
            self._threads.append(thread)

    def step(self, record: StepMeasurement) -> None:
        """Log a finished training step."""
        if self._threads:
            self._log(record.report["step"], step_values(record, self._flops))

    def evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Log an evaluation, an `evaluations` item of a report."""
        if self._threads:
            self._log(evaluation["step"], evaluation_values(evaluation))

    def finish(self, outcome: str, *, limit_s: float = FINISH_LIMIT_S) -> None:
        """Write what waits and end the run with the attempt's state; returns after `limit_s` in any case."""
        self.abandoned = bool(self._threads)  # also where the wait is interrupted
        deadline = time.monotonic() + limit_s
        for thread in self._threads:
            thread.ask_to_finish(outcome)
        ended = [thread.wait(max(0.0, deadline - time.monotonic())) for thread in self._threads]
        for thread, has_ended in zip(self._threads, ended, strict=True):
            thread.report_losses(None if has_ended else limit_s)
        self.abandoned = not all(ended)

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        for thread in self._threads:
            thread.put((step, dict(values)))


class _TrackerThread:
    """One tracker and the rows that wait for it. One daemon thread makes every call of the tracker."""

    def __init__(
        self,
        spec: TrackerSpec,
        event: Event,
        *,
        max_waiting: int,
        slow_after_s: float,
        now: Callable[[], float],
    ):
        self._spec, self._event, self._now = spec, event, now
        self._max_waiting, self._slow_after_s = max_waiting, slow_after_s
        self._name = spec.to or spec.factory
        self._changed = threading.Condition()
        self._rows: deque[Row] = deque()
        self._outcome: str | None = None
        self._given_up = self._failure_reported = self._slowness_reported = False
        self._lost = self._in_hand = 0
        self._called_at_s: float | None = None
        self._thread: threading.Thread | None = None

    def start(self, run_id: str, name: str, config: Mapping[str, Any]) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(run_id, name, config), name=f"slotline-tracker-{self._name}", daemon=True
        )
        self._thread.start()

    def put(self, row: Row) -> None:
        """Have a row logged; it is lost where too many wait."""
        if self._given_up:
            return
        with self._changed:
            if len(self._rows) < self._max_waiting:
                self._rows.append(row)
                self._changed.notify()
            else:
                self._lost += 1
        called_at_s = self._called_at_s
        if called_at_s is None or self._slowness_reported or self._now() - called_at_s < self._slow_after_s:
            return
        self._slowness_reported = True
        self._report(f"has not answered for {self._slow_after_s:g} s: training goes on, and its values wait")

    def ask_to_finish(self, outcome: str) -> None:
        with self._changed:
            self._outcome = outcome
            self._changed.notify()

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything is written and the run has ended; False when that takes longer."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def report_losses(self, limit_s: float | None) -> None:
        """Report how many rows are not written; `limit_s` is None for a tracker that has ended, else the time it had."""
        with self._changed:
            lost = self._lost + self._in_hand + len(self._rows)
        rows = f"{lost} steps or evaluations are not written"
        if limit_s is not None:
            self._report(f"has not ended within {limit_s:g} s: {rows}")
        elif lost and not self._given_up:
            self._report(rows)

    def _run(self, run_id: str, name: str, config: Mapping[str, Any]) -> None:
        try:
            tracker = self._call(make_tracker, self._spec)
            place = self._call(tracker.start, run_id, name, config)
        except (Exception, SystemExit) as error:
            self._given_up = True
            self._report(f"cannot start: {_error_text(error)}; training goes on without it")
            return
        if isinstance(place, str):
            self._event("tracking", f"{self._name}: {place}")
        while rows := self._take():
            self._write(tracker, rows)
        try:
            self._call(tracker.finish, self._outcome)
        except (Exception, SystemExit) as error:
            self._report(f"cannot end its run: {_error_text(error)}")

    def _take(self) -> list[Row]:
        """The next rows, in order; none when the run is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._outcome is not None)
            self._in_hand = min(len(self._rows), _ROWS_AT_ONCE)
            return [self._rows.popleft() for _ in range(self._in_hand)]

    def _write(self, tracker: Tracker, rows: Sequence[Row]) -> None:
        flush = getattr(tracker, "flush", None)
        for step, values in rows:
            try:
                self._call(tracker.log, step, values)
                if flush is None:
                    self._settle(1)
            except (Exception, SystemExit) as error:
                self._report_failure(step, error)
                self._settle(1, lost=1)
        if flush is not None:
            try:
                self._call(flush)
                self._settle(self._in_hand)
            except (Exception, SystemExit) as error:
                self._report_failure(rows[-1][0], error)
                self._settle(self._in_hand, lost=self._in_hand)

    def _settle(self, rows: int, *, lost: int = 0) -> None:
        """Count rows as no longer in hand, `lost` of them as not written."""
        with self._changed:
            self._in_hand -= rows
            self._lost += lost

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._called_at_s = self._now()
        try:
            return function(*arguments)
        finally:
            self._called_at_s = None

    def _report_failure(self, step: int, error: BaseException) -> None:
        if not self._failure_reported:
            self._failure_reported = True
            self._report(f"failed at step {step}: {_error_text(error)}; training goes on")

    def _report(self, message: str) -> None:
        self._event("tracking_failed", f"{self._name}: {message}")


def _error_text(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]} …"
