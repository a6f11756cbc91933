"""What many read at the same time is made once for them, and never from before they asked."""

from __future__ import annotations

import asyncio

import pytest

from service.jobs.service import SharedReads
from service.spec.job import JobSpec
from service.store.database import Database, utc_now
from tests.service.conftest import create_job, job_body


class Made:
    """Answers that are numbered in the order in which their making begins; each waits until it may end."""

    def __init__(self) -> None:
        self.begun, self.at_once, self.most_at_once = 0, 0, 0
        self.may_end = asyncio.Semaphore(0)

    async def make(self) -> int:
        self.begun += 1
        number = self.begun
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await self.may_end.acquire()
        self.at_once -= 1
        return number


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_all_who_ask_while_one_is_made_share_the_next():
    reads, made = SharedReads(), Made()
    first = asyncio.create_task(reads.read("a", made.make))
    await settled()
    later = [asyncio.create_task(reads.read("a", made.make)) for _ in range(5)]
    await settled()
    assert made.begun == 1, "the next begins when the first is done"
    made.may_end.release()
    assert await first == 1
    await settled()
    latest = asyncio.create_task(reads.read("a", made.make))
    await settled()
    made.may_end.release()
    made.may_end.release()
    assert [await one for one in later] == [2] * 5
    assert await latest == 3, "what had begun before it asked is not for it"
    assert made.most_at_once == 1
    made.may_end.release()
    assert await reads.read("a", made.make) == 4


async def test_kinds_do_not_wait_for_each_other():
    reads, slow, quick = SharedReads(), Made(), Made()
    waits = asyncio.create_task(reads.read("slow", slow.make))
    await settled()
    quick.may_end.release()
    assert await reads.read("quick", quick.make) == 1
    slow.may_end.release()
    assert await waits == 1


async def test_who_goes_away_takes_nothing_from_the_others():
    reads, made = SharedReads(), Made()
    first = asyncio.create_task(reads.read("a", made.make))
    await settled()
    gone, stays = (asyncio.create_task(reads.read("a", made.make)) for _ in range(2))
    await settled()
    for task in (first, gone):
        task.cancel()
    made.may_end.release()
    made.may_end.release()
    assert await stays == 2


async def test_an_error_is_that_of_all_who_asked_and_of_nobody_behind_them():
    reads, made = SharedReads(), Made()

    async def fail() -> int:
        await made.make()
        raise ValueError("no answer")

    failing = [asyncio.create_task(reads.read("a", fail)) for _ in range(2)]
    await settled()
    made.may_end.release()
    made.may_end.release()
    for task in failing:
        with pytest.raises(ValueError, match="no answer"):
            await task
    made.may_end.release()
    assert await reads.read("a", made.make) == 3


async def test_an_answer_is_kept_for_a_while_as_long_as_nothing_is_committed():
    made, now, commits = Made(), 100.0, 7
    reads = SharedReads(commits=lambda: commits, clock=lambda: now)
    for _ in range(10):
        made.may_end.release()
    assert await reads.read("a", made.make, keep_s=1.0) == 1
    now += 0.9
    assert await reads.read("a", made.make, keep_s=1.0) == 1
    assert await reads.read("a", made.make) == 2, "who wants it fresh has it fresh"
    now += 1.0
    assert await reads.read("a", made.make, keep_s=1.0) == 3
    commits += 1
    assert await reads.read("a", made.make, keep_s=1.0) == 4


async def test_what_was_begun_before_a_commit_is_not_kept_behind_it():
    made, commits = Made(), 0
    reads = SharedReads(commits=lambda: commits, clock=lambda: 0.0)
    first = asyncio.create_task(reads.read("a", made.make, keep_s=1.0))
    await settled()
    commits += 1
    made.may_end.release()
    made.may_end.release()
    assert await first == 1
    assert await reads.read("a", made.make, keep_s=1.0) == 2


async def test_a_commit_is_counted_and_a_transaction_that_fails_is_not(database: Database):
    before = database.commits
    async with database.write() as session:
        await create_job(session, JobSpec.model_validate(job_body()), at=utc_now())
    assert database.commits == before + 1
    with pytest.raises(ValueError, match="undone"):
        async with database.write() as session:
            raise ValueError("undone")
    assert database.commits == before + 1
