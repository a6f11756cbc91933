"""Users, drivers, a failing Ray and restarts: races driven on purpose, and moves in random order.

Of the random ones: what must hold after every move, and the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from service.orchestrator.attempts.outcome import Backoff, EventRecord, StaleAttemptError, end_attempt
from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.spec.states import AttemptState, JobState
from service.store import jobs as job_store
from service.store.attempts import active_attempts, find_attempt
from service.store.database import Database, utc_now
from service.store.events import events_of
from service.store.transitions import TransitionError, lock_job
from tests.service.conftest import somebody_waits
from tests.service.orchestrator.test_loop import World
from tests.tiers import some_by_day

BUSY = {JobState.STARTING, JobState.RUNNING, JobState.CANCELLING}


class Chaos:
    """A world and the random moves that change it; `jobs` are all that were submitted."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.random, self.jobs = world, random.Random(seed), list[str]()
        self.sequences: Counter[str] = Counter()
        self.moves: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (6, self.submit),
            (4, self.cancel),
            (4, self.retry),
            (3, self.restart),
            (6, self.fail_or_mend_ray),
            (3, self.end_a_driver),
            (12, self.report),
            (12, self.round),
        ]

    async def move(self) -> None:
        weights, moves = zip(*self.moves, strict=True)
        (chosen,) = self.random.choices(moves, weights)
        with contextlib.suppress(TransitionError, StaleAttemptError):  # refused, as it must be
            await chosen()

    async def submit(self) -> None:
        if len(self.jobs) < 6:
            pipeline, retry = self.random.choice([1, 2, 4]), self.random.choice([0, 1, 2])
            made = await self.world.submit(pipeline={"stages": pipeline}, retry={"infrastructure": retry})
            self.jobs.append(made)

    async def cancel(self) -> None:
        if self.jobs:
            await self.world.cancel(self.random.choice(self.jobs))

    async def retry(self) -> None:
        if self.jobs:
            async with self.world.database.write() as session:
                await job_store.retry_job(session, self.random.choice(self.jobs), at=utc_now())

    async def restart(self) -> None:
        self.world.restart()
        limits = self.world.orchestrator.attempts.limits
        self.world.orchestrator.attempts.limits = replace(limits, report_grace_s=0.0)

    async def fail_or_mend_ray(self) -> None:
        cluster = self.world.cluster
        match self.random.randrange(4):
            case 0:
                cluster.away = not cluster.away
            case 1:
                cluster.loses_answers = not cluster.loses_answers
            case 2:
                cluster.not_now = None if cluster.not_now else "No available agent"
            case 3:
                cluster.refusal = None if cluster.refusal else "no"

    def mend_ray(self) -> None:
        cluster = self.world.cluster
        cluster.away = cluster.loses_answers = False
        cluster.not_now = cluster.refusal = None

    async def end_a_driver(self) -> None:
        if states := self.world.cluster.states:
            end = self.random.choice([RayState.FAILED, RayState.MISSING, RayState.SUCCEEDED])
            states[self.random.choice(list(states))] = RayJob(end)

    async def report(self) -> None:
        if known := list(self.world.cluster.submissions):
            attempt = self.random.choice(known)
            state = self.random.choice([None, *[AttemptState.RUNNING] * 3, *list(AttemptState)[2:]])
            await self.say(attempt, state)

    async def say(self, attempt_id: str, state: AttemptState | None) -> None:
        self.sequences[attempt_id] += 1
        await self.world.report(attempt_id, self.sequences[attempt_id], state=state)

    async def round(self) -> None:
        """A round, and sometimes a user who cancels in the middle of it."""
        await self.world.watcher.refresh()
        works = [self.world.orchestrator.round(), *([self.cancel()] if self.random.random() < 0.3 else [])]
        results = await asyncio.gather(*works, return_exceptions=True)
        await self.world.orchestrator.settle()
        wrong = [r for r in results if isinstance(r, Exception) and not isinstance(r, TransitionError)]
        assert not wrong, wrong

    async def check(self) -> None:
        async with self.world.database.read() as session:
            active = await active_attempts(session)
            holders = Counter(job.id for _, job in active)
            assert max(holders.values(), default=1) == 1, "one attempt a job"
            assert sum(attempt.accelerators for attempt, _ in active) <= self.world.cluster.workers
            assert all(job.current_attempt == attempt.id for attempt, job in active)
            for job_id in self.jobs:
                job = await job_store.find_job(session, job_id)
                assert (job.job_state in BUSY) == (job_id in holders), (job.state, holders)
                assert job.job_state.final == (job.finished_at is not None)
                numbers = [event.number for event in await events_of(session, job_id)]
                assert numbers == list(range(1, len(numbers) + 1))

    async def work_off(self) -> None:
        """Ray is well and drivers do what they are told: every job must come to an end."""
        self.mend_ray()
        for _ in range(80):
            await self.world.rounds()
            async with self.world.database.read() as session:
                active = await active_attempts(session)
            for attempt, job in active:
                ray = self.world.cluster.states.get(attempt.id)
                if ray is not None and ray.state is RayState.RUNNING:
                    cancelling = job.job_state is JobState.CANCELLING
                    await self.say(
                        attempt.id, AttemptState.CANCELLED if cancelling else AttemptState.SUCCEEDED
                    )
            states = [(await self.world.job(job_id)).job_state for job_id in self.jobs]
            if all(state.final for state in states):
                return
        raise AssertionError(states)


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    for name in (
        "attempts.watch._STOP_EVERY_S",
        "attempts.watch._ASK_EVERY_S",
        "ray.driver_logs._LOG_SETTLES_S",
    ):
        monkeypatch.setattr(f"service.orchestrator.{name}", 0.0)
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'store.db'}")
    await database.start()
    monkeypatch.setattr("service.orchestrator.attempts.admit.CANCEL_GRACE_S", 0.0)
    yield World(database, cancel_grace_s=0.0)
    await database.close()


@some_by_day("seed", range(6), by_day=1)
async def test_whatever_happens_jobs_keep_their_accelerators_and_come_to_an_end(world: World, seed: int):
    chaos = Chaos(world, seed)
    await chaos.restart()
    for _ in range(60):
        await chaos.move()
        await chaos.check()
    await chaos.work_off()
    await chaos.check()


# Races driven on purpose, on both kinds of databases


@pytest.fixture
async def shared(database: Database) -> World:
    return World(database)


async def note(world: World, job_id: str) -> int:
    async with world.database.read() as session:
        return sum(event.kind == "note" for event in await events_of(session, job_id))


async def test_a_report_that_comes_twice_at_once_is_stored_once(shared: World):
    """The driver lost the answer to the first and sends it again while the first is still being stored."""
    job_id = await shared.start()
    event = EventRecord(utc_now(), "note", "once")
    async with shared.database.write() as session:
        await lock_job(session, job_id)
        twice = [
            asyncio.create_task(shared.report(f"{job_id}-1", 2, state=AttemptState.SUCCEEDED, events=[event]))
            for _ in range(2)
        ]
        await somebody_waits(shared.database, twice)
    assert await asyncio.gather(*twice) == ["continue", "continue"]
    assert await note(shared, job_id) == 1
    assert (await shared.job(job_id)).state == "SUCCEEDED"


async def test_a_submission_that_is_stored_while_its_driver_reports_waits_for_it_without_a_deadlock(
    shared: World,
):
    """Ray started the driver, whose first report comes before the answer to its submission is stored."""
    job_id = await shared.start()
    async with shared.database.write() as session:
        attempt = await find_attempt(session, f"{job_id}-1")
        attempt.submitted_at = None
    async with shared.database.write() as session:
        job = await lock_job(session, job_id)
        submitted = asyncio.create_task(shared.orchestrator.submitter.submit(attempt, job))
        await somebody_waits(shared.database, [submitted])
        reported = await find_attempt(session, f"{job_id}-1")
        reported.heartbeat_at = utc_now()
        await session.flush()
    assert await submitted is None
    async with shared.database.read() as session:
        assert (await find_attempt(session, f"{job_id}-1")).submitted_at is not None


async def test_a_report_that_waits_while_its_attempt_is_ended_is_refused(shared: World):
    """What it read before it waited said that the attempt goes on."""
    job_id = await shared.start()
    event = EventRecord(utc_now(), "note", "too late")
    async with shared.database.write() as session:
        job = await lock_job(session, job_id)
        late = asyncio.create_task(
            shared.report(f"{job_id}-1", 2, state=AttemptState.SUCCEEDED, events=[event])
        )
        await somebody_waits(shared.database, [late])
        await end_attempt(
            session,
            job,
            await find_attempt(session, f"{job_id}-1"),
            AttemptState.FAILED,
            reason="DRIVER_LOST",
            message="silent",
            at=utc_now(),
            backoff=Backoff(0.0, 0.0),
        )
    with pytest.raises(StaleAttemptError, match="is over"):
        await late
    assert await note(shared, job_id) == 0
    assert (await shared.job(job_id)).state == "RECOVERING"


async def test_an_attempt_is_ended_once_though_its_report_and_its_watcher_meet(shared: World):
    """Ray says that the driver is gone while the driver's own last word is being stored."""
    job_id = await shared.start()
    attempts = shared.orchestrator.attempts
    attempts.limits = replace(attempts.limits, report_grace_s=0.0)
    shared.cluster.states[f"{job_id}-1"] = RayJob(RayState.SUCCEEDED)
    async with shared.database.write() as session:
        await lock_job(session, job_id)
        meeting = [
            asyncio.create_task(shared.report(f"{job_id}-1", 2, state=AttemptState.SUCCEEDED)),
            asyncio.create_task(shared.rounds(2)),
        ]
        await somebody_waits(shared.database, meeting[:1])
    said, _ = await asyncio.gather(*meeting, return_exceptions=True)
    async with shared.database.read() as session:
        ends = [
            event.message.partition(":")[0]
            for event in await events_of(session, job_id)
            if event.kind == "state" and event.attempt == 1 and event.message.startswith(("SUCC", "RECO"))
        ]
    # locks are not given in the order in which they were asked for: whoever comes second is refused
    assert ends == (["RECOVERING"] if isinstance(said, StaleAttemptError) else ["SUCCEEDED"])
    assert said == "continue" or isinstance(said, StaleAttemptError)
