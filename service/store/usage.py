"""How many bytes there are of whom, and of what a job has left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.store.kept_tables import NamedPlan
from service.store.tables import Attempt, Job, JobPlan, Package, PackageOwner, PostMortem, Timeline


@dataclass
class Usage:
    """Of one owner, in bytes; `jobs` have files in storage."""

    owner: str
    jobs: int = 0
    storage_bytes: int = 0
    plan_bytes: int = 0
    package_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.storage_bytes + self.plan_bytes + self.package_bytes


async def usage_of_owners(session: AsyncSession, *, owner: str | None = None) -> list[Usage]:
    """Of every owner who has something, most first; only of one where `owner` is given."""
    found: dict[str, Usage] = {}
    stored = select(Job.owner, func.count(), func.sum(Job.stored_bytes)).where(Job.stored_bytes > 0)
    plans = select(NamedPlan.owner, func.sum(NamedPlan.size_bytes))
    packages = select(PackageOwner.owner, func.sum(Package.size_bytes)).join(
        Package, Package.digest == PackageOwner.digest
    )
    for query, column, names in (
        (stored, Job.owner, ("jobs", "storage_bytes")),
        (plans, NamedPlan.owner, ("plan_bytes",)),
        (packages, PackageOwner.owner, ("package_bytes",)),
    ):
        wanted = query if owner is None else query.where(column == owner)
        for whose, *sums in await session.execute(wanted.group_by(column)):
            of_owner = found.setdefault(whose, Usage(whose))
            for name, value in zip(names, sums, strict=True):
                setattr(of_owner, name, int(value))
    return sorted(found.values(), key=lambda one: (-one.total_bytes, one.owner))


@dataclass(frozen=True)
class Left:
    """Something of a job in the database."""

    kind: str
    attempt: int | None
    size_bytes: int | None
    made_at: datetime | None
    count: int = 1


async def left_by(session: AsyncSession, job_id: str) -> Sequence[Left]:
    """What the database has of a job beside its rows: logs, post-mortems, its plan, measured steps."""
    found = []
    sizes = func.coalesce(func.length(PostMortem.plan), 0) + func.coalesce(func.length(PostMortem.slots), 0)
    bundles = select(Attempt.number, sizes, PostMortem.at).join(Attempt, Attempt.id == PostMortem.attempt_id)
    for number, size, at in await session.execute(bundles.where(PostMortem.job_id == job_id)):
        found.append(Left("postmortem", number, size, at))
    logs = select(Attempt.number, func.length(Attempt.log), Attempt.finished_at)
    for number, size, at in await session.execute(logs.where(Attempt.job_id == job_id, Attempt.log != "")):
        found.append(Left("log", number, size, at))
    plan = select(JobPlan.attempt, func.length(JobPlan.body), JobPlan.created_at)
    for number, size, at in await session.execute(plan.where(JobPlan.job_id == job_id)):
        found.append(Left("plan", number, size, at))
    steps = select(func.count(), func.max(Timeline.attempt)).where(Timeline.job_id == job_id)
    count, attempt = (await session.execute(steps)).one()
    if count:
        found.append(Left("timelines", attempt, None, None, count))
    return found


async def package_of(session: AsyncSession, digest: str) -> tuple[int, datetime] | None:
    """Size and time of a package."""
    query = select(Package.size_bytes, Package.created_at).where(Package.digest == digest)
    row = (await session.execute(query)).first()
    return None if row is None else (row[0], row[1])
