"""Attempts as processes of their own on a local Ray: what a driver and Ray do to each other, and lost processes.

What an attempt trains is compared with plain loops in test_attempt.py, in one process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from tests.polling import until
from tests.worker.actor.test_actor import job
from tests.worker.driver.control_plane import ControlPlane
from tests.worker.driver.resident import AS_OTHERS


@pytest.fixture(scope="module")
def cluster():
    context = ray.init(
        address="local",
        num_cpus=1,
        resources={"slotline_worker": 3},
        include_dashboard=False,
        log_to_driver=False,
        _system_config=AS_OTHERS,
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture
def attempt(cluster):
    """Starts attempts, (control plane, process of the driver) of a job each, and ends them."""
    started: list[tuple[ControlPlane, subprocess.Popen]] = []

    def start(spec):
        plane = ControlPlane({"job_id": "job", "number": 1, "job": spec, "device": "cpu", "resume": None})
        environment = {
            **os.environ,
            "SLOTLINE_CONTROL_URL": plane.url,
            "SLOTLINE_ATTEMPT_ID": "job-1",
            "SLOTLINE_ATTEMPT_TOKEN": "secret",
            "SLOTLINE_DRIVER_RAY_ADDRESS": cluster,
            "SLOTLINE_LIMIT_LINGER_S": "0",
        }
        started.append((plane, subprocess.Popen([sys.executable, "-m", "worker.driver"], env=environment)))
        return started[-1]

    yield start
    for plane, process in started:
        process.kill()
        process.wait(60)
        plane.close()


def assert_nothing_held():
    until(
        lambda: ray.available_resources().get("slotline_worker") == 3.0,
        ray.available_resources,
        every_s=0.1,
    )
    assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}


@pytest.mark.ray
@pytest.mark.slow
def test_a_job_that_cannot_be_built_fails_while_others_hold_every_accelerator(attempt):
    spec = job(
        data={"factory": "worker.examples.text:ByteWindows", "args": {"length": 8, "path": "/nowhere"}}
    )
    spec["model"]["args"]["widht"] = 3
    others = placement_group([{"slotline_worker": 3.0}])
    ray.get(others.ready(), timeout=60)
    try:
        plane, process = attempt(spec)
        assert process.wait(120) == 1
    finally:
        remove_placement_group(others)
    assert plane.states == ["FAILED"]
    last = plane.reports[-1]
    assert last["reason"] == "MODEL_BUILD_FAILED"
    assert "model.args: " in last["message"] and "'widht' (did you mean width?)" in last["message"]
    assert "data: " in last["message"] and "no text in '/nowhere'" in last["message"]
    kinds = [event["kind"] for report in plane.reports for event in report["events"]]
    assert "versions" in kinds and "placed" not in kinds
    assert_nothing_held()


@pytest.mark.ray
@pytest.mark.slow
def test_a_driver_that_is_told_to_end_says_so_and_gives_everything_back(attempt):
    spec = job(stages=1, meshes=1)
    spec["training"]["steps"] = 1_000_000
    plane, process = attempt(spec)
    plane.wait_for_steps(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    assert plane.states == ["RUNNING", "CANCELLED"]
    assert "SIGTERM" in plane.reports[-1]["message"]
    assert_nothing_held()


@pytest.mark.ray
@pytest.mark.slow
def test_a_worker_that_dies_in_native_code_is_told_as_that_with_its_action_and_leaves_no_file(attempt):
    spec = job(loss={"factory": "tests.worker.workers:DiesAfter", "args": {"calls": 40}})
    spec["training"]["steps"] = 1000
    left_before = set(Path(tempfile.gettempdir()).glob("slotline-*.doing"))
    plane, process = attempt(spec)
    assert process.wait(120) == 1
    last = plane.reports[-1]
    assert last["reason"] == "WORKER_LOST"
    assert re.search(
        r"step (\d+): worker 0 of mesh m1 on node .* is gone.* native code \(Segmentation fault\) in 1F[01] of step (\d+)",
        last["message"],
    ), last["message"]
    assert set(Path(tempfile.gettempdir()).glob("slotline-*.doing")) <= left_before
    assert_nothing_held()
