"""`slotline serve` beside a Ray whose nodes have networks of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from service.orchestrator.ray.local_ray import free_ports
from tests.benchmarks.overlap_net import why_not
from tests.cluster.networked_ray import NetworkedRay, networked
from tests.end_to_end.conftest import Server
from tests.missing import leave_out


@pytest.fixture(scope="package")
def networked_ray() -> Iterator[NetworkedRay]:
    if (message := why_not()) is not None:
        leave_out(message)
    with networked() as ray:
        yield ray


@pytest.fixture(scope="package")
def net_server(networked_ray: NetworkedRay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    (port,) = free_ports(1)
    with Server(tmp_path_factory.mktemp("slotline"), networked_ray.environment(port), port) as server:
        networked_ray.wait_until_known(server.client)
        yield server
