"""The verbs about people: who I am, who did what."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli.output import Json, print_json, to_json
from service.client import Client

app = typer.Typer()


@app.command()
def whoami(as_json: Json = False) -> None:
    """The name and the role of the token in SLOTLINE_API_TOKEN."""
    me = Client().whoami()
    if as_json:
        print_json(me.model_dump(mode="json"))
    else:
        print(f"{me.name or 'nobody is asked for a name'}: {me.role}")


@app.command()
def audit(
    principal: Annotated[str | None, typer.Option(help="Only what this principal did")] = None,
    subject: Annotated[str | None, typer.Option(help="Only what was done to this job, or token")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest")] = 100,
    as_json: Json = False,
) -> None:
    """Who did what, newest first; for admins."""
    found = list(Client().audit(principal=principal, subject=subject, limit=limit))
    if as_json:
        print_json(to_json(found))
        return
    for entry in found:
        print(
            entry.at.isoformat(timespec="seconds"),
            entry.principal or "-",
            entry.action,
            entry.subject,
            entry.detail,
        )
