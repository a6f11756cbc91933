"""A defect that the scheduler tells of at run time is an error here."""

import pytest

from service.scheduler.problem import defects


@pytest.fixture(autouse=True)
def defects_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defects, "strict", True)
