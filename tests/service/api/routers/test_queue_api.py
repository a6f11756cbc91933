"""Labels, limits of time, filters of the list, changes of waiting jobs, codes of problems."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import select
from sqlalchemy.dialects import sqlite

from service.spec.states import JobState
from service.store.database import utc_now
from service.store.jobs import JobFilter, LabelFilter, apply_job_filter
from service.store.tables import WITHOUT_SPEC, JobRow
from service.store.transitions import lock_job
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_jobs import problem
from tests.service.conftest import job_body


async def listed(api: Api, **params) -> list[str]:
    """Names of the jobs that a list with these parameters shows, oldest first."""
    response = await api.client.get("/api/v1/jobs", params=params)
    assert response.status_code == 200, response.text
    return [job["name"] for job in response.json()["items"]][::-1]


async def test_labels_and_a_limit_of_time_are_kept_and_shown(api: Api):
    labels = {"team": "nlp", "example.com/run": "a-7", "empty": ""}
    job = await api.job(await api.submit(labels=labels, max_duration="1d12h"))
    assert (job["labels"], job["max_duration_s"]) == (labels, 129_600.0)
    assert (job["spec"]["labels"], job["spec"]["max_duration"]) == (labels, 129_600.0)
    (shown,) = (await api.client.get("/api/v1/jobs")).json()["items"]
    assert (shown["labels"], shown["max_duration_s"]) == (labels, 129_600.0)
    plain = await api.job(await api.submit())
    assert (plain["labels"], plain["max_duration_s"]) == ({}, None)


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"labels": {"-x": "y"}}, "labels", "is no label's name"),
        ({"labels": {"x": "a b"}}, "labels", "label x is 'a b'"),
        ({"labels": {"x": "a\n"}}, "labels", "label x is"),
        ({"labels": {f"l{n}": "" for n in range(17)}}, "labels", "holds 17 labels, the limit is 16"),
        ({"labels": {"x": 3}}, "labels.x", "string"),
        ({"max_duration": "soon"}, "max_duration", "write seconds as a number, or e.g. 90m"),
        ({"max_duration": ""}, "max_duration", "write seconds as a number"),
        ({"max_duration": True}, "max_duration", "write seconds as a number"),
        ({"max_duration": "0s"}, "max_duration", "greater than or equal to 1"),
        ({"max_duration": "9999d"}, "max_duration", "less than or equal to"),
    ],
    ids=str,
)
async def test_wrong_labels_and_times_are_refused(make_api: ApiMaker, changes, field: str, says: str):
    async with make_api() as api:
        body = problem(await api.client.post("/api/v1/jobs", json=job_body(**changes)), 422)
        (error,) = body["errors"]
        assert error["field"] == field and says in error["message"], error


async def test_jobs_are_found_by_all_that_is_asked_for_and_page_by_page(api: Api):
    for number in range(6):
        labels = {"team": "nlp" if number % 2 else "vision", f"only-{number}": "x"}
        await api.submit(name=f"job-{number}", labels=labels)
    await api.client.post(f"/api/v1/jobs/{await api.submit(name='gone')}/cancel")
    assert await listed(api, name="job-3") == ["job-3"]
    assert await listed(api, label="team=nlp") == ["job-1", "job-3", "job-5"]
    assert await listed(api, label=["team=nlp", "only-3"]) == ["job-3"]
    assert await listed(api, label=["team=nlp", "only-2"]) == []
    assert await listed(api, label="team=") == []
    assert await listed(api, state="CANCELLED") == ["gone"]
    assert len(await listed(api, state=["CANCELLED", "QUEUED"])) == 7
    assert await listed(api, label="team", state="CANCELLED") == []
    page = (await api.client.get("/api/v1/jobs", params={"label": "team=nlp", "limit": 2})).json()
    assert [job["name"] for job in page["items"]] == ["job-5", "job-3"]
    assert await listed(api, label="team=nlp", limit=2, page_token=page["next_page_token"]) == ["job-1"]


async def test_jobs_are_found_by_the_time_of_their_submission(api: Api):
    now = utc_now()
    for days in (3, 2, 1):
        job_id = await api.submit(name=f"{days}-days-ago")
        async with api.service.database.write() as session:
            (await lock_job(session, job_id)).created_at = now - timedelta(days=days)
    middle = (now - timedelta(days=2)).isoformat()
    assert await listed(api, since=middle) == ["2-days-ago", "1-days-ago"]
    assert await listed(api, until=middle) == ["3-days-ago"]
    zone = (now - timedelta(days=2)).replace(tzinfo=None).isoformat() + "+05:45"
    assert await listed(api, since=middle, until=zone) == []


@pytest.mark.parametrize(
    "params",
    [
        {"state": "DONE"},
        {"name": "a b"},
        {"label": "=x"},
        {"label": "a=b=c"},
        {"label": "x" * 200},
        {"label": ["a"] * 17},
        {"since": "2026-01-01T00:00:00"},
        {"since": "yesterday"},
        {"since": "0.5"},
        {"until": "1767225600"},
        {"until": "0001-01-01T00:00:00+14:00"},
        {"label": "\x00"},
    ],
    ids=str,
)
async def test_filters_that_say_nothing_are_refused(make_api: ApiMaker, params):
    async with make_api() as api:
        problem(await api.client.get("/api/v1/jobs", params=params), 422)


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        (JobFilter(states=[JobState.QUEUED]), "ix_jobs_state_created"),
        (JobFilter(name="x"), "ix_jobs_name_created"),
        (JobFilter(labels=[LabelFilter("a", "b")]), "ix_job_labels_name_value"),
        (JobFilter(labels=[LabelFilter("a")]), "ix_job_labels_name_value"),
        (JobFilter(since=utc_now()), "ix_jobs_created"),
    ],
    ids=["state", "name", "label", "label's name", "since"],
)
async def test_every_filter_has_an_index(make_api: ApiMaker, wanted: JobFilter, index: str):
    query = apply_job_filter(select(JobRow).options(WITHOUT_SPEC), wanted)
    query = query.order_by(JobRow.created_at.desc(), JobRow.id.desc()).limit(50)
    dialect = sqlite.dialect(paramstyle="qmark")
    said = query.compile(dialect=dialect, compile_kwargs={"render_postcompile": True, "literal_binds": True})
    async with make_api() as api, api.service.database.engine.connect() as connection:
        plan = (await connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {said}")).all()
    assert any(index in row[-1] for row in plan), plan


async def test_a_waiting_job_changes_its_priority_and_its_queue_and_keeps_its_age(make_api: ApiMaker):
    async with make_api(queues={"default": None, "small": 2}) as api:
        job_id = await api.submit()
        before = await api.job(job_id)
        answer = await api.client.patch(f"/api/v1/jobs/{job_id}", json={"priority": 7, "queue": "small"})
        assert answer.status_code == 200
        assert (answer.json()["priority"], answer.json()["queue"]) == (7, "small")
        assert answer.json()["created_at"] == before["created_at"]
        events = (await api.client.get(f"/api/v1/jobs/{job_id}/events")).json()["items"]
        assert events[-1]["kind"] == "changed"
        assert events[-1]["message"] == "queue default becomes small, priority 0 becomes 7"
        same = await api.client.patch(f"/api/v1/jobs/{job_id}", json={"priority": 7})
        assert same.status_code == 200
        assert len((await api.client.get(f"/api/v1/jobs/{job_id}/events")).json()["items"]) == len(events)
        queues = (await api.client.get("/api/v1/queues")).json()["items"]
        assert {queue["name"]: queue["depth"] for queue in queues} == {"default": 0, "small": 1}


async def test_a_changed_priority_changes_who_starts(make_api: ApiMaker):
    async with make_api() as api:
        first, second = await api.submit(), await api.submit()
        await api.client.patch(f"/api/v1/jobs/{second}", json={"priority": 1})
        await api.rounds(second)
        assert (await api.job(first))["state"] == "QUEUED"


async def test_a_change_that_cannot_be_made_says_why(make_api: ApiMaker):
    async with make_api() as api:
        job_id = await api.submit()
        path = f"/api/v1/jobs/{job_id}"
        assert (
            "use one of default" in problem(await api.client.patch(path, json={"queue": "x"}), 422)["detail"]
        )
        assert "nothing would change" in problem(await api.client.patch(path, json={}), 422)["detail"]
        refused = problem(await api.client.patch(path, json={"name": "x"}), 422)
        assert "name cannot be changed: give queue, priority" in refused["detail"]
        problem(await api.client.patch(path, json={"priority": "high"}), 422)
        problem(await api.client.patch(path, json={"priority": 10**7}), 422)
        missing = problem(await api.client.patch("/api/v1/jobs/job-none", json={"priority": 1}), 404)
        assert missing["code"] == "NOT_FOUND"
        await api.rounds(job_id)
        started = problem(await api.client.patch(path, json={"priority": 1}), 409)
        assert started["code"] == "JOB_NOT_WAITING" and f"job {job_id} is STARTING" in started["detail"]


async def test_a_job_that_recovers_may_change_its_priority(make_api: ApiMaker):
    async with make_api() as api:
        job_id = await api.started()
        await api.report(job_id, 1, state="FAILED", reason="WORKER_LOST", message="gone")
        answer = await api.client.patch(f"/api/v1/jobs/{job_id}", json={"priority": -3})
        assert answer.json()["priority"] == -3


async def test_a_driver_hears_that_it_is_to_save_and_end(make_api: ApiMaker):
    async with make_api() as api:
        low = await api.started()
        await api.report(low, 1, state="RUNNING")
        urgent = await api.submit(priority=9)
        await api.service.orchestrator.round()
        assert (await api.report(low, 2)).json() == {"command": "stop"}
        await api.report(low, 3, state="FAILED", reason="PREEMPTED", message="saved")
        await api.rounds(urgent)
        job = await api.job(low)
        assert (job["state"], job["attempts"][0]["reason"]) == ("RECOVERING", "PREEMPTED")


async def test_queues_list_their_jobs_in_the_order_of_their_turns(make_api: ApiMaker):
    """Jobs of an owner who holds nothing come before older ones of an owner who does."""
    async with make_api() as api:
        ids = [await api.started(name="m0", pipeline={"stages": 3})]
        ids += [await api.submit(name=name) for name in ("m1", "m2", "y1")]
        async with api.service.database.write() as session:
            for job_id, owner in zip(ids, ("me", "me", "me", "you"), strict=True):
                (await lock_job(session, job_id)).owner = owner
        (queue,) = (await api.client.get("/api/v1/queues")).json()["items"]
        assert [job["name"] for job in queue["waiting"]] == ["y1", "m1", "m2"]


async def test_a_long_queue_is_counted_by_reason_and_its_first_jobs_are_listed(
    make_api: ApiMaker, monkeypatch
):
    monkeypatch.setattr("service.jobs.clusters._LISTED_WAITING", 2)
    async with make_api(queues={"default": None, "small": 2}) as api:
        await api.started()
        ids = [await api.submit(priority=priority) for priority in (0, 0, 1)]
        ids += [await api.submit(queue="small") for _ in range(3)]
        await api.service.orchestrator.round()
        ids.append(await api.submit())
        default, small = (await api.client.get("/api/v1/queues")).json()["items"]
        assert [(one["reason"], one["jobs"], one["first"]["id"]) for one in default["reasons"]] == [
            ("WAITS_FOR_ACCELERATORS", 3, ids[0]),
            (None, 1, ids[6]),
        ]
        assert [(one["reason"], one["jobs"], one["first"]["id"]) for one in small["reasons"]] == [
            ("WAITS_FOR_QUOTA", 3, ids[3])
        ]
        assert (default["depth"], [job["id"] for job in default["waiting"]]) == (4, [ids[2], ids[0]])
        assert (small["depth"], [job["id"] for job in small["waiting"]]) == (3, ids[3:5])
        rest = (await api.client.get("/api/v1/jobs?state=QUEUED&queue=small&limit=2")).json()
        assert [job["id"] for job in rest["items"]] == [ids[5], ids[4]] and rest["next_page_token"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/api/v1/jobs/job-none", 404, "NOT_FOUND"),
        ("PUT", "/api/v1/jobs", 405, "METHOD_NOT_ALLOWED"),
        ("GET", "/api/v1/jobs?limit=0", 422, "INVALID"),
        ("GET", "/readyz", 503, "UNAVAILABLE"),
    ],
)
async def test_every_problem_has_a_code(make_api: ApiMaker, method: str, path: str, status: int, code: str):
    async with make_api() as api:
        api.cluster.away = True
        await api.service.cluster.refresh()
        assert problem(await api.client.request(method, path), status)["code"] == code


async def test_what_a_job_in_the_wrong_state_is_asked_for_has_a_code(make_api: ApiMaker):
    async with make_api() as api:
        job_id = await api.submit()
        refused = problem(await api.client.post(f"/api/v1/jobs/{job_id}/retry"), 409)
        assert refused["code"] == "STATE_FORBIDS"
