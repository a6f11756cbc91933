"""A job that has succeeded, with all that is stored of one: its plan, steps, profiled slots, evaluations, checkpoint and
events. Made once a session as an SQLite file, of which each test has a copy."""

from __future__ import annotations

import asyncio
import shutil
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from service.orchestrator.attempts.outcome import (
    Backoff,
    DriverReport,
    EventRecord,
    TimelineRecord,
    apply_report,
)
from service.scheduler.planner import make_plan
from service.scheduler.programs.plan import Plan
from service.settings.settings import Settings
from service.spec.states import AttemptState
from service.store.attempts import create_attempt
from service.store.database import Database, utc_now
from service.store.measurements import EvaluationRecord
from service.store.plans import record_job_plan
from tests.service.api.pages.seed import STEPS, job_spec, measured, pipeline, plan_body, step
from tests.service.conftest import create_job

PROFILED = (20, 40)


@dataclass(frozen=True)
class FinishedJob:
    """`settings` are of a control plane whose data directory has it."""

    settings: Settings
    id: str
    plan: Plan
    checkpoint_uri: str


@pytest.fixture
def finished_job(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> FinishedJob:
    return finished_job_of(tmp_path_factory, tmp_path)


def finished_job_of(folders: pytest.TempPathFactory, below: Path) -> FinishedJob:
    """A copy in a folder below that one."""
    made, folder = _made_once(folders), below / "finished-job"
    shutil.copytree(made.settings.data_dir, folder)
    return replace(made, settings=Settings(data_dir=folder, port=0))


_made: list[FinishedJob] = []  # no fixture of the session: each module that imports one has its own


def _made_once(folders: pytest.TempPathFactory) -> FinishedJob:
    if not _made:
        settings = Settings(data_dir=folders.mktemp("finished-job"), port=0)
        thread = threading.Thread(target=lambda: _made.append(asyncio.run(_make(settings))))
        thread.start()  # of its own, as a test may have a loop here
        thread.join()
    return _made[0]


async def _make(settings: Settings) -> FinishedJob:
    database = Database(settings.sqlalchemy_url)
    await database.start()
    plan, uri = make_plan(pipeline()), f"{settings.data_dir}/checkpoints/step-40"
    running = DriverReport(
        1,
        state=AttemptState.RUNNING,
        steps=[step(number) for number in range(1, STEPS + 1)],
        timelines=[TimelineRecord(number, 1.8e9 + number, 2e-5, measured(plan)) for number in PROFILED],
        evaluations=[EvaluationRecord(number, 1.5, 64, 0.1, None, {"f1": 0.5}) for number in (0, 20, 40)],
        events=[EventRecord(utc_now(), "checkpoint", f"after step 40: 12 MB at {uri}")],
        checkpoint=(STEPS, uri),
        peak_memory_bytes={"mesh0": 3 << 20},
    )
    try:
        async with database.write() as session:
            job = await create_job(session, job_spec("finished"), at=utc_now())
            attempt = await create_attempt(session, job, device="cpu", at=utc_now())
            await record_job_plan(session, attempt, plan_body(pipeline(), plan), at=utc_now())
        for report in (running, DriverReport(2, state=AttemptState.SUCCEEDED)):
            async with database.write() as session:
                await apply_report(session, attempt.id, report, at=utc_now(), backoff=Backoff(), keep=9)
        return FinishedJob(settings, job.id, plan, uri)
    finally:
        await database.close()
