"""`slotline plan`, `plans` and `reshard`: plan without training: a pipeline spec, a job, a tensor's way between layouts.

A pipeline spec and a resharding are planned in this process. A job is planned by a server where one answers, else on this
machine (service.cli.local.plan). The scheduler, the client and the models of a job take longer to import than many a plan,
and are therefore imported inside functions. The search budget counts work; a wall clock ends a search that passes it by far.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from service.cli.job_file import read_spec
from service.cli.output import (
    BudgetOption,
    CliError,
    Completions,
    JsonOption,
    OutputFileOption,
    complete_from,
    models_to_json,
    out,
    pattern_callback,
    print_json,
    print_message,
    print_waiting,
)
from service.spec.names import NAME_PATTERN

if TYPE_CHECKING:
    from service.client.client import Client
    from service.scheduler.problem.spec import PipelineSpec
    from service.schemas.plans import ForecastView, JobPlanPreview

# A search may pass its budget by a share of it, but by some seconds at least.
_SEARCH_GRACE_SHARE = 0.2
_MIN_SEARCH_GRACE_S = 2.0
_RESHARDING_FORMATS = ("text", "json", "svg")
_METHODS = {
    "whole": "recomputed",
    "selective": "recomputed but for products",
    "by_block": "recomputed by block",
}
_NO_SPEC_MESSAGE = (
    "holds no pipeline spec: write an object with meshes, stages and edges, or a job with a model"
)


def _own_plan_completions(client: Client) -> Completions:
    owner = client.whoami().name
    plans = client.saved_plans(owner=owner or None)
    return [(plan.name, f"of {plan.job_name}") for plan in plans if plan.owner == owner]


_check_plan_name = pattern_callback(NAME_PATTERN, "a plan's name")
_complete_plan_name = complete_from(_own_plan_completions)
PlanNameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        callback=_check_plan_name,
        help="A saved plan's name",
        autocompletion=_complete_plan_name,
    ),
]
SavedPlanOption = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="NAME",
        callback=_check_plan_name,
        help="Train with exactly this plan, which `slotline plan job.yaml --name NAME` saved",
        autocompletion=_complete_plan_name,
    ),
]
SavePlanAsOption = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        callback=_check_plan_name,
        help="Save the plan of a job on the server, for `slotline submit --plan NAME`",
    ),
]
PlanOwnerOption = Annotated[str | None, typer.Option(help="The plan's owner; you if absent")]

app = typer.Typer()


@app.command()
def plan(
    spec: Annotated[
        Path, typer.Argument(help="PipelineSpec, or a job, as JSON or YAML; - reads standard input.")
    ],
    output: OutputFileOption = None,
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
    budget_s: BudgetOption = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Measure a job on this machine, also where a server answers.")
    ] = False,
    name: SavePlanAsOption = None,
) -> None:
    """Plan one training step: timeline, memory and programs of every mesh.

    A job (a file with a model) is planned by a server, from costs that it knows or has one worker measure; without a
    server it is measured on this machine. Nothing is trained.
    """
    try:
        data, form = read_spec(spec, _NO_SPEC_MESSAGE), _output_format(format, as_json, output)
        if is_job(data):
            if compare or orders is not None:
                raise ValueError(
                    "--compare and --orders are for pipeline specs, and this is a job: leave them out"
                )
            text = plan_job_file(
                with_schedule(data, schedule), spec, format=form, budget_s=budget_s, local=local, name=name
            )
        elif name is not None:
            raise ValueError("--name saves the plan of a job, and this is a pipeline spec: leave it out")
        elif compare:
            text = _compare_schedules(_load_pipeline_spec(data, schedule, orders), form, budget_s)
        else:
            text = _plan_pipeline_spec(_load_pipeline_spec(data, schedule, orders), form, budget_s)
        if output is not None:
            output.write_text(text)
    except OSError as error:
        raise CliError(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None
    except ValueError as error:
        raise CliError(str(error)) from None
    if output is None:
        typer.echo(text, nl=False)


def _output_format(format: str | None, as_json: bool, output: Path | None) -> str:
    if as_json:
        if format not in (None, "json"):
            raise ValueError(f"--json and --format {format} contradict each other: give one of them")
        return "json"
    return format or ("text" if output is None else "json")


def _plan_pipeline_spec(spec: PipelineSpec, format: str, budget_s: float) -> str:
    from service.scheduler.planner import compile_kernels, make_plan
    from service.scheduler.schedules.registry import AUTO
    from service.scheduler.views.render import FORMATS, render

    if format not in FORMATS:
        raise ValueError(f"format {format!r} does not exist: use one of {', '.join(FORMATS)}")
    latest = (
        math.inf
    )  # a named schedule's search is a second of work at most: it needs no clock, and only its own kernels
    if spec.schedule == AUTO:
        compile_kernels()  # the first plan on a machine would else spend all of its time on that
        # the budget counts work; on a machine slower than the one it was calibrated on, the clock ends the search
        latest = time.monotonic() + budget_s + max(_SEARCH_GRACE_SHARE * budget_s, _MIN_SEARCH_GRACE_S)
    plan = make_plan(spec, budget_s=budget_s, expired=lambda: time.monotonic() > latest)
    for note in plan.notes:
        print_message(note)
    return render(spec, plan, format)


def _compare_schedules(spec: PipelineSpec, format: str, budget_s: float) -> str:
    from service.scheduler.compare import compare_schedules, comparison_text

    if format not in ("text", "json"):
        raise ValueError(f"--compare prints text or json, not {format}: leave --format out")
    rows = compare_schedules(spec, budget_s=budget_s)
    if format == "json":
        return json.dumps([row.to_json() for row in rows], indent=1) + "\n"
    return comparison_text(rows)


def _load_pipeline_spec(data: dict[str, Any], schedule: str | None, orders: Path | None) -> PipelineSpec:
    from service.scheduler.problem.spec_checks import load_spec
    from service.scheduler.schedules.csv import orders_from_csv

    if schedule is not None:
        data = {**data, "schedule": schedule}
    spec = load_spec(data)
    if orders is None:
        return spec
    if schedule not in (None, "csv"):
        raise ValueError(f"--orders and --schedule {schedule} contradict each other: give one of them")
    return spec.model_copy(update={"schedule": "csv", "orders": orders_from_csv(spec, orders.read_text())})


def is_job(data: Mapping[str, Any]) -> bool:
    """True for a job, false for a PipelineSpec: jobs have a model, specs lists of meshes and stages."""
    return "model" in data and not isinstance(data.get("stages"), list)


def with_schedule(data: dict[str, Any], schedule: str | None) -> dict[str, Any]:
    """The job with `schedule` in place of its own, where one is given."""
    pipeline = data.get("pipeline", {})
    if schedule is None or not isinstance(pipeline, dict):
        return data
    return {**data, "pipeline": {**pipeline, "schedule": schedule}}


def plan_job_file(
    data: dict[str, Any], file: Path, *, format: str, budget_s: float, local: bool, name: str | None = None
) -> str:
    """The plan of the job `data`, which was read from `file`, as text; with a `name` the server saves it.

    `format`: "text" is a table for people, "json" everything; the other formats show the schedule.
    """
    if local and name is not None:
        raise ValueError("--name saves the plan on a server, and --local asks none: leave out one")
    from service.client.client import Client

    with Client() as client:
        by_server = not local and (name is not None or "SLOTLINE_URL" in os.environ or client.ready())
        if by_server:
            preview = client.plan_job(
                client.upload_code(data, file.parent),
                budget_s=budget_s,
                name=name,
                waiting=print_waiting,
            )
        else:
            print_message("no server is asked: the job is measured on this machine")
            preview = _plan_job_locally(data, file, budget_s)
    for note in (*preview.notes, *preview.planning_notes):
        print_message(f"note: {note}")
    return _render_job_plan(preview, format)


def _plan_job_locally(data: dict[str, Any], file: Path, budget_s: float) -> JobPlanPreview:
    """Measure the job by a worker's profiler on this machine, unless its costs are cached; then plan."""
    from service.cli.local.plan import local_job_costs, plan_from_costs, validated_job
    from service.schemas.plans import JobPlanPreview

    spec, folder = validated_job(data, file)
    costs = local_job_costs(spec, folder)
    return JobPlanPreview(
        **plan_from_costs(spec, costs, budget_s), measured_by="one worker", notes=costs["notes"]
    )


def _render_job_plan(preview: JobPlanPreview, format: str) -> str:
    if format == "json":
        return json.dumps(preview.model_dump(mode="json"), indent=1) + "\n"
    from service.scheduler.problem.spec import PipelineSpec
    from service.scheduler.programs.plan import Plan
    from service.scheduler.views.render import FORMATS, render

    if format not in FORMATS:
        raise ValueError(f"format {format!r} does not exist: use one of {', '.join(FORMATS)}")
    if format == "text":
        return job_plan_text(preview)
    return render(PipelineSpec.model_validate(preview.spec), Plan.model_validate(preview.plan), format)


def job_plan_text(preview: JobPlanPreview) -> str:
    """The chosen plan and its costs: lines, a table of stages, a table of meshes."""
    from service.scheduler.why.measured import duration_text
    from worker.contract.planned import recompute_method

    spec, plan = preview.spec, preview.plan
    updates = {update.mesh: update for update in preview.update}
    limits = {mesh["name"]: mesh.get("memory_bytes") for mesh in spec["meshes"]}
    proven = "proven optimal" if plan["proven_optimal"] else f"bound {plan['lower_bound_s']:.4g} s"
    lines = [
        f"step       {preview.step_s:.4g} s expected: makespan {plan['makespan_s']:.4g} s, "
        f"then REDUCE and STEP {preview.update_s:.4g} s",
        f"schedule   {plan['chosen']} ({proven}), bubble {plan['bubble_ratio']:.1%}",
        f"chosen     {spec['microbatches']} microbatches, {len(spec['stages'])} stages on {len(spec['meshes'])} meshes",
        f"measured   by {'the workers of an attempt' if preview.measured_by == 'gang' else 'one worker'}",
        *_forecast_lines(preview.forecast),
        "",
    ]
    rows = [("stage", "mesh", "begins at", "forward", "backward", "")]
    recomputes = {
        stage["name"]: _METHODS[recompute_method(stage)]
        for stage in plan.get("stages", ())
        if stage["recomputed"]
    }
    for stage, begin in zip(spec["stages"], preview.begins, strict=True):
        backward_s = stage["backward_input_s"] + stage["backward_weight_s"]
        rows.append(
            (
                stage["name"],
                stage["mesh"],
                begin,
                duration_text(stage["forward_s"]),
                duration_text(backward_s),
                recomputes.get(stage["name"], ""),
            )
        )
    lines += [*_aligned_columns(rows), ""]
    rows = [("mesh", "memory", "of", "compute", "REDUCE", "STEP")]
    for mesh in plan["meshes"]:
        update = updates.get(mesh["name"])
        rows.append(
            (
                mesh["name"],
                _mebibytes(mesh["peak_memory_bytes"]),
                _mebibytes(limits[mesh["name"]]),
                duration_text(mesh["compute_s"]),
                duration_text(update.reduce_s) if update else "",
                duration_text(update.step_s) if update else "",
            )
        )
    return "\n".join([*lines, *_aligned_columns(rows)]) + "\n"


def _forecast_lines(forecast: ForecastView | None) -> list[str]:
    if forecast is None:
        return []
    from service.scheduler.why.measured import duration_text

    step, peak = forecast.step_s, forecast.peak_bytes
    memory = (
        ""
        if peak is None
        else f", a worker's memory {_mebibytes(int(peak.low))} to {_mebibytes(int(peak.high))}"
    )
    return [
        f"likely     {duration_text(step.low)} to {duration_text(step.high)} a step, about {duration_text(step.middle)}"
        f"{memory}: nine of ten times, after {forecast.runs} runs of {forecast.of}"
    ]


def _aligned_columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _mebibytes(size: int | None) -> str:
    return "no limit" if size is None else f"{size / (1 << 20):,.1f} MiB"


plans_app = typer.Typer(help="Saved plans, for `slotline submit --plan`.", no_args_is_help=True)


@plans_app.command("list")
def list_plans(
    owner: Annotated[str | None, typer.Option(help="Only this principal's plans")] = None,
    as_json: JsonOption = False,
) -> None:
    """Saved plans: the job that each was made for, its size, and its last day."""
    from service.client.client import Client

    plans = list(Client().saved_plans(owner=owner))
    if as_json:
        print_json(models_to_json(plans))
        return
    table = Table()
    for title in ("name", "owner", "job", "meshes", "stages", "microbatches", "schedule", "step", "until"):
        table.add_column(title)
    for plan in plans:
        table.add_row(
            plan.name,
            escape(plan.owner),
            plan.job_name,
            "+".join(map(str, plan.workers)),
            str(len(plan.begins)),
            str(plan.microbatches),
            plan.schedule,
            f"{plan.step_s:.4g} s",
            "for ever" if plan.expires_at is None else plan.expires_at.date().isoformat(),
        )
    out.print(table if plans else "no saved plans")


@plans_app.command()
def show(name: PlanNameArgument, owner: PlanOwnerOption = None, as_json: JsonOption = False) -> None:
    """A saved plan: cut, memory, expected step; --json is all of it, with the job that it was made for."""
    from service.client.client import Client

    saved = Client().saved_plan(name, owner=owner)
    if as_json:
        print_json(saved.model_dump(mode="json"))
        return
    print(job_plan_text(saved.plan), end="")


@plans_app.command()
def remove(name: PlanNameArgument, owner: PlanOwnerOption = None, as_json: JsonOption = False) -> None:
    """Delete a saved plan; jobs that were submitted with it keep it."""
    from service.client.client import Client

    Client().remove_plan(name, owner=owner)
    print(json.dumps({"removed": name}) if as_json else f"removed {name}")


@app.command()
def reshard(
    spec: Annotated[
        Path,
        typer.Argument(help="tensor, source, target and links, as JSON or YAML; - reads standard input."),
    ],
    output: OutputFileOption = None,
    format: Annotated[
        str | None,
        typer.Option(help="text, json or svg (default: text, or svg with -o FILE.svg, else json)."),
    ] = None,
    as_json: JsonOption = False,
    messages: Annotated[
        int, typer.Option(min=1, help="Number of messages at most, into which tiles are cut.")
    ] = 1024,
) -> None:
    """Plan how a tensor goes from one mesh's layout to another's: sender, receiver, tile and time of every message.

    Prints the plan's makespan, a lower bound that no plan can beat, what naive transfers take, and a picture.
    """
    data = read_spec(spec, "holds no resharding: give tensor, source and target as service/README.md shows")
    try:
        form = _resharding_format(format, as_json, output)
        text = _plan_resharding(data, form, messages)
        if output is not None:
            output.write_text(text)
    except OSError as error:
        raise CliError(f"cannot write {output}: {error.strerror}") from None
    except ValueError as error:
        raise CliError(str(error)) from None
    if output is None:
        typer.echo(text, nl=False)


def _resharding_format(format: str | None, as_json: bool, output: Path | None) -> str:
    if format is None and not as_json and output is not None and output.suffix == ".svg":
        return "svg"
    form = _output_format(format, as_json, output)
    if form not in _RESHARDING_FORMATS:
        raise ValueError(f"format {form!r} does not exist: use one of {', '.join(_RESHARDING_FORMATS)}")
    return form


def _plan_resharding(data: dict, form: str, messages: int) -> str:
    from service.scheduler.resharding.resharding import (
        plan_gather_then_send,
        plan_resharding,
        plan_send_and_receive,
    )
    from service.scheduler.resharding.resharding_spec import load_resharding
    from service.scheduler.views.resharding_views import resharding_summary, resharding_svg

    spec = load_resharding(data)
    values = (spec.tensor, spec.source, spec.target, spec.links)
    plan = plan_resharding(*values, messages=messages)
    if form == "svg":
        return resharding_svg(plan)
    if form == "json":
        return json.dumps(plan.to_json(), indent=1) + "\n"
    return resharding_summary(plan, [plan_send_and_receive(*values), plan_gather_then_send(*values)])
