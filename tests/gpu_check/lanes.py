"""Independence of streams, and queries behind a full launch queue.

`python -m tests.gpu_check.lanes` asks with the hardware queues that a worker takes, and with CUDA's default of 8.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.gpu_check.runner import CommandResult, Figure, Finding, finding_in_last_line

PRIORITIES = (0, -1, -1, -1, -1, -1, -1)
"""A compute lane and six lanes of transfers, as of a mesh between two others with gradients that are summed."""
_HOLD_S = 0.1
_LOOK_S = 0.03
_QUEUE_HOLD_S = 6.0
_LAUNCHES = 20_000
_SLOW_QUERY_S = 0.1


def waiting_pairs(
    streams: Sequence[Any],
    hold: Callable[[Any], None],
    mark: Callable[[Any], Any],
    settle: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[tuple[int, int]]:
    """The pairs (a, b) of streams where work on b waits for a kernel on a, by number.

    `hold(a)` keeps a stream busy for longer than it is looked at, `mark(b)` returns an event after a short kernel there,
    and `settle` waits for the device.
    """
    pairs = []
    for (a, holder), (b, other) in itertools.permutations(enumerate(streams), 2):
        hold(holder)
        event, ends_s = mark(other), clock() + _LOOK_S
        while not (done := event.query()) and clock() < ends_s:
            pass
        if not done:
            pairs.append((a, b))
        settle()
    return pairs


def measure() -> Finding:
    """Waiting pairs and the slowest query with the environment of this process."""
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default")
    streams = [torch.cuda.Stream(priority=priority) for priority in PRIORITIES]
    value = torch.zeros(8, device="cuda")
    value += 1  # its kernel is loaded before anything is held
    cycles_per_s = _cycles_per_s()

    def hold(stream: torch.cuda.Stream, seconds: float = _HOLD_S) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * cycles_per_s))

    def mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            value.add_(1)
            event.record(stream)
        return event

    pairs = waiting_pairs(streams, hold, mark, torch.cuda.synchronize)
    named = ", ".join(f"{a}→{b}" for a, b in pairs) or "none"
    figures = [
        Figure(
            f"{queues} hardware queues: waiting pairs",
            f"{len(pairs)} of {len(streams) * (len(streams) - 1)}: {named}",
            "lane 0 computes; where it waits for another, compute stands behind a waiting receive",
        ),
        *_full_queue(streams, value, hold, queues),
    ]
    return Finding(
        tuple(figures), None if not pairs else f"{queues} hardware queues: {named} wait for each other"
    )


def _full_queue(
    streams: Sequence[torch.cuda.Stream], value: torch.Tensor, hold: Callable[..., None], queues: str
) -> list[Figure]:
    """The launches that a waiting stream takes before the host blocks, and the slowest query of another event then."""
    gate, held = torch.cuda.Event(), streams[1]
    hold(held, _QUEUE_HOLD_S)
    gate.record(held)
    streams[0].wait_event(gate)
    launched = [0]

    def fill() -> None:
        with torch.cuda.stream(streams[0]):
            for count in range(_LAUNCHES):
                value.add_(1)
                launched[0] = count + 1

    filler = threading.Thread(target=fill, daemon=True)
    filler.start()
    seen = -1
    while seen != launched[0] and filler.is_alive():  # until the host blocks in a launch
        seen = launched[0]
        time.sleep(0.2)
    slowest, closed = 0.0, True
    for _ in range(20):
        began = time.monotonic()
        closed = not gate.query() and closed
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.02)
    count = launched[0]
    torch.cuda.synchronize()
    filler.join()
    if not closed:
        slow = f"{slowest:.3f} s, and the gate had opened: no query was slower than the wait"
    else:
        slow = f"{slowest:.4f} s"
    return [
        Figure(
            f"{queues} hardware queues: launches before the host blocks",
            f"{count}" if count < _LAUNCHES else f"none blocked in {_LAUNCHES}",
            "a host that is further ahead stands in a launch",
        ),
        Figure(
            f"{queues} hardware queues: slowest query meanwhile",
            slow,
            f"above {_SLOW_QUERY_S:g} s the watch cannot see a peer that hangs while the launch queue is full",
        ),
    ]


def _cycles_per_s() -> float:
    """The device's cycles a second, as `torch.cuda._sleep` counts them."""
    begin, end, cycles = (
        torch.cuda.Event(enable_timing=True),
        torch.cuda.Event(enable_timing=True),
        50_000_000,
    )
    torch.cuda._sleep(1000)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (begin.elapsed_time(end) / 1e3)


def both() -> Finding:
    """The findings with 16 hardware queues, which a worker takes, and with 8; only the first may fail."""
    findings = []
    for queues in ("16", "8"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu_check.lanes", "measure"],
            env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": queues},
            stdout=subprocess.PIPE,
            text=True,
            timeout=140,
        )
        findings.append(finding_in_last_line(CommandResult(done.returncode, done.stdout, 0.0)))
    return Finding(tuple(figure for one in findings for figure in one.figures), findings[0].failure)


if __name__ == "__main__":
    print((measure() if sys.argv[1:] == ["measure"] else both()).to_json())
