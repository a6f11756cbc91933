"""The verbs of nodes: what is listed, and what operators set."""

from __future__ import annotations

import pytest

from service.cli.nodes import jobs_text
from service.orchestrator.ray.jobs_api import KUBERNETES_NODE_LABEL, RayNode
from service.schemas.clusters import NodeJob, NodeView
from tests.service.cli.conftest import Run
from tests.service.serving import Served


def test_nodes_are_listed_and_kept_from_work_and_put_back(run: Run, served: Served):
    async def nodes() -> list[RayNode]:
        labels = {KUBERNETES_NODE_LABEL: "gpu-1", "topology.kubernetes.io/rack": "r7"}
        return [
            RayNode("id-1", "10.0.0.1", {"slotline_worker": 2.0}, "pod-1", labels),
            RayNode("id-2", "10.0.0.2", {"slotline_worker": 4.0}, "bare"),
        ]

    served.cluster.nodes = nodes
    served.run(lambda service: service.clusters.refresh())
    first, second = run("nodes", "--json").json
    assert (first["name"], first["host"], second["name"]) == ("gpu-1", "pod-1", "bare")
    shown = run("nodes").out
    assert "gpu-1 (pod-1)" in shown and "topology.kubernetes.io/rack=r7" in shown
    (drained,) = run("node", "drain", "pod-1", "--reason", "fan", "--json").json
    assert (drained["name"], drained["state"], drained["reason"]) == ("gpu-1", "DRAINING", "fan")
    assert "DRAINING: fan" in run("nodes").out
    assert run("node", "exclude", "id-2", "--cluster", "default", "--json").json[0]["state"] == "EXCLUDED"
    overview = " ".join(run("top", "--once").out.split())
    assert "6 left out" in overview
    assert "EXCLUDED" in overview and "DRAINING" in overview and ": fan" in overview
    assert run("node", "include", "gpu-1", "--json").json[0]["state"] == "READY"
    unknown = run("node", "drain", "gpu-7")
    assert unknown.code == 1 and "there is no node gpu-7: use one of bare, gpu-1" in " ".join(
        unknown.err.split()
    )


@pytest.mark.parametrize(
    ("jobs", "text"),
    [
        (0, ""),
        (1, "a (m0 m1)"),
        (3, "a (m0 m1), b (m0 m1), c (m0 m1)"),
        (5, "a (m0 m1), b (m0 m1), c (m0 m1) and 2 more"),
    ],
)
def test_a_node_names_three_of_its_jobs_and_counts_the_others(jobs: int, text: str):
    on_it = [NodeJob(job_id=name, attempt=1, meshes={"m0": 1, "m1": 2}) for name in "abcde"[:jobs]]
    assert jobs_text(NodeView(id="n", address="10.0.0.1", resources={}, jobs=on_it)) == text
