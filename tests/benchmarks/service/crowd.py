"""A control plane in use: 1,000 jobs wait, 4 train, 200 clients follow events, 3,000 jobs are history.

Drivers are simulated: they report over HTTP what drivers report, with their attempts' tokens, every second.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from datetime import timedelta

import aiohttp
from sqlalchemy import select

from service.spec.job import JobSpec
from service.spec.states import AttemptState, JobState
from service.store.attempts import create_attempt
from service.store.database import Database, utc_now
from service.store.jobs import NewJob, create_jobs
from service.store.tables import AttemptRow
from service.store.transitions import move_attempt, move_job
from tests.benchmarks.service.load import Answers, by_clients, getting, posting
from tests.benchmarks.service.server import Served
from tests.service.conftest import job_body

WAITING, TRAINING, STREAMS, HISTORY = 1000, 4, 200, 3000
ACCELERATORS_A_JOB = 4
_REPORT_EVERY_S = 1.0
_TIMELINE_EVERY_S = 30.0
_STEPS_A_REPORT = 5
_SLOTS = 4 * 2 * 8 * 2
_START_LIMIT_S = 120.0


async def add_history(database_url: str) -> None:
    """Jobs that have ended, with an attempt each, written as the control plane writes them."""
    database = Database(database_url)
    await database.start()
    spec, at = JobSpec.model_validate(job_body(name="ended")), utc_now() - timedelta(days=1)
    for begin in range(0, HISTORY, 100):
        async with database.write() as session:
            made_at = at + timedelta(seconds=begin)
            for job in await create_jobs(session, [NewJob(spec, made_at)] * min(100, HISTORY - begin)):
                attempt = await create_attempt(session, job, device="cpu", at=made_at)
                move_attempt(attempt, AttemptState.RUNNING, at=made_at)
                move_job(session, job, JobState.RUNNING, at=made_at, attempt=1)
                move_attempt(attempt, AttemptState.SUCCEEDED, at=made_at)
                move_job(session, job, JobState.SUCCEEDED, at=made_at, attempt=1)
                job.step, job.loss = 10, 2.0
    await database.close()


async def started(served: Served, database_url: str) -> list[AttemptRow]:
    """The attempts that the control plane has started for the jobs that train."""
    async with aiohttp.ClientSession(served.url, trust_env=False) as session:
        for _ in range(TRAINING):
            await posting("/api/v1/jobs", job_body(name="training"), status=201)(session)
    database, deadline = Database(database_url), time.monotonic() + _START_LIMIT_S
    query = select(AttemptRow).where(
        AttemptRow.state == AttemptState.STARTING, AttemptRow.submitted_at.is_not(None)
    )
    try:
        while True:
            async with database.read() as session:
                attempts = list((await session.execute(query)).scalars())
            if len(attempts) == TRAINING:
                return attempts
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(attempts)} of {TRAINING} jobs have started in {_START_LIMIT_S} s")
            await asyncio.sleep(0.2)
    finally:
        await database.close()


async def add_waiting(served: Served) -> None:
    """Jobs for which no accelerator is free."""
    gate = asyncio.Semaphore(16)
    async with aiohttp.ClientSession(served.url, trust_env=False) as session:
        post = posting("/api/v1/jobs", job_body(name="waiting"), status=201)

        async def one() -> None:
            async with gate:
                await post(session)

        await asyncio.gather(*(one() for _ in range(WAITING)))


async def driver(url: str, attempt: AttemptRow) -> None:
    """Reports until it is cancelled, as a driver that trains does."""
    headers = {"Authorization": f"Bearer {attempt.token}"}
    step, sequence, timeline_at = 0, 0, 0.0
    async with aiohttp.ClientSession(url, headers=headers, trust_env=False) as session:
        while True:
            sequence += 1
            steps = [
                {"step": step + n, "loss": 2.0, "step_s": 0.2, "makespan_s": 0.19, "started_at": time.time()}
                for n in range(1, _STEPS_A_REPORT + 1)
            ]
            step += _STEPS_A_REPORT
            body = {"sequence": sequence, "state": "RUNNING" if sequence == 1 else None, "steps": steps}
            body["events"] = [
                {"at": time.time(), "kind": "note", "message": f"step {step} is done", "attempt": 1}
            ]
            if time.monotonic() > timeline_at + _TIMELINE_EVERY_S:
                timeline_at = time.monotonic()
                body["timelines"] = [
                    {
                        "step": step,
                        "started_at": time.time(),
                        "slots": [
                            {
                                "mesh": f"m{n % 4}",
                                "lane": "compute",
                                "action": "F" if n % 2 else "B",
                                "stage": f"s{n % 4}",
                                "microbatch": n // 8,
                                "start_s": 0.001 * n,
                                "end_s": 0.001 * n + 0.001,
                            }
                            for n in range(_SLOTS)
                        ],
                    }
                ]
            await posting(f"/api/v1/attempts/{attempt.id}/reports", body, status=200)(session)
            await asyncio.sleep(_REPORT_EVERY_S)


@dataclass
class Followed:
    """What came through all event streams: events, and how often a stream broke and was opened again."""

    events: int = 0
    broken: int = 0


async def follower(url: str, job_id: str, seen: Followed) -> None:
    """Follows the events of a job until it is cancelled, as a browser does."""
    timeout, last = aiohttp.ClientTimeout(total=None), ""
    async with aiohttp.ClientSession(url, timeout=timeout, trust_env=False) as session:
        while True:
            headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last} if last else {})}
            try:
                async with session.get(f"/api/v1/jobs/{job_id}/events", headers=headers) as response:
                    assert response.status == 200, response.status
                    async for line in response.content:
                        seen.events += line.startswith(b"data:")
                        last = line[3:].decode().strip() if line.startswith(b"id:") else last
            except aiohttp.ClientError:
                pass
            seen.broken += 1
            await asyncio.sleep(1.0)


async def measured(
    served: Served, attempts: list[AttemptRow], *, lasts_s: float
) -> tuple[dict[str, Answers], Followed]:
    """What clients wait for, each kind asked all the time while the rest goes on."""
    seen, job_id = Followed(), attempts[0].job_id
    background = [asyncio.create_task(driver(served.url, attempt)) for attempt in attempts]
    background += [
        asyncio.create_task(follower(served.url, attempts[n % TRAINING].job_id, seen)) for n in range(STREAMS)
    ]
    kinds = {
        "GET /jobs": getting("/api/v1/jobs?limit=50"),
        "GET /jobs?state=QUEUED": getting("/api/v1/jobs?state=QUEUED&limit=50"),
        "GET /jobs/ID": getting(f"/api/v1/jobs/{job_id}"),
        "GET /jobs/ID/steps": getting(f"/api/v1/jobs/{job_id}/steps?limit=100"),
        "GET /queues": getting("/api/v1/queues"),
        "GET /cluster": getting("/api/v1/cluster"),
        "POST /jobs": posting("/api/v1/jobs", job_body(name="waiting"), status=201),
    }
    try:
        await asyncio.sleep(5.0)  # streams are open, drivers run
        served.told()
        answers = await asyncio.gather(
            *(by_clients(served.url, ask, clients=1, lasts_s=lasts_s, pause_s=0.1) for ask in kinds.values())
        )
    finally:
        for task in background:
            if task.done() and not task.cancelled():
                task.result()
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*background, return_exceptions=True)
    if not seen.events:
        raise RuntimeError("no event came through any of the streams")
    return dict(zip(kinds, answers, strict=True)), seen
