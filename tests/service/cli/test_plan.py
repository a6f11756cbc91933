"""Planning by the command, which needs no server."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from service.cli.local.plan import plan_from_costs
from service.spec.job import JobSpec
from tests.service.api.routers.test_job_plans import OPEN, costs
from tests.service.api.routers.test_plans_api import SPEC
from tests.service.cli.conftest import Run
from tests.service.conftest import job_body


def test_planning_needs_no_server(run: Run, tmp_path: Path):
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(SPEC))
    assert run("plan", spec, "--json").json["chosen"] == "1f1b"
    assert run("plan", tmp_path / "none.json").code == 1
    nowhere = run("plan", spec, "-o", tmp_path / "none" / "plan.json")
    assert nowhere.code == 1 and "none/plan.json" in nowhere.err


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has not planned yet: whoever needs the kernels first waits 1000 s for them, by a clock of ours."""
    from service.scheduler import planner

    now_s, compiled = [0.0], []

    def first_time(function):
        def call(*arguments, **options):
            if not compiled:
                compiled.append(function)
                now_s[0] += 1000.0
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    for name in ("compile_kernels", "make_plan"):
        monkeypatch.setattr(planner, name, first_time(getattr(planner, name)))
    monkeypatch.setattr("service.scheduler.job.joint.make_plan", planner.make_plan)


def test_the_first_plan_on_a_machine_has_its_whole_budget_when_the_kernels_are_there(
    run: Run, tmp_path: Path, cold: None
):
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({**SPEC, "schedule": "auto"}))
    plan = run("plan", spec, "--json").json
    assert not plan["truncated"] and plan["proven_optimal"]


def test_so_has_the_first_plan_of_a_job(cold: None):
    job = JobSpec.model_validate(job_body(**OPEN)).model_dump(mode="json")
    assert not plan_from_costs(job, costs(), 1.0)["plan"]["truncated"]
