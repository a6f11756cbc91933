"""Plans of single steps over the API: for microbatches of unequal lengths, and what is said of a step that ran by one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.api.conftest import Api
from tests.service.api.routers.test_jobs import problem
from tests.service.api.routers.test_why import why
from tests.service.scheduler.job.test_joint import measured
from worker.contract.planned import parse_planned_job

NETWORK = {"contention": "link", "bandwidth_bytes_per_s": 1e6, "latency_s": 1e-4}
MESHES = 3


async def started(api: Api) -> str:
    """A job whose first attempt has no plan yet."""
    return await api.started(
        pipeline={"stages": MESHES},
        resources={"meshes": MESHES, "device": "cpu"},
        training={"steps": 50, "global_batch": 8, "microbatches": 8},
    )


async def planned(api: Api, job_id: str) -> dict[str, Any]:
    """Its plan, with the costs of microbatches of 64 and, the longest, of 256."""
    costs = {
        "microbatches": 8,
        "profile": measured(6, 3).to_json(),
        "length_profiles": [
            {"microbatches": 8, "length": 64, "rows": 1, "profile": measured(6, 3, microbatch=0.25).to_json()}
        ],
        "network": NETWORK,
    }
    answer = await api.driver(job_id, "POST", "/plan", json=costs)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
async def test_single_steps_are_planned_and_a_step_that_ran_by_one_is_compared_with_it(api: Api):
    job_id = await started(api)
    running = await planned(api, job_id)
    steps = [[0] * 6 + [1] * 2, [1] * 8]
    answer = await api.driver(job_id, "POST", "/step-plans", json={"buckets": steps})
    assert answer.status_code == 200, answer.text
    own, none = answer.json()["plans"]
    assert none is None and own["spec"]["bucket_of"] == [0] * 6 + [1] * 2
    assert parse_planned_job({**running, **own}).stage_starts == tuple(running["begins"])

    slots = [dict(slot) for slot in own["plan"]["slots"]]
    for slot in slots:
        if slot["lane"] == "compute":
            slot["end_s"] = slot["start_s"] + 0.99 * (slot["end_s"] - slot["start_s"])
    swapped = {"since_step": 9, "plan": {**running, **own}}
    timeline = {"step": 9, "started_at": 1.75e9, "slots": slots}
    step = {"step": 9, "step_s": own["step_s"]}
    reported = await api.report(
        job_id, 1, state="RUNNING", running_plan=swapped, timelines=[timeline], steps=[step]
    )
    assert reported.status_code == 200, reported.text
    found = (await why(api, job_id)).json()
    assert found["step"] == 9 and found["planned"]["makespan_s"] == pytest.approx(own["plan"]["makespan_s"])
    assert found["measured"]["makespan_s"] == pytest.approx(own["plan"]["makespan_s"], rel=0.02)
    assert found["changes"] == [] and "changes were not tried" in " ".join(found["notes"])
    again = await api.driver(job_id, "POST", "/step-plans", json={"buckets": steps[:1]})
    assert again.json()["plans"][0]["plan"]["slots"] == own["plan"]["slots"], (
        "by the plan that was reported, too"
    )


async def test_steps_of_a_plan_that_knows_no_lengths_or_of_another_number_of_microbatches_are_refused(
    api: Api,
):
    job_id = await started(api)
    problem(await api.driver(job_id, "POST", "/step-plans", json={"buckets": [[0]]}), 409)
    await planned(api, job_id)
    refused = problem(await api.driver(job_id, "POST", "/step-plans", json={"buckets": [[0, 0]]}), 422)
    assert "2 buckets are given for 8" in refused["detail"]
    refused = problem(await api.driver(job_id, "POST", "/step-plans", json={"buckets": [[2] * 8]}), 422)
    assert "in bucket 2, and the job's plan knows 0 to" in refused["detail"]
    problem(await api.driver(job_id, "POST", "/step-plans", json={"buckets": []}), 422)
    problem(await api.driver(job_id, "POST", "/step-plans", token="wrong", json={"buckets": [[1]]}), 401)
