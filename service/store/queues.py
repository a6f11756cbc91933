"""Members of projects, quotas of queues as they are set, and counts for the control plane's metrics.

There is a project where it has members. A quota that an operator set replaces the configured one for every control
plane of the database, until it is reset. A project's quota in a queue bounds its jobs there besides.
Counts are a few grouped queries, each over an index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, delete, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.spec.principals import Membership, ProjectQueue, QuotaScope, Role, roles_of
from service.spec.states import (
    WAITING_STATES,
    AttemptState,
    JobState,
)
from service.store.database import Database
from service.store.events import add_audit
from service.store.tables import AttemptRow, JobRow, ProjectMemberRow, ProjectQuotaRow, QueueQuotaRow
from worker.contract.reasons import Cause, cause_of


@dataclass(frozen=True)
class ControlPlaneCounts:
    """Jobs by state (every state, also with 0), waiting jobs by queue, ended attempts by cause.

    Causes are succeeded, cancelled, and the three causes of failure (infrastructure, user, preemption).
    """

    jobs_by_state: dict[str, int]
    queue_depth: dict[str, int]
    attempts_by_cause: dict[str, int]


async def count_jobs_and_attempts(database: Database, queues: tuple[str, ...] = ()) -> ControlPlaneCounts:
    """All counts, from one read session; each of `queues` appears, also with 0."""
    jobs = {str(state): 0 for state in JobState}
    depth = dict.fromkeys(queues, 0)
    causes = dict.fromkeys(("succeeded", "cancelled", *map(str, Cause)), 0)
    async with database.read() as session:
        by_state = select(JobRow.state, func.count()).group_by(JobRow.state)
        jobs.update({state: number for state, number in (await session.execute(by_state)).all()})
        waiting = (
            select(JobRow.queue, func.count()).where(JobRow.state.in_(WAITING_STATES)).group_by(JobRow.queue)
        )
        depth.update({queue: number for queue, number in (await session.execute(waiting)).all()})
        ended = select(AttemptRow.state, AttemptRow.reason, func.count()).group_by(
            AttemptRow.state, AttemptRow.reason
        )
        for state, reason, number in (await session.execute(ended)).all():
            if AttemptState(state).final:
                cause = str(cause_of(reason)) if state == AttemptState.FAILED else state.lower()
                causes[cause] += number
    return ControlPlaneCounts(jobs_by_state=jobs, queue_depth=depth, attempts_by_cause=causes)


async def project_roles_of(session: AsyncSession, principal: str) -> dict[str, Role]:
    """The roles of a principal by project, beside the default one."""
    column = ProjectMemberRow.principal
    patterns = [column.contains(character, autoescape=True) for character in "*?["]
    return roles_of(principal, await _memberships(session, or_(column == principal, *patterns)))


async def project_members(session: AsyncSession, project: str | None = None) -> list[Membership]:
    """The members of a project, or of all, ordered by project and name."""
    return await _memberships(session, *([] if project is None else [ProjectMemberRow.project == project]))


async def _memberships(session: AsyncSession, *conditions: ColumnElement[bool]) -> list[Membership]:
    query = select(ProjectMemberRow).where(*conditions)
    rows = await session.execute(query.order_by(ProjectMemberRow.project, ProjectMemberRow.principal))
    known = {str(role) for role in Role}  # a role of a newer Slotline gives no rights here
    return [
        Membership(row.project, row.principal, Role(row.role)) for row in rows.scalars() if row.role in known
    ]


async def set_project_member(session: AsyncSession, member: Membership, *, at: datetime, by: str) -> None:
    """Give principals a role in a project, in place of the one that they had by the same name."""
    await session.merge(
        ProjectMemberRow(project=member.project, principal=member.principal, role=member.role, set_at=at)
    )
    add_audit(
        session, by, "project.member", member.project, at=at, detail=f"{member.principal}: {member.role}"
    )


async def remove_project_member(
    session: AsyncSession, project: str, principal: str, *, at: datetime, by: str
) -> bool:
    """Take a name out of a project; returns whether it was there."""
    same = ProjectMemberRow.project == project, ProjectMemberRow.principal == principal
    existed = (await session.execute(delete(ProjectMemberRow).where(*same))).rowcount > 0
    if existed:
        add_audit(session, by, "project.member", project, at=at, detail=f"{principal}: none")
    return existed


async def effective_quotas(
    session: AsyncSession, configured: Mapping[str, int | None]
) -> dict[str, int | None]:
    """The quota of each configured queue: an operator's, else the configured one; None: unlimited."""
    by_operators = (await session.execute(select(QueueQuotaRow.queue, QueueQuotaRow.quota))).all()
    return {**configured, **{queue: quota for queue, quota in by_operators if queue in configured}}


async def set_quota(session: AsyncSession, queue: str, quota: int | None, *, at: datetime, by: str) -> None:
    """Set the quota for every control plane of the database, until it is set again or reset."""
    await session.merge(QueueQuotaRow(queue=queue, quota=quota, set_at=at))
    add_audit(session, by, "queue.quota", queue, at=at, detail="none" if quota is None else str(quota))


async def reset_quota(session: AsyncSession, queue: str, *, at: datetime, by: str) -> None:
    """Delete an operator's quota, so that the configured one applies again."""
    await session.execute(delete(QueueQuotaRow).where(QueueQuotaRow.queue == queue))
    add_audit(session, by, "queue.quota", queue, at=at, detail="as configured")


async def all_quotas(
    session: AsyncSession, configured: Mapping[str, int | None]
) -> dict[QuotaScope, int | None]:
    """The quotas of the configured queues, and of projects in queues."""
    return {**await effective_quotas(session, configured), **await project_quotas(session)}


async def project_quotas(session: AsyncSession) -> dict[ProjectQueue, int]:
    """The quotas of projects in queues, ordered by both names."""
    row = ProjectQuotaRow
    query = select(row.project, row.queue, row.quota).order_by(row.project, row.queue)
    return {
        ProjectQueue(project, queue): quota for project, queue, quota in (await session.execute(query)).all()
    }


async def set_project_quota(
    session: AsyncSession, scope: ProjectQueue, quota: int | None, *, at: datetime, by: str
) -> None:
    """Set a project's quota in a queue; None deletes it."""
    if quota is None:
        same = ProjectQuotaRow.project == scope.project, ProjectQuotaRow.queue == scope.queue
        await session.execute(delete(ProjectQuotaRow).where(*same))
    else:
        await session.merge(ProjectQuotaRow(project=scope.project, queue=scope.queue, quota=quota, set_at=at))
    detail = f"{scope.queue}: {'none' if quota is None else quota}"
    add_audit(session, by, "project.quota", scope.project, at=at, detail=detail)
