"""Which parameters a pattern means: `*.bias` as file names are matched (a star takes dots too), `re:` before a regular
expression that is searched for. Knows names only; light: no torch.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence

from worker.model.errors import ModelError

_EXPRESSION = "re:"
_SHOWN = 6


def matches(pattern: str, name: str) -> bool:
    """Whether the parameter called `name` is meant."""
    if pattern.startswith(_EXPRESSION):
        return re.search(pattern.removeprefix(_EXPRESSION), name) is not None
    return fnmatch.fnmatchcase(name, pattern)


def check_matched(
    field: str, patterns: Sequence[str], names: Collection[str], aliases: Mapping[str, Sequence[str]]
) -> None:
    """ModelError for patterns that mean none of the parameters `names`; `aliases` are all names of those with several."""
    idle = [pattern for pattern in patterns if not any(matches(pattern, name) for name in names)]
    if not idle:
        return
    told = [f"{pattern!r}{_hint(pattern, names, aliases)}" for pattern in idle]
    shown = ", ".join(list(names)[:_SHOWN]) + (
        f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    )
    raise ModelError(
        f"{field}: no parameter is called {', '.join(told)}; a star stands for any characters, dots too, and re: begins "
        f"a regular expression. The names are {shown or 'none'}"
    )


def _hint(pattern: str, names: Collection[str], aliases: Mapping[str, Sequence[str]]) -> str:
    for name, every in aliases.items():
        for alias in every:
            if name in names and alias != name and matches(pattern, alias):
                return f" ({alias!r} is the same parameter as {name!r}: write that)"
    near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.8)
    return f" (is {near[0]!r} meant?)" if near else ""
