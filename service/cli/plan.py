"""`slotline plan`: a spec file in, a plan out; needs no server. A job file in, the plan of its training out."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.job_file import read_spec
from service.cli.job_plan import is_job, plan_job_file, with_schedule
from service.cli.output import BudgetSeconds, CliError, OutputFile
from service.cli.plans import KeptName

if TYPE_CHECKING:
    from service.scheduler import PipelineSpec


# By how much a search may pass its budget: a share of it, but some seconds at least.
_LATE_SHARE = 0.2
_LATE_S = 2.0
_NO_SPEC = "holds no pipeline spec: write an object with meshes, stages and edges, or a job with a model"

app = typer.Typer()


@app.command()
def plan(
    spec: Annotated[
        Path, typer.Argument(help="PipelineSpec, or a job, as JSON or YAML; - reads standard input.")
    ],
    output: OutputFile = None,
    schedule: Annotated[str | None, typer.Option(help="Use this schedule instead of the spec's.")] = None,
    orders: Annotated[
        Path | None,
        typer.Option(help="Compute orders as torch's action CSV, one row a mesh; plans schedule csv."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help="json, csv, table, events, chrome, svg or text (default: text, or json with -o)."),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Compare all schedules on this spec.")] = False,
    budget_s: BudgetSeconds = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Measure a job on this machine, also where a server answers.")
    ] = False,
    name: KeptName = None,
) -> None:
    """Plan one training step: timeline, memory and programs of every mesh.

    A job (a file with a model) is planned on what a server knows of it, or has one worker measure; without a server
    it is measured here. Nothing is trained.
    """
    try:
        data, form = read_spec(spec, _NO_SPEC), _format(format, as_json, output)
        if is_job(data):
            if compare or orders is not None:
                raise ValueError(
                    "--compare and --orders are for pipeline specs, and this is a job: leave them out"
                )
            text = plan_job_file(
                with_schedule(data, schedule), spec, format=form, budget_s=budget_s, local=local, name=name
            )
        elif name is not None:
            raise ValueError("--name keeps the plan of a job, and this is a pipeline spec: leave it out")
        elif compare:
            text = _compare(_read_spec(data, schedule, orders), form, budget_s)
        else:
            text = _plan(_read_spec(data, schedule, orders), form, budget_s)
        if output is not None:
            output.write_text(text)
    except OSError as error:
        raise CliError(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None
    except ValueError as error:
        raise CliError(str(error)) from None
    if output is None:
        typer.echo(text, nl=False)


def _format(format: str | None, as_json: bool, output: Path | None) -> str:
    if as_json:
        if format not in (None, "json"):
            raise ValueError(f"--json and --format {format} contradict each other: give one of them")
        return "json"
    return format or ("text" if output is None else "json")


def _plan(spec: PipelineSpec, format: str, budget_s: float) -> str:
    # the scheduler takes a second to import: only this command pays for it
    from service.scheduler import make_plan
    from service.scheduler.planner import compile_kernels
    from service.scheduler.views.render import FORMATS, render

    if format not in FORMATS:
        raise ValueError(f"format {format!r} does not exist: use one of {', '.join(FORMATS)}")
    compile_kernels()  # the first plan on a machine would else spend all of its time on that
    # the budget counts work; on a machine slower than the one it was calibrated on, the clock ends the search
    latest = time.monotonic() + budget_s + max(_LATE_SHARE * budget_s, _LATE_S)
    plan = make_plan(spec, budget_s=budget_s, expired=lambda: time.monotonic() > latest)
    for note in plan.notes:
        typer.echo(f"slotline: {note}", err=True)
    return render(spec, plan, format)


def _compare(spec: PipelineSpec, format: str, budget_s: float) -> str:
    from service.scheduler.compare import compare, comparison_text

    if format not in ("text", "json"):
        raise ValueError(f"--compare prints text or json, not {format}: leave --format out")
    rows = compare(spec, budget_s=budget_s)
    if format == "json":
        return json.dumps([row.to_json() for row in rows], indent=1) + "\n"
    return comparison_text(rows)


def _read_spec(data: dict[str, Any], schedule: str | None, orders: Path | None) -> PipelineSpec:
    from service.scheduler import load_spec
    from service.scheduler.schedules.csv_orders import orders_from_csv

    if schedule is not None:
        data = {**data, "schedule": schedule}
    spec = load_spec(data)
    if orders is None:
        return spec
    if schedule not in (None, "csv"):
        raise ValueError(f"--orders and --schedule {schedule} contradict each other: give one of them")
    return spec.model_copy(update={"schedule": "csv", "orders": orders_from_csv(spec, orders.read_text())})
