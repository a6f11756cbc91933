"""Plan without a job: a PipelineSpec in, a Plan out, in the process pool."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from service.api.callers import while_connected
from service.api.context import Current
from service.api.errors import ProblemError, responses
from service.api.guarded import PlanRoute
from service.jobspec import FewArguments
from service.orchestrator.planning import PLAN_FORMATS

router = APIRouter(prefix="/api/v1/plans", tags=["plans"], route_class=PlanRoute)


class PlanSpec(BaseModel):
    """A PipelineSpec (DESIGN section 4). Its details are checked by the scheduler, not here."""

    model_config = ConfigDict(extra="allow", strict=True)

    microbatches: Annotated[int, Field(ge=1)]
    meshes: Annotated[list[FewArguments], Field(min_length=1, fail_fast=True)]
    stages: Annotated[list[FewArguments], Field(min_length=1, fail_fast=True)]
    edges: Annotated[list[FewArguments], Field(fail_fast=True)] = []

    @property
    def actions(self) -> int:
        return self.microbatches * (len(self.stages) + len(self.edges))


_FORMATS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The plan in the format asked for",
        "content": {media: {} for media in sorted(set(PLAN_FORMATS.values()))},
    }
}


@router.post("", response_class=Response, responses={**_FORMATS, **responses(413, 422, 503)})
async def make(
    request: Request,
    spec: PlanSpec,
    service: Current,
    format: Literal["json", "csv", "table", "events", "chrome", "svg", "text"] = "json",
    budget_s: Annotated[float | None, Query(ge=0, le=600, description="Search time of auto")] = None,
) -> Response:
    """Schedule one step: timeline, memory and programs of every mesh."""
    settings = service.settings
    if spec.actions > settings.plan_action_limit:
        raise ProblemError(
            413,
            f"microbatches x (stages + edges) is {spec.actions}, the limit is {settings.plan_action_limit}: "
            "send a smaller spec, or use `slotline plan`, which has no limit",
        )
    budget = settings.plan_budget_s if budget_s is None else min(budget_s, settings.plan_budget_s)
    planning = service.planner.plan_spec(spec.model_dump_json(), budget_s=budget, format=format)
    text = await while_connected(request, planning)
    return Response(text, media_type=PLAN_FORMATS[format])
