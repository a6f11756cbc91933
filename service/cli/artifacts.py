"""Commands for stored output of jobs: checkpoints, export, artifacts, usage.

`export` without -o has the cluster write the weights beside the checkpoints; with -o it runs the worker's export in
a subprocess of this machine. The command itself imports no torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from service.cli.extras import require_extras
from service.cli.output import (
    CliError,
    JobArgument,
    JsonOption,
    models_to_json,
    out,
    print_json,
    print_message,
    print_waiting,
)
from service.client.client import Client
from service.schemas.artifacts import CheckpointFile, ExportView, RemovedView
from service.spec.job import stored_field
from worker.contract.tasks import (
    EXPORT_REQUEST_VARIABLE,
    ExportFailedError,
    ExportRequest,
    read_export_result,
)

app = typer.Typer()


@app.command()
def checkpoints(
    job: JobArgument,
    sums: Annotated[
        bool, typer.Option("--sums", help="Read them and compare checksums, not sizes only")
    ] = False,
    delete: Annotated[
        int | None,
        typer.Option("--delete", metavar="STEP", min=0, help="Delete the checkpoint after this step"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """A job's checkpoints, newest first, or with --delete one deletion by the cluster.

    Step, time, size, seconds for which training stood still and in which it was written, state (whole, damaged, being
    written), latest and best.
    """
    if delete is not None:
        removed = Client().remove_checkpoint(job, delete, waiting=print_waiting)
        show_removed(removed, as_json=as_json)
        return
    checkpoints = Client().checkpoints(job, sums=sums)
    if as_json:
        print_json(checkpoints.model_dump(mode="json"))
        return
    out.print(_checkpoints_table(checkpoints.items) if checkpoints.items else "no checkpoints")
    out.print(checkpoints.uri, markup=False, highlight=False, soft_wrap=True)
    for checkpoint in checkpoints.items:
        if checkpoint.damage is not None:
            print_message(checkpoint.damage)


def _checkpoints_table(items: list[CheckpointFile]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)  # in 80 columns
    for title in ("step", "saved", "size", "blocked", "writing", "state", "checked", "loss", ""):
        table.add_column(title, no_wrap=bool(title), overflow="fold")
    for item in items:
        marks = [name for name, holds in (("latest", item.latest), ("best", item.best)) if holds]
        marks += ["kept"] if "every" in item.kept else []  # by checkpoint.keep_every
        saved = "" if item.saved_at is None else item.saved_at.astimezone().strftime("%m-%d %H:%M")
        loss = "" if item.loss is None else f"{item.loss:.4g}"
        times = ["" if time_s is None else f"{time_s:.2g} s" for time_s in (item.blocking_s, item.writing_s)]
        table.add_row(
            str(item.step),
            saved,
            _decimal_size_text(item.size_bytes),
            *times,
            item.state,
            item.checked,
            loss,
            ", ".join(marks),
        )
    return table


@app.command()
def export(
    job: JobArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Write into this folder, from this machine; else the cluster writes"
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="After this step; else the newest whole one")
    ] = None,
    limit_s: Annotated[float, typer.Option("--limit-s", min=1.0, help="Limit in seconds")] = 3600.0,
    as_json: JsonOption = False,
) -> None:
    """A job's weights as safetensors with the model's own names, and its config.json, for from_pretrained.

    Of a peft model the adapters, for PeftModel.from_pretrained.

    Without -o a process of the cluster writes them beside the checkpoints; with -o this machine reads these itself.
    """
    client = Client()
    if output is None:
        exported = client.export(
            job,
            step=step,
            limit_s=limit_s,
            waiting=print_waiting,
        )
    else:
        exported = _export_locally(client.job(job).spec, job, output, step, limit_s)
    for note in exported.notes:
        print_message(f"note: {note}")
    if as_json:
        print_json(exported.model_dump(mode="json"))
        return
    size = _decimal_size_text(sum(file.bytes for file in exported.files))
    out.print(
        f"{exported.tensors} tensors after step {exported.step}, {len(exported.files)} files of {size}: {exported.uri}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _export_locally(
    spec: dict[str, Any],
    job: str,
    output: Path,
    step: int | None,
    limit_s: float,
) -> ExportView:
    """Export on this machine, by the worker's export in a subprocess."""
    require_extras(
        "worker", otherwise=", or leave out -o: the cluster writes the weights beside the checkpoints"
    )
    uri = stored_field(spec, "checkpoint", "uri", "")
    if not uri:
        raise CliError(f"job {job} saves no checkpoints: submit it with checkpoint: {{uri: /shared/place}}")
    request = ExportRequest(uri, job, step, str(output.expanduser().resolve()))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "worker.tasks", "export"],
            input=request.to_json(),
            stdout=subprocess.PIPE,
            text=True,
            timeout=limit_s,
            env={name: value for name, value in os.environ.items() if name != EXPORT_REQUEST_VARIABLE},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CliError(
            f"writing the weights took more than {limit_s:g} s and was ended: raise --limit-s"
        ) from None
    try:
        answer = read_export_result(done.stdout)
    except ExportFailedError as error:
        raise CliError(
            f"{error}; if this machine does not see that place, leave out -o: the cluster writes them beside the "
            "checkpoints"
        ) from None
    if answer is None:
        raise CliError(f"writing the weights ended without a result (exit code {done.returncode})")
    return ExportView.model_validate(json.loads(json.dumps(answer)))


@app.command()
def artifacts(
    job: JobArgument,
    delete: Annotated[
        str | None, typer.Option("--delete", metavar="NAME", help="Delete this export, as the cluster does")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Stored output of a job beside its checkpoints: exports, post-mortems, logs, plan, code; sizes, and their last day."""
    if delete is not None:
        removed = Client().remove_export(job, delete, waiting=print_waiting)
        show_removed(removed, as_json=as_json)
        return
    stored = Client().artifacts(job)
    if as_json:
        print_json(stored.model_dump(mode="json"))
        return
    table = Table()
    for title in ("kind", "name", "size", "made", "goes", "place"):
        table.add_column(title, overflow="fold")
    for item in stored.items:
        table.add_row(
            item.kind,
            escape(item.name),
            "" if item.size_bytes is None else size_text(item.size_bytes),
            "" if item.made_at is None else item.made_at.isoformat(timespec="seconds"),
            "" if item.expires_at is None else item.expires_at.date().isoformat(),
            escape(item.place),
        )
    out.print(table if stored.items else "nothing")
    if stored.stored_bytes is not None:
        out.print(f"checkpoints and exports take {size_text(stored.stored_bytes)}", highlight=False)
    for note in stored.notes:
        print_message(f"note: {note}")


@app.command()
def usage(
    owner: Annotated[str | None, typer.Option(help="Only this principal's")] = None,
    as_json: JsonOption = False,
) -> None:
    """Stored bytes of each owner: checkpoints and exports, saved plans, uploaded code."""
    owners = Client().usage(owner=owner)
    if as_json:
        print_json(models_to_json(owners))
        return
    table = Table()
    for title in ("owner", "jobs", "checkpoints, exports", "plans", "code", "all"):
        table.add_column(title, justify="left" if title == "owner" else "right")
    for entry in owners:
        sizes = (entry.storage_bytes, entry.plan_bytes, entry.package_bytes, entry.total_bytes)
        table.add_row(escape(entry.owner) or "(nobody)", str(entry.jobs), *map(size_text, sizes))
    out.print(table)


def show_removed(result: RemovedView, *, as_json: bool) -> None:
    """Print the names of what was deleted, the freed bytes, and the steps of the whole checkpoints that are left."""
    if as_json:
        print_json(result.model_dump(mode="json"))
        return
    names = ", ".join(result.removed) or "nothing was there"
    left = ", ".join(map(str, result.left)) or "none"
    size = size_text(result.freed_bytes)
    out.print(f"deleted: {names}, {size}; whole checkpoints left: {left}", highlight=False)


def size_text(size: float) -> str:
    """A size in bytes with a binary unit: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _decimal_size_text(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
