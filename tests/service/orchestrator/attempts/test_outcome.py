"""What one report changes in the store, and what follows the end of an attempt: no loop, no cluster."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from service.orchestrator.attempts.outcome import (
    Backoff,
    DriverReport,
    EventRecord,
    StaleAttemptError,
    TimelineRecord,
    apply_report,
    request_graceful_stop,
)
from service.spec.job import JobSpec
from service.spec.states import AttemptState, JobState
from service.store import jobs as store
from service.store.attempts import create_attempt, find_attempt
from service.store.database import Database
from service.store.events import events_of
from service.store.measurements import StepRecord, profiled_steps, steps_of
from service.store.tables import AttemptRow, Base, JobRow
from service.store.transitions import lock_job
from tests.service.conftest import create_job, job_body
from worker.contract.reasons import Reason

AT = datetime(2026, 5, 17, 12, 0, tzinfo=UTC)
LATER = AT + timedelta(minutes=1)


@dataclass
class Store:
    """A store with one job, and its drivers' moves."""

    database: Database
    job_id: str

    async def attempt(self, at: datetime = AT) -> str:
        """The next attempt of the job."""
        async with self.database.write() as session:
            job = await lock_job(session, self.job_id)
            return (await create_attempt(session, job, device="cpu", at=at)).id

    async def report(self, attempt_id: str, sequence: int, at: datetime = AT, **fields) -> str:
        async with self.database.write() as session:
            report, backoff = DriverReport(sequence, **fields), Backoff(base_s=3.0, limit_s=60.0)
            return await apply_report(session, attempt_id, report, at=at, backoff=backoff, keep=2)

    async def fail(self, attempt_id: str, reason: Reason | None = Reason.WORKER_LOST) -> str:
        await self.report(attempt_id, 100, state=AttemptState.FAILED, reason=reason, message="why")
        return (await self.job()).state

    async def ask_to_end(self, attempt_id: str) -> bool:
        async with self.database.write() as session:
            reason = Reason.PREEMPTED
            return await request_graceful_stop(session, attempt_id, reason, "gives way", at=LATER)

    async def job(self) -> JobRow:
        async with self.database.read() as session:
            return await store.find_job(session, self.job_id)

    async def of(self, attempt_id: str) -> AttemptRow:
        async with self.database.read() as session:
            return await find_attempt(session, attempt_id)

    async def cancel(self) -> None:
        async with self.database.write() as session:
            await store.cancel_job(session, self.job_id, at=AT)


@pytest.fixture
async def one(tmp_path: Path) -> AsyncIterator[Store]:
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'store.db'}")
    async with database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with database.write() as session:
        body = job_body(retry={"infrastructure": 2, "user": 1})
        job = await create_job(session, JobSpec.model_validate(body), at=AT)
    yield Store(database, job.id)
    await database.close()


def step(number: int, loss: float = 1.0, step_s: float = 0.5) -> StepRecord:
    return StepRecord(number, loss, step_s, None, None, None, None, None, None)


async def test_a_report_that_says_that_the_driver_runs_begins_attempt_and_job_once(one: Store):
    attempt = await one.attempt()
    assert await one.report(attempt, 1, at=LATER, state=AttemptState.RUNNING) == "continue"
    for found in (await one.of(attempt), await one.job()):
        assert (found.state, found.started_at) == ("RUNNING", LATER)
    again = LATER + timedelta(minutes=1)
    await one.report(attempt, 2, at=again, state=AttemptState.RUNNING)
    assert (await one.of(attempt)).started_at == LATER
    async with one.database.read() as session:
        told = [(e.kind, e.message, e.attempt, e.at) for e in await events_of(session, one.job_id)]
    assert told[-1] == ("state", "RUNNING", 1, LATER)


async def test_a_report_is_a_sign_of_life_and_counts_once(one: Store):
    attempt = await one.attempt()
    assert (await one.of(attempt)).submitted_at is None
    await one.report(attempt, 1, at=AT)
    await one.report(attempt, 2, at=LATER, steps=[step(1)])
    assert await one.report(attempt, 2, at=LATER + timedelta(hours=1), steps=[step(2)]) == "continue"
    assert await one.report(attempt, 1, at=LATER + timedelta(hours=1), steps=[step(3)]) == "continue"
    found = await one.of(attempt)
    assert (found.submitted_at, found.heartbeat_at, found.last_sequence) == (AT, LATER, 2)
    async with one.database.read() as session:
        assert [s.step for s in await steps_of(session, one.job_id, after=-1, limit=9)] == [1]


async def test_a_job_shows_the_last_of_the_steps_however_they_come(one: Store):
    attempt = await one.attempt()
    await one.report(attempt, 1, steps=[step(3, 0.3, 0.03), step(5, 0.5, 0.05), step(4, 0.4, 0.04)])
    job = await one.job()
    assert (job.step, job.loss, job.step_s) == (5, 0.5, 0.05)
    await one.report(attempt, 2)
    assert (await one.job()).step == 5


@pytest.mark.parametrize("seed", range(4))
async def test_the_seconds_of_steps_that_were_lost_do_not_count(one: Store, seed: int):
    """Beside the list of steps that a job without any interruption would have made."""
    draw, kept = random.Random(seed), list[float]()
    for _ in range(4):
        attempt = await one.attempt()
        del kept[draw.randint(0, len(kept)) :]  # what came after the checkpoint
        for sequence in range(1, draw.randint(2, 5)):
            seconds = [draw.uniform(0.1, 5.0) for _ in range(draw.randint(0, 4))]
            steps = [step(len(kept) + k, step_s=s) for k, s in enumerate(seconds, 1)]
            draw.shuffle(steps)
            await one.report(attempt, sequence, steps=steps)
            kept += seconds
            job = await one.job()
            if steps:  # before, nothing tells which of the steps so far were lost
                assert job.trained_s == pytest.approx(sum(kept))
        await one.report(attempt, 100, state=AttemptState.FAILED, reason=Reason.WORKER_LOST)
        async with one.database.write() as session:
            (await lock_job(session, one.job_id)).attempts_forgiven = 100


async def test_peaks_of_memory_are_the_most_that_each_mesh_ever_told(one: Store):
    attempt = await one.attempt()
    await one.report(attempt, 1, peak_memory_bytes={"m0": 5, "m1": 7})
    await one.report(attempt, 2)
    await one.report(attempt, 3, peak_memory_bytes={"m0": 9, "m2": 1})
    await one.report(attempt, 4, peak_memory_bytes={"m0": 2})
    assert (await one.of(attempt)).peak_memory_bytes == {"m0": 9, "m1": 7, "m2": 1}


async def test_what_a_report_does_not_say_stays_as_it_was(one: Store):
    attempt = await one.attempt()
    await one.report(attempt, 1, metrics_endpoint="10.0.0.1:9", checkpoint=(5, "/c/5"))
    await one.report(attempt, 2)
    job = await one.job()
    assert (await one.of(attempt)).metrics_endpoint == "10.0.0.1:9"
    assert (job.checkpoint_step, job.checkpoint_uri) == (5, "/c/5")
    assert (await one.of(attempt)).peak_memory_bytes is None


async def test_events_of_a_driver_are_the_jobs_with_the_number_of_its_attempt(one: Store):
    attempt = await one.attempt()
    await one.report(attempt, 1, events=[EventRecord(LATER, "checkpoint", "saved")])
    async with one.database.read() as session:
        last = (await events_of(session, one.job_id))[-1]
    assert (last.kind, last.message, last.at, last.attempt) == ("checkpoint", "saved", LATER, 1)


async def test_only_so_many_timelines_are_kept_as_the_settings_say(one: Store):
    attempt = await one.attempt()
    timelines = [TimelineRecord(number, 1.0, 0.1, []) for number in (10, 20, 30)]
    await one.report(attempt, 1, timelines=timelines)
    async with one.database.read() as session:
        assert list(await profiled_steps(session, one.job_id)) == [20, 30]


async def test_a_driver_that_was_replaced_and_one_that_is_over_are_told_which(one: Store):
    first = await one.attempt()
    await one.fail(first)
    with pytest.raises(StaleAttemptError, match=rf"attempt 1 of job {one.job_id} is over \(FAILED\): end"):
        await one.report(first, 101)
    await one.attempt()
    with pytest.raises(StaleAttemptError, match=f"attempt 1 of job {one.job_id} was replaced by attempt 2"):
        await one.report(first, 102)


async def test_a_failure_that_says_nothing_is_told_as_one_of_ours(one: Store):
    attempt = await one.attempt()
    await one.report(attempt, 1, at=LATER, state=AttemptState.FAILED)
    found, job = await one.of(attempt), await one.job()
    assert (found.state, found.reason, found.message) == ("FAILED", "INTERNAL", "no message was given")
    assert (job.state, job.reason, found.finished_at) == ("RECOVERING", "INTERNAL", LATER)
    assert job.message == "no message was given; infrastructure retry 1 of 2 in 3 s"


async def test_a_job_that_recovers_keeps_its_place_in_the_line_and_waits_its_pause(one: Store):
    attempt = await one.attempt()
    async with one.database.write() as session:
        (await lock_job(session, one.job_id)).queued_at = LATER
    await one.report(attempt, 1, at=LATER, state=AttemptState.FAILED, reason=Reason.NODE_LOST, message="gone")
    job = await one.job()
    assert (job.state, job.queued_at, job.not_before) == ("RECOVERING", AT, LATER + timedelta(seconds=3))


async def test_failures_of_a_cause_are_counted_to_the_one_that_ends_the_job(one: Store):
    states = [await one.fail(await one.attempt()) for _ in range(3)]
    assert states == ["RECOVERING", "RECOVERING", "FAILED"]
    job = await one.job()
    assert (job.reason, job.message) == ("WORKER_LOST", "why (retry.infrastructure is 2)")
    assert job.finished_at == AT


async def test_the_same_failure_at_the_same_step_ends_the_job(one: Store):
    first = await one.attempt()
    await one.report(first, 1, state=AttemptState.RUNNING, steps=[step(4), step(5)])
    assert await one.fail(first, Reason.CHECKPOINT_FAILED) == JobState.RECOVERING
    assert (await one.of(first)).failed_step == 5
    second = await one.attempt()
    await one.report(second, 1, state=AttemptState.RUNNING, steps=[step(5)])
    assert await one.fail(second, Reason.CHECKPOINT_FAILED) == JobState.FAILED
    assert "in the same way behind step 5" in (await one.job()).message


async def test_the_same_failure_at_another_step_is_another(one: Store):
    for last in (5, 6):
        attempt = await one.attempt()
        await one.report(attempt, 1, state=AttemptState.RUNNING, steps=[step(last)])
        assert await one.fail(attempt, Reason.CHECKPOINT_FAILED) == JobState.RECOVERING


async def test_an_attempt_that_did_not_fail_counts_against_nobody(one: Store):
    """Each cause for itself; and what a person forgave by a retry is forgotten."""
    assert await one.fail(await one.attempt(), Reason.NAN_LOSS) == "RECOVERING"
    assert await one.fail(await one.attempt()) == "RECOVERING"
    assert await one.fail(await one.attempt(), Reason.NAN_LOSS) == "FAILED"
    async with one.database.write() as session:
        await store.retry_job(session, one.job_id, at=AT)
    assert await one.fail(await one.attempt(), Reason.NAN_LOSS) == "RECOVERING"
    assert await one.fail(await one.attempt(), Reason.NAN_LOSS) == "FAILED"


async def test_losses_of_attempts_that_get_further_by_copies_neither_end_the_job_nor_lengthen_its_pauses(
    one: Store,
):
    """Of a job with two retries, and without a checkpoint: each attempt goes on 4 steps before the end of the last."""
    for first in (1, 7, 13, 19, 25):
        attempt = await one.attempt()
        steps = [step(number) for number in range(first, first + 10)]
        await one.report(attempt, 1, state=AttemptState.RUNNING, steps=steps[:3])
        await one.report(attempt, 2, steps=steps[3:])
        assert (await one.of(attempt)).first_step == first
        assert await one.fail(attempt) == "RECOVERING"
        job = await one.job()
        assert job.not_before == AT
        assert "retry 1 of 2 at once" in job.message
    states = [await one.fail(await one.attempt()) for _ in range(2)]
    assert states == ["RECOVERING", "FAILED"], "these had no step"


@pytest.mark.parametrize(("step", "state"), [(10, "FAILED"), (11, "RECOVERING")])
async def test_only_a_newer_checkpoint_makes_good_what_was_lost_before(one: Store, step: int, state: str):
    first = await one.attempt()
    await one.report(first, 1, checkpoint=(10, "/c/10"))
    assert await one.fail(first) == "RECOVERING"
    assert await one.fail(await one.attempt()) == "RECOVERING"
    third = await one.attempt()
    await one.report(third, 1, checkpoint=(step, "/c/new"))
    assert await one.fail(third) == state


async def test_a_driver_that_was_ended_by_nobody_of_ours_is_lost(one: Store):
    attempt = await one.attempt()
    await one.report(attempt, 1, state=AttemptState.CANCELLED)
    found = await one.of(attempt)
    assert (found.state, found.reason) == ("FAILED", "DRIVER_LOST")
    assert found.message == "the driver was told to end by somebody else than Slotline"
    assert (await one.job()).state == "RECOVERING"


@pytest.mark.parametrize("last", [AttemptState.CANCELLED, AttemptState.FAILED])
async def test_a_cancelled_job_is_cancelled_however_its_driver_ends(one: Store, last: AttemptState):
    attempt = await one.attempt()
    await one.report(attempt, 1, state=AttemptState.RUNNING)
    await one.cancel()
    assert await one.report(attempt, 2) == "cancel"
    assert await one.report(attempt, 3, state=last, reason=Reason.WORKER_LOST, message="x") == "cancel"
    job, found = await one.job(), await one.of(attempt)
    assert (job.state, job.reason, job.message) == ("CANCELLED", "CANCELLED_BY_USER", "cancelled by the user")
    assert found.state == last


async def test_a_success_is_one_with_its_message_also_where_the_job_is_being_cancelled(one: Store):
    attempt = await one.attempt()
    await one.report(attempt, 1, state=AttemptState.RUNNING)
    await one.cancel()
    command = await one.report(attempt, 2, at=LATER, state=AttemptState.SUCCEEDED, message="10 steps")
    job = await one.job()
    assert command == "continue" and (await one.of(attempt)).state == "SUCCEEDED"
    assert (job.state, job.message, job.finished_at) == (JobState.SUCCEEDED, "10 steps", LATER)


async def test_only_the_running_attempt_is_asked_to_end_and_once(one: Store):
    ended = await one.attempt()
    await one.fail(ended)
    assert not await one.ask_to_end(ended)
    running = await one.attempt()
    assert not await one.ask_to_end(ended)
    assert await one.ask_to_end(running)
    assert not await one.ask_to_end(running)
    assert (await one.of(ended)).end_asked_at is None
    assert (await one.of(running)).end_asked_for == Reason.PREEMPTED
