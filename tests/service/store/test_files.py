"""What goes, when, and what stays: on SQLite and on PostgreSQL."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import func, select

from service.orchestrator.loop import Orchestrator
from service.orchestrator.ray.clusters import build_clusters
from service.settings.settings import FOR_EVER, Settings
from service.spec.job import JobSpec
from service.spec.states import AttemptState, JobState
from service.store.attempts import create_attempt, record_placement
from service.store.database import Database, utc_now
from service.store.events import events_of, store_post_mortem
from service.store.files import (
    RetentionPolicy,
    apply_retention,
    find_package,
    renew_package,
    store_package,
)
from service.store.jobs import find_job, retry_job
from service.store.measurements import record_steps, record_timeline
from service.store.plans import record_job_plan
from service.store.tables import (
    AttemptRow,
    Base,
    JobPlanRow,
    PlacedMeshRow,
    PostMortemRow,
    SlotRow,
    StepRow,
    TimelineRow,
)
from service.store.transitions import move_attempt, move_job
from tests.service.conftest import create_job, job_body
from tests.service.fake_cluster import FakeCluster
from tests.service.store.test_steps import step
from tests.service.store.test_timelines import slot

NOW = utc_now()
KEEP = RetentionPolicy(timelines_days=30, history_days=365)


async def job_with_everything(
    database: Database, *, ended_days_ago: float | None, timelines: int = 2, **changes
) -> str:
    """A job with steps, plan, log and `timelines` timelines of two slots; it runs where it has not ended."""
    at = NOW - timedelta(days=ended_days_ago or 1000)
    async with database.write() as session:
        job = await create_job(session, JobSpec.model_validate(job_body(**changes)), at=at)
        attempt = await create_attempt(session, job, device="cpu", at=at)
        await session.flush()
        await record_steps(session, attempt, [step(1), step(2)])
        await record_job_plan(session, attempt, "{}", at=at)
        where = {"job_id": job.id, "cluster": "default", "mesh": "m0", "node_id": "id-1", "node": "n1"}
        await record_placement(
            session, attempt.id, [PlacedMeshRow(attempt_id=attempt.id, workers=1, **where)]
        )
        for number in range(timelines):
            await record_timeline(
                session,
                attempt,
                step=number,
                started_at=0.0,
                uncertainty_s=None,
                slots=[slot(), slot()],
                keep=100,
            )
        if ended_days_ago is not None:
            attempt.log = "hello\n"
            await store_post_mortem(session, attempt, at=at)
            move_attempt(attempt, AttemptState.FAILED, at=at, reason="NAN_LOSS")
            move_job(session, job, JobState.FAILED, at=at, reason="NAN_LOSS")
    return job.id


async def left(database: Database, job_id: str) -> dict[str, int]:
    """Rows of a job by table, and the length of its log."""
    async with database.read() as session:
        found = {}
        for table in (SlotRow, TimelineRow, StepRow, JobPlanRow, PostMortemRow, PlacedMeshRow, AttemptRow):
            query = select(func.count()).select_from(table).where(table.job_id == job_id)
            found[table.__tablename__] = (await session.execute(query)).scalar_one()
        logs = select(AttemptRow.log).where(AttemptRow.job_id == job_id)
        found["log"] = sum(len(log or "") for log in (await session.execute(logs)).scalars())
        return found


WHOLE = {
    **{"slots": 4, "timelines": 2, "steps": 2, "plans": 1, "post_mortems": 1, "placements": 1},
    **{"attempts": 1, "log": 6},
}


async def test_slots_go_first_and_the_rest_much_later_but_never_job_attempts_and_events(database: Database):
    young, old, ancient = [await job_with_everything(database, ended_days_ago=d) for d in (29, 31, 366)]
    await apply_retention(database, KEEP, now=NOW)
    assert await left(database, young) == WHOLE
    assert await left(database, old) == {**WHOLE, "slots": 0, "timelines": 0}
    assert await left(database, ancient) == {**dict.fromkeys(WHOLE, 0), "attempts": 1}
    async with database.read() as session:
        assert (await find_job(session, ancient)).reason == "NAN_LOSS"
        told = [e.message for e in await events_of(session, ancient) if e.kind == "removed"]
    assert len(told) == 2 and "SLOTLINE_KEEP_TIMELINES_DAYS" in told[0] and "365 days" in told[1]
    await apply_retention(database, KEEP, now=NOW)
    async with database.read() as session:
        assert len([e for e in await events_of(session, ancient) if e.kind == "removed"]) == 2, "told once"


async def test_a_job_with_many_timelines_loses_them_in_short_transactions(database: Database):
    job_id = await job_with_everything(database, ended_days_ago=31, timelines=45)
    await apply_retention(database, KEEP, now=NOW)
    assert (await left(database, job_id))["slots"] == 0
    async with database.read() as session:
        assert [e.kind for e in await events_of(session, job_id)].count("removed") == 1


async def test_a_job_that_runs_or_was_begun_again_loses_nothing(database: Database):
    running = await job_with_everything(database, ended_days_ago=None)
    again = await job_with_everything(database, ended_days_ago=400)
    async with database.write() as session:
        await retry_job(session, again, at=NOW)
    await apply_retention(database, KEEP, now=NOW)
    assert await left(database, running) == {**WHOLE, "post_mortems": 0, "log": 0}
    assert await left(database, again) == WHOLE


async def test_for_ever_is_for_ever_and_zero_days_is_at_once(database: Database):
    job_id = await job_with_everything(database, ended_days_ago=0.001)
    await apply_retention(
        database, RetentionPolicy(FOR_EVER, FOR_EVER, FOR_EVER, FOR_EVER), now=NOW + timedelta(days=10_000)
    )
    assert await left(database, job_id) == WHOLE
    await apply_retention(database, RetentionPolicy(0, FOR_EVER, FOR_EVER), now=NOW)
    assert await left(database, job_id) == {**WHOLE, "slots": 0, "timelines": 0}


async def test_packages_that_no_job_names_go_unless_somebody_uploaded_them_again(database: Database):
    used, unused, renewed, fresh = (letter * 64 for letter in "abcd")
    async with database.write() as session:
        for digest in (used, unused, renewed):
            await store_package(session, digest, b"zip", at=NOW - timedelta(days=31))
        await store_package(session, fresh, b"zip", at=NOW - timedelta(days=29))
    await job_with_everything(database, ended_days_ago=31, code={"working_dir": f"package:{used}"})
    await job_with_everything(database, ended_days_ago=31)  # its working_dir is null
    async with database.write() as session:
        assert await renew_package(session, renewed, at=NOW)
        assert not await renew_package(session, "e" * 64, at=NOW)
    await apply_retention(database, KEEP, now=NOW)
    async with database.read() as session:
        kept = {digest for digest in (used, unused, renewed, fresh) if await find_package(session, digest)}
    assert kept == {used, renewed, fresh}


async def test_the_orchestrator_tidies_up_with_its_settings(database: Database):
    old = await job_with_everything(database, ended_days_ago=31)
    settings = Settings(keep_timelines_days=-1, keep_history_days=1)
    cluster = FakeCluster()
    orchestrator = Orchestrator(
        settings, database, build_clusters(settings, {"default": cluster}, refresh_s=600)
    )
    for _ in range(2):
        await orchestrator.round()
        await orchestrator.settle()
    assert await left(database, old) == {
        **WHOLE,
        "steps": 0,
        "plans": 0,
        "post_mortems": 0,
        "placements": 0,
        "log": 0,
    }


def test_a_number_of_days_that_means_nothing_is_refused():
    with pytest.raises(ValueError, match="-1 for ever"):
        Settings(keep_history_days=-0.5)


def test_every_table_is_either_kept_for_ever_or_tidied():
    """A new table needs a decision."""
    tidied = {
        "slots",
        "timelines",
        "steps",
        "evaluations",
        "plans",
        "packages",
        "package_owners",
        "post_mortems",
        "deliveries",
        "short_runs",
        "named_plans",
        "storage_uses",
        "placements",
    }
    kept = {"jobs", "attempts", "events", "profiles", "tokens", "pulses", "audit", "secrets", "job_labels"}
    kept |= {"queue_quotas", "node_states", "leases"}
    assert set(Base.metadata.tables) == tidied | kept
