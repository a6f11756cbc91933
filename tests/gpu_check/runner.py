"""Runs the checks of a machine with GPUs one after the other, stops at the first that fails, and writes the report.

A check is a command in a process of its own: a fault of the GPU ends that process and not the report. The commands of
tests/gpu_check print their finding as JSON in their last line; others are read by their check. Knows no GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TAIL_CHARACTERS = 6000


@dataclass(frozen=True)
class Figure:
    """A measured value with its unit, and what it means."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True)
class Finding:
    """The figures of a check, and why it failed (None: it passed). `not_shown` lists what this machine cannot show, and
    `gpus` is the number of GPUs, of the check that counts them."""

    figures: tuple[Figure, ...] = ()
    failure: str | None = None
    not_shown: tuple[str, ...] = ()
    gpus: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Finding:
        """Inverse of `to_json`. ValueError for other text."""
        content = json.loads(text)
        try:
            figures = tuple(Figure(**figure) for figure in content.pop("figures"))
            return cls(figures, **{**content, "not_shown": tuple(content["not_shown"])})
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"no finding: {error}") from None


@dataclass(frozen=True)
class CommandResult:
    """A command that has ended: its exit status (None: it was ended after its limit), its output and its seconds."""

    status: int | None
    output: str
    seconds: float


def finding_in_last_line(result: CommandResult) -> Finding:
    """The finding that a command of tests/gpu_check printed; a failure where it printed none."""
    lines = result.output.strip().splitlines()
    if result.status == 0 and lines:
        with contextlib.suppress(ValueError):
            return Finding.from_json(lines[-1])
    return Finding(failure=f"it ended with status {result.status} and printed no finding")


@dataclass(frozen=True)
class Check:
    """One thing that a machine has to show. `command` makes the command from the number of GPUs, `read` the finding from
    its result; with fewer than `least_gpus` GPUs it is left out, and the report says so."""

    name: str
    shows: str
    command: Callable[[int], Sequence[str]]
    limit_s: float
    read: Callable[[CommandResult], Finding] = finding_in_last_line
    least_gpus: int = 1


PASSED, FAILED, LEFT_OUT, NOT_RUN = "passed", "failed", "left out", "not run"


@dataclass
class Row:
    """A check in the report."""

    check: Check
    state: str = NOT_RUN
    finding: Finding = field(default_factory=Finding)
    seconds: float = 0.0
    output: str = ""


Execute = Callable[[Sequence[str], float], CommandResult]


def run_command(command: Sequence[str], limit_s: float) -> CommandResult:
    """Run a command from the repository's root; it and its children are killed after `limit_s`. stderr is in its output,
    before what it printed."""
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    status: int | None = None
    try:
        out, errors = process.communicate(timeout=limit_s)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, errors = process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return CommandResult(status, f"{errors}\n{out}", time.monotonic() - began)


def module(name: str, *arguments: str) -> Callable[[int], list[str]]:
    """The command of `python -m name arguments`, whatever the number of GPUs."""
    return lambda gpus: [sys.executable, "-m", name, *arguments]


def run_checks(
    checks: Sequence[Check], execute: Execute = run_command, report: Callable[[list[Row]], None] = print
) -> bool:
    """Run `checks` in their order up to the first that fails; True if none did. The first counts the GPUs.

    `report` is called with all rows after each.
    """
    rows, gpus = [Row(check) for check in checks], 0
    for row in rows:
        check = row.check
        if row is not rows[0] and gpus < check.least_gpus:
            row.state = LEFT_OUT
            row.finding = Finding(not_shown=(f"{check.shows} (needs {check.least_gpus} GPUs)",))
            report(rows)
            continue
        result = execute(check.command(gpus), check.limit_s)
        row.seconds, row.output = result.seconds, result.output
        if result.status is None:
            row.finding = Finding(failure=f"not done within its limit of {check.limit_s:g} s, and ended")
        else:
            row.finding = check.read(result)
        gpus = row.finding.gpus or gpus
        row.state = PASSED if row.finding.failure is None else FAILED
        report(rows)
        if row.state == FAILED:
            return False
    return True


def report_text(rows: Sequence[Row], heading: Mapping[str, str]) -> str:
    """The report in Markdown: an overview, then of each check that ran what it shows, its figures and what they mean, and
    of one that failed the end of its output."""
    lines = ["# The first hour on a GPU", "", *(f"* {name}: {value}" for name, value in heading.items()), ""]
    lines += ["| check | result | seconds |", "|---|---|---|"]
    lines += [f"| {row.check.name} | {row.state} | {_seconds(row)} |" for row in rows]
    missing = [text for row in rows for text in row.finding.not_shown]
    if missing:
        lines += ["", "Not shown on this machine:", "", *(f"* {text}" for text in missing)]
    for row in rows:
        if row.state not in (PASSED, FAILED):
            continue
        lines += ["", f"## {row.check.name}", "", row.check.shows + "."]
        if row.finding.figures:
            lines += ["", "| figure | value | meaning |", "|---|---|---|"]
            lines += [
                f"| {_cell(figure.name)} | {_cell(figure.value)} | {_cell(figure.meaning)} |"
                for figure in row.finding.figures
            ]
        if row.finding.failure is not None:
            lines += ["", f"**Failed**: {row.finding.failure}"]
            lines += ["", "```", row.output.strip()[-_TAIL_CHARACTERS:].replace("```", "'''"), "```"]
    return "\n".join(lines) + "\n"


def _seconds(row: Row) -> str:
    return f"{row.seconds:.0f}" if row.state in (PASSED, FAILED) else ""


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
