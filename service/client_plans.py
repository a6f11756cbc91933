"""The client's calls about plans without a job, and those that are kept under names; a part of service.client.Client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from service.api.plan_schemas import NamedPlanList, NamedPlanSummary, NamedPlanView
from service.api.schemas import JobPlanPreview, ProfilingView
from service.jobspec import JobSpec

PROFILE_LIMIT_S = 600.0
"""So long who asks for the plan of a job waits until one worker has measured it."""
_PLAN_LIMIT_S = 180.0


class PlanCalls:
    """Calls of a Client, which says how a call is made."""

    _get: Callable[..., Any]
    _call: Callable[..., Any]
    _until_answered: Callable[..., Any]

    def plan_job(
        self,
        spec: JobSpec | Mapping[str, Any],
        *,
        budget_s: float | None = None,
        name: str | None = None,
        limit_s: float = PROFILE_LIMIT_S,
        waiting: Callable[[str], None] = lambda _: None,
    ) -> JobPlanPreview:
        """The plan of a job that is not submitted: cut, schedule, memory, expected step.

        With a `name` it is kept, and a job whose `plan` is that name trains with exactly this plan; the same job under
        the same name answers the plan that is kept. Where its costs are not known one worker measures them first:
        `waiting` hears of it once, and after `limit_s` ClientError is raised.
        """
        body = spec.model_dump(mode="json") if isinstance(spec, JobSpec) else spec
        params = {key: value for key, value in (("budget_s", budget_s), ("name", name)) if value is not None}
        call = {"json": body, "params": params, "timeout": _PLAN_LIMIT_S}
        return self._until_answered(
            JobPlanPreview, ProfilingView, "/api/v1/plans/job", call, limit_s=limit_s, waiting=waiting
        )

    def make_plan(
        self, spec: Mapping[str, Any], *, format: str = "json", budget_s: float | None = None
    ) -> str:
        """Plan a PipelineSpec (DESIGN section 4): the plan as text in json, csv, table, events, chrome, svg or text."""
        params = {"format": format} | ({} if budget_s is None else {"budget_s": budget_s})
        return self._call("POST", "/api/v1/plans", json=spec, params=params).text

    def named_plans(self, *, owner: str | None = None) -> Iterator[NamedPlanSummary]:
        """Plans that are kept under names, of one owner or of all."""
        token = None
        while True:
            page = self._get(NamedPlanList, "/api/v1/plans/named", owner=owner, page_token=token)
            yield from page.items
            if (token := page.next_page_token) is None:
                return

    def named_plan(self, name: str, *, owner: str | None = None) -> NamedPlanView:
        """A kept plan as a whole, and the job that it was made for; one's own unless an `owner` is named."""
        return self._get(NamedPlanView, f"/api/v1/plans/named/{name}", owner=owner)

    def remove_plan(self, name: str, *, owner: str | None = None) -> None:
        """Forget a kept plan; jobs that were submitted with it keep it."""
        params = {} if owner is None else {"owner": owner}
        self._call("DELETE", f"/api/v1/plans/named/{name}", params=params)
