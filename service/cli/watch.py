"""The verbs about jobs: submit, jobs, job, cancel, retry, events, logs, timeline, top."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import yaml
from rich import box
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from service.cli.packing import zip_folder
from service.client import (
    Client,
    CliError,
    Json,
    UnreachableError,
    checked,
    out,
    print_json,
    problem_text,
)
from service.jobspec import FINAL_STATES, JOB_ID_PATTERN, KEY_PATTERN, PACKAGE_PREFIX, REMOTE_CODE, JobState

JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", callback=checked(JOB_ID_PATTERN, "a job's id"), help="A job's id")
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends")]
_RETURN_LIMIT_S = 300.0
"""So long a command that waits for a job bears with a server that is away: it may be restarting."""
_COLOURS = {"SUCCEEDED": "green", "FAILED": "red", "RUNNING": "cyan", "CANCELLED": "yellow"}


app = typer.Typer()


class _SpecLoader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-3 for text, and people write learning rates so: a number, as in YAML 1.2 and JSON."""


_SpecLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


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
    as_json: Json = False,
) -> None:
    """Submit a job. A folder in code.working_dir is uploaded."""
    client = Client()
    spec = _upload_code(client, read_spec(file), file)
    job = client.post("/api/v1/jobs", json=spec, headers={"Idempotency-Key": key} if key else {})
    if wait:
        job = _wait(client, job["id"])
    _show(client, job, as_json)
    if wait:
        _fail_unless_succeeded(job)


@app.command("jobs")
def list_jobs(
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state")] = None,
    queue: Annotated[str | None, typer.Option(help="Only jobs of this queue")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many")] = 50,
    as_json: Json = False,
) -> None:
    """List jobs, newest first."""
    jobs: list[dict[str, Any]] = []
    token, client = None, Client()
    while len(jobs) < limit:
        size = min(limit - len(jobs), 500)
        page = client.get(
            "/api/v1/jobs", state=state and state.value, queue=queue, limit=size, page_token=token
        )
        jobs += page["items"]
        if (token := page["next_page_token"]) is None:
            break
    if as_json:
        print_json(jobs)
    else:
        out.print(_jobs_table(jobs) if jobs else "no jobs")


@app.command("job")
def show_job(job: JobArgument, as_json: Json = False) -> None:
    """State, reason, attempts and progress of a job."""
    client = Client()
    _show(client, client.get(f"/api/v1/jobs/{job}"), as_json)


@app.command()
def cancel(job: JobArgument, as_json: Json = False) -> None:
    """End a job."""
    client = Client()
    _show(client, client.post(f"/api/v1/jobs/{job}/cancel"), as_json)


@app.command()
def retry(job: JobArgument, as_json: Json = False) -> None:
    """Queue a failed or cancelled job again, from its last checkpoint."""
    client = Client()
    _show(client, client.post(f"/api/v1/jobs/{job}/retry"), as_json)


@app.command()
def events(job: JobArgument, follow: Follow = False, as_json: Json = False) -> None:
    """The job's event log; --json prints one event a line."""
    for event in _items(f"/api/v1/jobs/{job}/events", follow):
        if as_json:
            print(json.dumps(event), flush=True)
        else:
            out.print(
                f"{_clock(event['at'])} {event['kind']:10} {event['message']}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )


@app.command()
def logs(
    job: JobArgument,
    follow: Follow = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="Only this attempt")] = None,
    as_json: Json = False,
) -> None:
    """The logs of the job's drivers; --json prints one line as one object."""
    query = "" if attempt is None else f"?attempt={attempt}"
    for line in _items(f"/api/v1/jobs/{job}/logs{query}", follow):
        print(json.dumps(line) if as_json else line["text"], flush=True)


@app.command()
def timeline(
    job: JobArgument,
    step: Annotated[int | None, typer.Option(min=0, help="A profiled step; the last one if absent")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write a Chrome trace here")] = None,
    as_json: Json = False,
) -> None:
    """Planned and measured time of a step: a short table, or with -o a trace for Perfetto."""
    client = Client()
    path = f"/api/v1/jobs/{job}/timeline"
    if output is not None:
        trace = client.get(path, step=step, format="chrome")
        try:
            output.write_text(json.dumps(trace))
        except OSError as error:
            raise CliError(f"cannot write {output}: {error.strerror}") from None
    view = client.get(path, step=step)
    if as_json:
        print_json(view)
        return
    table = Table(title=f"{job}, step {view['step']}")
    for title in ("", "makespan", "slots", "compute"):
        table.add_column(title, justify="left" if not title else "right")
    for side in ("planned", "measured"):
        if view[side]:
            table.add_row(side, *_side(view[side]))
    out.print(table)
    where = f"trace: {output} (open it in Perfetto)" if output else f"{client.url}/jobs/{job}"
    out.print(where, soft_wrap=True)


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print once and end")] = False, as_json: Json = False
) -> None:
    """Accelerators, queues and running jobs, renewed every second; Ctrl-C ends it."""
    client = Client()
    if as_json or once or not sys.stdout.isatty():
        state = _overview(client)
        print_json(state) if as_json else out.print(_overview_table(state))
        return
    with Live(_overview_table(_overview(client)), console=out, screen=True) as live:
        try:
            while True:
                time.sleep(1.0)
                live.update(_overview_table(_overview(client)))
        except KeyboardInterrupt:
            return


def read_spec(file: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; CliError when there is none."""
    try:
        text = typer.get_text_stream("stdin").read() if str(file) == "-" else file.read_text()
        spec = yaml.load(text, _SpecLoader)
    except OSError as error:
        raise CliError(f"cannot read {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CliError(f"{file} is no YAML: {error}") from None
    if not isinstance(spec, dict):
        raise CliError(f"{file} holds no job: give model, data, loss, ... as the README shows")
    try:
        json.dumps(spec, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CliError(
            f"{file} holds a value that JSON has not ({error}): quote dates, leave out .nan"
        ) from None
    return spec


def _upload_code(client: Client, spec: dict[str, Any], file: Path) -> dict[str, Any]:
    """A folder of this machine in code.working_dir becomes the URI of an uploaded package."""
    code = spec.get("code")
    place = code.get("working_dir") if isinstance(code, dict) else None
    if not isinstance(place, str) or place.startswith((PACKAGE_PREFIX, *REMOTE_CODE)):
        return spec
    folder = Path(place).expanduser()
    if not folder.is_absolute() and str(file) != "-":
        folder = file.parent / folder
    content = zip_folder(folder)
    package = client.post("/api/v1/packages", content=content, headers={"Content-Type": "application/zip"})
    return {**spec, "code": {**code, "working_dir": package["uri"]}}


def _wait(client: Client, job_id: str) -> dict[str, Any]:
    seen_at = time.monotonic()
    while True:
        try:
            job = client.get(f"/api/v1/jobs/{job_id}")
            seen_at = time.monotonic()
        except UnreachableError:
            if time.monotonic() - seen_at > _RETURN_LIMIT_S:
                raise
        else:
            if job["state"] in FINAL_STATES:
                return job
        time.sleep(0.5)


def _fail_unless_succeeded(job: dict[str, Any]) -> None:
    if job["state"] != JobState.SUCCEEDED:
        raise CliError(f"job {job['id']} {job['state']}: {job['reason']}: {job['message']}")


def _items(path: str, follow: bool) -> Iterator[dict[str, Any]]:
    """Items of all pages, or of a stream that is taken up again where it broke."""
    client = Client()
    if follow:
        yield from _follow(client, path)
        return
    token: str | None = None
    while True:
        given = {} if token is None else {"page_token": token}
        page = client.get(str(httpx.URL(path).copy_merge_params(given)))
        yield from page["items"]
        if (token := page["next_page_token"]) is None:
            return


def _follow(client: Client, path: str) -> Iterator[dict[str, Any]]:
    last, seen_at = None, None
    while True:
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last} if last else {})
        try:
            with client.stream(path, headers) as response:
                if response.status_code == 204:
                    return
                if response.status_code == 503 and seen_at is not None:
                    raise httpx.ReadError("the server is not ready")
                if not response.is_success:
                    response.read()
                    raise CliError(problem_text(response))
                seen_at = time.monotonic()
                for event, number, data in _parse_stream(response.iter_lines()):
                    last, seen_at = number or last, time.monotonic()
                    if event == "end":
                        return
                    yield data
        except httpx.HTTPError as error:
            if seen_at is None or time.monotonic() - seen_at > _RETURN_LIMIT_S:
                raise client.unreachable(error) from None
        time.sleep(1.0)


def _parse_stream(lines: Iterator[str]) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    fields: dict[str, str] = {}
    for line in lines:
        if not line and "data" in fields:
            yield fields.get("event", "message"), fields.get("id"), json.loads(fields["data"])
            fields = {}
        elif line and not line.startswith(":"):
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")


def _show(client: Client, job: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(job)
        return
    out.print(_job_line(job), soft_wrap=True)
    for attempt in job["attempts"]:
        reason = f" {attempt['reason']}: {attempt['message']}" if attempt["reason"] else ""
        out.print(f"  attempt {attempt['number']} {attempt['state']}{reason}", soft_wrap=True, markup=False)
    out.print(f"  {client.url}/jobs/{job['id']}", soft_wrap=True)


def _job_line(job: dict[str, Any]) -> str:
    colour = _COLOURS.get(job["state"], "default")
    why = ": ".join(str(part) for part in (job["reason"], job["message"]) if part)
    done = job["progress"]
    loss = "" if done["loss"] is None else f", loss {done['loss']:.4g}"
    line = f"{job['id']} {job['name']} [{colour}]{job['state']}[/] step {done['step']}/{done['steps']}{loss}"
    return f"{line}  {escape(why)}" if why else line


def _jobs_table(jobs: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, collapse_padding=True)
    for title in ("job", "name", "queue", "state", "step", "loss", "why"):
        whole = title in ("job", "state", "step", "loss")
        width = {"name": 14, "queue": 8}.get(title) if out.width < 100 else None
        table.add_column(title, overflow="fold", no_wrap=whole, max_width=width)
    for job in jobs:
        done = job["progress"]
        colour = _COLOURS.get(job["state"], "default")
        table.add_row(
            job["id"],
            job["name"],
            job["queue"],
            f"[{colour}]{job['state']}[/]",
            f"{done['step']}/{done['steps']}",
            "" if done["loss"] is None else f"{done['loss']:.4g}",
            escape((job["message"] or job["reason"] or "")[:120]),
        )
    return table


def _overview(client: Client) -> dict[str, Any]:
    return {
        "cluster": client.get("/api/v1/cluster"),
        "queues": client.get("/api/v1/queues")["items"],
        "jobs": client.get("/api/v1/jobs", limit=20)["items"],
    }


def _overview_table(state: dict[str, Any]) -> Table:
    cluster = state["cluster"]
    if cluster["available"]:
        parts = [
            f"{a['free']} of {a['total']} {a['resource']} free" for a in cluster["accelerators"] if a["total"]
        ]
        title = ", ".join(parts) or "no accelerators"
    else:
        title = escape(cluster["error"])
    waiting = ", ".join(f"{queue['name']}: {queue['depth']} wait" for queue in state["queues"])
    table = _jobs_table(state["jobs"])
    table.title, table.caption = title, waiting
    return table


def _side(side: dict[str, Any]) -> tuple[str, str, str]:
    compute = sum(slot["end_s"] - slot["start_s"] for slot in side["slots"] if slot["lane"] == "compute")
    return f"{1e3 * side['makespan_s']:.2f} ms", str(len(side["slots"])), f"{1e3 * compute:.2f} ms"


def _clock(text: str) -> str:
    return datetime.fromisoformat(text).astimezone().strftime("%H:%M:%S")
