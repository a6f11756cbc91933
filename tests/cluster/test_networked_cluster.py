"""Jobs on Ray nodes with networks of their own: meshes kept whole, a link cut for a while and for good."""

from __future__ import annotations

import time
from collections import defaultdict
from datetime import datetime

import pytest

from tests.cluster.networked_ray import NetworkedRay
from tests.end_to_end.conftest import Server, job_spec
from tests.end_to_end.test_jobs import plain_losses
from tests.polling import until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


def long_job(name: str, **changes) -> dict:
    spec = job_spec(name, **changes)
    spec["training"] |= {"steps": 100_000}
    spec["optimizer"]["args"]["lr"] = 1e-4  # no chaos: both loops stay together
    return spec


def trained(server: Server, job_id: str, steps: int, limit_s: float = 200) -> None:
    until(
        lambda: (server.job(job_id)["progress"]["step"]) >= steps,
        lambda: server.job(job_id),
        every_s=0.2,
        limit_s=limit_s,
    )


def assert_learned(server: Server, job_id: str, spec: dict) -> None:
    """Every step once, and the losses of a plain loop."""
    server.client.post(f"/api/v1/jobs/{job_id}/cancel").raise_for_status()
    server.wait(job_id)
    steps = server.steps(job_id)
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    spec["training"] |= {"steps": len(steps)}
    assert [step["loss"] for step in steps] == pytest.approx(plain_losses(spec), rel=1e-4)


def test_meshes_of_two_are_whole_where_nodes_have_three_places(
    networked_ray: NetworkedRay, net_server: Server
):
    """PACK fills a node of three with a mesh and a half."""
    spec = job_spec("gpt-whole", parallelism={"pp": 3, "dp": 2}, resources={"device": "cpu"})
    spec["pipeline"] = {"schedule": "auto"}
    job_id = net_server.submit(spec)
    job = net_server.wait(job_id, limit_s=300)
    assert job["state"] == "SUCCEEDED", job
    nodes = defaultdict(set)
    for mesh in job["attempts"][0]["placed"]:
        nodes[mesh["mesh"]].add(mesh["node"])
    assert sorted(*zip(*nodes.values(), strict=True)) == networked_ray.hosts[1:], "a whole mesh on each"
    assert [step["loss"] for step in net_server.steps(job_id)] == pytest.approx(plain_losses(spec), rel=1e-4)


def test_a_link_that_is_cut_for_eight_seconds_ends_no_attempt(
    networked_ray: NetworkedRay, net_server: Server
):
    spec = long_job("gpt-eight")
    job_id = net_server.submit(spec)
    trained(net_server, job_id, 20)
    heard = lambda: datetime.fromisoformat(net_server.job(job_id)["attempts"][0]["heartbeat_at"])  # noqa: E731
    cut_at = heard()
    networked_ray.net.set_connected(2, False)
    until(lambda: (heard() - cut_at).total_seconds() > 8, lambda: net_server.job(job_id), every_s=0.2)
    networked_ray.net.set_connected(2, True)
    before = net_server.job(job_id)["progress"]["step"]
    trained(net_server, job_id, before + 20)
    assert [attempt["state"] for attempt in net_server.job(job_id)["attempts"]] == ["RUNNING"]
    assert_learned(net_server, job_id, spec)


def test_a_node_whose_link_is_cut_for_good_is_named_and_the_job_goes_on_elsewhere(
    networked_ray: NetworkedRay, net_server: Server, tmp_path
):
    spec = long_job(
        "gpt-cut", retry={"infrastructure": 3}, resources={"meshes": {"min": 2, "max": 6}, "device": "cpu"}
    )
    spec["pipeline"] = {"schedule": "auto"}
    spec["checkpoint"] = {"uri": str(tmp_path), "every_steps": 20, "keep": 2}
    job_id = net_server.submit(spec)
    trained(net_server, job_id, 30)
    node = net_server.job(job_id)["attempts"][0]["placed"][0]["node"]
    networked_ray.net.set_connected(networked_ray.hosts.index(node), False)
    began = time.monotonic()
    try:
        until(
            lambda: net_server.job(job_id)["attempts"][0]["state"] == "FAILED",
            lambda: net_server.job(job_id),
            every_s=0.2,
            limit_s=120,
        )
        noticed_s = time.monotonic() - began
        failed = net_server.job(job_id)["attempts"][0]
        assert failed["reason"] == "NODE_LOST" and node in failed["message"], failed
        trained(net_server, job_id, net_server.job(job_id)["progress"]["step"] + 20)
    finally:
        networked_ray.net.set_connected(networked_ray.hosts.index(node), True)
    print(f"noticed after {noticed_s:.1f} s, trains again after {time.monotonic() - began:.1f} s")
    assert_learned(net_server, job_id, spec)
