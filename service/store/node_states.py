"""States of nodes as operators, Ray and Slotline set them, and the quarantine of nodes that lose attempts.

A node that loses attempts by its own fault is quarantined for a time, unless an operator put it back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.spec.states import (
    BY_RAY,
    BY_SLOTLINE,
    NodeMark,
    NodeState,
    mark_in_force,
)
from service.store.events import add_audit
from service.store.tables import WITHOUT_LOG, AttemptRow, NodeStateRow, PlacedMeshRow
from worker.contract.reasons import Reason

LOSSES_TO_QUARANTINE = 2
"""Attempts that a node loses by its own fault within FAILURES_COUNT_FOR before it gets no work. One is enough where an
accelerator reported a fault: the next attempt would land on it again."""
FAILURES_COUNT_FOR = timedelta(hours=6)
QUARANTINE_LASTS = timedelta(hours=6)


async def node_marks(session: AsyncSession, cluster: str | None = None) -> list[NodeMark]:
    """The marks of the nodes of a cluster, or of all; also those that have ended, and nodes that were put back (READY)."""
    query = select(NodeStateRow)
    if cluster is not None:
        query = query.where(NodeStateRow.cluster == cluster)
    return [
        NodeMark(
            cluster=row.cluster,
            name=row.name,
            state=NodeState(row.state),
            by=row.set_by,
            since=row.set_at,
            reason=row.reason,
            until=row.until,
            node_id=row.node_id,
        )
        for row in (await session.execute(query)).scalars()
    ]


async def set_node_mark(session: AsyncSession, mark: NodeMark) -> None:
    """Set the state of the nodes of a name, in the stead of what was set before; an operator's is in the audit log."""
    row = NodeStateRow(
        cluster=mark.cluster,
        name=mark.name,
        node_id=mark.node_id,
        state=mark.state,
        reason=mark.reason,
        set_by=mark.by,
        set_at=mark.since,
        until=mark.until,
    )
    await session.merge(row)
    if mark.by not in (BY_RAY, BY_SLOTLINE):
        detail = f"{mark.state}: {mark.reason}" if mark.reason else mark.state
        add_audit(session, mark.by, "node.state", mark.name, at=mark.since, detail=detail)


async def set_ray_drains(
    session: AsyncSession, cluster: str, drains: Mapping[str, tuple[str, datetime | None]], *, at: datetime
) -> None:
    """Store the nodes that Ray drains now, all of the cluster: (name, time by which they are gone) by Ray's node id."""
    over = [
        NodeStateRow.cluster == cluster,
        NodeStateRow.set_by == BY_RAY,
        NodeStateRow.node_id.not_in(list(drains)),
    ]
    await session.execute(delete(NodeStateRow).where(*over))
    known = {mark.node_id for mark in await node_marks(session, cluster) if mark.by == BY_RAY}
    for node_id, (name, until) in drains.items():
        if node_id not in known:
            mark = NodeMark(cluster, name, NodeState.DRAINING, BY_RAY, at, "Ray drains it", until, node_id)
            await set_node_mark(session, mark)


async def record_node_failures(
    session: AsyncSession, attempt: AttemptRow, node_ids: Collection[str], *, at: datetime
) -> list[NodeMark]:
    """Record that nodes lost this (ended) attempt, and quarantine those that have lost LOSSES_TO_QUARANTINE of late, or this
    one by a fault of an accelerator.

    Attempts count for FAILURES_COUNT_FOR, and not those from before the node's state was set last. Returns what was set.
    """
    placed = select(PlacedMeshRow).where(
        PlacedMeshRow.attempt_id == attempt.id, PlacedMeshRow.node_id.in_(list(node_ids))
    )
    names = dict[str, None]()
    for mesh in (await session.execute(placed)).scalars():
        mesh.failed = True
        names[mesh.node] = None
    if not names:
        return []
    await session.flush()
    marks = await node_marks(session, attempt.cluster)
    made = []
    for name in names:
        if mark_in_force(marks, name, "", now=at) is not None:
            continue
        since = max(
            [
                at - FAILURES_COUNT_FOR,
                *(mark.since for mark in marks if (mark.name, mark.node_id) == (name, "")),
            ]
        )
        lost = await _attempts_lost_on(session, attempt.cluster, name, since=since)
        if len(lost) < LOSSES_TO_QUARANTINE and attempt.reason != Reason.ACCELERATOR_FAILED:
            continue
        count = "an attempt" if len(lost) == 1 else f"{len(lost)} attempts"
        reason = f"it lost {count}: " + ", ".join(
            f"{other.job_id} attempt {other.number} ({other.reason})" for other in lost[-5:]
        )
        mark = NodeMark(
            attempt.cluster, name, NodeState.QUARANTINED, BY_SLOTLINE, at, reason, at + QUARANTINE_LASTS
        )
        await set_node_mark(session, mark)
        made.append(mark)
    return made


async def _attempts_lost_on(
    session: AsyncSession, cluster: str, name: str, *, since: datetime
) -> Sequence[AttemptRow]:
    """Attempts that ended after `since` by a failure that names the node, first to last."""
    lost_here = select(PlacedMeshRow.attempt_id).where(
        PlacedMeshRow.cluster == cluster, PlacedMeshRow.node == name, PlacedMeshRow.failed
    )
    query = (
        select(AttemptRow)
        .options(WITHOUT_LOG)
        .where(AttemptRow.id.in_(lost_here), AttemptRow.finished_at > since)
        .order_by(AttemptRow.finished_at, AttemptRow.id)
    )
    return (await session.execute(query)).scalars().all()
