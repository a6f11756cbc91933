"""What drivers report, as stored: steps, timelines, plans, profiles; on SQLite and on PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from service.jobspec import JobSpec
from service.store.attempts import (
    active_attempts,
    attempts_without_log,
    create_attempt,
    find_attempt,
    measured_attempts,
)
from service.store.database import Database
from service.store.jobs import create_job
from service.store.plans import find_plan, record_plan
from service.store.profiles import find_profile, record_profile
from service.store.states import lock_job
from service.store.steps import StepRecord, record_steps, steps_of
from service.store.tables import Attempt
from service.store.timelines import SlotRecord, find_timeline, profiled_steps, record_timeline
from tests.service.conftest import job_body

AT = datetime(2026, 5, 17, 12, 0, tzinfo=UTC)


async def start(database: Database) -> Attempt:
    async with database.write() as session:
        job = await create_job(session, JobSpec.model_validate(job_body()), at=AT)
        return await create_attempt(session, job, device="cpu", at=AT)


def step(number: int, loss: float | None = 1.0) -> StepRecord:
    return StepRecord(number, loss, 0.5, 0.4, 0.1, 0.0, 1.0, 2.0, 1e9 + number)


def slot(mesh: str = "m0", start_s: float = 0.0, **changes) -> SlotRecord:
    fields = {
        "mesh": mesh,
        "lane": "compute",
        "action": "F",
        "stage": "s0",
        "peer_stage": None,
        "peer_mesh": None,
        "edge": None,
        "microbatch": 0,
        "start_s": start_s,
        "end_s": start_s + 0.25,
    }
    return SlotRecord(**{**fields, **changes})


async def test_an_attempt_takes_the_next_number_and_its_job_starts(database: Database):
    attempt = await start(database)
    async with database.read() as session:
        ((found, job),) = await active_attempts(session)
    assert (found.id, found.number, found.state, found.accelerators) == (attempt.id, 1, "STARTING", 4)
    assert (job.state, job.current_attempt) == ("STARTING", attempt.id)
    assert len(found.token) >= 32


async def test_a_step_that_is_repeated_after_a_checkpoint_replaces_the_old_one(database: Database):
    attempt = await start(database)
    async with database.write() as session:
        await record_steps(session, attempt, [step(1), step(2, 9.0), step(3)])
    async with database.write() as session:
        await record_steps(session, attempt, [step(2, 0.5), step(4, None)])
    async with database.read() as session:
        steps = await steps_of(session, attempt.job_id)
        later = await steps_of(session, attempt.job_id, after=2, limit=1)
    assert [(s.step, s.loss) for s in steps] == [(1, 1.0), (2, 0.5), (3, 1.0), (4, None)]
    assert [s.step for s in later] == [3]
    assert steps[0].started_at == 1e9 + 1


async def test_a_timeline_is_read_as_it_was_measured(database: Database):
    attempt = await start(database)
    slots = [
        slot("m0"),
        slot(
            "m0", 0.25, lane="send:m1", action="SEND_F", peer_stage="s1", peer_mesh="m1", edge=0, microbatch=0
        ),
        slot("m1", 0.123456789012345, action="STEP", stage=None, microbatch=None),
    ]
    async with database.write() as session:
        await record_timeline(
            session, attempt, step=3, started_at=1.7e9, uncertainty_s=1e-4, slots=slots, keep=10
        )
    async with database.read() as session:
        timeline, found = await find_timeline(session, attempt.job_id, None)
        assert await find_timeline(session, attempt.job_id, 2) is None
    assert (timeline.step, timeline.started_at, timeline.uncertainty_s) == (3, 1.7e9, 1e-4)
    assert found == slots


async def test_only_the_last_timelines_are_kept_and_a_repeated_one_is_replaced(database: Database):
    attempt = await start(database)
    for number in (1, 2, 3, 4, 4):
        async with database.write() as session:
            await record_timeline(
                session, attempt, step=number, started_at=0.0, uncertainty_s=None, slots=[slot()], keep=2
            )
    async with database.read() as session:
        assert await profiled_steps(session, attempt.job_id) == [3, 4]
        assert await find_timeline(session, attempt.job_id, 2) is None
        assert len((await find_timeline(session, attempt.job_id, 4))[1]) == 1


async def test_plans_and_profiles_are_replaced_under_their_key(database: Database):
    attempt = await start(database)
    for text in ('{"plan": 1}', '{"plan": 2}'):
        async with database.write() as session:
            await record_plan(session, attempt, text, at=AT)
            await record_profile(session, "gpt/8/cpu", {"layers": [text]}, at=AT)
    async with database.read() as session:
        assert (await find_plan(session, attempt.job_id)).body == '{"plan": 2}'
        assert await find_profile(session, "gpt/8/cpu") == {"layers": ['{"plan": 2}']}
        assert await find_profile(session, "other") is None


async def test_drivers_that_serve_metrics_are_found_while_they_linger(database: Database):
    running, ended, silent = await start(database), await start(database), await start(database)
    async with database.write() as session:
        for attempt, endpoint, finished in (
            (running, "a:1", None),
            (ended, "b:2", AT),
            (silent, None, None),
        ):
            fresh = await find_attempt(session, attempt.id)
            fresh.metrics_endpoint, fresh.finished_at = endpoint, finished
    async with database.read() as session:
        found = await measured_attempts(session, ended_after=AT - timedelta(seconds=1))
        later = await measured_attempts(session, ended_after=AT + timedelta(seconds=1))
    assert {attempt.metrics_endpoint for attempt, _ in found} == {"a:1", "b:2"}
    assert [attempt.metrics_endpoint for attempt, _ in later] == ["a:1"]


async def test_logs_are_wanted_of_attempts_that_were_started_and_ended(database: Database):
    attempts = [await start(database) for _ in range(4)]
    async with database.write() as session:
        for attempt, submitted, finished, log in zip(
            attempts, (AT, AT, None, AT), (AT, None, AT, AT), (None, None, None, "text"), strict=True
        ):
            fresh = await find_attempt(session, attempt.id)
            fresh.submitted_at, fresh.finished_at, fresh.log = submitted, finished, log
    async with database.read() as session:
        found = await attempts_without_log(session, ended_before=AT + timedelta(seconds=1))
        assert [attempt.id for attempt in found] == [attempts[0].id]
        assert not await attempts_without_log(session, ended_before=AT)


async def test_the_next_attempt_of_a_job_gets_another_token(database: Database):
    attempt = await start(database)
    async with database.write() as session:
        job = await lock_job(session, attempt.job_id)
        job.state = "RECOVERING"
        second = await create_attempt(session, job, device="cpu", at=AT)
    assert (second.number, second.id == attempt.id, second.token == attempt.token) == (2, False, False)
