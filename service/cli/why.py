"""The verbs that explain: why a step is slow (what is to blame, what would help, where every lane's time went), and
what a failed attempt left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from service.api.why_schemas import MeshShareView, WhySide, WhyView
from service.cli.output import CliError, JobArgument, Json, ProfiledStep, out, print_json
from service.client import Client

app = typer.Typer()


@app.command()
def why(
    job: JobArgument,
    step: ProfiledStep = None,
    as_json: Json = False,
) -> None:
    """Why a step takes as long as it does, and which changes would shorten it most."""
    found = Client().why(job, step)
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    where = "the plan" if found.step is None else f"step {found.step}"
    out.print(f"[bold]{found.job_id}, {where} of attempt {found.attempt}[/bold]")
    out.print(escape(found.verdict), soft_wrap=True)
    for table in (_causes(found), _changes(found), _meshes(found), _links(found)):
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


def _table(title: str, *columns: str, numbers: int = 0) -> Table:
    """The last `numbers` columns are numbers."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for at, column in enumerate(columns):
        table.add_column(column, justify="right" if at >= len(columns) - numbers else "left", overflow="fold")
    return table


def _causes(found: WhyView) -> Table:
    table = _table("What is to blame", "cause", "where", "costs", "why")
    for cause in found.causes:
        table.add_row(cause.kind, escape(cause.subject), _share(cause.cost_s, found), escape(cause.message))
    return table


def _changes(found: WhyView) -> Table:
    table = _table("What would shorten the step", "change", "where", "gain", "step then", "how")
    for change in found.changes:
        gain, then = _share(change.gain_s, found), _ms(change.step_s)
        table.add_row(change.kind, escape(change.subject), gain, then, escape(change.message))
    return table


def _meshes(found: WhyView) -> Table:
    """Seconds of each mesh, measured (planned): computing, and idle by reason."""
    sides = [side for side in (found.planned, found.measured) if side is not None]
    reasons = sorted({reason for side in sides for mesh in side.meshes for reason in mesh.idle_s})
    table = _table(_title("Meshes", found), "mesh", "computes", *reasons, numbers=1 + len(reasons))
    for planned in found.planned.meshes:
        ran = _mesh(found.measured, planned.mesh)
        cells = [_both(None if ran is None else ran.compute_s, planned.compute_s)]
        for reason in reasons:
            after = None if ran is None else ran.idle_s.get(reason, 0.0)
            cells.append(_both(after, planned.idle_s.get(reason, 0.0)))
        table.add_row(planned.mesh, *cells)
    return table


def _links(found: WhyView) -> Table:
    table = _table(_title("Links", found), "link", "transfers", "carries", "keeps meshes waiting", numbers=3)
    measured = {} if found.measured is None else {(x.source, x.target): x for x in found.measured.links}
    for planned in found.planned.links:
        ran = measured.get((planned.source, planned.target))
        table.add_row(
            f"{planned.source} -> {planned.target}",
            str(planned.transfers),
            _both(None if ran is None else ran.transfer_s, planned.transfer_s),
            _both(None if ran is None else ran.exposed_s, planned.exposed_s),
        )
    return table


def _title(what: str, found: WhyView) -> str:
    return f"{what}, {'planned' if found.measured is None else 'measured (planned)'}"


def _mesh(side: WhySide | None, name: str) -> MeshShareView | None:
    return next((mesh for mesh in side.meshes if mesh.mesh == name), None) if side else None


def _share(seconds: float, found: WhyView) -> str:
    share = f"{100 * seconds / found.step_s:.0f} %" if found.step_s > 0 else ""
    return f"{_ms(seconds)} {share}"


def _both(measured: float | None, planned: float) -> str:
    return _ms(planned) if measured is None else f"{_ms(measured)} ({_ms(planned)})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
