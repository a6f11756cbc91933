"""`make mutants`: small changes to the pure and the dangerous parts, one at a time, that no test notices.

cosmic-ray makes the changes of code, queries.py those of the dashboards' queries, in a copy of the checkout. Which
ones are tried is drawn anew each time, evenly over the groups of groups.py and their files, for SLOTLINE_MUTANTS_S
seconds (600 by default); SLOTLINE_MUTANTS_SEED draws the same again, SLOTLINE_MUTANTS_MOST bounds them in each
group, and `python -m tests.mutants decide checkpoint` draws of groups with these names. `--all-rooms 60 --seed 7` draws 60
changes instead, evenly over all packages of service and worker, for as long as they take, and names are packages then
(service/store). The tests by day of the folder that mirrors a package watch it, or with `--ran FILE` those that ran the
changed line when the file was recorded (watchers.py), wherever they are. With a file named by SLOTLINE_MUTANTS_RECORD
a run of the same seed can be gone on with: what it says was noticed counts, and is not tried again, as tests have only
been added since.

A change that is none (equivalent.toml says why) is not counted. One that was only found by running out of time is
shown apart, and not counted as noticed. This is a report: look at every survivor, and write the test that misses, or
the reason. results.md keeps the last full one.
"""

from __future__ import annotations

import argparse
import compileall
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

from tests.mutants.changes import Change, drawn
from tests.mutants.forked import Ended, Run, import_libraries, run_tests
from tests.mutants.groups import GROUPS, Group, rooms
from tests.mutants.watchers import Watchers

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
# A change is given so many times the processor time that the tests usually take, and so long by the clock.
_CPU_FACTOR, _CPU_LEAST_S = 3, 10
_WALL_FACTOR, _WALL_LEAST_S = 10, 60


def main() -> int:
    limit_s = float(os.environ.get("SLOTLINE_MUTANTS_S", "600"))
    most = int(os.environ.get("SLOTLINE_MUTANTS_MOST", "1000000"))
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("names", nargs="*", help="draw of these groups, or packages, alone")
    parser.add_argument(
        "--all-rooms", type=int, metavar="N", help="N changes over all packages, evenly rounded up"
    )
    parser.add_argument("--seed", type=int, help="draw the same again; SLOTLINE_MUTANTS_SEED")
    parser.add_argument(
        "--ran", type=Path, metavar="FILE", help="with --all-rooms: what tests.mutants.watchers recorded"
    )
    given = parser.parse_args()
    ran = given.ran.absolute() if given.ran else None
    seed = given.seed or int(
        os.environ.get("SLOTLINE_MUTANTS_SEED") or random.SystemRandom().randrange(10_000)
    )
    all_groups = rooms(ROOT) if given.all_rooms else GROUPS
    unknown = set(given.names) - {group.name for group in all_groups}
    if unknown:
        raise SystemExit(
            f"no group is called {unknown}; there are {', '.join(group.name for group in all_groups)}"
        )
    groups = [group for group in all_groups if not given.names or group.name in given.names]
    if given.all_rooms:
        limit_s = math.inf
        groups, most = drawn_rooms(groups, given.all_rooms, seed)
    record = os.environ.get("SLOTLINE_MUTANTS_RECORD")
    results = Results(Path(record).absolute() if record else None)
    print(f"mutants for {limit_s:g} s, SLOTLINE_MUTANTS_SEED={seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = _copied(Path(folder))
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "SLOTLINE_TEST_SHARE": "0.25"}
        os.environ["CI"] = "1"  # a test that is left out because a tool is missing notices nothing
        try:
            watchers = Watchers(ran, copy) if ran else None
            _run(copy, groups, seed, most, time.monotonic() + limit_s, results, watchers)
        except KeyboardInterrupt:
            print("interrupted")
    results.show(groups)
    return 1 if results.left_out else 0


def drawn_rooms(groups: list[Group], changes: int, seed: int) -> tuple[list[Group], int]:
    """The packages of which `changes` are drawn, in random order, and how many of each."""
    if changes < 1:
        raise SystemExit(f"--all-rooms is {changes}: draw 1 change or more")
    chosen = random.Random(seed).sample(groups, min(changes, len(groups)))
    return chosen, math.ceil(changes / len(chosen))


class Results:
    """How the tests ended for each change, by group and file."""

    def __init__(self, record: Path | None) -> None:
        self._record = record
        written = record.read_text().splitlines() if record is not None and record.exists() else []
        self.known_noticed = {tuple(json.loads(line)) for line in written}
        self.ends: dict[tuple[str, str], Counter[Ended]] = defaultdict(Counter)
        self.unnoticed: dict[str, list[tuple[Change, Ended]]] = defaultdict(list)
        self.left_out: list[str] = []

    def add(self, group: Group, change: Change, run: Run) -> None:
        self._count(group, change, run.ended)
        if run.ended is Ended.FAILED and self._record is not None:
            with self._record.open("a") as file:
                file.write(json.dumps([group.name, *change.key]) + "\n")
        print(f"{run.ended:<12} {run.wall_s:5.1f} s  {change.file}:{change.line}: {change.new}", flush=True)

    def was_noticed(self, group: Group, change: Change) -> bool:
        """By an earlier run, whose figure is taken over."""
        known = (group.name, *change.key) in self.known_noticed
        if known:
            self._count(group, change, Ended.FAILED)
        return known

    def _count(self, group: Group, change: Change, ended: Ended) -> None:
        self.ends[group.name, change.file][ended] += 1
        if ended is not Ended.FAILED:
            self.unnoticed[change.file].append((change, ended))

    def show(self, groups: list[Group]) -> None:
        """As a table in markdown."""
        print("\n| group, file | changes | noticed | out of time | unnoticed |\n|---|---|---|---|---|")
        for group in groups:
            files = {file: ends for (name, file), ends in sorted(self.ends.items()) if name == group.name}
            total = sum(files.values(), Counter())
            if not total:
                continue
            for name, ends in [(f"**{group.name}**", total), *files.items()]:
                tried, noticed = ends.total(), ends[Ended.FAILED]
                share = f" ({noticed / tried:.0%})" if tried else ""
                late = ends[Ended.OUT_OF_TIME] + ends[Ended.STOOD_STILL]
                print(f"| {name} | {tried} | {noticed}{share} | {late} | {ends[Ended.PASSED]} |")
        if self.left_out:
            print(f"\nleft out, as their tests fail without any change: {', '.join(self.left_out)}")
        print()
        for file, changes in sorted(self.unnoticed.items()):
            for change, ended in sorted(changes, key=lambda one: one[0].line):
                print(f"* {file}:{change.line} ({ended})\n  - `{change.old}`\n  - `{change.new}`")


def _run(
    copy: Path,
    groups: list[Group],
    seed: int,
    most: int,
    deadline: float,
    results: Results,
    watchers: Watchers | None,
) -> None:
    """One change of each group in turn, until the deadline or until each had `most`."""
    known = {(e["file"], e["old"], e["new"]) for e in tomllib.loads(EQUIVALENT.read_text())["equivalent"]}
    usual: dict[str, Run] = {}
    begun: set[str] = set()
    left = {group.name: _drawn(group, copy, seed, known) for group in groups}
    tried: Counter[str] = Counter()
    while left:
        for group in groups:
            if time.monotonic() > deadline:
                return
            change = next(left[group.name], None) if group.name in left else None
            if change is None or tried[group.name] == most:
                left.pop(group.name, None)
                continue
            tried[group.name] += 1
            if results.was_noticed(group, change):
                continue
            tests = group.tests
            if watchers is not None:
                tests = watchers.tests(change.file, change.line, group.tests)
            if tests not in usual:
                unchanged = _run_unchanged(copy, group.name, tests, begun)
                begun.add(group.name)
                if unchanged is None:
                    results.left_out.append(group.name)
                    left.pop(group.name)
                    continue
                usual[tests] = unchanged
            results.add(group, change, _run_changed(copy, tests, change, usual[tests]))


def _copied(folder: Path) -> Path:
    """The checkout in `folder`, so that no change is ever made in the place where somebody works."""
    copy = folder / "checkout"
    left = shutil.ignore_patterns(
        ".venv*", ".git", ".pytest_cache", ".ruff_cache", ".hypothesis", ".slotline", "__pycache__"
    )
    shutil.copytree(ROOT, copy, ignore=left, symlinks=True)
    for root in ("service", "worker"):  # under their new names, so that each run of tests need not
        compileall.compile_dir(copy / root, quiet=1)
    if (ROOT.parent / "shared").exists():
        (folder / "shared").symlink_to(ROOT.parent / "shared")
    return copy


def _drawn(group: Group, copy: Path, seed: int, known: set[tuple[str, str, str]]) -> Iterator[Change]:
    """Changes in random order, one of every file in turn, of files in random order; the same for the same seed."""
    os.chdir(copy)
    files = group.files(copy)
    random.Random(f"{seed} {group.name}").shuffle(files)
    left = [drawn(file, random.Random(f"{seed} {file}")) for file in files]
    while left:
        for changes in list(left):
            change = next((one for one in changes if not {one.key, ("*", one.old, one.new)} & known), None)
            if change is None:
                left.remove(changes)
            else:
                yield change


def _run_unchanged(copy: Path, name: str, tests: str, known: Collection[str]) -> Run | None:
    """The tests must pass while nothing is changed, or the group is left out; twice where the
    group is not `known`, as its first run imports and compiles for the others."""
    log, imported = copy.parent / "log", copy.parent / "imported"
    for again in (False, True) if name not in known else (True,):
        run = run_tests(
            copy, tests, log, cpu_limit_s=1000, wall_limit_s=1000, imported=None if again else imported
        )
        if not again and run.ended is Ended.PASSED:
            import_libraries(imported)
        if run.ended is not Ended.PASSED:
            print(f"without any change, this {run.ended}: {tests}\n{log.read_text()[-2000:]}", flush=True)
            return None
    print(f"{name}: {run.wall_s:.1f} s, {run.cpu_s:.1f} s of processor time, unchanged", flush=True)
    return run


def _run_changed(copy: Path, tests: str, change: Change, usual: Run) -> Run:
    file = copy / change.file
    content = file.read_text()
    file.write_text(change.content)
    try:
        return run_tests(
            copy,
            tests,
            copy.parent / "log",
            cpu_limit_s=_CPU_LEAST_S + _CPU_FACTOR * usual.cpu_s,
            wall_limit_s=_WALL_LEAST_S + _WALL_FACTOR * usual.wall_s,
        )
    finally:
        file.write_text(content)


if __name__ == "__main__":
    sys.exit(main())
