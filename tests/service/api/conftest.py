"""The application on a real store with a cluster in memory, called without a socket."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from service.api.dependencies import service_of
from service.control_plane import ControlPlane, control_plane_app
from service.orchestrator.attempts.outcome import Backoff
from service.orchestrator.ray.jobs_api import Cluster
from service.settings.settings import Settings
from service.store.attempts import find_attempt
from tests.service.conftest import job_body
from tests.service.fake_cluster import FakeCluster
from tests.service.serving import set_backoff


@dataclass
class Api:
    """A running application and the calls that tests make most."""

    client: httpx.AsyncClient
    service: ControlPlane
    cluster: FakeCluster
    attempts: dict[str, str] = field(default_factory=dict)

    async def submit(self, **changes: Any) -> str:
        response = await self.client.post("/api/v1/jobs", json=job_body(**changes))
        assert response.status_code == 201, response.text
        return response.json()["id"]

    async def job(self, job_id: str) -> dict[str, Any]:
        return (await self.client.get(f"/api/v1/jobs/{job_id}")).raise_for_status().json()

    async def started(self, **changes: Any) -> str:
        """A job whose first attempt was given to the cluster."""
        job_id = await self.submit(**changes)
        await self.rounds(job_id)
        return job_id

    async def rounds(self, job_id: str, number: int = 1) -> None:
        """Work until the attempt `number` of a job was given to the cluster."""
        for _ in range(10):
            await self.service.clusters.refresh()
            await self.service.orchestrator.round()
            await self.service.orchestrator.settle()
            if f"{job_id}-{number}" in self.cluster.submissions:
                return
        raise AssertionError(f"attempt {number} of {job_id} did not start")

    async def driver(
        self,
        job_id: str,
        method: str,
        path: str = "",
        *,
        number: int = 1,
        token: str | None = None,
        **kwargs: Any,
    ) -> httpx.Response:
        """A call of an attempt's driver."""
        attempt_id = f"{job_id}-{number}"
        if token is None:
            async with self.service.database.read() as session:
                token = (await find_attempt(session, attempt_id)).token
        headers = {"Authorization": f"Bearer {token}", **kwargs.pop("headers", {})}
        return await self.client.request(
            method, f"/api/v1/attempts/{attempt_id}{path}", headers=headers, **kwargs
        )

    async def report(self, job_id: str, sequence: int, *, number: int = 1, **fields: Any) -> httpx.Response:
        return await self.driver(
            job_id, "POST", "/reports", number=number, json={"sequence": sequence, **fields}
        )


ApiMaker = Callable[..., AbstractAsyncContextManager[Api]]


@pytest.fixture
def make_api(tmp_path: Path, migrated_file: Path) -> ApiMaker:
    """`async with make_api(setting=...) as api`; the orchestrator works only when a test says so. Clusters beside the
    default one are given by name in `others`."""

    @asynccontextmanager
    async def make(
        others: Mapping[str, Cluster] = MappingProxyType({}), **settings: Any
    ) -> AsyncIterator[Api]:
        given = {"data_dir": tmp_path, **settings}
        if not (own := tmp_path / "slotline.db").exists():
            shutil.copy(migrated_file, own)
        cluster = FakeCluster()
        app = control_plane_app(Settings(**given), cluster, others)
        async with app.router.lifespan_context(app):
            service_of(app).orchestrator.stop()  # before it is given a turn: no round of its own
            await service_of(app).clusters.stop()
            set_backoff(service_of(app), Backoff(0.0, 0.0))
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
                yield Api(client, service_of(app), cluster)
            await service_of(
                app
            ).orchestrator.lease.release()  # as its loop does when it ends, which here never ran

    return make


@pytest.fixture
async def api(make_api: ApiMaker, database_url: str) -> AsyncIterator[Api]:
    """An application on each kind of database."""
    async with make_api(database_url=database_url) as api:
        yield api
