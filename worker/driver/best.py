"""Whether training gets better, by one number of its evaluations: what keeps the best checkpoint and ends a job early.

Pure values, kept in every checkpoint, so that a resume goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from worker.job import Evaluation


@dataclass(frozen=True)
class Best:
    """The step whose checkpoint is kept for being the best by `metric`."""

    step: int
    metric: str
    value: float


@dataclass(frozen=True)
class Course:
    """The best value so far and the step after which it was found (None: none yet), and how many evaluations since
    were no better."""

    best_value: float | None = None
    best_step: int | None = None
    worse: int = 0

    def after(self, step: int, value: float | None, policy: Evaluation) -> Course:
        """With what the evaluation after `step` found; what is no number is no better."""
        if value is not None and math.isfinite(value) and self._better(value, policy):
            return Course(value, step, 0)
        return Course(self.best_value, self.best_step, self.worse + 1)

    def ends(self, policy: Evaluation) -> str | None:
        """Why the job ends here, if it does."""
        if policy.patience is None or self.worse < policy.patience:
            return None
        best = (
            "there was none that is a number"
            if self.best_step is None
            else f"the best was {self.best_value:.6g} after step {self.best_step}"
        )
        return f"evaluation.patience: {policy.metric} was no better in {self.worse} evaluations; {best}"

    def _better(self, value: float, policy: Evaluation) -> bool:
        if self.best_value is None:
            return True
        return value > self.best_value if policy.mode == "max" else value < self.best_value

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Course:
        """Inverse of `to_json`."""
        return cls(data["best_value"], data["best_step"], data["worse"])
