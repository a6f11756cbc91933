"""The filters of the jobs list as query parameters."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Depends, Query

from service.api.errors import ProblemError
from service.api.times import Time
from service.job_labels import LABEL_NAME_PATTERN, LABEL_VALUE_PATTERN, MAX_LABELS
from service.job_states import JobState
from service.jobspec import NAME_PATTERN
from service.store.job_filters import JobFilter, LabelFilter

_LONGEST_LABEL = 2 * 63 + 1


async def _job_filter(
    state: Annotated[
        list[JobState] | None, Query(max_length=len(JobState), description="One of these states")
    ] = None,
    name: Annotated[str | None, Query(pattern=NAME_PATTERN, max_length=100)] = None,
    label: Annotated[
        list[Annotated[str, Query(max_length=_LONGEST_LABEL)]] | None,
        Query(max_length=MAX_LABELS, description="name=value, or name for any value; all of them"),
    ] = None,
    since: Annotated[Time | None, Query(description="Submitted then or later, with its zone")] = None,
    until: Annotated[Time | None, Query(description="Submitted before, with its zone")] = None,
) -> JobFilter:
    return JobFilter(
        states=state or (),
        name=name,
        labels=[_label(one) for one in label or ()],
        since=since,
        until=until,
    )


Wanted = Annotated[JobFilter, Depends(_job_filter)]


def _label(text: str) -> LabelFilter:
    name, equals, value = text.partition("=")
    if not re.fullmatch(LABEL_NAME_PATTERN, name) or not re.fullmatch(LABEL_VALUE_PATTERN, value):
        message = f"label {text!r} is no label: write name=value, or the name alone"
        raise ProblemError(422, message, errors=[{"field": "label", "value": text, "message": message}])
    return LabelFilter(name, value if equals else None)
