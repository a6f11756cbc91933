"""The verbs about what jobs leave and what it takes: artifacts, usage."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from service.api.artifact_schemas import RemovedView
from service.cli.output import JobArgument, Json, err, out, print_json, to_json
from service.client import Client

app = typer.Typer()


@app.command()
def artifacts(
    job: JobArgument,
    delete: Annotated[
        str | None, typer.Option("--delete", metavar="NAME", help="Delete this export, as the cluster does")
    ] = None,
    as_json: Json = False,
) -> None:
    """What a job has left beside its checkpoints: exports, post-mortems, logs, plan, code; sizes, and when each goes."""
    if delete is not None:
        gone = Client().remove_export(
            job, delete, waiting=lambda text: err.print(f"slotline: {text} …", markup=False)
        )
        show_removed(gone, as_json=as_json)
        return
    found = Client().artifacts(job)
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    table = Table()
    for title in ("kind", "name", "size", "made", "goes", "place"):
        table.add_column(title, overflow="fold")
    for one in found.items:
        table.add_row(
            one.kind,
            escape(one.name),
            "" if one.size_bytes is None else size_text(one.size_bytes),
            "" if one.made_at is None else one.made_at.isoformat(timespec="seconds"),
            "" if one.expires_at is None else one.expires_at.date().isoformat(),
            escape(one.place),
        )
    out.print(table if found.items else "nothing")
    if found.stored_bytes is not None:
        out.print(f"checkpoints and exports take {size_text(found.stored_bytes)}", highlight=False)
    for note in found.notes:
        err.print(f"slotline: note: {note}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def usage(
    owner: Annotated[str | None, typer.Option(help="Only this principal's")] = None, as_json: Json = False
) -> None:
    """How much there is of whom: checkpoints and exports, kept plans, uploaded code."""
    found = Client().usage(owner=owner)
    if as_json:
        print_json(to_json(found))
        return
    table = Table()
    for title in ("owner", "jobs", "checkpoints, exports", "plans", "code", "all"):
        table.add_column(title, justify="left" if title == "owner" else "right")
    for one in found:
        sizes = (one.storage_bytes, one.plan_bytes, one.package_bytes, one.total_bytes)
        table.add_row(escape(one.owner) or "(nobody)", str(one.jobs), *map(size_text, sizes))
    out.print(table)


def show_removed(found: RemovedView, *, as_json: bool) -> None:
    """What was deleted."""
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    what = ", ".join(found.removed) or "nothing was there"
    left = ", ".join(map(str, found.left)) or "none"
    out.print(
        f"deleted: {what}, {size_text(found.freed_bytes)}; whole checkpoints left: {left}", highlight=False
    )


def size_text(size: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
