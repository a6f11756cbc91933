"""`slotline why` and `slotline postmortem`: explain a slow step, and download what a failed attempt left.

Prints causes, changes that would shorten the step, and measured beside planned time of meshes and links. The
analysis itself is the server's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from service.cli.output import (
    CliError,
    JobArgument,
    JsonOption,
    ProfiledStepOption,
    borderless_table,
    out,
    print_json,
)
from service.client.client import Client
from service.schemas.activity import MeshShareView, WhySide, WhyView

app = typer.Typer()


@app.command()
def why(
    job: JobArgument,
    step: ProfiledStepOption = None,
    as_json: JsonOption = False,
) -> None:
    """Causes of a step's length, and the changes that would shorten it most."""
    view = Client().why(job, step)
    if as_json:
        print_json(view.model_dump(mode="json"))
        return
    where = "the plan" if view.step is None else f"step {view.step}"
    out.print(f"[bold]{view.job_id}, {where} of attempt {view.attempt}[/bold]")
    out.print(escape(view.verdict), soft_wrap=True)
    if view.calibrated is not None and view.measured is not None:
        out.print(
            f"makespan: first plan {_milliseconds(view.planned.makespan_s)}, calibrated "
            f"{_milliseconds(view.calibrated.makespan_s)}, measured {_milliseconds(view.measured.makespan_s)}",
            soft_wrap=True,
        )
    for table in (_causes_table(view), _changes_table(view), _meshes_table(view), _links_table(view)):
        if table.rows:
            out.print(table)
    for note in view.notes:
        out.print(f"note: {escape(note)}", soft_wrap=True)
    if view.left_out:
        out.print(f"no time was left to try: {', '.join(view.left_out)}", soft_wrap=True)


@app.command()
def postmortem(
    job: JobArgument,
    attempt: Annotated[int | None, typer.Option(min=1, help="The last one that failed if absent")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write it here; JOB-postmortem.zip if absent")
    ] = None,
) -> None:
    """The zip file that a failed attempt left: job, plan, programs, slots, waits, log, events, versions."""
    content = Client().postmortem(job, attempt)
    file = output or Path(f"{job}-postmortem.zip")
    try:
        file.write_bytes(content)
    except OSError as error:
        raise CliError(f"cannot write {file}: {error.strerror}") from None
    out.print(f"{file}: {len(content)} bytes; begin with its README.txt", soft_wrap=True)


def _new_table(title: str, *columns: str, numbers: int = 0) -> Table:
    """The last `numbers` columns are numbers."""
    table = borderless_table(title=title, title_justify="left")
    for at, column in enumerate(columns):
        table.add_column(column, justify="right" if at >= len(columns) - numbers else "left", overflow="fold")
    return table


def _causes_table(view: WhyView) -> Table:
    table = _new_table("What is to blame", "cause", "where", "costs", "why")
    for cause in view.causes:
        table.add_row(
            cause.kind, escape(cause.subject), _time_and_percent(cause.cost_s, view), escape(cause.message)
        )
    return table


def _changes_table(view: WhyView) -> Table:
    table = _new_table("What would shorten the step", "change", "where", "gain", "step then", "how")
    for change in view.changes:
        gain, then = _time_and_percent(change.gain_s, view), _milliseconds(change.step_s)
        table.add_row(change.kind, escape(change.subject), gain, then, escape(change.message))
    return table


def _meshes_table(view: WhyView) -> Table:
    """Seconds of each mesh, measured (planned): computing, and idle by reason."""
    sides = [side for side in (view.planned, view.measured) if side is not None]
    reasons = sorted({reason for side in sides for mesh in side.meshes for reason in mesh.idle_s})
    table = _new_table(_side_title("Meshes", view), "mesh", "computes", *reasons, numbers=1 + len(reasons))
    for planned in view.planned.meshes:
        ran = _mesh_share(view.measured, planned.mesh)
        cells = [_measured_and_planned(None if ran is None else ran.compute_s, planned.compute_s)]
        for reason in reasons:
            after = None if ran is None else ran.idle_s.get(reason, 0.0)
            cells.append(_measured_and_planned(after, planned.idle_s.get(reason, 0.0)))
        table.add_row(planned.mesh, *cells)
    return table


def _links_table(view: WhyView) -> Table:
    table = _new_table(
        _side_title("Links", view), "link", "transfers", "carries", "keeps meshes waiting", numbers=3
    )
    measured = {} if view.measured is None else {(x.source, x.target): x for x in view.measured.links}
    for planned in view.planned.links:
        ran = measured.get((planned.source, planned.target))
        table.add_row(
            f"{planned.source} -> {planned.target}",
            str(planned.transfers),
            _measured_and_planned(None if ran is None else ran.transfer_s, planned.transfer_s),
            _measured_and_planned(None if ran is None else ran.exposed_s, planned.exposed_s),
        )
    return table


def _side_title(what: str, view: WhyView) -> str:
    return f"{what}, {'planned' if view.measured is None else 'measured (planned)'}"


def _mesh_share(side: WhySide | None, name: str) -> MeshShareView | None:
    return next((mesh for mesh in side.meshes if mesh.mesh == name), None) if side else None


def _time_and_percent(seconds: float, view: WhyView) -> str:
    share = f"{100 * seconds / view.step_s:.0f} %" if view.step_s > 0 else ""
    return f"{_milliseconds(seconds)} {share}"


def _measured_and_planned(measured: float | None, planned: float) -> str:
    return (
        _milliseconds(planned)
        if measured is None
        else f"{_milliseconds(measured)} ({_milliseconds(planned)})"
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
