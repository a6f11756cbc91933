"""The progress line of pytest counts tests, and ends at 100 %.

pytest counts the ids of all reports. Subtests of schemathesis report under an id for each operation of the API, which
nobody has collected.
"""

from __future__ import annotations

import pytest

_begun: set[str] = set()


class _OfTests(set[str]):
    """Ids of tests: others are not kept."""

    def add(self, nodeid: str) -> None:
        if nodeid in _begun:
            super().add(nodeid)


@pytest.hookimpl(trylast=True)  # the terminal reporter is there
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:  # there is none in the processes of xdist
        reporter._progress_nodeids_reported = _OfTests()


def pytest_runtest_logstart(nodeid: str) -> None:
    _begun.add(nodeid)
