"""The orchestrator on a real store with a cluster in memory: jobs move as they should, whatever fails."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from service.orchestrator.attempts import watch
from service.orchestrator.attempts.outcome import (
    Backoff,
    DriverReport,
    EventRecord,
    StaleAttemptError,
    TimelineRecord,
    apply_report,
)
from service.orchestrator.decisions import attempt_lifecycle
from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.orchestrator.loop import Orchestrator
from service.orchestrator.ray.clusters import DriverSettings, build_clusters
from service.orchestrator.ray.driver_logs import LogReader, LogWindow
from service.orchestrator.ray.jobs_api import RayNode, ResourceUse
from service.settings.settings import Settings
from service.spec.job import JobSpec
from service.spec.states import AttemptState
from service.store import jobs as job_store
from service.store.attempts import create_attempt, find_attempt, log_locations
from service.store.database import Database, utc_now
from service.store.events import events_of
from service.store.files import StoredPackage, store_package
from service.store.measurements import StepRecord, steps_of
from service.store.tables import AttemptRow, Base, JobRow
from service.store.transitions import lock_job
from tests.service.conftest import create_job, job_body
from tests.service.fake_cluster import FakeCluster, ask_at_once
from worker.contract.job import placement_group_name

SETTINGS = Settings()


class World:
    """A store, a cluster and an orchestrator, with the moves of users and drivers."""

    def __init__(
        self, database: Database, settings: Settings = SETTINGS, *, cancel_grace_s: float = 30.0
    ) -> None:
        self.database, self.settings, self.cluster = database, settings, FakeCluster()
        self.cancel_grace_s, self.backoff = cancel_grace_s, Backoff(0.0, 0.0)
        self.drivers = DriverSettings(python=sys.executable)
        self.restart()

    def restart(self) -> None:
        """A new control plane on the same store and cluster."""
        self.clusters = build_clusters(
            self.settings, {"default": self.cluster}, refresh_s=600, default=self.drivers
        )
        self.watcher = self.clusters.of("default").watcher
        self.orchestrator = Orchestrator(self.settings, self.database, self.clusters)
        attempts = self.orchestrator.attempts
        attempts.backoff = self.backoff
        attempts.limits = replace(
            attempts.limits, silence_limit_s=100.0, start_timeout_s=100.0, cancel_grace_s=self.cancel_grace_s
        )

    async def rounds(self, number: int = 1) -> None:
        for _ in range(number):
            await self.watcher.refresh()
            await self.orchestrator.round()
            await self.orchestrator.settle()
            ask_at_once(self.orchestrator.attempts)

    async def submit(self, **changes) -> str:
        async with self.database.write() as session:
            job = await create_job(session, JobSpec.model_validate(job_body(**changes)), at=utc_now())
        return job.id

    async def job(self, job_id: str) -> JobRow:
        async with self.database.read() as session:
            return await job_store.find_job(session, job_id)

    async def attempt(self, attempt_id: str) -> AttemptRow:
        async with self.database.read() as session:
            return await find_attempt(session, attempt_id)

    async def report(self, attempt_id: str, sequence: int, **fields) -> str:
        async with self.database.write() as session:
            return await apply_report(
                session,
                attempt_id,
                DriverReport(sequence, **fields),
                at=utc_now(),
                backoff=Backoff(0.0, 0.0),
                keep=10,
            )

    async def cancel(self, job_id: str) -> None:
        async with self.database.write() as session:
            await job_store.cancel_job(session, job_id, at=utc_now())

    async def start(self, **changes) -> str:
        """A job whose first attempt runs."""
        job_id = await self.submit(**changes)
        await self.rounds(2)
        await self.report(f"{job_id}-1", 1, state=AttemptState.RUNNING)
        return job_id


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr("service.orchestrator.attempts.watch._STOP_EVERY_S", 0.0)
    monkeypatch.setattr("service.orchestrator.ray.driver_logs._LOG_SETTLES_S", 0.0)
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'store.db'}")
    async with database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    world = World(database)
    world.orchestrator.attempts.limits = replace(world.orchestrator.attempts.limits, report_grace_s=0.0)
    yield world
    await database.close()


async def test_workers_that_share_a_gpu_count_as_accelerators(world: World):
    async def nodes() -> list[RayNode]:
        return [
            RayNode("a", "10.0.0.1", {"GPU": 2.0, "slotline_worker": 4.0}),
            RayNode("b", "10.0.0.2", {"GPU": 1.0}),
        ]

    world.drivers = DriverSettings(workers_per_gpu=4)
    world.cluster.nodes = nodes
    world.restart()
    job_id = await world.submit()
    await world.rounds(2)
    assert world.watcher.capacity.total == {"cpu": 4, "cuda": 12}
    assert world.cluster.submissions[f"{job_id}-1"].env["SLOTLINE_WORKERS_PER_GPU"] == "4"


async def test_a_driver_is_told_where_to_report_and_where_to_serve_its_metrics(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    settings = world.orchestrator.submitter._settings
    monkeypatch.setattr(settings, "public_url", "https://for-people.example")
    monkeypatch.setattr(settings, "driver_url", "http://inside:80")
    monkeypatch.setattr(settings, "metrics_ports", "9400-9499")
    monkeypatch.setattr(settings, "profile_every_s", 7.5)
    job_id = await world.submit()
    await world.rounds(2)
    env = world.cluster.submissions[f"{job_id}-1"].env
    assert env["SLOTLINE_CONTROL_URL"] == "http://inside:80"
    assert env["SLOTLINE_METRICS_PORTS"] == "9400-9499"
    assert env["SLOTLINE_PROFILE_EVERY_S"] == "7.5"


async def test_a_job_is_started_with_its_token_and_runs_to_its_end(world: World):
    job_id = await world.submit()
    await world.rounds(2)
    submission = world.cluster.submissions[f"{job_id}-1"]
    attempt = await world.attempt(f"{job_id}-1")
    assert submission.entrypoint.endswith(" -m worker.driver")
    assert submission.env["SLOTLINE_ATTEMPT_TOKEN"] == attempt.token
    assert submission.env["SLOTLINE_CONTROL_URL"] == "http://127.0.0.1:8000"
    assert (await world.job(job_id)).state == "STARTING"
    assert await world.report(attempt.id, 1, state=AttemptState.RUNNING) == "continue"
    step = StepRecord(10, 0.5, 0.1, 0.09, 0.2, 0.0, 1.0, 1.0, time.time())
    await world.report(attempt.id, 2, steps=[step])
    await world.report(attempt.id, 3, state=AttemptState.SUCCEEDED)
    job = await world.job(job_id)
    assert (job.state, job.step, job.loss) == ("SUCCEEDED", 10, 0.5)
    assert job.started_at <= job.finished_at


async def test_the_second_job_waits_with_a_reason_and_starts_when_the_first_ends(world: World):
    first, second = await world.submit(), await world.submit()
    await world.rounds(2)
    waiting = await world.job(second)
    assert (waiting.state, waiting.reason) == ("QUEUED", "WAITS_FOR_ACCELERATORS")
    assert waiting.message == f"waits for 4 accelerators of slotline_worker; 0 of 4 free (job {first} uses 4)"
    await world.report(f"{first}-1", 1, state=AttemptState.SUCCEEDED)
    await world.rounds(2)
    started = await world.job(second)
    assert started.state == "STARTING" and f"{second}-1" in world.cluster.submissions


async def test_a_cluster_is_looked_at_often_once_an_attempt_of_it_has_ended(world: World):
    expected = []
    world.watcher.expect_release = lambda: expected.append("soon")
    job_id = await world.start()
    await world.rounds(2)
    assert expected == []
    await world.report(f"{job_id}-1", 2, state=AttemptState.SUCCEEDED)
    await world.rounds(3)
    assert expected == ["soon"]


async def test_a_job_that_waits_long_adds_one_event_not_one_a_round(world: World):
    await world.submit()
    second = await world.submit()
    await world.rounds(6)
    async with world.database.read() as session:
        kinds = [event.kind for event in await events_of(session, second)]
    assert kinds == ["state", "waiting"]


@pytest.mark.slow
async def test_news_for_a_long_line_is_written_in_few_transactions(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    first = await world.submit()
    await world.rounds(1)
    waiting = [await world.submit() for _ in range(250)]
    written, write = 0, world.database.write

    def counted():
        nonlocal written
        written += 1
        return write()

    monkeypatch.setattr(world.database, "write", counted)
    await world.orchestrator.round()
    await world.orchestrator.settle()
    assert written <= 7  # the heartbeat, the lease, a start in two: and two for 250 jobs
    for job_id in waiting:
        assert f"job {first} uses 4" in (await world.job(job_id)).message


async def test_a_start_whose_answer_was_lost_is_repeated_without_a_second_driver(world: World):
    world.cluster.loses_answers = True
    job_id = await world.submit()
    await world.rounds(3)
    assert (await world.attempt(f"{job_id}-1")).submitted_at is None
    first = world.cluster.submissions[f"{job_id}-1"]
    world.cluster.loses_answers = False
    world.restart()
    await world.rounds(2)
    assert (await world.attempt(f"{job_id}-1")).submitted_at is not None
    assert world.cluster.submissions == {f"{job_id}-1": first}


async def test_a_cluster_that_is_away_costs_no_attempt(world: World):
    world.cluster.away = True
    job_id = await world.submit()
    await world.rounds(3)
    waiting = await world.job(job_id)
    assert (waiting.reason, waiting.attempts_made) == ("WAITS_FOR_CLUSTER", 0)
    world.cluster.away = False
    await world.rounds(2)
    assert f"{job_id}-1" in world.cluster.submissions
    await world.report(f"{job_id}-1", 1, state=AttemptState.RUNNING)
    world.cluster.away = True
    await world.rounds(5)
    assert (await world.job(job_id)).state == "RUNNING"


async def test_a_start_that_ray_refuses_is_tried_again_then_fails_with_the_reason(world: World):
    world.cluster.refusal = "runtime_env is broken"
    job_id = await world.submit(retry={"infrastructure": 1})
    await world.rounds(8)
    job = await world.job(job_id)
    assert (job.state, job.reason, job.attempts_made) == ("FAILED", "START_REFUSED", 2)
    assert "runtime_env is broken" in job.message


async def test_a_ray_that_cannot_take_a_driver_now_costs_no_attempt_and_the_job_says_why(world: World):
    """The head of a cluster answers before the agent of its node is there."""
    world.cluster.not_now = "No available agent to submit job, please try again later."
    job_id = await world.submit(retry={"infrastructure": 0})
    await world.rounds(6)
    job = await world.job(job_id)
    assert (job.state, job.reason, job.attempts_made) == ("STARTING", "WAITS_FOR_CLUSTER", 1)
    assert "No available agent" in job.message
    async with world.database.read() as session:
        kinds = [event.kind for event in await events_of(session, job_id)]
    assert kinds.count("waiting") == 1
    world.cluster.not_now = None
    await world.rounds(1)
    job = await world.job(job_id)
    assert f"{job_id}-1" in world.cluster.submissions
    assert (job.state, job.reason, job.message) == ("STARTING", None, None)


async def test_a_driver_that_reports_counts_as_started_though_rays_answer_was_lost(world: World):
    world.cluster.loses_answers = True
    job_id = await world.submit()
    await world.rounds(3)
    assert (await world.attempt(f"{job_id}-1")).submitted_at is None
    await world.report(f"{job_id}-1", 1, state=AttemptState.RUNNING)
    assert (await world.attempt(f"{job_id}-1")).submitted_at is not None
    await world.cancel(job_id)
    await world.rounds(1)
    assert (await world.job(job_id)).state == "CANCELLING", "it is told to end, not taken for never started"


async def test_a_retry_by_the_user_gives_all_attempts_anew(world: World):
    world.cluster.refusal = "no"
    job_id = await world.submit(retry={"infrastructure": 1})
    for made in (2, 4):
        await world.rounds(8)
        job = await world.job(job_id)
        assert (job.state, job.attempts_made) == ("FAILED", made)
        async with world.database.write() as session:
            await job_store.retry_job(session, job_id, at=utc_now())


async def test_a_lost_driver_is_followed_by_another_attempt_and_is_fenced_off(world: World):
    job_id = await world.start()
    world.cluster.states[f"{job_id}-1"] = RayJob(RayState.FAILED, "killed", 137)
    world.cluster.logs[f"{job_id}-1"] = "one\nlast words\n"
    await world.rounds(1)
    job = await world.job(job_id)
    assert (job.state, job.reason) == ("RECOVERING", "DRIVER_LOST")
    await world.rounds(3)
    job = await world.job(job_id)
    assert (job.state, job.current_attempt) == ("STARTING", f"{job_id}-2")
    lost = await world.attempt(f"{job_id}-1")
    assert lost.state == "FAILED" and "exit code 137" in lost.message and "last words" in lost.message
    assert lost.log == "one\nlast words\n"
    with pytest.raises(StaleAttemptError, match="was replaced by attempt 2"):
        await world.report(f"{job_id}-1", 2, state=AttemptState.SUCCEEDED)
    assert (await world.job(job_id)).state == "STARTING"


async def test_a_failure_of_the_user_is_final_and_keeps_its_reason(world: World):
    job_id = await world.start()
    await world.report(
        f"{job_id}-1", 2, state=AttemptState.FAILED, reason="USER_CODE_RAISED", message="ValueError: no"
    )
    job = await world.job(job_id)
    assert (job.state, job.reason, job.message) == ("FAILED", "USER_CODE_RAISED", "ValueError: no")
    await world.rounds(3)
    assert (await world.job(job_id)).attempts_made == 1


async def test_the_pause_before_each_attempt_doubles_up_to_the_limit_that_was_set(world: World):
    job_id = await world.submit(retry={"infrastructure": -1})
    pauses = []
    for number in range(1, 7):
        async with world.database.write() as session:
            job = await lock_job(session, job_id)
            attempt = await create_attempt(session, job, device="cpu", at=utc_now())
            at = utc_now()
            await apply_report(
                session,
                attempt.id,
                DriverReport(1, state=AttemptState.FAILED, reason="WORKER_LOST", message="gone"),
                at=at,
                backoff=Backoff(base_s=3.0, limit_s=20.0),
                keep=10,
            )
            assert (job.job_state, job.attempts_made) == ("RECOVERING", number)
            pauses.append((job.not_before - at).total_seconds())
    assert pauses == [0, 6, 12, 20, 20, 20]


async def test_a_driver_that_is_lost_is_followed_after_a_pause_that_grows(world: World):
    world.backoff = Backoff(30.0, 45.0)
    world.restart()
    world.orchestrator.attempts.limits = attempt_lifecycle.WatchLimits(report_grace_s=0.0)
    job_id = await world.start()
    world.cluster.states[f"{job_id}-1"] = RayJob(RayState.FAILED)
    await world.rounds(3)
    assert (await world.job(job_id)).current_attempt == f"{job_id}-2", "at once"
    for pause in (45, 45):
        current = (await world.job(job_id)).current_attempt
        world.cluster.states[current] = RayJob(RayState.FAILED)
        await world.rounds(2)
        job, attempt = await world.job(job_id), await world.attempt(current)
        assert (job.state, attempt.state) == ("RECOVERING", "FAILED"), "it does not start before its time"
        assert (job.not_before - attempt.finished_at).total_seconds() == pause
        async with world.database.write() as session:
            (await lock_job(session, job_id)).not_before = utc_now()
        await world.rounds(2)
        assert (await world.job(job_id)).state == "STARTING"


async def test_a_repeated_report_is_acknowledged_and_changes_nothing(world: World):
    job_id = await world.start()
    event = EventRecord(utc_now(), "note", "once")
    for _ in range(3):
        assert (
            await world.report(f"{job_id}-1", 2, state=AttemptState.SUCCEEDED, events=[event]) == "continue"
        )
    async with world.database.read() as session:
        kinds = [event.kind for event in await events_of(session, job_id)]
    assert kinds.count("note") == 1 and (await world.job(job_id)).state == "SUCCEEDED"


async def test_a_new_report_after_the_final_one_is_refused(world: World):
    job_id = await world.start()
    await world.report(f"{job_id}-1", 2, state=AttemptState.SUCCEEDED)
    with pytest.raises(StaleAttemptError, match="is over"):
        await world.report(f"{job_id}-1", 3, steps=[StepRecord(11, *([1.0] * 8))])
    async with world.database.read() as session:
        assert not await steps_of(session, job_id)


async def test_a_cancelled_driver_hears_it_and_ends_by_itself(world: World):
    job_id = await world.start()
    await world.cancel(job_id)
    assert await world.report(f"{job_id}-1", 2) == "cancel"
    await world.report(f"{job_id}-1", 3, state=AttemptState.CANCELLED)
    assert (await world.job(job_id)).state == "CANCELLED"
    assert world.cluster.stopped == []


async def test_a_driver_that_ignores_the_cancel_is_stopped(world: World):
    job_id = await world.start()
    await world.cancel(job_id)
    await world.rounds(1)
    assert world.cluster.stopped == []
    async with world.database.write() as session:
        (await job_store.find_job(session, job_id)).cancel_requested_at -= timedelta(seconds=30)
    await world.rounds(3)
    assert world.cluster.stopped == [f"{job_id}-1"]
    job = await world.job(job_id)
    assert (job.state, job.reason) == ("CANCELLED", "CANCELLED_BY_USER")


async def test_a_driver_that_ray_does_not_stop_keeps_no_cancelled_job(world: World):
    """What it holds on counts as held by others, and its next report is told to end."""
    job_id = await world.start()
    attempt = f"{job_id}-1"
    world.cluster.states[attempt], world.cluster.stops_nothing = RayJob(RayState.PENDING), True
    await world.cancel(job_id)
    async with world.database.write() as session:
        (await job_store.find_job(session, job_id)).cancel_requested_at -= timedelta(seconds=30)
    await world.rounds(2)
    assert {*world.cluster.stopped} == {attempt} and (await world.job(job_id)).state == "CANCELLING"
    world.orchestrator.attempts.limits = replace(world.orchestrator.attempts.limits, stop_limit_s=0.0)
    await world.rounds(2)
    assert (await world.job(job_id)).state == "CANCELLED"
    world.cluster.others = [ResourceUse(placement_group_name(attempt), {"slotline_worker": 3.0})]
    next_job = await world.submit()
    await world.rounds(1)
    job = await world.job(next_job)
    assert (job.state, job.reason) == ("QUEUED", "WAITS_FOR_ACCELERATORS")
    with pytest.raises(StaleAttemptError, match="end this driver"):
        await world.report(attempt, 2)


async def test_a_driver_that_is_heard_again_is_stopped_anew_before_it_is_given_up(world: World):
    job_id = await world.start()
    attempt = f"{job_id}-1"
    world.cluster.stops_nothing = True
    world.orchestrator.heartbeat.liveness.since -= 1000
    async with world.database.write() as session:
        (await find_attempt(session, attempt)).heartbeat_at = utc_now() - timedelta(seconds=101)
    await world.rounds(2)
    assert {*world.cluster.stopped} == {attempt}
    assert await world.report(attempt, 2) == "continue"
    await world.rounds(1)
    watched = world.orchestrator.attempts._watched[attempt]
    assert (await world.job(job_id)).state == "RUNNING" and watched.stop_asked_at is None


async def test_a_driver_that_does_not_start_is_named_with_what_ray_says(world: World):
    job_id = await world.submit()
    await world.rounds(2)
    world.cluster.states[f"{job_id}-1"] = RayJob(RayState.PENDING, "Job has not started yet.\nmore")
    async with world.database.write() as session:
        (await find_attempt(session, f"{job_id}-1")).created_at -= timedelta(seconds=61)
    world.orchestrator.heartbeat.liveness.since -= 1000
    await world.rounds(3)
    async with world.database.read() as session:
        told = [event.message for event in await events_of(session, job_id) if event.kind == "silent"]
    assert told == ["the driver has not started for 60 s; Ray says: PENDING: Job has not started yet."]


async def test_a_job_cancelled_before_its_driver_was_started_never_starts(world: World):
    world.cluster.loses_answers = world.cluster.away = False
    job_id = await world.submit()
    await world.watcher.refresh()
    await world.orchestrator.round()  # admitted, not yet given to Ray
    await world.cancel(job_id)
    await world.rounds(2)
    assert (await world.job(job_id)).state == "CANCELLED" and not world.cluster.submissions


async def test_a_job_that_ended_while_its_cancel_was_under_way_keeps_its_success(world: World):
    job_id = await world.start()
    await world.cancel(job_id)
    await world.report(f"{job_id}-1", 2, state=AttemptState.SUCCEEDED)
    assert (await world.job(job_id)).state == "SUCCEEDED"


async def test_a_driver_ended_by_somebody_else_counts_as_lost(world: World):
    job_id = await world.start(retry={"infrastructure": 0})
    await world.report(f"{job_id}-1", 2, state=AttemptState.CANCELLED)
    job = await world.job(job_id)
    assert (job.state, job.reason) == ("FAILED", "DRIVER_LOST")


async def test_a_restarted_control_plane_finds_the_attempts_again(world: World):
    job_id = await world.start()
    world.restart()
    await world.rounds(3)
    assert (await world.job(job_id)).state == "RUNNING"
    assert list(world.cluster.submissions) == [f"{job_id}-1"]
    await world.report(f"{job_id}-1", 2, state=AttemptState.SUCCEEDED)
    assert (await world.job(job_id)).state == "SUCCEEDED"


async def test_a_driver_that_ended_while_the_control_plane_was_away_is_noticed(world: World):
    job_id = await world.start(retry={"infrastructure": 0})
    world.cluster.states[f"{job_id}-1"] = RayJob(RayState.FAILED)
    world.restart()
    world.orchestrator.attempts.limits = attempt_lifecycle.WatchLimits(report_grace_s=0.0)
    await world.rounds(2)
    assert (await world.job(job_id)).reason == "DRIVER_LOST"


async def test_where_ray_does_not_answer_either_silence_is_told_with_the_reason(world: World, monkeypatch):
    monkeypatch.setattr(watch, "_ASK_EVERY_S", 0.0)
    job_id = await world.start(retry={"infrastructure": 0})
    async with world.database.write() as session:
        (await find_attempt(session, f"{job_id}-1")).heartbeat_at = utc_now() - timedelta(seconds=60)
    world.orchestrator.heartbeat.liveness.since -= 1000
    world.cluster.away = True
    await world.rounds(3)
    async with world.database.read() as session:
        silent = [event.message for event in await events_of(session, job_id) if event.kind == "silent"]
    assert silent == ["no report for 30 s; the cluster is away"]


async def test_silence_is_told_once_and_a_silent_driver_is_stopped_at_the_long_limit(world: World):
    job_id = await world.start(retry={"infrastructure": 0})
    async with world.database.write() as session:
        (await find_attempt(session, f"{job_id}-1")).heartbeat_at = utc_now() - timedelta(seconds=60)
    world.orchestrator.heartbeat.liveness.since -= 1000
    await world.rounds(3)
    async with world.database.read() as session:
        kinds = [event.kind for event in await events_of(session, job_id)]
    assert kinds.count("silent") == 1 and not world.cluster.stopped
    async with world.database.write() as session:
        (await find_attempt(session, f"{job_id}-1")).heartbeat_at = utc_now() - timedelta(seconds=101)
    await world.rounds(3)
    job = await world.job(job_id)
    assert world.cluster.stopped == [f"{job_id}-1"]
    assert (job.state, job.reason) == ("FAILED", "DRIVER_LOST") and "said nothing for 100 s" in job.message


async def test_uploaded_code_reaches_the_cluster_with_the_start(world: World):
    digest = "ab" * 32
    async with world.database.write() as session:
        await store_package(session, StoredPackage(digest, 3, b"zip"), at=utc_now())
    job_id = await world.submit(code={"working_dir": f"package:{digest}", "pip": ["einops"]})
    await world.rounds(2)
    submission = world.cluster.submissions[f"{job_id}-1"]
    assert submission.working_dir == f"gcs://_ray_pkg_{digest[:32]}.zip" and submission.pip == ("einops",)
    assert world.cluster.packages == {f"_ray_pkg_{digest[:32]}.zip": b"zip"}


async def test_the_log_of_a_driver_that_ended_in_order_is_kept(world: World):
    job_id = await world.start()
    world.cluster.logs[f"{job_id}-1"] = "hello\n"
    await world.report(f"{job_id}-1", 2, state=AttemptState.SUCCEEDED)
    await world.rounds(2)
    assert (await world.attempt(f"{job_id}-1")).log == "hello\n"
    world.cluster.away = True
    async with world.database.read() as session:
        (place,) = await log_locations(session, job_id)
    assert list(await LogReader(world.database, world.clusters).lines(place, 0)) == [(1, "hello")]


async def test_a_log_that_ray_does_not_give_out_holds_up_no_other_and_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    lost, kept = await world.start(pipeline={"stages": 1}), await world.start(pipeline={"stages": 1})
    for job_id in (lost, kept):
        world.cluster.logs[f"{job_id}-1"] = "hello\n"
        await world.report(f"{job_id}-1", 2, state=AttemptState.SUCCEEDED)
    world.cluster.lost_logs.add(f"{lost}-1")
    await world.rounds(2)
    assert (await world.attempt(f"{kept}-1")).log == "hello\n"
    assert (await world.attempt(f"{lost}-1")).log is None
    monkeypatch.setattr("service.orchestrator.ray.driver_logs._LOG_GIVEN_UP_S", 0.0)
    await world.rounds(1)
    assert (await world.attempt(f"{lost}-1")).log == "[Ray did not give this log out]\n"


async def test_a_timeline_and_a_checkpoint_of_a_report_are_stored(world: World):
    job_id = await world.start()
    timeline = TimelineRecord(step=3, started_at=1.0, uncertainty_s=None, slots=[])
    await world.report(f"{job_id}-1", 2, timelines=[timeline], checkpoint=(50, "file:///c/50"))
    job = await world.job(job_id)
    assert (job.checkpoint_step, job.checkpoint_uri) == (50, "file:///c/50")


def test_a_long_log_keeps_its_end_in_whole_lines_under_their_numbers():
    text = "".join(f"line {number}\n" for number in range(1, 101))
    window = LogWindow(50)
    window.add(text.encode())
    first, kept = window.first_line, window.text()
    assert kept == "".join(f"line {number}\n" for number in range(first, 101)) and 25 < len(kept) <= 50


def test_a_log_that_comes_in_pieces_of_lines_is_as_if_it_came_at_once():
    text = b"one\ntwo two\n\nfour"
    for size in (1, 2, 3, 5, len(text)):
        window = LogWindow(100)
        for begin in range(0, len(text), size):
            window.add(text[begin : begin + size])
        assert list(window.lines(0, ended=True)) == [(1, "one"), (2, "two two"), (3, ""), (4, "four")]
        assert list(window.lines(2, ended=False)) == [(3, "")] and window.read_bytes == len(text)


def test_a_log_is_kept_without_characters_that_a_database_refuses():
    window = LogWindow(10)
    window.add(b"a\x00b")
    assert (window.first_line, window.text()) == (1, "ab")
