"""Projects: whose jobs and plans a caller finds, on every route with a job's id and in every list; who manages them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from service.control_plane import control_plane_app
from service.settings.settings import Settings
from service.store.attempts import record_placement
from service.store.database import utc_now
from service.store.plans import NewSavedPlan, store_saved_plan
from service.store.tables import PlacedMeshRow
from service.store.transitions import lock_job
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_jobs import problem
from tests.service.api.routers.test_people import ROOT, change, submitted, token
from tests.service.api.test_auth import ROUTES
from tests.service.conftest import job_body
from tests.service.fake_cluster import FakeCluster

APP = control_plane_app(Settings(api_token="secret"), FakeCluster())
JOB_ROUTES = sorted((method, path) for method, path in ROUTES if "{job_id}" in path)
OTHER_IDS = {"step": "1", "name": "export-step-0000000050"}
NOBODY = "job-aaaaaaaaaa"
PROJECTS = "/api/v1/projects"


@pytest.fixture
async def api(make_api: ApiMaker, database_url: str) -> AsyncIterator[Api]:
    """A server that asks for tokens, on each kind of database."""
    async with make_api(database_url=database_url, api_token="secret", metrics_token="scrape") as api:
        yield api


async def member(api: Api, principal: str, role: str, project: str = "nlp") -> dict[str, Any]:
    body = {"principal": principal, "role": role}
    answer = await api.client.put(f"{PROJECTS}/{project}/members", json=body, headers=ROOT)
    assert answer.status_code == 200, answer.text
    return answer.json()


@dataclass
class Team:
    """The project nlp, with a job of alice's in it, and bob who is in another project."""

    api: Api
    alice: dict[str, str]
    bob: dict[str, str]
    job: str

    async def get(self, path: str, headers: dict[str, str], **params: Any) -> Any:
        answer = await self.api.client.get(path, headers=headers, params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def listed(self, headers: dict[str, str], **params: Any) -> set[str]:
        jobs = await self.get("/api/v1/jobs", headers, **params)
        return {job["id"] for job in jobs["items"]}


@pytest.fixture
async def team(api: Api) -> Team:
    alice, bob = await token(api, "alice"), await token(api, "bob")
    await member(api, "alice", "submitter")
    await member(api, "bob", "admin", "vision")
    job = await submitted(api, alice, project="nlp", name="secret-name")
    assert job["project"] == job["spec"]["project"] == "nlp"
    return Team(api, alice, bob, job["id"])


async def ask(api: Api, method: str, path: str, job_id: str, headers: dict[str, str]) -> httpx.Response:
    place = path.replace("{job_id}", job_id)
    place = re.sub(r"{(\w+)}", lambda match: OTHER_IDS[match[1]], place)
    body = {"priority": 3} if method == "PATCH" else None
    return await api.client.request(method, place, json=body, headers=headers)


async def test_every_route_with_a_jobs_id_knows_no_job_of_a_project_that_the_caller_is_not_in(team: Team):
    """The routes are those of the application, so that one that is added is asked too; members find the same job."""
    assert len(JOB_ROUTES) > 20
    for method, path in JOB_ROUTES:
        hidden = await ask(team.api, method, path, team.job, team.bob)
        unknown = await ask(team.api, method, path, NOBODY, team.bob)
        assert hidden.status_code == 404, (method, path, hidden.text)
        assert hidden.text.replace(team.job, NOBODY) == unknown.text, (method, path)
        assert hidden.headers == unknown.headers, (method, path)
    assert (await team.get(f"/api/v1/jobs/{team.job}", team.alice))["state"] == "QUEUED"
    for method, path in JOB_ROUTES:
        own = await ask(team.api, method, path, team.job, team.alice)
        assert f"there is no job {team.job}" not in own.text, (method, path)
        assert own.status_code != 403, (method, path)


def test_every_path_below_the_jobs_has_the_id_as_job_id():
    """So the test above asks every route that takes one."""
    for _, path in ROUTES:
        below = re.match(r"(?:/api/v1)?/jobs/({\w+})", path)
        assert below is None or below[1] == "{job_id}", path
    queries = [
        parameter["name"]
        for path, operations in APP.openapi()["paths"].items()
        for operation in operations.values()
        for parameter in operation.get("parameters", [])
        if parameter["in"] == "query"
    ]
    assert "owner" in queries and not [name for name in queries if "job" in name]


@pytest.mark.parametrize("kind", ["events", "logs"])
async def test_a_stream_of_a_hidden_job_is_404(team: Team, kind: str):
    headers = {**team.bob, "Accept": "text/event-stream"}
    problem(await team.api.client.get(f"/api/v1/jobs/{team.job}/{kind}", headers=headers), 404)


async def test_the_page_of_a_hidden_job_is_that_of_a_job_that_is_not_there(team: Team):
    headers = {**team.bob, "Accept": "text/html"}
    hidden = await team.api.client.get(f"/jobs/{team.job}", headers=headers)
    unknown = await team.api.client.get(f"/jobs/{NOBODY}", headers=headers)
    assert hidden.status_code == 404 and "No such job" in hidden.text
    assert hidden.text.replace(team.job, NOBODY) == unknown.text
    own = await team.api.client.get(f"/jobs/{team.job}", headers=team.alice)
    assert own.status_code == 200


async def test_jobs_are_listed_to_members_operators_and_nobody_else(team: Team):
    shared = (await submitted(team.api, team.bob))["id"]
    olga = await token(team.api, "olga", "operator")
    assert await team.listed(team.alice) == await team.listed(olga) == {team.job, shared}
    assert await team.listed(team.bob) == {shared}
    assert (
        await team.listed(ROOT, project="nlp") == {team.job} == await team.listed(team.alice, project="nlp")
    )
    assert await team.listed(team.bob, project="nlp") == await team.listed(team.bob, owner="alice") == set()


async def test_queues_show_numbers_of_all_and_jobs_of_ones_own_projects(team: Team):
    shared = (await submitted(team.api, team.bob))["id"]
    for headers, shown in (
        (team.alice, {team.job, shared}),
        (team.bob, {shared}),
        (ROOT, {team.job, shared}),
    ):
        (queue,) = (await team.get("/api/v1/queues", headers))["items"]
        assert queue["depth"] == 2
        assert {job["id"] for job in queue["waiting"]} == shown
        assert sum(reason["jobs"] for reason in queue["reasons"]) == len(shown)
        assert {reason["first"]["id"] for reason in queue["reasons"]} <= shown


async def test_jobs_behind_a_hundred_of_another_project_are_listed(team: Team):
    for number in range(105):
        await submitted(team.api, team.alice, project="nlp", name=f"more-{number}")
    last = (await submitted(team.api, team.alice))["id"]
    (queue,) = (await team.get("/api/v1/queues", team.bob))["items"]
    assert [job["id"] for job in queue["waiting"]] == [last] and queue["depth"] == 107
    (queue,) = (await team.get("/api/v1/queues", team.alice))["items"]
    assert len(queue["waiting"]) == 100


async def test_clusters_and_nodes_show_what_is_held_and_only_jobs_of_ones_own_projects(team: Team):
    await team.api.rounds(team.job)
    (node, *_) = team.api.service.cluster.snapshot.nodes
    attempt = f"{team.job}-1"
    mesh = PlacedMeshRow(
        attempt_id=attempt,
        mesh="m0",
        node_id=node.id,
        job_id=team.job,
        cluster="default",
        node="a",
        workers=2,
    )
    async with team.api.service.database.write() as session:
        await record_placement(session, attempt, [mesh])
    for headers, shown in ((team.alice, [team.job]), (team.bob, []), (ROOT, [team.job])):
        cluster = await team.get("/api/v1/cluster", headers)
        assert [gang["job_id"] for gang in cluster["gangs"]] == shown
        assert sum(kind["used"] for kind in cluster["accelerators"]) > 0
        nodes = (await team.get("/api/v1/nodes", headers))["items"]
        assert [job["job_id"] for node in nodes for job in node["jobs"]] == shown
        assert sum(kind["used"] for node in nodes for kind in node["accelerators"]) > 0


async def test_metrics_name_jobs_of_projects_only_to_scrapers_and_operators(team: Team):
    await team.api.rounds(team.job)
    await team.api.report(team.job, 1, state="RUNNING")
    shared = await submitted(team.api, team.bob, pipeline={"stages": 1})
    team.api.cluster.workers = 100
    await team.api.rounds(shared["id"])

    async def jobs(headers: dict[str, str]) -> set[str]:
        text = (await team.api.client.get("/metrics", headers=headers)).text
        return set(re.findall(r'slotline_job_info{[^}]*job="([^"]+)"', text))

    for headers in ({}, team.alice, team.bob, {"Authorization": "Bearer wrong"}):
        assert await jobs(headers) == {shared["id"]}
    for headers in (ROOT, {"Authorization": "Bearer scrape"}):
        assert await jobs(headers) == {team.job, shared["id"]}


async def test_targets_of_hidden_jobs_are_for_the_scraper(team: Team):
    await team.api.rounds(team.job)
    (node, *_) = team.api.service.cluster.snapshot.nodes
    endpoint = f"{node.address}:9000"
    await team.api.report(team.job, 1, state="RUNNING", metrics_endpoint=endpoint)
    scraper = {"Authorization": "Bearer scrape"}
    for headers, shown in ((team.alice, 1), (team.bob, 0), (ROOT, 1), (scraper, 1)):
        assert len(await team.get("/api/v1/prometheus/targets", headers)) == shown


async def keep_plan(api: Api, owner: str, name: str, project: str) -> None:
    summary = {
        "job_name": "x",
        "begins": ["a"],
        "meshes": 1,
        "workers": [1],
        "microbatches": 1,
        "precision": "float32",
        "device": "cpu",
        "schedule": "1f1b",
        "recomputed": [],
        "step_s": 1.0,
        "notes": [],
    }
    new = NewSavedPlan(owner, project, name, "0" * 64, "worker", summary, '{"job": {}}', "{}")
    async with api.service.database.write() as session:
        await store_saved_plan(session, new, at=utc_now(), most=9)


async def test_saved_plans_are_found_by_members_of_their_project(team: Team):
    plans = "/api/v1/plans/named"
    await keep_plan(team.api, "alice", "night", "nlp")
    await keep_plan(team.api, "alice", "day", "default")

    async def names(headers: dict[str, str]) -> set[str]:
        return {plan["name"] for plan in (await team.get(plans, headers))["items"]}

    assert await names(team.alice) == await names(ROOT) == {"night", "day"}
    assert await names(team.bob) == {"day"}
    hidden = [
        await team.api.client.request(method, f"{plans}/night", params={"owner": "alice"}, headers=team.bob)
        for method in ("GET", "DELETE")
    ]
    unknown = await team.api.client.get(f"{plans}/none", params={"owner": "alice"}, headers=team.bob)
    for answer in hidden:
        assert problem(answer, 404)["detail"].replace("night", "none") == problem(unknown, 404)["detail"]
    refused = await team.api.client.delete(f"{plans}/day", params={"owner": "alice"}, headers=team.bob)
    assert "alice's, and bob is no operator" in problem(refused, 403)["detail"]
    await member(team.api, "bob", "admin")
    removed = await team.api.client.delete(f"{plans}/night", params={"owner": "alice"}, headers=team.bob)
    assert removed.status_code == 204, "an admin of the project"


async def test_a_plan_of_a_project_that_its_owner_has_left_is_there_to_be_removed_only(team: Team):
    await keep_plan(team.api, "alice", "night", "nlp")
    await leave(team.api, "alice")
    problem(await team.api.client.get("/api/v1/plans/named/night", headers=team.alice), 404)
    body = job_body(plan="night")
    told = problem(await team.api.client.post("/api/v1/jobs", json=body, headers=team.alice), 422)
    assert "you have no such saved plan" in told["detail"]
    removed = await team.api.client.delete("/api/v1/plans/named/night", headers=team.alice)
    assert removed.status_code == 204


async def test_stored_bytes_are_those_of_jobs_and_plans_that_the_caller_sees(team: Team):
    async with team.api.service.database.write() as session:
        (await lock_job(session, team.job)).stored_bytes = 1000
    await keep_plan(team.api, "alice", "night", "nlp")
    (usage,) = (await team.get("/api/v1/usage", team.alice))["items"]
    assert usage["owner"] == "alice" and usage["storage_bytes"] == 1000 and usage["plan_bytes"] > 0
    assert (await team.get("/api/v1/usage", team.bob))["items"] == []


async def leave(api: Api, principal: str, project: str = "nlp") -> None:
    params = {"principal": principal}
    answer = await api.client.delete(f"{PROJECTS}/{project}/members", params=params, headers=ROOT)
    assert answer.status_code == 204, answer.text


async def test_who_leaves_a_project_finds_none_of_its_own_jobs_there(team: Team):
    keyed = {"Idempotency-Key": "once", **team.alice}
    body = job_body(project="nlp", name="keyed")
    assert (await team.api.client.post("/api/v1/jobs", json=body, headers=keyed)).status_code == 201
    await leave(team.api, "alice")
    assert await team.listed(team.alice) == set()
    problem(await change(team.api, team.job, "cancel", team.alice), 404)
    told = problem(await team.api.client.post("/api/v1/jobs", json=body, headers=keyed), 422)
    assert "project" in told["detail"] and "use one of default" in told["detail"]


async def test_a_role_in_a_project_says_on_whose_jobs(team: Team):
    carol, dora, eve = [await token(team.api, name) for name in ("carol", "dora", "eve")]
    reader = await token(team.api, "reader", "viewer")
    for name, role in (("carol", "viewer"), ("dora", "submitter"), ("eve", "admin"), ("reader", "admin")):
        await member(team.api, name, role)
    for headers in (carol, dora, eve, reader):
        assert await team.listed(headers) == {team.job}
    told = problem(await change(team.api, team.job, "cancel", carol), 403)["detail"]
    assert "alice's" in told and "no admin of project nlp" in told
    problem(await change(team.api, team.job, "cancel", dora), 403)
    problem(await change(team.api, team.job, "cancel", reader), 403)  # its token reads only
    assert (await change(team.api, team.job, "cancel", eve)).status_code == 202
    body = job_body(project="nlp")
    told = problem(await team.api.client.post("/api/v1/jobs", json=body, headers=carol), 403)["detail"]
    assert "carol is viewer in project nlp" in told
    await member(team.api, "alice", "viewer")
    told = problem(await change(team.api, team.job, "retry", team.alice), 403)["detail"]
    assert "you are viewer in project nlp" in told
    other = (await submitted(team.api, team.alice))["id"]
    problem(await change(team.api, other, "cancel", eve), 403)  # of the default project


async def test_a_project_that_the_caller_is_not_in_is_one_that_is_not_there(team: Team):
    async def told(project: str, headers: dict[str, str]) -> str:
        answer = await team.api.client.post("/api/v1/jobs", json=job_body(project=project), headers=headers)
        return problem(answer, 422)["detail"]

    assert (await told("nlp", team.bob)).replace("nlp", "none") == await told("none", team.bob)
    assert "use one of default, vision" in await told("nlp", team.bob)
    assert "GET /api/v1/projects lists" in await told("nlpp", ROOT)
    hidden = await team.api.client.get(f"{PROJECTS}/nlp", headers=team.bob)
    unknown = await team.api.client.get(f"{PROJECTS}/none", headers=team.bob)
    assert problem(hidden, 404)["detail"].replace("nlp", "none") == problem(unknown, 404)["detail"]
    plan = await team.api.client.post("/api/v1/plans/job", json=job_body(project="nlp"), headers=team.bob)
    assert "there is no such project" in problem(plan, 422)["detail"]


async def test_a_hidden_jobs_checkpoint_is_one_of_a_job_that_is_not_there(team: Team):
    def begins_from(job_id: str) -> dict[str, Any]:
        return job_body(checkpoint={"uri": "/runs", "resume_from": job_id})

    answers = [
        await team.api.client.post("/api/v1/jobs", json=begins_from(job_id), headers=team.bob)
        for job_id in (team.job, NOBODY)
    ]
    hidden, unknown = (problem(answer, 422)["detail"] for answer in answers)
    assert hidden.replace(team.job, NOBODY) == unknown and "there is no job" in hidden


async def test_members_are_listed_to_members_and_the_audit_log_has_who_set_them(team: Team):
    shown = await member(team.api, "ci-*", "viewer")
    assert shown == {
        "name": "nlp",
        "role": "admin",
        "members": [
            {"principal": "alice", "role": "submitter"},
            {"principal": "ci-*", "role": "viewer"},
        ],
        "quotas": [],
    }
    assert await team.get(f"{PROJECTS}/nlp", team.alice) == shown | {"role": "submitter"}
    own = (await team.get(PROJECTS, team.bob))["items"]
    assert [(project["name"], project["role"]) for project in own] == [
        ("default", "submitter"),
        ("vision", "admin"),
    ]
    robot = await token(team.api, "ci-7", "viewer")
    assert await team.listed(robot) == {team.job}
    await leave(team.api, "ci-*")
    assert await team.listed(robot) == set()
    params = {"principal": "ci-*"}
    gone = await team.api.client.delete(f"{PROJECTS}/nlp/members", params=params, headers=ROOT)
    assert "has no member ci-*" in problem(gone, 404)["detail"]
    audit = (await team.get("/api/v1/audit", ROOT, subject="nlp"))["items"]
    assert [(entry["action"], entry["detail"]) for entry in audit] == [
        ("project.member", "ci-*: none"),
        ("project.member", "ci-*: viewer"),
        ("project.member", "alice: submitter"),
    ]


async def test_what_is_no_member_is_refused_and_the_default_project_has_everybody(team: Team):
    for project, body in (
        ("default", {"principal": "alice", "role": "viewer"}),
        ("nlp", {"principal": "alice", "role": "operator"}),
        ("nlp", {"principal": "alice", "role": "metrics"}),
        ("nlp", {"principal": "", "role": "viewer"}),
        ("nlp", {"principal": "a\nb", "role": "viewer"}),
        ("nlp", {"role": "viewer"}),
        ("n lp", {"principal": "alice", "role": "viewer"}),
    ):
        answer = await team.api.client.put(f"{PROJECTS}/{project}/members", json=body, headers=ROOT)
        problem(answer, 422)
    olga = await token(team.api, "olga", "operator")
    body = {"principal": "olga", "role": "admin"}
    problem(await team.api.client.put(f"{PROJECTS}/nlp/members", json=body, headers=olga), 403)


async def test_a_driver_works_for_a_job_whose_owner_has_left_its_project(team: Team):
    """Attempts have tokens of their own: members of projects are users."""
    await team.api.rounds(team.job)
    await leave(team.api, "alice")
    assignment = await team.api.driver(team.job, "GET")
    assert assignment.status_code == 200 and assignment.json()["job_id"] == team.job
    reported = await team.api.report(team.job, 1, state="RUNNING")
    assert reported.status_code == 200, reported.text


async def test_a_server_that_asks_for_no_token_shows_every_project(make_api: ApiMaker):
    async with make_api() as api:
        answer = await api.client.put(
            f"{PROJECTS}/nlp/members", json={"principal": "alice", "role": "viewer"}
        )
        assert answer.status_code == 200
        job_id = await api.submit(project="nlp")
        assert (await api.job(job_id))["project"] == "nlp"
        (job,) = (await api.client.get("/api/v1/jobs", params={"project": "nlp"})).json()["items"]
        assert job["id"] == job_id


async def test_a_specification_from_before_there_were_projects_is_of_the_default_one(team: Team):
    old = await submitted(team.api, team.alice)
    async with team.api.service.database.write() as session:
        row = await lock_job(session, old["id"])
        row.spec = {name: value for name, value in row.spec.items() if name != "project"}
    assert (await team.get(f"/api/v1/jobs/{old['id']}", team.bob))["project"] == "default"
