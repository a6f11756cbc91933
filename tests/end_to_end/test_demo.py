"""`slotline demo` as a user meets it, and when the user loses patience."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

MARK = "SLOTLINE_TEST_MARK"


def processes_with(mark: str) -> list[str]:
    """Command lines of the living processes that inherited `mark` in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    marked = f"{MARK}={mark}".encode() in file.read()
                if marked:
                    with open(f"/proc/{name}/cmdline", "rb") as file:
                        found.append(file.read().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
    return found


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


def wait_until_gone(mark: str, limit_s: float = 120) -> list[str]:
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


def test_an_interrupted_demo_leaves_no_process_behind(tmp_path):
    process, mark = start_demo(tmp_path / "data")
    log = tmp_path / "data" / "demo" / "serve.log"
    deadline = time.monotonic() + 180
    while not any("worker.driver" in line for line in processes_with(mark)):  # a job runs
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    assert len(processes_with(mark)) > 5  # the demo, the server, Ray and its workers
    process.send_signal(signal.SIGINT)
    assert process.wait(120) != 0
    assert wait_until_gone(mark) == []
