"""Steps as stored; on SQLite and on PostgreSQL."""

from __future__ import annotations

from service.store.database import Database
from service.store.steps import StepRecord, record_steps, steps_of
from tests.service.store.test_attempts import start


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
