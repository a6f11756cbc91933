"""Keepers of jobs that have ended are ended, whatever ended the job and whoever saw it; those of others are left alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from service.orchestrator import loop
from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.orchestrator.ray.jobs_api import RayJobSubmission, ResourceUse
from service.spec.states import AttemptState
from service.store.database import Database
from service.store.tables import Base
from tests.service.fake_cluster import FakeCluster
from tests.service.orchestrator.test_loop import World
from worker.contract.job import keeper_name
from worker.contract.reasons import Reason
from worker.contract.tasks import RELEASE_REQUEST_VARIABLE, RELEASE_RESULT_MARK, ReleaseRequest


class KeepingCluster(FakeCluster):
    """A cluster with keepers of copies, which end when a release asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.keeping: set[str] = set()
        self.released: list[tuple[str, ...]] = []
        self.breaks = False

    async def resources_in_use(self) -> list[ResourceUse]:
        held = await super().resources_in_use()
        return [*held, *(ResourceUse(keeper_name(job, "ab12"), {}, "node-1") for job in sorted(self.keeping))]

    async def submit(self, submission: RayJobSubmission) -> None:
        await super().submit(submission)
        if RELEASE_REQUEST_VARIABLE not in submission.env:
            return
        assert submission.entrypoint.endswith("-m worker.tasks release")
        jobs = ReleaseRequest.from_json(submission.env[RELEASE_REQUEST_VARIABLE]).jobs
        self.released.append(jobs)
        self.states[submission.id] = RayJob(RayState.FAILED if self.breaks else RayState.SUCCEEDED)
        if not self.breaks:
            self.keeping -= {*jobs}
            self.logs[submission.id] = f"{RELEASE_RESULT_MARK}{json.dumps({'keepers': list(jobs)})}\n"


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(loop, "RELEASE_SETTLE_S", 0.0)
    monkeypatch.setattr(loop, "RELEASE_PAUSE_S", 0.0)
    monkeypatch.setattr("service.orchestrator.tasks.runner.TASK_LOG_SETTLES_S", 0.0)
    monkeypatch.setattr("service.orchestrator.ray.driver_logs._LOG_SETTLES_S", 0.0)
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'store.db'}")
    async with database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    world = World(database)
    world.cluster = KeepingCluster()
    world.restart()
    yield world
    await database.close()


async def test_keepers_go_when_the_job_has_failed_and_not_while_it_recovers(world: World):
    job_id = await world.start(retry={"infrastructure": 1})
    world.cluster.keeping = {job_id, "of-another-slotline"}
    await world.rounds(2)
    for number in (1, 2):
        attempt = f"{job_id}-{number}"
        await world.report(attempt, 2, state=AttemptState.FAILED, reason=Reason.WORKER_LOST, message="gone")
        if number == 1:
            assert (await world.job(job_id)).state == "RECOVERING"
            await world.rounds(3)
            assert (await world.job(job_id)).state == "STARTING"
            assert world.cluster.released == []
            await world.report(f"{job_id}-2", 1, state=AttemptState.RUNNING)
    assert (await world.job(job_id)).state == "FAILED"
    await world.rounds(2)
    assert world.cluster.released == [(job_id,)]
    assert world.cluster.keeping == {"of-another-slotline"}


@pytest.mark.parametrize("away", [False, True])
async def test_keepers_go_when_a_job_is_cancelled_between_attempts_also_behind_a_restart(
    world: World, away: bool
):
    job_id = await world.start()
    world.cluster.keeping = {job_id}
    await world.report(f"{job_id}-1", 2, state=AttemptState.FAILED, reason=Reason.WORKER_LOST, message="gone")
    await world.cancel(job_id)
    assert (await world.job(job_id)).state == "CANCELLED"
    if away:  # whoever saw the end has told nobody
        world.restart()
    await world.rounds(2)
    assert world.cluster.released == [(job_id,)] and not world.cluster.keeping


async def test_a_release_that_fails_is_tried_again(world: World):
    job_id = await world.start()
    await world.report(f"{job_id}-1", 2, state=AttemptState.SUCCEEDED)
    world.cluster.keeping, world.cluster.breaks = {job_id}, True
    await world.rounds(2)
    assert {*world.cluster.released} == {(job_id,)} and world.cluster.keeping
    world.cluster.breaks = False
    await world.rounds(2)
    assert not world.cluster.keeping


async def test_a_driver_has_time_to_end_the_keepers_itself(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop, "RELEASE_SETTLE_S", 60.0)
    job_id = await world.start()
    await world.report(f"{job_id}-1", 2, state=AttemptState.SUCCEEDED)
    world.cluster.keeping = {job_id}
    await world.rounds(3)
    assert world.cluster.released == []
