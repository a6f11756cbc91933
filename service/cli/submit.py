"""The verbs that change jobs: submit, cancel, retry, change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.api.schemas import JobView
from service.cli.job_file import read_spec, upload_code
from service.cli.output import CliError, JobArgument, Json, checked, err
from service.cli.plans import GivenPlan
from service.cli.tables import show_job
from service.client import Client
from service.job_states import JobState
from service.jobspec import KEY_PATTERN

app = typer.Typer()


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="The job as YAML or JSON; - reads standard input")],
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the end; exit code 0 only on success")
    ] = False,
    key: Annotated[
        str | None,
        typer.Option(
            callback=checked(KEY_PATTERN, "a key"), help="Idempotency key: the same key submits only once"
        ),
    ] = None,
    plan: GivenPlan = None,
    as_json: Json = False,
) -> None:
    """Submit a job. A folder in code.working_dir is uploaded."""
    client = Client()
    spec = read_spec(file) | ({} if plan is None else {"plan": plan})
    job = client.submit(upload_code(client, spec, file), idempotency_key=key)
    if wait:  # whoever ends the waiting must know what goes on training
        err.print(f"slotline: waiting for {job.id}, {client.url}/jobs/{job.id}", markup=False, soft_wrap=True)
        job = client.wait(job.id)
    show_job(job, client.url, as_json=as_json)
    if wait:
        _fail_unless_succeeded(job)


@app.command()
def cancel(job: JobArgument, as_json: Json = False) -> None:
    """End a job."""
    client = Client()
    show_job(client.cancel(job), client.url, as_json=as_json)


@app.command()
def retry(job: JobArgument, as_json: Json = False) -> None:
    """Queue a failed or cancelled job again, from its last checkpoint."""
    client = Client()
    show_job(client.retry(job), client.url, as_json=as_json)


@app.command()
def change(
    job: JobArgument,
    queue: Annotated[str | None, typer.Option(help="Wait in this queue")] = None,
    priority: Annotated[int | None, typer.Option(help="Wait with this priority; higher comes first")] = None,
    as_json: Json = False,
) -> None:
    """Move a job that waits to another queue or priority."""
    if queue is None and priority is None:
        raise CliError("nothing would change: give --queue, --priority, or both")
    client = Client()
    show_job(client.change(job, queue=queue, priority=priority), client.url, as_json=as_json)


def _fail_unless_succeeded(job: JobView) -> None:
    if job.state is not JobState.SUCCEEDED:
        raise CliError(f"job {job.id} {job.state}: {job.reason}: {job.message}")
