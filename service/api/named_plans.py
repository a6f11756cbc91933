"""Plans under names: list, show, delete. They are made by POST /api/v1/plans/job with a name."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from service.api.auth import Caller
from service.api.context import Current
from service.api.errors import ProblemError, responses
from service.api.guarded import UserRoute
from service.api.kept_plans import preview, summary
from service.api.plan_schemas import NamedPlanList, NamedPlanView
from service.api.schemas import JobPlanPreview
from service.jobspec import NAME_PATTERN, OWNER_PATTERN
from service.store.database import utc_now
from service.store.named_plans import delete_plan, list_plans, named_plan

router = APIRouter(prefix="/api/v1/plans/named", tags=["plans"], route_class=UserRoute)

PlanName = Annotated[str, Path(pattern=NAME_PATTERN, max_length=100, description="A kept plan's name")]
Owner = Annotated[
    str | None, Query(max_length=200, pattern=OWNER_PATTERN, description="Whose; the caller's own if absent")
]


@router.get("", responses=responses(422))
async def list_all(
    service: Current,
    owner: Annotated[
        str | None, Query(max_length=200, pattern=OWNER_PATTERN, description="Only this principal's plans")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    page_token: Annotated[str | None, Query(pattern=r"^plan-[0-9a-f]{16}$")] = None,
) -> NamedPlanList:
    """Plans that are kept under names."""
    async with service.database.read() as session:
        found = await list_plans(session, owner=owner, after=page_token, limit=limit + 1)
    days = service.settings.keep_plans_days
    token = found[limit - 1].id if len(found) > limit else None
    return NamedPlanList(items=[summary(one, days) for one in found[:limit]], next_page_token=token)


@router.get("/{name}", responses=responses(404, 422))
async def read(name: PlanName, caller: Caller, service: Current, owner: Owner = None) -> NamedPlanView:
    """A kept plan as a whole, and the job that it was made for."""
    whose = caller.name if owner is None else owner
    async with service.database.read() as session:
        found = await named_plan(session, whose, name)
    if found is None:
        raise _no_plan(name, whose)
    shown = summary(found, service.settings.keep_plans_days)
    return NamedPlanView(
        **shown.model_dump(),
        job=json.loads(found.made_for)["job"],
        plan=JobPlanPreview.model_validate_json(preview(found)),
    )


@router.delete("/{name}", status_code=204, responses=responses(404, 422))
async def remove(name: PlanName, caller: Caller, service: Current, owner: Owner = None) -> Response:
    """Forget a kept plan. Jobs that were submitted with it keep it."""
    whose = caller.name if owner is None else owner
    if whose != caller.name and not caller.may_change(whose):
        raise ProblemError(403, f"plan {name} is {whose}'s, and {caller.name} is no operator: ask one")
    async with service.database.write() as session:
        known = await delete_plan(session, whose, name, by=caller.name, at=utc_now())
    if not known:
        raise _no_plan(name, whose)
    return Response(status_code=204)


def _no_plan(name: str, owner: str) -> ProblemError:
    whose = f"{owner} keeps" if owner else "there is"
    return ProblemError(404, f"{whose} no plan {name}: GET /api/v1/plans/named lists them")
