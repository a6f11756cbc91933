"""How much memory a planning process gets, by the settings and the container's control groups."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from service.orchestrator.planning.pool import container_memory_bytes, process_memory_bytes

MIB, GIB = 1 << 20, 1 << 30
UNLIMITED_V1 = "9223372036854771712"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{4 * GIB}\n"}, 4 * GIB),
        (
            {
                "proc/self/cgroup": "0::/kubepods/pod1/c\n",
                "sys/fs/cgroup/kubepods/memory.max": f"{9 * GIB}\n",
                "sys/fs/cgroup/kubepods/pod1/memory.max": f"{2 * GIB}\n",
                "sys/fs/cgroup/kubepods/pod1/c/memory.max": "max\n",
            },
            2 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/docker/a\n4:memory:/docker/a\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory/docker/a/memory.limit_in_bytes": f"{UNLIMITED_V1}\n",
                "sys/fs/cgroup/cpu/memory.limit_in_bytes": "1\n",
            },
            3 * GIB,
        ),
    ],
    ids=["no cgroup", "v2 without a limit", "v2 of a container", "v2 of a pod", "v1 of a container"],
)
def test_the_containers_limit_is_the_least_of_its_control_groups(
    files: dict[str, str], expected: int | None, tmp_path: Path
):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert container_memory_bytes(tmp_path) == expected


@pytest.mark.parametrize("container", [int(UNLIMITED_V1), 64 * GIB, 4 * GIB, 2 * GIB])
@pytest.mark.parametrize("processes", [1, 3])
def test_planning_processes_and_the_server_fit_into_the_container(
    container: int, processes: int, caplog: pytest.LogCaptureFixture
):
    each = process_memory_bytes(None, processes, container)
    assert 512 * MIB <= each <= 8 * GIB
    fits = GIB + (processes + 1) * each <= container
    assert fits is (not caplog.records), "what does not fit is said"
    if (container, processes) != (2 * GIB, 3):
        assert fits


def test_without_a_container_a_process_gets_eight_gibibytes_or_what_is_set():
    assert process_memory_bytes(None, 1, None) == 8 * GIB
    assert process_memory_bytes(3 * GIB, 1, None) == 3 * GIB


def test_a_setting_that_exceeds_the_container_is_kept_and_said(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert process_memory_bytes(8 * GIB, 1, 4 * GIB) == 8 * GIB
    assert "2 planning processes of 8192 MiB" in caplog.text and "limit of 4096 MiB" in caplog.text
