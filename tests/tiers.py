"""Values of a test's parameters of which `make test` takes some and `make test-all` every one (see tests/README.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_by_day(
    names: str | tuple[str, ...], values: Iterable[Any], *, by_day: int, **options: Any
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize`, where all but `by_day` of `values`, evenly drawn, are marked `slow`; `options` as there.

    Of no values (cases of a file that is not there) pytest skips the test."""
    whole = [*values]
    if whole and not 0 < by_day < len(whole):
        raise ValueError(
            f"by_day is {by_day}, and there are {len(whole)} values: take at least one and not all"
        )
    taken = {k * len(whole) // by_day for k in range(by_day)}
    several = isinstance(names, tuple) or "," in names
    return pytest.mark.parametrize(
        names,
        [value if k in taken else _slow(value, several=several) for k, value in enumerate(whole)],
        **options,
    )


def _slow(value: Any, *, several: bool) -> Any:
    if hasattr(value, "marks"):
        return pytest.param(*value.values, id=value.id, marks=[*value.marks, pytest.mark.slow])
    return pytest.param(*(value if several else [value]), marks=pytest.mark.slow)
