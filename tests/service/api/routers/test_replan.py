"""A shorter order for a running job, over the API: from measured steps to the plan that its driver swaps in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.programs.plan import Plan
from service.store.attempts import find_attempt
from service.store.database import utc_now
from service.store.plans import find_job_plan, record_job_plan
from tests.service.api.conftest import Api
from tests.service.api.routers.test_why import measure, trained
from tests.service.scheduler.why.simulation import World, makespan, run

LONG_S = 3.0
"""Of training left, where a search is worth 0.3 seconds at most."""


def one_at_a_time(spec: PipelineSpec) -> Plan:
    """A poor plan: each microbatch's forwards and backwards before the next one's."""
    orders = {
        stage.mesh: [f"{number}{op}{m}" for m in range(spec.microbatches) for op in "FB"]
        for number, stage in enumerate(spec.stages)
    }
    return make_plan(spec.model_copy(update={"schedule": "csv", "orders": orders}), budget_s=0.0)


async def poorly_planned(api: Api, world: World, *, steps: int = 9) -> tuple[str, PipelineSpec, Plan]:
    """A job that runs the poor plan, with so many warm profiled steps in that world behind a cold one, which `trained`
    measured."""
    job_id = await trained(api, World(meshes={"m0": 9.0}))
    async with api.service.database.read() as session:
        stored = await find_job_plan(session, job_id)
    body = json.loads(stored.body)
    spec = PipelineSpec.model_validate(body["spec"])
    plan = one_at_a_time(spec)
    body |= {"plan": plan.model_dump(mode="json"), "step_s": plan.makespan_s}
    async with api.service.database.write() as session:
        attempt = await find_attempt(session, f"{job_id}-1")
        await record_job_plan(session, attempt, json.dumps(body), at=utc_now())
    for number in range(steps):
        await measure(api, job_id, spec, plan, world, step=6 + number, sequence=2 + number)
    return job_id, spec, plan


async def asked(
    api: Api, job_id: str, *, since_step: int | None = None, seconds_left: float = LONG_S
) -> dict[str, Any]:
    request = {"since_step": since_step, "seconds_left": seconds_left}
    answer = await api.driver(job_id, "POST", "/replan", json=request)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_poor_order_is_replaced_by_one_that_is_as_short_in_the_world_that_was_measured_as_it_says(
    api: Api,
):
    world = World(meshes={"m1": 2.0})
    job_id, spec, plan = await poorly_planned(api, world)
    found = await asked(api, job_id)
    assert found["running_s"] == pytest.approx(makespan(run(spec, plan, world)), rel=1e-6)
    new_spec, new = (
        PipelineSpec.model_validate(found["found"]["spec"]),
        Plan.model_validate(found["found"]["plan"]),
    )
    # the spec that was answered has the costs of that world already
    assert makespan(run(new_spec, new, World())) == pytest.approx(found["planned_s"], rel=1e-6)
    assert found["planned_s"] < 0.9 * found["running_s"]
    assert found["found"]["begins"] == ["l0", "l4"]
    assert [stage.mesh for stage in new_spec.stages] == [stage.mesh for stage in spec.stages]

    swapped = {"since_step": 30, "plan": found["found"]}
    assert (await api.report(job_id, 20, running_plan=swapped)).status_code == 200
    shown = (await api.client.get(f"/api/v1/jobs/{job_id}/plan")).json()
    assert (
        shown["plan"]["makespan_s"] == pytest.approx(found["planned_s"], rel=1e-12)
        and shown.get("calibrated") is None
    )
    why = (await api.client.get(f"/api/v1/jobs/{job_id}/why", params={"step": 14})).json()
    assert "measured before step 30" in why["notes"][0] and why["measured"] is None
    assert "not the one that is stored" in (await asked(api, job_id))["why"], "of the plan before"
    assert "too little" in (await asked(api, job_id, since_step=30))["why"]
    for number in range(30, 34):
        await measure(api, job_id, new_spec, new, World(), step=number, sequence=number)
    shown = (await api.client.get(f"/api/v1/jobs/{job_id}/plan")).json()
    assert shown["calibrated"]["steps"] == 3, "but the first one"
    assert shown["calibrated"]["makespan_s"] == pytest.approx(found["planned_s"], rel=1e-6)
    assert (await asked(api, job_id, since_step=30))["why"] == "no shorter order was found"


async def test_where_few_steps_are_left_or_measured_the_plan_stays(api: Api):
    job_id, *_ = await poorly_planned(api, World(), steps=2)
    assert "too little was measured" in (await asked(api, job_id))["why"]
    job_id, *_ = await poorly_planned(api, World(), steps=3)
    assert "not worth a search" in (await asked(api, job_id, seconds_left=1.9))["why"]


async def test_a_report_of_a_running_plan_that_is_none_is_refused_and_the_plan_stays(api: Api):
    job_id, _, plan = await poorly_planned(api, World(), steps=1)
    answer = await api.report(job_id, 20, running_plan={"since_step": 9, "plan": {"spec": {}, "plan": {}}})
    assert answer.status_code == 422 and "running_plan" in answer.text
    shown = (await api.client.get(f"/api/v1/jobs/{job_id}/plan")).json()
    assert shown["plan"]["makespan_s"] == plan.makespan_s
