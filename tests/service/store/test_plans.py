"""Plans and profiles as stored; on SQLite and on PostgreSQL."""

from __future__ import annotations

from service.store.database import Database
from service.store.measurements import find_profile, record_profile
from service.store.plans import find_job_plan, record_job_plan
from tests.service.store.test_attempts import AT, start


async def test_plans_and_profiles_are_replaced_under_their_key(database: Database):
    attempt = await start(database)
    for text in ('{"plan": 1}', '{"plan": 2}'):
        async with database.write() as session:
            await record_job_plan(session, attempt, text, at=AT)
            await record_profile(session, "gpt/8/cpu", {"layers": [text]}, at=AT)
    async with database.read() as session:
        assert (await find_job_plan(session, attempt.job_id)).body == '{"plan": 2}'
        assert await find_profile(session, "gpt/8/cpu") == {"layers": ['{"plan": 2}']}
        assert await find_profile(session, "other") is None
