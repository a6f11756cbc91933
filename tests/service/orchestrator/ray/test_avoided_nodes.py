"""Ray jobs that are not to run on some nodes, on a Ray of two nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from ray.cluster_utils import Cluster

from service.orchestrator.ray.jobs_api import ClusterError, RayCluster, RayJobSubmission
from service.orchestrator.ray.local_ray import free_ports

LIMIT_S = 150.0


@pytest.fixture
def address() -> Iterator[str]:
    (port,) = free_ports(1)
    dashboard = {"include_dashboard": True, "dashboard_port": port}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, **dashboard, "dashboard_agent_listen_port": 0}
    )
    cluster.add_node(num_cpus=1, dashboard_agent_listen_port=0)
    yield f"http://127.0.0.1:{port}"
    cluster.shutdown()


async def submit(ray: RayCluster, submission: RayJobSubmission) -> None:
    """Once Ray takes it: the agents of its nodes start behind it."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                return await ray.submit(submission)
            except ClusterError:
                await asyncio.sleep(1)


async def node_of(address: str, job: str) -> str:
    async with httpx.AsyncClient(base_url=address) as client, asyncio.timeout(LIMIT_S):
        while (found := (await client.get(f"/api/jobs/{job}")).json())["status"] in ("PENDING", "RUNNING"):
            await asyncio.sleep(0.2)
    assert found["status"] == "SUCCEEDED", found["message"]
    return found["driver_node_id"]


@pytest.mark.ray
@pytest.mark.slow
async def test_a_ray_job_runs_on_no_node_that_it_avoids(address: str):
    ray = RayCluster(address)
    async with asyncio.timeout(LIMIT_S):
        while len(nodes := await ray.nodes()) < 2:
            await asyncio.sleep(0.2)
    for avoided, other in (nodes, reversed(nodes)):
        submission = RayJobSubmission(f"not-on-{avoided.id}", "true", {}, {}, avoid=(avoided.id,))
        await submit(ray, submission)
        assert await node_of(address, submission.id) == other.id
