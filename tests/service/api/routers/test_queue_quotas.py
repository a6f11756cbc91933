"""Quotas that operators set by REST: in force at once, also after a restart, and for all that look."""

from __future__ import annotations

import pytest

from service.spec.principals import Role
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_jobs import problem

QUOTA = "/api/v1/queues/small/quota"


async def shown(api: Api) -> dict[str, int | None]:
    return {one["name"]: one["quota"] for one in (await api.client.get("/api/v1/queues")).json()["items"]}


async def round_of(api: Api) -> None:
    await api.service.cluster.refresh()
    await api.service.orchestrator.round()
    await api.service.orchestrator.settle()


async def test_a_quota_that_is_set_decides_what_starts_and_outlives_a_restart(
    make_api: ApiMaker, database_url: str
):
    settings = {"database_url": database_url, "queues": {"default": None, "small": 0}}
    async with make_api(**settings) as api:
        job_id = await api.submit(queue="small")
        await round_of(api)
        job = await api.job(job_id)
        assert (job["state"], job["reason"]) == ("QUEUED", "WAITS_FOR_QUOTA")
        set_ = await api.client.put(QUOTA, json={"quota": 4})
        assert set_.json() == {"name": "small", "quota": 4, "configured": 0}
        assert await shown(api) == {"default": None, "small": 4}
        await api.rounds(job_id)
    async with make_api(**settings) as api:
        assert await shown(api) == {"default": None, "small": 4}
        waiting = await api.submit(queue="small")
        api.cluster.workers = 100
        await api.client.put(QUOTA, json={"quota": 2})  # below what runs: that goes on, nothing else starts
        await round_of(api)
        assert (await api.job(job_id))["state"] == "STARTING" and (await api.job(waiting))[
            "state"
        ] == "QUEUED"
        await api.client.put(QUOTA, json={"quota": None})
        await api.rounds(waiting)
        reset = await api.client.delete(QUOTA)
        assert reset.json() == {"name": "small", "quota": 0, "configured": 0}
        audit = (await api.client.get("/api/v1/audit", params={"subject": "small"})).json()["items"]
        assert [one["detail"] for one in audit] == ["as configured", "none", "2", "4"]


async def test_what_is_no_quota_or_no_queue_is_refused(make_api: ApiMaker):
    async with make_api(queues={"default": None, "small": 3}) as api:
        for body in (
            {"quota": -1},
            {"quota": "4"},
            {"quota": True},
            {},
            {"quota": 1, "x": 2},
            {"quota": 10**9},
        ):
            problem(await api.client.put(QUOTA, json=body), 422)
        refused = problem(await api.client.put("/api/v1/queues/large/quota", json={"quota": 1}), 404)
        assert "default, small" in refused["detail"]
        problem(await api.client.delete("/api/v1/queues/large/quota"), 404)
        assert await shown(api) == {"default": None, "small": 3}


@pytest.mark.parametrize(("role", "status"), [(Role.SUBMITTER, 403), (Role.OPERATOR, 200)])
async def test_only_operators_set_quotas(make_api: ApiMaker, role: Role, status: int):
    async with make_api(queues={"default": None, "small": 3}, api_token="root") as api:
        root = {"Authorization": "Bearer root"}
        made = await api.client.post("/api/v1/tokens", json={"name": "pat", "role": role}, headers=root)
        theirs = {"Authorization": f"Bearer {made.json()['token']}"}
        assert (await api.client.put(QUOTA, json={"quota": 1}, headers=theirs)).status_code == status
        assert (await api.client.delete(QUOTA, headers=theirs)).status_code == status


NLP_QUOTA = "/api/v1/projects/nlp/quotas/small"


async def with_project(api: Api) -> None:
    body = {"principal": "alice", "role": "submitter"}
    assert (await api.client.put("/api/v1/projects/nlp/members", json=body)).status_code == 200


async def test_a_quota_of_a_project_decides_what_starts_of_it_and_outlives_a_restart(
    make_api: ApiMaker, database_url: str
):
    settings = {"database_url": database_url, "queues": {"default": None, "small": None}}
    async with make_api(**settings) as api:
        await with_project(api)
        set_ = (await api.client.put(NLP_QUOTA, json={"quota": 0})).json()
        assert set_["quotas"] == [{"queue": "small", "quota": 0, "used": 0}]
        bounded, free = await api.submit(queue="small", project="nlp"), await api.submit(queue="small")
        await round_of(api)
        job = await api.job(bounded)
        assert (job["state"], job["reason"]) == ("QUEUED", "WAITS_FOR_QUOTA")
        assert "project nlp in queue small" in job["message"]
        assert (await api.job(free))["state"] == "STARTING"
    async with make_api(**settings) as api:
        assert (await api.client.get("/api/v1/projects/nlp")).json()["quotas"] == set_["quotas"]
        api.cluster.workers = 100
        await api.client.put(NLP_QUOTA, json={"quota": 5})
        await api.rounds(bounded)
        ((quota),) = (await api.client.get("/api/v1/projects/nlp")).json()["quotas"]
        assert quota == {"queue": "small", "quota": 5, "used": 4}
        waiting = await api.submit(queue="small", project="nlp")
        await round_of(api)
        assert "1 of its quota of 5 free" in (await api.job(waiting))["message"]
        assert (await api.client.put(NLP_QUOTA, json={"quota": None})).json()["quotas"] == []
        await api.rounds(waiting)
        audit = (await api.client.get("/api/v1/audit", params={"subject": "nlp"})).json()["items"]
        assert [entry["detail"] for entry in audit[:3]] == ["small: none", "small: 5", "small: 0"]


async def test_what_is_no_quota_no_queue_or_no_project_is_refused(make_api: ApiMaker):
    async with make_api(queues={"default": None, "small": 3}) as api:
        unknown = problem(await api.client.put(NLP_QUOTA, json={"quota": 1}), 404)
        assert "there is no project nlp" in unknown["detail"]
        await with_project(api)
        for body in ({"quota": -1}, {"quota": "4"}, {}, {"quota": 1, "x": 2}, {"quota": 10**9}):
            problem(await api.client.put(NLP_QUOTA, json=body), 422)
        refused = problem(await api.client.put("/api/v1/projects/nlp/quotas/large", json={"quota": 1}), 404)
        assert "default, small" in refused["detail"]
        assert (await api.client.get("/api/v1/projects/nlp")).json()["quotas"] == []


@pytest.mark.parametrize(("role", "status"), [(Role.SUBMITTER, 403), (Role.OPERATOR, 200)])
async def test_only_operators_set_quotas_of_projects(make_api: ApiMaker, role: Role, status: int):
    async with make_api(queues={"default": None, "small": 3}, api_token="root") as api:
        root = {"Authorization": "Bearer root"}
        body = {"principal": "pat", "role": "admin"}
        await api.client.put("/api/v1/projects/nlp/members", json=body, headers=root)
        made = await api.client.post("/api/v1/tokens", json={"name": "pat", "role": role}, headers=root)
        theirs = {"Authorization": f"Bearer {made.json()['token']}"}
        assert (await api.client.put(NLP_QUOTA, json={"quota": 1}, headers=theirs)).status_code == status
