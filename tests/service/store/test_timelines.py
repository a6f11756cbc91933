"""Measured timelines as stored; on SQLite and on PostgreSQL."""

from __future__ import annotations

from service.store.database import Database
from service.store.measurements import SlotRecord, find_timeline, profiled_steps, record_timeline
from tests.service.store.test_attempts import next_attempt, start


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


async def test_a_resumed_attempts_timelines_are_the_latest_though_the_dead_one_went_further(
    database: Database,
):
    first = await start(database)
    second = await next_attempt(database, first)
    for attempt, number in ((first, 10), (first, 20), (first, 30), (second, 5), (second, 15), (second, 20)):
        async with database.write() as session:
            await record_timeline(
                session, attempt, step=number, started_at=0.0, uncertainty_s=None, slots=[slot()], keep=3
            )
        async with database.read() as session:
            latest, _ = await find_timeline(session, first.job_id, None)
        assert (latest.attempt, latest.step) == (attempt.number, number)
    async with database.read() as session:
        assert await profiled_steps(session, first.job_id) == [5, 15, 20], "the dead attempt's go first"
