"""Elastic jobs on a real Ray: one gives a mesh to an urgent job and takes it back, one loses a node for good."""

from __future__ import annotations

import pytest

from tests.end_to_end.conftest import job_spec
from tests.end_to_end.test_jobs import plain_losses
from tests.polling import until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_job_shrinks_and_grows_and_learns_what_a_plain_loop_learns(server, ray_head, tmp_path):
    spec = job_spec("gpt-elastic", resources={"meshes": {"min": 2, "max": 4}, "device": "cpu"})
    spec["training"] |= {"steps": 100_000}  # long enough for each change to pay
    spec["pipeline"] = {"schedule": "auto"}
    spec["optimizer"]["args"]["lr"] = 1e-4  # no chaos: both loops stay together
    spec["checkpoint"] = {"uri": str(tmp_path), "every_steps": 1000, "keep": 2}
    job_id = server.submit(spec)
    attempts = lambda: server.job(job_id)["attempts"]  # noqa: E731

    def trains(number: int) -> bool:
        return any(step["attempt"] == number for step in server.steps(job_id))

    until(lambda: trains(1), every_s=0.3)
    endless = {"training": spec["training"], "resources": {"meshes": 1, "device": "cpu"}}
    urgent = server.submit(job_spec("gpt-urgent", priority=5, **endless))
    until(lambda: trains(2), attempts, every_s=0.3)
    server.client.post(f"/api/v1/jobs/{urgent}/cancel").raise_for_status()
    until(lambda: trains(3), attempts, every_s=0.3)
    server.client.post(f"/api/v1/jobs/{job_id}/cancel").raise_for_status()
    job = server.wait(job_id)
    assert [attempt["accelerators"] for attempt in job["attempts"]] == [4, 3, 4]
    assert [attempt["reason"] for attempt in job["attempts"][:2]] == ["PREEMPTED", "RESIZED"]
    steps = server.steps(job_id)
    numbers = [step["step"] for step in steps]
    assert numbers == list(range(1, len(steps) + 1)), "each step once: both ends were saved"
    assert {step["attempt"] for step in steps} == {1, 2, 3}
    spec["training"] |= {"steps": len(steps)}
    assert [step["loss"] for step in steps] == pytest.approx(plain_losses(spec), rel=1e-4)
    ray_head.assert_nothing_held()


def test_a_job_that_loses_a_node_for_good_goes_on_with_what_is_left(server, ray_head, spot_node, tmp_path):
    elastic = {"meshes": {"min": 2, "max": 6}, "device": "cpu"}
    spec = job_spec("gpt-six", resources=elastic, retry={"infrastructure": 2})
    spec["training"] |= {"steps": 100_000}
    spec["pipeline"] = {"schedule": "auto"}
    spec["optimizer"]["args"]["lr"] = 1e-4  # no chaos: both loops stay together
    spec["checkpoint"] = {"uri": str(tmp_path), "every_steps": 20, "keep": 2}
    job_id = server.submit(spec)
    attempts = lambda: server.job(job_id)["attempts"]  # noqa: E731
    until(lambda: len(server.steps(job_id)) > 30, attempts, every_s=0.3, limit_s=200)
    spot_node.kill()

    def is_past_the_first_attempt() -> bool:
        """By attempt, then step: a step that no later attempt has made again stands before those that one has."""
        numbers = [(step["attempt"], step["step"]) for step in server.steps(job_id)]
        return numbers[-1][0] > 1 and numbers[-1][1] == max(step for _, step in numbers)

    until(
        is_past_the_first_attempt,
        lambda: (server.job(job_id), server.client.get("/api/v1/nodes").json()),
        every_s=0.3,
        limit_s=150,
    )
    server.client.post(f"/api/v1/jobs/{job_id}/cancel").raise_for_status()
    job = server.wait(job_id)
    first, last = job["attempts"]  # none in between: Ray takes the node for alive, we do not
    assert (first["accelerators"], first["reason"], last["accelerators"]) == (6, "NODE_LOST", 4), job[
        "attempts"
    ]
    steps = server.steps(job_id)
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1)), "each step once"
    spec["training"] |= {"steps": len(steps)}
    assert [step["loss"] for step in steps] == pytest.approx(plain_losses(spec), rel=1e-4)
    ray_head.assert_nothing_held()
