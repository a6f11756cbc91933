"""A control plane that only answers, beside one that starts jobs; and what each says of itself."""

from __future__ import annotations

import re
import time

import httpx
import pytest

from service.api.dependencies import service_of
from service.control_plane import control_plane_app, run_control_plane
from service.settings.settings import Settings
from service.store.database import Database
from tests.polling import until_async
from tests.service.conftest import job_body
from tests.service.fake_cluster import FakeCluster

postgresql = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
RAY = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a lease that no test outlives."""
    monkeypatch.setattr("service.orchestrator.loop.TICK_S", 0.05)
    monkeypatch.setattr("service.control_plane.CLUSTER_REFRESH_S", 0.1)
    monkeypatch.setattr("service.orchestrator.loop.LEASE_S", 600.0)


def settings(database_url: str, **others: object) -> Settings:
    return Settings(
        database_url=database_url,
        ray_address=RAY,
        **others,
    )


def value(text: str, name: str) -> float | None:
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else None


@pytest.mark.slow
@postgresql
async def test_an_api_replica_answers_and_leaves_the_starting_to_others(
    database: Database, database_url: str
):
    cluster = FakeCluster()
    app = control_plane_app(settings(database_url, orchestrator=False), cluster)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            replica = service_of(app)

            async def ready() -> bool:
                return (await client.get("/readyz")).is_success

            await until_async(ready)
            job_id = (await client.post("/api/v1/jobs", json=job_body())).json()["id"]
            begun = replica.orchestrator.heartbeat.liveness.last_contact_at
            beats = iter(range(2))

            async def has_beaten_again() -> bool:
                nonlocal begun
                heard = replica.orchestrator.heartbeat.liveness.last_contact_at
                if heard > begun:
                    begun = heard
                    return next(beats) == 1
                return False

            await until_async(has_beaten_again)
            assert (await client.get(f"/api/v1/jobs/{job_id}")).json()["state"] == "QUEUED"
            said = (await client.get("/metrics")).text
            assert value(said, "slotline_orchestrator_leads") == 0
            assert value(said, "slotline_lease_left_seconds") == -1, "and nobody else does"
            assert value(said, "slotline_orchestrator_lag_seconds") is None
            assert await ready(), "it serves, whoever starts jobs"

            async with run_control_plane(settings(database_url), cluster) as other:

                async def started() -> bool:
                    return f"{job_id}-1" in cluster.submissions

                await until_async(started)
                assert other.leads() and not replica.leads()

                async def tells_who_leads() -> bool:  # scrapes within half a second share their text
                    said = (await client.get("/metrics")).text
                    return value(said, "slotline_lease_left_seconds") > 0

                await until_async(tells_who_leads, every_s=0.05)
                assert (await client.get(f"/api/v1/jobs/{job_id}")).json()["state"] == "STARTING"
                cancelled = await client.post(f"/api/v1/jobs/{job_id}/cancel")
                assert cancelled.is_success, "users are served by any"

            # a database that takes no writes makes it unready, as it does others
            replica.orchestrator.heartbeat.liveness.last_contact_at -= 60
            replica.orchestrator.heartbeat._begun_at = time.time() + 3600
            answer = await client.get("/readyz")
            assert answer.status_code == 503 and "no write for" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ray_address": RAY}, "SQLite serves one control plane"),
        ({"database_url": "postgresql://db/x"}, "set RAY_ADDRESS"),
    ],
)
def test_a_replica_that_could_be_of_no_use_is_refused(
    given: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ValueError, match=says):
        Settings(orchestrator=False, **given)
