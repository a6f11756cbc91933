"""When an attempt's workers save and from which checkpoint they go on: the driver's side of checkpoints.

What a checkpoint is stands in worker/checkpoint.py; how the workers are called in gang.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from worker import checkpoint
from worker.checkpoint_files import SaveSeconds, stored_bytes
from worker.driver.best import Best, Course
from worker.driver.evaluation import Evaluations
from worker.driver.flight import Flight, Landed
from worker.driver.gang import Gang
from worker.driver.report import Reporter
from worker.failure import AttemptFailure, attributed_to
from worker.job import CheckpointPolicy
from worker.reasons import Reason

log = logging.getLogger(__name__)

_COURSE = "evaluation"  # its name in a manifest
# So many checkpoints in a row that could not be written beside training end the attempt: the place can never be.
_MOST_FAILURES = 3


@dataclass(frozen=True)
class _Save:
    """A checkpoint to be made, and where evaluations stood after its step."""

    step: int
    uri: str
    best: Best | None
    course: Course | None


class Checkpoints:
    """The checkpoints of one job. `policy` is the job's, None for none; `interrupted` is that of `Gang.call`; with
    `keeps_best` the best one by the job's evaluations stays too; `timed` is told how many seconds each save and
    restore took, and of a save for how many training stood still ("block") and the slowest worker wrote ("write").

    After `write_beside_training` the workers only copy their states while training waits. One checkpoint is on its way
    at a time; one that cannot be written is told, and the next one tried when it is due."""

    def __init__(
        self,
        policy: CheckpointPolicy | None,
        job_id: str,
        *,
        gang: Gang,
        reporter: Reporter,
        limit_s: float,
        interrupted: Callable[[], None],
        timed: Callable[[str, float], None] = lambda operation, seconds: None,
        keeps_best: bool = False,
    ):
        self._timed = timed
        self._policy = policy
        self._job_id = job_id
        self._gang = gang
        self._reporter = reporter
        self._limit_s = limit_s
        self._interrupted = interrupted
        self._keeps_best = keeps_best
        self.course = Course()  # of the evaluations, as the checkpoint has it from which the attempt goes on
        self._beside = False
        self._flight: Flight | None = None
        self._flying: tuple[_Save, float, float] | None = (
            None  # since when, and how long training stood still
        )
        self._saved_step: int | None = None
        self._failures = 0
        self._stored_bytes: int | None = None

    def write_beside_training(self) -> None:
        """From now on training goes on while checkpoints are written, but for the last."""
        self._beside = True

    def try_place(self) -> None:
        """Have every worker write a file where checkpoints will go; AttemptFailure CHECKPOINT_UNWRITABLE."""
        if self._policy:
            uri = self._policy.uri
            self._call(lambda w: w.try_checkpoints.remote(uri), f"trying to write to {uri}")

    def restore(self, reported: str | None) -> int:
        """Load the newest checkpoint that can be read; the step after which it was taken, 0 without any.

        `reported` is the one that the control plane knows: there may be a newer one, which an attempt finished
        but never reported. One that is damaged is passed over with an event. Raises AttemptFailure
        CHECKPOINT_FAILED when `reported` or what is there cannot be read and nothing older can.
        """
        candidates = self._complete()
        if reported and reported not in candidates:
            candidates.append(reported)
        for position, uri in enumerate(candidates):
            began = time.monotonic()
            try:
                step = self._call(lambda w, uri=uri: w.restore.remote(uri), f"restoring {uri}")[0]
                self.course = self._course_of(uri)
                self._timed("restore", time.monotonic() - began)
                self._reporter.event("resumed", f"resumed after step {step} from checkpoint {uri}")
                return step
            except AttemptFailure as failure:
                older = candidates[position + 1 :]
                if failure.reason != Reason.CHECKPOINT_FAILED or not older:
                    raise
                log.warning("%s cannot be restored: %s", uri, failure.message)
                self._reporter.event("checkpoint", f"{failure.message}; trying {older[0]}")
        return 0

    def ask_behind(self, step: int) -> None:
        """The workers were asked for `step`: have them say behind it how far a checkpoint on its way is."""
        if self._flight is not None:
            self._flight.ask_behind(step)

    def after(self, step: int, *, last: bool, evaluations: Evaluations | None = None) -> None:
        """Save when it is time to, or when the evaluation after this step is the best so far; the workers run nothing
        meanwhile. After the last step all is saved when this returns."""
        if self._flight is not None and (landed := self._flight.landed_after(step)) is not None:
            self._take_in(landed)
        if not self._saves(step, last, evaluations):
            return
        save = self._made(step, evaluations)
        if self._beside and not last:
            self._begin(save)
        else:
            self._end_flight()
            self._save(save)

    def save(self, step: int, evaluations: Evaluations | None = None) -> bool:
        """Have the state after this step saved when this returns; False where the job saves nothing."""
        if self._policy is None:
            return False
        self._end_flight()
        if self._saved_step != step:  # it was not due, or could not be written
            self._save(self._made(step, evaluations))
        return True

    def _saves(self, step: int, last: bool, evaluations: Evaluations | None) -> bool:
        best = None if evaluations is None else evaluations.best
        return self.due(step, last=last) or (
            self._policy is not None and best is not None and best.step == step
        )

    def due(self, step: int, *, last: bool) -> bool:
        """Whether `after` of this step saves."""
        return self._policy is not None and (step % self._policy.every_steps == 0 or last)

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def _complete(self) -> list[str]:
        return checkpoint.complete(self._policy.uri, self._job_id) if self._policy else []

    def _course_of(self, uri: str) -> Course:
        """Where evaluations stood; without the best one where its checkpoint is gone: the next is the best then."""
        with attributed_to(Reason.CHECKPOINT_FAILED):
            noted = checkpoint.noted(uri).get(_COURSE)
        course = Course.from_json(noted) if noted else Course()
        if course.best_step is None or not self._keeps_best or uri == self._uri(course.best_step):
            return course
        return course if self._uri(course.best_step) in self._complete() else Course()

    def _uri(self, step: int) -> str:
        return checkpoint.step_uri(self._policy.uri, self._job_id, step) if self._policy else ""

    def _made(self, step: int, evaluations: Evaluations | None) -> _Save:
        best, course = (None, None) if evaluations is None else (evaluations.best, evaluations.course)
        return _Save(step, self._uri(step), best, course)

    def _save(self, save: _Save) -> None:
        """Save while training waits. Raises AttemptFailure CHECKPOINT_FAILED."""
        began = time.monotonic()
        written = self._call(
            lambda w: w.save.remote(save.uri, save.step), f"checkpoint after step {save.step}"
        )
        seconds = time.monotonic() - began
        with attributed_to(Reason.CHECKPOINT_FAILED):
            self._commit(
                save, [name for names in written for name in names or ()], SaveSeconds(seconds, seconds)
            )
        whole_s = time.monotonic() - began
        self._told(save, whole_s, block_s=whole_s, write_s=seconds)

    def _begin(self, save: _Save) -> None:
        """Have every worker copy its state, and write the copy while training goes on."""
        began = time.monotonic()
        self._end_flight()
        try:
            self._call(
                lambda w: w.begin_save.remote(save.uri, save.step),
                f"copying the state after step {save.step} for a checkpoint",
            )
        except AttemptFailure as failure:
            if failure.reason is not Reason.CHECKPOINT_FAILED:
                raise
            self._beside = False
            self._reporter.event(
                "checkpoint", f"{failure.message}; from now on training waits while checkpoints are written"
            )
            self._save(save)
            return
        block_s = time.monotonic() - began
        self._flying = save, began, block_s
        self._flight = Flight(
            save.step,
            gang=self._gang,
            commit=lambda shards, write_s: self._commit(save, shards, SaveSeconds(block_s, write_s)),
            limit_s=self._limit_s,
            interrupted=self._interrupted,
        )

    def _end_flight(self) -> None:
        """Wait for the checkpoint on its way, if there is one."""
        if self._flight is not None:
            self._take_in(self._flight.landed())

    def _take_in(self, landed: Landed) -> None:
        """The checkpoint on its way is there, or could not be written."""
        (save, began, block_s), self._flying, self._flight = self._flying, None, None
        if landed.error is None:
            self._told(save, time.monotonic() - began, block_s=block_s, write_s=landed.write_s)
            return
        self._failures += 1
        told = f"the checkpoint after step {save.step} could not be written: {landed.error}"
        if self._failures >= _MOST_FAILURES:
            raise AttemptFailure(
                Reason.CHECKPOINT_FAILED, f"{told}; nor could the {self._failures - 1} before it"
            )
        log.warning("%s", told)
        self._reporter.event("checkpoint", f"{told}; training goes on, and the next one is tried")

    def _commit(self, save: _Save, others: Sequence[str], seconds: SaveSeconds) -> None:
        """Make what all workers wrote a checkpoint. On any thread."""
        checkpoint.finish(
            save.uri,
            step=save.step,
            shards=[*(mesh.name for mesh in self._gang.meshes), *others],
            keep=self._policy.keep,
            keep_also=save.best and save.best.step,
            keep_every=self._policy.keep_every,
            notes={} if save.course is None else {_COURSE: save.course.to_json()},
            seconds=seconds,
        )
        self._stored_bytes = stored_bytes(self._policy.uri, self._job_id)

    def _told(self, save: _Save, seconds: float, *, block_s: float, write_s: float) -> None:
        self._failures, self._saved_step = 0, save.step
        for operation, took_s in (("save", seconds), ("block", block_s), ("write", write_s)):
            self._timed(operation, took_s)
        step, uri, best = save.step, save.uri, save.best
        self._reporter.checkpoint(step, uri, self._stored_bytes)
        if best is not None and best.step == step:
            self._reporter.best_checkpoint(
                {"step": step, "uri": uri, "metric": best.metric, "value": best.value}
            )
            self._reporter.event(
                "best_checkpoint", f"{best.metric} {best.value:.6g} after step {step}: {uri}"
            )
        self._reporter.event("checkpoint", f"after step {step}: {uri}")

    def _call(self, method: Callable[[Any], Any], what: str) -> list[Any]:
        refs = [method(worker) for worker in self._gang.workers]
        return self._gang.call(refs, what=what, limit_s=self._limit_s, interrupted=self._interrupted)
