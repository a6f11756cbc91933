"""How stages recompute, told on the page of a job and by `slotline plan`."""

import asyncio
import json

from service.cli.plan import job_plan_text
from service.jobs import explain
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec_checks import load_spec
from service.schemas.plans import JobPlanPreview
from tests.service.scheduler.specs import by_every_method


def body():
    spec = load_spec(by_every_method())
    return {
        "begins": ["a", "b", "c", "d"],
        "spec": spec.model_dump(mode="json"),
        "plan": make_plan(spec, budget_s=0.2).model_dump(mode="json"),
    }


class Reads:
    """A database with one job and its plan."""

    def __init__(self, plan):
        self.database, self.plan = self, plan

    def read(self):
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None


def test_the_page_says_of_each_mesh_which_stages_recompute_and_how(monkeypatch):
    class Row:
        body, attempt = json.dumps(body()), 1

    async def found(*_):
        return Row

    async def no_attempts(*_):
        return []

    monkeypatch.setattr(explain, "existing_job", found)
    monkeypatch.setattr(explain, "find_job_plan", found)
    monkeypatch.setattr(explain, "attempts_of", no_attempts)
    rows = asyncio.run(explain.read_memory(Reads(Row), "job"))
    assert [row["recomputed"] for row in rows] == [[], ["s1"], ["s2 but for products"], ["s3 by block"]]


def test_slotline_plan_says_it_behind_the_stage():
    preview = JobPlanPreview(
        **body(), step_s=1.0, update_s=0.0, update=[], measured_by="one worker", notes=[], slowdown=1.0
    )
    lines = job_plan_text(preview).splitlines()
    told = {
        stage: next(line for line in lines if line.startswith(stage)) for stage in ("s0", "s1", "s2", "s3")
    }
    assert "recomputed" not in told["s0"]
    assert told["s1"].rstrip().endswith("recomputed")
    assert told["s2"].rstrip().endswith("recomputed but for products")
    assert told["s3"].rstrip().endswith("recomputed by block")
