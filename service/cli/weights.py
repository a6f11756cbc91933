"""The verbs about what a job has saved: checkpoints, export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.table import Table

from service.api.schemas import CheckpointFile, ExportView
from service.cli.artifacts import show_removed
from service.cli.output import CliError, JobArgument, Json, err, out, print_json
from service.client import Client
from service.jobspec import stored
from worker.weights.request import REQUEST_VARIABLE, ExportFailedError, ExportRequest, read_answer

app = typer.Typer()
Format = Literal["safetensors", "dcp"]


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
    as_json: Json = False,
) -> None:
    """A job's checkpoints, newest first: step, time, size, for how long training stood still and it was written, whether
    it is whole or being written, which is best and latest. Or delete one, as the cluster does."""
    if delete is not None:
        gone = Client().remove_checkpoint(job, delete, waiting=lambda text: _say(f"{text} …"))
        show_removed(gone, as_json=as_json)
        return
    found = Client().checkpoints(job, sums=sums)
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    out.print(_table(found.items) if found.items else "no checkpoints")
    out.print(found.uri, markup=False, highlight=False, soft_wrap=True)
    for one in found.items:
        if one.damage is not None:
            err.print(f"slotline: {one.damage}", markup=False, highlight=False, soft_wrap=True)


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
        Format,
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
    as_json: Json = False,
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
            waiting=lambda text: _say(f"{text} …"),
        )
    else:
        found = _export_here(client.job(job).spec, job, output, step, form, merged, limit_s)
    for note in found.notes:
        _say(f"note: {note}")
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    size = sum(one.bytes for one in found.files)
    out.print(
        f"{found.tensors} tensors after step {found.step}, {len(found.files)} files of {_size(size)}: {found.uri}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _export_here(
    spec: dict[str, Any],
    job: str,
    output: Path,
    step: int | None,
    form: str,
    merged: bool,
    limit_s: float,
) -> ExportView:
    """Export with a worker's own code, in a process of its own."""
    uri = stored(spec, "checkpoint", "uri", "")
    if not uri:
        raise CliError(f"job {job} saves no checkpoints: submit it with checkpoint: {{uri: /shared/place}}")
    request = ExportRequest(uri, job, step, str(output.expanduser().resolve()), form, merged)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "worker.weights"],
            input=request.to_json(),
            stdout=subprocess.PIPE,
            text=True,
            timeout=limit_s,
            env={name: value for name, value in os.environ.items() if name != REQUEST_VARIABLE},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CliError(
            f"writing the weights took more than {limit_s:g} s and was ended: raise --limit-s"
        ) from None
    try:
        answer = read_answer(done.stdout)
    except ExportFailedError as error:
        raise CliError(
            f"{error}; if this machine does not see that place, leave out -o: the cluster writes them beside the "
            "checkpoints"
        ) from None
    if answer is None:
        raise CliError(f"writing the weights ended without a result (exit code {done.returncode})")
    return ExportView.model_validate(json.loads(json.dumps(answer)))


def _table(items: list[CheckpointFile]) -> Table:
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
            str(one.step), saved, _size(one.size_bytes), *took, one.state, one.checked, loss, ", ".join(marks)
        )
    return table


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def _say(text: str) -> None:
    err.print(f"slotline: {text}", markup=False, highlight=False, soft_wrap=True)
