"""Post-mortem of a failed attempt: a zip of its job, plan, slots, waits, log and events, without secrets.

The zip is bounded: what is too long is cut, or left out with a note. Values under names such as token or password,
known tokens, and passwords in URLs are redacted; environments are left out. `post_mortem_zip` is pure.
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
from typing import Any

from sqlalchemy import make_url

from service.jobs.lifecycle import existing_job
from service.jobs.log_lines import LogFilter, log_lines
from service.jobs.problems import ProblemError
from service.jobs.service import Service
from service.jobs.views import event_view, step_view
from service.orchestrator.ray.jobs_api import ClusterError
from service.spec.states import AttemptState
from service.store.attempts import attempts_of
from service.store.events import events_of, find_post_mortem
from service.store.measurements import last_steps
from service.store.tables import AttemptRow

LOG_LIMIT_BYTES = 512 * 1024
JSON_LIMIT_BYTES = 16 * 1024 * 1024
REDACTED = "[hidden]"
_MAX_LOG_LINES = 5000
_MAX_EVENTS = 500
_MAX_STEPS = 200
ATTEMPT_FIELDS = (
    *("id", "job_id", "number", "state", "reason", "message", "device", "accelerators", "peak_memory_bytes"),
    *("created_at", "submitted_at", "started_at", "heartbeat_at", "finished_at", "stopped_because"),
)
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


async def read_post_mortem(service: Service, job_id: str, number: int | None) -> tuple[int, bytes]:
    """Number and zip of a failed attempt, by default the last; 404 where none, or not this one, has failed."""
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        attempts = await attempts_of(session, job_id)
        chosen = _failed_attempt(job_id, attempts, number)
        stored = await find_post_mortem(session, chosen.id)
        events = await events_of(
            session, job_id, after=max(0, job.last_event - _MAX_EVENTS), limit=_MAX_EVENTS
        )
        steps = await last_steps(session, job_id, chosen.number, limit=_MAX_STEPS)
    facts = PostMortemFacts(
        attempt={name: getattr(chosen, name) for name in ATTEMPT_FIELDS},
        job=job.spec,
        plan=None if stored is None else stored.plan,
        step=None if stored is None else stored.step,
        slots=None if stored is None else stored.slots,
        steps=[step_view(step).model_dump(mode="json") for step in steps],
        events=[event_view(event).model_dump(mode="json") for event in events],
        log=await _attempt_log(service, job_id, chosen.number),
        versions={"slotline": version("slotline"), "python": platform.python_version()},
        secrets=_known_secrets(service, attempts),
    )
    return chosen.number, await asyncio.to_thread(post_mortem_zip, facts)


def _failed_attempt(job_id: str, attempts: list[AttemptRow], number: int | None) -> AttemptRow:
    failed = [attempt for attempt in attempts if attempt.attempt_state is AttemptState.FAILED]
    if number is None and failed:
        return failed[-1]
    if chosen := next((attempt for attempt in failed if attempt.number == number), None):
        return chosen
    problem = (
        f"attempt {number} of job {job_id} has not failed"
        if number
        else f"no attempt of job {job_id} has failed"
    )
    others = f": those that did are {', '.join(str(attempt.number) for attempt in failed)}" if failed else ""
    raise ProblemError(404, f"{problem}{others}")


async def _attempt_log(service: Service, job_id: str, number: int) -> list[str]:
    wanted = LogFilter(attempt=number, search=None, since=None, tail=_MAX_LOG_LINES)
    try:
        lines = await log_lines(service, job_id, wanted, after=(0, 0))
    except ClusterError as error:  # not kept yet, and Ray is away: the rest is worth having
        return [f"[the log could not be read: {error}]"]
    return [line.text for line in lines]


def _known_secrets(service: Service, attempts: list[AttemptRow]) -> list[str]:
    settings = service.settings
    tokens = [settings.api_token, settings.metrics_token]
    secrets = [token.get_secret_value() for token in tokens if token is not None]
    passwords = (*settings.ray_tokens, make_url(settings.sqlalchemy_url).password)
    secrets += [password for password in passwords if password]
    return [*secrets, *(attempt.token for attempt in attempts)]


@dataclass(frozen=True)
class PostMortemFacts:
    """Everything stored about a failed attempt. `secrets` are texts that must not appear anywhere in the bundle."""

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
    for name, text in (
        ("plan.json", None if body is None else json.dumps(body)),
        ("programs.json", None if programs is None else json.dumps(programs)),
        ("slots.json", facts.slots),
    ):
        if text is None:
            missing.append(
                f"{name} is not here: the attempt ended before there was one, or it is kept no more"
            )
        elif len(text) > JSON_LIMIT_BYTES:
            missing.append(f"{name} is not here: it is {len(text)} bytes, {JSON_LIMIT_BYTES} are the limit")
        else:
            files[name] = hide.known(text)
    files["README.txt"] = _readme_text(facts, missing)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), files[name], zipfile.ZIP_DEFLATED)
    return content.getvalue()


class _Redactor:
    """Replaces secrets: values under telling names, known texts, and texts that look like credentials."""

    def __init__(self, secrets: Collection[str]) -> None:
        self._secrets = sorted({secret for secret in secrets if len(secret) >= 4}, key=len, reverse=True)

    def known(self, text: str) -> str:
        """The text without known secrets; enough for texts that Slotline itself has written."""
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        return text

    def text(self, text: str) -> str:
        text = self.known(text)
        text = _AUTHORIZATION.sub(lambda match: f"{match[1]} {REDACTED}", text)
        text = _URL_USERINFO.sub(REDACTED, text)
        return _SECRET_ASSIGNMENT.sub(lambda match: f"{match[1]}{REDACTED}", text)

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                name: self._redact_named(str(name), inner)
                for name, inner in value.items()
                if name not in _OMITTED_FIELDS
            }
        if isinstance(value, list | tuple):
            return [self.value(inner) for inner in value]
        return value

    def _redact_named(self, name: str, value: Any) -> Any:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", name).lower()
        if _SECRET_NAME.search(words) and isinstance(value, str | Mapping | list | tuple):
            return REDACTED
        return self.value(value)


def _waits_text(facts: PostMortemFacts) -> str:
    """The end of the attempt, and the workers' statements of what each lane waited for, one a line."""
    statements = [line for line in facts.log if "who waited for whom:" in line]
    lines = [f"{facts.attempt.get('reason')}: {facts.attempt.get('message')}", ""]
    if statements:
        lines += ["What each worker said when the step ended:", *statements]
    return "\n".join(line.replace("; ", ";\n    ") for line in lines) + "\n"


def _versions(facts: PostMortemFacts) -> dict[str, str]:
    versions = {f"control plane {name}": version for name, version in facts.versions.items()}
    reported = [event["message"] for event in facts.events if event.get("kind") == "versions"]
    return versions | ({"driver": reported[-1]} if reported else {})


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
