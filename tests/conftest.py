import gc
import os
from collections.abc import Iterator

import pytest

from tests.leaks import leaked, state
from tests.missing import leave_out_without_libraries
from tests.progress import pytest_configure, pytest_runtest_logstart  # noqa: F401 (hooks)
from tests.second_try import (
    pytest_addoption,  # noqa: F401 (hooks)
    pytest_runtest_logreport,  # noqa: F401
    pytest_sessionfinish,  # noqa: F401
    pytest_terminal_summary,  # noqa: F401
)
from worker.contract import reasons

# readline, which pytest imports, leaves the size of a terminal to the processes of xdist, which have none
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)

# Torch and the tests themselves are a million objects: to walk over them now and then is a tenth of all work
gc.set_threshold(50_000)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file run in one process, those that start a local Ray all in one, which begins with them: they take
    longest."""
    numbers: dict[str, int] = {}
    for place, item in enumerate(items):
        number = numbers.setdefault(item.nodeid.split("::")[0], len(numbers))
        starts_ray = item.get_closest_marker("ray") is not None
        group = "ray" if starts_ray else f"file{number}"
        if item.get_closest_marker("matrix") is not None:  # each takes as long as a file
            group = f"matrix{place}"
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no walk over garbage looks at it again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    leave_out_without_libraries(item)


@pytest.fixture(autouse=True)
def unknown_reason_codes_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """At run time an unknown code comes from a newer neighbour; here it is a mistake of ours."""
    monkeypatch.setattr(reasons, "strict", True)


@pytest.fixture(autouse=True, scope="module")
def a_file_leaves_what_it_found() -> Iterator[None]:
    before = state()
    yield
    left = leaked(before, state())
    assert not left, f"this file leaves to those that come after it: {'; '.join(left)}"
