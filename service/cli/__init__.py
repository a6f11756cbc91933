"""The `slotline` command: every verb is a short function; the work is elsewhere.

Exit code 0 only on success; messages for people on standard error, results on standard output.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.markup import escape

from service.cli import (
    artifacts,
    completion,
    demo,
    migrate,
    notifications,
    people,
    plan,
    plans,
    quota,
    reshard,
    secrets,
    serve,
    submit,
    tokens,
    top,
    verify,
    watch,
    weights,
    why,
)
from service.cli.output import CliError, err
from service.client import ClientError

app = typer.Typer(
    name="slotline",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"slotline {version('slotline')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end"),
    ] = False,
) -> None:
    """Train models too deep for one accelerator, and see where every millisecond went."""


for verbs in (
    serve,
    demo,
    submit,
    watch,
    top,
    why,
    weights,
    artifacts,
    notifications,
    quota,
    plan,
    verify,
    reshard,
    migrate,
    completion,
):
    app.add_typer(verbs.app)
app.add_typer(tokens.app, name="token")
app.add_typer(tokens.app, name="tokens", hidden=True)
app.add_typer(people.app)
app.add_typer(secrets.app, name="secret")
app.add_typer(plans.app, name="plans")


def main() -> None:
    """Entry point of the command."""
    completion.answer_shells()
    try:
        app()
    except BrokenPipeError:  # `slotline logs JOB | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (CliError, ClientError) as error:
        err.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
