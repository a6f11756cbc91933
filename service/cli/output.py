"""Shared pieces of the commands: consoles, CliError, JSON output, common typer options, shell completions.

Imports the client only inside a completion, so that the module stays cheap. `CliError` is printed by main and ends
the command with exit code 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console

from service.spec.job import JOB_ID_PATTERN

if TYPE_CHECKING:
    from service.client.client import Client


_COMPLETED_JOBS = 50
_COMPLETION_TIMEOUT_S = 2.0
out = Console()
err = Console(stderr=True)


class CliError(Exception):
    """Something that the user must hear; the command ends with exit code 1."""


def pattern_callback(pattern: str, what: str) -> Callable[[str | None], str | None]:
    """A typer callback that lets through what the server would: text of `pattern`, or nothing."""

    def check(value: str | None) -> str | None:
        if value is not None and not re.fullmatch(pattern.removeprefix("^").removesuffix("$"), value):
            raise typer.BadParameter(f"{value!r} is not {what}: it looks like {pattern}")
        return value

    return check


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON")]
ProfiledStepOption = Annotated[
    int | None, typer.Option(min=0, help="A profiled step; the last one if absent")
]
BudgetOption = Annotated[float, typer.Option("--budget-s", min=0.0, help="Search time of auto, in seconds.")]
OutputFileOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write here instead of to the terminal.")
]


Completions = Iterable[tuple[str, str]]
"""What the shell's Tab key may complete to, each with a word about it."""


def complete_from(ask: Callable[[Client], Completions]) -> Callable[[str], list[tuple[str, str]]]:
    """Completes to what `ask` has of the server; to nothing where no server answers soon."""

    def complete(incomplete: str) -> list[tuple[str, str]]:
        from service.client.client import Client, ClientError

        try:
            with Client(timeout_s=_COMPLETION_TIMEOUT_S) as client:
                return [one for one in ask(client) if one[0].startswith(incomplete)]
        except ClientError:
            return []

    return complete


def _newest_job_completions(client: Client) -> Completions:
    return [(job.id, f"{job.name} {job.state}") for job in client.jobs(limit=_COMPLETED_JOBS)]


JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        callback=pattern_callback(JOB_ID_PATTERN, "a job's id"),
        help="A job's id",
        autocompletion=complete_from(_newest_job_completions),
    ),
]


def print_json(value: Any) -> None:
    """One JSON document on standard output, never wrapped or coloured."""
    print(json.dumps(value, indent=2))


def print_message(text: str) -> None:
    """A line for people on standard error, never wrapped or coloured."""
    err.print(f"slotline: {text}", markup=False, highlight=False, soft_wrap=True)


def models_to_json(models: Iterable[BaseModel]) -> list[Any]:
    """Answers of the API as the values that JSON has."""
    return [model.model_dump(mode="json") for model in models]
