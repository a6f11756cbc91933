"""Commands on jobs: submit, cancel, retry, change, jobs, job, diff, events, logs, evaluations, timeline.

Results go to standard output (JSON with --json), messages for people to standard error.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from textwrap import shorten
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from service.cli.job_file import job_file_text, read_spec, spec_differences, with_changes
from service.cli.local.check import with_steps
from service.cli.output import (
    ChangesOption,
    CliError,
    JobArgument,
    JsonOption,
    ProfiledStepOption,
    borderless_table,
    err,
    models_to_json,
    out,
    pattern_callback,
    print_json,
    print_message,
)
from service.cli.plan import SavedPlanOption
from service.client.client import Client, ClientError
from service.schemas.activity import EvaluationView, TimelineSide, TimelineView
from service.schemas.jobs import JobSummary, JobView
from service.settings.clusters import DEFAULT_CLUSTER
from service.spec.job import IDEMPOTENCY_KEY_PATTERN
from service.spec.principals import DEFAULT_PROJECT
from service.spec.short_forms import file_form
from service.spec.states import JobState

_STATE_COLOURS = {"SUCCEEDED": "green", "FAILED": "red", "RUNNING": "cyan", "CANCELLED": "yellow"}
_PROGRESS_EVERY_S = 1.0
_NARROW = 140
"""Columns of a terminal below which a table of jobs has no room for reasons."""
_WITH_PROGRESS = 96
"""Columns from which it has room for percents and the time left."""
_WHY_WIDTH = 30
_WHY_LENGTH = 120
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends")]
app = typer.Typer()


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="The job as YAML or JSON; - reads standard input")],
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Wait for the end and show events; exit code 0 only on success"),
    ] = False,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="As --wait, with the lines of the log and a progress bar"),
    ] = False,
    key: Annotated[
        str | None,
        typer.Option(
            callback=pattern_callback(IDEMPOTENCY_KEY_PATTERN, "a key"),
            help="Idempotency key: the same key submits only once",
        ),
    ] = None,
    plan: SavedPlanOption = None,
    project: Annotated[str | None, typer.Option(help="The project whose members see it")] = None,
    changes: ChangesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit a job. A folder in code.working_dir is uploaded."""
    client = Client()
    spec = with_changes(read_spec(file), changes or ())
    named = {"plan": plan, "project": project}
    spec |= {field: name for field, name in named.items() if name is not None}
    try:
        spec = with_steps(spec, file)
    except (ValueError, OSError) as error:
        raise CliError(str(error)) from None
    job = client.submit(client.upload_code(spec, file.parent), idempotency_key=key)
    if wait or follow:  # after Ctrl-C the job trains on, and its user needs the id
        print_message(f"waiting for {job.id}, {client.url}/jobs/{job.id}")
        job = _followed(client, job.id, logs=follow and not as_json)
    show_job(job, client.url, as_json=as_json)
    if wait or follow:
        _fail_unless_succeeded(job)


def _followed(client: Client, job_id: str, *, logs: bool) -> JobView:
    """The job once it has ended. Meanwhile the lines of its log go to standard output, or else its events to standard
    error; a terminal has a progress bar below them."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        disable=not err.is_terminal,
        redirect_stdout=out.is_terminal,
        transient=True,
    )
    ended = threading.Event()
    with bar:
        shown = threading.Thread(target=_show_progress, args=(bar, job_id, ended), daemon=True)
        if err.is_terminal:
            shown.start()
        try:
            if logs:
                for line in client.logs(job_id, follow=True):
                    print(line.text, flush=True)
            else:
                for event in client.events(job_id, follow=True):
                    print_message(f"{event.kind}: {event.message}")
            return client.wait(job_id)
        finally:
            ended.set()


def _show_progress(bar: Progress, job_id: str, ended: threading.Event) -> None:
    task = bar.add_task("", total=None)
    with Client() as client:
        while not ended.wait(_PROGRESS_EVERY_S):
            with contextlib.suppress(ClientError):  # a server that is away comes back, or ends the command
                job = client.job(job_id)
                what = job.state if job.progress.loss is None else f"loss {job.progress.loss:.4g}"
                bar.update(task, completed=job.progress.step, total=job.progress.steps, description=what)


@app.command()
def cancel(job: JobArgument, as_json: JsonOption = False) -> None:
    """End a job."""
    client = Client()
    show_job(client.cancel(job), client.url, as_json=as_json)


@app.command()
def retry(job: JobArgument, as_json: JsonOption = False) -> None:
    """Queue a failed or cancelled job again, from its last checkpoint."""
    client = Client()
    show_job(client.retry(job), client.url, as_json=as_json)


@app.command()
def change(
    job: JobArgument,
    queue: Annotated[str | None, typer.Option(help="Wait in this queue")] = None,
    priority: Annotated[int | None, typer.Option(help="Wait with this priority; higher comes first")] = None,
    meshes: Annotated[
        str | None,
        typer.Option(help="Train with so many meshes (3), or with as many as are free (2-4)", metavar="N"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Move a job that waits to another queue or priority, or give any that has not ended other meshes."""
    if queue is None and priority is None and meshes is None:
        raise CliError("nothing would change: give --queue, --priority or --meshes")
    client = Client()
    changed = client.change(job, queue=queue, priority=priority, meshes=_read_meshes(meshes))
    show_job(changed, client.url, as_json=as_json)


def _read_meshes(text: str | None) -> int | tuple[int, int] | None:
    if text is None:
        return None
    if (given := re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text)) is None:
        raise CliError(f"--meshes {text!r} is no number of meshes: write 3, or 2-4 for as many as are free")
    return (int(given[1]), int(given[2])) if given[2] else int(given[1])


@app.command("jobs")
def list_jobs(
    state: Annotated[
        list[JobState] | None,
        typer.Option(case_sensitive=False, help="Only jobs in this state; several: in one of them"),
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Only jobs of this queue")] = None,
    owner: Annotated[str | None, typer.Option(help="Only jobs that this principal submitted")] = None,
    name: Annotated[str | None, typer.Option(help="Only jobs of this name")] = None,
    project: Annotated[str | None, typer.Option(help="Only jobs of this project")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="Only jobs with this label, name=value or name; several: with all"),
    ] = None,
    since: Annotated[
        float | None, typer.Option(min=0, help="Submitted within this number of minutes")
    ] = None,
    until: Annotated[
        float | None, typer.Option(min=0, help="Submitted more than this number of minutes ago")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of jobs at most")] = 50,
    as_json: JsonOption = False,
) -> None:
    """List jobs, newest first."""
    labels = dict(map(_parse_label, label or ()))
    matches = Client().jobs(
        state=state,
        queue=queue,
        owner=owner,
        name=name,
        project=project,
        labels=labels,
        since=_minutes_ago(since),
        until=_minutes_ago(until),
        limit=limit,
    )
    jobs = list(matches)
    if as_json:
        print_json(models_to_json(jobs))
    else:
        out.print(jobs_table(jobs) if jobs else "no jobs")


@app.command("job")
def read_job(
    job: JobArgument,
    spec: Annotated[
        bool, typer.Option("--spec", help="Print the job file that submits the same again")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """State, reason, attempts and progress of a job."""
    client = Client()
    if spec:
        stored = client.job(job).spec
        print_json(file_form(stored)) if as_json else print(job_file_text(stored), end="")
        return
    show_job(client.job(job), client.url, as_json=as_json)


@app.command()
def diff(first: JobArgument, second: JobArgument, as_json: JsonOption = False) -> None:
    """The fields in which the specifications of two jobs differ."""
    client = Client()
    found = spec_differences(client.job(first).spec, client.job(second).spec)
    if as_json:
        print_json({path: {first: before, second: after} for path, before, after in found})
        return
    table = borderless_table()
    for title in ("field", first, second):
        table.add_column(title, overflow="fold")
    for path, before, after in found:
        table.add_row(path, *("" if value is None else escape(value) for value in (before, after)))
    out.print(table if found else "no field differs")


@app.command()
def events(job: JobArgument, follow: FollowOption = False, as_json: JsonOption = False) -> None:
    """The job's event log; --json prints one event a line."""
    for event in Client().events(job, follow=follow):
        if as_json:
            print(json.dumps(event.model_dump(mode="json")), flush=True)
        else:
            clock = event.at.astimezone().strftime("%H:%M:%S")
            out.print(
                f"{clock} {event.kind:10} {event.message}", highlight=False, markup=False, soft_wrap=True
            )


@app.command()
def logs(
    job: JobArgument,
    follow: FollowOption = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="Only this attempt")] = None,
    tail: Annotated[
        int | None, typer.Option(min=1, max=5000, help="Number of lines at most, the last ones")
    ] = None,
    since: Annotated[
        float | None, typer.Option(min=0, help="Only lines of this number of minutes before now")
    ] = None,
    search: Annotated[str | None, typer.Option(help="Only lines with this text, in any case")] = None,
    as_json: JsonOption = False,
) -> None:
    """The logs of the job's drivers; --json prints one line as one object."""
    lines = Client().logs(
        job, attempt=attempt, follow=follow, tail=tail, since=_minutes_ago(since), search=search
    )
    for line in lines:
        print(json.dumps(line.model_dump(mode="json")) if as_json else line.text, flush=True)


@app.command()
def evaluations(job: JobArgument, as_json: JsonOption = False) -> None:
    """Loss and metrics of the job's evaluations; --json prints one evaluation a line."""
    results = list(Client().evaluations(job))
    if as_json:
        for evaluation in results:
            print(json.dumps(evaluation.model_dump(mode="json")))
    else:
        out.print(evaluations_table(results) if results else "no evaluations")


@app.command()
def timeline(
    job: JobArgument,
    step: ProfiledStepOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write a Chrome trace here, or a picture (FILE.svg)")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Planned and measured time of a step: a short table, or with -o a trace for Perfetto or a picture."""
    client = Client()
    view = client.timeline(job, step)
    drawn = output is not None and output.suffix == ".svg"
    if output is not None:
        content = view.svg().encode() if drawn else client.chrome_trace(job, view.step)
        try:
            output.write_bytes(content)
        except OSError as error:
            raise CliError(f"cannot write {output}: {error.strerror}") from None
    if as_json:
        print_json(view.model_dump(mode="json"))
        return
    out.print(timeline_table(view))
    written = f"picture: {output}" if drawn else f"trace: {output} (open it in Perfetto)"
    where = written if output else f"{client.url}/jobs/{job}"
    out.print(where, soft_wrap=True)


def show_job(job: JobView, url: str, *, as_json: bool) -> None:
    """Print a job of the server at `url`: its state, its attempts, the address of its page."""
    if as_json:
        print_json(job.model_dump(mode="json"))
        return
    out.print(_job_line(job), soft_wrap=True)
    for attempt in job.attempts:
        reason = f" {attempt.reason}: {attempt.message}" if attempt.reason else ""
        where = "" if attempt.cluster == DEFAULT_CLUSTER else f" on {attempt.cluster}"
        out.print(f"  attempt {attempt.number} {attempt.state}{where}{reason}", soft_wrap=True, markup=False)
    if (share := job.effective_training_ratio) is not None:
        out.print(f"  {share:.0%} of the time since its first attempt began went into steps that count")
    if (best := job.best_checkpoint) is not None:
        line = f"  best checkpoint: {best.metric} {best.value:.4g} after step {best.step}, {best.uri}"
        out.print(line, soft_wrap=True, markup=False)
    out.print(f"  {url}/jobs/{job.id}", soft_wrap=True)


def _job_line(job: JobView) -> str:
    why = ": ".join(part for part in (job.reason, job.message) if part)
    done = job.progress
    loss = "" if done.left_s is None else f", {_duration(done.left_s)} left"
    loss += "" if done.loss is None else f", loss {done.loss:.4g}"
    loss += "".join(f", {name} {value:.4g}" for name, value in done.metrics.items() if value is not None)
    owner = f" of {escape(job.owner)}" if job.owner else ""
    line = (
        f"{job.id} {job.name}{owner} {state_text(job)} step {done.step}/{done.steps} ({done.percent} %){loss}"
    )
    return f"{line}  {escape(why)}" if why else line


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def state_text(job: JobSummary) -> str:
    """The job's state in its colour."""
    return f"[{_state_colour(job)}]{job.state}[/]"


def _state_colour(job: JobSummary) -> str:
    return _STATE_COLOURS.get(job.state, "default")


def jobs_table(jobs: Sequence[JobSummary]) -> RenderableType:
    """One row a job. Narrow terminals fold names and queues, and have the reasons below, whose words stand whole."""
    narrow, progress = out.width < _NARROW, out.width >= _WITH_PROGRESS
    projects = any(job.project != DEFAULT_PROJECT for job in jobs)
    titles = ("job", "name", *(("project",) if projects else ()), "queue", "state", "step")
    titles += (*(("done", "left") if progress else ()), "loss")
    table = borderless_table(collapse_padding=True)
    for title in titles:
        whole = title in ("job", "state", "step", "done", "left", "loss")
        width = {"name": 14, "queue": 8, "project": 8}.get(title) if narrow else None
        table.add_column(title, overflow="fold", no_wrap=whole, max_width=width)
    reasons = Table.grid(padding=(0, 1, 0, 0))
    reasons.add_column(no_wrap=True)
    reasons.add_column()
    if not narrow:
        table.add_column("why", min_width=_WHY_WIDTH)
    for job in jobs:
        done = job.progress
        why = escape(shorten(job.message or job.reason or "", _WHY_LENGTH, placeholder=" …"))
        table.add_row(
            job.id,
            job.name,
            *([job.project] if projects else []),
            job.queue,
            state_text(job),
            f"{done.step}/{done.steps}",
            *(
                []
                if not progress
                else [f"{done.percent} %", "" if done.left_s is None else _duration(done.left_s)]
            ),
            "" if done.loss is None else f"{done.loss:.4g}",
            *([] if narrow else [why]),
        )
        if narrow and why:
            reasons.add_row(job.id, why)
    return Group(table, reasons) if reasons.row_count else table


def evaluations_table(evaluations: Sequence[EvaluationView]) -> Table:
    """A row for each evaluation, a column for each metric."""
    names = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics))
    table = borderless_table()
    for title in ("step", "loss", *map(escape, names), "samples", "seconds"):
        table.add_column(title, justify="right")
    for evaluation in evaluations:
        numbers = [evaluation.loss, *(evaluation.metrics.get(name) for name in names)]
        cells = ["" if number is None else f"{number:.4g}" for number in numbers]
        seconds = "" if evaluation.evaluation_s is None else f"{evaluation.evaluation_s:.2f}"
        table.add_row(str(evaluation.step), *cells, str(evaluation.samples), seconds)
    return table


def timeline_table(view: TimelineView) -> Table:
    """One row for the plan and one for the measurement, where there are both."""
    table = Table(title=f"{view.job_id}, step {view.step}")
    for title in ("", "makespan", "slots", "compute"):
        table.add_column(title, justify="left" if not title else "right")
    for name, side in (("planned", view.planned), ("measured", view.measured)):
        if side is not None:
            table.add_row(name, *_timeline_cells(side))
    return table


def _timeline_cells(side: TimelineSide) -> tuple[str, str, str]:
    compute = sum(slot.end_s - slot.start_s for slot in side.slots if slot.lane == "compute")
    return f"{1e3 * side.makespan_s:.2f} ms", str(len(side.slots)), f"{1e3 * compute:.2f} ms"


def _fail_unless_succeeded(job: JobView) -> None:
    if job.state is not JobState.SUCCEEDED:
        raise CliError(f"job {job.id} {job.state}: {job.reason}: {job.message}")


def _minutes_ago(minutes: float | None) -> datetime | None:
    try:
        return None if minutes is None else datetime.now(UTC) - timedelta(minutes=minutes)
    except OverflowError:
        raise CliError(f"{minutes:g} minutes ago was before all times: give fewer") from None


def _parse_label(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    return name, value if equals else None
