"""A Ray of our own on this machine, for `slotline serve` without a cluster.

A child process (python -m service.orchestrator.local_ray) holds `ray start --block` and ends it when we
say so and when we are gone, however we went. All ports are free ones, so that other Rays on the
machine do no harm. The control plane itself never imports Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys

import httpx

from service.orchestrator.decide import RESOURCES
from service.settings import Settings

logger = logging.getLogger(__name__)

_START_LIMIT_S = 180.0
_STOP_LIMIT_S = 20.0


class LocalRay:
    """Start and stop it; `address` and `token` are those of its Jobs API.

    `gcs_address` is where its drivers join it: Ray itself looks for "the" cluster of a machine and
    takes another one where several run.
    """

    def __init__(self, settings: Settings) -> None:
        self.token = secrets.token_hex(32)
        dashboard, gcs, *ports = _free_ports(5)
        dashboard = settings.local_ray_port or dashboard
        self.address = f"http://127.0.0.1:{dashboard}"
        self.gcs_address = f"127.0.0.1:{gcs}"
        self._options = [
            "--head",
            "--block",
            f"--port={gcs}",
            "--include-dashboard=true",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={dashboard}",
            f"--dashboard-agent-listen-port={ports[0]}",
            f"--ray-client-server-port={ports[1]}",
            f"--metrics-export-port={ports[2]}",
            f"--object-store-memory={settings.local_object_store_bytes}",
            f"--resources={json.dumps({RESOURCES['cpu']: settings.local_workers})}",
            "--disable-usage-stats",
            "--include-log-monitor=false",
            "--no-monitor",  # no autoscaler: this is one machine
        ]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns when the Jobs API serves. Raises RuntimeError when that does not come."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "service.orchestrator.local_ray",
            *self._options,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            env=self._environment(),
            start_new_session=True,  # Ctrl-C in the terminal is ours; we end Ray in order
        )
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                await self._until_it_serves(self._process)
        except TimeoutError:
            await self.stop()
            raise RuntimeError(
                f"the local Ray did not serve within {_START_LIMIT_S:g} s: free memory or CPU, "
                "or set RAY_ADDRESS to a cluster that runs"
            ) from None
        except BaseException:
            await self.stop()
            raise
        logger.info("local Ray at %s", self.address)

    async def stop(self) -> None:
        """End Ray and everything that runs in it."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_LIMIT_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _until_it_serves(self, process: asyncio.subprocess.Process) -> None:
        headers = {"Authorization": f"Bearer {self.token}"}
        async with httpx.AsyncClient(headers=headers, timeout=5.0, trust_env=False) as client:
            while True:
                if process.returncode is not None:
                    raise RuntimeError(
                        f"the local Ray ended with code {process.returncode} (its messages are above): "
                        "set RAY_ADDRESS to a cluster that runs, or mend what it says"
                    )
                with contextlib.suppress(httpx.HTTPError):
                    if await self._has_node(client):
                        return
                await asyncio.sleep(0.1)

    async def _has_node(self, client: httpx.AsyncClient) -> bool:
        """The Jobs API serves before its node is there."""
        response = await client.get(f"{self.address}/api/v0/nodes")
        return response.is_success and response.json()["data"]["result"]["total"] > 0

    def _environment(self) -> dict[str, str]:
        environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # nothing moves elsewhere: end at once
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH"):
            environment.pop(name, None)
        return environment


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


# In the child process


def _hold(options: list[str]) -> int:
    """Run Ray until our standard input ends or Ray does; Ray's exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ray = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        preexec_fn=_die_with_parent,
    )
    signal.signal(signal.SIGCHLD, lambda *_: os._exit(ray.wait()))
    if ray.poll() is None:
        sys.stdin.buffer.read()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ray.terminate()  # `ray start --block` then ends all its processes
    return ray.wait()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(_hold(sys.argv[1:]))
