"""What the one door for changes of state writes: events in their words, and text that any database holds."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from service.spec.job import JobSpec
from service.spec.states import JobState
from service.spec.values import storable_text
from service.store.database import Database
from service.store.events import events_of
from service.store.tables import Base, JobRow
from service.store.transitions import explain_wait, lock_job, lock_jobs, move_job
from tests.service.conftest import create_job, job_body

AT = datetime(2026, 5, 17, 12, 0, tzinfo=UTC)
LIMIT = 20_000


@pytest.fixture
async def sqlite(tmp_path):
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'store.db'}")
    async with database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield database
    await database.close()


async def submit(database: Database) -> JobRow:
    async with database.write() as session:
        return await create_job(session, JobSpec.model_validate(job_body()), at=AT)


@pytest.mark.parametrize(
    ("told", "event"),
    [
        ({}, "STARTING"),
        ({"reason": "WORKER_LOST"}, "STARTING: WORKER_LOST"),
        ({"message": "node a is gone"}, "STARTING: node a is gone"),
        ({"reason": "WORKER_LOST", "message": "node a is gone"}, "STARTING: WORKER_LOST: node a is gone"),
    ],
)
async def test_a_change_of_state_is_told_with_its_reason_and_message(sqlite: Database, told, event):
    job = await submit(sqlite)
    async with sqlite.write() as session:
        locked = await lock_job(session, job.id)
        locked.reason, locked.message = "OLD", "old"
        move_job(session, locked, JobState.STARTING, at=AT, attempt=3, **told)
        assert (locked.reason, locked.message) == (told.get("reason"), told.get("message"))
    async with sqlite.read() as session:
        last = (await events_of(session, job.id))[-1]
    assert (last.number, last.kind, last.message, last.at, last.attempt) == (2, "state", event, AT, 3)


async def test_why_a_job_waits_is_an_event_only_when_the_kind_of_reason_changes(sqlite: Database):
    job = await submit(sqlite)
    for reason, message in (("A", "one"), ("A", "two"), ("B", "three"), ("A", "four")):
        async with sqlite.write() as session:
            locked = await lock_job(session, job.id)
            explain_wait(session, locked, reason, message, at=AT)
            assert (locked.reason, locked.message) == (reason, message)
    async with sqlite.read() as session:
        events = [(e.kind, e.message) for e in await events_of(session, job.id, after=1)]
    assert events == [("waiting", "one"), ("waiting", "three"), ("waiting", "four")]


async def test_of_several_jobs_only_those_asked_for_are_locked_in_the_order_of_their_ids(sqlite: Database):
    ids = [(await submit(sqlite)).id for _ in range(4)]
    async with sqlite.write() as session:
        assert (await lock_job(session, ids[2])).id == ids[2]
        assert await lock_job(session, "job-nothing") is None
        locked = await lock_jobs(session, [ids[3], "job-nothing", ids[0], ids[1]])
        assert [job.id for job in locked] == sorted([ids[0], ids[1], ids[3]])


def test_text_that_a_job_raised_holds_nothing_that_a_terminal_obeys():
    assert storable_text("a\x1b[31mred\x1b[0m\n\tb\x1b[2J\x00\r\x85") == "ared\n\tb\\x1b[2J\ufffd\\x0d\\x85"


def test_text_is_cut_where_it_is_over_the_limit_and_says_so():
    assert storable_text(None) is None and storable_text("") == ""
    assert storable_text("x" * LIMIT) == "x" * LIMIT
    assert storable_text("x" * (LIMIT + 1)) == "x" * LIMIT + " [cut at 20000 characters]"
