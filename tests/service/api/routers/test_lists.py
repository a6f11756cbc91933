"""Lists and rounds leave long specifications where they are; on SQLite and on PostgreSQL."""

from __future__ import annotations

import pytest
import sqlalchemy
from sqlalchemy import event

from service.store.jobs import list_jobs
from tests.service.api.conftest import Api


def reading(statements: list[str]) -> list[str]:
    """Those that read a specification."""
    return [one for one in statements if one.startswith("SELECT") and "jobs.spec" in one]


async def test_no_list_and_no_round_reads_a_specification(api: Api):
    for _ in range(3):
        await api.submit(pipeline={"stages": 2})
    said: list[str] = []
    await api.service.cluster.refresh()

    @event.listens_for(api.service.database.engine.sync_engine, "before_cursor_execute")
    def _note(_c, _cursor, statement: str, *_: object) -> None:
        said.append(statement)

    first = (await api.client.get("/api/v1/jobs")).json()["items"][0]
    assert first["progress"]["steps"] == 10
    await api.client.get("/api/v1/queues")
    assert said and not reading(said)
    for _ in range(3):  # two start, the third is told why not
        await api.service.orchestrator.round()
        await api.service.orchestrator.settle()
    assert len(api.cluster.submissions) == 2
    assert len(reading(said)) == 4 + 2, "its own when a job starts, is submitted, and was: none beside"
    said.clear()
    await api.service.orchestrator.round()
    await api.service.orchestrator.settle()
    await api.client.get("/api/v1/cluster")
    await api.client.get("/api/v1/prometheus/targets")
    assert said and not reading(said)
    assert (await api.client.get("/api/v1/cluster")).json()["gangs"][0]["meshes"] == 2


async def test_the_cluster_shows_meshes_of_unlike_sizes_each_with_its_workers(api: Api):
    listed = [{"workers": 1}, {"workers": 2}, {"workers": 1}]
    job_id = await api.submit(pipeline={"stages": 3}, resources={"meshes": listed, "device": "cpu"})
    assert (await api.job(job_id))["spec"]["resources"]["workers"] == [1, 2, 1]
    await api.rounds(job_id)
    (gang,) = (await api.client.get("/api/v1/cluster")).raise_for_status().json()["gangs"]
    assert (gang["meshes"], gang["workers_per_mesh"], gang["workers"]) == (3, 2, [1, 2, 1])


async def test_a_job_of_a_list_refuses_to_show_a_specification_that_it_has_not(api: Api):
    await api.submit()
    async with api.service.database.read() as session:
        (job,) = await list_jobs(session)
        with pytest.raises(sqlalchemy.exc.InvalidRequestError):
            _ = job.spec
