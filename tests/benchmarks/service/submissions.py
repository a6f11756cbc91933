"""How many jobs a second are taken from clients that submit one after another: ours, and Ray's own Jobs API."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from service.orchestrator.ray.local_ray import LocalRay
from service.settings.settings import Settings
from tests.benchmarks.service.load import Answers, by_clients, posting
from tests.benchmarks.service.server import Served, processor_s_of_session
from tests.service.conftest import job_body

CLIENTS = 8


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


async def to_ray(ray: LocalRay, *, lasts_s: float) -> tuple[Answers, float]:
    """Answers of 200 to jobs that do nothing (`true`), and the processor time of all of Ray until the last answer.

    Ray starts them meanwhile; those that it has not started by then (it is minutes behind) are ended with it.
    """
    headers = {"Authorization": f"Bearer {ray.token}"}
    post = posting("/api/jobs/", {"entrypoint": "true"}, status=200)
    async with aiohttp.ClientSession(ray.address, headers=headers, trust_env=False) as session:
        await post(session)  # the first one waits for parts of Ray that start with it
    session_id = ray.process_id
    assert session_id is not None
    begun = processor_s_of_session(session_id)
    answers = await by_clients(ray.address, post, clients=CLIENTS, lasts_s=lasts_s, headers=headers)
    return answers, processor_s_of_session(session_id) - begun
