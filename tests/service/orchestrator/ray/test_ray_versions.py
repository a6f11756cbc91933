"""Ray's routes that are not public, asked of another minor version than the one that is installed; and what a Ray meets
that nobody tried."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from service.orchestrator.ray.jobs_api import TESTED_RAY, ClusterError, RayCluster
from service.orchestrator.ray.local_ray import LocalRay
from service.settings.settings import Settings
from tests.service.orchestrator.ray.contract import answers_all_that_is_asked

OTHER = os.environ.get("SLOTLINE_OTHER_RAY", "")


def ray_of(version: str, nodes: object = ()) -> RayCluster:
    """A Ray that says its version, and of its nodes `nodes`."""

    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/api/version":
            return httpx.Response(200, json={"version": "4", "ray_version": version})
        return httpx.Response(200, json={"data": {"result": {"result": nodes}}})

    made = RayCluster("http://ray")
    made._client = httpx.AsyncClient(base_url="http://ray", transport=httpx.MockTransport(respond))
    return made


async def test_a_ray_that_is_too_old_is_refused_with_the_versions_that_fit():
    with pytest.raises(
        ClusterError, match=r"is 2\.9\.3: Slotline works with Ray 2\.59 and 2\.60: give its nodes"
    ):
        await ray_of("2.9.3").nodes()


async def test_a_ray_that_is_newer_is_used_and_told_of_once(caplog: pytest.LogCaptureFixture):
    cluster = ray_of("3.0.0.dev0")
    with caplog.at_level(logging.WARNING):
        assert await cluster.nodes() == await cluster.nodes() == []
    (record,) = caplog.records
    assert "is 3.0.0.dev0, which nobody tried" in record.getMessage() and "2.60" in record.getMessage()


@pytest.mark.parametrize("minor", TESTED_RAY)
async def test_those_that_were_tried_are_used_without_a_word(
    minor: tuple[int, int], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        assert await ray_of("{}.{}.7".format(*minor)).nodes() == []
    assert caplog.records == []


def test_the_newest_that_was_tried_is_the_one_that_is_installed():
    assert importlib.metadata.version("ray").startswith("{}.{}.".format(*TESTED_RAY[-1]))


@pytest.mark.parametrize("nodes", [[{"id": "a"}], None, "none"])
async def test_an_answer_of_another_form_names_the_versions_that_fit(nodes: object):
    with pytest.raises(
        ClusterError, match=r"version 2\.60\.1\) describes nodes .* Slotline works with Ray 2\.59 and"
    ):
        await ray_of("2.60.1", nodes).nodes()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not OTHER, reason="SLOTLINE_OTHER_RAY names no environment with another Ray: make ray-test"
)
async def test_another_minor_version_answers_all_that_is_asked():
    """The installed one is asked the same by test_local_ray.py."""
    programs = Path(OTHER).absolute() / "bin"
    local = LocalRay(Settings(local_workers=3))
    command = [str(programs / "ray"), "start", *local._options()]
    process = subprocess.Popen(command, env=local._environment(), start_new_session=True)
    cluster = RayCluster(local.address, timeout_s=60, token=local.token)
    try:
        async with asyncio.timeout(120):
            while True:
                try:
                    if await cluster.nodes():
                        break
                except ClusterError:
                    assert process.poll() is None, "this Ray has ended"
                    await asyncio.sleep(0.2)
        minor = tuple(int(part) for part in (cluster._version or "").split(".")[:2])
        assert minor in TESTED_RAY and minor != TESTED_RAY[-1], "another one than the newest"
        await answers_all_that_is_asked(cluster, str(programs / "python"))
    finally:
        await cluster.close()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
