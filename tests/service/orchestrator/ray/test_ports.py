"""Ports that stay free until their server binds them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from service.orchestrator.ray import local_ray
from service.orchestrator.ray.local_ray import free_ports

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_ports_differ_and_can_be_bound_on_every_address():
    found = free_ports(50)
    assert len(set(found)) == 50
    for port in found[:5]:
        with socket.create_server(("0.0.0.0", port)):
            pass


@pytest.mark.skipif(
    not OUTGOING.exists(), reason="only Linux tells which ports its outgoing connections take"
)
def test_no_outgoing_connection_can_take_them():
    lowest, highest = map(int, OUTGOING.read_text().split())
    assert not [port for port in free_ports(200) if lowest <= port <= highest]


def test_a_port_with_a_listener_is_passed_over_and_none_left_is_said(monkeypatch: pytest.MonkeyPatch):
    (port,) = free_ports(1)
    monkeypatch.setattr(local_ray, "_PORT_RANGE", range(port, port + 1))
    monkeypatch.setattr(local_ray, "_PORT_TRIES", 1)
    assert free_ports(1) == [port]
    with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match="no 1 free ports"):
        free_ports(1)
