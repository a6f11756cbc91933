"""A job that asks for an accelerator type trains on the nodes of that type, beside one that asks for none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.end_to_end.conftest import TWO, RayHead, Server, SpotNode, job_spec
from tests.end_to_end.test_jobs import plain_losses
from tests.polling import until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
TYPE = "EPYC-9654"


@pytest.fixture
def typed_node(ray_head: RayHead, server: Server) -> Iterator[SpotNode]:
    node = SpotNode(ray_head, TYPE)
    try:
        node.wait_until_known(server.client)
        yield node
    finally:
        node.stop()


def test_jobs_train_on_the_type_that_they_ask_for_or_leave_it_to_others(server, ray_head, typed_node):
    asks = job_spec("gpt-typed", resources=TWO | {"accelerator": TYPE})
    endless = asks | {"name": "gpt-first", "training": asks["training"] | {"steps": 100_000}}
    first = server.submit(endless)
    server.wait(first, {"RUNNING"}, limit_s=300)
    later = server.submit(asks)  # waits for its type throughout
    untyped = server.submit(job_spec("gpt-any", resources=TWO))
    too_large = server.submit(
        job_spec("gpt-large", resources={"meshes": 4, "device": "cpu", "accelerator": TYPE})
    )
    until(
        lambda: server.job(too_large)["reason"] == "CLUSTER_TOO_SMALL",
        lambda: server.job(too_large),
        every_s=0.3,
        limit_s=120,
    )
    assert f"of type {TYPE}" in server.job(too_large)["message"]
    server.client.post(f"/api/v1/jobs/{too_large}/cancel").raise_for_status()
    for job_id in (untyped, later):
        job = server.wait(job_id, limit_s=300)
        assert job["state"] == "SUCCEEDED", job
        (attempt,) = job["attempts"]
        nodes = {mesh["node"] for mesh in attempt["placed"]}
        if job_id == untyped:
            assert attempt["accelerator_type"] is None and typed_node.NAME not in nodes
            server.client.post(f"/api/v1/jobs/{first}/cancel").raise_for_status()
            (attempt,) = server.wait(first)["attempts"]
            assert attempt["accelerator_type"] == TYPE
        else:
            assert (attempt["accelerator_type"], nodes) == (TYPE, {typed_node.NAME})
        assert [step["loss"] for step in server.steps(job_id)] == pytest.approx(plain_losses(asks), rel=1e-4)
    ray_head.assert_nothing_held()
