"""The control plane of every example, really started: the image's environment, the pod's, and its arguments.

What a cluster would give is put in its place: the data directory, a free port, the secrets' contents, SQLite for PostgreSQL,
and a Ray that nobody answers for. Everything else is as rendered.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from helm_python import Chart

from service.orchestrator.ray.local_ray import free_ports
from tests.deploy.rendering import (
    CASES,
    CHART,
    ROOT,
    Objects,
    case,
    container_of,
    environment,
    image_environment,
    objects,
    of_kind,
)

_START_LIMIT_S = 120.0


@pytest.fixture(scope="module")
def chart() -> Iterator[Chart]:
    with Chart.load(CHART) as loaded:
        yield loaded


@contextmanager
def started(found: Objects, folder: Path) -> Iterator[str]:
    """The address of the control plane that these objects describe."""
    container = container_of(of_kind(found, "Deployment")["spec"]["template"])
    (port,) = free_ports(1)
    given = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    given |= {name: text for name, text in image_environment().items() if name != "HOME"} | environment(found)
    assert given["SLOTLINE_PORT"] == str(container["ports"][0]["containerPort"])
    given |= {
        "SLOTLINE_PORT": str(port),
        "SLOTLINE_DATA_DIR": str(folder),
        "RAY_ADDRESS": "http://127.0.0.1:9",
    }
    if "SLOTLINE_DATABASE_URL" in given:
        given["SLOTLINE_DATABASE_URL"] = f"sqlite:///{folder / 'instead.db'}"
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "service.cli", *container["args"]],
            cwd=ROOT,
            env=given,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url + container["startupProbe"]["httpGet"]["path"], log)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _wait(process: subprocess.Popen[Any], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise AssertionError(f"{url} does not answer: {log.read_text()}")


@pytest.mark.slow
@pytest.mark.parametrize("values", [path.stem for path in CASES])
def test_the_control_plane_of_an_example_starts(chart: Chart, values: str, tmp_path: Path):
    found = objects(chart, case(values))
    given = environment(found)
    with started(found, tmp_path) as url:
        assert "slotline_jobs{" in httpx.get(f"{url}/metrics").text
        assert httpx.get(f"{url}/readyz").status_code == 503, "nobody answers for Ray"
        targets = f"{url}/api/v1/prometheus/targets"
        asks = given["SLOTLINE_REQUIRE_TOKEN"] == "true" or "SLOTLINE_API_TOKEN" in given
        assert httpx.get(targets).status_code == (401 if asks else 200)
        for name, opens_all in (("SLOTLINE_API_TOKEN", True), ("SLOTLINE_METRICS_TOKEN", False)):
            if name in given:
                headers = {"Authorization": f"Bearer {given[name]}"}
                assert httpx.get(targets, headers=headers).json() == []
                jobs = httpx.get(f"{url}/api/v1/jobs", headers=headers)
                assert jobs.status_code == (200 if opens_all else 403)
    log = (tmp_path / "log").read_text()
    assert "is no setting" not in log, "a variable that the control plane does not know"
    assert "Traceback" not in log, log
