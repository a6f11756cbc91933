"""What is changed is there: files that were moved, or lines that were rewritten, would be left out in silence."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import coverage

from tests.mutants.__main__ import drawn_rooms
from tests.mutants.groups import GROUPS, rooms
from tests.mutants.watchers import BY_DAY, Watchers

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


def test_every_module_is_in_a_room_whose_tests_mirror_it():
    found = {file.as_posix(): room for room in rooms(ROOT) for file in room.files(ROOT)}
    every = {
        path.relative_to(ROOT).as_posix()
        for root in ("service", "worker")
        for path in ROOT.glob(f"{root}/**/*.py")
        if path.name != "__init__.py" and not {"migrations", "templates"} & {*path.parts}
    }
    assert every - {*found} == set()
    assert "tests/service/store/test_leases.py" in shlex.split(found["service/store/leases.py"].tests)
    assert "not (slow or" in found["worker/engine/engine.py"].tests
    tests = [word for room in found.values() for word in shlex.split(room.tests) if word.startswith("tests/")]
    assert all((ROOT / test).exists() for test in {*tests})


def test_changes_are_drawn_evenly_over_rooms_and_the_same_again():
    every = rooms(ROOT)
    few, of_each = drawn_rooms(every, 5, seed=3)
    assert len({room.name for room in few}) == 5 and of_each == 1
    assert drawn_rooms(every, 5, seed=3) == (few, 1) != drawn_rooms(every, 5, seed=4)
    assert drawn_rooms(every[:2], 5, seed=3)[1] == 3


def test_a_line_is_watched_by_the_tests_that_ran_it_wherever_they_are(tmp_path: Path):
    leases, mirror = "service/store/leases.py", "tests/service/store/test_leases.py -m 'not slow'"
    near, far = "tests/service/store/test_leases.py::test_one", "tests/service/api/test_app.py::test_two"
    whole, gone = "tests/end_to_end/test_jobs.py::test_three", "tests/test_that_is_no_more.py::test_four"
    data = coverage.CoverageData(str(tmp_path / "ran"))
    for context, lines in (
        ("", [1, 2]),  # while it was imported
        (f"|{whole}[gpt]", [5]),
        (f"|{far}[sqlite]@file7", [5, 9]),
        (f"{near} (call)|", [5]),  # in a process that the test started
        (f"|{gone}", [5]),
    ):
        data.set_context(context)
        data.add_lines({f"/there/{leases}": lines, "/there/worker/data/tokens.py": [1]})
    data.write()
    watchers = Watchers(tmp_path / "ran", ROOT)
    day = f" -m '{BY_DAY}'"
    assert watchers.tests(leases, 5, mirror) == f"{near} {far} {whole}{day}"
    assert watchers.tests(leases, 6, mirror) == f"{near} {far} {whole}{day}", "a statement of several lines"
    assert watchers.tests(leases, 9, mirror) == f"{far}{day}"
    assert watchers.tests(leases, 1, mirror) == f"{near} {far} {whole}{day}", (
        "whatever ran another line of it"
    )
    assert watchers.tests("service/store/files.py", 3, mirror) == f"tests/service/store/test_leases.py{day}"
