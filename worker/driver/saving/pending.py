"""Follows a checkpoint that workers write beside training, from their first byte to its manifest.

Polled between steps, and waited for only where it must be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from worker.actor.saver import BackgroundTask, ShardWriteResult
from worker.contract.failures import AttemptFailure
from worker.contract.reasons import Reason
from worker.driver.gang.gang import Gang
from worker.driver.gang.phases import Phase

_POLL_INTERVAL_S = 0.02


@dataclass(frozen=True)
class CheckpointOutcome:
    """The end of a pending checkpoint: the slowest worker's seconds of writing, and the error where it failed."""

    write_s: float
    error: str | None = None


class PendingCheckpoint:
    """The checkpoint after `step`, which the workers have begun to write.

    `commit` gets the results of all, and writes its manifest, on a thread of its own. Workers have to end within `limit_s`
    of now, and the manifest may take as long behind them.
    """

    def __init__(
        self,
        step: int,
        *,
        gang: Gang,
        commit: Callable[[Sequence[ShardWriteResult]], None],
        limit_s: float,
    ):
        self.step = step
        self._description = f"the checkpoint after step {step}"
        self._gang, self._commit = gang, commit
        self._limit_s, self._deadline = limit_s, time.monotonic() + limit_s
        # the pending answers of all workers, by the step behind which they come
        self._polls: dict[int, list[Any]] = {}
        self._results: list[ShardWriteResult] | None = None
        self._committing: BackgroundTask[None] | None = None
        self._waiting: Sequence[int] = ()  # workers that still write, as far as is known

    def poll_behind(self, step: int) -> None:
        """Ask the workers how far they are once they have ended `step`, which they were asked for before."""
        if self._results is None:
            self._polls[step] = self._gang.ask("saved")

    def outcome_after(self, step: int) -> CheckpointOutcome | None:
        """Its end, as far as is known after `step`; None while it is pending. Raises AttemptFailure where a worker is
        gone, or it took too long."""
        refs = self._polls.pop(step, None)
        if refs is not None and self._results is None:
            self._take_answers(self._answers(refs))
        return self._outcome()

    def wait_until_written(self) -> CheckpointOutcome:
        """Wait until it has ended; AttemptFailure as above. The workers run no step meanwhile."""
        while (outcome := self._outcome()) is None:
            if self._results is None:
                self._take_answers(self._answers(self._gang.ask("saved")))
            self._gang.raise_if_interrupted(Phase.CHECKPOINT)
            time.sleep(_POLL_INTERVAL_S)
        return outcome

    def _answers(self, refs: list[Any]) -> list[ShardWriteResult | None]:
        return self._gang.wait(refs, phase=Phase.CHECKPOINT, what=self._description)

    def _take_answers(self, answers: Sequence[ShardWriteResult | None]) -> None:
        """Write the manifest as soon as every worker has written and summed what is its."""
        self._waiting = [index for index, result in enumerate(answers) if result is None]
        if self._waiting:
            return
        self._results = list(answers)
        self._polls.clear()
        if not any(result.error for result in self._results):
            results = self._results
            self._deadline = time.monotonic() + self._limit_s
            self._committing = BackgroundTask(lambda: self._commit(results), "slotline-manifest")

    def _outcome(self) -> CheckpointOutcome | None:
        if self._results is None:
            self._check_deadline(lambda: ", ".join(self._gang.name(index) for index in self._waiting))
            return None
        if errors := [result.error for result in self._results if result.error]:
            return CheckpointOutcome(self._write_s(), "; ".join(errors))
        if not self._committing.done:
            self._check_deadline(lambda: "the manifest, which this driver writes")
            return None
        try:
            self._committing.result(0.0)
        except Exception as error:
            return CheckpointOutcome(self._write_s(), f"its manifest: {type(error).__name__}: {error}")
        return CheckpointOutcome(self._write_s())

    def _write_s(self) -> float:
        return max(result.write_s for result in self._results)

    def _check_deadline(self, writers: Callable[[], str]) -> None:
        if time.monotonic() > self._deadline:
            who = writers() or "any worker"
            raise AttemptFailure(
                Reason.CHECKPOINT_FAILED,
                f"{self._description} is still being written after {self._limit_s:.0f} s, by {who}: is the "
                "storage stuck, or too slow for so large a state?",
            )
