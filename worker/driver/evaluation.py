"""The evaluations of an attempt, as the driver sees them: when, one call of all workers a batch, and what they found.

Workers train nothing meanwhile: the step behind an evaluation is asked for when it is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from worker.data.evaluation import EvaluationSize
from worker.driver.best import Best, Course
from worker.driver.control_plane import ControlPlane, Refused
from worker.driver.evaluation_plan import SharedMesh, evaluation_programs, evaluation_spec
from worker.driver.gang import Gang
from worker.driver.limits import Limits
from worker.driver.metric_values import Evaluated, combined
from worker.driver.metrics import JobMetrics
from worker.driver.planning import PlannedJob
from worker.driver.report import Reporter
from worker.evaluation import EvaluationProgram
from worker.failure import AttemptFailure
from worker.job import Evaluation
from worker.reasons import Reason


def plan_evaluation(
    policy: Evaluation | None,
    planned: PlannedJob,
    *,
    shares: Sequence[SharedMesh] = (),
    gang: Gang,
    control: ControlPlane,
    limits: Limits,
    interrupted: Callable[[], None],
) -> Mapping[str, EvaluationProgram]:
    """The programs of an evaluation by mesh; none without `policy`. AttemptFailure PLAN_INFEASIBLE."""
    if policy is None:
        return {}
    (edges,) = gang.call(
        [gang.workers[0].evaluation_edges.remote(planned.begins)],
        what="cutting the evaluated model",
        limit_s=limits.prepare_s,
        timeout_reason=Reason.START_TIMEOUT,
        interrupted=interrupted,
    )
    try:
        plan = control.plan_forwards(evaluation_spec(planned, edges, shares))
    except Refused as refused:
        if refused.final:
            raise
        raise AttemptFailure(Reason.PLAN_INFEASIBLE, f"evaluation: {refused.detail}") from None
    return evaluation_programs(planned, plan)


class Evaluations:
    """The evaluations of one attempt. `policy` is the job's, None for none; `course` is what checkpoints keep."""

    def __init__(
        self,
        policy: Evaluation | None,
        *,
        gang: Gang,
        reporter: Reporter,
        metrics: JobMetrics,
        limits: Limits,
        step_s: float,
        interrupted: Callable[[], None],
        course: Course | None = None,
    ):
        self._policy = policy
        self._gang, self._reporter, self._metrics = gang, reporter, metrics
        self._limit_s = limits.step_s(step_s)
        self._interrupted = interrupted
        self._size: EvaluationSize | None = None
        self.course = course or Course()

    def before(self, first: int) -> None:
        """Evaluate before step 1, where the job wants that; an attempt that goes on behind it did."""
        if self._policy is not None and self._policy.at_start and first == 1:
            self._evaluate(self._policy, 0)

    def due(self, step: int, *, last: bool) -> bool:
        """Whether `after` of this step evaluates."""
        return self._policy is not None and (step % self._policy.every_steps == 0 or last)

    def after(self, step: int, *, last: bool) -> None:
        """Evaluate when it is time to."""
        if self.due(step, last=last):
            self._evaluate(self._policy, step)

    @property
    def best(self) -> Best | None:
        """Whose checkpoint is to be kept for being the best so far, where the job wants that."""
        policy, course = self._policy, self.course
        if policy is None or not policy.keep_best or course.best_step is None:
            return None
        return Best(course.best_step, policy.metric, course.best_value)

    @property
    def ended(self) -> str | None:
        """Why training ends here, before its last step, if it does."""
        return None if self._policy is None else self.course.ends(self._policy)

    def _evaluate(self, policy: Evaluation, step: int) -> None:
        began_at, began = time.time(), time.monotonic()
        size = self._first_size(policy)
        found = self._run(size, step)
        value = found.value(policy.metric)
        if value is None:
            raise AttemptFailure(
                Reason.USER_CODE_RAISED,
                f"evaluation.metric is {policy.metric!r}, and the loss returned "
                f"{', '.join(sorted(found.metrics)) or 'no metrics'}: return it, or name another",
            )
        self.course = self.course.after(step, value, policy)
        report = {
            "step": step,
            "loss": found.loss,
            "metrics": found.metrics,
            "samples": size.samples,
            "evaluation_s": time.monotonic() - began,
            "started_at": began_at,
        }
        self._reporter.evaluation(report)
        self._metrics.observe_evaluation(report)

    def _run(self, size: EvaluationSize, step: int) -> Evaluated:
        """One batch is asked for while the one before it runs, as with steps."""
        results: list[Any] = []
        asked = self._ask(0)
        for batch in range(size.batches):
            following = self._ask(batch + 1) if batch + 1 < size.batches else []
            results += self._call(asked, f"evaluation after step {step}, batch {batch + 1} of {size.batches}")
            asked = following
        return combined(results)

    def _ask(self, batch: int) -> list[ray.ObjectRef]:
        return [worker.evaluate.remote(batch) for worker in self._gang.workers]

    def _first_size(self, policy: Evaluation) -> EvaluationSize:
        if self._size is None:
            self._size = self._call([self._gang.workers[0].evaluation_size.remote()], "evaluation: its size")[
                0
            ]
            if self._size.left_out:
                self._reporter.event(
                    "evaluation",
                    f"{self._size.samples} samples of {policy.data.factory} are evaluated; {self._size.left_out} behind "
                    "the last whole microbatch are left out",
                )
        return self._size

    def _call(self, refs: list[ray.ObjectRef], what: str) -> list[Any]:
        return self._gang.call(refs, what=what, limit_s=self._limit_s, interrupted=self._interrupted)
