"""Real Ray nodes in network namespaces: own addresses and host names, links that are limited, slowed and cut."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psutil

from tests.benchmarks.overlap_net import Network, network
from tests.polling import until

SLOTS = (0, 3, 3, 2)
"""Accelerators of the head and of each node."""
RATE = 400e6
_ROOT = Path(__file__).parents[2]
_NODES_LIMIT_S = 180.0


class NetworkedRay:
    """A Ray head and its nodes, each in a network namespace of its own; `hosts` are their host names."""

    def __init__(self, net: Network, slots: Sequence[int]) -> None:
        self.net, self.slots, self.hosts = net, slots, [host_name(k) for k in range(len(slots))]
        self.address, self.gcs_address = f"http://{net.addresses[0]}:8265", f"{net.addresses[0]}:6379"
        self.token = secrets.token_hex(16)
        self._folder = Path(tempfile.mkdtemp(prefix="sl"))  # names of sockets must stay short
        self._nodes = [self._start(k) for k in range(len(slots))]

    def environment(self, port: int) -> dict[str, str]:
        """What `slotline serve` on this `port` of the bridge needs to use the cluster."""
        cluster = {
            "address": self.address,
            "token": self.token,
            "driver_ray_address": self.gcs_address,
            "driver_python": sys.executable,
            "driver_url": f"http://{self.net.host}:{port}",
        }
        return {
            "SLOTLINE_HOST": "0.0.0.0",
            "SLOTLINE_OPEN_ACCESS": "true",
            "SLOTLINE_CLUSTERS": json.dumps({"net": cluster}),
            "SLOTLINE_QUEUES": json.dumps({"default": {"cluster": "net"}}),
        }

    def _start(self, k: int) -> subprocess.Popen[bytes]:
        folder = self._folder / f"{k}"
        folder.mkdir(exist_ok=True)
        where = [f"--address={self.gcs_address}"]
        if k == 0:
            where = ["--head", "--port=6379", "--dashboard-host=0.0.0.0", "--dashboard-port=8265"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where]
        command += [f"--node-ip-address={self.net.addresses[k]}", f"--temp-dir={folder}", "--num-cpus=2"]
        command += [f"--resources={json.dumps({'slotline_worker': self.slots[k]})}"]
        command += [f"--object-store-memory={128 << 20}", "--disable-usage-stats"]
        environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "PYTHONPATH": str(_ROOT),
            "OMP_NUM_THREADS": "1",
            "RAY_worker_niceness": "0",  # as the chart has it: beside others that compute, workers would get next to nothing
            "SLOTLINE_LIMIT_LINGER_S": "2",
        }
        environment.pop("RAY_ADDRESS", None)
        named = f"hostname {self.hosts[k]}; exec {shlex.join(command)}"
        with open(folder / "ray.log", "ab") as log:
            return self.net.run(
                k,
                ["unshare", "-u", "sh", "-c", named],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def kill(self, k: int) -> None:
        """End all processes of node k at once, as a machine that loses its power."""
        for process in (*psutil.Process(self._nodes[k].pid).children(recursive=True), self._nodes[k]):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._nodes[k].wait()

    def restart(self, k: int) -> None:
        """Start node k again after its end."""
        self._nodes[k] = self._start(k)

    def workers(self, k: int | None = None) -> list[psutil.Process]:
        """The training actors of node k, or of all."""
        found = []
        for node in self._nodes if k is None else [self._nodes[k]]:
            with contextlib.suppress(psutil.Error):
                found += psutil.Process(node.pid).children(recursive=True)
        return [process for process in found if process_title(process).startswith("ray::Worker")]

    def wait_until_known(self, client: httpx.Client) -> None:
        """Wait until the control plane lists every node with its accelerators."""

        def hosts() -> set[str]:
            nodes = client.get("/api/v1/nodes").json()["items"]
            return {node["host"] for node in nodes if node["accelerators"]}

        wanted = {host for host, slots in zip(self.hosts, self.slots, strict=True) if slots}
        until(lambda: hosts() == wanted, lambda: (hosts(), self.log()), every_s=0.5, limit_s=_NODES_LIMIT_S)

    def stop(self) -> None:
        for node in reversed(self._nodes):
            node.terminate()
        for node in self._nodes:
            try:
                node.wait(30)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def log(self) -> str:
        return "\n".join(
            path.read_text(errors="replace")[-1500:] for path in sorted(self._folder.glob("*/ray.log"))
        )


def process_title(process: psutil.Process) -> str:
    """The words of its command; empty where it has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextlib.contextmanager
def networked(slots: Sequence[int] = SLOTS, rate: float = RATE) -> Iterator[NetworkedRay]:
    """A head and nodes with these numbers of accelerators, over links of `rate` bit/s; everything is removed at the end."""
    with network(len(slots), prefix="slotcl", subnet="10.213.78") as net, contextlib.ExitStack() as stack:
        net.set_rate(rate)
        for k, name in enumerate(
            net.names
        ):  # `ip netns exec` puts these in the place of /etc: no lookup asks far away
            folder = Path("/etc/netns", name)
            folder.mkdir(parents=True, exist_ok=True)
            stack.callback(shutil.rmtree, folder)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{net.addresses[k]} {host_name(k)}\n")
            (folder / "resolv.conf").write_text("")
        ray = NetworkedRay(net, slots)
        stack.callback(ray.stop)
        yield ray


def host_name(k: int) -> str:
    """The name that node k gives itself."""
    return f"slot-{k}"
