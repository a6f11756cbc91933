"""`slotline secret`: values for the environment of one's jobs that nothing shows again."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from service.cli.output import CliError, Json, checked, print_json, to_json
from service.client import Client
from service.job_environment import VARIABLE_PATTERN

VariableName = Annotated[
    str,
    typer.Argument(
        callback=checked(VARIABLE_PATTERN, "a name of a variable"),
        help="The variable that jobs will find it in",
    ),
]
app = typer.Typer(help="Secrets of one's own, which a job names in `secrets`.", no_args_is_help=True)


@app.command("set")
def set_secret(name: VariableName, as_json: Json = False) -> None:
    """Keep a secret; asks for it, or reads standard input: an argument would stay in the shell's history."""
    stream = typer.get_text_stream("stdin")
    if stream.isatty():
        value = typer.prompt(f"{name}", hide_input=True, err=True)
    else:
        value = stream.read().removesuffix("\n").removesuffix("\r")
    if not value:
        raise CliError(f"no value for {name} came in: type it, or pipe it into the command")
    Client().set_secret(name, value)
    print(json.dumps({"set": name}) if as_json else f"set {name}")


@app.command("list")
def list_secrets(as_json: Json = False) -> None:
    """Names of the secrets, and when each was set."""
    found = Client().secrets()
    if as_json:
        print_json(to_json(found))
        return
    for secret in found:
        print(secret.name, secret.set_at.isoformat(timespec="seconds"))


@app.command("remove")
def remove_secret(name: VariableName, as_json: Json = False) -> None:
    """Forget a secret: jobs that name it end at their next attempt."""
    Client().remove_secret(name)
    print(json.dumps({"removed": name}) if as_json else f"removed {name}")
