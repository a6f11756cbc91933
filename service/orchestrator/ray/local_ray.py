"""LocalRay: runs a single-node Ray as a child process, for `slotline serve` without a cluster.

The child (`python -m` of this module) holds `ray start --block` and ends it when its standard input closes, so Ray
goes with us however we end. The control plane never imports Ray; its secrets are not in Ray's environment. All ports
are free ones, from below the ranges that operating systems give to outgoing connections, so that other Rays do no
harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import random
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import NoReturn

from service.orchestrator.decisions.attempt_lifecycle import RAY_RESOURCES
from service.orchestrator.ray.jobs_api import ClusterError, RayCluster
from service.settings.settings import Settings
from worker.contract.forkserver.spawn import SERVER_VARIABLE as FORKSERVER_VARIABLE

logger = logging.getLogger(__name__)

# Below what Linux, macOS and Windows give to outgoing connections, beside Ray's workers (10002 to 19999)
# and Kubernetes' node ports (from 30000): a port that the system itself chose ("bind to 0") is soon given
# to an outgoing connection, and the server that was to have it cannot start.
_OBJECT_STORE_BYTES = 128 << 20
_PORT_RANGE = range(20000, 30000)
_PORT_TRIES = 1000
_START_LIMIT_S = 180.0
_START_TRIES = 3
_STOP_LIMIT_S = 20.0
_RESTART_PAUSE_S = 1.0
_RESTART_PAUSE_LIMIT_S = 60.0
_SOCKET_NAME_LIMIT = 107 if sys.platform == "linux" else 103
_SESSION_SOCKET = "ray/session_2026-11-26_17-46-39_050000_1234567/sockets/plasma_store"
"""The longest name that Ray gives to a socket, below its folder for temporary files."""
_STABLE_AFTER_S = 120.0
"""A Ray that lived for this time did not end because of how it was started."""
_FORKED_WITH = (
    *("worker.actor.actor", "worker.tasks.check", "torch.export._trace"),
    *(
        "google.protobuf.descriptor_pb2",
        "requests",
        "jsonschema",
        "yaml",
        "msgpack",
        "httpx",
        "prometheus_client",
    ),
)
"""What processes are forked with. Not with Ray, which keeps the id of a process's job from when it is imported, but with
what Ray and drivers import, four fifths of the time that importing Ray takes."""
_CONTROL_PLANE_VARIABLES = (
    "SLOTLINE_API_TOKEN",
    "SLOTLINE_METRICS_TOKEN",
    "SLOTLINE_DATABASE_URL",
    "SLOTLINE_SECRETS_KEY",
    "SLOTLINE_WEBHOOK_SECRET",
    "SLOTLINE_CLUSTERS",
)


class LocalRay:
    """A single-node Ray in a child process; `address` and `token` are for its Jobs API.

    Drivers join at `gcs_address`: Ray itself looks for "the" cluster of a machine and takes another one where several
    run. Both addresses hold once it has started.
    """

    def __init__(self, settings: Settings) -> None:
        self.token = secrets.token_hex(32)
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._choose_ports()

    @property
    def process_id(self) -> int | None:
        """Id of the child, and of the session of all its processes; None while there is none."""
        return None if self._process is None else self._process.pid

    def _choose_ports(self) -> None:
        self._dashboard_port, self._gcs_port, self._client_port = free_ports(3)
        self.address = f"http://127.0.0.1:{self._dashboard_port}"
        self.gcs_address = f"127.0.0.1:{self._gcs_port}"

    def _options(self) -> list[str]:
        settings = self._settings
        return [
            "--head",
            "--block",
            f"--port={self._gcs_port}",
            "--include-dashboard=true",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={self._dashboard_port}",
            "--dashboard-agent-listen-port=0",
            f"--ray-client-server-port={self._client_port}",
            "--metrics-export-port=0",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            f"--resources={json.dumps({RAY_RESOURCES['cpu']: settings.local_workers})}",
            "--disable-usage-stats",
            "--no-monitor",  # no autoscaler: this is one machine
        ]

    async def start(self) -> None:
        """Return when the Jobs API serves. Raises RuntimeError where it does not within the limit, or the folder of its
        sessions has too long a name, OSError without ports.

        A Ray that ends while it starts is followed by another on other ports: a port may have been taken, and Ray gives
        up by itself where a busy machine needs longer than it waits for its parts.
        """
        _check_session_folder()
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                for tries_left in reversed(range(_START_TRIES)):
                    code = await self._start_once()
                    if code is None:
                        break
                    if not tries_left:
                        raise RuntimeError(
                            f"the local Ray ended with code {code}, {_START_TRIES} times (its messages are above): "
                            "set RAY_ADDRESS to a cluster that runs, or mend what it says"
                        )
                    logger.warning(
                        "the local Ray ended with code %d while it started (its messages are above); once more",
                        code,
                    )
                    await self.stop()
                    self._choose_ports()
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

    async def keep(self) -> None:
        """Start a Ray that ends again, at the same addresses and with the same token, until this is cancelled.

        The pause before each start doubles, so that one that cannot live does not keep the machine busy.
        """
        pause_s = _RESTART_PAUSE_S
        while True:
            begun_at = time.monotonic()
            code = None if self._process is None else await self._process.wait()
            await self.stop()  # kills the rest of its session
            if time.monotonic() - begun_at > _STABLE_AFTER_S:
                pause_s = _RESTART_PAUSE_S
            reason = "did not serve" if code is None else f"ended with code {code}"
            logger.error("the local Ray %s (its messages are above): once more in %g s", reason, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _RESTART_PAUSE_LIMIT_S)
            try:
                async with asyncio.timeout(_START_LIMIT_S):
                    if await self._start_once() is None:
                        logger.info("local Ray at %s again", self.address)
            except TimeoutError:
                await self.stop()
            except OSError as error:  # no memory for a process, no file left
                logger.error("the local Ray could not be started: %s", error)

    async def _start_once(self) -> int | None:
        """Try once: None when the Jobs API serves, the exit code where Ray ended before that."""
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "service.orchestrator.ray.local_ray",
            *self._options(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            env=self._environment(),
            start_new_session=True,  # Ctrl-C in the terminal is ours; we end Ray in order
        )
        ray = RayCluster(self.address, timeout_s=5.0, token=self.token)
        try:
            while process.returncode is None:
                with contextlib.suppress(ClusterError):
                    if await ray.nodes():  # its node comes after the Jobs API serves
                        return None
                await asyncio.sleep(0.1)
        finally:
            await ray.close()
        return process.returncode

    async def stop(self) -> None:
        """End Ray and everything that runs in it."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_LIMIT_S):
                await process.wait()
        # the rest of its session: all of it where it did not end, and leftovers of a Ray that failed
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    def _environment(self) -> dict[str, str]:
        environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # nothing moves elsewhere: end at once
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            FORKSERVER_VARIABLE: f"slotline-{secrets.token_hex(16)}",
            "RAY_worker_niceness": "0",  # Ray gives 15: whatever else runs here would slow workers, and their profiles
        }
        # users' code runs in it, which must not see the secrets of the control plane
        cluster_tokens = [
            cluster.token_variable for cluster in self._settings.clusters.values() if cluster.token_variable
        ]
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH", *_CONTROL_PLANE_VARIABLES, *cluster_tokens):
            environment.pop(name, None)
        return environment


def _check_session_folder() -> None:
    """Raise RuntimeError where the sockets of a session would have longer names than the system takes."""
    variable = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), None)
    folder = os.environ[variable] if variable else "/tmp"
    length = len(os.fsencode(os.path.join(folder, _SESSION_SOCKET)))
    if length > _SOCKET_NAME_LIMIT:
        raise RuntimeError(
            f"{variable} is {folder!r}, {length - _SOCKET_NAME_LIMIT} bytes too long for the sockets of a local Ray, whose "
            f"names have {_SOCKET_NAME_LIMIT} bytes at most: set RAY_TMPDIR to a shorter folder, such as /tmp"
        )


def free_ports(number: int) -> list[int]:
    """`number` different ports that nobody on this machine listens at, on any IPv4 address.

    Where the system's range for outgoing connections is the default one, no such connection takes them later; another
    server still may, and the caller has to be ready for that. Raises OSError where too few are free.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as probes:
        for port in random.SystemRandom().sample(_PORT_RANGE, _PORT_TRIES):
            if len(ports) == number:
                break
            probe = probes.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                ports.append(port)
    if len(ports) < number:
        raise OSError(
            f"no {number} free ports between {_PORT_RANGE.start} and {_PORT_RANGE.stop - 1} on this machine"
        )
    return ports


# In the child process


def _run_ray_until_stdin_ends(options: list[str]) -> int:
    """Run Ray until our standard input ends or Ray does; Ray's exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # where torch is not installed it ends at once, and interpreters start anew
        subprocess.Popen(
            [sys.executable, "-m", "worker.contract.forkserver", *_FORKED_WITH],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,
        )
    folder = tempfile.TemporaryDirectory(prefix="slotline-")
    ray = subprocess.Popen(
        [sys.executable, "-c", _START_RAY, _worker_interpreter(folder.name), "start", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        preexec_fn=_die_with_parent,
    )
    signal.signal(signal.SIGCHLD, lambda *_: ray.poll() is None or _exit(ray.wait(), folder))
    if ray.poll() is None:
        sys.stdin.buffer.read()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ray.terminate()  # `ray start --block` then ends all its processes
    code = ray.wait()
    folder.cleanup()
    return code


_START_RAY = """
import runpy, sys
sys.executable = sys.argv.pop(1)
runpy.run_module("ray.scripts.scripts", run_name="__main__", alter_sys=True)
"""
"""Ray starts its processes with what `sys.executable` is where it is started itself."""


def _worker_interpreter(folder: str) -> str:
    """The interpreter with which Ray starts its processes: this one, by worker_setup.py where `folder` may hold programs."""
    setup = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker_setup.py")
    path = os.path.join(folder, "python")
    with open(path, "w") as file:
        file.write(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S -E {shlex.quote(setup)} "$@"\n')
    os.chmod(path, 0o700)
    return path if os.access(path, os.X_OK) else sys.executable


def _exit(code: int, folder: tempfile.TemporaryDirectory) -> NoReturn:
    folder.cleanup()
    os._exit(code)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(_run_ray_until_stdin_ends(sys.argv[1:]))
