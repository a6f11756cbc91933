"""Whether the data goes on: asked of the workers before each step, where a job ends with its data (data.at_end: stop).

Only workers that read can tell, and all of them must tell the same: they read the same samples.
"""

from __future__ import annotations

from collections.abc import Callable

from worker.driver.gang import Gang
from worker.failure import AttemptFailure
from worker.job import Job
from worker.reasons import Reason


class DataEnd:
    """`reached(step)` says why there is no such step, or None. Where data begins again nobody is asked."""

    def __init__(self, job: Job, *, gang: Gang, limit_s: float, interrupted: Callable[[], None]):
        self.asked = job.data.at_end == "stop"
        self._job, self._gang = job, gang
        self._limit_s, self._interrupted = limit_s, interrupted

    def reached(self, step: int) -> str | None:
        """Raises AttemptFailure DATA_FAILED where reading failed, or where workers see different ends."""
        if not self.asked or step > self._job.training.steps:
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
