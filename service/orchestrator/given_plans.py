"""Plans that are kept for later: what is called in a planning process. Only there is the scheduler imported."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GivenPlan:
    """A plan that a job was submitted with: `named` is JSON of a NamedPlanRef, `body` as `plan_job` made it, `made_for`
    JSON of its MadeFor."""

    named: Mapping[str, Any]
    body: str
    made_for: str


def plan_given(
    expired: Callable[[], bool], job: Mapping[str, Any], costs: Mapping[str, Any], given: GivenPlan
) -> str:
    """That plan for a job with these costs. Raises ValueError where it does not fit."""
    from service.scheduler.given import MadeFor, given_answer
    from worker.job import Job

    made_for = MadeFor.from_json(json.loads(given.made_for))
    answer = given_answer(given.named["name"], given.body, made_for, Job.from_json(job), costs)
    return json.dumps({**answer, "named": dict(given.named)}, allow_nan=False)


def made_for(expired: Callable[[], bool], job: Mapping[str, Any], costs: Mapping[str, Any], body: str) -> str:
    """JSON of what the plan `body` of a job with these costs was made for."""
    from service.scheduler.given import MadeFor

    microbatches = json.loads(body)["spec"]["microbatches"]
    return json.dumps(MadeFor.of(job, costs, microbatches).to_json())
