"""Registry of the named schedules: their names, the placements they fit, and the lookup that rejects the others.

A schedule decides computation only: transfers are ordered by the simulator. `auto` is a name here, not an order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from service.scheduler.problem.problem import Problem
from service.scheduler.problem.spec import PipelineSpec, SpecError, is_looped, is_v_shaped, one_stage_per_mesh
from service.scheduler.schedules import csv, published

Lanes = list[np.ndarray]


@dataclass(frozen=True)
class NamedSchedule:
    """`fits` says whether it can run on a placement; `wants` says which one in words."""

    name: str
    lanes: Callable[[Problem], Lanes]
    fits: Callable[[PipelineSpec], bool]
    required_placement: str
    splits: bool = False


def _any_placement(spec: PipelineSpec) -> bool:
    return True


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        NamedSchedule("gpipe", published.gpipe_lanes, one_stage_per_mesh, "one stage a mesh"),
        NamedSchedule("1f1b", published.one_f_one_b_lanes, one_stage_per_mesh, "one stage a mesh"),
        NamedSchedule("eager-1f1b", published.eager_lanes, one_stage_per_mesh, "one stage a mesh"),
        NamedSchedule(
            "interleaved-1f1b",
            published.interleaved_lanes,
            is_looped,
            "stage i on mesh i mod P, two or more stages a mesh, edges to later stages only",
        ),
        NamedSchedule("zb-h1", published.zb_h1_lanes, one_stage_per_mesh, "one stage a mesh", splits=True),
        NamedSchedule(
            "zb-v",
            published.zb_v_lanes,
            is_v_shaped,
            "stages i and 2P-1-i on mesh i, edges to later stages only",
            splits=True,
        ),
        NamedSchedule("inference", published.inference_lanes, _any_placement, "any placement"),
        NamedSchedule("csv", csv.csv_lanes, _any_placement, "any placement"),
    )
}
AUTO = "auto"
SCHEDULE_NAMES = (*SCHEDULES, AUTO)


def fitting_names(spec: PipelineSpec) -> list[str]:
    """Names of the training schedules that can run on this placement, `auto` last."""
    skipped = ("inference", "csv")
    return [name for name, s in SCHEDULES.items() if name not in skipped and s.fits(spec)] + [AUTO]


def find_schedule(spec: PipelineSpec, name: str) -> NamedSchedule:
    """The schedule of that name; raises SpecError when it is unknown or wants another placement."""
    schedule = SCHEDULES.get(name)
    if schedule is None:
        raise SpecError(f"schedule {name!r} does not exist: use one of {', '.join(SCHEDULE_NAMES)}")
    if not schedule.fits(spec):
        raise SpecError(
            f"schedule {name!r} wants {schedule.required_placement}, and this placement is another: "
            f"use one of {', '.join(fitting_names(spec))}"
        )
    if schedule.splits and spec.split_backward is False:
        raise SpecError(f"schedule {name!r} splits the backward: leave split_backward out or set it to true")
    return schedule
