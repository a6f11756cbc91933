"""`slotline demo`: trains two small models on a local server over REST and prints planned beside measured times.

A client like any other: it starts `slotline serve` as a subprocess, calls its REST API and stops it again, also
when interrupted. Imports nothing of the control plane's inside.
"""

from __future__ import annotations

import json
import math
import shlex
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from service.cli.extras import require_extras
from service.cli.output import CliError, JsonOption, err, out
from service.cli.serve import LocalServer, ServerFailedError
from service.client.client import ApiError, Client
from service.spec.states import JobState

DIRECTORY = Path(".slotline")
"""Where `slotline serve` keeps its data, too."""
JOBS_LIMIT_S = 600.0
ENTROPY_LIMIT_S = 60.0
app = typer.Typer()

GPT_JOB: dict[str, Any] = {
    "name": "gpt-stdlib",
    "model": {
        "factory": "worker.examples.gpt:build",
        "args": {"layers": 6, "width": 96, "heads": 4, "length": 64},
    },
    "data": {"factory": "worker.examples.text:ByteWindows", "args": {"length": 64}},
    "loss": {"factory": "torch.nn.functional:cross_entropy"},
    "optimizer": {"factory": "torch.optim:AdamW", "args": {"lr": 1.0e-3}},
    "training": {"steps": 100, "global_batch": 32, "microbatches": 8, "seed": 0, "clip_grad_norm": 1.0},
    "pipeline": {"stages": 4, "cut": "auto", "schedule": "auto"},
    "resources": {"meshes": 4, "device": "cpu"},
}

UNET_JOB: dict[str, Any] = {
    "name": "unet-digits",
    "model": {"factory": "worker.examples.unet:build", "args": {}},
    "data": {"factory": "worker.examples.digits:NoisyDigits", "args": {}},
    "loss": {"factory": "torch.nn.functional:mse_loss"},
    "optimizer": {"factory": "torch.optim:AdamW", "args": {"lr": 2.0e-3}},
    "training": {"steps": 60, "global_batch": 64, "microbatches": 8, "seed": 0, "clip_grad_norm": 1.0},
    "pipeline": {"stages": 4, "cut": "auto", "schedule": "auto"},
    "resources": {"meshes": 4, "device": "cpu"},
}


class DemoFailedError(RuntimeError):
    """A job of the demo failed or did not learn; the message names cause and place to look."""


@app.command()
def demo(
    directory: Annotated[Path, typer.Option(help="Where data, log and traces go")] = DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Train two small models on this machine and show where the time went."""
    require_extras("server", "worker", "demo")
    try:
        rows = run_demo(directory=directory, console=err if as_json else out)
    except (DemoFailedError, ServerFailedError) as failure:
        raise CliError(str(failure)) from None
    if as_json:
        print(json.dumps(rows))


def run_demo(
    *, directory: Path = DIRECTORY, port: int | None = None, console: Console | None = None
) -> dict[str, Any]:
    """Run both jobs on a local Slotline and print the table; returns its rows by job name.

    Traces and the server's log go below `directory`. Raises DemoFailedError or ServerFailedError; leaves no process behind,
    also when interrupted.
    """
    console = console or Console()
    folder = (directory / "demo").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "serve.log"
    log.unlink(missing_ok=True)
    with LocalServer(
        directory=directory.resolve(),
        port=port or _pick_port(),
        log=log,
        environment={"SLOTLINE_PLAN_BUDGET_S": "3"},
    ) as server:
        console.print(f"Slotline runs at [bold]{server.url}[/bold] (its log: {_relative_path(server.log)})")
        with Client(server.url) as client:
            jobs = {spec["name"]: _submit_job(client, spec) for spec in (GPT_JOB, UNET_JOB)}
            _follow_jobs(client, jobs, console, server)
            rows = {name: _job_row(client, job_id, folder) for name, job_id in jobs.items()}
        baseline = _unigram_entropy_bits()
        _print_results(console, rows, server.url)
        return _check_learning(console, rows, baseline, directory)


def _unigram_entropy_bits() -> float:
    """Bits per byte of the demo's corpus for a model that knows only how often each byte occurs; the worker measures."""
    command = [sys.executable, "-m", "worker.examples.text"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ENTROPY_LIMIT_S, check=True)
    return float(done.stdout)


def _submit_job(client: Client, spec: dict[str, Any]) -> str:
    try:
        return client.submit(spec).id
    except ApiError as problem:
        raise DemoFailedError(f"job {spec['name']} was refused: {problem}") from None


def _follow_jobs(client: Client, jobs: dict[str, str], console: Console, server: LocalServer) -> None:
    """Progress bars until both jobs are final."""
    columns = (
        TextColumn("{task.fields[name]:12}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks = {name: progress.add_task(name, total=None, name=name, note="QUEUED") for name in jobs}
        open_jobs = dict(jobs)
        deadline = time.monotonic() + JOBS_LIMIT_S
        while open_jobs:
            if time.monotonic() > deadline:
                raise DemoFailedError(f"not finished within {JOBS_LIMIT_S:.0f} s: {', '.join(open_jobs)}")
            server.check()
            for name, job_id in list(open_jobs.items()):
                job = client.job(job_id)
                done = job.progress
                note = f"{job.state} loss {done.loss:.3f}" if done.loss else str(job.state)
                if job.state is JobState.QUEUED and job.message:
                    note = f"QUEUED: {job.message}"
                progress.update(tasks[name], total=done.steps, completed=done.step, note=note[:90])
                if job.state.final:
                    del open_jobs[name]
                    if job.state is not JobState.SUCCEEDED:
                        raise DemoFailedError(f"job {name} {job.state}: {job.reason}: {job.message}")
            time.sleep(0.3)


def _job_row(client: Client, job_id: str, folder: Path) -> dict[str, Any]:
    """The row of one finished job; its Chrome trace is written below `folder`."""
    job, planned = client.job(job_id), client.plan(job_id)
    plan, calibrated = planned.plan, planned.calibrated
    steps = list(client.steps(job_id))
    trace = folder / f"{job.name}.trace.json"
    trace.write_bytes(client.chrome_trace(job_id))
    settled = steps[len(steps) // 5 :]
    fullest = max(plan["meshes"], key=lambda mesh: mesh["peak_memory_bytes"])
    peaks = job.attempts[-1].peak_memory_bytes or {}
    return {
        "id": job_id,
        "first_loss": steps[0].loss,
        "last_loss": statistics.fmean([step.loss for step in steps[-5:]]),
        "step_s": statistics.median_high([step.step_s for step in settled]),
        "planned_makespan_s": plan["makespan_s"],
        "calibrated_makespan_s": None if calibrated is None else calibrated.makespan_s,
        "measured_makespan_s": statistics.median_high([step.makespan_s for step in settled]),
        "planned_bubble": plan["bubble_ratio"],
        "measured_bubble": statistics.median_high([step.bubble_ratio for step in settled]),
        "planned_peak_bytes": fullest["peak_memory_bytes"],
        "measured_peak_bytes": peaks.get(fullest["name"]),
        "chosen": plan["chosen"],
        "trace": str(trace),
    }


def _print_results(console: Console, rows: dict[str, dict[str, Any]], url: str) -> None:
    table = Table(title="Training, planned and measured")
    table.add_column("")
    for name in rows:
        table.add_column(name, justify="right")
    lines = [
        ("loss, first → last", lambda r: f"{r['first_loss']:.3f} → {r['last_loss']:.3f}"),
        ("step time", lambda r: f"{1e3 * r['step_s']:.1f} ms"),
        ("schedule", lambda r: r["chosen"]),
        ("makespan, first plan", lambda r: _milliseconds(r["planned_makespan_s"])),
        ("makespan, calibrated", lambda r: _milliseconds(r["calibrated_makespan_s"])),
        ("makespan, measured", lambda r: _milliseconds(r["measured_makespan_s"])),
        ("bubble, planned", lambda r: f"{r['planned_bubble']:.1%}"),
        ("bubble, measured", lambda r: f"{r['measured_bubble']:.1%}"),
        ("fullest mesh, planned", lambda r: _megabytes(r["planned_peak_bytes"])),
        ("fullest mesh, measured", lambda r: _megabytes(r["measured_peak_bytes"])),
    ]
    for title, cell in lines:
        table.add_row(title, *(cell(row) for row in rows.values()))
    console.print(table)
    for name, row in rows.items():
        console.print(f"{name}: timeline {url}/jobs/{row['id']}", soft_wrap=True)
        console.print(
            f"{name}: trace    {_relative_path(Path(row['trace']))} (open it in Perfetto)", soft_wrap=True
        )


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _megabytes(size: int | None) -> str:
    return "–" if size is None else f"{size / 1e6:.1f} MB"


def _check_learning(
    console: Console, rows: dict[str, dict[str, Any]], baseline: float, directory: Path
) -> dict[str, dict[str, Any]]:
    """Print how the text model compares with byte frequencies; DemoFailedError where a model did not learn."""
    bits = rows[GPT_JOB["name"]]["last_loss"] / math.log(2)
    rows[GPT_JOB["name"]] |= {"bits_per_byte": bits, "unigram_bits_per_byte": baseline}
    console.print(
        f"{GPT_JOB['name']}: {bits:.3f} bits per byte at the end; "
        f"the corpus's single-byte frequencies alone give {baseline:.3f}"
    )
    console.print(
        f"The pages stay readable: `{_serve_command(directory)}` serves them again at the same address."
    )
    if not bits < 0.9 * baseline:
        raise DemoFailedError(
            f"the text model ended at {bits:.3f} bits per byte, not clearly below {baseline:.3f}"
        )
    unet = rows[UNET_JOB["name"]]
    if not unet["last_loss"] < 0.8 * unet["first_loss"]:
        raise DemoFailedError(
            f"the denoiser did not learn: loss {unet['first_loss']:.3f} → {unet['last_loss']:.3f}"
        )
    return rows


def _pick_port() -> int:
    """8000 when it is free, else any free port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", 8000))
        except OSError:
            from service.orchestrator.ray.local_ray import free_ports

            return free_ports(1)[0]
    return 8000


def _serve_command(directory: Path) -> str:
    """The command that serves the data in `directory` again from here."""
    data = _relative_path(directory)
    where = "" if data == str(DIRECTORY) else f"SLOTLINE_DATA_DIR={shlex.quote(data)} "
    return f"{where}{Path(sys.prefix).name}/bin/slotline serve"


def _relative_path(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
