"""A driver under a control plane that is too old for it says so in its one report, and does nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.driver.control_plane import ControlPlane
from worker.contract.versions import (
    PROTOCOL,
    control_plane_too_old_message,
    driver_too_old_message,
    parse_protocol,
)

# A version of the driver that needs a number that no control plane has yet.
NEWER_DRIVER = """
import sys
from worker.contract import versions
versions.OLDEST_CONTROL_PLANE_PROTOCOL = 9
from worker.driver.__main__ import main
sys.exit(main())
"""


@pytest.mark.slow
def test_a_driver_that_is_newer_than_its_control_plane_understands_ends_with_both_names():
    given = {"job_id": "j", "number": 1, "job": {"no": "job of ours"}, "device": "cpu"}
    plane = ControlPlane(given)
    try:
        done = subprocess.run(
            [sys.executable, "-c", NEWER_DRIVER],
            cwd=Path(__file__).parents[3],
            env={
                **os.environ,
                "SLOTLINE_CONTROL_URL": plane.url,
                "SLOTLINE_ATTEMPT_ID": "j-1",
                "SLOTLINE_ATTEMPT_TOKEN": "t",
                "SLOTLINE_LIMIT_LINGER_S": "0",
            },
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    finally:
        plane.close()
    assert done.returncode == 1, done.stderr
    (final,) = [report for report in plane.reports if report["state"]]
    assert (final["state"], final["reason"]) == ("FAILED", "VERSION_MISMATCH")
    assert "the control plane speaks protocol 0, and this driver, Slotline " in final["message"]
    assert "needs 9 or more: upgrade the control plane before Ray's pods" in final["message"]
    assert "Traceback" not in done.stderr


def test_what_is_no_number_counts_as_the_time_before_there_was_one():
    assert [parse_protocol(said) for said in (None, "", "x", "-1", "1.5", "9" * 30, "²", [1], "3", 3)] == [
        0
    ] * 8 + [
        3,
        3,
    ]
    assert driver_too_old_message(None) is None and control_plane_too_old_message(None) is None
    assert (
        driver_too_old_message(str(PROTOCOL)) is None and control_plane_too_old_message(PROTOCOL + 1) is None
    )
