"""Metrics that losses return, from those of microbatches to those of a step. Pure: values in, values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from worker.failure import AttemptFailure
from worker.reasons import Reason


def mean_metrics(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each metric over microbatches and workers, as the loss is; `results` are those of `run_step`.

    Raises AttemptFailure USER_CODE_RAISED where workers have metrics of different names.
    """
    told = [result.get("metrics") or {} for result in results if result["losses"]]
    for metrics in told[1:]:
        if metrics.keys() != told[0].keys():
            names = [", ".join(sorted(one)) or "none" for one in (told[0], metrics)]
            raise AttemptFailure(
                Reason.USER_CODE_RAISED,
                f"the loss returned the metrics {names[0]} on one worker and {names[1]} on another: return the same "
                "names every time",
            )
    found = {}
    for name in told[0] if told else ():
        values = [value for metrics in told for value in metrics[name]]
        found[name] = sum(values) / len(values)
    return found
