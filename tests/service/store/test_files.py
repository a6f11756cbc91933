"""What goes, when, and what stays: on SQLite and on PostgreSQL."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
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
    PackagesUnreachableError,
    PackageUnreadableError,
    RetentionPolicy,
    StoredPackage,
    apply_retention,
    find_package,
    put_package,
    read_package,
    renew_package,
    storage_usage_by_owner,
    store_package,
)
from service.store.jobs import find_job, retry_job
from service.store.measurements import record_steps, record_timeline
from service.store.plans import record_job_plan
from service.store.tables import (
    AttemptRow,
    Base,
    JobPlanRow,
    PackageRow,
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


def in_row(digest: str) -> StoredPackage:
    return StoredPackage(digest, 3, b"zip")


@pytest.fixture
def bucket() -> Iterator[MemoryFileSystem]:
    """Objects at `memory://code`, as an object store has them: by key, whole or not at all."""
    files = MemoryFileSystem()
    yield files
    files.store.clear()


@pytest.mark.parametrize("place", ["memory://code", "folder"])
async def test_a_package_in_a_bucket_is_read_from_there_and_goes_with_its_row(
    database: Database, bucket: MemoryFileSystem, tmp_path: Path, place: str
):
    uri = place if "://" in place else str(tmp_path / place)
    content = b"zip" * 1000
    digest = hashlib.sha256(content).hexdigest()
    package = await put_package(digest, content, uri=uri + "/")
    assert package.address == f"{uri}/{digest}.zip" and package.size_bytes == 3000
    assert await read_package(database, digest) is None
    async with database.write() as session:
        await store_package(session, package, at=NOW - timedelta(days=31), owner="ana")
    async with database.read() as session:
        in_table = (await session.execute(select(func.length(PackageRow.content)))).scalar_one()
        (used,) = await storage_usage_by_owner(session)
    assert in_table == 0 and (used.owner, used.package_bytes) == ("ana", 3000)
    assert await read_package(database, digest) == content
    files, path = fsspec.core.url_to_fs(package.address)
    assert [Path(name).name for name in files.find(files._parent(path))] == [f"{digest}.zip"]
    await apply_retention(database, KEEP, now=NOW)
    assert not files.exists(path) and await read_package(database, digest) is None


@pytest.mark.parametrize(
    "damage", [None, b"", b"zap" * 1000, b"zip" * 1001], ids=["gone", "empty", "another", "longer"]
)
async def test_an_object_that_is_not_what_was_uploaded_is_refused_and_mended_by_the_next_upload(
    database: Database, bucket: MemoryFileSystem, damage: bytes | None
):
    content = b"zip" * 1000
    digest = hashlib.sha256(content).hexdigest()
    package = await put_package(digest, content, uri="memory://code")
    async with database.write() as session:
        await store_package(session, package, at=NOW)
    if damage is None:
        bucket.rm_file(f"/code/{digest}.zip")
    else:
        bucket.pipe_file(f"/code/{digest}.zip", damage)
    with pytest.raises(PackageUnreadableError, match=r"memory://code/.*: upload the package again"):
        await read_package(database, digest)
    assert await put_package(digest, content, uri="memory://code") == package
    assert await read_package(database, digest) == content


async def test_a_package_that_is_uploaded_again_moves_to_where_packages_lie_now(
    database: Database, bucket: MemoryFileSystem
):
    content = b"zip" * 1000
    digest = hashlib.sha256(content).hexdigest()
    lengths = []
    async with database.write() as session:
        await store_package(session, await put_package(digest, content, uri=None), at=NOW)
    for uri in ("memory://code", "memory://edoc", None, None):
        package = await put_package(digest, content, uri=uri)
        async with database.write() as session:
            assert await renew_package(session, package, at=NOW)
        async with database.read() as session:
            row = (await session.execute(select(PackageRow.content))).scalar_one()
        lengths.append(len(row))
        assert row == package.content and await read_package(database, digest) == content
    assert lengths == [0, 0, 3000, 3000]


async def test_a_place_that_fails_is_named_and_retention_goes_on(
    database: Database,
    bucket: MemoryFileSystem,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    with pytest.raises(PackagesUnreachableError, match=r"nowhere://x/.*cannot be used: ValueError"):
        await put_package("d" * 64, b"zip", uri="nowhere://x")
    contents = [letter * 1000 for letter in (b"a", b"b")]
    async with database.write() as session:
        for content in contents:
            package = await put_package(hashlib.sha256(content).hexdigest(), content, uri="memory://code")
            await store_package(session, package, at=NOW - timedelta(days=31))

    def refuse(self: MemoryFileSystem, path: str) -> None:
        raise PermissionError("may not delete")

    monkeypatch.setattr(MemoryFileSystem, "rm_file", refuse)
    await apply_retention(database, KEEP, now=NOW)
    assert caplog.text.count("may not delete") == 2 and "memory://code/" in caplog.text


async def test_packages_that_no_job_names_go_unless_somebody_uploaded_them_again(database: Database):
    used, unused, renewed, fresh = (letter * 64 for letter in "abcd")
    async with database.write() as session:
        for digest in (used, unused, renewed):
            await store_package(session, in_row(digest), at=NOW - timedelta(days=31))
        await store_package(session, in_row(fresh), at=NOW - timedelta(days=29))
    await job_with_everything(database, ended_days_ago=31, code={"working_dir": f"package:{used}"})
    await job_with_everything(database, ended_days_ago=31)  # its working_dir is null
    async with database.write() as session:
        assert await renew_package(session, in_row(renewed), at=NOW)
        assert not await renew_package(session, in_row("e" * 64), at=NOW)
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
    kept |= {"queue_quotas", "project_quotas", "project_members", "node_states", "leases"}
    assert set(Base.metadata.tables) == tidied | kept
