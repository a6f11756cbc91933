"""Kernels on disk: what one file compiled from others is compiled again when one of those changes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from service.scheduler.kernels import arrays

CALLER = """
from small.compiled import compiled
from small.part import ONE, more

@compiled
def total(count):
    return more(count) + ONE
"""
PART = """
from small.compiled import inlined

ONE = 1

@inlined
def more(count):
    return count + 10
"""
CALL = "from small import caller; print(caller.total(100), sum(caller.total.stats.cache_hits.values()))"


@pytest.mark.slow
def test_a_change_in_another_file_compiles_a_kernel_again(tmp_path: Path):
    """Of its parts and of its constants; what has not changed is taken from the disk."""
    package = tmp_path / "small"
    package.mkdir()
    source = Path(arrays.__file__).read_text()
    for name, text in (("__init__", ""), ("compiled", source), ("caller", CALLER), ("part", PART)):
        (package / f"{name}.py").write_text(text)

    assert _total(tmp_path) == (111, "compiled")
    assert _total(tmp_path) == (111, "from disk")
    _change(package / "part.py", "count + 10", "count + 20")
    assert _total(tmp_path) == (121, "compiled")
    _change(package / "part.py", "ONE = 1", "ONE = 5")
    assert _total(tmp_path) == (125, "compiled")


def _total(folder: Path) -> tuple[int, str]:
    # -B: Python knows a source by its size and the second of its change, and two changes here may share both
    command = [sys.executable, "-B", "-c", CALL]
    told = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert told.returncode == 0, told.stderr
    total, hits = map(int, re.findall(r"\d+", told.stdout))
    return total, "from disk" if hits else "compiled"


def _change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
