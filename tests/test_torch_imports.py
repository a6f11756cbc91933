"""Tests of the control plane are collected without torch, whose import takes longer than most of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT_TORCH = {
    "tests/service/scheduler/job/test_partition.py": "stages that the worker itself cuts and measures",
}
REFUSES_TORCH = """
import importlib, json, pathlib, sys

class Refused(ImportError):
    pass

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise Refused(name)

sys.meta_path.insert(0, Refusing())
sys.path.insert(0, ".")
found = []
for path in sorted(pathlib.Path("tests/service").rglob(sys.argv[1])):
    try:
        importlib.import_module(".".join(path.with_suffix("").parts))
    except Refused:
        found.append(path.as_posix())
print(json.dumps(found))
"""


def modules_with_torch(pattern: str) -> list[str]:
    """Of the modules below tests/service that match, those which import torch, found by importing them without it."""
    run = subprocess.run(
        [sys.executable, "-c", REFUSES_TORCH, pattern], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.slow
def test_no_other_module_of_the_control_planes_tests_imports_torch():
    assert set(modules_with_torch("*.py")) == {*MAY_IMPORT_TORCH}, "import it within the test that needs it"


@pytest.mark.slow
def test_tests_of_the_command_import_no_torch():
    """By day those that once reached it through helpers of others."""
    assert modules_with_torch("cli/test_[ai]*.py") == []
