"""Copies in host memory, over REST on a real Ray: a killed worker costs no step since the last one, and nothing is left."""

from __future__ import annotations

import os
import signal

import pytest

from tests.end_to_end.conftest import TWO, job_spec
from tests.polling import until
from worker.contract.job import job_of_keeper

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def keepers(head, job_id: str) -> list[str]:
    """The names of the living keepers of a job."""
    living = [actor["name"] or "" for actor in head._list("actors") if actor["state"] != "DEAD"]
    return [name for name in living if job_of_keeper(name) == job_id]


def copying(name: str, folder, **changes):
    spec = job_spec(name, resources=TWO, **changes)
    spec["training"] |= {"steps": 100_000}
    spec["pipeline"] = {"stages": 2, "schedule": "1f1b", "replan": "off"}
    spec["checkpoint"] = {"uri": str(folder), "every_steps": 90_000, "copy_every_steps": 2}
    return spec


@pytest.mark.slow
def test_a_job_goes_on_from_its_copies_and_its_keepers_end_when_it_fails_or_is_cancelled(
    server, ray_head, tmp_path
):
    job_id = server.submit(copying("gpt-copied", tmp_path, retry={"infrastructure": 3}))
    until(lambda: server.job(job_id)["progress"]["step"] > 10, every_s=0.1)
    os.kill(ray_head.worker_pids()[1], signal.SIGKILL)
    until(lambda: len(server.job(job_id)["attempts"]) == 2, every_s=0.1)
    reached = server.job(job_id)["progress"]["step"]
    until(lambda: server.job(job_id)["progress"]["step"] > reached + 4, every_s=0.1)
    events = server.client.get(f"/api/v1/jobs/{job_id}/events").json()["items"]
    (resumed,) = (event["message"] for event in events if event["kind"] == "resumed")
    step = int(resumed.split()[3])
    assert "the copies in host memory" in resumed and reached - 6 <= step <= reached + 1, (resumed, reached)
    steps = [step["step"] for step in server.steps(job_id)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(keepers(ray_head, job_id)) == 1
    server.client.post(f"/api/v1/jobs/{job_id}/cancel").raise_for_status()
    server.wait(job_id)
    until(lambda: not keepers(ray_head, job_id), lambda: keepers(ray_head, job_id), every_s=0.3)

    failing = server.submit(copying("gpt-failing", tmp_path, retry={"infrastructure": 0}))
    until(lambda: server.job(failing)["progress"]["step"] > 3, every_s=0.1)
    assert len(keepers(ray_head, failing)) == 1
    os.kill(ray_head.worker_pids()[0], signal.SIGKILL)
    assert server.wait(failing, {"FAILED"})["reason"] == "WORKER_LOST"
    until(lambda: not keepers(ray_head, failing), lambda: keepers(ray_head, failing), every_s=0.3, limit_s=60)
    ray_head.assert_nothing_held()
