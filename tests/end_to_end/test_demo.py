"""`slotline demo` as a user meets it, and when the user loses patience."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

MARK = "SLOTLINE_TEST_MARK"
DRIVER_AND_WORKERS = 5
"""Of the demo's first job."""


@dataclass(frozen=True)
class Process:
    number: int
    parent: int
    command: str


def processes_with(mark: str) -> list[Process]:
    """The living processes that inherited `mark` in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in Path(f"/proc/{name}/environ").read_bytes():
                    command = Path(f"/proc/{name}/cmdline").read_text(errors="replace").replace("\0", " ")
                    parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
                    found.append(Process(int(name), int(parent), command))
            except OSError:
                continue
    return found


def forked(processes: list[Process]) -> list[Process]:
    """Those of `processes` that the fork server made."""
    server = "-m worker.contract.forkserver"
    servers = {p.number for p in processes if server in p.command}
    return [p for p in processes if p.parent in servers]


def start_demo(directory) -> tuple[subprocess.Popen, str]:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", "service.cli", "demo", "--directory", str(directory)],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        # A shell without job control starts its background jobs with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    return process, mark


def wait_until_gone(mark: str, limit_s: float = 120) -> list[Process]:
    deadline = time.monotonic() + limit_s
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def test_the_demo_trains_both_models_and_ends_with_its_table(tmp_path):
    process, mark = start_demo(tmp_path / "data")
    output, _ = process.communicate(timeout=850)
    assert process.returncode == 0, output
    for expected in (
        "gpt-stdlib",
        "unet-digits",
        "makespan, first plan",
        "makespan, calibrated",
        "makespan, measured",
        "bubble, measured",
    ):
        assert expected in output
    assert "bits per byte" in output and "/jobs/job-" in output
    assert {p.name for p in (tmp_path / "data" / "demo").glob("*.trace.json")} == {
        "gpt-stdlib.trace.json",
        "unet-digits.trace.json",
    }
    assert wait_until_gone(mark) == []


def test_the_demos_processes_are_forked_and_an_interrupted_one_leaves_none_behind(tmp_path):
    process, mark = start_demo(tmp_path / "data")
    log = tmp_path / "data" / "demo" / "serve.log"
    deadline = time.monotonic() + 180
    while len(forked(processes_with(mark))) < DRIVER_AND_WORKERS:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) != 0
    assert wait_until_gone(mark) == []
