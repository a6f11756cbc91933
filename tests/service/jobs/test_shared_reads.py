"""What many read is made once for them, anew while they go on asking, and never from before a change that they know of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from service.jobs.service import SharedReads
from service.spec.job import JobSpec
from service.spec.states import JobState
from service.store.database import Database, utc_now
from service.store.transitions import explain_wait, lock_job, move_job
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


class Readers:
    """Reads of answers, with a clock and changes that the test moves; nothing is made again before `next_round`."""

    def __init__(self) -> None:
        self.now, self.changes, self.rests = 100.0, 7, list[float]()
        self._round = asyncio.Event()
        self.reads = SharedReads(changes=lambda: self.changes, clock=lambda: self.now, sleep=self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        await self._round.wait()
        self._round.clear()

    async def next_round(self) -> None:
        self._round.set()
        await settled()

    def ask(self, made: Made, kind: str = "a") -> asyncio.Task[int]:
        return asyncio.create_task(self.reads.read(kind, made.make, every_s=1.0))


@pytest.fixture
async def readers() -> AsyncIterator[Readers]:
    readers = Readers()
    yield readers
    await readers.reads.close()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def answer(made: Made, *asking: asyncio.Task[int]) -> list[int]:
    """The answers, once one more may be made."""
    await settled()
    made.may_end.release()
    return await asyncio.wait_for(asyncio.gather(*asking), 5)


async def test_all_who_ask_while_one_is_made_have_it(readers: Readers):
    made = Made()
    first = readers.ask(made)
    await settled()
    assert await answer(made, first, *(readers.ask(made) for _ in range(5))) == [1] * 6
    assert await readers.ask(made) == 1
    assert made.begun == 1


async def test_who_knows_of_a_change_waits_for_what_begins_behind_it(readers: Readers):
    made = Made()
    before = readers.ask(made)
    await settled()
    readers.changes += 1
    behind = [readers.ask(made) for _ in range(5)]
    await settled()
    assert made.begun == 1, "one is made at a time"
    assert await answer(made, before) == [1]
    assert await answer(made, *behind) == [2] * 5
    assert await readers.ask(made) == 2
    readers.changes += 1
    assert await answer(made, readers.ask(made)) == [3]
    assert made.most_at_once == 1


async def test_changes_while_an_answer_is_made_do_not_hold_up_who_asked_before_them(readers: Readers):
    made = Made()
    first = readers.ask(made)
    await settled()
    readers.changes += 1
    second = readers.ask(made)
    assert await answer(made, first) == [1]
    await settled()
    readers.changes += 1
    assert await answer(made, second) == [2], "though another change came since it asked"
    assert await answer(made, readers.ask(made)) == [3]


async def test_it_is_made_anew_while_somebody_goes_on_asking_and_nobody_waits_for_that(readers: Readers):
    made = Made()
    assert await answer(made, readers.ask(made)) == [1]
    for number in range(2, 8):
        readers.now += 1.0
        await readers.next_round()
        assert made.begun == number
        assert await readers.ask(made) == number - 1, "it is still made"
        made.may_end.release()
        await settled()
        assert await readers.ask(made) == number
    readers.now += 41.0
    await readers.next_round()
    assert made.begun == 7, "nobody has asked for long"
    assert await answer(made, readers.ask(made)) == [8], "what is old is not given"


async def test_what_takes_long_is_made_more_rarely(readers: Readers):
    made = Made()
    asking = readers.ask(made)
    await settled()
    readers.now += 0.05
    await answer(made, asking)
    await settled()
    assert readers.rests == [1.0]
    await readers.next_round()
    readers.now += 2.0
    made.may_end.release()
    await settled()
    assert readers.rests == [1.0, 20.0]


async def test_kinds_do_not_wait_for_each_other(readers: Readers):
    slow, quick = Made(), Made()
    waits = readers.ask(slow, "slow")
    assert await answer(quick, readers.ask(quick, "quick")) == [1]
    assert await answer(slow, waits) == [1]


async def test_who_goes_away_takes_nothing_from_the_others(readers: Readers):
    made = Made()
    gone, stays = readers.ask(made), readers.ask(made)
    await settled()
    gone.cancel()
    assert await answer(made, stays) == [1]


async def test_an_error_is_that_of_all_who_asked_and_of_nobody_behind_them(readers: Readers):
    fails = True

    async def make() -> str:
        await settled()
        if fails:
            raise ValueError("no answer")
        return "an answer"

    async def ask() -> str:
        return await readers.reads.read("a", make, every_s=1.0)

    for error in await asyncio.gather(ask(), ask(), return_exceptions=True):
        assert isinstance(error, ValueError)
    fails = False
    assert await ask() == "an answer"
    fails = True
    readers.now += 1.0
    await readers.next_round()
    await settled()
    assert await ask() == "an answer", "one that failed in the background is no answer to anybody"
    readers.now += 4.0
    with pytest.raises(ValueError, match="no answer"):
        await ask()


async def test_nothing_is_made_behind_the_end(readers: Readers):
    made = Made()
    asking = readers.ask(made)
    await settled()
    await readers.reads.close()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await readers.next_round()
    assert made.begun == 1


async def test_moves_of_jobs_are_changes_once_they_are_committed(database: Database):
    before = database.changes
    async with database.write() as session:
        job = await create_job(session, JobSpec.model_validate(job_body()), at=utc_now())
    async with database.write() as session:
        locked = await lock_job(session, job.id)
        explain_wait(session, locked, "CHECKING", "it is checked", at=utc_now())
    assert database.changes == before, "of a new job its user's request is the change"
    with pytest.raises(ValueError, match="undone"):
        async with database.write() as session:
            move_job(session, await lock_job(session, job.id), JobState.CANCELLED, at=utc_now())
            raise ValueError("undone")
    assert database.changes == before
    async with database.write() as session:
        move_job(session, await lock_job(session, job.id), JobState.CANCELLED, at=utc_now())
    assert database.changes == before + 1
