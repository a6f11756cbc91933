"""The `slotline` command: assembles the subcommands, prints errors, and answers shell completion.

Exit code 0 only on success; messages for people on standard error, results on standard output. Importing it must
stay cheap: commands import the scheduler, uvicorn, numpy and torch inside their functions.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from enum import StrEnum
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.completion import completion_init, get_completion_script
from typer.core import TyperGroup
from typer.main import get_group

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


VERBS_OF = {
    "serve": ("serve", "migrate", "backup", "restore"),
    "demo": ("demo",),
    "jobs": (
        *("submit", "cancel", "retry", "change", "jobs", "job", "diff"),
        *("events", "logs", "evaluations", "timeline"),
    ),
    "top": ("top",),
    "nodes": ("nodes",),
    "why": ("why", "postmortem"),
    "artifacts": ("checkpoints", "export", "artifacts", "usage"),
    "admin": ("notifications", "login", "logout", "whoami", "audit", "quota"),
    "plan": ("plan", "reshard"),
    "local.check": ("init", "check", "schema"),
    "local.verify": ("verify",),
    "main": ("completion",),
}
"""The modules of service/cli in the order of their verbs in --help; each is imported when one of its verbs is used."""
_MODULE_OF = {verb: module for module, verbs in VERBS_OF.items() for verb in verbs}
_GROUPS = {
    "token": ("admin", "tokens_app"),
    "tokens": ("admin", "tokens_app"),
    "secret": ("admin", "secrets_app"),
    "project": ("admin", "projects_app"),
    "plans": ("plan", "plans_app"),
    "node": ("nodes", "node_app"),
}
"""Verbs with verbs of their own, by module and application."""
_HIDDEN = ("tokens",)


class LazyVerbs(TyperGroup):
    """Verbs whose modules are imported when they are asked for: most need a tenth of what all need together."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.commands = dict.fromkeys(
            (*_MODULE_OF, *_GROUPS)
        )  # the names that a typing error is compared with

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _GROUPS:
            module, name = _GROUPS[cmd_name]
            command = get_group(getattr(importlib.import_module(f"service.cli.{module}"), name))
            command.name, command.hidden = cmd_name, cmd_name in _HIDDEN
            return command
        if cmd_name not in _MODULE_OF:
            return None
        module = _MODULE_OF[cmd_name]
        verbs = completion_app if module == "main" else importlib.import_module(f"service.cli.{module}").app
        return get_group(verbs).commands[cmd_name]


app = typer.Typer(
    cls=LazyVerbs,
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


_WHOLE_BODY = re.compile(r"(^|; )body: ")
"""What the server calls the field of an error that several fields make together: a file has no such field."""


def main() -> None:
    """Run the command, print its errors, and end with its exit code."""
    handle_shell_completion()
    try:
        app()
    except BrokenPipeError:  # `slotline logs JOB | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        from service.cli.extras import missing_package_error
        from service.cli.output import CliError, err
        from service.client.client import ClientError

        if isinstance(error, ModuleNotFoundError):
            error = missing_package_error(error) or error
        if not isinstance(error, CliError | ClientError):
            raise error
        from rich.markup import escape

        message = _WHOLE_BODY.sub(r"\1", str(error))
        err.print(f"[red]error:[/red] {escape(message)}", highlight=False, soft_wrap=True)
        sys.exit(1)
