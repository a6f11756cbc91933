"""Tests run in a fork of this process, which has the slow libraries imported already, and none of ours.

A run is ended by the processor time that it took, so that a busy machine ends none, and by the clock only
where it stands still.
"""

from __future__ import annotations

import contextlib
import gc
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
from types import ModuleType

import pytest

# --timeout=0: a test that stands still is ended and counted here
_OPTIONS = ("-x", "-q", "-n0", "-p", "no:cacheprovider", "-p", "no:schemathesis", "--timeout=0")
_PYTESTS_OWN = ("pytest", "_pytest", "_hypothesis", "xdist", "__main__", "tests")


class Ended(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    OUT_OF_TIME = "out of time"
    """Several times the processor time that is usual: a loop without an end."""
    STOOD_STILL = "stood still"
    """The clock's limit, with no processor time to speak of: it waits for what never comes."""


@dataclass(frozen=True)
class Run:
    """One run of tests."""

    ended: Ended
    wall_s: float
    cpu_s: float


def import_libraries(imported: Path) -> None:
    """Those that a run has written down in `imported`, for the forks that follow."""
    for name in imported.read_text().split():
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def run_tests(
    checkout: Path,
    tests: str,
    log: Path,
    *,
    cpu_limit_s: float,
    wall_limit_s: float,
    imported: Path | None = None,
) -> Run:
    """pytest's `tests` in `checkout`, in a process of its own, whose output goes to `log`.

    What it imports of others is written down in `imported`.
    """
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _become_pytest(checkout, tests, log, int(cpu_limit_s) + 1, imported)
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


def _become_pytest(checkout: Path, tests: str, log: Path, cpu_limit_s: int, imported: Path | None) -> None:
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
        code = int(pytest.main([*_OPTIONS, *shlex.split(tests)]))
        if imported is not None:
            imported.write_text("\n".join(_libraries(checkout)))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _libraries(checkout: Path) -> list[str]:
    """The modules of this process that come from elsewhere, but for what pytest must import itself."""
    found = []
    for name, module in [*sys.modules.items()]:
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        ours = not isinstance(file, str) or Path(file).is_relative_to(checkout)
        if not ours and not name.startswith(_PYTESTS_OWN):
            found.append(name)
    return found
