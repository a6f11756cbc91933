"""Steps as stored; on SQLite and on PostgreSQL."""

from __future__ import annotations

from service.store.database import Database
from service.store.measurements import StepRecord, record_steps, steps_of
from tests.service.store.test_attempts import next_attempt, start


def step(number: int, loss: float | None = 1.0) -> StepRecord:
    return StepRecord(number, loss, 0.5, 0.4, 0.1, 0.0, 1.0, 2.0, 1e9 + number)


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


async def test_a_resumed_attempts_steps_come_last_though_the_dead_one_went_further(database: Database):
    first = await start(database)
    second = await next_attempt(database, first)
    async with database.write() as session:
        await record_steps(session, first, [step(number, 9.0) for number in range(1, 7)])
    async with database.write() as session:
        await record_steps(session, second, [step(3), step(4)])
    async with database.read() as session:
        steps = await steps_of(session, first.job_id)
        news = await steps_of(session, first.job_id, behind=(1, 6))
        page = await steps_of(session, first.job_id, behind=(1, 2), limit=3)
        above = await steps_of(session, first.job_id, after=3)
    assert [(s.attempt, s.step) for s in steps] == [(1, 1), (1, 2), (1, 5), (1, 6), (2, 3), (2, 4)]
    assert [(s.attempt, s.step) for s in news] == [(2, 3), (2, 4)], (
        "who has seen the dead one hears of the new"
    )
    assert [(s.attempt, s.step) for s in page] == [(1, 5), (1, 6), (2, 3)]
    assert [s.step for s in above] == [5, 6, 4]
