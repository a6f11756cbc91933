"""`slotline quota`: what a queue may hold, for operators."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from service.cli.output import CliError, Json, checked, print_json
from service.client import Client
from service.jobspec import NAME_PATTERN

app = typer.Typer()


@app.command()
def quota(
    queue: Annotated[
        str, typer.Argument(callback=checked(NAME_PATTERN, "a queue's name"), help="A configured queue")
    ],
    accelerators: Annotated[
        str, typer.Argument(help="How many its jobs may hold together; none: no quota; configured: as it was")
    ],
    as_json: Json = False,
) -> None:
    """Set how many accelerators the running jobs of a queue may hold together; what runs already goes on."""
    with Client() as client:
        if accelerators == "configured":
            found = client.reset_quota(queue)
        elif accelerators == "none" or re.fullmatch(r"\d{1,9}", accelerators):
            found = client.set_quota(queue, None if accelerators == "none" else int(accelerators))
        else:
            raise CliError(f"{accelerators!r} is no quota: give a whole number, none, or configured")
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    shown = "no quota" if found.quota is None else f"a quota of {found.quota} accelerators"
    print(f"queue {found.name} has {shown}")
