"""The named compute orders, one registry. Each turns a problem into the compute order of every mesh.

They decide computation only: transfers are ordered by the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from service.scheduler.model.problem import Problem
from service.scheduler.model.shapes import looped, one_stage_a_mesh, v_shaped
from service.scheduler.model.spec import PipelineSpec, SpecError
from service.scheduler.schedules import csv_orders, eager, gpipe, interleaved, one_f_one_b, zero_bubble

Lanes = list[np.ndarray]


@dataclass(frozen=True)
class NamedSchedule:
    """`fits` says whether it can run on a placement; `wants` says which one in words."""

    name: str
    lanes: Callable[[Problem], Lanes]
    fits: Callable[[PipelineSpec], bool]
    wants: str
    splits: bool = False


def _any_placement(spec: PipelineSpec) -> bool:
    return True


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        NamedSchedule("gpipe", gpipe.lanes, one_stage_a_mesh, "one stage a mesh"),
        NamedSchedule("1f1b", one_f_one_b.lanes, one_stage_a_mesh, "one stage a mesh"),
        NamedSchedule("eager-1f1b", eager.lanes, one_stage_a_mesh, "one stage a mesh"),
        NamedSchedule(
            "interleaved-1f1b",
            interleaved.lanes,
            looped,
            "stage i on mesh i mod P, two or more stages a mesh, edges to later stages only",
        ),
        NamedSchedule("zb-h1", zero_bubble.h1_lanes, one_stage_a_mesh, "one stage a mesh", splits=True),
        NamedSchedule(
            "zb-v",
            zero_bubble.v_lanes,
            v_shaped,
            "stages i and 2P-1-i on mesh i, edges to later stages only",
            splits=True,
        ),
        NamedSchedule("inference", gpipe.inference_lanes, _any_placement, "any placement"),
        NamedSchedule("csv", csv_orders.lanes, _any_placement, "any placement"),
    )
}
AUTO = "auto"
NAMES = (*SCHEDULES, AUTO)


def fitting_names(spec: PipelineSpec) -> list[str]:
    """Names of the training schedules that can run on this placement, `auto` last."""
    skipped = ("inference", "csv")
    return [name for name, s in SCHEDULES.items() if name not in skipped and s.fits(spec)] + [AUTO]


def find_schedule(spec: PipelineSpec, name: str) -> NamedSchedule:
    """The schedule of that name; raises SpecError when it is unknown or wants another placement."""
    schedule = SCHEDULES.get(name)
    if schedule is None:
        raise SpecError(f"schedule {name!r} does not exist: use one of {', '.join(NAMES)}")
    if not schedule.fits(spec):
        raise SpecError(
            f"schedule {name!r} wants {schedule.wants}, and this placement is another: "
            f"use one of {', '.join(fitting_names(spec))}"
        )
    if schedule.splits and spec.split_backward is False:
        raise SpecError(f"schedule {name!r} splits the backward: leave split_backward out or set it to true")
    return schedule
