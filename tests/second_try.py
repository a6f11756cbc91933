"""A second try of the few tests that failed in a run with `--second-try`: alone, in one process, after all others.

Tests that pass then met their neighbours or the machine: how each failed at first is printed, and `FLAKY <test>`, and the
run is green. Where one fails again, or more than `FEW` failed at first, the run is red.

`--last-failed` knows tests by their plain ids: xdist appends their group, which is another one where fewer files are
collected.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

FEW = 5
LIMIT_S = 900
"""The longest that a second try may take: what has not ended by then has failed again."""
FLAKY = "flaky"
_FAILURES = ("failed", "error")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--second-try", action="store_true", help=f"run up to {FEW} failed tests once more, alone, at the end"
    )


@pytest.hookimpl(tryfirst=True)  # before anybody keeps the id
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # its processes compare ids with those of their items
        report.nodeid = plain_id(report.nodeid)


@pytest.hookimpl(tryfirst=True)  # before the failed tests are cached and the summary is printed
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")  # none in the processes of xdist
    if reporter is None or not config.getoption("--second-try"):
        return
    if session.exitstatus != pytest.ExitCode.TESTS_FAILED:
        return
    failed = sorted(
        {plain_id(report.nodeid) for kind in _FAILURES for report in reporter.stats.get(kind, [])}
    )
    if len(failed) > FEW:
        reporter.write_line(f"\n{len(failed)} tests failed, more than {FEW}: no second try")
    elif failed:
        reporter.write_line(f"\nsecond try of {len(failed)} failed tests, alone:")
        if passes_alone(failed, config.rootpath):
            _forgive(session, reporter)


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    reports = terminalreporter.stats.get(FLAKY, [])
    for report in reports:  # how it failed at first: nothing else tells what to mend
        terminalreporter.section(plain_id(report.nodeid))
        terminalreporter.write_line(report.longreprtext)
    for test in sorted({plain_id(report.nodeid) for report in reports}):
        terminalreporter.write_line(f"FLAKY {test}")


def _forgive(session: pytest.Session, reporter: TerminalReporter) -> None:
    """Counts all failures as flaky, lets `--last-failed` forget them, and ends the run with success."""
    reporter.stats[FLAKY] = [report for kind in _FAILURES for report in reporter.stats.pop(kind, [])]
    cache = session.config.pluginmanager.get_plugin("lfplugin")
    if cache is not None:
        cache.lastfailed.clear()
    session.exitstatus = pytest.ExitCode.OK


def plain_id(nodeid: str) -> str:
    """The id of a test without the group that xdist appends to it: `@` and no bracket or colon behind it."""
    name, mark, group = nodeid.rpartition("@")
    return name if mark and not set(group) & set("]:") else nodeid


def passes_alone(tests: list[str], root: Path) -> bool:
    """True if all `tests` pass in one new process without others beside them; its output goes to this one's."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    try:
        return subprocess.run(command, cwd=root, env=environment, timeout=LIMIT_S).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"the second try was ended after {LIMIT_S} s", flush=True)
        return False
