"""The API over parts that a test gives it: no orchestrator, as in a replica."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from service.api.app import create_app
from service.jobs.service import Service
from service.orchestrator.planning.pool import PlannerPool
from service.orchestrator.ray.clusters import build_clusters
from service.orchestrator.ray.driver_logs import LogReader
from service.orchestrator.tasks.artifacts import ExportTask, RemovalTask
from service.orchestrator.tasks.profile import ProfileTask
from service.orchestrator.tasks.runner import TaskRunner
from service.settings.settings import Settings
from service.store.attempts import create_attempt
from service.store.database import Database, utc_now
from service.store.transitions import lock_job
from tests.service.conftest import job_body
from tests.service.fake_cluster import FakeCluster


async def test_an_api_without_an_orchestrator_takes_jobs_and_shows_cluster_and_logs(tmp_path: Path):
    settings, cluster, woken = Settings(data_dir=tmp_path), FakeCluster(), []
    database = Database(settings.sqlalchemy_url)

    @asynccontextmanager
    async def serving() -> AsyncIterator[Service]:
        await database.start()
        clusters = build_clusters(settings, {"default": cluster}, refresh_s=600)
        await clusters.refresh()
        planner = PlannerPool(processes=1, queue=0, timeout_s=10)
        yield Service(
            settings,
            database,
            planner,
            TaskRunner(database, clusters, ProfileTask(database, clusters)),
            TaskRunner(database, clusters, ExportTask(database)),
            TaskRunner(database, clusters, RemovalTask(database, clusters)),
            clusters,
            LogReader(database, clusters),
            lambda: woken.append("woken"),
        )
        await database.close()

    app = create_app(settings, serving)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client,
    ):
        job = (await client.post("/api/v1/jobs", json=job_body())).raise_for_status().json()
        assert job["state"] == "QUEUED" and woken == ["woken"]
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.get("/api/v1/cluster")).json()["accelerators"][0]["free"] == 4
        async with database.write() as session:
            locked = await lock_job(session, job["id"])
            attempt = await create_attempt(session, locked, device="cpu", at=utc_now())
            attempt.submitted_at = utc_now()
        cluster.logs[f"{job['id']}-1"] = "hello\n"
        lines = (await client.get(f"/api/v1/jobs/{job['id']}/logs")).json()["items"]
        assert [line["text"] for line in lines] == ["hello"]
