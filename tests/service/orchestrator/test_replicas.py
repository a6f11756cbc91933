"""Two control planes on one database and one cluster: one orchestrates, and one that was away does no harm."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta

import pytest
from sqlalchemy import update

from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.orchestrator.ray.jobs_api import RayJobSubmission
from service.spec.states import AttemptState
from service.store.attempts import active_attempts, find_attempt
from service.store.database import Database, utc_now
from service.store.events import events_of
from service.store.leases import Lease, LeaseLostError, read_lease_status
from service.store.tables import LeaseRow as Row
from tests.polling import until_async
from tests.service.fake_cluster import ask_at_once
from tests.service.orchestrator.test_loop import World


class Pair:
    """Two control planes: `first` orchestrates until the second has `taken_over`."""

    def __init__(self, database: Database, other: Database) -> None:
        self.first, self.second = World(database), World(other)
        self.cluster = self.second.cluster = self.first.cluster
        self.second.restart()
        for world in (self.first, self.second):
            world.orchestrator.lease._has_sqlite_alone = False  # SQLite's only process would take it at once

    async def take_over(self) -> None:
        """The first was away for so long that its lease expired; the second does a round."""
        async with self.second.database.write() as session:
            await session.execute(update(Row).values(expires_at=0.0))
        await self.second.rounds()
        assert self.second.orchestrator.lease.token is not None


@pytest.fixture
async def pair(database: Database, database_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr("service.orchestrator.attempts.watch._STOP_EVERY_S", 0.0)
    monkeypatch.setattr("service.orchestrator.loop.LEASE_S", 600.0)
    other = Database(database_url)
    yield Pair(database, other)
    await other.close()


@pytest.fixture(params=[True, False], ids=["fenced", "unfenced"])
def fenced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Also without the fence: what it is there for must go wrong then, or the test shows nothing."""
    if not request.param:

        async def nothing(*_: object) -> None:
            pass

        monkeypatch.setattr(Lease, "check", nothing)
    return request.param


def once_before_writing(world: World, happens: Callable[[], Awaitable[None]]) -> None:
    """Have `world` freeze before its orchestrator's next write, until what `happens` meanwhile has happened."""
    write = world.orchestrator.fenced.write

    @contextlib.asynccontextmanager
    async def frozen():
        world.orchestrator.fenced.write = write
        await happens()
        async with write() as session:
            yield session

    world.orchestrator.fenced.write = frozen


async def held(world: World) -> int:
    async with world.database.read() as session:
        return sum(attempt.accelerators for attempt, _ in await active_attempts(session))


async def test_only_one_of_two_starts_jobs(pair: Pair):
    job_id = await pair.first.submit()
    await pair.first.rounds(2)
    other_id = await pair.second.submit()
    await pair.second.rounds(3)
    assert (await pair.second.job(job_id)).state == "STARTING"
    assert (await pair.second.job(other_id)).state == "QUEUED"
    assert (await pair.second.job(other_id)).message is None, "it does not even say why: that is the other's"
    assert list(pair.cluster.submissions) == [f"{job_id}-1"]


async def test_a_decision_that_is_older_than_another_leader_starts_nothing(pair: Pair, fenced: bool):
    """Frozen between the look at what is free and the start; meanwhile another gave it to a job that came later."""
    first_id = await pair.first.submit()
    urgent: list[str] = []

    async def meanwhile() -> None:
        urgent.append(await pair.second.submit(priority=5))
        await pair.take_over()
        assert (await pair.second.job(urgent[0])).state == "STARTING"

    await pair.first.watcher.refresh()
    once_before_writing(pair.first, meanwhile)
    with contextlib.suppress(LeaseLostError):
        await pair.first.orchestrator.round()
    await pair.first.orchestrator.settle()
    if not fenced:
        assert await held(pair.second) == 8, "two gangs of four on four accelerators"
        return
    assert await held(pair.second) == 4
    assert (await pair.second.job(first_id)).state == "QUEUED"
    assert pair.first.orchestrator.lease.token is None
    await pair.first.rounds(3)
    await pair.second.rounds(3)
    assert list(pair.cluster.submissions) == [f"{urgent[0]}-1"]
    assert (await read_lease_status(pair.second.database)).token == 2


async def test_a_driver_is_started_once_though_its_starter_froze_on_the_way_to_ray(pair: Pair):
    """Nothing asks the database between its last word and Ray's: there the attempt's id is what makes it one."""
    submit, started = pair.cluster.submit, list[str]()

    async def slow(submission: RayJobSubmission) -> None:
        pair.cluster.submit = counted
        await pair.take_over()
        await pair.second.rounds(2)
        await counted(submission)

    async def counted(submission: RayJobSubmission) -> None:
        known = len(pair.cluster.submissions)
        await submit(submission)
        started.extend([submission.id] * (len(pair.cluster.submissions) - known))

    pair.cluster.submit = slow
    job_id = await pair.first.submit()
    await pair.first.rounds(3)
    assert started == [f"{job_id}-1"]
    assert pair.first.orchestrator.lease.token is None
    job = await pair.second.job(job_id)
    assert (job.state, job.attempts_made) == ("STARTING", 1)


async def test_a_job_that_was_cancelled_meanwhile_is_not_started(pair: Pair, fenced: bool):
    """Its driver would end at once, and would be one that nobody knows of."""
    job_id = await pair.first.submit()
    await pair.first.watcher.refresh()
    await pair.first.orchestrator.round()  # makes the attempt; the next one gives it to Ray
    await pair.first.orchestrator.settle()

    async def meanwhile() -> None:
        await pair.second.cancel(job_id)
        await pair.take_over()
        assert (await pair.second.job(job_id)).state == "CANCELLED"

    once_before_writing(pair.first, meanwhile)
    await pair.first.orchestrator.round()
    await pair.first.orchestrator.settle()
    assert pair.cluster.submissions == {}
    assert (await pair.second.job(job_id)).state == "CANCELLED"


async def test_a_driver_that_spoke_to_another_meanwhile_is_not_stopped(pair: Pair, fenced: bool):
    """Frozen after it found the driver silent, and after it looked whether it still is: a note is all it lacks."""
    job_id = await pair.first.start()
    pair.first.orchestrator.heartbeat.liveness.since -= 1000
    async with pair.first.database.write() as session:
        (await find_attempt(session, f"{job_id}-1")).heartbeat_at = utc_now() - timedelta(seconds=101)
    note = pair.first.orchestrator.attempts._record_stop

    async def frozen(attempt, why: str) -> bool:
        await pair.take_over()
        return await note(attempt, why)

    pair.first.orchestrator.attempts._record_stop = frozen
    ask_at_once(pair.first.orchestrator.attempts)
    await pair.first.rounds()
    if not fenced:
        assert pair.cluster.stopped == [f"{job_id}-1"], "by one that counts silence which the other does not"
        return
    assert pair.cluster.stopped == []
    await pair.second.report(f"{job_id}-1", 2)
    await pair.second.rounds(2)
    async with pair.second.database.read() as session:
        assert "stopped" not in [event.kind for event in await events_of(session, job_id)]
    assert (await pair.second.job(job_id)).state == "RUNNING"


async def test_a_stop_that_was_noted_before_a_freeze_is_not_sent_after_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    job_id = await pair.first.start()
    pair.first.orchestrator.heartbeat.liveness.since -= 1000
    async with pair.first.database.write() as session:
        (await find_attempt(session, f"{job_id}-1")).heartbeat_at = utc_now() - timedelta(seconds=101)
    note, now = pair.first.orchestrator.attempts._record_stop, time.monotonic

    async def frozen(attempt, why: str) -> bool:
        noted = await note(attempt, why)
        monkeypatch.setattr(time, "monotonic", lambda: now() + 60)
        return noted

    pair.first.orchestrator.attempts._record_stop = frozen
    await pair.first.rounds()
    assert pair.cluster.stopped == []
    monkeypatch.undo()


async def test_the_one_that_takes_over_counts_silence_from_then_on(pair: Pair):
    """Drivers may have talked to the one before, in whose sockets their words still are."""
    job_id = await pair.first.start()
    pair.second.orchestrator.heartbeat.liveness.since -= 1000
    async with pair.first.database.write() as session:
        (await find_attempt(session, f"{job_id}-1")).heartbeat_at = utc_now() - timedelta(seconds=500)
    await pair.take_over()
    await pair.second.rounds(3)
    assert pair.cluster.stopped == []


async def test_the_one_that_takes_over_goes_on_where_the_other_was(pair: Pair):
    running, ended = (
        await pair.first.start(pipeline={"stages": 2}),
        await pair.first.start(pipeline={"stages": 2}),
    )
    waiting = await pair.first.submit()
    pair.cluster.states[f"{ended}-1"] = RayJob(RayState.FAILED, "the node is gone")
    limits = pair.second.orchestrator.attempts.limits
    pair.second.orchestrator.attempts.limits = type(limits)(report_grace_s=0.0)
    await pair.take_over()
    await pair.second.rounds(3)
    assert (await pair.second.job(running)).state == "RUNNING"
    assert (await pair.second.job(ended)).attempts_made == 2
    assert (await pair.second.job(waiting)).reason == "WAITS_FOR_ACCELERATORS"
    await pair.second.report(f"{running}-1", 2, state=AttemptState.SUCCEEDED)
    await pair.second.rounds(2)
    assert (await pair.second.job(running)).state == "SUCCEEDED"


async def test_a_lease_is_not_taken_again_before_the_work_of_the_earlier_term_has_ended(pair: Pair):
    """Else what was decided then would be written under the new token."""
    job_id = await pair.first.submit()
    going_on, asked = asyncio.Event(), asyncio.Event()
    submit = pair.cluster.submit

    async def hangs(submission: RayJobSubmission) -> None:
        pair.cluster.submit = submit
        asked.set()
        await going_on.wait()
        await submit(submission)

    pair.cluster.submit = hangs
    await pair.first.watcher.refresh()
    first = pair.first.orchestrator
    await first.round()
    await first.settle()
    await first.round()
    await asked.wait()
    await pair.take_over()
    await pair.second.orchestrator.lease.release()
    with pytest.raises(LeaseLostError):
        await first.lease.renew()
    await first.round()
    assert first.lease.token is None, "its call to Ray is still under way"
    going_on.set()
    await first.settle()
    await first.round()
    assert first.lease.token == 3
    assert list(pair.cluster.submissions) == [f"{job_id}-1"]


async def test_whoever_ends_in_order_lets_the_other_orchestrate_at_once(
    pair: Pair, caplog: pytest.LogCaptureFixture
):
    """As in a rolling upgrade: nobody waits for a lease that its holder has given back."""
    running = asyncio.create_task(pair.first.orchestrator.run())
    await until_async(lambda: pair.first.orchestrator.lease.token is not None)
    await pair.second.rounds()
    assert pair.second.orchestrator.lease.token is None
    with caplog.at_level(logging.WARNING):
        pair.first.orchestrator.stop()
        await running
    await pair.second.rounds()
    assert pair.second.orchestrator.lease.token == 2
    assert not caplog.records
