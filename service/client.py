"""The typed client of the REST API: for the command, the demo and users' own scripts.

    from service.client import Client

    client = Client()
    job = client.wait(client.submit(spec).id)

Answers are the models of service.api.schemas. Imports neither the server nor what workers need.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from service.api.artifact_schemas import RemovingView
from service.api.cluster_schemas import ClusterView
from service.api.schemas import (
    EvaluationPage,
    EvaluationView,
    EventPage,
    EventView,
    ExportingView,
    Health,
    JobPlanView,
    JobView,
    LogLine,
    LogPage,
    PackageView,
    Problem,
    ProfilingView,
    StepPage,
    StepView,
    TimelineView,
    Version,
)
from service.api.why_schemas import WhyView
from service.client_plans import PROFILE_LIMIT_S as PROFILE_LIMIT_S
from service.client_plans import PlanCalls
from service.client_weights import WeightsCalls
from service.jobspec import JobSpec
from service.people_client import PeopleCalls
from service.queue_client import QueueCalls
from service.settings import is_loopback

DEFAULT_URL = "http://127.0.0.1:8000"
RETURN_LIMIT_S = 300.0
"""So long who waits for a job, or follows it, bears with a server that is away: it may be restarting."""
_PAGE = 500
_NOT_NOW = frozenset({502, 503, 504})
_STREAM_TIMEOUT = httpx.Timeout(30.0, read=60.0)  # the server sends a sign of life every 15 seconds
_LOOK_EVERY_S = 0.5
_FOLLOW_AGAIN_S = 1.0

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
        return self.status in _NOT_NOW


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
                if not error.temporary or time.monotonic() - seen_at > RETURN_LIMIT_S:
                    raise
            else:
                seen_at = time.monotonic()
                if job.state.final:
                    return job
            time.sleep(_LOOK_EVERY_S)

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
        return self._pages(StepPage, f"/api/v1/jobs/{job_id}/steps", None, limit=_PAGE, after=after)

    def evaluations(self, job_id: str) -> Iterator[EvaluationView]:
        """What the job's evaluations found, by attempt, then step; each once, as it was last done."""
        return self._pages(EvaluationPage, f"/api/v1/jobs/{job_id}/evaluations", None, limit=_PAGE)

    def plan(self, job_id: str) -> JobPlanView:
        """Where the job's stages begin, what was planned, and the plan (DESIGN section 4)."""
        return self._get(JobPlanView, f"/api/v1/jobs/{job_id}/plan")

    def timeline(self, job_id: str, step: int | None = None) -> TimelineView:
        """Planned and measured slots of a profiled step, the last one if None."""
        return self._get(TimelineView, f"/api/v1/jobs/{job_id}/timeline", step=step)

    def chrome_trace(self, job_id: str, step: int | None = None) -> bytes:
        """The same as a JSON file for Perfetto."""
        path = f"/api/v1/jobs/{job_id}/timeline"
        return self._call("GET", path, params=_given(step=step, format="chrome")).content

    def why(self, job_id: str, step: int | None = None) -> WhyView:
        """What a profiled step waited for, what is to blame, and what would shorten it; the last one if None."""
        return self._get(WhyView, f"/api/v1/jobs/{job_id}/why", step=step)

    def postmortem(self, job_id: str, attempt: int | None = None) -> bytes:
        """What a failed attempt left, as a zip file; the last one that failed if None."""
        path = f"/api/v1/jobs/{job_id}/postmortem"
        return self._call("GET", path, params=_given(attempt=attempt)).content

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
        return self._parsed(model, self._call("GET", path, params=_given(**params)))

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
                    for event, number, data in _sent_events(lines):
                        last, seen_at = number or last, time.monotonic()
                        if event == "end":
                            return
                        yield model.model_validate_json(data)
            except httpx.HTTPError as error:
                if seen_at is None or time.monotonic() - seen_at > RETURN_LIMIT_S:
                    raise self._unreachable(error) from None
            time.sleep(_FOLLOW_AGAIN_S)

    @contextlib.contextmanager
    def _stream(
        self, path: str, last: str | None, params: Mapping[str, Any], *, begun: bool
    ) -> Iterator[Iterator[str] | None]:
        """The lines of one stream behind the event `last`; None where nothing is left and nothing will come."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last} if last else {})
        request = self._http.stream(
            "GET", path, params=_given(**params), headers=headers, timeout=_STREAM_TIMEOUT
        )
        with request as response:
            if response.status_code == 503 and begun:
                raise httpx.ReadError("the server is not ready")
            if not response.is_success:
                response.read()
                raise ApiError(_problem(response))
            yield None if response.status_code == 204 else response.iter_lines()

    def _call(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **kwargs)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if not response.is_success:
            raise ApiError(_problem(response))
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
            time.sleep(_LOOK_EVERY_S)
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


def _given(**params: Any) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}


def _problem(response: httpx.Response) -> Problem:
    """The problem in an answer; one that says so where something else than Slotline answered."""
    try:
        return Problem.model_validate_json(response.content)
    except ValidationError:
        text = f"the server answered {response.status_code}: {response.text[:500]}"
        return Problem(title=response.reason_phrase, status=response.status_code, detail=text)


def _sent_events(lines: Iterator[str]) -> Iterator[tuple[str, str | None, str]]:
    """(event, id, data) of each server-sent event; comments, which are signs of life, are left out."""
    fields: dict[str, str] = {}
    for line in lines:
        if not line and "data" in fields:
            yield fields.get("event", "message"), fields.get("id"), fields["data"]
            fields = {}
        elif line and not line.startswith(":"):
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
