"""What the driver makes of a plan."""

from __future__ import annotations

import pytest

from service.scheduler import PipelineSpec, make_plan
from worker.driver.planning import planned_seconds


def pipeline(**changes):
    return PipelineSpec.model_validate(
        {
            "microbatches": 3,
            "meshes": [{"name": "m0"}, {"name": "m1"}],
            "stages": [
                {
                    "name": f"stage {i}",
                    "mesh": f"m{i}",
                    "forward_s": 1.0 + i,
                    "backward_input_s": 2.0,
                    "backward_weight_s": 3.0 + i,
                    "activation_bytes": 1,
                }
                for i in range(2)
            ],
            "edges": [{"source": "stage 0", "target": "stage 1", "forward_s": 0.25, "backward_s": 0.5}],
            **changes,
        }
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_every_instruction_knows_how_long_the_plan_says_it_takes(schedule):
    spec = pipeline(schedule=schedule)
    plan = make_plan(spec, budget_s=0.1).model_dump(mode="json")
    planned = planned_seconds(plan, [stage.name for stage in spec.stages])
    costs = {
        ("F", 0): 1.0, ("F", 1): 2.0, ("B", 0): 5.0, ("B", 1): 6.0,
        ("I", 0): 2.0, ("I", 1): 2.0, ("W", 0): 3.0, ("W", 1): 4.0,
        "SEND_F": 0.25, "RECV_F": 0.25, "SEND_B": 0.5, "RECV_B": 0.5, "REDUCE": 0.0, "STEP": 0.0,
    }  # fmt: skip
    for mesh, program in plan["programs"].items():
        expected = [costs.get(i["op"], costs.get((i["op"], i["stage"]))) for i in program]
        assert planned[mesh] == pytest.approx(expected)
