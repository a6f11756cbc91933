"""The `slotline` command: assembles the subcommands, prints errors, and answers shell completion.

Exit code 0 only on success; messages for people on standard error, results on standard output. Importing it must
stay cheap: commands import the scheduler, uvicorn, numpy and torch inside their functions.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from importlib.metadata import version
from typing import Annotated

import typer
from rich.markup import escape
from typer.completion import completion_init, get_completion_script

from service.cli import admin, artifacts, demo, jobs, plan, serve, top, verify, why
from service.cli.output import CliError, err
from service.client.client import ClientError

PROGRAM = "slotline"
_COMPLETE_VARIABLE = "_SLOTLINE_COMPLETE"
completion_app = typer.Typer()


class Shell(StrEnum):
    """Shells that have a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@completion_app.command()
def completion(shell: Shell) -> None:
    """Print the script that makes this shell complete: eval "$(slotline completion bash)" in ~/.bashrc, say."""
    print(get_completion_script(prog_name=PROGRAM, complete_var=_COMPLETE_VARIABLE, shell=shell))


def handle_shell_completion() -> None:
    """Answer a Tab key: the completion script calls the command with a variable set."""
    if _COMPLETE_VARIABLE in os.environ:
        completion_init()


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
def root_options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end"),
    ] = False,
) -> None:
    """Train models too deep for one accelerator, and see where every millisecond went."""


for _commands in (
    serve.app,
    demo.app,
    jobs.app,
    top.app,
    why.app,
    artifacts.app,
    admin.app,
    plan.app,
    verify.app,
    completion_app,
):
    app.add_typer(_commands)
app.add_typer(admin.tokens_app, name="token")
app.add_typer(admin.tokens_app, name="tokens", hidden=True)
app.add_typer(admin.secrets_app, name="secret")
app.add_typer(plan.plans_app, name="plans")


def main() -> None:
    """Run the command, print its errors, and end with its exit code."""
    handle_shell_completion()
    try:
        app()
    except BrokenPipeError:  # `slotline logs JOB | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (CliError, ClientError) as error:
        err.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
