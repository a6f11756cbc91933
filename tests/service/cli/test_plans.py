"""`slotline plan job.yaml --name`, `slotline plans` and `slotline submit --plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from service.control_plane import ControlPlane
from service.spec.job import JobSpec
from service.store.database import utc_now
from service.store.measurements import MEASURED_BY_GANG, record_costs
from tests.service.api.routers.test_job_plans import OPEN, costs
from tests.service.cli.conftest import Run
from tests.service.cli.test_completion import asked
from tests.service.conftest import job_body
from tests.service.serving import Served
from worker.contract.costs import costs_digest


@pytest.fixture
def job_file(served: Served, tmp_path: Path) -> Path:
    """A job whose costs are known to the server."""
    body = job_body(**OPEN)
    digest = costs_digest(JobSpec.model_validate(body).model_dump(mode="json"))

    async def record(service: ControlPlane) -> None:
        async with service.database.write() as session:
            await record_costs(
                session, digest, costs(), measured_by=MEASURED_BY_GANG, accelerator_type=None, at=utc_now()
            )

    served.run(record)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(body))
    return file


@pytest.mark.slow
def test_a_plan_is_kept_shown_used_and_removed(run: Run, served: Served, job_file: Path):
    made = run("plan", job_file, "--name", "mine", "--json", "--budget-s", 0.5)
    assert made.code == 0, made.err
    assert made.json["named"]["name"] == "mine"
    assert run("plans", "list", "--json").json[0]["name"] == "mine"
    assert "mine" in run("plans", "list").out and "small" in run("plans", "list").out
    shown = run("plans", "show", "mine")
    assert "microbatches" in shown.out and "step" in shown.out
    assert run("plans", "show", "mine", "--json").json["plan"]["begins"] == made.json["begins"]
    job = run("submit", job_file, "--plan", "mine", "--json")
    assert job.code == 0 and job.json["spec"]["plan"] == "mine", job.err
    assert asked("bash", "slotline submit --plan m", SLOTLINE_URL=served.url).split() == ["mine"]
    assert json.loads(run("plans", "remove", "mine", "--json").out) == {"removed": "mine"}
    assert "no saved plans" in run("plans", "list").out
    refused = run("submit", job_file, "--plan", "mine")
    assert refused.code == 1 and "you have no such saved plan" in refused.err


def test_what_cannot_be_kept_is_refused(run: Run, served: Served, job_file: Path, tmp_path: Path):
    local = run("plan", job_file, "--name", "mine", "--local")
    assert local.code == 1 and "leave out one" in local.err
    spec = tmp_path / "spec.json"
    spec.write_text(
        '{"microbatches": 1, "meshes": [{"name": "m"}], "stages": [{"name": "s", "mesh": "m", "forward_s": 1}]}'
    )
    assert "this is a pipeline spec" in run("plan", spec, "--name", "mine").err
    assert run("submit", job_file, "--plan", "no name").code == 2
