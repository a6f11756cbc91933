"""Which jobs a list shows: each filter narrows a query, over an index of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Select, select

from service.job_states import JobState
from service.store.tables import Job, JobLabel


@dataclass(frozen=True)
class LabelFilter:
    """Jobs with this label; with any value where none is given."""

    name: str
    value: str | None = None


@dataclass(frozen=True)
class JobFilter:
    """What jobs must be to be listed: all of it. `since` and `until` bound the time of submission."""

    states: Sequence[JobState] = ()
    name: str | None = None
    labels: Sequence[LabelFilter] = ()
    since: datetime | None = None
    until: datetime | None = None


def narrowed(query: Select[tuple[Job]], wanted: JobFilter) -> Select[tuple[Job]]:
    """The query for those jobs only that are wanted."""
    if wanted.states:
        query = query.where(Job.state.in_(wanted.states))
    if wanted.name is not None:
        query = query.where(Job.name == wanted.name)
    for label in wanted.labels:
        having = select(JobLabel.job_id).where(JobLabel.name == label.name)
        if label.value is not None:
            having = having.where(JobLabel.value == label.value)
        query = query.where(Job.id.in_(having))
    if wanted.since is not None:
        query = query.where(Job.created_at >= wanted.since)
    if wanted.until is not None:
        query = query.where(Job.created_at < wanted.until)
    return query
