"""The plan of a job that is not trained: from a server, else measured and planned on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError

from service.api.schemas import JobPlanPreview
from service.cli.job_file import upload_code
from service.client import Client
from service.jobspec import PACKAGE_PREFIX, REMOTE_CODE, JobSpec
from service.settings import load_settings
from worker.costs import costs_digest

_LATE_S = 30.0  # a search that passes its budget by more has gone wrong


def is_job(data: Mapping[str, Any]) -> bool:
    """Whether a file holds a job and no PipelineSpec: jobs have a model, specs lists of meshes and stages."""
    return "model" in data and not isinstance(data.get("stages"), list)


def with_schedule(data: dict[str, Any], schedule: str | None) -> dict[str, Any]:
    """The job with that schedule instead of its own."""
    pipeline = data.get("pipeline", {})
    if schedule is None or not isinstance(pipeline, dict):
        return data
    return {**data, "pipeline": {**pipeline, "schedule": schedule}}


def plan_job_file(
    data: dict[str, Any], file: Path, *, format: str, budget_s: float, local: bool, name: str | None = None
) -> str:
    """The plan of the job `data` from `file` as text: "text" is a table for people, "json" everything, and the
    other formats show the schedule. With a `name` the server keeps it."""
    if local and name is not None:
        raise ValueError("--name keeps the plan on a server, and --local asks none: leave out one")
    with Client() as client:
        asked = not local and (name is not None or "SLOTLINE_URL" in os.environ or client.ready())
        if asked:
            found = client.plan_job(
                upload_code(client, data, file),
                budget_s=budget_s,
                name=name,
                waiting=lambda message: _say(f"{message} …"),
            )
        else:
            _say("no server is asked: the job is measured on this machine")
            found = _plan_here(data, file, budget_s)
    for note in found.notes:
        _say(f"note: {note}")
    return _shown(found, format)


def _plan_here(data: dict[str, Any], file: Path, budget_s: float) -> JobPlanPreview:
    """Measure with a worker's own code in a process of its own, unless it was measured before; then plan."""
    spec, folder = checked_job(data, file)
    costs = job_costs_here(spec, folder)
    return JobPlanPreview(
        **plan_by_costs(spec, costs, budget_s), measured_by="one worker", notes=costs["notes"]
    )


def plan_by_costs(spec: dict[str, Any], costs: Mapping[str, Any], budget_s: float) -> dict[str, Any]:
    """What a control plane would answer to a driver that measured these costs of the job."""
    from service.scheduler.job import JobCosts, answer_json, plan_job
    from service.scheduler.planner import compile_kernels
    from worker.job import Job

    job = Job.from_json(spec)
    compile_kernels()  # the first plan on a machine would else spend its time on that
    latest = time.monotonic() + budget_s + _LATE_S
    found = plan_job(
        job, JobCosts.from_json(costs, job), budget_s=budget_s, expired=lambda: time.monotonic() > latest
    )
    for note in found.plan.notes:
        _say(note)
    return answer_json(found)


def checked_job(data: dict[str, Any], file: Path) -> tuple[dict[str, Any], Path | None]:
    """The job's specification, as a server would read it, and its folder of code on this machine."""
    code, folder = data.get("code"), None
    place = code.get("working_dir") if isinstance(code, dict) else None
    if isinstance(place, str):
        if place.startswith((PACKAGE_PREFIX, *REMOTE_CODE)):
            raise ValueError(
                f"code.working_dir {place!r} is not on this machine: name a folder, or ask a server (SLOTLINE_URL)"
            )
        folder = Path(place).expanduser()
        if not folder.is_absolute() and str(file) != "-":
            folder = file.parent / folder
        if not folder.is_dir():
            raise ValueError(f"code.working_dir {str(folder)!r} is no folder: correct it")
        data = {**data, "code": {**code, "working_dir": None}}
    try:
        spec = JobSpec.model_validate(data)
    except ValidationError as error:
        parts = (f"{'.'.join(map(str, one['loc'])) or 'job'}: {one['msg']}" for one in error.errors())
        raise ValueError("; ".join(part.replace("Value error, ", "") for part in parts)) from None
    if spec.code.pip:
        _say(
            f"note: {', '.join(spec.code.pip)} of code.pip are not installed here, but used if they are there"
        )
    return spec.model_dump(mode="json"), folder


def job_costs_here(spec: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """What the job costs here: kept in data_dir where no code of the user's own could have changed it."""
    from worker.choices import microbatch_counts
    from worker.job import Job

    counts = microbatch_counts(Job.from_json(spec))
    device = _device(spec)
    place = load_settings().data_dir.expanduser() / "costs" / f"{costs_digest(spec)}-{device}.json"
    kept = folder is None
    if kept and place.is_file():
        with contextlib.suppress(ValueError, KeyError):  # a file that was cut off is written anew
            known = json.loads(place.read_text())
            if set(counts) <= set(known["tried"]):
                return known
    costs = _measure(spec, device, folder)
    if kept:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(costs))
    return costs


def _measure(spec: dict[str, Any], device: str, folder: Path | None) -> dict[str, Any]:
    from service.orchestrator.profiling import read_answer

    limit_s = load_settings().profile_timeout_s
    try:
        done = subprocess.run(
            [sys.executable, "-m", "worker.profiler"],
            input=json.dumps({"job": spec, "device": device}),
            stdout=subprocess.PIPE,
            text=True,
            timeout=limit_s,
            cwd=folder,
            env={**os.environ, **spec.get("env", {}), "PYTHONPATH": python_path(folder)},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"measuring the job took more than {limit_s:g} s and was ended: raise SLOTLINE_PROFILE_TIMEOUT_S"
        ) from None
    costs = read_answer(done.stdout)
    if costs is None:
        raise ValueError(f"measuring the job ended without a result (exit code {done.returncode})")
    return costs


def python_path(folder: Path | None) -> str:
    """Where a process that runs the user's code looks for modules: in the job's folder of code first."""
    paths = [*([str(folder.resolve())] if folder else []), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(path for path in paths if path)


def _device(spec: Mapping[str, Any]) -> str:
    """cuda where the job wants it; for auto where NVIDIA's driver is loaded on this machine."""
    wanted = spec["resources"]["device"]
    if wanted != "auto":
        return wanted
    return "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu"


def _shown(found: JobPlanPreview, format: str) -> str:
    if format == "json":
        return json.dumps(found.model_dump(mode="json"), indent=1) + "\n"
    from service.scheduler import PipelineSpec, Plan
    from service.scheduler.views.render import FORMATS, render

    if format not in FORMATS:
        raise ValueError(f"format {format!r} does not exist: use one of {', '.join(FORMATS)}")
    if format == "text":
        return job_plan_text(found)
    return render(PipelineSpec.model_validate(found.spec), Plan.model_validate(found.plan), format)


def job_plan_text(found: JobPlanPreview) -> str:
    """What was chosen and what it takes, as lines and a table of meshes."""
    from service.scheduler.why.values import milliseconds

    spec, plan = found.spec, found.plan
    behind = {one.mesh: one for one in found.update}
    limits = {mesh["name"]: mesh.get("memory_bytes") for mesh in spec["meshes"]}
    proven = "proven optimal" if plan["proven_optimal"] else f"bound {plan['lower_bound_s']:.4g} s"
    lines = [
        f"step       {found.step_s:.4g} s expected: makespan {plan['makespan_s']:.4g} s, "
        f"then REDUCE and STEP {found.update_s:.4g} s",
        f"schedule   {plan['chosen']} ({proven}), bubble {plan['bubble_ratio']:.1%}",
        f"chosen     {spec['microbatches']} microbatches, {len(spec['stages'])} stages on {len(spec['meshes'])} meshes",
        f"measured   by {'the workers of an attempt' if found.measured_by == 'gang' else 'one worker'}",
        "",
    ]
    rows = [("stage", "mesh", "begins at", "forward", "backward", "")]
    again = {one["name"] for one in plan.get("stages", ()) if one["recomputed"]}
    for stage, begin in zip(spec["stages"], found.begins, strict=True):
        backward_s = stage["backward_input_s"] + stage["backward_weight_s"]
        rows.append(
            (
                stage["name"],
                stage["mesh"],
                begin,
                milliseconds(stage["forward_s"]),
                milliseconds(backward_s),
                "recomputed" if stage["name"] in again else "",
            )
        )
    lines += [*_columns(rows), ""]
    rows = [("mesh", "memory", "of", "compute", "REDUCE", "STEP")]
    for mesh in plan["meshes"]:
        update = behind.get(mesh["name"])
        rows.append(
            (
                mesh["name"],
                _bytes(mesh["peak_memory_bytes"]),
                _bytes(limits[mesh["name"]]),
                milliseconds(mesh["compute_s"]),
                milliseconds(update.reduce_s) if update else "",
                milliseconds(update.step_s) if update else "",
            )
        )
    return "\n".join([*lines, *_columns(rows)]) + "\n"


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _bytes(size: int | None) -> str:
    return "no limit" if size is None else f"{size / (1 << 20):,.1f} MiB"


def _say(text: str) -> None:
    typer.echo(f"slotline: {text}", err=True)
