"""Operators whose kernels torch wrote for whole backwards run in two halves as well, and none dies in native code."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_every_operator_with_weights_runs_in_input_and_weight_halves_in_any_memory_order():
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.engine.native_operators"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "done", done.stdout[-2000:]
    assert done.returncode == 0
