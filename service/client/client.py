"""A typed Python client of the REST API, for the `slotline` command, the demo and users' own scripts.

    from service.client.client import Client

    client = Client()
    job = client.wait(client.submit(spec).id)

Answers are the pydantic models of service.schemas. Imports neither the server nor what workers need. `wait` and
followed streams survive a restart of the server (SERVER_AWAY_LIMIT_S); a stream that breaks goes on behind its last
event. Loopback addresses are never called through a proxy.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from service.schemas.admin import (
    AuditPage,
    AuditView,
    DeliveryPage,
    DeliveryView,
    NewToken,
    SecretList,
    SecretView,
    TokenList,
    TokenView,
    Whoami,
)
from service.schemas.artifacts import ArtifactList, OwnerUsage, RemovedView, RemovingView, UsageList
from service.schemas.clusters import ClusterView
from service.schemas.jobs import (
    CheckpointFiles,
    EvaluationPage,
    EvaluationView,
    EventPage,
    EventView,
    ExportingView,
    ExportView,
    Health,
    JobPage,
    JobPlanPreview,
    JobPlanView,
    JobSummary,
    JobView,
    LogLine,
    LogPage,
    PackageView,
    Problem,
    ProfilingView,
    QueueList,
    QueueQuotaView,
    QueueView,
    StepPage,
    StepView,
    TimelineView,
    Version,
)
from service.schemas.plans import SavedPlanList, SavedPlanSummary, SavedPlanView, WhyView
from service.settings.settings import is_loopback
from service.spec.job import JobSpec
from service.spec.states import JobState, Role

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

    def saved_plans(self, *, owner: str | None = None) -> Iterator[SavedPlanSummary]:
        """Plans that are kept under names, of one owner or of all."""
        token = None
        while True:
            page = self._get(SavedPlanList, "/api/v1/plans/named", owner=owner, page_token=token)
            yield from page.items
            if (token := page.next_page_token) is None:
                return

    def saved_plan(self, name: str, *, owner: str | None = None) -> SavedPlanView:
        """A kept plan as a whole, and the job that it was made for; one's own unless an `owner` is named."""
        return self._get(SavedPlanView, f"/api/v1/plans/named/{name}", owner=owner)

    def remove_plan(self, name: str, *, owner: str | None = None) -> None:
        """Forget a kept plan; jobs that were submitted with it keep it."""
        params = {} if owner is None else {"owner": owner}
        self._call("DELETE", f"/api/v1/plans/named/{name}", params=params)


EXPORT_LIMIT_S = 3600.0
"""So long who asks for weights waits until the cluster has written them."""
REMOVAL_LIMIT_S = 900.0
"""So long who deletes a checkpoint waits until the cluster has."""
_CHECKPOINTS_LIMIT_S = 90.0


class WeightsCalls:
    """Checkpoints and final weights; `_call`, `_parsed` and `_until_answered` are the client's."""

    _call: Callable[..., Any]
    _parsed: Callable[..., Any]
    _until_answered: Callable[..., Any]

    def checkpoints(self, job_id: str, *, sums: bool = False) -> CheckpointFiles:
        """The job's checkpoints, newest first, as the server sees them; with `sums` their content is compared too."""
        path, params = f"/api/v1/jobs/{job_id}/checkpoints", {"sums": sums}
        response = self._call("GET", path, params=params, timeout=_CHECKPOINTS_LIMIT_S)
        return self._parsed(CheckpointFiles, response)

    def remove_checkpoint(
        self,
        job_id: str,
        step: int,
        *,
        limit_s: float = REMOVAL_LIMIT_S,
        waiting: Callable[[str], None] = lambda _: None,
    ) -> RemovedView:
        """Have the cluster delete the checkpoint after `step`; one that is not there is no mistake.

        `waiting` hears of it once; ClientError after `limit_s`.
        """
        path = f"/api/v1/jobs/{job_id}/checkpoints/{step}"
        return self._until_removed(path, limit_s, waiting)

    def remove_export(
        self,
        job_id: str,
        name: str,
        *,
        limit_s: float = REMOVAL_LIMIT_S,
        waiting: Callable[[str], None] = lambda _: None,
    ) -> RemovedView:
        """Have the cluster delete exported weights, by their name in `artifacts`; as `remove_checkpoint`."""
        return self._until_removed(f"/api/v1/jobs/{job_id}/exports/{name}", limit_s, waiting)

    def _until_removed(self, path: str, limit_s: float, waiting: Callable[[str], None]) -> RemovedView:
        return self._until_answered(
            RemovedView, RemovingView, path, {}, limit_s=limit_s, waiting=waiting, method="DELETE"
        )

    def artifacts(self, job_id: str) -> ArtifactList:
        """What the job has left beside its checkpoints, how much that is, and when it goes."""
        path = f"/api/v1/jobs/{job_id}/artifacts"
        return self._parsed(ArtifactList, self._call("GET", path, timeout=_CHECKPOINTS_LIMIT_S))

    def usage(self, *, owner: str | None = None) -> list[OwnerUsage]:
        """How many bytes there are of whom, most first."""
        params = {} if owner is None else {"owner": owner}
        return self._parsed(UsageList, self._call("GET", "/api/v1/usage", params=params)).items

    def export(
        self,
        job_id: str,
        *,
        step: int | None = None,
        format: str = "safetensors",
        merged: bool = False,
        limit_s: float = EXPORT_LIMIT_S,
        waiting: Callable[[str], None] = lambda _: None,
    ) -> ExportView:
        """Have the cluster write the job's weights beside its checkpoints, those after `step` or the newest whole ones;
        of a model of peft the adapters, or `merged` the whole model with them.

        With the `format` "dcp" all of the checkpoint, as torch.distributed.checkpoint writes one.
        `waiting` hears of it once; ClientError after `limit_s`.
        """
        asked = {"format": format, "step": step, "merged": merged or None}
        call = {"params": {name: value for name, value in asked.items() if value is not None}}
        path = f"/api/v1/jobs/{job_id}/export"
        return self._until_answered(ExportView, ExportingView, path, call, limit_s=limit_s, waiting=waiting)


_PAGE_SIZE = 500


class PeopleCalls:
    """Calls of a Client, which says how a call is made."""

    _get: Callable[..., Any]
    _post: Callable[..., Any]
    _call: Callable[..., Any]

    def whoami(self) -> Whoami:
        """The name and the role of this client's token."""
        return self._get(Whoami, "/api/v1/whoami")

    def create_token(self, name: str, *, role: Role = Role.SUBMITTER, days: float | None = None) -> NewToken:
        """Make a token, for admins; only this answer has it."""
        body = {"name": name, "role": role, "days": days}
        return self._post(NewToken, "/api/v1/tokens", json=body)

    def tokens(self) -> list[TokenView]:
        """All tokens without what opens anything, for admins."""
        return self._get(TokenList, "/api/v1/tokens").items

    def revoke_token(self, name: str) -> None:
        """Make a token invalid, for admins."""
        self._call("DELETE", f"/api/v1/tokens/{name}")

    def set_secret(self, name: str, value: str) -> None:
        """Keep a secret of one's own: a job that names it in `secrets` finds it in its environment."""
        headers = {"Content-Type": "text/plain; charset=utf-8"}
        self._call("PUT", f"/api/v1/secrets/{name}", content=value.encode(), headers=headers)

    def secrets(self) -> list[SecretView]:
        """The names of one's own secrets."""
        return self._get(SecretList, "/api/v1/secrets").items

    def remove_secret(self, name: str) -> None:
        self._call("DELETE", f"/api/v1/secrets/{name}")

    def audit(
        self, *, principal: str | None = None, subject: str | None = None, limit: int | None = None
    ) -> Iterator[AuditView]:
        """Who did what, newest first, at most `limit`, for admins."""
        left, token = limit, None
        while left is None or left > 0:
            size = _PAGE_SIZE if left is None else min(left, _PAGE_SIZE)
            page = self._get(
                AuditPage,
                "/api/v1/audit",
                principal=principal,
                subject=subject,
                limit=size,
                page_token=token,
            )
            yield from page.items
            left = None if left is None else left - len(page.items)
            if (token := page.next_page_token) is None:
                return


class QueueCalls:
    """Calls of a Client, which says how a call is made."""

    _get: Callable[..., Any]
    _call: Callable[..., Any]
    _parsed: Callable[..., Any]

    def jobs(
        self,
        *,
        state: JobState | Sequence[JobState] | None = None,
        queue: str | None = None,
        owner: str | None = None,
        limit: int | None = None,
        name: str | None = None,
        labels: Mapping[str, str | None] = MappingProxyType({}),
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Iterator[JobSummary]:
        """Jobs, newest first, at most `limit`; a page is asked for when it is needed.

        Those with all of `labels` (None: any value), submitted at `since` or later and before `until` (with zones).
        """
        times = {"since": since and since.isoformat(), "until": until and until.isoformat()}
        having = [key if value is None else f"{key}={value}" for key, value in labels.items()]
        wanted = {"state": state, "queue": queue, "owner": owner, "name": name, "label": having, **times}
        path = "/api/v1/jobs"
        left, token = limit, None
        while left is None or left > 0:
            size = _PAGE_SIZE if left is None else min(left, _PAGE_SIZE)
            page = self._get(JobPage, path, limit=size, page_token=token, **wanted)
            yield from page.items
            left = None if left is None else left - len(page.items)
            if (token := page.next_page_token) is None:
                return

    def notifications(self, job_id: str) -> Iterator[DeliveryView]:
        """Who was told of the job's states, and how that went."""
        token = None
        while True:
            path = f"/api/v1/jobs/{job_id}/notifications"
            page = self._get(DeliveryPage, path, limit=_PAGE_SIZE, page_token=token)
            yield from page.items
            if (token := page.next_page_token) is None:
                return

    def change(self, job_id: str, *, queue: str | None = None, priority: int | None = None) -> JobView:
        """Move a waiting job to another queue or priority."""
        given = {"queue": queue, "priority": priority}
        body = {field: value for field, value in given.items() if value is not None}
        return self._parsed(JobView, self._call("PATCH", f"/api/v1/jobs/{job_id}", json=body))

    def queues(self) -> list[QueueView]:
        """Quotas, and why each waiting job waits."""
        return self._get(QueueList, "/api/v1/queues").items

    def set_quota(self, queue: str, quota: int | None) -> QueueQuotaView:
        """Let the queue's running jobs hold so many accelerators together (None: any number), for operators."""
        answer = self._call("PUT", f"/api/v1/queues/{queue}/quota", json={"quota": quota})
        return self._parsed(QueueQuotaView, answer)

    def reset_quota(self, queue: str) -> QueueQuotaView:
        """Back to the configured quota, for operators."""
        return self._parsed(QueueQuotaView, self._call("DELETE", f"/api/v1/queues/{queue}/quota"))


DEFAULT_URL = "http://127.0.0.1:8000"
SERVER_AWAY_LIMIT_S = 300.0
"""So long who waits for a job, or follows it, bears with a server that is away: it may be restarting."""
_TEMPORARY_STATUSES = frozenset({502, 503, 504})
_STREAM_TIMEOUT = httpx.Timeout(30.0, read=60.0)  # the server sends a sign of life every 15 seconds
_POLL_EVERY_S = 0.5
_RECONNECT_AFTER_S = 1.0

Model = TypeVar("Model", bound=BaseModel)


class ClientError(Exception):
    """A call did not succeed; the message is for people. `temporary`: the same call may succeed later."""

    temporary = False


class UnreachableError(ClientError):
    """No server answers, perhaps only now."""

    temporary = True


class ApiError(ClientError):
    """The server answered with a problem; its `detail` is the message, its `code` is for programs. `errors` name
    fields, where some are wrong."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.status, self.title, self.detail = problem.status, problem.title, problem.detail
        self.code, self.errors = problem.code, problem.errors or []

    @property
    def temporary(self) -> bool:  # type: ignore[override]
        return self.status in _TEMPORARY_STATUSES


class Client(PeopleCalls, PlanCalls, QueueCalls, WeightsCalls):
    """Calls to the server at `url` (SLOTLINE_URL), with `token` (SLOTLINE_API_TOKEN); a context that closes itself.

    Every call raises ApiError for the server's refusals and UnreachableError where none answers.
    """

    def __init__(self, url: str | None = None, *, token: str | None = None, timeout_s: float = 60.0) -> None:
        self.url = (url or os.environ.get("SLOTLINE_URL") or DEFAULT_URL).rstrip("/")
        token = (os.environ.get("SLOTLINE_API_TOKEN", "") if token is None else token).strip()
        if not re.fullmatch(r"[\x21-\x7e]*", token):
            raise ClientError("SLOTLINE_API_TOKEN holds characters that no token has: copy it again")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            through_proxies = not is_loopback(httpx.URL(self.url).host)  # a proxy's localhost is not ours
            self._http = httpx.Client(
                base_url=self.url, headers=headers, timeout=timeout_s, trust_env=through_proxies
            )
        except httpx.InvalidURL as error:
            raise ClientError(
                f"SLOTLINE_URL {self.url!r} is no address ({error}): write http://host:port"
            ) from None

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Jobs

    def submit(self, spec: JobSpec | Mapping[str, Any], *, idempotency_key: str | None = None) -> JobView:
        """Queue a job. The same key with the same specification submits only once."""
        body = spec.model_dump(mode="json") if isinstance(spec, JobSpec) else spec
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        return self._post(JobView, "/api/v1/jobs", json=body, headers=headers)

    def job(self, job_id: str) -> JobView:
        """State, reason, attempts and progress."""
        return self._get(JobView, f"/api/v1/jobs/{job_id}")

    def cancel(self, job_id: str) -> JobView:
        """End a job."""
        return self._post(JobView, f"/api/v1/jobs/{job_id}/cancel")

    def retry(self, job_id: str) -> JobView:
        """Queue a failed or cancelled job again, from its last checkpoint."""
        return self._post(JobView, f"/api/v1/jobs/{job_id}/retry")

    def wait(self, job_id: str) -> JobView:
        """The job when it has ended, however that was. Bears with a server that is away for RETURN_LIMIT_S."""
        seen_at = time.monotonic()
        while True:
            try:
                job = self.job(job_id)
            except ClientError as error:
                if not error.temporary or time.monotonic() - seen_at > SERVER_AWAY_LIMIT_S:
                    raise
            else:
                seen_at = time.monotonic()
                if job.state.final:
                    return job
            time.sleep(_POLL_EVERY_S)

    # What happened in a job

    def events(
        self, job_id: str, *, after: EventView | None = None, follow: bool = False
    ) -> Iterator[EventView]:
        """The job's event log behind `after`; with `follow` until the job ends, also over a restart of the server."""
        path = f"/api/v1/jobs/{job_id}/events"
        last = None if after is None else str(after.number)
        return self._follow(EventView, path, last) if follow else self._pages(EventPage, path, last)

    def logs(
        self,
        job_id: str,
        *,
        attempt: int | None = None,
        after: LogLine | None = None,
        follow: bool = False,
        tail: int | None = None,
        since: datetime | None = None,
        search: str | None = None,
    ) -> Iterator[LogLine]:
        """Lines of the drivers' logs behind `after`, of one attempt or of all; `follow` as with `events`.

        Only the last `tail` of them, those written `since` a time (with its zone), those with the text `search`.
        """
        wanted = {"attempt": attempt, "tail": tail, "since": since and since.isoformat(), "search": search}
        path = f"/api/v1/jobs/{job_id}/logs"
        last = None if after is None else f"{after.attempt}:{after.number}"
        if follow:
            return self._follow(LogLine, path, last, **wanted)
        return self._pages(LogPage, path, last, **wanted)

    def steps(self, job_id: str, *, after: int | None = None) -> Iterator[StepView]:
        """Loss and times of the steps above `after`, by attempt, then step; each step once, as it was last done."""
        return self._pages(StepPage, f"/api/v1/jobs/{job_id}/steps", None, limit=_PAGE_SIZE, after=after)

    def evaluations(self, job_id: str) -> Iterator[EvaluationView]:
        """What the job's evaluations found, by attempt, then step; each once, as it was last done."""
        return self._pages(EvaluationPage, f"/api/v1/jobs/{job_id}/evaluations", None, limit=_PAGE_SIZE)

    def plan(self, job_id: str) -> JobPlanView:
        """Where the job's stages begin, what was planned, and the plan (DESIGN section 4)."""
        return self._get(JobPlanView, f"/api/v1/jobs/{job_id}/plan")

    def timeline(self, job_id: str, step: int | None = None) -> TimelineView:
        """Planned and measured slots of a profiled step, the last one if None."""
        return self._get(TimelineView, f"/api/v1/jobs/{job_id}/timeline", step=step)

    def chrome_trace(self, job_id: str, step: int | None = None) -> bytes:
        """The same as a JSON file for Perfetto."""
        path = f"/api/v1/jobs/{job_id}/timeline"
        return self._call("GET", path, params=_without_none(step=step, format="chrome")).content

    def why(self, job_id: str, step: int | None = None) -> WhyView:
        """What a profiled step waited for, what is to blame, and what would shorten it; the last one if None."""
        return self._get(WhyView, f"/api/v1/jobs/{job_id}/why", step=step)

    def postmortem(self, job_id: str, attempt: int | None = None) -> bytes:
        """What a failed attempt left, as a zip file; the last one that failed if None."""
        path = f"/api/v1/jobs/{job_id}/postmortem"
        return self._call("GET", path, params=_without_none(attempt=attempt)).content

    # Code, cluster, server

    def upload_package(self, content: bytes) -> PackageView:
        """Store a zip of code; its `uri` goes into a job's code.working_dir."""
        headers = {"Content-Type": "application/zip"}
        return self._post(PackageView, "/api/v1/packages", content=content, headers=headers)

    def cluster(self, name: str | None = None) -> ClusterView:
        """Nodes and accelerators as last seen, and who uses them: of the cluster of this name, or of all."""
        return self._get(ClusterView, "/api/v1/cluster", cluster=name)

    def version(self) -> Version:
        return self._get(Version, "/api/v1/version")

    def ready(self) -> bool:
        """Whether a server is there whose database and cluster answer."""
        try:
            return self._get(Health, "/readyz").status == "ok"
        except ClientError:
            return False

    # How calls are made

    def _get(self, model: type[Model], path: str, **params: Any) -> Model:
        return self._parsed(model, self._call("GET", path, params=_without_none(**params)))

    def _post(self, model: type[Model], path: str, **kwargs: Any) -> Model:
        return self._parsed(model, self._call("POST", path, **kwargs))

    def _pages(self, model: type[BaseModel], path: str, token: str | None, **params: Any) -> Iterator[Any]:
        while True:
            page: Any = self._get(model, path, page_token=token, **params)
            yield from page.items
            if (token := page.next_page_token) is None:
                return

    def _follow(self, model: type[Model], path: str, last: str | None, **params: Any) -> Iterator[Model]:
        """What a stream of server-sent events carries; a stream that breaks is taken up where it broke."""
        seen_at = None
        while True:
            try:
                with self._stream(path, last, params, begun=seen_at is not None) as lines:
                    if lines is None:
                        return
                    seen_at = time.monotonic()
                    for event, number, data in _server_sent_events(lines):
                        last, seen_at = number or last, time.monotonic()
                        if event == "end":
                            return
                        yield model.model_validate_json(data)
            except httpx.HTTPError as error:
                if seen_at is None or time.monotonic() - seen_at > SERVER_AWAY_LIMIT_S:
                    raise self._unreachable(error) from None
            time.sleep(_RECONNECT_AFTER_S)

    @contextlib.contextmanager
    def _stream(
        self, path: str, last: str | None, params: Mapping[str, Any], *, begun: bool
    ) -> Iterator[Iterator[str] | None]:
        """The lines of one stream behind the event `last`; None where nothing is left and nothing will come."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last} if last else {})
        request = self._http.stream(
            "GET", path, params=_without_none(**params), headers=headers, timeout=_STREAM_TIMEOUT
        )
        with request as response:
            if response.status_code == 503 and begun:
                raise httpx.ReadError("the server is not ready")
            if not response.is_success:
                response.read()
                raise ApiError(_read_problem(response))
            yield None if response.status_code == 204 else response.iter_lines()

    def _call(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **kwargs)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if not response.is_success:
            raise ApiError(_read_problem(response))
        return response

    def _until_answered(
        self,
        model: type[Model],
        pending: type[ProfilingView] | type[ExportingView] | type[RemovingView],
        path: str,
        call: Mapping[str, Any],
        *,
        limit_s: float,
        waiting: Callable[[str], None],
        method: str = "POST",
    ) -> Model:
        """Call again and again while the answer is 202: `waiting` hears why, once; ClientError after `limit_s`."""
        deadline, told = time.monotonic() + limit_s, False
        while (response := self._call(method, path, **call)).status_code == 202:
            message = self._parsed(pending, response).message
            if time.monotonic() > deadline:
                raise ClientError(f"{message}, for more than {limit_s:g} s: ask again later")
            if not told:
                waiting(message)
                told = True
            time.sleep(_POLL_EVERY_S)
        return self._parsed(model, response)

    def _parsed(self, model: type[Model], response: httpx.Response) -> Model:
        try:
            return model.model_validate_json(response.content)
        except ValidationError:
            raise ClientError(f"{self.url} answers, but it is no Slotline: check SLOTLINE_URL") from None

    def _unreachable(self, error: Exception) -> UnreachableError:
        return UnreachableError(
            f"no Slotline answers at {self.url} ({error or type(error).__name__}): "
            "start one with `slotline serve`, or set SLOTLINE_URL to the one that runs"
        )


def _without_none(**params: Any) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}


def _read_problem(response: httpx.Response) -> Problem:
    """The problem in an answer; one that says so where something else than Slotline answered."""
    try:
        return Problem.model_validate_json(response.content)
    except ValidationError:
        text = f"the server answered {response.status_code}: {response.text[:500]}"
        return Problem(title=response.reason_phrase, status=response.status_code, detail=text)


def _server_sent_events(lines: Iterator[str]) -> Iterator[tuple[str, str | None, str]]:
    """(event, id, data) of each server-sent event; comments, which are signs of life, are left out."""
    fields: dict[str, str] = {}
    for line in lines:
        if not line and "data" in fields:
            yield fields.get("event", "message"), fields.get("id"), fields["data"]
            fields = {}
        elif line and not line.startswith(":"):
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
