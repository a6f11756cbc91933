"""The tests by day that ran a line, by the contexts of coverage.py.

One run of the suite with `python -m tests.mutants.watchers FILE` records them, in about half more than the time of
`make test`, for which this module is a plugin of pytest. What a test's fixtures, threads, tasks and processes run, they
run for that test; a line that runs while a module is imported has no test of its own.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).parents[2]
BY_DAY = "not (slow or matrix or postgres)"
MOST_TESTS = 40
"""So many functions of tests are tried of those that ran a line."""
_CONFIGURATION = """
[run]
source =
    {root}/service
    {root}/worker
parallel = true
data_file = {data}/ran
context = ${{PYTEST_CURRENT_TEST-}}
patch = _exit
"""


class Watchers:
    """Which tests ran a line, as the recorded `file` has it."""

    def __init__(self, file: Path, checkout: Path) -> None:
        self._data = coverage.CoverageData(str(file))
        self._data.read()
        self._root = Path(os.path.commonpath(self._data.measured_files()))
        self._checkout = checkout

    def tests(self, file: str, line: int, mirror: str) -> str:
        """Arguments of pytest: tests that ran the statement at `line`, or the file where none did; those of the files in
        `mirror` first, whole jobs last, and before others those that ran more of the file."""
        by_line = self._data.contexts_by_lineno(str(self._root / file))
        lines = Counter(test for contexts in by_line.values() for test in self._functions(contexts))
        before = [number for number in by_line if number <= line and by_line[number]]
        ran = self._functions(by_line[max(before)]) if before else set()
        nearest = [word for word in shlex.split(mirror) if word.startswith("tests/")]

        def urgency(test: str) -> tuple[bool, bool, int, str]:
            whole_job = test.startswith("tests/end_to_end")
            return whole_job, test.partition("::")[0] not in nearest, -lines[test], test

        chosen = sorted(ran or lines, key=urgency)[:MOST_TESTS] or nearest
        return f"{shlex.join(chosen)} -m {shlex.quote(BY_DAY)}"

    def _functions(self, contexts: list[str]) -> set[str]:
        """`tests/….py::test_…` of each context: the test that ran, else the one that had started the process."""
        found = set()
        for context in contexts:
            started_by, _, ran = context.partition("|")
            test = (ran or started_by).partition("[")[0].partition("@")[0].partition(" ")[0]
            if (self._checkout / test.partition("::")[0]).is_file():
                found.add(test)
        return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Lines run for this test from here on."""
    recording = coverage.Coverage.current()
    if recording is not None:
        recording.switch_context(item.nodeid)
    return (yield)


def record(file: Path) -> int:
    """Run the tests by day and write which of them ran which line to `file`. The code with which pytest ended."""
    with tempfile.TemporaryDirectory() as folder:
        configuration = Path(folder, "coveragerc")
        configuration.write_text(_CONFIGURATION.format(root=ROOT, data=folder))
        environment = {
            "COVERAGE_PROCESS_START": str(configuration),
            "PYTHONPATH": str(ROOT),
            "SLOTLINE_TEST_SHARE": "0.25",
            "CI": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.watchers"]
        command += ["-n", str(os.cpu_count()), "--dist", "loadgroup"]
        done = subprocess.run(
            [*command, "--no-loadscope-reorder", "-m", BY_DAY], cwd=ROOT, env=os.environ | environment
        )
        merged = coverage.CoverageData(str(file))
        for part in Path(folder).glob("ran.*"):
            data = coverage.CoverageData(str(part))
            data.read()
            merged.update(data)
        merged.write()
        return done.returncode


if __name__ == "__main__":
    sys.exit(record(Path(sys.argv[1]).absolute()))
