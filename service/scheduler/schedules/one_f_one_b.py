"""1f1b: as many forwards as stages follow, then one backward, one forward."""

from __future__ import annotations

import numpy as np

from service.scheduler.model.problem import Problem
from service.scheduler.schedules.actions import alternate, cap, stage_of_mesh, to_lane


def lanes(problem: Problem) -> list[np.ndarray]:
    """Warm-up of min(M, d, max_in_flight) forwards, d the stages on the longest path to a sink."""
    most = cap(problem)
    return [
        to_lane(problem, alternate(stage, min(int(problem.depth[stage]), most), problem.microbatches))
        for stage in stage_of_mesh(problem)
    ]
