"""The cluster page of a control plane with several Ray clusters, one of which is away."""

from __future__ import annotations

from pathlib import Path

from service.client.client import Client
from service.orchestrator.ray.local_ray import free_ports
from service.settings.settings import Settings
from tests.polling import until
from tests.service.conftest import job_body
from tests.service.serving import serve


def test_the_page_says_of_each_queue_mesh_and_node_on_which_cluster_it_is_and_which_is_away(
    page, tmp_path: Path
):
    (nobody,) = free_ports(1)
    settings = Settings(
        data_dir=tmp_path,
        clusters={"east": {"address": f"http://127.0.0.1:{nobody}"}},
        queues={"default": None, "far": {"cluster": "east"}},
    )
    with serve(settings) as served, Client(served.url) as client:
        runs = client.submit(job_body(pipeline={"stages": 2}))
        waits = client.submit(job_body(pipeline={"stages": 2}, queue="far"))
        until(lambda: f"{runs.id}-1" in served.cluster.submissions)
        until(lambda: "cluster east" in (client.job(waits.id).message or ""))
        page.open(f"{served.url}/cluster")
        page.wait("document.querySelector('#away').textContent.startsWith('east: Ray at')")
        assert page.js("[...document.querySelectorAll('th.of-clusters')].every(e => !e.hidden)")
        assert page.js("document.querySelector('tr[data-queue=far]').textContent").startswith("fareast")
        page.wait(f"document.querySelector('#meshes tr[data-job={runs.id}]')")
        cells = f"[...document.querySelectorAll('#meshes tr[data-job={runs.id}] td')].map(e => e.textContent)"
        assert page.js(cells)[2:5] == ["default", "default", "cpu"]
        assert page.js("document.querySelector('#nodes tbody tr').textContent").startswith("node-1default127")
        shown = page.js("document.querySelector('[data-cluster=default][data-device=cpu] dt').textContent")
        assert shown == "default: slotline_worker"
        assert "Ray cluster east" in page.js(
            f"document.querySelector('#waiting tr[data-job={waits.id}]').textContent"
        )
