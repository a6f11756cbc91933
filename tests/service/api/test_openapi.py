"""The API against its own OpenAPI document: generated calls, good and bad, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.checks import load_all_checks

from service.control_plane import control_plane_app
from service.jobs.service import Service
from service.orchestrator.tasks.profile import ProfileTask
from service.settings.settings import Settings
from service.store.attempts import find_attempt
from tests.polling import until
from tests.service.conftest import job_body
from tests.service.serving import serve
from worker.contract import reasons

load_all_checks()
from schemathesis.specs.openapi import checks  # noqa: E402

# What a schema cannot say (microbatches must divide the batch, a stage's mesh must exist) is refused too.
EXCLUDED = [checks.positive_data_acceptance]


@dataclass
class Server:
    url: str
    job_id: str
    attempt_id: str
    token: str


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A served application with one job that runs."""
    folder = tmp_path_factory.mktemp("openapi")
    with (
        mock.patch.object(ProfileTask, "limit_s", 0.01),
        serve(Settings(data_dir=folder, plan_budget_s=0)) as served,
    ):
        job_id = httpx.post(f"{served.url}/api/v1/jobs", json=job_body()).json()["id"]
        until(
            lambda: httpx.get(f"{served.url}/api/v1/jobs/{job_id}").json()["attempts"],
            limit_s=100,
            every_s=0.05,
        )

        async def token(service: Service) -> str:
            async with service.database.read() as session:
                return (await find_attempt(session, f"{job_id}-1")).token

        yield Server(served.url, job_id, f"{job_id}-1", served.run(token))


@pytest.fixture(autouse=True)
def reasons_are_read_as_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated reports carry any text as their reason."""
    monkeypatch.setattr(reasons, "strict", False)


@schemathesis.serializer("application/zip")
def as_bytes(_context, value) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


@pytest.fixture
def document() -> Any:
    """Made when the test runs: the cases of all routes would be drawn while tests are collected."""
    return schemathesis.openapi.from_dict(control_plane_app(Settings()).openapi())


schema = schemathesis.pytest.from_fixture("document")


@pytest.mark.slow
@schema.parametrize()
@settings(
    max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
def test_answers_are_what_the_document_says(case: Case, server: Server):
    case.call_and_validate(base_url=server.url, excluded_checks=EXCLUDED, timeout=200)
    if "job_id" in case.path_parameters:
        case.path_parameters["job_id"] = server.job_id
    elif "attempt_id" in case.path_parameters:
        case.path_parameters["attempt_id"] = server.attempt_id
    else:
        return
    if case.path.endswith("/token"):
        return  # it would take the token away from the other routes
    response = case.call(
        base_url=server.url, headers={"Authorization": f"Bearer {server.token}"}, timeout=200
    )
    kinds = [
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    case.validate_response(response, checks=[schemathesis.checks.not_a_server_error, *kinds])


def test_every_route_is_documented_with_its_errors_as_problems(server: Server):
    document = httpx.get(f"{server.url}/openapi.json").json()
    expected = {
        "/api/v1/jobs",
        "/api/v1/jobs/{job_id}",
        "/api/v1/jobs/{job_id}/cancel",
        "/api/v1/jobs/{job_id}/retry",
        "/api/v1/jobs/{job_id}/events",
        "/api/v1/jobs/{job_id}/logs",
        "/api/v1/jobs/{job_id}/plan",
        "/api/v1/jobs/{job_id}/steps",
        "/api/v1/jobs/{job_id}/evaluations",
        "/api/v1/jobs/{job_id}/timeline",
        "/api/v1/plans",
        "/api/v1/packages",
        "/api/v1/cluster",
        "/api/v1/queues",
        "/api/v1/prometheus/targets",
        "/api/v1/version",
        "/api/v1/attempts/{attempt_id}",
        "/api/v1/attempts/{attempt_id}/profile",
        "/api/v1/attempts/{attempt_id}/token",
        "/api/v1/attempts/{attempt_id}/placement",
        "/api/v1/attempts/{attempt_id}/plan",
        "/api/v1/attempts/{attempt_id}/forward-plan",
        "/api/v1/attempts/{attempt_id}/step-plans",
        "/api/v1/attempts/{attempt_id}/reports",
        "/healthz",
        "/readyz",
    }
    assert expected <= set(document["paths"])
    for operations in document["paths"].values():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if status >= "400":
                    assert list(response["content"]) == ["application/problem+json"]
