"""A checkpoint on its way: the workers write copies of their states beside training, then its manifest is written.

The driver looks at it between steps and waits for it only where it must. What it becomes is `saving.py`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ray

from worker.background import Task
from worker.driver.gang import Gang
from worker.failure import AttemptFailure
from worker.reasons import Reason
from worker.saving import Saved

_LOOK_S = 0.02


@dataclass(frozen=True)
class Landed:
    """How a checkpoint on its way ended: the slowest worker's seconds of writing, and why it failed, if it did."""

    write_s: float
    error: str | None = None


class Flight:
    """The checkpoint after `step`, which the workers have begun to write.

    `commit(shards, write_s)` makes it one, on a thread of its own: `shards` are those beside the meshes'. Workers have
    to end within `limit_s` of now, and so long the manifest may take behind them.
    """

    def __init__(
        self,
        step: int,
        *,
        gang: Gang,
        commit: Callable[[Sequence[str], float], None],
        limit_s: float,
        interrupted: Callable[[], None],
    ):
        self.step = step
        self._gang, self._commit, self._interrupted = gang, commit, interrupted
        self._limit_s, self._deadline = limit_s, time.monotonic() + limit_s
        self._asked: dict[int, list[ray.ObjectRef]] = {}
        self._saved: list[Saved] | None = None
        self._committing: Task[None] | None = None
        self._waiting: Sequence[int] = ()  # workers that still write, as far as is known

    def ask_behind(self, step: int) -> None:
        """Have the workers say how far they are when they have ended `step`, which they were asked for before."""
        if self._saved is None:
            self._asked[step] = self._ask()

    def landed_after(self, step: int) -> Landed | None:
        """How it has ended, as far as is known after `step`; None while it is on its way. Raises AttemptFailure where
        a worker is gone, or it took too long."""
        refs = self._asked.pop(step, None)
        if refs is not None and self._saved is None:
            self._hear(self._answers(refs))
        return self._landed()

    def landed(self) -> Landed:
        """Wait until it has ended; AttemptFailure as above. The workers run no step meanwhile."""
        while (found := self._landed()) is None:
            if self._saved is None:
                self._hear(self._answers(self._ask()))
            self._interrupted()
            time.sleep(_LOOK_S)
        return found

    def _ask(self) -> list[ray.ObjectRef]:
        return [worker.saved.remote() for worker in self._gang.workers]

    def _answers(self, refs: list[ray.ObjectRef]) -> list[Saved | None]:
        return self._gang.call(refs, what=self._what(), limit_s=self._limit_s, interrupted=self._interrupted)

    def _hear(self, answers: Sequence[Saved | None]) -> None:
        """Write the manifest as soon as every worker has written and summed what is its."""
        self._waiting = [index for index, one in enumerate(answers) if one is None]
        if self._waiting:
            return
        self._saved = list(answers)
        self._asked.clear()
        if not any(one.error for one in self._saved):
            shards = [name for one in self._saved for name in one.shards]
            self._deadline = time.monotonic() + self._limit_s
            self._committing = Task(lambda: self._commit(shards, self._write_s()), "slotline-manifest")

    def _landed(self) -> Landed | None:
        if self._saved is None:
            self._check_time(lambda: ", ".join(self._gang.name(index) for index in self._waiting))
            return None
        if errors := [one.error for one in self._saved if one.error]:
            return Landed(self._write_s(), "; ".join(errors))
        if not self._committing.done:
            self._check_time(lambda: "the manifest, which this driver writes")
            return None
        try:
            self._committing.result(0.0)
        except Exception as error:
            return Landed(self._write_s(), f"its manifest: {type(error).__name__}: {error}")
        return Landed(self._write_s())

    def _write_s(self) -> float:
        return max(one.write_s for one in self._saved)

    def _check_time(self, of: Callable[[], str]) -> None:
        if time.monotonic() > self._deadline:
            who = of() or "any worker"
            raise AttemptFailure(
                Reason.CHECKPOINT_FAILED,
                f"{self._what()} is still being written after {self._limit_s:.0f} s, by {who}: is the storage stuck, or "
                "too slow for so large a state?",
            )

    def _what(self) -> str:
        return f"the checkpoint after step {self.step}"
