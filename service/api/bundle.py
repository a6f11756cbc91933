"""A failed attempt as one zip file for who looks into it, here or far away. Pure: values in, bytes out.

Bounded: what is too long is cut, or left out with a word. Nothing secret: values under telling names, tokens that
are known, and passwords in addresses are replaced; environments are no part of it.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LOG_BYTES = 512 * 1024
JSON_BYTES = 16 * 1024 * 1024
HIDDEN = "[hidden]"

_TELLING = re.compile(
    r"(?:^|_)(?:secrets?|tokens?|passw(?:or)?d|passphrase|credentials?|api_?key|access_?key|private_?key|"
    r"auth|authorization)(?:$|_)"
)
_LEFT_OUT = frozenset({"env", "env_vars", "environment", "secrets"})
_ASSIGNED = re.compile(
    r"(?i)\b([\w-]*(?:secret|token(?!i[sz])|passw(?:or)?d|passphrase|credential|api_?key|access_?key|private_?key)[\w-]*"
    r"[\"']?\s*[=:]\s*[\"']?)([^\s\"',;&]{4,})"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_USERINFO = re.compile(r"(?<=://)[^/\s:@\"']*:[^/\s@\"']+(?=@)")


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


def bundle(facts: PostMortemFacts) -> bytes:
    """The zip of an attempt's post-mortem."""
    hide = _Hide(facts.secrets)
    body = None if facts.plan is None else json.loads(facts.plan)
    programs = None if body is None else body["plan"].pop("programs", None)
    files: dict[str, str] = {
        "attempt.json": _json(hide.value(facts.attempt)),
        "job.json": _json(hide.value(facts.job)),
        "events.json": _json(hide.value(list(facts.events))),
        "steps.json": _json(list(facts.steps)),
        "versions.json": _json(_versions(facts)),
        "waits.txt": hide.text(_waits(facts)),
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
        elif len(content) > JSON_BYTES:
            missing.append(f"{name} is not here: it is {len(content)} bytes, {JSON_BYTES} are the limit")
        else:
            files[name] = hide.known(content)
    files["README.txt"] = _readme(facts, missing)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), files[name], zipfile.ZIP_DEFLATED)
    return made.getvalue()


class _Hide:
    """Replaces what is secret, in values by their names and in texts by their looks."""

    def __init__(self, secrets: Collection[str]) -> None:
        self._secrets = sorted({one for one in secrets if len(one) >= 4}, key=len, reverse=True)

    def known(self, text: str) -> str:
        """Without the secrets that are known: for what Slotline itself has written, which has no others."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text

    def text(self, text: str) -> str:
        text = self.known(text)
        text = _BEARER.sub(lambda found: f"{found[1]} {HIDDEN}", text)
        text = _USERINFO.sub(HIDDEN, text)
        return _ASSIGNED.sub(lambda found: f"{found[1]}{HIDDEN}", text)

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {name: self._named(str(name), one) for name, one in value.items() if name not in _LEFT_OUT}
        if isinstance(value, list | tuple):
            return [self.value(one) for one in value]
        return value

    def _named(self, name: str, value: Any) -> Any:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", name).lower()
        if _TELLING.search(words) and isinstance(value, str | Mapping | list | tuple):
            return HIDDEN
        return self.value(value)


def _waits(facts: PostMortemFacts) -> str:
    """Who waited for whom when the attempt ended: what ended it, and what every worker said then."""
    said = [line for line in facts.log if "who waited for whom:" in line]
    told = [f"{facts.attempt.get('reason')}: {facts.attempt.get('message')}", ""]
    if said:
        told += ["What each worker said when the step ended:", *said]
    return "\n".join(_sentences(line) for line in told) + "\n"


def _sentences(line: str) -> str:
    """One statement a line: a stall names each lane and what it waits for."""
    return line.replace("; ", ";\n    ")


def _versions(facts: PostMortemFacts) -> dict[str, str]:
    told = [event["message"] for event in facts.events if event.get("kind") == "versions"]
    return {**{f"control plane {name}": one for name, one in facts.versions.items()}} | (
        {"driver": told[-1]} if told else {}
    )


def _last_lines(lines: Sequence[str]) -> str:
    size, begin = 0, len(lines)
    while begin > 0 and size + len(lines[begin - 1]) + 1 <= LOG_BYTES:
        begin -= 1
        size += len(lines[begin]) + 1
    cut = f"[{begin} lines before these are left out]\n" if begin else ""
    return cut + "".join(f"{line}\n" for line in lines[begin:])


def _readme(facts: PostMortemFacts, missing: Sequence[str]) -> str:
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
        f"Values under names that tell of secrets, and passwords in addresses, read {HIDDEN}.",
    ]
    return "\n".join([*parts, *(["", *missing] if missing else [])]) + "\n"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, default=str) + "\n"
