"""Rate-limited links between network namespaces of this machine (Linux, root).

Each namespace has one port: a veth pair to a bridge, with a token bucket on both ends, so that what a
namespace sends and what it receives are limited each to the link rate (`full-duplex` of the scheduler).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

PREFIX = "slotbench"
SUBNET = "10.213.77"


@dataclass(frozen=True)
class Network:
    """`names[k]` is a namespace, `addresses[k]` its address; the bridge has `host`."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    host: str
    bridge: str
    prefix: str = PREFIX

    def set_rate(self, bits_per_s: float) -> None:
        """Limit every port to `bits_per_s` in both directions."""
        for k in range(len(self.names)):
            self.set_rate_of(k, bits_per_s)

    def set_rate_of(self, k: int, bits_per_s: float) -> None:
        """Limit the port of namespace k to `bits_per_s` in both directions."""
        _limit(["tc"], f"{self.prefix}{k}", bits_per_s)
        _limit(["ip", "netns", "exec", self.names[k], "tc"], "port", bits_per_s)

    def set_connected(self, k: int, connected: bool) -> None:
        """Plug the cable of namespace k in, or pull it out: nothing that is sent arrives."""
        _run("ip", "link", "set", f"{self.prefix}{k}", "up" if connected else "down")

    def run(self, k: int, command: list[str], **options) -> subprocess.Popen:
        """Start `command` inside namespace k."""
        return subprocess.Popen(["ip", "netns", "exec", self.names[k], *command], **options)


def why_not() -> str | None:
    """Why this machine cannot make such a network, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not installed (Debian package iproute2)" if missing else None


@contextlib.contextmanager
def network(count: int, prefix: str = PREFIX, subnet: str = SUBNET) -> Iterator[Network]:
    """`count` namespaces on one bridge; everything is removed at the end. Two at a time need other names."""
    bridge = f"{prefix}br"
    names = tuple(f"{prefix}{k}" for k in range(count))
    _remove(names, bridge)
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{subnet}.254/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for k, name in enumerate(names):
            inside = ("ip", "netns", "exec", name)
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", f"{prefix}{k}", "type", "veth", "peer", "name", "port", "netns", name)
            _run("ip", "link", "set", f"{prefix}{k}", "master", bridge, "up")
            _run(*inside, "ip", "addr", "add", f"{subnet}.{k + 1}/24", "dev", "port")
            # small segments: a short message (who is ready for what) waits for at most two of them
            _run(*inside, "ip", "link", "set", "port", "gso_max_size", "16384", "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            # cubic: bbr keeps probing the rate and would make equal transfers unequal
            _run(*inside, "ip", "route", "change", f"{subnet}.0/24", "dev", "port", "congctl", "cubic")
            _run(*inside, "sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0")
            # a tensor does not fit into the sender's socket, as those of real models do not: a send ends when it has left
            _run(*inside, "sysctl", "-qw", "net.ipv4.tcp_wmem=4096 65536 131072")
        yield Network(
            names, tuple(f"{subnet}.{k + 1}" for k in range(count)), f"{subnet}.254", bridge, prefix
        )
    finally:
        _remove(names, bridge)


def _limit(tc: list[str], device: str, bits_per_s: float) -> None:
    _run(*tc, "qdisc", "replace", "dev", device, "root", "handle", "1:", "tbf",
         "rate", f"{round(bits_per_s)}bit", "burst", "32kb", "latency", "200ms")  # fmt: skip


def _remove(names: tuple[str, ...], bridge: str) -> None:
    # a namespace that is deleted goes later, and with it the other end of its link
    links = [["ip", "link", "del", name] for name in (*names, bridge)]
    for command in [*links, *(["ip", "netns", "del", name] for name in names)]:
        subprocess.run(command, check=False, capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
