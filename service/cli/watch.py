"""The verbs that look at jobs and change nothing: jobs, job, events, logs, timeline."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from service.cli.output import CliError, JobArgument, Json, ProfiledStep, out, print_json, to_json
from service.cli.tables import evaluations_table, jobs_table, show_job, timeline_table
from service.client import Client
from service.job_states import JobState

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends")]
app = typer.Typer()


@app.command("jobs")
def list_jobs(
    state: Annotated[
        list[JobState] | None,
        typer.Option(case_sensitive=False, help="Only jobs in this state; several: in one of them"),
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Only jobs of this queue")] = None,
    owner: Annotated[str | None, typer.Option(help="Only jobs that this principal submitted")] = None,
    name: Annotated[str | None, typer.Option(help="Only jobs of this name")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="Only jobs with this label, name=value or name; several: with all"),
    ] = None,
    since: Annotated[float | None, typer.Option(min=0, help="Submitted in the last so many minutes")] = None,
    until: Annotated[
        float | None, typer.Option(min=0, help="Submitted more than so many minutes ago")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many")] = 50,
    as_json: Json = False,
) -> None:
    """List jobs, newest first."""
    labels = dict(_label(one) for one in label or ())
    found = Client().jobs(
        state=state,
        queue=queue,
        owner=owner,
        name=name,
        labels=labels,
        since=_ago(since),
        until=_ago(until),
        limit=limit,
    )
    jobs = list(found)
    if as_json:
        print_json(to_json(jobs))
    else:
        out.print(jobs_table(jobs) if jobs else "no jobs")


@app.command("job")
def read_job(job: JobArgument, as_json: Json = False) -> None:
    """State, reason, attempts and progress of a job."""
    client = Client()
    show_job(client.job(job), client.url, as_json=as_json)


@app.command()
def evaluations(job: JobArgument, as_json: Json = False) -> None:
    """Loss and metrics of the job's evaluations; --json prints one evaluation a line."""
    found = list(Client().evaluations(job))
    if as_json:
        for one in found:
            print(json.dumps(one.model_dump(mode="json")))
    else:
        out.print(evaluations_table(found) if found else "no evaluations")


@app.command()
def events(job: JobArgument, follow: Follow = False, as_json: Json = False) -> None:
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
    follow: Follow = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="Only this attempt")] = None,
    tail: Annotated[int | None, typer.Option(min=1, max=5000, help="Only the last lines, so many")] = None,
    since: Annotated[float | None, typer.Option(min=0, help="Only lines of the last so many minutes")] = None,
    search: Annotated[str | None, typer.Option(help="Only lines with this text, in any case")] = None,
    as_json: Json = False,
) -> None:
    """The logs of the job's drivers; --json prints one line as one object."""
    found = Client().logs(job, attempt=attempt, follow=follow, tail=tail, since=_ago(since), search=search)
    for line in found:
        print(json.dumps(line.model_dump(mode="json")) if as_json else line.text, flush=True)


@app.command()
def timeline(
    job: JobArgument,
    step: ProfiledStep = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write a Chrome trace here")] = None,
    as_json: Json = False,
) -> None:
    """Planned and measured time of a step: a short table, or with -o a trace for Perfetto."""
    client = Client()
    if output is not None:
        trace = client.chrome_trace(job, step)
        try:
            output.write_bytes(trace)
        except OSError as error:
            raise CliError(f"cannot write {output}: {error.strerror}") from None
    view = client.timeline(job, step)
    if as_json:
        print_json(view.model_dump(mode="json"))
        return
    out.print(timeline_table(view))
    where = f"trace: {output} (open it in Perfetto)" if output else f"{client.url}/jobs/{job}"
    out.print(where, soft_wrap=True)


def _ago(minutes: float | None) -> datetime | None:
    try:
        return None if minutes is None else datetime.now(UTC) - timedelta(minutes=minutes)
    except OverflowError:
        raise CliError(f"{minutes:g} minutes ago was before all times: give fewer") from None


def _label(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    return name, value if equals else None
