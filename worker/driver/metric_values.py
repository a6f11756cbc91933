"""Losses and metrics, from those of microbatches to those of a step or an evaluation. Pure: values in, values out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.failure import AttemptFailure
from worker.reasons import Reason
from worker.step_values import EvaluatedBatch, WorkerStep

LOSS = "loss"


def mean_metrics(results: Sequence[WorkerStep]) -> dict[str, float]:
    """The mean of each metric over microbatches and workers, as the loss is.

    Raises AttemptFailure USER_CODE_RAISED where workers have metrics of different names.
    """
    told = [result.metrics for result in results if result.losses]
    found = {}
    for name in _names(told):
        values = [value for metrics in told for value in metrics[name]]
        found[name] = sum(values) / len(values)
    return found


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation found: NaN where nothing counted."""

    loss: float
    metrics: dict[str, float]

    def value(self, metric: str) -> float | None:
        """Of a metric by name, or of the loss; None where there is no such metric."""
        return self.loss if metric == LOSS else self.metrics.get(metric)


def combined(results: Sequence[EvaluatedBatch]) -> Evaluated:
    """The means over all microbatches of all workers and batches, each counted by its weight. What counts for
    nothing is left out, though it be no number."""
    told = [result for result in results if result.losses]
    weights = [weight for result in told for weight in result.weights]
    total = sum(weights)

    def mean(values: Iterable[float]) -> float:
        counted = (w * value for w, value in zip(weights, values, strict=True) if w > 0)
        return sum(counted) / total if total else math.nan

    names = _names([result.metrics for result in told])
    return Evaluated(
        loss=mean(value for result in told for value in result.losses),
        metrics={name: mean(value for result in told for value in result.metrics[name]) for name in names},
    )


def _names(told: Sequence[Mapping[str, Any]]) -> list[str]:
    for metrics in told[1:]:
        if metrics.keys() != told[0].keys():
            names = [", ".join(sorted(one)) or "none" for one in (told[0], metrics)]
            raise AttemptFailure(
                Reason.USER_CODE_RAISED,
                f"the loss returned the metrics {names[0]} on one worker and {names[1]} on another: return the same "
                "names every time",
            )
    return list(told[0]) if told else []
