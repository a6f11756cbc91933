"""When an attempt's workers save and from which checkpoint they go on: the driver's side of checkpoints.

What a checkpoint is stands in worker/checkpoint.py; how the workers are called in gang.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from worker import checkpoint
from worker.driver.best import Course
from worker.driver.evaluation import Evaluations
from worker.driver.gang import Gang
from worker.driver.report import Reporter
from worker.failure import AttemptFailure, attributed_to
from worker.job import CheckpointPolicy
from worker.reasons import Reason

log = logging.getLogger(__name__)

_COURSE = "evaluation"  # its name in a manifest


class Checkpoints:
    """The checkpoints of one job. `policy` is the job's, None for none; `interrupted` is that of `Gang.call`; with
    `keeps_best` the best one by the job's evaluations stays too; `timed` is told how many seconds each save and
    restore took."""

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

    def after(self, step: int, *, last: bool, evaluations: Evaluations | None = None) -> None:
        """Save when it is time to, or when the evaluation after this step is the best so far; the workers run nothing
        meanwhile."""
        if self._saves(step, last, evaluations):
            self._save(self._policy, step, evaluations)

    def save(self, step: int, evaluations: Evaluations | None = None) -> bool:
        """Save after this step unless `after` has; False where the job saves nothing."""
        if self._policy is not None and not self._saves(step, False, evaluations):
            self._save(self._policy, step, evaluations)
        return self._policy is not None

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

    def _save(self, policy: CheckpointPolicy, step: int, evaluations: Evaluations | None) -> None:
        best, course = (None, None) if evaluations is None else (evaluations.best, evaluations.course)
        uri = checkpoint.step_uri(policy.uri, self._job_id, step)
        began = time.monotonic()
        written = self._call(lambda w: w.save.remote(uri, step), f"checkpoint after step {step}")
        shards = [mesh.name for mesh in self._gang.meshes]
        shards += [name for names in written for name in names or ()]
        with attributed_to(Reason.CHECKPOINT_FAILED):
            checkpoint.finish(
                uri,
                step=step,
                shards=shards,
                keep=policy.keep,
                keep_also=best and best.step,
                notes={} if course is None else {_COURSE: course.to_json()},
            )
        self._timed("save", time.monotonic() - began)
        self._reporter.checkpoint(step, uri)
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
