"""Planned beside measured: step and peak memory of jobs on this machine, through the whole product.

`python -m tests.benchmarks.planned [--jobs gpt-demo unet-demo ...] [--steps 60]`: a local control plane and four
workers on CPU, a job at a time; medians over all profiled steps but the first. Writes nothing. Another busy
process shows in the ratio: a plan is for a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.cli.demo import GPT_JOB, UNET_JOB
from service.cli.serve import LocalServer
from service.client.client import Client
from service.client.job_spec import zip_folder
from service.orchestrator.ray.local_ray import free_ports
from service.spec.states import JobState

MODELS = Path(__file__).parent / "planned_models"
ENVIRONMENT = {"SLOTLINE_PLAN_BUDGET_S": "3"}
JOB_LIMIT_S = 300.0


def jobs(steps: int, package: str) -> dict[str, dict[str, Any]]:
    """The jobs by name; `package` holds planned_models."""
    code = {"working_dir": package, "pip": []}
    gpt = {**GPT_JOB, "data": {"factory": "worker.examples.text:ByteWindows", "args": {"length": 64}}}
    wide = {"layers": 6, "width": 128, "heads": 4, "length": 64, "vocab": 4096}
    found = {
        "gpt-demo": GPT_JOB,
        "unet-demo": UNET_JOB,
        "gpt-heavy-head": {**gpt, "model": {"factory": "worker.examples.gpt:build", "args": wide}},
        "encoder-decoder": {**gpt, "model": {"factory": "planned_models:encoder_decoder"}, "code": code},
        "wide-mlp": {
            **gpt,
            "model": {"factory": "planned_models:wide_mlp"},
            "data": {"factory": "planned_models:Vectors"},
            "loss": {"factory": "torch.nn.functional:mse_loss"},
            "training": {**GPT_JOB["training"], "global_batch": 256},
            "code": code,
        },
    }
    return {
        name: {**job, "name": name, "training": {**job["training"], "steps": steps}}
        for name, job in found.items()
    }


@dataclass(frozen=True)
class Row:
    """One job: seconds and bytes, planned and measured; bytes of the mesh that is planned to hold most. `calibrated_s` is
    the makespan of the plan with the costs of profiled steps."""

    planned_s: float
    calibrated_s: float
    makespan_s: float
    step_s: float
    planned_bytes: int
    measured_bytes: int


def run(client: Client, job: dict[str, Any]) -> Row:
    """Train one job to its end and compare it with its plan."""
    job_id = client.submit(job).id
    deadline = time.monotonic() + JOB_LIMIT_S
    while not (view := client.job(job_id)).state.final:
        if time.monotonic() > deadline:
            raise SystemExit(f"{job['name']} did not end within {JOB_LIMIT_S:.0f} s: {view.state}")
        time.sleep(0.2)
    if view.state is not JobState.SUCCEEDED:
        raise SystemExit(f"{job['name']} {view.state}: {view.reason}: {view.message}")
    stored = client.plan(job_id)
    plan, calibrated = stored.plan, stored.calibrated
    if calibrated is None:
        raise SystemExit(f"{job['name']} has no profiled step but its first: take more --steps")
    steps = list(client.steps(job_id))[1:]
    mesh = max(plan["meshes"], key=lambda one: one["peak_memory_bytes"])
    seen = view.attempts[-1].peak_memory_bytes or {}
    return Row(
        planned_s=plan["makespan_s"],
        calibrated_s=calibrated.makespan_s,
        makespan_s=statistics.median(step.makespan_s for step in steps if step.makespan_s is not None),
        step_s=statistics.median(step.step_s for step in steps if step.step_s is not None),
        planned_bytes=mesh["peak_memory_bytes"],
        measured_bytes=seen.get(mesh["name"], 0),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--jobs", nargs="*")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "serve.log"
        with (
            LocalServer(
                directory=Path(folder), port=free_ports(1)[0], log=log, environment=ENVIRONMENT
            ) as server,
            Client(server.url) as client,
        ):
            known = jobs(given.steps, client.upload_package(zip_folder(MODELS)).uri)
            print(
                "model            planned ms  calibrated ms  makespan ms  planned/measured  calibrated/measured  "
                "step ms  planned MB  measured MB  ratio"
            )
            for name in given.jobs or known:
                row = run(client, known[name])
                print(
                    f"{name:15}  {1e3 * row.planned_s:10.1f}  {1e3 * row.calibrated_s:13.1f}  "
                    f"{1e3 * row.makespan_s:11.1f}  {row.planned_s / row.makespan_s:16.2f}  "
                    f"{row.calibrated_s / row.makespan_s:19.2f}  {1e3 * row.step_s:7.1f}  {row.planned_bytes / 1e6:10.1f}  "
                    f"{row.measured_bytes / 1e6:11.1f}  {row.planned_bytes / max(1, row.measured_bytes):5.2f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
