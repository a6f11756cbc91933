"""A test that lacks what it needs is left out by name at home, and fails in continuous integration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.conftest import pytest_runtest_setup
from tests.missing import leave_out, needs, needs_libraries


@pytest.fixture(params=["true", "1", "yes"])
def ci(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", request.param)


@pytest.fixture(params=["", "false", "0", None])
def home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    if request.param is not None:
        monkeypatch.setenv("CI", request.param)


@pytest.mark.parametrize("case", [])
def reads_a_file(case):
    raise AssertionError("not called")


def test_in_ci_a_test_without_its_file_fails_and_says_which(ci: None, tmp_path):
    instead = needs(tmp_path / "plans.json", "the cases")(reads_a_file)
    assert instead.__name__ == "reads_a_file" and not hasattr(instead, "pytestmark")
    with pytest.raises(
        pytest.fail.Exception, match=r"plans\.json is not there \(the cases\), and CI needs it"
    ):
        instead()
    with pytest.raises(pytest.fail.Exception, match="no browser"):
        leave_out("no browser")


def test_at_home_a_test_without_its_file_is_skipped(home: None, tmp_path):
    def reads():
        raise AssertionError("not called")

    (mark,) = needs(tmp_path / "plans.json", "the cases")(reads).pytestmark
    assert mark.name == "skip" and "plans.json is not there (the cases)" in mark.args[0]
    with pytest.raises(pytest.skip.Exception, match="no browser"):
        leave_out("no browser")


def test_a_test_with_its_file_is_left_as_it_is(ci: None, tmp_path):
    assert needs(tmp_path, "a folder")(reads_a_file) is reads_a_file


def marked(*names: str) -> SimpleNamespace:
    """A collected test with the mark of these libraries."""
    mark = needs_libraries(*names).mark
    return SimpleNamespace(iter_markers=lambda name: [mark] if name == mark.name else [])


def test_in_ci_a_test_without_its_libraries_fails_before_it_runs(ci: None):
    with pytest.raises(pytest.fail.Exception, match="not installed: no_such_library, and CI needs it"):
        pytest_runtest_setup(marked("pytest", "no_such_library"))
    pytest_runtest_setup(marked("pytest"))


def test_at_home_a_test_without_its_libraries_is_skipped(home: None):
    with pytest.raises(pytest.skip.Exception, match="not installed: no_such_library"):
        pytest_runtest_setup(marked("no_such_library"))
