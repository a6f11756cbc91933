"""Routes that diagnose a job: the post-mortem zip of a failed attempt, and the analysis of a slow step.

The zip is bounded: what is too long is cut, or left out with a note. It holds no secret: values under names such as
token or password, known tokens, and passwords in URLs are redacted; environments are left out. Building it is pure.
The analysis runs in the planner's process pool, and is cancelled when its caller disconnects.
"""

from __future__ import annotations

import asyncio
import io
import json
import platform
import re
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from sqlalchemy import make_url

from service.api.dependencies import CurrentService, Service, while_connected
from service.api.errors import ProblemError, responses
from service.api.middleware import UserRoute
from service.api.routers import activity
from service.api.routers.jobs import JobId, existing_job
from service.api.views import event_view, step_view
from service.orchestrator.planning.work import StoredStep
from service.orchestrator.ray.jobs_api import ClusterError
from service.schemas.plans import WhyView
from service.settings.clusters import DEFAULT_CLUSTER
from service.spec.states import AttemptState
from service.store.attempts import attempts_of
from service.store.events import events_of, find_post_mortem
from service.store.measurements import (
    find_all_costs,
    find_step,
    find_timeline,
    last_steps,
    scoped_costs_digest,
)
from service.store.plans import find_job_plan
from service.store.tables import Attempt
from worker.contract.costs import costs_digest

LOG_LIMIT_BYTES = 512 * 1024
JSON_LIMIT_BYTES = 16 * 1024 * 1024
REDACTED = "[hidden]"

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:secrets?|tokens?|passw(?:or)?d|passphrase|credentials?|api_?key|access_?key|private_?key|"
    r"auth|authorization)(?:$|_)"
)
_OMITTED_FIELDS = frozenset({"env", "env_vars", "environment", "secrets"})
_SECRET_ASSIGNMENT = re.compile(
    r"(?i)\b([\w-]*(?:secret|token(?!i[sz])|passw(?:or)?d|passphrase|credential|api_?key|access_?key|private_?key)[\w-]*"
    r"[\"']?\s*[=:]\s*[\"']?)([^\s\"',;&]{4,})"
)
_AUTHORIZATION = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_URL_USERINFO = re.compile(r"(?<=://)[^/\s:@\"']*:[^/\s@\"']+(?=@)")


@dataclass(frozen=True)
class PostMortemFacts:
    """What is known of a failed attempt. `secrets` are texts that must not appear anywhere in the bundle."""

    attempt: Mapping[str, Any]
    job: Mapping[str, Any]
    plan: str | None
    step: int | None
    slots: str | None
    steps: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    log: Sequence[str]
    versions: Mapping[str, str]
    secrets: Collection[str] = field(default=(), repr=False)


def post_mortem_zip(facts: PostMortemFacts) -> bytes:
    """The zip of an attempt's post-mortem."""
    hide = _Redactor(facts.secrets)
    body = None if facts.plan is None else json.loads(facts.plan)
    programs = None if body is None else body["plan"].pop("programs", None)
    files: dict[str, str] = {
        "attempt.json": _json_text(hide.value(facts.attempt)),
        "job.json": _json_text(hide.value(facts.job)),
        "events.json": _json_text(hide.value(list(facts.events))),
        "steps.json": _json_text(list(facts.steps)),
        "versions.json": _json_text(_versions(facts)),
        "waits.txt": hide.text(_waits_text(facts)),
        "log.txt": hide.text(_last_lines(facts.log)),
    }
    missing = []
    for name, content in (
        ("plan.json", None if body is None else json.dumps(body)),
        ("programs.json", None if programs is None else json.dumps(programs)),
        ("slots.json", facts.slots),
    ):
        if content is None:
            missing.append(
                f"{name} is not here: the attempt ended before there was one, or it is kept no more"
            )
        elif len(content) > JSON_LIMIT_BYTES:
            missing.append(
                f"{name} is not here: it is {len(content)} bytes, {JSON_LIMIT_BYTES} are the limit"
            )
        else:
            files[name] = hide.known(content)
    files["README.txt"] = _readme_text(facts, missing)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), files[name], zipfile.ZIP_DEFLATED)
    return made.getvalue()


class _Redactor:
    """Replaces what is secret, in values by their names and in texts by their looks."""

    def __init__(self, secrets: Collection[str]) -> None:
        self._secrets = sorted({one for one in secrets if len(one) >= 4}, key=len, reverse=True)

    def known(self, text: str) -> str:
        """Without the secrets that are known: for what Slotline itself has written, which has no others."""
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        return text

    def text(self, text: str) -> str:
        text = self.known(text)
        text = _AUTHORIZATION.sub(lambda found: f"{found[1]} {REDACTED}", text)
        text = _URL_USERINFO.sub(REDACTED, text)
        return _SECRET_ASSIGNMENT.sub(lambda found: f"{found[1]}{REDACTED}", text)

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                name: self._redact_named(str(name), one)
                for name, one in value.items()
                if name not in _OMITTED_FIELDS
            }
        if isinstance(value, list | tuple):
            return [self.value(one) for one in value]
        return value

    def _redact_named(self, name: str, value: Any) -> Any:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", name).lower()
        if _SECRET_NAME.search(words) and isinstance(value, str | Mapping | list | tuple):
            return REDACTED
        return self.value(value)


def _waits_text(facts: PostMortemFacts) -> str:
    """Who waited for whom when the attempt ended: what ended it, and what every worker said then."""
    said = [line for line in facts.log if "who waited for whom:" in line]
    told = [f"{facts.attempt.get('reason')}: {facts.attempt.get('message')}", ""]
    if said:
        told += ["What each worker said when the step ended:", *said]
    return "\n".join(_one_wait_per_line(line) for line in told) + "\n"


def _one_wait_per_line(line: str) -> str:
    """One statement a line: a stall names each lane and what it waits for."""
    return line.replace("; ", ";\n    ")


def _versions(facts: PostMortemFacts) -> dict[str, str]:
    told = [event["message"] for event in facts.events if event.get("kind") == "versions"]
    return {**{f"control plane {name}": one for name, one in facts.versions.items()}} | (
        {"driver": told[-1]} if told else {}
    )


def _last_lines(lines: Sequence[str]) -> str:
    size, begin = 0, len(lines)
    while begin > 0 and size + len(lines[begin - 1]) + 1 <= LOG_LIMIT_BYTES:
        begin -= 1
        size += len(lines[begin]) + 1
    cut = f"[{begin} lines before these are left out]\n" if begin else ""
    return cut + "".join(f"{line}\n" for line in lines[begin:])


def _readme_text(facts: PostMortemFacts, missing: Sequence[str]) -> str:
    parts = [
        f"Post-mortem of attempt {facts.attempt.get('number')} of job {facts.attempt.get('job_id')}: "
        f"{facts.attempt.get('reason')}",
        "",
        "attempt.json   how the attempt ended, and its times",
        "job.json       the job as it was submitted, without environment and secrets",
        "waits.txt      who waited for whom when it ended",
        "log.txt        the last lines of the driver's log",
        "events.json    the job's last events",
        "steps.json     the attempt's last steps",
        "plan.json      cut, problem and planned slots; programs.json: what every mesh ran",
        f"slots.json     measured slots of the attempt's last profiled step ({facts.step}), the last to end first",
        "versions.json  with what it ran",
        "",
        f"Values under names that tell of secrets, and passwords in addresses, read {REDACTED}.",
    ]
    return "\n".join([*parts, *(["", *missing] if missing else [])]) + "\n"


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=2, default=str) + "\n"


postmortem_router = APIRouter(
    prefix="/api/v1/jobs/{job_id}", tags=["jobs"], responses=responses(404, 422), route_class=UserRoute
)

_MAX_LOG_LINES = 5000
_MAX_EVENTS = 500
_MAX_STEPS = 200
_ATTEMPT_FIELDS = (
    *("id", "job_id", "number", "state", "reason", "message", "device", "accelerators", "peak_memory_bytes"),
    *("created_at", "submitted_at", "started_at", "heartbeat_at", "finished_at", "stopped_because"),
)


@postmortem_router.get(
    "/postmortem",
    response_class=Response,
    responses={200: {"description": "A zip file", "content": {"application/zip": {}}}},
)
async def postmortem(
    job_id: JobId,
    service: CurrentService,
    attempt: Annotated[
        int | None, Query(ge=1, lt=2**31, description="The last one that failed if absent")
    ] = None,
) -> Response:
    """What a failed attempt left: job, plan, programs, last measured slots, who waited for whom, log, events, versions.

    Nothing of it is secret: environments are left out, tokens and passwords replaced.
    """
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        attempts = await attempts_of(session, job_id)
        chosen = _failed_attempt(job_id, attempts, attempt)
        kept = await find_post_mortem(session, chosen.id)
        events = await events_of(
            session, job_id, after=max(0, job.last_event - _MAX_EVENTS), limit=_MAX_EVENTS
        )
        steps = await last_steps(session, job_id, chosen.number, limit=_MAX_STEPS)
    facts = PostMortemFacts(
        attempt={name: getattr(chosen, name) for name in _ATTEMPT_FIELDS},
        job=job.spec,
        plan=None if kept is None else kept.plan,
        step=None if kept is None else kept.step,
        slots=None if kept is None else kept.slots,
        steps=[step_view(one).model_dump(mode="json") for one in steps],
        events=[event_view(one).model_dump(mode="json") for one in events],
        log=await _attempt_log(service, job_id, chosen.number),
        versions={"slotline": version("slotline"), "python": platform.python_version()},
        secrets=_known_secrets(service, attempts),
    )
    made = await asyncio.to_thread(post_mortem_zip, facts)
    name = f"{job_id}-attempt-{chosen.number}-postmortem.zip"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(made, media_type="application/zip", headers=headers)


def _failed_attempt(job_id: str, attempts: list[Attempt], number: int | None) -> Attempt:
    failed = [one for one in attempts if one.attempt_state is AttemptState.FAILED]
    if number is None and failed:
        return failed[-1]
    if found := next((one for one in failed if one.number == number), None):
        return found
    said = (
        f"attempt {number} of job {job_id} has not failed"
        if number
        else f"no attempt of job {job_id} has failed"
    )
    which = f": those that did are {', '.join(str(one.number) for one in failed)}" if failed else ""
    raise ProblemError(404, f"{said}{which}")


async def _attempt_log(service: Service, job_id: str, number: int) -> list[str]:
    wanted = activity.LogFilter(attempt=number, search=None, since=None, tail=_MAX_LOG_LINES)
    try:
        lines = await activity.log_lines(service, job_id, wanted, after=(0, 0))
    except ClusterError as error:  # not kept yet, and Ray is away: the rest is worth having
        return [f"[the log could not be read: {error}]"]
    return [line.text for line in lines]


def _known_secrets(service: Service, attempts: list[Attempt]) -> list[str]:
    settings = service.settings
    held = [settings.api_token, settings.metrics_token]
    found = [one.get_secret_value() for one in held if one is not None]
    found += [one for one in (*settings.ray_tokens, make_url(settings.sqlalchemy_url).password) if one]
    return [*found, *(one.token for one in attempts)]


why_router = APIRouter(
    prefix="/api/v1/jobs/{job_id}", tags=["jobs"], responses=responses(404, 422, 503), route_class=UserRoute
)


@why_router.get("/why", response_model=WhyView)
async def why(
    request: Request,
    job_id: JobId,
    service: CurrentService,
    step: Annotated[int | None, Query(ge=0, lt=2**31, description="The last profiled step if absent")] = None,
) -> Response:
    """What a step waits for, what is to blame, and which changes would shorten it most, by the job's plan and the
    measured slots of the step. Before a step was profiled the plan itself is explained."""
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        plan = await find_job_plan(session, job_id)
        measured = await find_timeline(session, job_id, step)
        record = None if measured is None else await find_step(session, job_id, measured[0].step)
        costs = await find_all_costs(
            session, scoped_costs_digest(costs_digest(job.spec), job.owner, job.began_on or DEFAULT_CLUSTER)
        )
    if plan is None:
        raise ProblemError(404, f"job {job_id} has no plan: nothing of it can be explained")
    if step is not None and measured is None:
        raise ProblemError(
            404, f"step {step} of job {job_id} was not profiled: its page lists those that were"
        )
    notes = []
    if measured is not None and measured[0].attempt != plan.attempt:
        notes.append(
            f"step {measured[0].step} was measured by attempt {measured[0].attempt}, under another plan than that of "
            f"attempt {plan.attempt}: the plan alone is explained"
        )
        measured = None
    stored = StoredStep(
        job=job.spec,
        plan=plan.body,
        slots=[] if measured is None else measured[1],
        step_s=None if measured is None or record is None else record.step_s,
        costs=costs,
        notes=tuple(notes),
    )
    text = await while_connected(request, service.planner.explain(stored))
    told = {"job_id": job_id, "attempt": plan.attempt, "step": None if measured is None else measured[0].step}
    return Response(f"{json.dumps(told)[:-1]}, {text[1:]}", media_type="application/json")
