"""`make mutants`: small changes to the pure and the dangerous parts, one at a time, that no test notices.

cosmic-ray makes the changes, in a copy of the checkout. Which ones are tried is drawn anew each time, evenly over
the files, for SLOTLINE_MUTANTS_S seconds (600 by default); SLOTLINE_MUTANTS_SEED draws the same again, and
`python -m tests.mutants decide checkpoint` draws of files with these words in their names. The
dashboards are not among the files: their queries are text, which the tool leaves as it is.

A change that is none (equivalent.toml says why) is not counted. This is a report: look at every survivor, and
write the test that misses, or the reason.
"""

from __future__ import annotations

import itertools
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkItem

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
_SCHEDULER = "tests/service/scheduler"
# Files, and the tests that must notice a change of them.
GROUPS = {
    "service/scheduler/model/*.py service/scheduler/programs/*.py": (
        f"{_SCHEDULER}/model {_SCHEDULER}/test_properties.py {_SCHEDULER}/programs "
        "-k 'not every_wait and not kept_by_the_simulator'"
    ),
    "service/orchestrator/decide.py": "tests/service/orchestrator/test_decide.py",
    "service/orchestrator/outcome.py": (
        "tests/service/orchestrator/test_loop.py tests/service/orchestrator/test_races.py"
    ),
    "service/store/states.py": "tests/service/store/test_jobs.py tests/service/orchestrator/test_loop.py",
    "service/api/auth.py": "tests/service/api/test_auth.py tests/service/api/test_manage.py",
    "service/api/observe.py service/api/streams.py": (
        "tests/service/api/test_drivers.py tests/service/api/test_streams.py"
    ),
    "worker/engine/buffers.py worker/engine/update.py worker/engine/random_state.py": (
        "tests/worker/engine/test_buffers.py tests/worker/engine/test_update.py"
    ),
    "worker/checkpoint.py": "tests/worker/test_checkpoint.py",
    "worker/driver/report.py": "tests/worker/driver/test_report.py",
}
# Changes that are none: of `X | None` in an annotation, which nothing evaluates, and between `==` and `is`, which
# are the same for the enumerations and short texts that are compared here.
_SKIPPED_OPERATORS = ("core/ReplaceBinaryOperator_BitOr",)
_SKIPPED_COMPARISONS = ("Eq_Is", "Is_Eq", "NotEq_IsNot", "IsNot_NotEq")


@dataclass(frozen=True)
class Change:
    """One line of a file, before and after."""

    file: str
    line: int
    old: str
    new: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.old, self.new


def main() -> int:
    limit_s = float(os.environ.get("SLOTLINE_MUTANTS_S", "600"))
    seed = int(os.environ.get("SLOTLINE_MUTANTS_SEED") or random.SystemRandom().randrange(10_000))
    deadline = time.monotonic() + limit_s
    known = {(e["file"], e["old"], e["new"]) for e in tomllib.loads(EQUIVALENT.read_text())["equivalent"]}
    print(f"mutants for {limit_s:g} s, SLOTLINE_MUTANTS_SEED={seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = _copied(Path(folder))
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        survivors, tried = _run(Path(folder), known, random.Random(seed), deadline)
    print()
    for file in sorted(tried):
        print(f"{file}: {len(survivors[file])} of {tried[file]} changes went unnoticed")
        for change in sorted(survivors[file], key=lambda one: one.line):
            print(f"  line {change.line}\n    - {change.old}\n    + {change.new}")
    return 0


def _run(
    folder: Path, known: set[tuple[str, str, str]], draw: random.Random, deadline: float
) -> tuple[dict[str, list[Change]], Counter[str]]:
    survivors: dict[str, list[Change]] = defaultdict(list)
    tried: Counter[str] = Counter()
    usual_s: dict[str, float] = {}
    with use_db(str(folder / "mutants.sqlite"), WorkDB.Mode.create) as database:
        for item, tests in _drawn(database, draw):
            if time.monotonic() > deadline:
                break
            command = f"{shlex.quote(sys.executable)} -m pytest -x -q -n0 -p no:cacheprovider {tests}"
            if tests not in usual_s:
                usual_s[tests] = _time_unchanged(command)
            result = mutate_and_test(item.mutations, command, timeout=60 + 5 * usual_s[tests])
            if result.test_outcome not in (TestOutcome.KILLED, TestOutcome.SURVIVED):
                continue
            change = _change(item, result.diff)
            if change.key in known:
                continue
            tried[change.file] += 1
            if result.test_outcome is TestOutcome.SURVIVED:
                survivors[change.file].append(change)
                print(f"{change.file}:{change.line}: {change.new}", flush=True)
    return survivors, tried


def _copied(folder: Path) -> Path:
    """The checkout in `folder`, so that no change is ever made in the place where somebody works."""
    copy = folder / "checkout"
    left = shutil.ignore_patterns(".venv", ".git", ".pytest_cache", ".ruff_cache", ".hypothesis", ".slotline")
    shutil.copytree(ROOT, copy, ignore=left, symlinks=True)
    if (ROOT.parent / "shared").exists():
        (folder / "shared").symlink_to(ROOT.parent / "shared")
    return copy


def _drawn(database: WorkDB, draw: random.Random) -> Iterator[tuple[WorkItem, str]]:
    """Changes in random order, one of every file in turn, each with the tests that must notice it."""
    tests_of = {
        path: tests
        for patterns, tests in GROUPS.items()
        for pattern in patterns.split()
        for path in sorted(Path().glob(pattern))
        if path.name != "__init__.py" and any(word in str(path) for word in sys.argv[1:] or [""])
    }
    init(tests_of, database, {})
    by_file: dict[Path, list[WorkItem]] = defaultdict(list)
    for item in database.pending_work_items:
        (mutation,) = item.mutations
        name = mutation.operator_name
        compared = name.removeprefix("core/ReplaceComparisonOperator_")
        if not name.startswith(_SKIPPED_OPERATORS) and compared not in _SKIPPED_COMPARISONS:
            by_file[Path(mutation.module_path)].append(item)
    files = sorted(by_file)
    draw.shuffle(files)
    for file in files:
        draw.shuffle(by_file[file])
    for row in itertools.zip_longest(*(by_file[file] for file in files)):
        for file, item in zip(files, row, strict=True):
            if item is not None:
                yield item, tests_of[file]


def _time_unchanged(command: str) -> float:
    """Seconds that the tests take, which must pass while nothing is changed."""
    began = time.monotonic()
    done = subprocess.run(shlex.split(command), capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"without any change, this fails: {command}\n{done.stdout[-2000:]}")
    return time.monotonic() - began


def _change(item: WorkItem, diff: str) -> Change:
    lines = diff.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("@@"))
    number = int(lines[place].split()[1].removeprefix("-").split(",")[0])
    old, new = [], []
    for line in lines[place + 1 :]:
        if line.startswith("-"):
            old.append(line[1:].strip())
        elif line.startswith("+"):
            new.append(line[1:].strip())
        elif not old and not new:
            number += 1
    return Change(str(item.mutations[0].module_path), number, " ".join(old), " ".join(new))


if __name__ == "__main__":
    sys.exit(main())
