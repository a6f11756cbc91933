"""Why a step is slow, over the API: from what drivers report to causes and changes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from service.scheduler.job.cut import PipelineSetup
from service.scheduler.job.partition import partition
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import MeshSpec, NetworkSpec, PipelineSpec
from service.scheduler.programs.plan import Plan
from service.schemas.activity import WhyView
from service.schemas.plans import JobPlanView
from service.store.attempts import find_attempt
from service.store.database import utc_now
from service.store.jobs import find_job
from service.store.measurements import MEASURED_BY_GANG, record_costs, scoped_costs_digest
from service.store.plans import record_job_plan
from service.store.transitions import lock_job
from tests.service.api.conftest import Api
from tests.service.scheduler.job.test_joint import measured as measured_layers
from tests.service.scheduler.why.simulation import World, makespan, run
from worker.contract.costs import costs_digest

NETWORK = {"contention": "link", "bandwidth_bytes_per_s": 1e7, "latency_s": 1e-4}


async def trained(
    api: Api, world: World, *, begins: tuple[str, ...] = ("l0", "l4"), owner: str = "", **changes: Any
) -> str:
    """A job whose first attempt has a plan and a measured step 5 in that world."""
    job_id = await api.started(pipeline={"stages": 2}, **changes)
    async with api.service.database.read() as session:
        spec = (await find_job(session, job_id)).spec
    count = spec["training"]["microbatches"]
    profile = measured_layers(8, 3)
    made = partition(
        profile,
        PipelineSetup([MeshSpec(name="m0"), MeshSpec(name="m1")], NetworkSpec(**NETWORK)),
        stages=2,
        cut=list(begins),
        microbatches=count,
    )
    plan = make_plan(made.spec, budget_s=0.0)
    body = {
        "begins": list(begins),
        "spec": made.spec.model_dump(mode="json"),
        "plan": plan.model_dump(mode="json"),
        "step_s": plan.makespan_s,
        "update_s": 0.0,
        "update": [],
    }
    costs = {
        "network": NETWORK,
        "profiles": [{"microbatches": count, "profile": profile.to_json()}],
        "tried": [count],
    }
    async with api.service.database.write() as session:
        attempt = await find_attempt(session, f"{job_id}-1")
        await record_job_plan(session, attempt, json.dumps(body), at=utc_now())
        digest = scoped_costs_digest(costs_digest(spec), owner)
        await record_costs(
            session, digest, costs, measured_by=MEASURED_BY_GANG, accelerator_type=None, at=utc_now()
        )
        (await lock_job(session, job_id)).owner = owner
    await measure(api, job_id, made.spec, plan, world)
    return job_id


async def measure(
    api: Api, job_id: str, spec: PipelineSpec, plan: Any, world: World, *, step: int = 5, sequence: int = 1
) -> None:
    slots = run(spec, plan, world)
    timeline = {"step": step, "started_at": 1.75e9, "slots": [vars(slot) for slot in slots]}
    longest_s = max(slot.end_s for slot in slots)
    answer = await api.report(
        job_id,
        sequence,
        state="RUNNING",
        timelines=[timeline],
        steps=[{"step": step, "step_s": 1.01 * longest_s}],
    )
    assert answer.status_code == 200, answer.text


async def why(api: Api, job_id: str, **params: Any) -> httpx.Response:
    return await api.client.get(f"/api/v1/jobs/{job_id}/why", params=params)


@pytest.mark.slow
async def test_a_job_says_what_makes_its_step_long_and_what_would_help(api: Api):
    job_id = await trained(api, World(meshes={"m1": 2.0}, noise=0.03))
    answer = await why(api, job_id)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["job_id"], found["attempt"], found["step"]) == (job_id, 1, 5)
    assert (found["causes"][0]["kind"], found["causes"][0]["subject"]) == ("straggler", "m1")
    assert not found["healthy"] and found["notes"] == []
    gains = [change["gain_s"] for change in found["changes"]]
    assert gains == sorted(gains, reverse=True)
    cuts = [change for change in found["changes"] if change["kind"] == "another cut"]
    assert cuts and cuts[0]["subject"].startswith("l0, l") and cuts[0]["subject"] > "l0, l4"
    assert {mesh["mesh"] for mesh in found["measured"]["meshes"]} == {"m0", "m1"}


@pytest.mark.slow
async def test_a_job_with_an_owner_is_explained_by_what_its_owner_measured(api: Api):
    job_id = await trained(api, World(meshes={"m1": 2.0}, noise=0.03), owner="alice")
    found = (await why(api, job_id)).json()
    assert any(change["kind"] == "another cut" for change in found["changes"])


async def test_a_healthy_job_accuses_nobody(api: Api):
    job_id = await trained(api, World(noise=0.03))
    found = (await why(api, job_id, step=5)).json()
    assert found["causes"] == []
    assert "nothing is to blame" in found["verdict"].lower()


@pytest.mark.parametrize(("buckets", "said"), [([32, 64], True), ("auto", True), ([64], False)])
async def test_a_step_of_shorter_microbatches_is_not_compared_with_the_plan_of_the_longest_in_silence(
    api: Api, buckets: Any, said: bool
):
    job_id = await trained(
        api,
        World(meshes={"m0": 0.5, "m1": 0.5}, noise=0.03),
        data={"factory": "data:Unequal", "lengths": {"buckets": buckets}},
        loss={"factory": "torch.nn:CrossEntropyLoss"},
    )
    found = (await why(api, job_id)).json()
    assert found["measured"]["makespan_s"] < found["planned"]["makespan_s"]
    assert any("takes all microbatches for the longest" in note for note in found["notes"]) == said


async def test_why_and_the_plan_have_the_plan_calibrated_by_all_warm_steps(api: Api):
    job_id = await trained(api, World(meshes={"m1": 2.0}))

    async def stored_plan() -> JobPlanView:
        return JobPlanView.model_validate_json((await api.client.get(f"/api/v1/jobs/{job_id}/plan")).content)

    body = await stored_plan()
    assert body.calibrated is None, "step 5 was the attempt's first"
    spec, plan = PipelineSpec.model_validate(body.spec), Plan.model_validate(body.plan)
    for step, factor in enumerate((3.0, 3.0, 8.0), 6):
        await measure(api, job_id, spec, plan, World(meshes={"m1": factor}), step=step, sequence=step)
    usual_s = makespan(run(spec, plan, World(meshes={"m1": 3.0})))
    calibrated = (await stored_plan()).calibrated
    assert calibrated is not None and calibrated.steps == 3
    assert calibrated.makespan_s == pytest.approx(usual_s)
    costs = {(cost.stage, cost.action): cost.seconds for cost in calibrated.costs if cost.stage is not None}
    assert costs["s1", "F"] == pytest.approx(3.0 * spec.stages[1].forward_s)
    found = WhyView.model_validate((await why(api, job_id)).json())
    assert found.step == 8 and found.calibrated == calibrated
    assert found.measured.makespan_s > 1.5 * usual_s
    assert (await why(api, job_id, step=5)).json()["calibrated"] == calibrated.model_dump(mode="json")


async def test_what_cannot_be_explained_is_said(api: Api):
    job_id = await trained(api, World())
    none = await why(api, await api.submit())
    assert none.status_code == 404 and "no plan" in none.json()["detail"]
    other = await why(api, job_id, step=6)
    assert other.status_code == 404 and "not profiled" in other.json()["detail"]
    async with api.service.database.write() as session:
        attempt = await find_attempt(session, f"{job_id}-1")
        await record_job_plan(
            session, attempt, json.dumps({"spec": {"gone": 1}, "plan": {"slots": []}}), at=utc_now()
        )
    assert (await api.client.get(f"/api/v1/jobs/{job_id}/plan")).json()["spec"] == {"gone": 1}
    old = await why(api, job_id)
    assert old.status_code == 422 and "another version" in old.json()["detail"]
