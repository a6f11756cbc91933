"""Plans written as torch's action CSV: accepted by torch's own checks, and run with equal gradients."""

import importlib.util
import itertools
import json
import subprocess
import sys

import pytest

from service.scheduler.planner import make_plan
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.views.render import render
from tests.missing import needs
from tests.service.scheduler.specs import SHARED, chain
from tests.tiers import some_by_day

ORACLE, RUNNER = SHARED / "tools" / "torch_oracle.py", SHARED / "tools" / "torch_run.py"
needs_tools = needs(ORACLE, "the shared folder beside the checkout has the tools")


def placements(meshes):
    """Name → (mesh of each stage, schedules) for chains on this many meshes."""
    stages = 2 * meshes
    return {
        "one": (list(range(meshes)), ["gpipe", "1f1b", "eager-1f1b", "zb-h1", "auto"]),
        "loop": ([s % meshes for s in range(stages)], ["interleaved-1f1b", "auto"]),
        "v": ([min(s, stages - 1 - s) for s in range(stages)], ["zb-v", "auto"]),
    }


def plan_csv(placed, microbatches, schedule, split):
    data = chain(
        len(placed), microbatches, meshes=placed, schedule=schedule, split_backward=split, transfer=0.4
    )
    if schedule == "auto":
        for mesh in data["meshes"]:
            held = 2 * placed.count(int(mesh["name"][1:]))
            mesh["activation_limit_bytes"] = held * 2
    spec = load_spec(data)
    return render(spec, make_plan(spec, budget_s=0.2), "csv")


@needs_tools
@some_by_day("meshes", [1, 2, 3, 4], by_day=1)
def test_torch_accepts_the_csv_of_every_schedule_on_every_placement(meshes, tmp_path):
    definition = importlib.util.spec_from_file_location("torch_oracle", ORACLE)
    oracle = importlib.util.module_from_spec(definition)
    definition.loader.exec_module(oracle)
    path = tmp_path / "plan.csv"
    checked = 0
    for placement, (placed, schedules) in placements(meshes).items():
        if meshes == 1 and placement == "loop":
            continue
        for schedule, microbatches, split in itertools.product(schedules, (1, 3, 8), (None, False, True)):
            if split is False and schedule.startswith("zb"):
                continue
            path.write_text(plan_csv(placed, microbatches, schedule, split))
            report, code = oracle.check(oracle.load(str(path)))
            assert code == 0, (placement, schedule, microbatches, split, report.get("reason"))
            assert not [w for w in report["beyond_torch"] if not w.startswith(("p2p order", "with defer"))]
            checked += 1
    assert checked > 30


@needs_tools
@pytest.mark.slow
@pytest.mark.parametrize(
    ("placed", "microbatches", "schedule", "split"),
    [([0, 1, 2], 5, "auto", True), ([0, 1, 1, 0], 4, "zb-v", None), ([0, 1, 2], 4, "eager-1f1b", False)],
    ids=["auto", "zb-v", "eager-1f1b"],
)
def test_torch_runs_the_csv_with_the_gradients_of_one_process(
    placed, microbatches, schedule, split, tmp_path
):
    path = tmp_path / "plan.csv"
    path.write_text(plan_csv(placed, microbatches, schedule, split))
    command = [sys.executable, str(RUNNER), str(path), "--timeout", "120"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["max_grad_err"] < 1e-9
