"""States of nodes as operators, Ray and Slotline set them, and the quarantine of nodes that lose attempts.

A node that loses attempts by its own fault is quarantined for a time, unless an operator put it back; one that was lost
is excluded until Ray must know it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
LOSS_UNKNOWN_FOR = timedelta(seconds=60)
"""For this time after its loss Ray may still list a node as alive: its health checks fail five times in a row first."""


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
    """Set the state of the nodes of a name, in the stead of what was set before; an operator's is in the audit log.

    READY also ends what was set of a single Ray node of the name, but for what Ray itself sets.
    """
    if mark.state is NodeState.READY and not mark.node_id:
        single = [
            NodeStateRow.cluster == mark.cluster,
            NodeStateRow.name == mark.name,
            NodeStateRow.node_id != "",
            NodeStateRow.set_by != BY_RAY,
        ]
        await session.execute(delete(NodeStateRow).where(*single))
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
    """Record that nodes lost this (ended) attempt, and keep work off them.

    Those that have lost LOSSES_TO_QUARANTINE of late, or this one by a fault of an accelerator, are quarantined. A Ray
    node that was itself lost is excluded for LOSS_UNKNOWN_FOR: the next attempt would land on it as long as Ray takes it
    for alive. Attempts count for FAILURES_COUNT_FOR, and not those from before the node's state was set last. Returns the
    marks that were set.
    """
    placed = select(PlacedMeshRow).where(
        PlacedMeshRow.attempt_id == attempt.id, PlacedMeshRow.node_id.in_(list(node_ids))
    )
    lost_nodes = dict[tuple[str, str], None]()
    for mesh in (await session.execute(placed)).scalars():
        mesh.failed = True
        lost_nodes[mesh.node, mesh.node_id] = None
    if not lost_nodes:
        return []
    await session.flush()
    made = []
    if attempt.reason == Reason.NODE_LOST:
        made += await _exclude_lost_nodes(session, attempt, lost_nodes, at=at)
    marks = await node_marks(session, attempt.cluster)
    for name in dict.fromkeys(name for name, _ in lost_nodes):
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


async def _exclude_lost_nodes(
    session: AsyncSession, attempt: AttemptRow, lost_nodes: Iterable[tuple[str, str]], *, at: datetime
) -> list[NodeMark]:
    """Exclude Ray nodes (name, id) for LOSS_UNKNOWN_FOR; the marks, with which those that have ended are removed."""
    over = [
        NodeStateRow.cluster == attempt.cluster,
        NodeStateRow.set_by == BY_SLOTLINE,
        NodeStateRow.node_id != "",
        NodeStateRow.until < at,
    ]
    await session.execute(delete(NodeStateRow).where(*over))
    reason = f"{attempt.job_id} attempt {attempt.number} lost it; Ray may not know yet"
    until = at + LOSS_UNKNOWN_FOR
    marks = [
        NodeMark(attempt.cluster, name, NodeState.EXCLUDED, BY_SLOTLINE, at, reason, until, node_id)
        for name, node_id in lost_nodes
    ]
    for mark in marks:
        await set_node_mark(session, mark)
    return marks


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
