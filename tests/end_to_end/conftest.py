"""A real Ray head and a real `slotline serve`, as processes of their own, and a client of its REST API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import psutil
import pytest

from service.cli.serve import LocalServer
from service.orchestrator.ray.local_ray import LocalRay, free_ports
from service.settings.settings import Settings
from tests.polling import until
from worker.contract.forkserver.spawn import through_server

FINAL = {"SUCCEEDED", "FAILED", "CANCELLED"}


LINGER = {"SLOTLINE_LIMIT_LINGER_S": "2"}
"""Drivers have it from the environment of their Ray."""


class Server(LocalServer):
    """`slotline serve` on a port and a data directory that stay the same over restarts, and its client."""

    def __init__(self, directory: Path, environment: dict[str, str], port: int | None = None):
        super().__init__(
            directory=directory,
            port=port or free_ports(1)[0],
            log=directory / "serve.log",
            environment=LINGER | environment,
        )
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def submit(self, spec: dict[str, Any]) -> str:
        response = self.client.post("/api/v1/jobs", json=spec)
        assert response.status_code == 201, response.text
        return response.json()["id"]

    def job(self, job_id: str) -> dict[str, Any]:
        return self.client.get(f"/api/v1/jobs/{job_id}").raise_for_status().json()

    def wait(self, job_id: str, states: set[str] = FINAL, limit_s: float = 200) -> dict[str, Any]:
        """The job once it is in one of `states`; fails with the server's log after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while (job := self.job(job_id))["state"] not in states:
            if time.monotonic() > deadline or job["state"] in FINAL:
                logs = self.client.get(f"/api/v1/jobs/{job_id}/logs").text
                raise AssertionError(f"{job}\n{logs[-3000:]}\n{self.log.read_text()[-3000:]}")
            time.sleep(0.2)
        return job

    def steps(self, job_id: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        token = None
        while True:
            page = self.client.get(
                f"/api/v1/jobs/{job_id}/steps",
                params={"limit": 500} | ({"page_token": token} if token else {}),
            ).json()
            items += page["items"]
            token = page["next_page_token"]
            if not token:
                return items


class RayHead:
    """A Ray head with token authentication that outlives any control plane, as a cluster does.

    Its drivers and checks are forked as those of `slotline serve`'s own Ray are, which saves each the import of torch.
    """

    def __init__(self, folder: Path) -> None:
        self._python = folder / "python"
        self._python.write_text(f'#!/bin/sh\nexec {through_server(sys.executable)} "$@"\n')
        self._python.chmod(0o700)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._ray = LocalRay(Settings(local_workers=4))
        with mock.patch.dict(os.environ, LINGER):
            self._call(self._ray.start())
        self.address, self.token, self.gcs_address = self._ray.address, self._ray.token, self._ray.gcs_address

    @property
    def environment(self) -> dict[str, str]:
        """What `slotline serve` needs to use this cluster."""
        cluster = {
            "address": self.address,
            "token": self.token,
            "driver_ray_address": self.gcs_address,
            "driver_python": str(self._python),
        }
        return {
            "SLOTLINE_CLUSTERS": json.dumps({"head": cluster}),
            "SLOTLINE_QUEUES": json.dumps({"default": {"cluster": "head"}}),
        }

    def held(self) -> dict[str, int]:
        """Living training actors and placement groups, as Ray's own state API tells them."""
        actors = self._workers()
        groups = [g for g in self._list("placement_groups") if g["state"] != "REMOVED"]
        return {"actors": len(actors), "placement_groups": len(groups)}

    def worker_pids(self) -> list[int]:
        """The processes of living training actors: of this cluster, others use the machine too."""
        return [actor["pid"] for actor in self._workers() if actor["pid"]]

    def assert_nothing_held(self) -> None:
        until(lambda: self.held() == {"actors": 0, "placement_groups": 0}, self.held, every_s=0.3)

    def stop(self) -> None:
        self._call(self._ray.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(200)

    def _workers(self) -> list[dict[str, Any]]:
        return [a for a in self._list("actors") if a["class_name"] == "Worker" and a["state"] != "DEAD"]

    def _list(self, kind: str) -> list[dict[str, Any]]:
        response = httpx.get(
            f"{self.address}/api/v0/{kind}",
            params={"limit": 1000, "detail": 1},
            headers={"Authorization": f"Bearer {self.token}"},
            timeout=60,
        )
        return response.raise_for_status().json()["data"]["result"]["result"]


@pytest.fixture(scope="package")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    head = RayHead(tmp_path_factory.mktemp("head"))
    yield head
    head.stop()


@pytest.fixture(scope="package")
def server(ray_head: RayHead, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("slotline"), ray_head.environment) as server:
        yield server


class SpotNode:
    """A second Ray node of a head, with two accelerators, perhaps of a type, and a name of its own; `id` is Ray's."""

    NAME = "spot-7"

    def __init__(self, head: RayHead, accelerator_type: str | None = None) -> None:
        labels = {"kubernetes.io/hostname": self.NAME}
        if accelerator_type is not None:
            labels["ray.io/accelerator-type"] = accelerator_type
        environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": head.token,
            "RAY_OVERRIDE_LABELS": json.dumps(labels),
        }
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            f"--address={head.gcs_address}",
            "--block",
        ]
        command += ["--num-cpus=2", '--resources={"slotline_worker": 2}', "--disable-usage-stats"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=environment, **quiet)
        self.id = ""

    def wait_until_known(self, client: httpx.Client) -> None:
        """Wait until the control plane lists the node."""

        def nodes() -> dict[str, str]:
            return {node["name"]: node["id"] for node in client.get("/api/v1/nodes").json()["items"]}

        until(lambda: self.NAME in nodes(), nodes, every_s=0.5, limit_s=120)
        self.id = nodes()[self.NAME]

    def kill(self) -> None:
        """End all its processes at once, as a machine that loses its power; Ray's own end when their raylet is gone."""
        for process in (*psutil.Process(self._process.pid).children(recursive=True), self._process):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


@pytest.fixture
def spot_node(ray_head: RayHead, server: Server) -> Iterator[SpotNode]:
    node = SpotNode(ray_head)
    try:
        node.wait_until_known(server.client)
        yield node
    finally:
        node.stop()


TWO = {"meshes": 2, "device": "cpu"}
"""Half of the processes of `job_spec`'s own, where a test is not about four of them."""


def job_spec(name: str, **changes: Any) -> dict[str, Any]:
    """A GPT or U-Net job small enough for two cores; `changes` replace whole sections."""
    models = {
        "gpt": {
            "model": {
                "factory": "worker.examples.gpt:build",
                "args": {"layers": 4, "width": 32, "heads": 2, "length": 32},
            },
            "data": {"factory": "worker.examples.text:ByteWindows", "args": {"length": 32}},
            "loss": {"factory": "torch.nn.functional:cross_entropy"},
        },
        "unet": {
            "model": {"factory": "worker.examples.unet:build", "args": {}},
            "data": {"factory": "worker.examples.digits:NoisyDigits", "args": {}},
            "loss": {"factory": "torch.nn.functional:mse_loss"},
        },
    }
    return {
        "name": name,
        **models[name.split("-")[0]],
        "optimizer": {"factory": "torch.optim:AdamW", "args": {"lr": 1e-3}},
        "training": {"steps": 12, "global_batch": 16, "microbatches": 4, "seed": 3, "clip_grad_norm": 1.0},
        "pipeline": {"stages": 4, "schedule": "auto"},
        "resources": {"meshes": 4, "device": "cpu"},
        "retry": {"infrastructure": 0},
    } | changes
