"""About how long a spec's steps are, by constructive schedules: to compare many cuts, of which few are searched."""

from __future__ import annotations

import math

from service.scheduler.automatic import constructive_makespan
from service.scheduler.model.spec import PipelineSpec, SpecError
from service.scheduler.named import named_timeline
from service.scheduler.recomputation import may_recompute, with_choice
from service.scheduler.schedules import AUTO


def judged_makespan(spec: PipelineSpec, window: int) -> float:
    """Of more than twice `window` microbatches by so many and half of them, since what repeats takes as long each time."""
    if spec.microbatches <= 2 * window:
        return _of_all(spec)
    whole, half = (
        _of_all(spec.model_copy(update={"microbatches": count})) for count in (window, window // 2)
    )
    if not math.isfinite(whole) or not math.isfinite(half):
        return math.inf
    return whole + (spec.microbatches - window) * (whole - half) / (window - window // 2)


def _of_all(spec: PipelineSpec) -> float:
    names = may_recompute(spec)
    if spec.schedule != AUTO:
        try:
            return named_timeline(with_choice(spec, ()), spec.schedule).makespan
        except SpecError:
            if not names:
                raise
            return named_timeline(with_choice(spec, names), spec.schedule).makespan
    return constructive_makespan(spec)
