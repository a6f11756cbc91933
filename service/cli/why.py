"""`slotline why` and `slotline postmortem`: explain a slow step, and download what a failed attempt left.

Prints causes, changes that would shorten the step, and measured beside planned time of meshes and links. The
analysis itself is the server's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from service.cli.output import CliError, JobArgument, JsonOption, ProfiledStepOption, out, print_json
from service.client.client import Client
from service.schemas.plans import MeshShareView, WhySide, WhyView

app = typer.Typer()


@app.command()
def why(
    job: JobArgument,
    step: ProfiledStepOption = None,
    as_json: JsonOption = False,
) -> None:
    """Why a step takes as long as it does, and which changes would shorten it most."""
    found = Client().why(job, step)
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    where = "the plan" if found.step is None else f"step {found.step}"
    out.print(f"[bold]{found.job_id}, {where} of attempt {found.attempt}[/bold]")
    out.print(escape(found.verdict), soft_wrap=True)
    for table in (_causes_table(found), _changes_table(found), _meshes_table(found), _links_table(found)):
        if table.rows:
            out.print(table)
    for note in found.notes:
        out.print(f"note: {escape(note)}", soft_wrap=True)
    if found.left_out:
        out.print(f"no time was left to try: {', '.join(found.left_out)}", soft_wrap=True)


@app.command()
def postmortem(
    job: JobArgument,
    attempt: Annotated[int | None, typer.Option(min=1, help="The last one that failed if absent")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write it here; JOB-postmortem.zip if absent")
    ] = None,
) -> None:
    """What a failed attempt left, as a zip file: job, plan, programs, slots, waits, log, events, versions."""
    content = Client().postmortem(job, attempt)
    file = output or Path(f"{job}-postmortem.zip")
    try:
        file.write_bytes(content)
    except OSError as error:
        raise CliError(f"cannot write {file}: {error.strerror}") from None
    out.print(f"{file}: {len(content)} bytes; begin with its README.txt", soft_wrap=True)


def _new_table(title: str, *columns: str, numbers: int = 0) -> Table:
    """The last `numbers` columns are numbers."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for at, column in enumerate(columns):
        table.add_column(column, justify="right" if at >= len(columns) - numbers else "left", overflow="fold")
    return table


def _causes_table(found: WhyView) -> Table:
    table = _new_table("What is to blame", "cause", "where", "costs", "why")
    for cause in found.causes:
        table.add_row(
            cause.kind, escape(cause.subject), _time_and_percent(cause.cost_s, found), escape(cause.message)
        )
    return table


def _changes_table(found: WhyView) -> Table:
    table = _new_table("What would shorten the step", "change", "where", "gain", "step then", "how")
    for change in found.changes:
        gain, then = _time_and_percent(change.gain_s, found), _milliseconds(change.step_s)
        table.add_row(change.kind, escape(change.subject), gain, then, escape(change.message))
    return table


def _meshes_table(found: WhyView) -> Table:
    """Seconds of each mesh, measured (planned): computing, and idle by reason."""
    sides = [side for side in (found.planned, found.measured) if side is not None]
    reasons = sorted({reason for side in sides for mesh in side.meshes for reason in mesh.idle_s})
    table = _new_table(_side_title("Meshes", found), "mesh", "computes", *reasons, numbers=1 + len(reasons))
    for planned in found.planned.meshes:
        ran = _mesh_share(found.measured, planned.mesh)
        cells = [_measured_and_planned(None if ran is None else ran.compute_s, planned.compute_s)]
        for reason in reasons:
            after = None if ran is None else ran.idle_s.get(reason, 0.0)
            cells.append(_measured_and_planned(after, planned.idle_s.get(reason, 0.0)))
        table.add_row(planned.mesh, *cells)
    return table


def _links_table(found: WhyView) -> Table:
    table = _new_table(
        _side_title("Links", found), "link", "transfers", "carries", "keeps meshes waiting", numbers=3
    )
    measured = {} if found.measured is None else {(x.source, x.target): x for x in found.measured.links}
    for planned in found.planned.links:
        ran = measured.get((planned.source, planned.target))
        table.add_row(
            f"{planned.source} -> {planned.target}",
            str(planned.transfers),
            _measured_and_planned(None if ran is None else ran.transfer_s, planned.transfer_s),
            _measured_and_planned(None if ran is None else ran.exposed_s, planned.exposed_s),
        )
    return table


def _side_title(what: str, found: WhyView) -> str:
    return f"{what}, {'planned' if found.measured is None else 'measured (planned)'}"


def _mesh_share(side: WhySide | None, name: str) -> MeshShareView | None:
    return next((mesh for mesh in side.meshes if mesh.mesh == name), None) if side else None


def _time_and_percent(seconds: float, found: WhyView) -> str:
    share = f"{100 * seconds / found.step_s:.0f} %" if found.step_s > 0 else ""
    return f"{_milliseconds(seconds)} {share}"


def _measured_and_planned(measured: float | None, planned: float) -> str:
    return (
        _milliseconds(planned)
        if measured is None
        else f"{_milliseconds(measured)} ({_milliseconds(planned)})"
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
