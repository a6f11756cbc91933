"""The grid of nodes on the cluster page, at 32 nodes of 8 accelerators, and the nodes on a job's page."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from service.client.client import Client
from service.control_plane import ControlPlane
from service.orchestrator.ray.jobs_api import RayNode
from service.settings.settings import Settings
from service.spec.states import BY_SLOTLINE, NodeMark, NodeState
from service.store.attempts import record_placement
from service.store.database import utc_now
from service.store.node_states import set_node_mark
from service.store.tables import PlacedMeshRow
from tests.polling import until
from tests.service.conftest import job_body
from tests.service.fake_cluster import FakeCluster
from tests.service.serving import Served, serve

NODES, EACH = 32, 8


class LargeCluster(FakeCluster):
    """Nodes with long names, as clouds give them, and a head without accelerators."""

    async def nodes(self) -> list[RayNode]:
        workers = [
            RayNode(
                f"id-{n}",
                f"10.0.0.{n}",
                {"slotline_worker": float(EACH), "accelerator_type:H200": 1.0},
                host=node_name(n),
            )
            for n in range(NODES)
        ]
        return [RayNode("head", "10.0.1.1", {}, host="head"), *workers]


def node_name(number: int) -> str:
    return f"gke-train-h200-pool-7f3c91d2-{number:04}"


def placed(served: Served, job_id: str, first_node: int, meshes: int) -> None:
    """The attempt's meshes of 4 workers, two on a node."""
    rows = [
        PlacedMeshRow(
            attempt_id=f"{job_id}-1",
            job_id=job_id,
            cluster="default",
            mesh=f"m{mesh}",
            node_id=f"id-{first_node + mesh // 2}",
            node=node_name(first_node + mesh // 2),
            workers=4,
        )
        for mesh in range(meshes)
    ]

    async def work(service: ControlPlane) -> None:
        async with service.database.write() as session:
            await record_placement(session, f"{job_id}-1", rows)

    served.run(work)


def marked(
    served: Served, number: int, state: NodeState, by: str, reason: str, hours: int | None = None
) -> None:
    until_ = None if hours is None else utc_now() + timedelta(hours=hours)
    mark = NodeMark("default", node_name(number), state, by, utc_now(), reason, until_)

    async def work(service: ControlPlane) -> None:
        async with service.database.write() as session:
            await set_node_mark(session, mark)

    served.run(work)


@pytest.mark.slow
def test_a_grid_of_32_nodes_of_8_reads_on_a_wide_and_on_a_narrow_screen(page, tmp_path: Path):
    cluster = LargeCluster()
    with (
        serve(Settings(data_dir=tmp_path, tick_s=0.05), cluster=cluster) as served,
        Client(served.url) as client,
    ):
        jobs = []
        for name, meshes in (("llama-70b", 32), ("ablation-a", 8), ("unet", 4)):
            body = job_body(name=name, parallelism={"pp": meshes, "dp": 4}, pipeline={"stages": meshes})
            body["model"]["args"]["layers"] = body["training"]["global_batch"] = 32
            jobs.append(client.submit(body).id)
        until(lambda: all(f"{job}-1" in cluster.submissions for job in jobs))
        for job, first, meshes in zip(jobs, (0, 16, 21), (32, 8, 4), strict=True):
            placed(served, job, first, meshes)
        marked(served, 25, NodeState.QUARANTINED, BY_SLOTLINE, "it lost 2 attempts: " + ", ".join(jobs), 6)
        marked(served, 3, NodeState.EXCLUDED, "olga", "a fan is slow")
        page.open(f"{served.url}/cluster", width=1440)
        page.wait("document.querySelectorAll('#node-grid li').length === 32")
        page.wait(
            "document.querySelectorAll('#node-grid .cell[data-colour]').length === 16 * 8 + 4 * 8 + 2 * 8"
        )
        assert page.js("document.querySelectorAll('#node-grid .cell').length") == NODES * EACH
        card = f"document.querySelector('#node-grid li[data-node=\"{node_name(25)}\"]')"
        assert page.js(f"{card}.dataset.state") == "QUARANTINED" and jobs[0] in page.js(f"{card}.textContent")
        first = f"document.querySelector('#node-grid li[data-node=\"{node_name(1)}\"]')"
        assert (
            page.js(f"{first}.querySelector('.cells').getAttribute('aria-label')")
            == "8 of 8 accelerators in use"
        )
        assert page.js(f"{first}.textContent").endswith("H200llama-70b m2–m3")
        assert page.js("document.querySelector('#nodes-summary').textContent").startswith(
            "32 with accelerators, 2 kept from work: slotline node include"
        )
        columns = (
            "getComputedStyle(document.querySelector('#node-grid')).gridTemplateColumns.split(' ').length"
        )
        assert page.js(columns) >= 7
        page.screenshot(tmp_path / "nodes-1440.png")
        page.open(f"{served.url}/cluster", width=400)
        page.wait("document.querySelectorAll('#node-grid li').length === 32")
        assert page.js(columns) == 2
        assert page.js("document.documentElement.scrollWidth <= innerWidth")
        page.screenshot(tmp_path / "nodes-400.png")
        page.open(f"{served.url}/jobs/{jobs[1]}")
        page.wait("document.querySelectorAll('#placed tbody tr').length === 4")
        rows = page.js("[...document.querySelectorAll('#placed tbody tr')].map(e => e.textContent)")
        assert rows[0] == f"{node_name(16)}m0, m18"
        assert page.errors == []
