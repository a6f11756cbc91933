"""Stored files: uploaded code packages, uses and removal of checkpoints, retention of history, and bytes by owner.

A package is a zip under its digest, stored once, with everyone who uploaded it. Its content is in its row, or, where
`SLOTLINE_PACKAGES_URI` was set at its upload, in an object whose address the row has; what is read there is
compared with the digest. The object is written before its row and deleted after it: a package that is uploaded again is
whole again, whatever became of its object.
A use of a job's files is a lease: reading and deleting exclude each other over all replicas, and a use whose control
plane was lost ends at its limit, as the task that it began in the cluster does. A removal is written to the store
before it begins, so that no attempt resumes from files that are being deleted, and its result is written after.
Retention removes measured slots of ended jobs first, later steps, logs and plans; jobs, attempts and events stay.
Each piece is a short transaction of its own, safe to stop and repeat; a job that was begun again meanwhile is left
alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from sqlalchemy import ColumnElement, delete, exists, func, literal, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.settings.clusters import DEFAULT_CLUSTER
from service.settings.settings import FOR_EVER
from service.spec.job import PACKAGE_PREFIX, stored_field
from service.spec.principals import ANONYMOUS, principal_text
from service.spec.states import FINAL_STATES
from service.store.database import Sessions, upsert
from service.store.events import add_audit
from service.store.leases import LeaseTable, delete_old_heartbeats, delete_old_tasks
from service.store.plans import delete_unused_saved_plans
from service.store.tables import (
    AttemptRow,
    DeliveryRow,
    EvaluationRow,
    JobPlanRow,
    JobRow,
    PackageOwnerRow,
    PackageRow,
    PlacedMeshRow,
    PostMortemRow,
    SavedPlanRow,
    SlotRow,
    StepRow,
    StorageUseRow,
    TimelineRow,
)
from service.store.transitions import add_event, lock_job
from worker.contract.checkpoint_files import step_folder_name, step_uri
from worker.contract.tasks import RemovalRequest, RemovalResult

logger = logging.getLogger(__name__)


async def find_package(session: AsyncSession, digest: str, *, owner: str | None = None) -> bool:
    """True if the package is stored and, where `owner` is given, was uploaded by them; its content is not read."""
    query = select(PackageRow.digest).where(PackageRow.digest == digest)
    if owner is not None:
        query = query.where(
            exists().where(PackageOwnerRow.digest == PackageRow.digest, PackageOwnerRow.owner == owner)
        )
    return (await session.execute(query)).first() is not None


@dataclass(frozen=True)
class StoredPackage:
    """A package as its row has it: `content` is the zip, or empty where an object at `address` has it."""

    digest: str
    size_bytes: int
    content: bytes
    address: str | None = None


class PackageUnreadableError(Exception):
    """The object of a package is not there, or is another one; the message names its address."""


class PackagesUnreachableError(Exception):
    """The place of packages does not answer, or refuses; the message says how."""


async def put_package(digest: str, content: bytes, *, uri: str | None) -> StoredPackage:
    """A package for its row; below `uri` its object is written, also over one. Raises PackagesUnreachableError."""
    if uri is None:
        return StoredPackage(digest, len(content), content)
    address = f"{uri.rstrip('/')}/{digest}.zip"
    await _at_place(address, lambda: _write_object(address, content))
    return StoredPackage(digest, len(content), b"", address)


async def read_package(database: Sessions, digest: str) -> bytes | None:
    """The zip of a package; None where it is not stored. Raises PackageUnreadableError or PackagesUnreachableError."""
    columns = PackageRow.size_bytes, PackageRow.content, PackageRow.address
    query = select(*columns).where(PackageRow.digest == digest)
    async with database.read() as session:
        row = (await session.execute(query)).first()
    if row is None:
        return None
    package = StoredPackage(digest, *row)
    if (address := package.address) is None:
        return package.content
    content = await _at_place(address, lambda: _read_object(address, package.size_bytes))
    if content is None or hashlib.sha256(content).hexdigest() != digest:
        problem = "is not there" if content is None else "is not what was uploaded"
        raise PackageUnreadableError(f"{address} {problem}: upload the package again (submit the job anew)")
    return content


async def store_package(
    session: AsyncSession, package: StoredPackage, *, at: datetime, owner: str = ANONYMOUS
) -> None:
    """Store a new package. Raises sqlalchemy's IntegrityError where it is stored already."""
    session.add(
        PackageRow(
            digest=package.digest,
            created_at=at,
            size_bytes=package.size_bytes,
            content=package.content,
            address=package.address,
        )
    )
    await session.flush()
    session.add(PackageOwnerRow(digest=package.digest, owner=owner))


async def renew_package(
    session: AsyncSession, package: StoredPackage, *, at: datetime, owner: str = ANONYMOUS
) -> bool:
    """Count a stored package as uploaded by `owner` at `at`, where it lies now; returns whether it is stored."""
    row = PackageRow.digest == package.digest
    if (await session.execute(update(PackageRow).where(row).values(created_at=at))).rowcount == 0:
        return False
    moved = update(PackageRow).where(row, PackageRow.address.is_distinct_from(package.address))
    await session.execute(moved.values(content=package.content, address=package.address))
    await upsert(session, PackageOwnerRow, [{"digest": package.digest, "owner": owner}])
    return True


_PLACE_LIMIT_S = 120.0
_T = TypeVar("_T")


async def _at_place(address: str, work: Callable[[], _T]) -> _T:
    """The result of `work` on an object, in a thread. Raises PackagesUnreachableError for whatever a storage raises."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(work), _PLACE_LIMIT_S)
    except TimeoutError:
        raise PackagesUnreachableError(f"{address} did not answer in {_PLACE_LIMIT_S:g} s") from None
    except Exception as error:  # credentials, names, packages that are not installed
        message = f"{address} cannot be used: {type(error).__name__}: {error}"
        raise PackagesUnreachableError(message[:1000]) from error


def _write_object(address: str, content: bytes) -> None:
    files, path = fsspec.core.url_to_fs(address, use_listings_cache=False)
    if not isinstance(files, LocalFileSystem):
        files.pipe_file(path, content)  # of a bucket: whole or not at all
        return
    files.makedirs(files._parent(path), exist_ok=True)
    written = f"{path}.{secrets.token_hex(4)}"
    files.pipe_file(written, content)
    files.mv(written, path)


def _read_object(address: str, size_bytes: int) -> bytes | None:
    """The object, or of a longer one as much as shows that it is another; None: there is none."""
    files, path = fsspec.core.url_to_fs(address, use_listings_cache=False)
    try:
        return files.cat_file(path, start=0, end=size_bytes + 1)
    except FileNotFoundError:
        return None


def _delete_object(address: str) -> None:
    files, path = fsspec.core.url_to_fs(address, use_listings_cache=False)
    with contextlib.suppress(FileNotFoundError):
        files.rm_file(path)


class StorageUseKind(StrEnum):
    READING = "reading"
    REMOVING = "removing"


class StorageInUseError(Exception):
    """Another use of the files excludes the requested one; the message says which."""


_STORAGE_USES = LeaseTable(StorageUseRow, StorageUseRow.id, StorageUseRow.until, silence_limit=timedelta(0))


async def begin_storage_use(
    session: AsyncSession,
    job_id: str,
    kind: StorageUseKind,
    folders: Sequence[str] | None,
    *,
    at: datetime,
    limit_s: float,
    use_id: str | None = None,
) -> str:
    """Lease these folders of a job (None: any) for `limit_s`; returns the id of the use. Raises StorageInUseError.

    Uses of one kind share folders, and the two kinds exclude each other. The job stays locked until the session ends.
    """
    await lock_job(session, job_id)
    await _STORAGE_USES.delete_expired(session, StorageUseRow.job_id == job_id, now=at)
    query = select(StorageUseRow).where(StorageUseRow.job_id == job_id, StorageUseRow.kind != kind)
    for other in (await session.execute(query)).scalars():
        if folders is None or other.folders is None or {*folders} & {*other.folders}:
            if other.id.startswith(_RESUME_USE_PREFIX):
                await _check_resume_begun(session, other)
                continue
            doing = "an export reads" if other.kind == StorageUseKind.READING else "somebody deletes"
            what = "its checkpoints" if other.folders is None else ", ".join(other.folders)
            raise StorageInUseError(f"{doing} {what} of job {job_id} now: ask again when it has ended")
    use = StorageUseRow(
        id=use_id or secrets.token_hex(16),
        job_id=job_id,
        kind=kind,
        folders=None if folders is None else list(folders),
        until=at + timedelta(seconds=limit_s),
    )
    session.add(use)
    return use.id


_RESUME_USE_PREFIX = "resume-"
_RESUME_USE_LIMIT_S = 100 * 366 * 86400.0  # it holds while its job waits, however long that is


async def hold_for_resume(
    session: AsyncSession, job_id: str, *, source: str, step: int, at: datetime
) -> None:
    """Keep the checkpoint of job `source` after `step` while job `job_id`, which begins from it, has none of its own.

    Raises StorageInUseError where it is being deleted.
    """
    await begin_storage_use(
        session,
        source,
        StorageUseKind.READING,
        [step_folder_name(step)],
        at=at,
        limit_s=_RESUME_USE_LIMIT_S,
        use_id=f"{_RESUME_USE_PREFIX}{job_id}",
    )


async def wanted_checkpoint_steps(session: AsyncSession, job_id: str) -> list[int]:
    """Steps of the job's checkpoints from which other jobs are still to begin."""
    query = select(StorageUseRow.folders).where(
        StorageUseRow.job_id == job_id,
        StorageUseRow.id.startswith(_RESUME_USE_PREFIX),
        exists().where(literal(_RESUME_USE_PREFIX) + JobRow.id == StorageUseRow.id, *_BEGINS_FROM_ANOTHER),
    )
    folders = {folder for held in (await session.execute(query)).scalars() for folder in held}
    return sorted(int(folder.rpartition("-")[2]) for folder in folders)


_BEGINS_FROM_ANOTHER = (JobRow.state.not_in(FINAL_STATES), JobRow.checkpoint_step.is_(None))
"""The conditions on a job with resume_from under which its next attempt begins from the other job's checkpoint."""


async def _check_resume_begun(session: AsyncSession, use: StorageUseRow) -> None:
    """Raise StorageInUseError while the job of the use is still to begin from the files."""
    job_id = use.id.removeprefix(_RESUME_USE_PREFIX)
    query = select(JobRow.state).where(JobRow.id == job_id, *_BEGINS_FROM_ANOTHER)
    if (state := (await session.execute(query)).scalar_one_or_none()) is not None:
        raise StorageInUseError(
            f"job {job_id} ({state}) begins from {', '.join(use.folders)} of job {use.job_id}: ask again when it has a "
            "checkpoint of its own, or cancel it"
        )


async def end_storage_use(session: AsyncSession, use_id: str) -> None:
    await _STORAGE_USES.release(session, StorageUseRow.id == use_id)


async def check_no_removal(session: AsyncSession, job_id: str, *, at: datetime) -> None:
    """Raise StorageInUseError while files of the job are deleted: an attempt might resume from them."""
    await lock_job(session, job_id)
    query = select(StorageUseRow.id).where(
        StorageUseRow.job_id == job_id,
        StorageUseRow.kind == StorageUseKind.REMOVING,
        _STORAGE_USES.is_held(at),
    )
    if (await session.execute(query.limit(1))).first() is not None:
        raise StorageInUseError(
            f"checkpoints of job {job_id} are being deleted: retry it when that has ended"
        )


_REMOVAL_BATCH_JOBS = 50


@dataclass(frozen=True)
class PendingRemoval:
    """A removal that a task of the cluster carries out; `reported_step` was the job's checkpoint before it."""

    use_id: str
    request: RemovalRequest
    reported_step: int | None
    by: str
    cluster: str
    days: float | None = None
    """The retention time that the files outlived; None: a user asked for the removal."""


async def begin_removal(
    session: AsyncSession,
    job_id: str,
    folders: Sequence[str] | None,
    *,
    at: datetime,
    limit_s: float,
    by: str,
    days: float | None = None,
) -> PendingRemoval:
    """Begin to delete these folders of a job (None: all).

    Raises StorageInUseError for files in use, and for the checkpoint that an attempt would resume from.
    """
    job = await lock_job(session, job_id)
    assert job is not None, job_id
    in_use = not job.job_state.final
    if in_use and (folders is None or resume_checkpoint_folder(job) in folders):
        raise StorageInUseError(
            f"job {job_id} is {job.state}, and would go on from its checkpoint after step {job.checkpoint_step}: that one "
            "stays until the job has ended"
        )
    use_id = await begin_storage_use(
        session, job_id, StorageUseKind.REMOVING, folders, at=at, limit_s=limit_s
    )
    reported = job.checkpoint_step
    if folders is None or resume_checkpoint_folder(job) in folders:
        job.checkpoint_step = job.checkpoint_uri = None  # a retry searches the remaining checkpoints
    what = "all" if folders is None else ", ".join(folders)
    if days is None:
        add_audit(session, by, "job.remove_files", job_id, at=at, detail=what)
    uri = stored_field(job.spec, "checkpoint", "uri", "")
    request = RemovalRequest(uri, job_id, None if folders is None else tuple(folders), in_use)
    return PendingRemoval(use_id, request, reported, by, job.began_on or DEFAULT_CLUSTER, days)


def resume_checkpoint_folder(job: JobRow) -> str | None:
    """The folder of the checkpoint that the next attempt would resume from, as the driver last reported it."""
    return None if job.checkpoint_step is None else step_folder_name(job.checkpoint_step)


async def end_removal(
    session: AsyncSession, removal: PendingRemoval, result: RemovalResult | None, *, at: datetime
) -> None:
    """Record the files that are left of the job; the `result` is None where the task was lost."""
    request = removal.request
    job = await lock_job(session, request.job)
    await end_storage_use(session, removal.use_id)
    if job is None:
        return
    if result is None or result.failed is not None:
        if job.checkpoint_step is None and removal.reported_step is not None:
            _set_checkpoint(job, request.uri, removal.reported_step)
        return
    job.stored_bytes = result.left_bytes
    if job.job_state.final and job.checkpoint_step not in result.left:
        _set_checkpoint(job, request.uri, max(result.left, default=None))
    best = (job.best_checkpoint or {}).get("step")
    if best is not None and step_folder_name(best) in result.removed:
        job.best_checkpoint = None
    if removal.days is not None:  # refused foreign files would be refused again, so they are not tried again
        job.files_removed_at = at
    if result.removed:
        who = (
            f"deleted by {principal_text(removal.by)}"
            if removal.days is None
            else f"deleted {removal.days:g} days after the end (SLOTLINE_KEEP_CHECKPOINTS_DAYS)"
        )
        message = f"{', '.join(result.removed)}: {result.freed_bytes:,} bytes {who}"
        add_event(session, job, "removed", message, at=at, by=removal.by)


def _set_checkpoint(job: JobRow, uri: str, step: int | None) -> None:
    job.checkpoint_step = step
    job.checkpoint_uri = None if step is None else step_uri(uri, job.id, step)


async def jobs_with_expired_files(session: AsyncSession, *, days: float, at: datetime) -> list[str]:
    """Jobs that ended more than `days` ago and whose files were not removed yet; a random batch."""
    query = (
        select(JobRow.id)
        .where(
            JobRow.state.in_(FINAL_STATES),
            JobRow.finished_at < at - timedelta(days=days),
            JobRow.files_removed_at.is_(None),
            JobRow.spec["checkpoint"]["uri"].as_string().is_not(None),
        )
        .order_by(func.random())  # jobs whose removal always fails must not fill every batch
        .limit(_REMOVAL_BATCH_JOBS)
    )
    return list((await session.execute(query)).scalars())


_TIMELINES_PER_TRANSACTION = 20
_RETENTION_BATCH_JOBS = 100


KEEP_PACKAGES_DAYS = 30.0
"""A package that no job names is kept for this time: a client uploads it again where it is gone."""
KEEP_PLANS_DAYS = 90.0
"""A saved plan is kept for this time after the last submission with it."""


@dataclass(frozen=True)
class RetentionPolicy:
    """Days that data is kept after a job's end, a package after its last upload, a plan after the last submission with it;
    FOR_EVER removes nothing.

    Packages that a job names are kept.
    """

    timelines_days: float
    history_days: float
    packages_days: float = KEEP_PACKAGES_DAYS
    plans_days: float = KEEP_PLANS_DAYS


async def apply_retention(database: Sessions, keep: RetentionPolicy, *, now: datetime) -> None:
    """Remove data that is older than `keep` allows."""
    if keep.timelines_days != FOR_EVER:
        await _remove_timelines(database, keep.timelines_days, now)
    if keep.history_days != FOR_EVER:
        await _remove_history(database, keep.history_days, now)
    if keep.packages_days != FOR_EVER:
        await _remove_packages(database, keep.packages_days, now)
    async with database.write() as session:
        await delete_old_heartbeats(session, at=now)
        await delete_old_tasks(session)
        await delete_unused_saved_plans(
            session, unused_days=keep.plans_days, history_days=keep.history_days, at=now
        )


async def _remove_timelines(database: Sessions, days: float, now: datetime) -> None:
    while jobs := await _ended_jobs(database, days, now, exists().where(TimelineRow.job_id == JobRow.id)):
        for job_id in jobs:
            while await _remove_some_timelines(database, job_id, days, now):
                pass


async def _remove_some_timelines(database: Sessions, job_id: str, days: float, now: datetime) -> bool:
    """Remove a batch of a job's timelines; returns whether the job may have more."""
    async with database.write() as session:
        job = await _lock_if_still_ended(session, job_id, days, now)
        if job is None:
            return False
        query = select(TimelineRow.step).where(TimelineRow.job_id == job_id).limit(_TIMELINES_PER_TRANSACTION)
        steps = (await session.execute(query)).scalars().all()
        for table in (SlotRow, TimelineRow):
            await session.execute(delete(table).where(table.job_id == job_id, table.step.in_(steps)))
        if len(steps) == _TIMELINES_PER_TRANSACTION:
            return True
        _add_removal_event(session, job, "measured slots", days, "TIMELINES", now)
        return False


async def _remove_history(database: Sessions, days: float, now: datetime) -> None:
    has_history = or_(
        exists().where(StepRow.job_id == JobRow.id),
        exists().where(JobPlanRow.job_id == JobRow.id),
        exists().where(PostMortemRow.job_id == JobRow.id),
        exists().where(DeliveryRow.job_id == JobRow.id),
        exists().where(AttemptRow.job_id == JobRow.id, AttemptRow.log != ""),
    )
    while jobs := await _ended_jobs(database, days, now, has_history):
        for job_id in jobs:
            async with database.write() as session:
                if job := await _lock_if_still_ended(session, job_id, days, now):
                    for table in (
                        StepRow,
                        EvaluationRow,
                        JobPlanRow,
                        PostMortemRow,
                        DeliveryRow,
                        PlacedMeshRow,
                    ):
                        await session.execute(delete(table).where(table.job_id == job_id))
                    # not NULL: Ray would be asked for the log again
                    await session.execute(
                        update(AttemptRow).where(AttemptRow.job_id == job_id).values(log="")
                    )
                    _add_removal_event(session, job, "steps, plan and logs", days, "HISTORY", now)


async def _remove_packages(database: Sessions, days: float, now: datetime) -> None:
    named = JobRow.spec["code"]["working_dir"].as_string() == literal(PACKAGE_PREFIX) + PackageRow.digest
    unused = (
        delete(PackageRow)
        .where(PackageRow.created_at < now - timedelta(days=days), ~exists().where(named))
        .returning(PackageRow.digest, PackageRow.address)
    )
    async with database.write() as session:
        removed = (await session.execute(unused)).all()
    for digest, address in removed:
        if address is not None:
            await _delete_package_object(database, digest, address)


async def _delete_package_object(database: Sessions, digest: str, address: str) -> None:
    """Delete the object of a package that was removed, unless it was uploaded again; a failure is a warning."""
    async with database.read() as session:
        if await find_package(session, digest):
            return
    try:
        await _at_place(address, lambda: _delete_object(address))
    except PackagesUnreachableError as error:
        logger.warning("a package that no job names was not deleted; delete it yourself: %s", error)


async def _ended_jobs(
    database: Sessions, days: float, now: datetime, has_data: ColumnElement[bool]
) -> list[str]:
    query = (
        select(JobRow.id)
        .where(JobRow.state.in_(FINAL_STATES), JobRow.finished_at < now - timedelta(days=days), has_data)
        .limit(_RETENTION_BATCH_JOBS)
    )
    async with database.read() as session:
        return list((await session.execute(query)).scalars())


async def _lock_if_still_ended(
    session: AsyncSession, job_id: str, days: float, now: datetime
) -> JobRow | None:
    """The job, locked, unless it was retried meanwhile."""
    job = await lock_job(session, job_id)
    if job is None or job.finished_at is None or not job.job_state.final:
        return None
    return job if job.finished_at < now - timedelta(days=days) else None


def _add_removal_event(
    session: AsyncSession, job: JobRow, what: str, days: float, setting: str, now: datetime
) -> None:
    message = f"{what} were removed {days:g} days after the end (SLOTLINE_KEEP_{setting}_DAYS)"
    add_event(session, job, "removed", message, at=now)


@dataclass
class StorageUsage:
    """Bytes that one owner stores; `jobs` is the number of jobs with files in storage."""

    owner: str
    jobs: int = 0
    storage_bytes: int = 0
    plan_bytes: int = 0
    package_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.storage_bytes + self.plan_bytes + self.package_bytes


async def storage_usage_by_owner(
    session: AsyncSession, *, owner: str | None = None, projects: Collection[str] | None = None
) -> list[StorageUsage]:
    """The usage of every owner with stored data (of `owner` alone if given), largest first; of jobs and plans in these
    `projects`, or in all. Packages are in none."""
    usages: dict[str, StorageUsage] = {}
    stored = select(JobRow.owner, func.count(), func.sum(JobRow.stored_bytes)).where(JobRow.stored_bytes > 0)
    plans = select(SavedPlanRow.owner, func.sum(SavedPlanRow.size_bytes))
    packages = select(PackageOwnerRow.owner, func.sum(PackageRow.size_bytes)).join(
        PackageRow, PackageRow.digest == PackageOwnerRow.digest
    )
    for query, column, names in (
        (stored, JobRow.owner, ("jobs", "storage_bytes")),
        (plans, SavedPlanRow.owner, ("plan_bytes",)),
        (packages, PackageOwnerRow.owner, ("package_bytes",)),
    ):
        filtered = query if owner is None else query.where(column == owner)
        if projects is not None and column is not PackageOwnerRow.owner:
            filtered = filtered.where(column.class_.project.in_(projects))
        for name_of_owner, *sums in await session.execute(filtered.group_by(column)):
            usage = usages.setdefault(name_of_owner, StorageUsage(name_of_owner))
            for name, value in zip(names, sums, strict=True):
                setattr(usage, name, int(value))
    return sorted(usages.values(), key=lambda usage: (-usage.total_bytes, usage.owner))


@dataclass(frozen=True)
class StoredArtifact:
    """Data of a job in the database, of one kind (`postmortem`, `log`, `plan`, `timelines`)."""

    kind: str
    attempt: int | None
    size_bytes: int | None
    made_at: datetime | None
    count: int = 1


async def stored_artifacts_of(session: AsyncSession, job_id: str) -> Sequence[StoredArtifact]:
    """The larger data of a job in the database: logs, post-mortems, its plan, measured timelines."""
    artifacts = []
    sizes = func.coalesce(func.length(PostMortemRow.plan), 0) + func.coalesce(
        func.length(PostMortemRow.slots), 0
    )
    bundles = select(AttemptRow.number, sizes, PostMortemRow.at).join(
        AttemptRow, AttemptRow.id == PostMortemRow.attempt_id
    )
    for number, size, at in await session.execute(bundles.where(PostMortemRow.job_id == job_id)):
        artifacts.append(StoredArtifact("postmortem", number, size, at))
    logs = select(AttemptRow.number, func.length(AttemptRow.log), AttemptRow.finished_at)
    for number, size, at in await session.execute(
        logs.where(AttemptRow.job_id == job_id, AttemptRow.log != "")
    ):
        artifacts.append(StoredArtifact("log", number, size, at))
    plan = select(JobPlanRow.attempt, func.length(JobPlanRow.body), JobPlanRow.created_at)
    for number, size, at in await session.execute(plan.where(JobPlanRow.job_id == job_id)):
        artifacts.append(StoredArtifact("plan", number, size, at))
    steps = select(func.count(), func.max(TimelineRow.attempt)).where(TimelineRow.job_id == job_id)
    count, attempt = (await session.execute(steps)).one()
    if count:
        artifacts.append(StoredArtifact("timelines", attempt, None, None, count))
    return artifacts


async def package_size_and_time(session: AsyncSession, digest: str) -> tuple[int, datetime] | None:
    """Size in bytes and last upload of a package; None: it is not stored."""
    query = select(PackageRow.size_bytes, PackageRow.created_at).where(PackageRow.digest == digest)
    row = (await session.execute(query)).first()
    return None if row is None else (row[0], row[1])
