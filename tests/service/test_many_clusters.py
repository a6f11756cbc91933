"""A served control plane with one cluster that works, one that nobody listens for and one that takes calls and says
nothing, over real sockets; and what `slotline top` and `slotline job` show of several."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from service.cli.main import app
from service.client.client import Client
from service.orchestrator.ray.local_ray import free_ports
from service.settings.settings import Settings
from tests.polling import until
from tests.service.conftest import job_body
from tests.service.serving import Served, serve

TWO = {"pipeline": {"stages": 2}}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr("service.control_plane.CLUSTER_REFRESH_S", 0.1)
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as silent:  # the system takes the connections, nobody reads them
        (nobody,) = free_ports(1)
        hanging = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = Settings(
            data_dir=tmp_path,
            clusters={
                "dead": {"address": f"http://127.0.0.1:{nobody}"},
                "hanging": {"address": hanging},
            },
            queues={"default": None, "dead": {"cluster": "dead"}, "hanging": {"cluster": "hanging"}},
        )
        with serve(settings) as served:
            yield served


@pytest.mark.slow
def test_a_dead_and_a_hanging_cluster_stop_nobody_on_the_third_and_are_told_by_name(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    with Client(served.url) as client:
        stuck = {queue: client.submit(job_body(queue=queue, **TWO)) for queue in ("dead", "hanging")}
        for number in range(2):
            job = client.submit(job_body(name=f"job{number}", **TWO))
            until(lambda job=job: f"{job.id}-1" in served.cluster.submissions)
        for queue, job in stuck.items():
            until(lambda job=job: client.job(job.id).reason == "WAITS_FOR_CLUSTER")
            assert f"Ray cluster {queue}, which does not answer" in (client.job(job.id).message or "")
        assert client.ready()

        def away() -> dict[str, str]:
            return httpx.get(f"{served.url}/readyz").json().get("clusters_away", {})

        until(lambda: "does not answer" in away().get("hanging", ""))
        until(lambda: "does not answer" in away().get("dead", ""))
        assert sorted(away()) == ["dead", "hanging"]
        assert client.cluster("default").available and not client.cluster().available
        assert [one.name for one in client.cluster().clusters] == ["default", "dead", "hanging"]

        monkeypatch.setenv("SLOTLINE_URL", served.url)
        shown = CliRunner().invoke(app, ["top", "--once"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, shown.output
        lines = [line.split() for line in shown.output.splitlines()]
        assert ["cluster", "accelerators"] in lines
        assert any(line[:5] == ["default", "0", "of", "4", "slotline_worker"] for line in lines)
        assert any(line[:1] == ["dead"] and "answer:" in line for line in lines)
        assert ["queue", "cluster", "used", "quota", "waiting", "next", "in", "line"] in lines
        assert ["node", "cluster", "state", "and", "reason", "free", "address", "offers"] in lines
