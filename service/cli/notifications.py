"""`slotline notifications`: who was told of a job's states."""

from __future__ import annotations

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from service.cli.output import JobArgument, Json, out, print_json, to_json
from service.client import Client

app = typer.Typer()


@app.command()
def notifications(job: JobArgument, as_json: Json = False) -> None:
    """Who was told of the job's states, how often that was tried, and what the receivers answered."""
    found = list(Client().notifications(job))
    if as_json:
        print_json(to_json(found))
        return
    if not found:
        out.print("no notifications")
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("told", "to", "how", "tries", "last answer", "next"):
        table.add_column(title, overflow="fold")
    for one in found:
        clock = "" if one.next_at is None else one.next_at.astimezone().strftime("%H:%M:%S")
        answer = one.error or ("" if one.status is None else str(one.status))
        table.add_row(one.job_state, escape(one.url), one.state, str(one.tries), escape(answer), clock)
    out.print(table)
