"""Evaluations, the best checkpoint and the plan of an evaluation, between drivers and users."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from service.spec.job import JobSpec
from tests.service.api.conftest import Api
from tests.service.api.routers.test_jobs import problem
from tests.service.conftest import job_body
from worker.contract.job import Evaluation, Job

DATA = {"factory": "mine:Data"}
FOUND = {
    "step": 0,
    "loss": 2.5,
    "metrics": {"accuracy": 0.5},
    "samples": 64,
    "evaluation_s": 0.25,
    "started_at": 1.75e9,
}
BEST = {"step": 4, "uri": "/runs/job/step-4", "metric": "accuracy", "value": 0.75}
SPEC = {
    "microbatches": 2,
    "meshes": [{"name": "m0"}, {"name": "m1"}],
    "stages": [
        {"name": "s0", "mesh": "m0", "forward_s": 1.0},
        {"name": "s1", "mesh": "m1", "forward_s": 1.0},
    ],
    "edges": [{"source": "s0", "target": "s1", "forward_s": 0.5}],
}


async def test_evaluations_are_read_as_they_were_last_done(api: Api):
    job_id = await api.started()
    await api.report(job_id, 1, state="RUNNING", evaluations=[FOUND, {**FOUND, "step": 4}])
    await api.report(
        job_id, 2, evaluations=[{**FOUND, "step": 4, "loss": None, "metrics": {"accuracy": None}}]
    )
    place = f"/api/v1/jobs/{job_id}/evaluations"
    first = (await api.client.get(place, params={"limit": 1})).json()
    assert first == {"items": [{**FOUND, "attempt": 1}], "next_page_token": "1:0"}
    rest = (await api.client.get(place, params={"page_token": "1:0"})).json()
    expected = {**FOUND, "step": 4, "loss": None, "metrics": {"accuracy": None}, "attempt": 1}
    assert rest == {"items": [expected], "next_page_token": None}
    problem(await api.client.get("/api/v1/jobs/none/evaluations"), 404)


async def test_the_best_checkpoint_is_named_in_the_job(api: Api):
    job_id = await api.started()
    assert (await api.job(job_id))["best_checkpoint"] is None
    await api.report(job_id, 1, state="RUNNING", best_checkpoint=BEST)
    await api.report(job_id, 2, checkpoint={"step": 6, "uri": "/runs/job/step-6"})
    job = await api.job(job_id)
    assert (job["best_checkpoint"], job["checkpoint"]["step"]) == (BEST, 6)


async def test_a_job_that_stopped_early_succeeded_and_says_why(api: Api):
    job_id = await api.started()
    ended = {
        "state": "SUCCEEDED",
        "reason": "STOPPED_EARLY",
        "message": "loss was no better in 3 evaluations",
    }
    await api.report(job_id, 1, state="RUNNING")
    await api.report(job_id, 2, **ended)
    job = await api.job(job_id)
    assert {name: job[name] for name in ended} == ended
    assert {name: job["attempts"][0][name] for name in ended} == ended


async def test_a_driver_is_given_the_plan_of_an_evaluation_forwards_only(api: Api):
    job_id = await api.started()
    plan = (await api.driver(job_id, "POST", "/forward-plan", json=SPEC)).json()
    assert plan["schedule"] == "inference" and plan["makespan_s"] == 3.5
    ops = {mesh: [i["op"] for i in program] for mesh, program in plan["programs"].items()}
    assert sorted(ops["m0"]) == ["F", "F", "SEND_F", "SEND_F"]
    problem(await api.driver(job_id, "POST", "/forward-plan", token="wrong", json=SPEC), 401)
    wrong = {**SPEC, "stages": [{**SPEC["stages"][0], "mesh": "m7"}, SPEC["stages"][1]]}
    answer = await api.driver(job_id, "POST", "/forward-plan", json=wrong)
    assert answer.status_code == 422 and "m7" in answer.text


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"patience": 2, "metric": "accuracy"}, "less or more of it is better: set evaluation.mode"),
        ({"keep_best": True}, "evaluation.keep_best keeps a checkpoint, and the job has none"),
        ({"metric": "a b"}, "String should match pattern"),
        ({"steps": 0}, "greater than or equal to 1"),
        ({"every": 5}, "Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(evaluation: dict, message: str):
    with pytest.raises(ValidationError, match=message):
        JobSpec.model_validate(job_body(evaluation={"data": DATA, **evaluation}))


def test_meshes_of_unlike_sizes_are_evaluated_too():
    meshes = {"meshes": [{"workers": 2}, {"workers": 1}], "device": "cpu"}
    training = {"global_batch": 16, "microbatches": 4, "steps": 10}
    body = job_body(training=training, resources=meshes, evaluation={"data": DATA})
    assert JobSpec.model_validate(body).mesh_sizes == [2, 1]


def test_an_evaluation_is_read_by_workers_as_users_write_it():
    given = {"data": DATA, "every_steps": 5, "metric": "accuracy", "mode": "max", "patience": 2}
    spec = JobSpec.model_validate(job_body(evaluation=given))
    read = Job.from_json(spec.model_dump(mode="json")).evaluation
    assert (read.data.factory, read.every_steps, read.metric, read.mode) == (
        "mine:Data",
        5,
        "accuracy",
        "max",
    )
    assert JobSpec.model_validate(job_body()).evaluation is None
    assert Evaluation(read.data).patience is None
