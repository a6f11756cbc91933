"""How many jobs a second are taken from clients that submit one after another: ours, and Ray's own Jobs API."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from service.orchestrator.local_ray import LocalRay
from service.settings import Settings
from tests.benchmarks.service.load import Answers, by_clients, posting
from tests.benchmarks.service.server import Served, processor_s_of_session
from tests.service.conftest import job_body

CLIENTS = 8
_DRAIN_LIMIT_S = 240.0
_ENDED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})


async def to_slotline(served: Served, *, lasts_s: float) -> tuple[Answers, float]:
    """Answers of 201 (the job is committed), and the seconds of processor time that the control plane took."""
    served.told()
    begun = served.told()["processor_s"]
    answers = await by_clients(
        served.url,
        posting("/api/v1/jobs", job_body(), status=201),
        clients=CLIENTS,
        lasts_s=lasts_s,
    )
    return answers, served.told()["processor_s"] - begun


@contextlib.asynccontextmanager
async def local_ray(folder: Path) -> AsyncIterator[LocalRay]:
    """Ray as `slotline serve` starts it, with its Jobs API."""
    ray = LocalRay(Settings(data_dir=folder))
    await ray.start()
    try:
        yield ray
    finally:
        await ray.stop()


async def to_ray(ray: LocalRay, *, lasts_s: float) -> tuple[Answers, float, float]:
    """Answers of 200 to jobs that do nothing (`true`), the processor time of all of Ray until it has started and ended
    them, and how long that took beyond the last answer: so that the next measurement has the machine to itself."""
    headers = {"Authorization": f"Bearer {ray.token}"}
    session_id = ray.process_id
    begun = processor_s_of_session(session_id)
    answers = await by_clients(
        ray.address,
        posting("/api/jobs/", {"entrypoint": "true"}, status=200),
        clients=CLIENTS,
        lasts_s=lasts_s,
        headers=headers,
    )
    drained_at = time.monotonic()
    async with aiohttp.ClientSession(ray.address, headers=headers, trust_env=False) as session:
        while True:
            async with session.get("/api/jobs/") as response:
                states = [job["status"] for job in await response.json()]
            if all(state in _ENDED for state in states):
                break
            if time.monotonic() - drained_at > _DRAIN_LIMIT_S:
                raise RuntimeError(
                    f"Ray has not ended {sum(s not in _ENDED for s in states)} of {len(states)} jobs"
                )
            await asyncio.sleep(1.0)
    return answers, processor_s_of_session(session_id) - begun, time.monotonic() - drained_at
