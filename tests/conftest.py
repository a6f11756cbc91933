from collections.abc import Iterator

import pytest

from tests.leaks import leaked, state
from worker.contract import reasons


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
