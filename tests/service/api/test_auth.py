"""Who may call what: every route of the application, as the application itself lists them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from service.api.auth import LEAST_ROLE, least_role
from service.control_plane import control_plane_app
from service.settings.settings import Settings
from service.spec.principals import Role
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_jobs import problem
from tests.service.fake_cluster import FakeCluster
from tests.tiers import some_by_day

# Whoever may reach the server may call these; a new one is added here by hand, or it asks for a token.
PROBES = {("GET", path) for path in ("/healthz", "/readyz", "/metrics", "/api/v1/version", "/openapi.json")}
LOGIN = {("GET", path) for path in ("/login", "/login/callback", "/logout", "/static/{name}")} | {
    ("POST", path) for path in ("/login/renew", "/logout")
}
OPEN = PROBES | LOGIN
DRIVERS = "/api/v1/attempts/"


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    """(method, path) of everything that the application answers to."""
    return {
        (method, context.path)
        for context in iter_route_contexts(app.routes)
        for method in context.methods
        if method != "HEAD"
    }


ROUTES = routes_of(control_plane_app(Settings(api_token="secret"), FakeCluster()))


def test_the_routes_are_those_that_the_description_lists_and_the_pages():
    app = control_plane_app(Settings(api_token="secret"), FakeCluster())
    described = {(m.upper(), path) for path, item in app.openapi()["paths"].items() for m in item}
    assert described <= ROUTES and len(described) > 20
    assert OPEN <= ROUTES, "what is open is there"


@pytest.mark.parametrize("token", ["secret", None])
def test_the_description_says_whose_token_a_call_wants(token: str | None):
    paths = control_plane_app(Settings(api_token=token), FakeCluster()).openapi()["paths"]
    users = [{"user": []}] if token else None
    for path, operations in paths.items():
        for method, operation in operations.items():
            expected = [{"attempt": []}] if path.startswith(DRIVERS) else users
            if (method.upper(), path) in OPEN:
                expected = None
            assert operation.get("security") == expected, (method, path)


async def ask(api: Api, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    """Call a route with ids that fit and a body that does not: who may not call learns nothing of both."""
    place = re.sub(r"{[^}]*}", "job-none-1", path)
    return await api.client.request(method, place, params={"key": "k"}, json={}, headers=headers)


@some_by_day(("method", "path"), sorted(ROUTES - OPEN), by_day=20)
async def test_no_route_but_the_open_ones_answers_without_a_token_that_fits(
    make_api: ApiMaker, method: str, path: str
):
    async with make_api(api_token="secret") as api:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic bWU6d3Jvbmc="}):
            problem(await ask(api, method, path, headers), 401)
        users = await ask(api, method, path, {"Authorization": "Bearer secret"})
        if path.startswith(DRIVERS):
            problem(users, 401)
        else:
            assert users.status_code != 401


async def test_a_drivers_token_opens_its_own_attempt_and_nothing_of_the_users(make_api: ApiMaker):
    async with make_api(api_token="secret") as api:
        api.client.headers["Authorization"] = "Bearer secret"
        first = await api.started(pipeline={"stages": 2})
        second = await api.started(pipeline={"stages": 2})
        given = api.cluster.submissions[f"{first}-1"].env["SLOTLINE_ATTEMPT_TOKEN"]
        assert (await api.driver(first, "GET", token=given)).status_code == 200
        problem(await api.driver(second, "GET", token=given), 401)
        del api.client.headers["Authorization"]
        for method, path in sorted(ROUTES - OPEN):
            if not path.startswith(DRIVERS):
                problem(await ask(api, method, path, {"Authorization": f"Bearer {given}"}), 401)


async def test_the_token_that_ray_shows_opens_nothing_once_the_driver_has_exchanged_it(make_api: ApiMaker):
    async with make_api() as api:
        job = await api.started()
        shown = api.cluster.submissions[f"{job}-1"].env["SLOTLINE_ATTEMPT_TOKEN"]
        own, others = "d" * 43, "o" * 43
        problem(await api.driver(job, "POST", "/token", token=shown, json={"token": "short"}), 422)
        assert (await api.driver(job, "POST", "/token", token=shown, json={"token": own})).status_code == 204
        for path, body in (("", None), ("/token", {"token": others})):
            method = "GET" if body is None else "POST"
            refused = problem(await api.driver(job, method, path, token=shown, json=body), 401)
            assert "somebody else made the exchange" in refused["detail"]
        assert (await api.driver(job, "GET", token=own)).json()["job_id"] == job


async def test_the_metrics_token_opens_the_list_of_drivers_and_nothing_else(make_api: ApiMaker):
    async with make_api(api_token="secret", metrics_token="scrape\n") as api:
        headers = {"Authorization": "Bearer scrape"}
        targets = "/api/v1/prometheus/targets"
        assert (await api.client.get(targets, headers=headers)).json() == []
        for method, path in sorted(ROUTES - OPEN - {("GET", targets)}):
            problem(await ask(api, method, path, headers), 401 if path.startswith(DRIVERS) else 403)
        problem(await api.client.get(targets, headers={"Authorization": "Bearer wrong"}), 401)
    async with make_api(api_token="secret") as api:
        problem(await api.client.get(targets, headers=headers), 401)


@pytest.mark.parametrize(("method", "path"), sorted(PROBES))
async def test_what_probes_and_scrapers_need_is_open(make_api: ApiMaker, method: str, path: str):
    async with make_api(api_token="secret") as api:
        await api.service.cluster.refresh()
        assert (await ask(api, method, path, {})).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        "Basic bWU6c2VjcmV0",
        "basic bWU6c2VjcmV0",
        "BEARER secret",
        "Bearer  secret ",
    ],
)
async def test_a_token_comes_as_bearer_or_as_the_password_of_basic(make_api: ApiMaker, header: str):
    async with make_api(api_token="secret") as api:
        answer = await api.client.get("/api/v1/jobs", headers={"Authorization": header})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        "secret",
        "Bearer",
        "Bearer secret more",
        "Token secret",
        "Basic !bWU6c2VjcmV0",
        "Basic secret",
        "Basic bWU6",
        "Basic c2VjcmV0",
        "Basic /////w==",
        "Bearer  ",
        "Basic bWU6IA==",  # a blank password
    ],
)
async def test_what_is_no_token_is_refused_however_it_is_written(make_api: ApiMaker, header: str):
    async with make_api(api_token="secret") as api:
        problem(await api.client.get("/api/v1/jobs", headers={"Authorization": header}), 401)


def test_every_route_has_a_stated_least_role_and_no_other_has():
    asked = {(method, path) for method, path in ROUTES - OPEN if not path.startswith(DRIVERS)}
    assert asked - set(LEAST_ROLE) == set(), "state its least role in service/api/auth.py"
    assert set(LEAST_ROLE) - asked == set(), "there is no such route any more"


def test_an_unstated_route_is_for_admins():
    assert least_role("GET", "/api/v1/not-stated") is Role.ADMIN
    assert least_role("HEAD", "/") is least_role("GET", "/") is Role.VIEWER


@pytest.fixture
async def people(make_api: ApiMaker) -> AsyncIterator[tuple[Api, dict[Role, dict[str, str]]]]:
    """A server with one token of each role, and the headers that carry them."""
    async with make_api(api_token="secret", plan_budget_s=0) as api:
        headers = {}
        for role in Role:
            answer = await api.client.post(
                "/api/v1/tokens",
                json={"name": f"a-{role}", "role": role},
                headers={"Authorization": "Bearer secret"},
            )
            headers[role] = {"Authorization": f"Bearer {answer.raise_for_status().json()['token']}"}
        yield api, headers


async def test_each_role_is_let_in_from_the_least_one_on_and_told_403_below(people):
    """Every route, by every role: the tokens are real ones, of the store."""
    api, headers = people
    for method, path in sorted(ROUTES - OPEN):
        for role in Role:
            answer = await ask(api, method, path, headers[role])
            if path.startswith(DRIVERS):
                problem(answer, 401)
            elif role.includes(least_role(method, path)):
                assert answer.status_code not in (401, 403), (method, path, role, answer.text)
            else:
                told = problem(answer, 403)["detail"]
                assert f"a-{role} is {role}" in told and least_role(method, path) in told


async def test_below_the_role_a_body_is_not_read(people):
    """What cannot be JSON would be 422 where it was looked at."""
    api, headers = people
    content = {"content": b"{", "headers": headers[Role.VIEWER] | {"Content-Type": "application/json"}}
    problem(await api.client.post("/api/v1/jobs", **content), 403)
    content["headers"] = headers[Role.SUBMITTER] | {"Content-Type": "application/json"}
    problem(await api.client.post("/api/v1/jobs", **content), 422)
