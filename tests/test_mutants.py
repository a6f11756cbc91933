"""What is changed is there: files that were moved, or lines that were rewritten, would be left out in silence."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.mutants.groups import GROUPS

ROOT = Path(__file__).parents[1]


def test_every_pattern_of_a_group_finds_files_and_its_tests_exist():
    found = {pattern: [*ROOT.glob(pattern)] for group in GROUPS for pattern in group.patterns.split()}
    assert [pattern for pattern, files in found.items() if not files] == []
    tests = [word for group in GROUPS for word in group.tests.split() if word.startswith("tests/")]
    assert [test for test in tests if not (ROOT / test.partition("::")[0]).exists()] == []


def test_every_change_that_is_none_is_of_a_line_that_is_there():
    known = tomllib.loads((ROOT / "tests/mutants/equivalent.toml").read_text())["equivalent"]
    files = {one["file"] for one in known} - {"*"}
    sources = {file: (ROOT / file).read_text() for file in files}
    assert [one for one in known if one["file"] in files and one["old"] not in sources[one["file"]]] == []
