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
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from service.cli.output import (
    CliError,
    JobArgument,
    JsonOption,
    models_to_json,
    out,
    print_json,
    print_message,
)
from service.client.client import Client
from service.schemas.artifacts import RemovedView
from service.schemas.jobs import CheckpointFile, ExportView
from service.spec.job import stored_field
from worker.contract.tasks import (
    EXPORT_REQUEST_VARIABLE,
    ExportFailedError,
    ExportRequest,
    read_export_result,
)

app = typer.Typer()


@app.command()
def artifacts(
    job: JobArgument,
    delete: Annotated[
        str | None, typer.Option("--delete", metavar="NAME", help="Delete this export, as the cluster does")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What a job has left beside its checkpoints: exports, post-mortems, logs, plan, code; sizes, and when each goes."""
    if delete is not None:
        gone = Client().remove_export(job, delete, waiting=lambda text: print_message(f"{text} …"))
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
        print_message(f"note: {note}")


@app.command()
def usage(
    owner: Annotated[str | None, typer.Option(help="Only this principal's")] = None,
    as_json: JsonOption = False,
) -> None:
    """How much there is of whom: checkpoints and exports, kept plans, uploaded code."""
    found = Client().usage(owner=owner)
    if as_json:
        print_json(models_to_json(found))
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


ExportFormat = Literal["safetensors", "dcp"]


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
    """A job's checkpoints, newest first: step, time, size, for how long training stood still and it was written, whether
    it is whole or being written, which is best and latest. Or delete one, as the cluster does."""
    if delete is not None:
        gone = Client().remove_checkpoint(job, delete, waiting=lambda text: print_message(f"{text} …"))
        show_removed(gone, as_json=as_json)
        return
    found = Client().checkpoints(job, sums=sums)
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    out.print(_checkpoints_table(found.items) if found.items else "no checkpoints")
    out.print(found.uri, markup=False, highlight=False, soft_wrap=True)
    for one in found.items:
        if one.damage is not None:
            print_message(one.damage)


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
    form: Annotated[
        ExportFormat,
        typer.Option(
            "--format", help="Weights, or all of the checkpoint as torch.distributed.checkpoint has it"
        ),
    ] = "safetensors",
    merged: Annotated[
        bool,
        typer.Option(
            "--merged", help="Of a model of peft: the whole model, with the adapters in its weights"
        ),
    ] = False,
    limit_s: Annotated[
        float, typer.Option("--limit-s", min=1.0, help="So long it may take, in seconds")
    ] = 3600.0,
    as_json: JsonOption = False,
) -> None:
    """A job's weights as safetensors with the model's own names, and its config.json, for from_pretrained; of a model
    of peft the adapters, for PeftModel.from_pretrained.

    Without -o a process of the cluster writes them beside the checkpoints; with -o this machine reads these itself.
    """
    client = Client()
    if output is None:
        found = client.export(
            job,
            step=step,
            format=form,
            merged=merged,
            limit_s=limit_s,
            waiting=lambda text: print_message(f"{text} …"),
        )
    else:
        found = _export_locally(client.job(job).spec, job, output, step, form, merged, limit_s)
    for note in found.notes:
        print_message(f"note: {note}")
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    size = sum(one.bytes for one in found.files)
    out.print(
        f"{found.tensors} tensors after step {found.step}, {len(found.files)} files of {_decimal_size_text(size)}: {found.uri}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _export_locally(
    spec: dict[str, Any],
    job: str,
    output: Path,
    step: int | None,
    form: str,
    merged: bool,
    limit_s: float,
) -> ExportView:
    """Export with a worker's own code, in a process of its own."""
    uri = stored_field(spec, "checkpoint", "uri", "")
    if not uri:
        raise CliError(f"job {job} saves no checkpoints: submit it with checkpoint: {{uri: /shared/place}}")
    request = ExportRequest(uri, job, step, str(output.expanduser().resolve()), form, merged)
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


def _checkpoints_table(items: list[CheckpointFile]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)  # in 80 columns
    for title in ("step", "saved", "size", "blocked", "writing", "state", "checked", "loss", ""):
        table.add_column(title, no_wrap=bool(title), overflow="fold")
    for one in items:
        marks = [name for name, holds in (("latest", one.latest), ("best", one.best)) if holds]
        marks += ["kept"] if "every" in one.kept else []  # by checkpoint.keep_every
        saved = "" if one.saved_at is None else one.saved_at.astimezone().strftime("%m-%d %H:%M")
        loss = "" if one.loss is None else f"{one.loss:.4g}"
        took = ["" if found is None else f"{found:.2g} s" for found in (one.blocking_s, one.writing_s)]
        table.add_row(
            str(one.step),
            saved,
            _decimal_size_text(one.size_bytes),
            *took,
            one.state,
            one.checked,
            loss,
            ", ".join(marks),
        )
    return table


def _decimal_size_text(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
