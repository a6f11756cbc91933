"""Jobs that come together are stored together, and none fails for another; writes go in the order in which they came."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime

import pytest
from sqlalchemy import event, select
from sqlalchemy.exc import IntegrityError, OperationalError

from service.spec.job import JobSpec
from service.store import jobs as room
from service.store.database import Database
from service.store.events import events_of
from service.store.jobs import NewJob, SubmissionBatcher, find_job
from service.store.tables import AuditEntryRow, JobLabelRow
from tests.service.conftest import job_body

AT = datetime(2026, 5, 17, 12, 0, tzinfo=UTC)


def new(number: int = 0, key: str | None = None) -> NewJob:
    spec = JobSpec.model_validate(job_body(name=f"n{number}", labels={"number": str(number)}))
    return NewJob(spec, AT, owner="ann", idempotency_key=key)


def commits(database: Database) -> list[str]:
    found: list[str] = []
    event.listen(database.engine.sync_engine, "commit", lambda _: found.append("commit"))
    return found


async def test_jobs_that_come_together_share_one_commit_and_are_whole(database: Database):
    submissions, made = SubmissionBatcher(database), commits(database)
    jobs = await asyncio.gather(*(submissions.store(new(number)) for number in range(20)))
    assert len(made) == 1
    assert [job.name for job in jobs] == [f"n{number}" for number in range(20)]
    async with database.read() as session:
        labels = dict((await session.execute(select(JobLabelRow.job_id, JobLabelRow.value))).all())
        audited = (await session.execute(select(AuditEntryRow.subject))).scalars().all()
        for number, job in enumerate(jobs):
            stored = await find_job(session, job.id)
            (first,) = await events_of(session, job.id)
            assert (stored.name, stored.owner, stored.last_event) == (f"n{number}", "ann", 1)
            assert (first.number, first.kind, first.message) == (1, "state", "QUEUED: submitted by ann")
            assert labels[job.id] == str(number)
    assert Counter(audited) == Counter(job.id for job in jobs)


async def test_a_key_that_was_used_refuses_its_own_job_only(database: Database):
    submissions = SubmissionBatcher(database)
    first = await submissions.store(new(0, key="used"))
    asked = [new(1), new(2, key="used"), new(3, key="fresh"), new(4, key="fresh")]
    one, two, three, four = await asyncio.gather(
        *(submissions.store(each) for each in asked), return_exceptions=True
    )
    assert (one.name, three.name) == ("n1", "n3")
    assert isinstance(two, IntegrityError) and isinstance(four, IntegrityError)
    assert first.name == "n0"


async def test_a_caller_that_goes_takes_no_other_job_with_it(database: Database):
    submissions = SubmissionBatcher(database)
    async with database.write():  # SQLite: the jobs wait
        tasks = [asyncio.create_task(submissions.store(new(number))) for number in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        for _ in range(10):  # whatever a cancelled task does, it has done
            await asyncio.sleep(0)
    first, gone, third = await asyncio.gather(*tasks, return_exceptions=True)
    assert (first.name, third.name) == ("n0", "n2") and isinstance(gone, asyncio.CancelledError)
    assert (await submissions.store(new(5))).name == "n5"


async def test_a_database_that_is_away_is_asked_once_for_all(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    async def away(*_: object) -> None:
        asked.append(1)
        raise OperationalError("INSERT", {}, Exception("gone"))

    monkeypatch.setattr(room, "create_jobs", away)
    submissions = SubmissionBatcher(database)
    found = await asyncio.gather(
        *(submissions.store(new(number)) for number in range(5)), return_exceptions=True
    )
    assert all(isinstance(error, OperationalError) for error in found) and len(asked) == 1
    monkeypatch.undo()
    assert (await submissions.store(new(6))).name == "n6"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_who_waits_to_write_comes_before_who_asks_later(database: Database):
    """SQLite alone lets those that wait sleep ever longer, and whoever asks at the right moment goes before them."""
    order: list[str] = []

    async def write(who: str, times: int) -> None:
        for _ in range(times):
            async with database.write():
                order.append(who)
                await asyncio.sleep(0.005)

    async with database.write():
        busy = asyncio.create_task(write("busy", 50))
        await asyncio.sleep(0.02)
        others = [asyncio.create_task(write("other", 1)) for _ in range(4)]
        await asyncio.sleep(0.02)
    await asyncio.gather(busy, *others)
    assert order[:5] == ["busy", "other", "other", "other", "other"]
