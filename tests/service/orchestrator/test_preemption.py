"""Jobs that give way, and jobs whose time is over: from the decision to the next attempt, on a cluster in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.spec.states import AttemptState
from service.store import jobs as store
from service.store.attempts import find_attempt
from service.store.database import Database, utc_now
from service.store.events import events_of
from service.store.tables import Base
from service.store.transitions import lock_job
from tests.service.orchestrator.test_loop import SETTINGS, World
from worker.contract.reasons import Reason

SAVED = "asked to end: stopped after step 7, which is saved"


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr("service.orchestrator.attempts.watch._STOP_EVERY_S", 0.0)
    monkeypatch.setattr("service.orchestrator.ray.driver_logs._LOG_SETTLES_S", 0.0)
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'store.db'}")
    async with database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    world = World(database, SETTINGS.model_copy(update={"preemption_grace_s": 1000.0}))
    at_once(world)
    yield world
    await database.close()


def at_once(world: World) -> None:
    limits = world.orchestrator.attempts.limits
    world.orchestrator.attempts.limits = replace(limits, report_grace_s=0.0)


async def told(world: World, job_id: str) -> list[str]:
    async with world.database.read() as session:
        return [f"{event.kind} {event.message}" for event in await events_of(session, job_id)]


async def backdate(world: World, attempt_id: str, *, made_s: float = 0.0, asked_s: float = 0.0) -> None:
    """Have the attempt begin, or be asked to end, so much longer ago."""
    async with world.database.write() as session:
        attempt = await find_attempt(session, attempt_id)
        attempt.created_at -= timedelta(seconds=made_s)
        if attempt.end_asked_at is not None:
            attempt.end_asked_at -= timedelta(seconds=asked_s)


async def test_a_job_of_a_lower_priority_saves_gives_way_and_goes_on_from_there(world: World):
    low = await world.start()
    urgent = await world.submit(priority=5)
    await world.rounds()
    waiting, running = await world.job(urgent), await world.job(low)
    assert (waiting.state, waiting.reason) == ("QUEUED", "WAITS_FOR_ACCELERATORS")
    assert (running.state, running.reason) == ("RUNNING", "PREEMPTED")
    assert running.message == (
        f"gives way to job {urgent}, whose priority 5 is above 0; saves a checkpoint and ends"
    )
    assert world.cluster.stopped == [], "it has its grace"
    assert await world.report(f"{low}-1", 2) == "stop"
    await world.rounds()
    assert len([line for line in await told(world, low) if line.startswith("ending")]) == 1, "asked once"
    await world.report(f"{low}-1", 3, checkpoint=(7, "/there/7"))
    await world.report(f"{low}-1", 4, state=AttemptState.FAILED, reason=Reason.PREEMPTED, message=SAVED)
    recovering = await world.job(low)
    assert (recovering.state, recovering.reason) == ("RECOVERING", "PREEMPTED")
    world.cluster.states[f"{low}-1"] = RayJob(RayState.FAILED)
    await world.rounds(2)
    assert (await world.job(urgent)).state == "STARTING"
    assert (await world.job(low)).state == "RECOVERING"
    await world.report(f"{urgent}-1", 1, state=AttemptState.RUNNING)
    await world.report(f"{urgent}-1", 2, state=AttemptState.SUCCEEDED)
    await world.rounds(2)
    again = await world.job(low)
    assert (again.state, again.attempts_made, again.checkpoint_step) == ("STARTING", 2, 7)
    assert await world.report(f"{low}-2", 1, state=AttemptState.RUNNING) == "continue"
    assert (await world.attempt(f"{low}-1")).reason == "PREEMPTED"


async def test_giving_way_has_a_budget_of_its_own_and_uses_up_no_other(world: World):
    retry = {"infrastructure": 0, "user": 0, "preemption": 2}
    low = await world.start(retry=retry)
    for number in (1, 2, 3):
        urgent = await world.submit(priority=5)
        await world.rounds()
        await world.report(
            f"{low}-{number}", 100, state=AttemptState.FAILED, reason=Reason.PREEMPTED, message=SAVED
        )
        job = await world.job(low)
        if number == 3:
            assert (job.state, job.reason) == ("FAILED", "PREEMPTED")
            assert job.message.endswith("(retry.preemption is 2)")
            return
        assert job.state == "RECOVERING"
        await world.cancel(urgent)
        await world.rounds(2)
        assert await world.report(f"{low}-{number + 1}", 1, state=AttemptState.RUNNING) == "continue"


async def test_a_driver_that_does_not_end_in_its_grace_is_stopped_and_that_is_no_failure_of_the_job(
    world: World,
):
    low = await world.start(retry={"infrastructure": 0})
    await world.submit(priority=5)
    await world.rounds()
    await backdate(world, f"{low}-1", asked_s=999.0)
    await world.rounds()
    assert world.cluster.stopped == []
    await backdate(world, f"{low}-1", asked_s=2.0)
    assert await world.report(f"{low}-1", 2) == "stop", "it still talks"
    await world.rounds()
    assert world.cluster.stopped == [f"{low}-1"]
    await world.rounds()
    job = await world.job(low)
    assert (job.state, job.reason) == ("RECOVERING", "PREEMPTED"), job.message
    assert any("in the 1000 s that it had" in line for line in await told(world, low))


async def test_a_driver_that_ray_kills_while_it_saves_has_given_way(world: World):
    low = await world.start(retry={"infrastructure": 0})
    await world.submit(priority=5)
    await world.rounds()
    await world.report(f"{low}-1", 2, state=AttemptState.CANCELLED, reason=Reason.CANCELLED_BY_USER)
    job = await world.job(low)
    assert (job.state, job.reason) == ("RECOVERING", "PREEMPTED")


async def test_what_fails_while_it_gives_way_keeps_its_own_reason(world: World):
    low = await world.start()
    await world.submit(priority=5)
    await world.rounds()
    await world.report(f"{low}-1", 2, state=AttemptState.FAILED, reason=Reason.NAN_LOSS, message="NaN")
    job = await world.job(low)
    assert (job.state, job.reason) == ("FAILED", "NAN_LOSS")


async def test_a_job_that_ends_in_its_grace_has_succeeded(world: World):
    low = await world.start()
    urgent = await world.submit(priority=5)
    await world.rounds()
    await world.report(f"{low}-1", 2, state=AttemptState.SUCCEEDED)
    assert (await world.job(low)).state == "SUCCEEDED"
    await world.rounds(2)
    assert (await world.job(urgent)).state == "STARTING"


async def test_a_cancelled_job_gives_way_to_nobody_and_is_cancelled(world: World):
    low = await world.start()
    await world.cancel(low)
    await world.submit(priority=5)
    await world.rounds()
    assert await world.report(f"{low}-1", 2) == "cancel"
    assert (await world.attempt(f"{low}-1")).end_asked_at is None


async def test_a_preempted_job_that_ray_never_had_waits_again_at_once(world: World):
    world.cluster.not_now = "busy"
    low = await world.submit()
    await world.rounds()
    assert (await world.job(low)).state == "STARTING"
    await world.submit(priority=5)
    await world.rounds(2)
    job = await world.job(low)
    assert (job.state, job.reason) == ("RECOVERING", "PREEMPTED")


async def test_giving_way_goes_on_after_a_restart_of_the_control_plane(world: World):
    low = await world.start()
    urgent = await world.submit(priority=5)
    await world.rounds()
    world.restart()
    at_once(world)
    await world.rounds()
    assert await world.report(f"{low}-1", 2) == "stop"
    await world.report(f"{low}-1", 3, state=AttemptState.FAILED, reason=Reason.PREEMPTED, message=SAVED)
    await world.rounds(2)
    assert (await world.job(urgent)).state == "STARTING"


async def test_nobody_gives_way_where_that_is_turned_off(world: World):
    world.settings = SETTINGS.model_copy(update={"preemption": False})
    world.restart()
    low = await world.start()
    await world.submit(priority=5)
    await world.rounds()
    assert await world.report(f"{low}-1", 2) == "continue"


# Time that is over


async def test_a_job_saves_and_ends_when_its_time_is_over_with_a_reason_of_its_own(world: World):
    job_id = await world.start(max_duration="10m", retry={"user": 5, "preemption": -1})
    await world.rounds()
    assert await world.report(f"{job_id}-1", 2) == "continue"
    await backdate(world, f"{job_id}-1", made_s=600.0)
    await world.rounds()
    assert await world.report(f"{job_id}-1", 3) == "stop"
    await world.report(f"{job_id}-1", 4, state=AttemptState.FAILED, reason=Reason.PREEMPTED, message=SAVED)
    job = await world.job(job_id)
    assert (job.state, job.reason) == ("FAILED", "MAX_DURATION")
    assert job.message.startswith(f"{SAVED}; max_duration is 600 s: `slotline retry` goes on")
    assert (await world.attempt(f"{job_id}-1")).reason == "MAX_DURATION"


async def test_time_counts_over_all_attempts_but_not_while_the_job_waits(world: World):
    job_id = await world.start(max_duration=600, retry={"infrastructure": 5})
    await backdate(world, f"{job_id}-1", made_s=400.0)
    await world.report(f"{job_id}-1", 2, state=AttemptState.FAILED, reason=Reason.WORKER_LOST)
    assert 400 <= (await world.job(job_id)).held_s < 460
    async with world.database.write() as session:
        (await lock_job(session, job_id)).created_at -= timedelta(days=1)
    await world.rounds(2)
    await world.report(f"{job_id}-2", 1, state=AttemptState.RUNNING)
    await world.rounds()
    assert await world.report(f"{job_id}-2", 2) == "continue"
    await backdate(world, f"{job_id}-2", made_s=200.0)
    await world.rounds()
    assert await world.report(f"{job_id}-2", 3) == "stop"


async def test_a_job_whose_attempt_fails_when_its_time_is_over_is_not_tried_again(world: World):
    job_id = await world.start(max_duration=600)
    await backdate(world, f"{job_id}-1", made_s=601.0)
    await world.report(f"{job_id}-1", 2, state=AttemptState.FAILED, reason=Reason.WORKER_LOST, message="gone")
    job = await world.job(job_id)
    assert (job.state, job.reason) == ("FAILED", "MAX_DURATION") and job.message.startswith("gone; ")


async def test_a_user_who_tries_again_gives_the_job_its_time_again(world: World):
    job_id = await world.start(max_duration=600)
    await backdate(world, f"{job_id}-1", made_s=601.0)
    await world.report(f"{job_id}-1", 2, state=AttemptState.FAILED, reason=Reason.WORKER_LOST)
    async with world.database.write() as session:
        await store.retry_job(session, job_id, at=utc_now())
    await world.rounds(2)
    await world.report(f"{job_id}-2", 1, state=AttemptState.RUNNING)
    await world.rounds()
    assert await world.report(f"{job_id}-2", 2) == "continue"


async def test_a_job_with_a_limit_overtakes_one_that_must_wait_for_another_with_a_limit(world: World):
    """2 of 4 accelerators run for at most 1000 s; who needs all 4 waits, who needs 2 for a minute goes before."""
    await world.start(pipeline={"stages": 2}, max_duration=10_000)
    large = await world.submit()
    short = await world.submit(pipeline={"stages": 2}, max_duration=60)
    endless = await world.submit(pipeline={"stages": 2})
    await world.rounds(2)
    assert (await world.job(short)).state == "STARTING"
    assert (await world.job(large)).reason == "WAITS_FOR_ACCELERATORS"
    assert (await world.job(endless)).reason == "WAITS_FOR_ACCELERATORS"
