"""What a worker may plan with, and what it used, as the system's files tell it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from worker.machine.telemetry import MEMORY_MARGIN, PeakMemory, available_bytes, memory_limit, requested_bytes

KIB, GIB = 1 << 10, 1 << 30


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


NODE = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // KIB} kB\n"}
V2 = {
    "proc/self/cgroup": "0::/pod/worker\n",
    "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/pod/memory.current": f"{2 * GIB}\n",
    "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    "sys/fs/cgroup/pod/worker/memory.max": "max\n",
    "sys/fs/cgroup/pod/worker/memory.current": f"{GIB}\n",
}
V1 = {
    "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/a\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",  # a container sees its group as the root
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB // 2}\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (NODE, 8 * GIB),
        (NODE | V2, 3 * GIB),
        (NODE | V1, 3 * GIB // 2),
        (V1, 3 * GIB // 2),
        (NODE | V2 | {"sys/fs/cgroup/pod/memory.current": f"{9 * GIB}\n"}, 0),
    ],
)
def test_the_tightest_of_node_and_control_groups_says_what_is_available(tmp_path, files, expected):
    write(tmp_path, files)
    assert available_bytes(tmp_path) == expected


def test_workers_of_one_node_share_what_is_available_less_the_margin(tmp_path):
    write(tmp_path, NODE)
    assert memory_limit("cpu", 4, tmp_path) == int(8 * GIB * (1 - MEMORY_MARGIN)) // 4
    assert memory_limit("cpu", 1, tmp_path / "nothing") is None


def test_this_machine_says_what_is_available():
    assert memory_limit("cpu", 1) > 1 << 20


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has", 2.5 * GIB),
        ("can't allocate memory: you tried to allocate 4096 bytes. Error code 12", 4096),
        ("no word of it", 0),
    ],
)
def test_the_tensor_that_found_no_place_is_read_from_the_message(text, size):
    assert requested_bytes(text) == size


_COMES_AND_GOES = """
import torch
from worker.machine.telemetry import PeakMemory

peak = PeakMemory("cpu")
peak.begin()
before = peak.read()
torch.ones(64 << 20, dtype=torch.uint8)
print(peak.read() - before)
"""


@pytest.mark.slow
def test_the_peak_of_a_process_contains_what_came_and_went_since_the_beginning():
    """In a process of its own: the system may take pages from a large one that it has not used for long."""
    done = subprocess.run(
        [sys.executable, "-c", _COMES_AND_GOES], capture_output=True, text=True, check=True, timeout=120
    )
    size = 64 << 20
    assert size * 0.9 < int(done.stdout) < size * 1.5


def test_what_was_there_before_counts_only_as_far_as_it_is_held():
    peak = PeakMemory("cpu")
    other, held = torch.ones(64 << 20, dtype=torch.uint8), torch.ones(8 << 20, dtype=torch.uint8)
    peak.set_baseline([held])
    peak.begin()
    assert 7 << 20 < peak.read() < 16 << 20
    del other


def test_what_the_process_gives_back_is_not_taken_from_what_it_holds():
    peak = PeakMemory("cpu")
    other, held = torch.ones(64 << 20, dtype=torch.uint8), torch.ones(8 << 20, dtype=torch.uint8)
    peak.set_baseline([held])
    del other
    peak.begin()
    assert peak.read() == held.nbytes
