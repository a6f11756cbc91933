"""Measures and plans a job on this machine, as `slotline plan --local` and `slotline verify` do.

A worker's profiler runs in a subprocess. Measured costs are cached in data_dir, unless the job brings its own code. The
scheduler takes a second to import and is therefore imported inside functions.
"""

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

from pydantic import ValidationError

from service.cli.extras import require_extras
from service.cli.output import print_message
from service.settings.settings import load_settings
from service.spec.field_errors import field_errors
from service.spec.job import PACKAGE_PREFIX, REMOTE_CODE_PREFIXES, SubmittedJob
from worker.contract.costs import costs_digest

_JOB_SEARCH_GRACE_S = 30.0  # a search that passes its budget by more has gone wrong


def validated_job(data: dict[str, Any], file: Path) -> tuple[dict[str, Any], Path | None]:
    """The job's specification, as a server would read it, and its folder of code on this machine."""
    code, folder = data.get("code"), None
    place = code.get("working_dir") if isinstance(code, dict) else None
    if isinstance(place, str):
        if place.startswith((PACKAGE_PREFIX, *REMOTE_CODE_PREFIXES)):
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
        spec = SubmittedJob.model_validate(data)
    except ValidationError as error:
        details = [{**item, "loc": ("job", *item["loc"])} for item in error.errors()]
        raise ValueError(field_errors(details)[1].replace("; job: ", "; ").removeprefix("job: ")) from None
    if spec.code.pip:
        print_message(
            f"note: {', '.join(spec.code.pip)} of code.pip are not installed here, but used if they are there"
        )
    return spec.model_dump(mode="json"), folder


def local_job_costs(spec: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Measured costs of the job on this machine, cached in data_dir where no code of the user's own can change them."""
    require_extras("server", "worker")
    from worker.contract.job import Job, microbatch_counts

    counts = microbatch_counts(Job.from_json(spec))
    device = _local_device(spec)
    place = load_settings().data_dir.expanduser() / "costs" / f"{costs_digest(spec)}-{device}.json"
    cached = folder is None
    if cached and place.is_file():
        with contextlib.suppress(ValueError, KeyError):  # a file that was cut off is written anew
            known = json.loads(place.read_text())
            if set(counts) <= set(known["tried"]):
                return known
    costs = _measure_costs(spec, device, folder)
    if cached:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(costs))
    return costs


def _measure_costs(spec: dict[str, Any], device: str, folder: Path | None) -> dict[str, Any]:
    from service.orchestrator.tasks.profile import PROFILE_LIMIT_S, read_profile_result

    try:
        done = subprocess.run(
            [sys.executable, "-m", "worker.tasks", "profile"],
            input=json.dumps({"job": spec, "device": device}),
            stdout=subprocess.PIPE,
            text=True,
            timeout=PROFILE_LIMIT_S,
            cwd=folder,
            env={**os.environ, **spec.get("env", {}), "PYTHONPATH": python_path(folder)},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"measuring the job took more than {PROFILE_LIMIT_S:g} s and was ended: give it fewer microbatches, "
            "or submit it, which measures where it trains"
        ) from None
    costs = read_profile_result(done.stdout)
    if costs is None:
        raise ValueError(f"measuring the job ended without a result (exit code {done.returncode})")
    return costs


def python_path(folder: Path | None) -> str:
    """PYTHONPATH of a process that runs the user's code: the job's folder of code first."""
    own = os.environ.get("PYTHONPATH", "").split(
        os.pathsep
    )  # the process starts in the folder: no relative ones
    paths = [*([folder] if folder else []), *(Path(path) for path in own if path)]
    return os.pathsep.join(str(path.resolve()) for path in paths)


def _local_device(spec: Mapping[str, Any]) -> str:
    """cuda where the job wants it; for auto where NVIDIA's driver is loaded on this machine."""
    wanted = spec["resources"]["device"]
    if wanted != "auto":
        return wanted
    return "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu"


def plan_from_costs(spec: dict[str, Any], costs: Mapping[str, Any], budget_s: float) -> dict[str, Any]:
    """The answer that a control plane would give a driver that measured these costs of the job, as JSON; searched for
    longer, as no workers wait for it."""
    from service.scheduler.job.plan_job import (
        OFFLINE_SEARCH_SHARE,
        JobCosts,
        job_plan_json,
        plan_for_training,
    )
    from service.scheduler.planner import compile_kernels
    from worker.contract.job import Job

    job = Job.from_json(spec)
    compile_kernels()  # the first plan on a machine would else spend its time on that
    latest = time.monotonic() + budget_s + _JOB_SEARCH_GRACE_S
    planned = plan_for_training(
        job,
        JobCosts.from_json(costs, job),
        budget_s=budget_s,
        search_share=OFFLINE_SEARCH_SHARE,
        expired=lambda: time.monotonic() > latest,
    )
    for note in planned.plan.notes:
        print_message(note)
    return job_plan_json(planned)
