"""The driver: its arithmetic, and whole attempts as processes of their own on a local Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import ray
from control_plane import ControlPlane
from ray.util.placement_group import placement_group_table
from test_actor import job, plain

from service.scheduler import PipelineSpec, make_plan
from worker.driver import Limits, planned_seconds


def pipeline(**changes):
    return PipelineSpec.model_validate(
        {
            "microbatches": 3,
            "meshes": [{"name": "m0"}, {"name": "m1"}],
            "stages": [
                {
                    "name": f"stage {i}",
                    "mesh": f"m{i}",
                    "forward_s": 1.0 + i,
                    "backward_input_s": 2.0,
                    "backward_weight_s": 3.0 + i,
                    "activation_bytes": 1,
                }
                for i in range(2)
            ],
            "edges": [{"source": "stage 0", "target": "stage 1", "forward_s": 0.25, "backward_s": 0.5}],
            **changes,
        }
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_every_instruction_knows_how_long_the_plan_says_it_takes(schedule):
    spec = pipeline(schedule=schedule)
    plan = make_plan(spec, budget_s=0.1).model_dump(mode="json")
    planned = planned_seconds(plan, [stage.name for stage in spec.stages])
    costs = {
        ("F", 0): 1.0, ("F", 1): 2.0, ("B", 0): 5.0, ("B", 1): 6.0,
        ("I", 0): 2.0, ("I", 1): 2.0, ("W", 0): 3.0, ("W", 1): 4.0,
        "SEND_F": 0.25, "RECV_F": 0.25, "SEND_B": 0.5, "RECV_B": 0.5, "REDUCE": 0.0, "STEP": 0.0,
    }  # fmt: skip
    for mesh, program in plan["programs"].items():
        expected = [costs.get(i["op"], costs.get((i["op"], i["stage"]))) for i in program]
        assert planned[mesh] == pytest.approx(expected)


def test_a_limit_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("SLOTLINE_LIMIT_CONNECT_S", "soon")
    with pytest.raises(ValueError, match="SLOTLINE_LIMIT_CONNECT_S is 'soon'"):
        Limits.from_environment()


# Whole attempts


@pytest.fixture(scope="module")
def cluster():
    context = ray.init(
        address="local",
        num_cpus=1,
        resources={"slotline_worker": 2},
        include_dashboard=False,
        log_to_driver=False,
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture
def attempt(cluster):
    """Starts an attempt of a job; (control plane, process of the driver)."""
    started = []

    def start(spec, number=1, resume=None):
        plane = ControlPlane(
            {"job_id": "job", "number": number, "job": spec, "device": "cpu", "resume": resume}
        )
        environment = {
            **os.environ,
            "SLOTLINE_CONTROL_URL": plane.url,
            "SLOTLINE_ATTEMPT_ID": f"job-{number}",
            "SLOTLINE_ATTEMPT_TOKEN": "secret",
            "SLOTLINE_DRIVER_RAY_ADDRESS": cluster,
            "SLOTLINE_METRICS_LINGER_S": "0",
        }
        process = subprocess.Popen([sys.executable, "-m", "worker.driver"], env=environment)
        started.append((plane, process))
        return plane, process

    yield start
    for plane, process in started:
        process.kill()
        process.wait(60)
        plane.close()


def assert_nothing_held():
    deadline = time.monotonic() + 60
    while ray.available_resources().get("slotline_worker") != 2.0:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.1)
    assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_an_attempt_on_fewer_meshes_goes_on_with_losses_and_learning_rates_of_the_plain_loop(
    attempt, tmp_path
):
    place = {"checkpoint": {"uri": str(tmp_path), "every_steps": 3, "keep": 2}}
    spec = job("cosine", **place)
    losses, rates = plain(spec, range(1, 9))
    spec["training"]["steps"] = 5
    first, process = attempt(spec)
    assert process.wait(120) == 0
    assert first.states == ["RUNNING", "SUCCEEDED"]
    assert [report["checkpoint"]["step"] for report in first.reports if report["checkpoint"]][-1] == 5
    spec = job("cosine", meshes=1, **place) | {"pipeline": {"stages": 2, "schedule": "auto"}}
    second, process = attempt(spec, number=2)
    assert process.wait(120) == 0
    found = first.steps + second.steps
    assert [step["step"] for step in found] == list(range(1, 9))
    assert [step["loss"] for step in found] == pytest.approx(losses, rel=1e-5)
    assert [step["learning_rate"] for step in found] == pytest.approx(rates)
    assert_nothing_held()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_driver_that_is_told_to_end_says_so_and_gives_everything_back(attempt):
    spec = job()
    spec["training"]["steps"] = 1_000_000
    plane, process = attempt(spec)
    plane.wait_for_steps(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    assert plane.states == ["RUNNING", "CANCELLED"]
    assert "SIGTERM" in plane.reports[-1]["message"]
    assert_nothing_held()
