"""The driver's process copies its log to where a container's log collector reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.driver.control_plane import ControlPlane

SECRET = "a-secret-of-the-owner"


@pytest.fixture
def environment(tmp_path: Path):
    """Of the driver of an attempt whose job no driver can read: its message would show a secret."""
    plane = ControlPlane(
        {
            "job_id": "job-7",
            "number": 3,
            "device": "cpu",
            "job": {"model": SECRET},
            "secrets": {"MY_TOKEN": SECRET},
        }
    )
    yield {
        **os.environ,
        "SLOTLINE_CONTROL_URL": plane.url,
        "SLOTLINE_ATTEMPT_ID": "job-7-3",
        "SLOTLINE_ATTEMPT_TOKEN": "token",
        "SLOTLINE_LIMIT_LINGER_S": "0",
    }
    plane.close()


def driver(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "worker.driver"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_lines_of_a_driver_reach_the_copy_as_json_with_job_and_attempt_and_without_secrets(
    environment: dict[str, str], tmp_path: Path
):
    copy = tmp_path / "stdout"
    copy.touch()
    ended = driver({**environment, "SLOTLINE_LOG_COPY_TO": str(copy)})
    assert ended.returncode == 1
    lines = [json.loads(line) for line in copy.read_text().splitlines()]
    (failed,) = [line for line in lines if line["message"].startswith("attempt 3 of job job-7 failed")]
    assert (failed["level"], failed["job"], failed["attempt"]) == ("ERROR", "job-7", 3)
    assert "***" in failed["message"] and SECRET not in copy.read_text()
    assert "attempt 3 of job job-7 failed" in ended.stdout + ended.stderr, "its own output has it too"


@pytest.mark.slow
def test_a_driver_without_a_place_for_the_copy_says_so_and_goes_on(
    environment: dict[str, str], tmp_path: Path
):
    place = tmp_path / "nowhere" / "stdout"
    ended = driver({**environment, "SLOTLINE_LOG_COPY_TO": str(place)})
    output = ended.stdout + ended.stderr
    assert f"SLOTLINE_LOG_COPY_TO is {place}, which cannot be written to" in output
    assert "attempt 3 of job job-7 failed" in output
