"""The second try: what passes alone is flaky and the run green; what fails again, or fails often, leaves it red."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.second_try import FEW, plain_id

FAILS_ONCE = """
import pathlib, pytest
@pytest.mark.parametrize("case", range({cases}))
def test_unlucky(case):
    before = pathlib.Path(__file__).with_name(f"tried{{case}}")
    if not before.exists():
        before.touch()
        raise AssertionError("the first time")
def test_lucky():
    pass
"""


def run(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_some.py").write_text(source)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        *("-p", "xdist", "-p", "tests.second_try", "--second-try"),
        *arguments,
    ]
    return subprocess.run(
        [*command, f"--rootdir={folder}", str(folder)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    )


@pytest.mark.parametrize("processes", [("-n0",), ("-n2", "--dist", "loadgroup")], ids=["one", "two"])
def test_a_test_that_passes_alone_is_named_flaky_and_the_run_is_green(
    tmp_path: Path, processes: tuple[str, ...]
):
    first = run(tmp_path, FAILS_ONCE.format(cases=1), *processes)
    assert first.returncode == 0, first.stdout + first.stderr
    lines = first.stdout.splitlines()
    assert "FLAKY test_some.py::test_unlucky[0]" in lines
    assert "AssertionError: the first time" in first.stdout, "how it failed tells what to mend"
    assert lines[-1].startswith("1 passed, 1 flaky"), "the log ends with pytest's summary"
    again = run(
        tmp_path, FAILS_ONCE.format(cases=1), "-n0", "--last-failed", "--last-failed-no-failures=none"
    )
    assert "test_unlucky" not in again.stdout, "a flaky test is no failed one"


def test_one_that_fails_again_leaves_the_run_red_whoever_passes_beside_it(tmp_path: Path):
    failed = run(tmp_path, FAILS_ONCE.format(cases=1) + "\ndef test_broken():\n    assert False\n", "-n0")
    assert failed.returncode == 1
    assert "FLAKY" not in failed.stdout and "FAILED test_some.py::test_broken" in failed.stdout
    assert failed.stdout.splitlines()[-1].startswith("2 failed, 1 passed")


GROUPED = """
import pathlib, pytest
@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items):
    files = sorted({item.path for item in items})
    for item in items:
        item.add_marker(pytest.mark.xdist_group(f"file{files.index(item.path)}"))
    yield
"""


@pytest.mark.parametrize("processes", [("-n0",), ("-n2", "--dist", "loadgroup")], ids=["one", "two"])
def test_last_failed_runs_what_failed_in_groups_alone(tmp_path: Path, processes: tuple[str, ...]):
    (tmp_path / "conftest.py").write_text(GROUPED)
    (tmp_path / "test_other.py").write_text("def test_other():\n    pass\n")
    source = "def test_lucky():\n    pass\ndef test_broken():\n    assert False\n"
    first = run(tmp_path, source, "-n2", "--dist", "loadgroup")
    assert first.stdout.splitlines()[-1].startswith("1 failed, 2 passed"), first.stdout
    again = run(tmp_path, source, *processes, "--last-failed")
    assert again.stdout.splitlines()[-1].startswith("1 failed"), again.stdout
    assert "passed" not in again.stdout.splitlines()[-1]


def test_many_failures_are_not_tried_again(tmp_path: Path):
    many = run(tmp_path, FAILS_ONCE.format(cases=FEW + 1), "-n0")
    assert many.returncode == 1
    assert f"{FEW + 1} tests failed, more than {FEW}: no second try" in many.stdout


def test_an_error_of_a_fixture_is_tried_again(tmp_path: Path):
    source = FAILS_ONCE.format(cases=1).replace("def test_unlucky(case)", "def test_unlucky(case, unlucky)")
    fixture = """
@pytest.fixture
def unlucky(tmp_path_factory):
    before = pathlib.Path(__file__).with_name("tried0")
    if not before.exists():
        before.touch()
        raise AssertionError("the first time")
"""
    tried = run(tmp_path, source + fixture, "-n0")
    assert tried.returncode == 0, tried.stdout
    assert "FLAKY test_some.py::test_unlucky[0]" in tried.stdout.splitlines()


@pytest.mark.parametrize(
    ("nodeid", "expected"),
    [
        ("tests/test_a.py::test_b@file3", "tests/test_a.py::test_b"),
        ("tests/test_a.py::test_b[x@y]@ray", "tests/test_a.py::test_b[x@y]"),
        ("tests/test_a.py::test_b[x@y]", "tests/test_a.py::test_b[x@y]"),
        ("tests/test_a@b.py::test_c", "tests/test_a@b.py::test_c"),
    ],
)
def test_an_id_loses_only_the_group_of_xdist(nodeid: str, expected: str):
    assert plain_id(nodeid) == expected
