"""Jobs, states and events in the store, on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import inspect
from sqlalchemy.exc import IntegrityError

from service.orchestrator.attempts.admit import admission_order
from service.orchestrator.decisions.attempt_lifecycle import Capacity
from service.settings.settings import Settings
from service.spec.job import JobSpec
from service.spec.states import AttemptState, JobState
from service.store import jobs as store
from service.store.attempts import create_attempt
from service.store.database import Database
from service.store.events import events_of
from service.store.jobs import PageKey
from service.store.queues import count_jobs_and_attempts
from service.store.tables import Base, JobRow
from service.store.transitions import TransitionError, add_event, lock_job, move_attempt, move_job
from tests.service.conftest import create_job, job_body, somebody_waits

AT = datetime(2026, 5, 17, 12, 0, tzinfo=UTC)


async def submit(database: Database, at: datetime = AT, **changes) -> JobRow:
    async with database.write() as session:
        return await create_job(session, JobSpec.model_validate(job_body(**changes)), at=at)


async def force(database: Database, job_id: str, state: JobState) -> None:
    async with database.write() as session:
        (await lock_job(session, job_id)).state = state


async def test_migrations_make_exactly_the_tables_that_the_code_uses(database: Database):
    def compare(connection):
        from alembic.autogenerate import compare_metadata
        from alembic.migration import MigrationContext

        def is_of_the_code(
            _table, name, kind, *_
        ) -> bool:  # `compatibility` is asked by schema.py alone, of any version
            return (kind, name) != ("table", "compatibility")

        context = MigrationContext.configure(connection, opts={"include_object": is_of_the_code})
        return compare_metadata(context, Base.metadata), inspect(connection)

    async with database.engine.connect() as connection:
        differences, _ = await connection.run_sync(compare)
    assert differences == []


async def test_a_database_can_be_started_twice_and_at_once(empty_database_url: str):
    databases = [Database(empty_database_url) for _ in range(3)]
    for _ in range(2):
        await asyncio.gather(*(one.start() for one in databases))
    await submit(databases[0])
    for one in databases:
        await one.close()


async def test_a_job_is_read_as_it_was_submitted(database: Database):
    job = await submit(database, at=AT, priority=7, queue="default")
    async with database.read() as session:
        found = await store.find_job(session, job.id)
    assert JobSpec.model_validate(found.spec) == JobSpec.model_validate(job_body(priority=7))
    assert (found.state, found.created_at, found.accelerators) == ("QUEUED", AT, 4)
    assert found.created_at.tzinfo is not None


async def test_times_of_other_zones_are_stored_as_the_same_instant(database: Database):
    elsewhere = AT.astimezone(__import__("zoneinfo").ZoneInfo("Asia/Kathmandu"))
    job = await submit(database, at=elsewhere)
    async with database.read() as session:
        assert (await store.find_job(session, job.id)).created_at == AT


# Written down again by hand, so that the table is not compared with itself: what ended well never moves again,
# and nothing that has ended runs again without going through the queue.
MOVES = {
    "QUEUED": "STARTING CANCELLED FAILED",  # its check found what no attempt could do
    "STARTING": "RUNNING RECOVERING CANCELLING SUCCEEDED FAILED CANCELLED",
    "RUNNING": "RECOVERING CANCELLING SUCCEEDED FAILED CANCELLED",
    "RECOVERING": "STARTING CANCELLED",
    "CANCELLING": "SUCCEEDED FAILED CANCELLED",
    "SUCCEEDED": "",
    "FAILED": "QUEUED",
    "CANCELLED": "QUEUED",
}


@pytest.mark.parametrize("before", list(JobState))
async def test_a_job_moves_only_as_a_job_may(tmp_path, before: JobState):
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'store.db'}")
    async with database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    for after in JobState:
        job = await submit(database)
        await force(database, job.id, before)
        allowed = after in MOVES[before].split()
        async with database.write() as session:
            locked = await lock_job(session, job.id)
            if allowed:
                move_job(session, locked, after, at=AT)
            else:
                with pytest.raises(TransitionError, match=f"is {before} and cannot become {after}"):
                    move_job(session, locked, after, at=AT)
        async with database.read() as session:
            assert (await store.find_job(session, job.id)).state == (after if allowed else before)
            assert len(await events_of(session, job.id)) == (2 if allowed else 1)
    await database.close()


async def test_pages_hold_every_job_once_newest_first_also_when_times_are_equal(database: Database):
    times = [AT + timedelta(seconds=i // 3) for i in range(10)]
    made = [(await submit(database, at=at)).id for at in times]
    seen, after = [], None
    while True:
        async with database.read() as session:
            page = await store.list_jobs(session, limit=3, after=after)
        if not page:
            break
        seen += page
        after = PageKey(page[-1].created_at, page[-1].id)
    assert sorted(job.id for job in seen) == sorted(made)
    assert [job.created_at for job in seen] == sorted(times, reverse=True)


async def test_lists_are_filtered_by_state_and_queue(database: Database):
    first, second = await submit(database, queue="a"), await submit(database, queue="b")
    await force(database, second.id, JobState.RUNNING)
    async with database.read() as session:
        assert [job.id for job in await store.list_jobs(session, state=JobState.QUEUED)] == [first.id]
        assert [job.id for job in await store.list_jobs(session, queue="b")] == [second.id]
        assert not await store.list_jobs(session, state=JobState.RUNNING, queue="a")


async def test_an_idempotency_key_belongs_to_one_job(database: Database):
    spec = JobSpec.model_validate(job_body())
    async with database.write() as session:
        await create_job(session, spec, at=AT, idempotency_key="key")
    with pytest.raises(IntegrityError):
        async with database.write() as session:
            await create_job(session, spec, at=AT, idempotency_key="key")
    async with database.read() as session:
        assert len(await store.list_jobs(session)) == 1


async def test_a_waiting_job_is_cancelled_at_once_and_a_running_one_is_asked_to_end(database: Database):
    waiting, running = await submit(database), await submit(database)
    await force(database, running.id, JobState.RUNNING)
    for job in (waiting, running, waiting, running):
        async with database.write() as session:
            await store.cancel_job(session, job.id, at=AT)
    async with database.read() as session:
        first, second = await store.find_job(session, waiting.id), await store.find_job(session, running.id)
        assert (first.state, first.reason, first.finished_at) == ("CANCELLED", "CANCELLED_BY_USER", AT)
        assert (second.state, second.cancel_requested_at) == ("CANCELLING", AT)
        assert len(await events_of(session, running.id)) == 2
    async with database.write() as session:
        assert await store.cancel_job(session, "job-nothing", at=AT) is None


async def test_a_retried_job_waits_again_and_its_old_failures_no_longer_count(database: Database):
    job = await submit(database)
    async with database.write() as session:
        locked = await lock_job(session, job.id)
        await create_attempt(session, locked, device="cpu", at=AT)
        move_job(session, locked, JobState.FAILED, at=AT, reason="NAN_LOSS", message="the loss is NaN")
    async with database.write() as session:
        again = await store.retry_job(session, job.id, at=AT + timedelta(hours=1))
    assert (again.state, again.reason, again.attempts_forgiven, again.current_attempt) == (
        "QUEUED",
        None,
        1,
        None,
    )
    assert again.finished_at is None
    with pytest.raises(TransitionError):
        async with database.write() as session:
            await store.retry_job(session, job.id, at=AT)


async def test_a_job_and_its_attempt_remember_when_they_began_to_run_and_ended(database: Database):
    job, hours = await submit(database), [AT + timedelta(hours=n) for n in range(4)]
    async with database.write() as session:
        locked = await lock_job(session, job.id)
        attempt = await create_attempt(session, locked, device="cpu", at=hours[0])
        assert (attempt.started_at, attempt.finished_at, locked.started_at) == (None, None, None)
        move_attempt(attempt, AttemptState.RUNNING, at=hours[1])
        move_job(session, locked, JobState.RUNNING, at=hours[1])
        assert (locked.started_at, locked.finished_at) == (hours[1], None)
        move_attempt(attempt, AttemptState.FAILED, at=hours[2], reason="WORKER_LOST")
        move_job(session, locked, JobState.RECOVERING, at=hours[2])
        assert (attempt.started_at, attempt.finished_at) == (hours[1], hours[2])
        second = await create_attempt(session, locked, device="cpu", at=hours[2])
        move_job(session, locked, JobState.RUNNING, at=hours[3])
        assert locked.started_at == hours[1], "a job runs since its first attempt did"
        move_attempt(second, AttemptState.SUCCEEDED, at=hours[3])
        move_job(session, locked, JobState.SUCCEEDED, at=hours[3])
        assert (second.started_at, second.finished_at) == (None, hours[3])
        assert (locked.started_at, locked.finished_at) == (hours[1], hours[3])
        with pytest.raises(AssertionError, match="is already SUCCEEDED"):
            move_attempt(second, AttemptState.FAILED, at=hours[3])


async def test_a_job_that_succeeded_is_not_queued_again(database: Database):
    job = await submit(database)
    await force(database, job.id, JobState.SUCCEEDED)
    with pytest.raises(TransitionError, match="is SUCCEEDED and cannot become QUEUED"):
        async with database.write() as session:
            await store.retry_job(session, job.id, at=AT)


async def meeting(database: Database, job_id: str, first, *others):
    """Do `first` to the locked job, and let the others come while it still holds the lock; what each gave.

    Each takes a session of its own. They are let go when all of them wait for the lock, or have gone past it.
    """
    results = []

    async def other(work):
        async with database.write() as session:
            return await work(session)

    async with database.write() as session:
        locked = await lock_job(session, job_id)
        await first(session, locked)
        await session.flush()
        tasks = [asyncio.create_task(other(work)) for work in others]
        await somebody_waits(database, tasks)
    for task in tasks:
        results += await asyncio.gather(task, return_exceptions=True)
    return results


async def test_a_cancel_that_meets_the_end_of_its_job_is_refused_and_changes_nothing(database: Database):
    job = await submit(database)
    await force(database, job.id, JobState.RUNNING)

    async def succeed(session, locked):
        move_job(session, locked, JobState.SUCCEEDED, at=AT)

    (answer,) = await meeting(
        database, job.id, succeed, lambda session: store.cancel_job(session, job.id, at=AT)
    )
    assert isinstance(answer, TransitionError), answer
    async with database.read() as session:
        found = await store.find_job(session, job.id)
        assert (found.state, found.cancel_requested_at) == ("SUCCEEDED", None)
        assert [event.number for event in await events_of(session, job.id)] == [1, 2]


async def test_of_retries_and_cancels_that_meet_one_happens_and_the_others_are_told(database: Database):
    job = await submit(database)
    await force(database, job.id, JobState.RUNNING)

    async def fail(session, locked):
        move_job(session, locked, JobState.FAILED, at=AT, reason="NAN_LOSS")

    def retry(session):
        return store.retry_job(session, job.id, at=AT)

    answers = await meeting(database, job.id, fail, retry, retry, retry)
    assert sorted(type(answer).__name__ for answer in answers) == ["JobRow"] + ["TransitionError"] * 2
    async with database.read() as session:
        assert (await store.find_job(session, job.id)).state == "QUEUED"
        assert [event.number for event in await events_of(session, job.id)] == [1, 2, 3]


async def test_event_numbers_have_no_gaps_when_many_write_at_once(database: Database):
    job = await submit(database)

    async def write(index: int) -> None:
        async with database.write() as session:
            locked = await lock_job(session, job.id)
            await asyncio.sleep(0)
            add_event(session, locked, "note", f"event {index}", at=AT)

    await asyncio.gather(*(write(index) for index in range(20)))
    async with database.read() as session:
        events = await events_of(session, job.id)
        assert [event.number for event in events] == list(range(1, 22))
        assert [event.number for event in await events_of(session, job.id, after=18)] == [19, 20, 21]
    assert sorted(event.message for event in events[1:]) == sorted(f"event {index}" for index in range(20))


async def test_text_that_a_database_cannot_hold_is_kept_readable(database: Database):
    job = await submit(database)
    async with database.write() as session:
        locked = await lock_job(session, job.id)
        add_event(session, locked, "note", "a\x00b\ud800c" + "x" * 50_000, at=AT)
    async with database.read() as session:
        message = (await events_of(session, job.id))[-1].message
    assert message.startswith("a\N{REPLACEMENT CHARACTER}b?c") and len(message) < 21_000


async def test_a_failed_transaction_leaves_nothing(database: Database):
    with pytest.raises(RuntimeError):
        async with database.write() as session:
            await create_job(session, JobSpec.model_validate(job_body()), at=AT)
            raise RuntimeError
    async with database.read() as session:
        assert not await store.list_jobs(session)


async def test_counts_name_every_state_and_cause(database: Database):
    for state in (JobState.QUEUED, JobState.QUEUED, JobState.RECOVERING, JobState.FAILED):
        job = await submit(database)
        async with database.write() as session:
            locked = await lock_job(session, job.id)
            if state is JobState.FAILED:
                attempt = await create_attempt(session, locked, device="cpu", at=AT)
                attempt.state, attempt.reason = "FAILED", "NAN_LOSS"
            locked.state = state
    counts = await count_jobs_and_attempts(database, ("default", "idle"))
    assert counts.jobs_by_state == {
        **dict.fromkeys(map(str, JobState), 0),
        "QUEUED": 2,
        "RECOVERING": 1,
        "FAILED": 1,
    }
    assert counts.queue_depth == {"default": 3, "idle": 0}
    assert counts.attempts_by_cause == {
        "succeeded": 0,
        "cancelled": 0,
        "infrastructure": 0,
        "user": 1,
        "preemption": 0,
    }


async def test_others_have_their_turn_while_many_waiting_jobs_are_read(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store, "_ROWS_AT_ONCE", 7)
    ids = [(await submit(database, AT + timedelta(seconds=k))).id for k in range(50)]
    turns, rows = [], []

    async def other() -> None:
        while True:
            turns.append(len(rows))
            await asyncio.sleep(0)

    make = store.WaitingRow._make
    monkeypatch.setattr(store.WaitingRow, "_make", lambda row: rows.append(row) or make(row))
    task = asyncio.create_task(other())
    async with database.read() as session:
        waiting = await store.waiting_jobs(session)
    task.cancel()
    assert [job.id for job in waiting] == ids
    assert {7, 14, 21, 28, 35, 42, 49} <= {*turns}, "one turn at least behind every few rows"


@pytest.mark.parametrize("seed", range(3))
async def test_the_front_of_the_queues_has_the_first_turns_of_all(database: Database, seed: int):
    """Of many jobs of few owners and priorities a few are read, and their order is that of all."""
    draw = random.Random(seed)
    for _ in range(60):
        queue, owner = draw.choice(["default", "small"]), draw.choice(["ann", "bob"])
        spec = JobSpec.model_validate(
            job_body(
                queue=queue,
                priority=draw.choice([0, 0, 5]),
                pipeline={"stages": (size := draw.choice([1, 2]))},
                resources={"meshes": size},
            )
        )
        async with database.write() as session:
            job = await create_job(session, spec, at=AT + timedelta(seconds=draw.randrange(40)), owner=owner)
            job.reason = draw.choice([None, "WAITS_FOR_QUOTA", "WAITS_FOR_ACCELERATORS"])
    capacities = {"default": Capacity(total={"cpu": 4}, others={"cpu": 0})}
    settings = Settings(queues={"default": None, "small": None})
    async with database.read() as session:
        waiting = await store.waiting_jobs(session)
        front, groups = await store.waiting_front(session, 3)
    assert len(front) <= 2 * 2 * 2 * 2 * 3 < len(waiting)
    for queue in ("default", "small"):
        turns, found = (
            [job.id for job in admission_order(jobs, [], capacities, settings) if job.queue == queue]
            for jobs in (waiting, front)
        )
        assert found[:3] == turns[:3]
        of_reason = Counter(job.reason for job in waiting if job.queue == queue)
        assert {group.reason: group.jobs for group in groups if group.queue == queue} == of_reason
    for group in groups:
        assert group.first.id == next(
            job.id for job in waiting if (job.queue, job.reason) == (group.queue, group.reason)
        )
