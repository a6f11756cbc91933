"""Attempts as stored: numbers, tokens, metrics, logs; on SQLite and on PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from service.spec.job import JobSpec
from service.spec.states import JobState
from service.store.attempts import (
    active_attempts,
    attempts_with_metrics,
    attempts_without_log,
    create_attempt,
    find_attempt,
)
from service.store.database import Database
from service.store.tables import AttemptRow
from service.store.transitions import lock_job, move_job
from tests.service.conftest import create_job, job_body

AT = datetime(2026, 5, 17, 12, 0, tzinfo=UTC)


async def start(database: Database) -> AttemptRow:
    async with database.write() as session:
        job = await create_job(session, JobSpec.model_validate(job_body()), at=AT)
        return await create_attempt(session, job, device="cpu", at=AT)


async def next_attempt(database: Database, attempt: AttemptRow) -> AttemptRow:
    """The attempt that follows one that failed."""
    async with database.write() as session:
        job = await lock_job(session, attempt.job_id)
        move_job(session, job, JobState.RECOVERING, at=AT)
        return await create_attempt(session, job, device="cpu", at=AT)


async def test_an_attempt_takes_the_next_number_and_its_job_starts(database: Database):
    attempt = await start(database)
    async with database.read() as session:
        ((found, job),) = await active_attempts(session)
    assert (found.id, found.number, found.state, found.accelerators) == (attempt.id, 1, "STARTING", 4)
    assert (job.state, job.current_attempt) == ("STARTING", attempt.id)
    assert len(found.token) >= 32


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
        found = await attempts_with_metrics(session, ended_after=AT - timedelta(seconds=1))
        later = await attempts_with_metrics(session, ended_after=AT + timedelta(seconds=1))
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
