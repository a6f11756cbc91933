"""Where a driver serves its metrics: in the range that a firewall lets through, where one is given."""

from __future__ import annotations

import logging
import socket
import urllib.request

import pytest

from service.orchestrator.ray.local_ray import free_ports
from worker.driver.metrics import DriverMetrics, port_range, serve_in_range


def test_drivers_of_one_node_take_one_port_of_the_range_each():
    first, last = _two_in_a_row()
    one, two = DriverMetrics("one"), DriverMetrics("two")
    try:
        assert serve_in_range(one, "127.0.0.1", f"{first}-{last}") == f"127.0.0.1:{first}"
        endpoint = serve_in_range(two, "127.0.0.1", f"{first}-{last}")
        assert endpoint == f"127.0.0.1:{last}"
        assert urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10).status == 200
    finally:
        one.close()
        two.close()


def test_a_full_range_stops_no_training_and_is_said(caplog: pytest.LogCaptureFixture):
    metrics = DriverMetrics("late")
    with socket.socket() as taken, caplog.at_level(logging.WARNING):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        try:
            endpoint = serve_in_range(metrics, "127.0.0.1", f"{port}-{port}")
            assert endpoint != f"127.0.0.1:{port}"
            assert urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10).status == 200
        finally:
            metrics.close()
    assert f"SLOTLINE_METRICS_PORTS={port}-{port}" in caplog.text and endpoint in caplog.text


def test_without_a_range_any_port_will_do(caplog: pytest.LogCaptureFixture):
    metrics = DriverMetrics("any")
    try:
        assert int(serve_in_range(metrics, "127.0.0.1", "").rpartition(":")[2]) > 0
    finally:
        metrics.close()
    assert caplog.text == ""


@pytest.mark.parametrize("text", ["9400", "9499-9400", "a-b", "0-10", "9400-70000", "-"])
def test_a_range_that_is_none_is_refused_by_name(text: str):
    with pytest.raises(ValueError, match="SLOTLINE_METRICS_PORTS"):
        port_range(text)


def _two_in_a_row() -> tuple[int, int]:
    for port in free_ports(50):
        with socket.socket() as next_one:
            try:
                next_one.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port, port + 1
    raise AssertionError("no two free ports in a row")
