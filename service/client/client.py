"""A typed Python client of the REST API, for the `slotline` command, the demo and users' own scripts.

    from service.client import Client

    client = Client()
    job = client.wait(client.submit(spec).id)

Answers are the pydantic models of service.schemas. Imports neither the server nor what workers need. `wait` and
followed streams survive a restart of the server (SERVER_AWAY_LIMIT_S); a stream that breaks continues behind its last
event. Loopback addresses are never called through a proxy.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import httpx
from pydantic import BaseModel, PrivateAttr, ValidationError

from service.client.job_spec import code_folder, largest_files, with_import_paths, zip_folder
from service.client.login import LoginAuth, LoginError, LoginFile
from service.schemas.activity import (
    EvaluationPage,
    EvaluationView,
    EventPage,
    EventView,
    LogLine,
    LogPage,
    StepPage,
    StepView,
    TimelineView,
    WhyView,
)
from service.schemas.admin import (
    AuditPage,
    AuditView,
    DeliveryPage,
    DeliveryView,
    NewToken,
    ProjectList,
    ProjectView,
    SecretList,
    SecretView,
    TokenList,
    TokenView,
    Whoami,
)
from service.schemas.artifacts import (
    ArtifactList,
    CheckpointFiles,
    ExportingView,
    ExportView,
    OwnerUsage,
    PackageView,
    RemovedView,
    RemovingView,
    UsageList,
)
from service.schemas.clusters import ClusterView, NodeList, NodeView
from service.schemas.jobs import JobPage, JobSummary, JobView
from service.schemas.plans import (
    JobPlanPreview,
    JobPlanView,
    ProfilingView,
    SavedPlanList,
    SavedPlanSummary,
    SavedPlanView,
)
from service.schemas.queues import QueueList, QueueQuotaView, QueueView
from service.schemas.system import Health, ProblemDetails, Version
from service.settings.settings import is_loopback
from service.spec.job import JobSpec
from service.spec.principals import Role
from service.spec.states import JobState, NodeState

DEFAULT_URL = "http://127.0.0.1:8000"
SERVER_AWAY_LIMIT_S = 300.0
"""`wait` and followed streams bear for this time with a server that is away: it may be restarting."""
PROFILE_LIMIT_S = 600.0
"""Limit of `plan_job` while one worker measures the job."""
EXPORT_LIMIT_S = 3600.0
"""Limit of `export` while the cluster writes the weights."""
REMOVAL_LIMIT_S = 900.0
"""Limit of `remove_checkpoint` and `remove_export` while the cluster deletes files."""
_PLAN_CALL_LIMIT_S = 180.0
_CHECKPOINTS_CALL_LIMIT_S = 90.0
_STREAM_TIMEOUT = httpx.Timeout(30.0, read=60.0)  # the server sends a sign of life every 15 seconds
_TEMPORARY_STATUSES = frozenset({502, 503, 504})
_PAGE_SIZE = 500
_POLL_EVERY_S = 0.5
_RECONNECT_AFTER_S = 1.0

Model = TypeVar("Model", bound=BaseModel)


class PagedRows(Iterator[Model]):
    """Rows that are read page by page as they are asked for; in a notebook, all at once as a table of pandas."""

    def __init__(self, rows: Iterator[Model]) -> None:
        self._rows = rows

    def __next__(self) -> Model:
        return next(self._rows)

    def to_pandas(self) -> Any:
        """A DataFrame of the rows that are left, indexed by step; a metric is a column of its own."""
        try:
            import pandas
        except ImportError:
            raise ClientError("to_pandas needs pandas, which is not installed: pip install pandas") from None
        frame = pandas.DataFrame(
            {**{name: value for name, value in row if name != "metrics"}, **getattr(row, "metrics", {})}
            for row in self
        )
        return frame.set_index("step") if "step" in frame else frame


class JobTimeline(TimelineView):
    """Planned and measured slots of one step; in a notebook they show themselves as the server draws them."""

    _client: Client = PrivateAttr()

    def svg(self) -> str:
        """The planned step above the measured one as SVG, read from the server; ApiError for more than 20,000 slots."""
        return self._client._timeline(self.job_id, self.step, "svg").text

    def __repr__(self) -> str:
        sides = {"planned": self.planned, "measured": self.measured}
        parts = [f"{name} {1e3 * side.makespan_s:.4g} ms" for name, side in sides.items() if side is not None]
        return f"<timeline of {self.job_id}, step {self.step}: {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        try:
            return f'<div style="overflow-x: auto">{self.svg()}</div>'
        except (ClientError, RuntimeError) as error:  # RuntimeError: the client was closed since
            return f"<p>{escape(repr(self))} has no picture: {escape(str(error))}</p>"


class ClientError(Exception):
    """A call did not succeed; the message is for people. `temporary`: the same call may succeed later."""

    temporary = False


class UnreachableError(ClientError):
    """No server answers, perhaps only now."""

    temporary = True


class ApiError(ClientError):
    """The server answered with a problem: `detail` is the message, `code` is for programs, `errors` name wrong fields."""

    def __init__(self, problem: ProblemDetails) -> None:
        super().__init__(problem.detail)
        self.status, self.title, self.detail = problem.status, problem.title, problem.detail
        self.code, self.errors = problem.code, problem.errors or []

    @property
    def temporary(self) -> bool:  # type: ignore[override]
        return self.status in _TEMPORARY_STATUSES


class JobFields(TypedDict, total=False):
    """Fields of jobs by which a list is filtered."""

    name: str | None
    project: str | None
    queue: str | None
    owner: str | None


class Client:
    """Calls to the server at `url` (SLOTLINE_URL), with `token` (SLOTLINE_API_TOKEN, else that of `slotline login`); a
    context that closes itself.

    Every call raises ApiError for the server's refusals and UnreachableError where none answers.
    """

    def __init__(self, url: str | None = None, *, token: str | None = None, timeout_s: float = 60.0) -> None:
        self.url = (url or os.environ.get("SLOTLINE_URL") or DEFAULT_URL).rstrip("/")
        logs_in = token is None and not os.environ.get("SLOTLINE_API_TOKEN", "").strip()
        token = (os.environ.get("SLOTLINE_API_TOKEN", "") if token is None else token).strip()
        if not re.fullmatch(r"[\x21-\x7e]*", token):
            raise ClientError("SLOTLINE_API_TOKEN holds characters that no token has: copy it again")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        auth = self._stored_login() if logs_in else None
        try:
            through_proxies = not is_loopback(httpx.URL(self.url).host)  # a proxy's localhost is not ours
            self._http = httpx.Client(
                base_url=self.url, headers=headers, auth=auth, timeout=timeout_s, trust_env=through_proxies
            )
        except httpx.InvalidURL as error:
            raise ClientError(
                f"SLOTLINE_URL {self.url!r} is no address ({error}): write http://host:port"
            ) from None

    def _stored_login(self) -> LoginAuth | None:
        """The sender of the token of the user's login at this server; None where nobody is logged in."""
        try:
            file = LoginFile()
            login = file.find(self.url)
        except LoginError as error:
            raise ClientError(str(error)) from None
        except RuntimeError:  # a process without a home
            return None
        return None if login is None else LoginAuth(self.url, file, login)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Jobs

    def submit(
        self,
        spec: JobSpec | Mapping[str, Any] | None = None,
        *,
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> JobView:
        """Queue a job: `spec`, with `fields` in place of its own. The same key with the same job submits only once.

        A function or class stands for its import path (`model=build`, `data=partial(Tokens, length=64)`); a folder of this
        machine (`code={"working_dir": "src"}`) is uploaded.
        """
        given = spec.model_dump(mode="json") if isinstance(spec, JobSpec) else spec or {}
        try:
            body = with_import_paths({**given, **fields})
        except ValueError as error:
            raise ClientError(str(error)) from None
        body = self.upload_code(body)
        headers = _without_none(**{"Idempotency-Key": idempotency_key})
        return self._post(JobView, "/api/v1/jobs", json=body, headers=headers)

    def job(self, job_id: str) -> JobView:
        """State, reason, attempts and progress."""
        return self._get(JobView, f"/api/v1/jobs/{job_id}")

    def jobs(
        self,
        *,
        state: JobState | Sequence[JobState] | None = None,
        limit: int | None = None,
        labels: Mapping[str, str | None] = MappingProxyType({}),
        since: datetime | None = None,
        until: datetime | None = None,
        **fields: Unpack[JobFields],
    ) -> Iterator[JobSummary]:
        """Jobs, newest first, at most `limit`; a page is asked for when it is needed.

        A job matches that has the `fields` (None: any) and all of `labels` (None: any value) and was submitted at `since`
        or later and before `until` (times with zones).
        """
        times = {"since": since and since.isoformat(), "until": until and until.isoformat()}
        label = [key if value is None else f"{key}={value}" for key, value in labels.items()]
        filters = {"state": state, "label": label, **times, **fields}
        return self._first_items(JobPage, "/api/v1/jobs", limit, **filters)

    def change(
        self,
        job_id: str,
        *,
        queue: str | None = None,
        priority: int | None = None,
        meshes: int | tuple[int, int] | None = None,
    ) -> JobView:
        """Move a waiting job to another queue or priority, or give one that has not ended other meshes: so many, or any
        number from the least to the most."""
        wanted = {"min": meshes[0], "max": meshes[1]} if isinstance(meshes, tuple) else meshes
        body = _without_none(queue=queue, priority=priority, meshes=wanted)
        return self._parsed(JobView, self._call("PATCH", f"/api/v1/jobs/{job_id}", json=body))

    def cancel(self, job_id: str) -> JobView:
        """End a job."""
        return self._post(JobView, f"/api/v1/jobs/{job_id}/cancel")

    def retry(self, job_id: str) -> JobView:
        """Queue a failed or cancelled job again, from its last checkpoint."""
        return self._post(JobView, f"/api/v1/jobs/{job_id}/retry")

    def wait(self, job_id: str) -> JobView:
        """The job once its state is final. Bears with a server that is away for SERVER_AWAY_LIMIT_S."""
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

    # Observation of a job

    def events(
        self, job_id: str, *, after: EventView | None = None, follow: bool = False
    ) -> Iterator[EventView]:
        """The job's event log behind `after`; with `follow` until the job ends, also over a restart of the server."""
        path = f"/api/v1/jobs/{job_id}/events"
        last = None if after is None else str(after.number)
        return self._follow(EventView, path, last) if follow else self._items(EventPage, path, last)

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

        Filters: the last `tail` lines, lines written `since` a time (with its zone), lines with the text `search`.
        """
        filters = {"attempt": attempt, "tail": tail, "since": since and since.isoformat(), "search": search}
        path = f"/api/v1/jobs/{job_id}/logs"
        last = None if after is None else f"{after.attempt}:{after.number}"
        if follow:
            return self._follow(LogLine, path, last, **filters)
        return self._items(LogPage, path, last, **filters)

    def steps(self, job_id: str, *, after: int | None = None) -> PagedRows[StepView]:
        """Loss and times of the steps above `after`, by attempt, then step; each step once, as it was last done."""
        return PagedRows(self._items(StepPage, f"/api/v1/jobs/{job_id}/steps", limit=_PAGE_SIZE, after=after))

    def evaluations(self, job_id: str) -> PagedRows[EvaluationView]:
        """Results of the job's evaluations, by attempt, then step; each once, as it was last done."""
        return PagedRows(self._items(EvaluationPage, f"/api/v1/jobs/{job_id}/evaluations", limit=_PAGE_SIZE))

    def plan(self, job_id: str) -> JobPlanView:
        """The job's stage starts, its pipeline spec, and the plan (DESIGN section 4)."""
        return self._get(JobPlanView, f"/api/v1/jobs/{job_id}/plan")

    def timeline(self, job_id: str, step: int | None = None) -> JobTimeline:
        """Planned and measured slots of a profiled step, the last one if None."""
        view = self._parsed(JobTimeline, self._timeline(job_id, step, "json"))
        view._client = self
        return view

    def chrome_trace(self, job_id: str, step: int | None = None) -> bytes:
        """The timeline as a JSON file for Perfetto."""
        return self._timeline(job_id, step, "chrome").content

    def _timeline(self, job_id: str, step: int | None, format: str) -> httpx.Response:
        path = f"/api/v1/jobs/{job_id}/timeline"
        return self._call("GET", path, params=_without_none(step=step, format=format))

    def why(self, job_id: str, step: int | None = None) -> WhyView:
        """Idle time of a profiled step by reason, its causes, and changes that would shorten it; the last one if None."""
        return self._get(WhyView, f"/api/v1/jobs/{job_id}/why", step=step)

    def postmortem(self, job_id: str, attempt: int | None = None) -> bytes:
        """The zip file that a failed attempt left; of the last one that failed if None."""
        path = f"/api/v1/jobs/{job_id}/postmortem"
        return self._call("GET", path, params=_without_none(attempt=attempt)).content

    def notifications(self, job_id: str) -> Iterator[DeliveryView]:
        """Webhook calls about the job's states, and the receivers' answers."""
        return self._items(DeliveryPage, f"/api/v1/jobs/{job_id}/notifications", limit=_PAGE_SIZE)

    # Plans

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

        With a `name` it is saved, and a job whose `plan` is that name trains with exactly this plan; the same job under
        the same name answers the saved plan. Where its costs are not known one worker measures them first:
        `waiting` hears of it once, and after `limit_s` ClientError is raised.
        """
        body = spec.model_dump(mode="json") if isinstance(spec, JobSpec) else spec
        params = _without_none(budget_s=budget_s, name=name)
        call = {"json": body, "params": params, "timeout": _PLAN_CALL_LIMIT_S}
        return self._until_answered(
            JobPlanPreview, ProfilingView, "/api/v1/plans/job", call, limit_s=limit_s, waiting=waiting
        )

    def make_plan(
        self, spec: Mapping[str, Any], *, format: str = "json", budget_s: float | None = None
    ) -> str:
        """Plan a PipelineSpec (DESIGN section 4): the plan as text in json, csv, table, events, chrome, svg or text."""
        params = _without_none(format=format, budget_s=budget_s)
        return self._call("POST", "/api/v1/plans", json=spec, params=params).text

    def saved_plans(self, *, owner: str | None = None) -> Iterator[SavedPlanSummary]:
        """Saved plans, of one owner or of all."""
        return self._items(SavedPlanList, "/api/v1/plans/named", owner=owner)

    def saved_plan(self, name: str, *, owner: str | None = None) -> SavedPlanView:
        """A saved plan as a whole, and the job that it was made for; one's own unless an `owner` is named."""
        return self._get(SavedPlanView, f"/api/v1/plans/named/{name}", owner=owner)

    def remove_plan(self, name: str, *, owner: str | None = None) -> None:
        """Delete a saved plan; jobs that were submitted with it keep it."""
        self._call("DELETE", f"/api/v1/plans/named/{name}", params=_without_none(owner=owner))

    # Checkpoints, exports, uploaded code

    def checkpoints(self, job_id: str, *, sums: bool = False) -> CheckpointFiles:
        """The job's checkpoints, newest first, as the server sees them; with `sums` their content is compared too."""
        path, params = f"/api/v1/jobs/{job_id}/checkpoints", {"sums": sums}
        response = self._call("GET", path, params=params, timeout=_CHECKPOINTS_CALL_LIMIT_S)
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
        """Stored output of the job beside its checkpoints: kinds, sizes, and when each is deleted."""
        path = f"/api/v1/jobs/{job_id}/artifacts"
        return self._parsed(ArtifactList, self._call("GET", path, timeout=_CHECKPOINTS_CALL_LIMIT_S))

    def usage(self, *, owner: str | None = None) -> list[OwnerUsage]:
        """Stored bytes of each owner, most first."""
        return self._get(UsageList, "/api/v1/usage", owner=owner).items

    def export(
        self,
        job_id: str,
        *,
        step: int | None = None,
        limit_s: float = EXPORT_LIMIT_S,
        waiting: Callable[[str], None] = lambda _: None,
    ) -> ExportView:
        """Have the cluster write the job's weights beside its checkpoints: those after `step`, or the newest whole ones.

        Of a peft model the adapters are written.
        `waiting` hears of it once; ClientError after `limit_s`.
        """
        call = {"params": _without_none(step=step)}
        path = f"/api/v1/jobs/{job_id}/export"
        return self._until_answered(ExportView, ExportingView, path, call, limit_s=limit_s, waiting=waiting)

    def upload_code(self, spec: Mapping[str, Any], base: Path = Path()) -> dict[str, Any]:
        """The job with its code.working_dir, a folder of this machine (from `base` on), replaced by its package's URI."""
        folder = code_folder(spec, base)
        if folder is None:
            return dict(spec)
        try:
            content = zip_folder(folder)
        except ValueError as error:
            raise ClientError(str(error)) from None
        try:
            package = self.upload_package(content)
        except ApiError as error:
            if error.status != HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
                raise
            raise ClientError(
                f"code.working_dir {folder} is too large, its zip has {len(content) / 1e6:.1f} MB ({error}). Its largest "
                f"files: {largest_files(folder)}. Name what is no code in .gitignore, or keep it where workers read it"
            ) from None
        return {**spec, "code": {**spec["code"], "working_dir": package.uri}}

    def upload_package(self, content: bytes) -> PackageView:
        """Store a zip of code; its `uri` goes into a job's code.working_dir."""
        headers = {"Content-Type": "application/zip"}
        return self._post(PackageView, "/api/v1/packages", content=content, headers=headers)

    # Clusters and queues

    def cluster(self, name: str | None = None) -> ClusterView:
        """Nodes, accelerators and their users as last seen: of the cluster of this name, or of all."""
        return self._get(ClusterView, "/api/v1/cluster", cluster=name)

    def nodes(self, cluster: str | None = None) -> list[NodeView]:
        """Nodes with their states, accelerators and jobs: of the cluster of this name, or of all."""
        return self._get(NodeList, "/api/v1/nodes", cluster=cluster).items

    def set_node_state(
        self, name: str, state: NodeState, *, reason: str = "", cluster: str | None = None
    ) -> list[NodeView]:
        """Have a node take no work (EXCLUDED), its jobs save and go on elsewhere (DRAINING), or all as before (READY); its
        Ray nodes are returned. For operators."""
        body, params = {"state": state, "reason": reason}, _without_none(cluster=cluster)
        answer = self._call("PUT", f"/api/v1/nodes/{quote(name, safe='')}", json=body, params=params)
        return self._parsed(NodeList, answer).items

    def queues(self) -> list[QueueView]:
        """Queues with their quotas, and the reason why each waiting job waits."""
        return self._get(QueueList, "/api/v1/queues").items

    def set_quota(self, queue: str, quota: int | None) -> QueueQuotaView:
        """Limit the accelerators that the queue's running jobs hold together (None: any number), for operators."""
        answer = self._call("PUT", f"/api/v1/queues/{queue}/quota", json={"quota": quota})
        return self._parsed(QueueQuotaView, answer)

    def reset_quota(self, queue: str) -> QueueQuotaView:
        """Return to the configured quota, for operators."""
        return self._parsed(QueueQuotaView, self._call("DELETE", f"/api/v1/queues/{queue}/quota"))

    # Principals and secrets

    def whoami(self) -> Whoami:
        """The name and the role of this client's token."""
        return self._get(Whoami, "/api/v1/whoami")

    def create_token(self, name: str, *, role: Role = Role.SUBMITTER, days: float | None = None) -> NewToken:
        """Make a token, for admins; only this answer has it."""
        body = {"name": name, "role": role, "days": days}
        return self._post(NewToken, "/api/v1/tokens", json=body)

    def tokens(self) -> list[TokenView]:
        """All tokens without their secret texts, for admins."""
        return self._get(TokenList, "/api/v1/tokens").items

    def revoke_token(self, name: str) -> None:
        """Make a token invalid, for admins."""
        self._call("DELETE", f"/api/v1/tokens/{name}")

    def projects(self) -> list[ProjectView]:
        """One's own projects with their members; all for operators."""
        return self._get(ProjectList, "/api/v1/projects").items

    def project(self, name: str) -> ProjectView:
        """A project that one is in, with its members."""
        return self._get(ProjectView, f"/api/v1/projects/{name}")

    def set_project_member(self, project: str, principal: str, role: Role) -> ProjectView:
        """Give a principal, or all whose names fit a pattern, a role in a project, for admins."""
        body = {"principal": principal, "role": role}
        answer = self._call("PUT", f"/api/v1/projects/{project}/members", json=body)
        return self._parsed(ProjectView, answer)

    def remove_project_member(self, project: str, principal: str) -> None:
        """Take a principal or pattern out of a project, for admins."""
        self._call("DELETE", f"/api/v1/projects/{project}/members", params={"principal": principal})

    def set_project_quota(self, project: str, queue: str, quota: int | None) -> ProjectView:
        """Limit the accelerators that the project's running jobs hold together in a queue (None: only by the queue's quota),
        for operators."""
        answer = self._call("PUT", f"/api/v1/projects/{project}/quotas/{queue}", json={"quota": quota})
        return self._parsed(ProjectView, answer)

    def set_secret(self, name: str, value: str) -> None:
        """Store a secret of one's own: a job that names it in `secrets` finds it in its environment."""
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
        """The audit log, newest first, at most `limit` entries, for admins."""
        return self._first_items(AuditPage, "/api/v1/audit", limit, principal=principal, subject=subject)

    # The server

    def version(self) -> Version:
        return self._get(Version, "/api/v1/version")

    def ready(self) -> bool:
        """True where a server answers whose database and cluster answer too."""
        try:
            return self._get(Health, "/readyz").status == "ok"
        except ClientError:
            return False

    # HTTP

    def _get(self, model: type[Model], path: str, **params: Any) -> Model:
        return self._parsed(model, self._call("GET", path, params=_without_none(**params)))

    def _post(self, model: type[Model], path: str, **kwargs: Any) -> Model:
        return self._parsed(model, self._call("POST", path, **kwargs))

    def _items(
        self, model: type[BaseModel], path: str, token: str | None = None, **params: Any
    ) -> Iterator[Any]:
        """The items of all pages behind the page token `token`."""
        while True:
            page: Any = self._get(model, path, page_token=token, **params)
            yield from page.items
            if (token := page.next_page_token) is None:
                return

    def _first_items(
        self, model: type[BaseModel], path: str, limit: int | None, **params: Any
    ) -> Iterator[Any]:
        """At most `limit` items (None: all); the last page is asked for no more than are left."""
        left, token = limit, None
        while left is None or left > 0:
            size = _PAGE_SIZE if left is None else min(left, _PAGE_SIZE)
            page: Any = self._get(model, path, limit=size, page_token=token, **params)
            yield from page.items
            left = None if left is None else left - len(page.items)
            if (token := page.next_page_token) is None:
                return

    def _follow(self, model: type[Model], path: str, last: str | None, **params: Any) -> Iterator[Model]:
        """The payloads of a stream of server-sent events; a stream that breaks is taken up where it broke."""
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
            except LoginError as error:
                raise ClientError(str(error)) from None
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
        except LoginError as error:
            raise ClientError(str(error)) from None
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
        deadline, announced = time.monotonic() + limit_s, False
        while (response := self._call(method, path, **call)).status_code == 202:
            message = self._parsed(pending, response).message
            if time.monotonic() > deadline:
                raise ClientError(f"{message}, for more than {limit_s:g} s: ask again later")
            if not announced:
                waiting(message)
                announced = True
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


def _read_problem(response: httpx.Response) -> ProblemDetails:
    """The problem in an answer; where something else than Slotline answered, one made of its status and text."""
    try:
        return ProblemDetails.model_validate_json(response.content)
    except ValidationError:
        text = f"the server answered {response.status_code}: {response.text[:500]}"
        return ProblemDetails(title=response.reason_phrase, status=response.status_code, detail=text)


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
