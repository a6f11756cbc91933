"""The progress line ends at 100 % where subtests report under ids of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ALONE = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
RENAMES = """
def test_renames(request, subtests):
    nodeid = request.node.nodeid
    for operation in range(8):
        request.node._nodeid = f"{nodeid}[{operation}]"
        with subtests.test(operation=operation):
            pass
        request.node._nodeid = nodeid


def test_plain():
    pass
"""


def percents(folder: Path, *arguments: str) -> list[int]:
    (folder / "test_some.py").write_text(RENAMES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, str(folder)]
    run = subprocess.run(
        [*command, f"--rootdir={folder}"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        env=ALONE,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return [int(percent) for percent in re.findall(r"\[ *(\d+)%\]", run.stdout)]


@pytest.mark.slow
def test_pytest_alone_counts_the_subtests(tmp_path: Path):
    assert percents(tmp_path)[-1] > 100, "tests/progress.py is needed no more"


def test_the_progress_line_ends_at_100_percent(tmp_path: Path):
    assert percents(tmp_path, "-p", "tests.progress")[-1] == 100
