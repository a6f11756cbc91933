"""Shared by the commands: consoles, CliError, JSON and table output, common typer options, shell completions.

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
from rich import box
from rich.console import Console
from rich.table import Table

from service.spec.names import JOB_ID_PATTERN

if TYPE_CHECKING:
    from service.client.client import Client


_COMPLETED_JOBS = 50
_COMPLETION_TIMEOUT_S = 2.0
out = Console()
err = Console(stderr=True)


class CliError(Exception):
    """A failure of the command, as a message for the user; the exit code is 1."""


def pattern_callback(pattern: str, kind: str) -> Callable[[str | None], str | None]:
    """A typer callback that accepts what the server accepts: text that matches `pattern`, or nothing."""

    def check(value: str | None) -> str | None:
        if value is not None and not re.fullmatch(pattern.removeprefix("^").removesuffix("$"), value):
            raise typer.BadParameter(f"{value!r} is not {kind}: it looks like {pattern}")
        return value

    return check


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON")]
ProfiledStepOption = Annotated[
    int | None, typer.Option(min=0, help="A profiled step; the last one if absent")
]
BudgetOption = Annotated[float, typer.Option("--budget-s", min=0.0, help="Search time of auto, in seconds.")]
ChangesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Change a field, as training.steps=1000; several: one after the other",
    ),
]
OutputFileOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write here instead of to the terminal.")
]


Completions = Iterable[tuple[str, str]]
"""Candidates of the shell's Tab key: (text, short explanation)."""


def complete_from(ask: Callable[[Client], Completions]) -> Callable[[str], list[tuple[str, str]]]:
    """A typer completion by the candidates that `ask` reads from the server; empty where no server answers soon."""

    def complete(incomplete: str) -> list[tuple[str, str]]:
        from service.client.client import Client, ClientError

        try:
            with Client(timeout_s=_COMPLETION_TIMEOUT_S) as client:
                return [candidate for candidate in ask(client) if candidate[0].startswith(incomplete)]
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


def borderless_table(**options: Any) -> Table:
    """A table without frames, with one blank between its columns."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, **options)


def print_message(text: str) -> None:
    """A line for people on standard error, never wrapped or coloured."""
    err.print(f"slotline: {text}", markup=False, highlight=False, soft_wrap=True)


def print_waiting(text: str) -> None:
    """A message about something that the command waits for."""
    print_message(f"{text} …")


def models_to_json(models: Iterable[BaseModel]) -> list[Any]:
    """Answers of the API as the values that JSON has."""
    return [model.model_dump(mode="json") for model in models]
