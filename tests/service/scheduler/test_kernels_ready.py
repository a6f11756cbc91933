"""Kernels are compiled before anybody waits for a plan."""

import subprocess
import sys

import pytest

SCRIPT = """
from numba.core.dispatcher import Dispatcher
from service.scheduler import kernels
from service.scheduler.planner import compile_kernels

compile_kernels()
print([name for name in kernels.__all__
       if isinstance(kernel := getattr(kernels, name), Dispatcher) and len(kernel.signatures) != 1])
"""


@pytest.mark.slow
def test_every_kernel_is_compiled_once_before_the_first_plan():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr
