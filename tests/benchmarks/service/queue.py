"""A long queue: what reads take while thousands of jobs wait, and what a round of the orchestrator takes."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp

from service.spec.job import JobSpec
from service.store.database import Database, utc_now
from service.store.jobs import NewJob, create_jobs
from tests.benchmarks.service.load import by_clients, getting
from tests.benchmarks.service.server import Served, served
from tests.service.conftest import job_body

CLIENTS, ACCELERATORS = 8, 4
_A_TRANSACTION = 500
_SETTLE_LIMIT_S = 300.0
_ROUNDS = re.compile(r"^slotline_orchestrator_round_seconds_(sum|count) (\S+)$", re.MULTILINE)


async def add_waiting(database_url: str, jobs: int) -> str:
    """Jobs that wait, written as the control plane writes them; the id of the last."""
    database = Database(database_url)
    await database.start()
    spec, last = JobSpec.model_validate(job_body(name="waiting")), ""
    for begin in range(0, jobs, _A_TRANSACTION):
        async with database.write() as session:
            new = [NewJob(spec, utc_now())] * min(_A_TRANSACTION, jobs - begin)
            last = (await create_jobs(session, new))[-1].id
    await database.close()
    return last


async def measure(name: str, database_url: str, folder: Path, *, jobs: int, lasts_s: float) -> None:
    """Print a table of reads by CLIENTS clients at once, each kind for `lasts_s` seconds."""
    last = await add_waiting(database_url, jobs)
    with served(database_url, folder, accelerators=ACCELERATORS) as server:
        await explained(server, last)
        print(f"\n{name}, {jobs} waiting jobs, {CLIENTS} clients\n")
        print("| read | kB | p50 ms | p99 ms | a second |\n|---|---|---|---|---|")
        for title, path in {
            "one job": f"/api/v1/jobs/{last}",
            "list of jobs": "/api/v1/jobs",
            "queues": "/api/v1/queues",
            "cluster": "/api/v1/cluster",
            "metrics": "/metrics",
            "page of jobs": "/",
        }.items():
            size = len(await _text(server, path))
            answers = await by_clients(server.url, getting(path), clients=CLIENTS, lasts_s=lasts_s)
            p50, p99 = (1e3 * answers.quantile(share) for share in (0.5, 0.99))
            print(
                f"| {title} | {size / 1e3:.0f} | {p50:.0f} | {p99:.0f} | {answers.per_second:.0f} |",
                flush=True,
            )
        begun = await _rounds(server)
        await asyncio.sleep(lasts_s)
        count, seconds = (after - before for after, before in zip(await _rounds(server), begun, strict=True))
        print(
            f"\nA round of the orchestrator, with no client: {1e3 * seconds / max(count, 1):.0f} ms ({count:.0f} rounds)"
        )


async def explained(server: Served, job_id: str) -> None:
    """Return when the last job has been told why it waits."""
    async with asyncio.timeout(_SETTLE_LIMIT_S):
        while '"reason":null' in await _text(server, f"/api/v1/jobs/{job_id}"):
            await asyncio.sleep(0.5)


async def _rounds(server: Served) -> tuple[float, float]:
    """Rounds so far, and their seconds."""
    found = dict(_ROUNDS.findall(await _text(server, "/metrics")))
    return float(found["count"]), float(found["sum"])


async def _text(server: Served, path: str) -> str:
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        aiohttp.ClientSession(server.url, timeout=timeout, trust_env=False) as session,
        session.get(path) as response,
    ):
        return await response.text()
