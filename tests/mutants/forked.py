"""Tests run in a fork of this process, which has the slow libraries imported already, and none of ours.

A run is ended by the processor time that it took, so that a busy machine ends none, and by the clock only
where it stands still.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest

_LIBRARIES = (
    "numpy torch torch.nn.functional torch.fx numba networkx yaml hypothesis pydantic fastapi httpx uvicorn sqlalchemy "
    "sqlalchemy.ext.asyncio aiosqlite alembic psycopg prometheus_client ortools.sat.python.cp_model _pytest.python"
)


class Ended(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    OUT_OF_TIME = "out of time"
    """More processor time than ten times what is usual: a loop without an end."""
    STOOD_STILL = "stood still"
    """The clock's limit, with no processor time to speak of: it waits for what never comes."""


@dataclass(frozen=True)
class Run:
    """One run of tests."""

    ended: Ended
    wall_s: float
    cpu_s: float


def import_libraries() -> None:
    """Once, before the first fork."""
    for name in _LIBRARIES.split():
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def run_tests(checkout: Path, tests: str, log: Path, *, cpu_limit_s: float, wall_limit_s: float) -> Run:
    """pytest's `tests` in `checkout`, in a process of its own, whose output goes to `log`."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _become_pytest(checkout, tests, log, int(cpu_limit_s) + 1)
    late = False
    try:
        while True:
            done, status, usage = os.wait4(child, os.WNOHANG)
            if done:
                break
            if not late and time.monotonic() - began > wall_limit_s:
                late = True
                _kill_group(child)
            time.sleep(0.01)
    finally:
        _kill_group(child)  # with what it started and left behind
    cpu_s = usage.ru_utime + usage.ru_stime
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        ended = Ended.OUT_OF_TIME
    elif late:
        ended = Ended.STOOD_STILL
    else:
        ended = Ended.PASSED if status == 0 else Ended.FAILED
    return Run(ended, time.monotonic() - began, cpu_s)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _become_pytest(checkout: Path, tests: str, log: Path, cpu_limit_s: int) -> None:
    code = 3
    try:
        os.setsid()
        for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
            del sys.modules[name]
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit_s, cpu_limit_s + 10))
        os.chdir(checkout)
        sys.path[0] = str(checkout)
        importlib.invalidate_caches()
        # --timeout=0: a test that stands still is ended and counted here
        code = int(
            pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", "--timeout=0", *shlex.split(tests)])
        )
    finally:
        sys.stdout.flush()
        os._exit(code)
