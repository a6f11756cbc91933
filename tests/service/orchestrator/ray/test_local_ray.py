"""The cluster interface against a real Ray on this machine, and that nothing of it stays behind."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from service.control_plane import run_control_plane
from service.orchestrator.decisions.attempt_lifecycle import RayState
from service.orchestrator.ray import local_ray as ray_local
from service.orchestrator.ray.jobs_api import (
    ClusterError,
    ClusterUnreachableError,
    RayCluster,
    RayJobSubmission,
)
from service.orchestrator.ray.local_ray import LocalRay, free_ports
from service.settings.settings import Settings
from tests.polling import until, until_async
from tests.service.conftest import job_body
from tests.service.orchestrator.ray.contract import answers_all_that_is_asked, ended, submission

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
PYTHON = sys.executable


def processes_with(text: str) -> list[int]:
    """Living processes in whose environment `text` stands, other than this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            environment, status = (entry / "environ").read_bytes(), (entry / "stat").read_text()
        except OSError:
            continue
        if text.encode() in environment and status.rpartition(")")[2].split()[0] != "Z":
            found.append(int(entry.name))
    return found


def gone(text: str, limit_s: float = 100.0) -> bool:
    deadline = time.monotonic() + limit_s
    while processes_with(text):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


async def test_everything_that_the_orchestrator_asks_of_ray(monkeypatch):
    monkeypatch.setenv("SLOTLINE_API_TOKEN", "of-the-control-plane")
    monkeypatch.setenv("SLOTLINE_DATABASE_URL", "postgresql://of-the-control-plane/x")
    other, local = LocalRay(Settings(database_url="")), LocalRay(Settings(local_workers=3, database_url=""))
    await other.start()  # several Rays on one machine must do each other no harm
    await local.start()
    cluster = RayCluster(local.address, timeout_s=60, token=local.token)
    try:
        await answers_all_that_is_asked(cluster, PYTHON)

        secrets = "import os; print('secrets:', [k for k, v in os.environ.items() if 'of-the-control' in v])"
        await cluster.submit(submission(PYTHON, "curious", secrets))
        assert (await ended(cluster, "curious")).state is RayState.SUCCEEDED
        assert "secrets: []" in await cluster.log("curious")

        aside = (
            "import ray, time; ray.init()\n"
            "say = ray.remote(num_cpus=0)(lambda: print('spoken', 'aside'))\n"
            "ray.get(say.remote()); time.sleep(1000)"
        )
        await cluster.submit(RayJobSubmission("aside", f"{PYTHON} -u -c {shlex.quote(aside)}", {}, {}))

        async def spoken() -> bool:
            return "spoken aside" in await cluster.log("aside")

        await until_async(spoken, "what workers print comes by the log monitor", every_s=0.2)
        await cluster.stop("aside")

        neighbour = RayCluster(other.address, timeout_s=60, token=other.token)
        assert (await neighbour.job("first")).state is RayState.MISSING
        await neighbour.submit(submission(PYTHON, "first", "print('the other one')"))
        assert (await ended(neighbour, "first")).state is RayState.SUCCEEDED
        await neighbour.close()

        stranger = RayCluster(local.address, token="wrong" * 8)
        with pytest.raises(ClusterError, match="RAY_AUTH_TOKEN"):
            await stranger.nodes()
        await stranger.close()
    finally:
        await local.stop()
        await other.stop()
    with pytest.raises(ClusterUnreachableError, match="does not answer"):
        await cluster.nodes()
    await cluster.close()
    assert gone(local.token), "Ray left processes behind"


async def test_a_ray_whose_port_was_taken_starts_on_another(monkeypatch: pytest.MonkeyPatch):
    offered: list[list[int]] = []

    def first_a_taken_one(number: int) -> list[int]:
        offered.append(free_ports(number))
        if len(offered) == 1:
            offered[0][0] = taken.getsockname()[1]
        return offered[-1]

    monkeypatch.setattr(ray_local, "free_ports", first_a_taken_one)
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as taken:
        local = LocalRay(Settings())
        try:
            await local.start()
            assert local.address == f"http://127.0.0.1:{offered[-1][0]}" and len(offered) == 2
            cluster = RayCluster(local.address, timeout_s=60, token=local.token)
            assert len(await cluster.nodes()) == 1
            await cluster.close()
        finally:
            await local.stop()
    assert gone(local.token), "the Ray that could not start left processes behind"


async def test_a_folder_whose_name_leaves_no_room_for_sockets_is_refused_at_once(monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", f"/tmp/{'a' * 60}")
    with pytest.raises(
        RuntimeError, match=r"TMPDIR is '/tmp/aaa.* bytes too long .*set RAY_TMPDIR to a shorter"
    ):
        await LocalRay(Settings()).start()


async def test_a_ray_that_never_starts_is_given_up_with_its_exit_code(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LocalRay, "_options", lambda self: ["--no-such-option"])
    local = LocalRay(Settings())
    with pytest.raises(RuntimeError, match=r"ended with code 2, 3 times .* set RAY_ADDRESS"):
        await local.start()
    assert gone(local.token)


async def test_a_local_ray_ends_with_a_control_plane_that_was_killed(tmp_path: Path):
    code = (
        "import asyncio, sys\n"
        "from service.orchestrator.ray.local_ray import LocalRay\n"
        "from service.settings.settings import Settings\n"
        "async def main():\n"
        "    ray = LocalRay(Settings())\n"
        "    await ray.start()\n"
        "    print(ray.token, flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [PYTHON, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    token = parent.stdout.readline().strip()
    assert len(token) == 64 and len(processes_with(token)) > 3
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(token), "Ray outlived the control plane"


@pytest.fixture
async def ready_server(tmp_path: Path) -> AsyncIterator[tuple[subprocess.Popen, str, str]]:
    """`slotline serve` as a user starts it: (process, url, a text in the environment of all its children)."""
    mark = f"SLOTLINE_DATA_DIR={tmp_path}"
    environment = {**os.environ, "SLOTLINE_DATA_DIR": str(tmp_path), "SLOTLINE_PORT": "0"}
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(
        [PYTHON, "-m", "service.cli", "serve", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    url = json.loads(process.stdout.readline())["url"]
    deadline = time.monotonic() + 250
    while True:
        assert process.poll() is None and time.monotonic() < deadline
        try:
            if httpx.get(f"{url}/readyz", timeout=5).is_success:
                break
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    yield process, url, mark
    if process.poll() is None:
        process.kill()


async def test_a_server_that_is_interrupted_leaves_no_process_behind(ready_server):
    process, url, mark = ready_server
    job_id = httpx.post(f"{url}/api/v1/jobs", json=job_body(), timeout=60).json()["id"]
    until(lambda: httpx.get(f"{url}/api/v1/jobs/{job_id}", timeout=60).json()["attempts"], every_s=0.1)
    assert len(processes_with(mark)) > 3
    with httpx.stream(
        "GET", f"{url}/api/v1/jobs/{job_id}/events", headers={"Accept": "text/event-stream"}, timeout=60
    ) as response:
        assert response.status_code == 200  # a page that watches does not keep the server
        process.send_signal(signal.SIGINT)
        assert process.wait(100) in (0, -signal.SIGINT, 128 + signal.SIGINT)
    assert gone(mark), [Path(f"/proc/{pid}/cmdline").read_text() for pid in processes_with(mark)]


def heads(mark: str) -> list[int]:
    """Processes that are the head of a Ray, of those with `mark` in their environment."""
    return [pid for pid in processes_with(mark) if "gcs_server" in Path(f"/proc/{pid}/cmdline").read_text()]


async def test_a_local_ray_that_dies_is_started_again_and_takes_work(tmp_path: Path, monkeypatch):
    mark = uuid.uuid4().hex
    monkeypatch.setenv("SLOTLINE_TEST_MARK", mark)
    settings = Settings(data_dir=tmp_path, database_url="")
    async with run_control_plane(settings) as service, asyncio.timeout(300):
        while not service.cluster.snapshot.nodes:
            await asyncio.sleep(0.1)
        before = service.cluster.snapshot.nodes
        for pid in heads(mark):
            os.kill(pid, signal.SIGKILL)
        while service.cluster.snapshot.nodes in (before, ()) or not service.cluster.snapshot.available:
            await asyncio.sleep(0.1)
        assert service.cluster.capacity.total["cpu"] == settings.local_workers
    assert not heads(mark), "the second one ends with the control plane too"


async def test_a_ray_that_cannot_live_is_started_again_after_longer_and_longer(monkeypatch):
    monkeypatch.setattr(ray_local, "_RESTART_PAUSE_S", 0.1)
    monkeypatch.setattr(ray_local, "_RESTART_PAUSE_LIMIT_S", 0.4)
    local, starts = LocalRay(Settings(database_url="")), []

    async def started() -> int | None:
        starts.append(time.monotonic())
        local._process = await asyncio.create_subprocess_exec(
            "false", stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        return await local._process.wait()

    monkeypatch.setattr(local, "_start_once", started)
    await started()
    keeping = asyncio.create_task(local.keep())
    await until_async(lambda: len(starts) >= 6, limit_s=30)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await local.stop()
    pauses = [after - before for before, after in itertools.pairwise(starts)]
    for pause, least in zip(pauses, (0.1, 0.2, 0.4, 0.4, 0.4), strict=True):
        assert least <= pause, pauses
