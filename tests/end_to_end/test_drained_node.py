"""A node that ends while a job trains on it: its hook returns when the job goes on elsewhere, no step lost."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.end_to_end.conftest import TWO, job_spec
from tests.end_to_end.test_jobs import plain_losses
from tests.polling import until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_job_has_left_a_node_before_it_ends_and_learns_what_a_plain_loop_learns(
    server, ray_head, spot_node, tmp_path
):
    endless = job_spec("gpt-first", resources={"meshes": 4, "device": "cpu"})
    endless["training"] |= {"steps": 100_000}
    first = server.submit(endless)
    until(lambda: len(server.steps(first)) > 0, lambda: server.job(first), every_s=0.3, limit_s=120)
    spec = job_spec("gpt-on-spot", resources=TWO)
    spec["training"] |= {"steps": 100_000}
    spec["optimizer"]["args"]["lr"] = 1e-4  # no chaos: both loops stay together
    spec["checkpoint"] = {"uri": str(tmp_path), "every_steps": 1000, "keep": 2}
    job_id = server.submit(spec)
    until(lambda: len(server.steps(job_id)) > 5, lambda: server.job(job_id), every_s=0.3, limit_s=120)
    server.client.post(f"/api/v1/jobs/{first}/cancel").raise_for_status()
    server.wait(first)
    hook = subprocess.run(
        [sys.executable, "-m", "worker.tasks", "drain"],
        env={
            **os.environ,
            "RAY_ADDRESS": ray_head.gcs_address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": ray_head.token,
            "SLOTLINE_DRAIN_NODE": spot_node.id,
        },
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert hook.returncode == 0 and "no attempt is here any more" in hook.stdout, hook.stdout + hook.stderr
    until(
        lambda: len(server.job(job_id)["attempts"]) > 1, lambda: server.job(job_id), every_s=0.3, limit_s=60
    )
    began = server.job(job_id)["progress"]["step"]
    until(
        lambda: server.job(job_id)["progress"]["step"] > began + 20,
        lambda: server.job(job_id),
        every_s=0.3,
        limit_s=200,
    )
    server.client.post(f"/api/v1/jobs/{job_id}/cancel").raise_for_status()
    job = server.wait(job_id)
    assert (job["state"], len(job["attempts"])) == ("CANCELLED", 2), job
    assert job["attempts"][0]["reason"] == "PREEMPTED", "its node had not ended yet"
    steps = server.steps(job_id)
    spec["training"]["steps"] = len(steps)
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1)), (
        "each step once: the node's end lost none"
    )
    assert {step["attempt"] for step in steps} == {1, 2}
    assert [step["loss"] for step in steps] == pytest.approx(plain_losses(spec), rel=1e-4)
    ray_head.assert_nothing_held()
