import pytest

from worker import reasons


@pytest.fixture(autouse=True)
def unknown_reason_codes_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """At run time an unknown code comes from a newer neighbour; here it is a mistake of ours."""
    monkeypatch.setattr(reasons, "strict", True)
