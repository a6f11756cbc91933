"""One change of one file, drawn: by cosmic-ray of code, by queries.py of the dashboards' text."""

from __future__ import annotations

import ast
import contextlib
import difflib
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from tests.mutants import queries

# Of `==` and `is`, which are the same for the enumerations and short texts that are compared here.
_SKIPPED_COMPARISONS = ("Eq_Is", "Is_Eq", "NotEq_IsNot", "IsNot_NotEq")
# Any test notices an operator that numbers do not have, so that these would only flatter the figure.
_BITS = ("RShift", "LShift", "BitOr", "BitAnd", "BitXor")

_LONG, _AROUND = 200, 60


@dataclass(frozen=True)
class Change:
    """A file's new content, and the line that differs before and after."""

    file: str
    line: int
    old: str
    new: str
    content: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.old, self.new


def drawn(file: Path, draw: random.Random) -> Iterator[Change]:
    """Changes of a file in random order; one at each place of its text, before any second one there."""
    content = file.read_text()
    by_place = _of_code(content) if file.suffix == ".py" else _of_queries(file)
    for choices in by_place:
        draw.shuffle(choices)
    draw.shuffle(by_place)
    while by_place:
        for choices in by_place:
            change = _change(file, content, choices.pop())
            if change is not None:
                yield change
        by_place = [choices for choices in by_place if choices]


_Choice = tuple[str, int] | queries.TextChange


def _of_code(content: str) -> list[list[_Choice]]:
    by_place: dict[tuple, list[_Choice]] = defaultdict(list)
    tree = get_ast(content)
    for name in operator_names():
        if _is_skipped(name) or get_operator(name).arguments():
            continue
        operator = get_operator(name)()
        places = (place for node in ast_nodes(tree) for place in operator.mutation_positions(node))
        for occurrence, place in enumerate(places):
            by_place[place].append((name, occurrence))
    return list(by_place.values())


def _is_skipped(name: str) -> bool:
    kind, _, replaced = name.removeprefix("core/").partition("_")
    if kind == "ReplaceBinaryOperator":
        old, new = replaced.split("_")
        return old not in _BITS and new in _BITS
    return replaced in _SKIPPED_COMPARISONS


def _of_queries(file: Path) -> list[list[_Choice]]:
    by_place: dict[tuple[int, int], list[_Choice]] = defaultdict(list)
    for change in queries.changes(file):
        by_place[change.start, change.end].append(change)
    return list(by_place.values())


def _change(file: Path, content: str, choice: _Choice) -> Change | None:
    changed: str | None = None
    if isinstance(choice, queries.TextChange):
        changed = choice.applied(content)
    else:
        name, occurrence = choice
        with contextlib.suppress(AttributeError):  # the tool's own, of an exception with a dot in its name
            changed = mutate_code(content, get_operator(name)(), occurrence)
        if changed is None or _meaning(changed) in (None, _meaning(content)):
            return None
    old, new, number = _difference(content, changed)
    return Change(str(file), number, old, new, changed)


@lru_cache(maxsize=4)
def _meaning(content: str) -> str | None:
    """The code without annotations, which nothing evaluates in these files, and without the marks `*` and `/`
    between parameters, which only say how a function may be called; None where it is no code."""
    try:
        tree = ast.parse(content)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arguments):
            node.args = [*node.posonlyargs, *node.args, *node.kwonlyargs]
            node.defaults = [*node.defaults, *(value for value in node.kw_defaults if value is not None)]
            node.posonlyargs, node.kwonlyargs, node.kw_defaults = [], [], []
    return ast.dump(tree)


def _difference(before: str, after: str) -> tuple[str, str, int]:
    old, new, number = [], [], 0
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag != "equal":
            number = number or i + 1
            old += before.splitlines()[i:j]
            new += after.splitlines()[k:m]
    return *_told(" ".join(line.strip() for line in old), " ".join(line.strip() for line in new)), number


def _told(old: str, new: str) -> tuple[str, str]:
    """Of a long line what is around the difference."""
    if len(old) < _LONG:
        return old, new
    before = _alike(old, new)
    after = _alike(old[before:][::-1], new[before:][::-1])
    begin = max(0, before - _AROUND)
    return tuple(f"…{one[begin : len(one) - max(0, after - _AROUND)]}…" for one in (old, new))


def _alike(one: str, other: str) -> int:
    """How many characters both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
