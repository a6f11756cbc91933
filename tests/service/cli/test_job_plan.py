"""`slotline plan job.yaml`: on a server's knowledge, or measured here; nothing is trained."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import yaml

from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from tests.polling import until
from tests.service.api.routers.test_job_plans import OPEN, costs
from tests.service.cli.conftest import Run
from tests.service.conftest import job_body
from tests.service.serving import Served
from worker.contract.costs import PROFILE_RESULT_MARK

TINY = {
    "model": {
        "factory": "worker.examples.gpt:build",
        "args": {"layers": 2, "width": 8, "heads": 2, "length": 8},
    },
    "data": {"factory": "worker.examples.text:ByteWindows", "args": {"length": 8}},
    **OPEN,
    "training": {"global_batch": 4, "microbatches": "auto"},
    "resources": {"meshes": 2, "device": "cpu"},
}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No server is given and none answers; what is measured is kept in this folder."""
    monkeypatch.delenv("SLOTLINE_URL", raising=False)
    monkeypatch.setattr("service.client.client.DEFAULT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("SLOTLINE_DATA_DIR", str(tmp_path / "data"))
    return tmp_path


def written(folder: Path, **changes) -> Path:
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job_body(**{**TINY, **changes})))
    return file


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_a_server_a_job_is_measured_here_once_and_planned(run: Run, here: Path, monkeypatch):
    file = written(here)
    found = run("plan", file, "--json", "--budget-s", 1)
    assert found.code == 0, found.err
    assert "measured on this machine" in found.err and "one worker alone" in found.err
    answer = found.json
    assert answer["measured_by"] == "one worker"
    assert answer["spec"]["microbatches"] in (1, 2, 4)
    assert (
        answer["step_s"] == pytest.approx(answer["plan"]["makespan_s"] + answer["update_s"])
        and answer["update_s"] > 0
    )
    assert answer["spec"]["network"]["bandwidth_bytes_per_s"] > 1e6, "links between processes were measured"
    assert all(mesh["memory_bytes"] > 1 << 20 for mesh in answer["spec"]["meshes"])
    assert all(0 < mesh["peak_memory_bytes"] <= 10**9 for mesh in answer["plan"]["meshes"])
    (kept,) = (here / "data" / "costs").iterdir()
    known = json.loads(kept.read_text())
    assert known["tried"] == [1, 2, 4] == [one["microbatches"] for one in known["profiles"]]

    def never(*_arguments, **_options):
        raise AssertionError("measured again")

    monkeypatch.setattr("service.cli.local.plan._measure_costs", never)
    text = run("plan", file, "--budget-s", 1)
    assert text.code == 0, text.err
    assert f"{answer['spec']['microbatches']} microbatches" in text.out and "REDUCE and STEP" in text.out
    for mesh in ("m0", "m1"):
        assert any(line.startswith(mesh) and "MiB" in line for line in text.out.splitlines())
    for begin in answer["begins"]:
        assert begin in text.out
    out = here / "plan.svg"
    assert run("plan", file, "--format", "svg", "-o", out, "--budget-s", 1).code == 0
    assert out.read_text().startswith("<svg")
    named = run("plan", file, "--schedule", "gpipe", "--json", "--budget-s", 1).json
    assert named["plan"]["schedule"] == "gpipe" and len(named["begins"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_users_own_code_is_measured_in_its_folder_and_never_kept(run: Run, here: Path):
    source = here / "src"
    source.mkdir()
    (source / "mine.py").write_text("from worker.examples.gpt import build\n")
    model = {"factory": "mine:build", "args": TINY["model"]["args"]}
    file = written(
        here, model=model, code={"working_dir": "src"}, training={"global_batch": 2, "microbatches": 1}
    )
    found = run("plan", file, "--json", "--budget-s", 0.5)
    assert found.code == 0, found.err
    assert found.json["spec"]["microbatches"] == 1
    assert not (here / "data" / "costs").exists()
    (source / "mine.py").write_text("raise RuntimeError('not ready')\n")
    failed = run("plan", file)
    assert failed.code == 1 and "MODEL_BUILD_FAILED" in failed.err and "not ready" in failed.err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"resources": {}}, "resources.meshes is not given"),
        ({"pipeline": {"stage": 3}}, "pipeline.stage"),
        ({"code": {"working_dir": "package:00"}}, "is not on this machine"),
        ({"code": {"working_dir": "nowhere"}}, "is no folder"),
    ],
)
def test_a_wrong_job_is_refused_before_anything_is_measured(run: Run, here: Path, changes, says):
    refused = run("plan", written(here, **changes))
    assert refused.code == 1 and says in refused.err and not refused.out


def test_measuring_has_a_limit(run: Run, here: Path, monkeypatch):
    monkeypatch.setattr("service.orchestrator.tasks.profile.PROFILE_LIMIT_S", 0.01)
    refused = run("plan", written(here))
    assert refused.code == 1 and "more than 0.01 s" in refused.err and "fewer microbatches" in refused.err


def test_what_only_specs_have_is_refused_for_a_job(run: Run, here: Path):
    refused = run("plan", written(here), "--compare")
    assert refused.code == 1 and "this is a job" in refused.err
    (here / "neither.yaml").write_text("[1, 2]")
    assert "or a job with a model" in run("plan", here / "neither.yaml").err


def test_a_server_that_is_named_and_away_is_not_replaced_by_this_machine(run: Run, here: Path, monkeypatch):
    monkeypatch.setenv("SLOTLINE_URL", "http://127.0.0.1:9")
    refused = run("plan", written(here))
    assert refused.code == 1 and "no Slotline answers" in refused.err


@pytest.mark.slow
def test_a_server_has_one_worker_measure_and_then_answers(run: Run, served: Served, tmp_path: Path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_body(**OPEN)))
    until(lambda: served.run(lambda service: _seen(service)))

    def measure() -> None:
        until(lambda: bool(served.cluster.submissions))
        (run_id,) = served.cluster.submissions
        answer = {"costs": costs(notes=["links were not measured"])}
        served.cluster.logs[run_id] = f"{PROFILE_RESULT_MARK}{json.dumps(answer)}\n"
        served.cluster.states[run_id] = RayJob(RayState.SUCCEEDED)

    thread = threading.Thread(target=measure)
    thread.start()
    found = run("plan", file, "--json", "--budget-s", 0.5)
    thread.join(60)
    assert found.code == 0, found.err
    assert found.json["measured_by"] == "one worker" and "note: links were not measured" in found.err
    assert "one worker measures" in found.err
    assert found.json["spec"]["microbatches"] in (1, 2, 4, 8)
    again = run("plan", file, "--budget-s", 0.5)
    assert again.code == 0 and "measures" not in again.err and "step " in again.out


async def _seen(service) -> bool:
    await service.cluster.refresh()
    return service.cluster.capacity is not None
