"""The rules of the tests: no fixed sleeps, no seconds of the machine.

Reads the sources; imports nothing of them. What measures (benchmarks, the first hour on a GPU) and what draws mutants are
left out.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
MEASURES = ("benchmarks", "gpu_check", "mutants")
FIXED_SLEEPS = 98
"""How many there may be. It only shrinks: wait for an event, poll with `tests.polling`, or inject a clock."""
CLOCKS = ("monotonic", "perf_counter", "process_time")
SECONDS_OF_THE_MACHINE = {
    "otlp.py": "the limit of a wait for a span, which is no result",
    "worker/driver/local_attempt.py": "the limit of a wait for a worker, as Ray's",
    "worker/driver/test_step_loop.py": "steps together are never longer than the time in which they were made",
    "service/api/routers/test_logs.py": "slow; the longest turn of the event loop while 74 MB are read",
}
"""Where seconds are compared, and why."""


@cache
def sources() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        text = "" if name.startswith(MEASURES) else path.read_text()
        if any(word in text for word in ("sleep(", *CLOCKS)):
            found[name] = ast.parse(text)
    return found


def calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    """Calls of a function of one of these names, of a module or by itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            if called in names:
                yield node


def fixed_sleeps(tree: ast.AST) -> int:
    """Calls of `sleep` for other than 0 s, which only lets others go on."""
    return sum(
        not (isinstance(argument, ast.Constant) and argument.value == 0)
        for call in calls(tree, "sleep")
        for argument in call.args[:1]
    )


def measured_seconds(tree: ast.AST) -> int:
    """Comparisons by < or > of what a clock of the machine has counted: `clock() - began < limit`. Differences of processor
    time count by themselves: they serve for nothing else."""
    timed = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_difference_of_clocks(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return sum(
        any(
            _is_difference_of_clocks(side) or (isinstance(side, ast.Name) and side.id in timed)
            for side in (node.left, *node.comparators)
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
    ) + sum(_is_difference_of_clocks(node, "process_time") for node in ast.walk(tree))


def _is_difference_of_clocks(node: ast.AST, *clocks: str) -> bool:
    return (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and any(calls(node, *(clocks or CLOCKS)))
    )


def test_fixed_sleeps_grow_fewer():
    found = Counter({name: fixed_sleeps(tree) for name, tree in sources().items()})
    told = f"{found.total()} fixed sleeps, most in {found.most_common(5)}"
    assert found.total() <= FIXED_SLEEPS, f"{told}: wait for an event, or by `until` of tests.polling"
    assert found.total() > FIXED_SLEEPS - 10, f"{told}: lower FIXED_SLEEPS of this file"


def test_no_test_bounds_seconds_of_the_machine():
    found = {name for name, tree in sources().items() if measured_seconds(tree)}
    assert found == {*SECONDS_OF_THE_MACHINE}, (
        "count calls (tests.work), wait for events, or measure in tests/benchmarks"
    )


def test_the_rules_see_what_they_forbid():
    source = "import time\ntime.sleep(0.1)\nsleep(x)\ntime.sleep(0)\n"
    assert fixed_sleeps(ast.parse(source)) == 2
    for source in (
        "assert time.monotonic() - began < 5",
        "took_s = time.monotonic() - began\nassert took_s < 5",
        "longest = max(longest, time.process_time() - began)",
        "assert 5 > perf_counter() - began",
    ):
        assert measured_seconds(ast.parse(source)) == 1
    assert measured_seconds(ast.parse("assert time.monotonic() < deadline")) == 0
