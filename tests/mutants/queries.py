"""Small changes of the dashboards' queries: text, which cosmic-ray leaves as it is.

A query of the built JSON, of the rules or a grant is changed as somebody might write it by mistake: another window
or quantile, a sum for a mean, a label or a column left out, a factor dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TextChange:
    """Characters `start` to `end` of a file give way to `text`."""

    start: int
    end: int
    text: str

    def applied(self, content: str) -> str:
        return content[: self.start] + self.text + content[self.end :]


# What is written, and what may stand there by mistake (text for re.sub's replacement).
_PROMQL = [
    (r"\bsum\b(?= by|\()", ["avg", "max", "count"]),
    (r"\bmax\b(?= by|\()", ["sum", "min"]),
    (r"\bmin\b(?=\()", ["max"]),
    (r"\brate\b", ["increase", "delta"]),
    (r"\bincrease\b", ["rate"]),
    (r"\bchanges\b", ["delta"]),
    (r"_(sum)\{", ["_count{"]),
    (r"_(count)\{", ["_sum{"]),
    (r"\b(start|end)_seconds\b", ["seconds"]),
    (r'\{job=\\?"\$job\\?"\}', [""]),
    (r'job=\\?"\$job\\?", ', [""]),
    (r', lane=\\?"compute\\?"', [""]),
    (r'(?<=\{)[a-z_]+=~?"[^"$]+"(?=\})', [""]),
    (r"\[(\d+)m\]", ["[1m]"]),
    (r"\[(\d+)h\]", ["[1m]"]),
    (r" offset \w+", [""]),
    (r"\[\$__rate_interval\]", ["[1h]"]),
    (r"(?<![\w.])(0\.\d+)(?=,)", ["0.25", "0.99"]),
    (r"(?<= by \()(\w+), (\w+)", [r"\1", r"\2"]),
    (r"(?<= by \()(\w+)(?=\))", ["instance", ""]),
    (r" / ", [" * ", " + "]),
    (r" \* ", [" / "]),
    (r" - ", [" + "]),
    (r" == ", [" != "]),
    (r" > ", [" < ", " >= "]),
    (r" and ", [" or ", " unless "]),
    (r"\$__from", ["0"]),
    (r"\$__to", ["$__from"]),
    (r"slotline_plan_(\w+)", [r"slotline_\1"]),
    (r"slotline_(makespan_seconds|bubble_ratio)", [r"slotline_plan_\1"]),
    (r"\bslotline_exposed_transfer_seconds\b", ["slotline_overlap_ratio"]),
    (r'\\"(mesh|lane|action|microbatch|stage|operation|row|slot)\\"', [r'\\"edge\\"']),
]
_SQL = [
    (r"\bmin\(", ["max("]),
    (r"\bmax\(", ["min("]),
    (r"\bsum\(", ["avg(", "count("]),
    (r" AND step = \$step", [""]),
    (r"job_id = \$\{job:sqlstring\} AND ", [""]),
    (r" WHERE job_id = \$\{job:sqlstring\}(?! AND)", [""]),
    (r" / 1000\.0", [""]),
    (r" / length_s", ["", " * length_s"]),
    (r" - first_s", [""]),
    (r" - min\(start_s\)", [""]),
    (r" DESC", [""]),
    (r"\bend_s\b", ["start_s"]),
    (r"\bstart_s\b", ["end_s"]),
    (r"\$\{__to\}", ["${__from}"]),
    (r"\$\{__from\}", ["0"]),
    (r"'(F|B|I|W)', ", [""]),
    (r", 'W'", [""]),
    (r" AND action IN \([^)]*\)", [""]),
    (r" GROUP BY mesh", [" GROUP BY mesh, stage"]),
    (r"\b(loss|step_s|makespan_s|bubble_ratio|exposed_transfer_s|overlap_ratio|grad_norm), ", [""]),
    (r"ORDER BY (\w+)\b(?! DESC)", [r"ORDER BY \1 DESC"]),
    (r"coalesce\((microbatch::text|stage), ''\)", [r"\1"]),
    (r"mesh \|\| ' ' \|\| lane", ["mesh", "lane"]),
    (r"name \|\| ' ' \|\| id", ["name"]),
    (r", id AS __value", [", name AS __value"]),
]
_RULES = [
    *_PROMQL,
    (r"(?<=for: )(\d+)m", ["0m", "60m"]),
    (r"> 1\.5", ["> 15", "> 0.5"]),
    (r"> 3$", ["> 30", "> 0"]),
]
_GRANTS = [
    (r"ON jobs", ["ON attempts"]),
    (r"(steps|timelines), ", [""]),
    (r", slots", [""]),
    (r"\(id, name", ["(id"]),
]


def changes(file: Path) -> Iterator[TextChange]:
    """Every change of every query of a file of `dashboards/`, none twice."""
    content = file.read_text()
    seen = {content}
    for place, text, mistakes in _queries(file, content):
        for change in _of_text(place, text, mistakes):
            changed = change.applied(content)
            if changed not in seen:
                seen.add(changed)
                yield change


def _queries(file: Path, content: str) -> Iterator[tuple[int, str, list[tuple[str, list[str]]]]]:
    """Where each query begins, as it is written, and what may be mistaken in it."""
    if file.suffix == ".json":
        place = 0
        for text in _texts(json.loads(content)):
            written = json.dumps(text)[1:-1]
            place = content.index(f'"{written}"', place) + 1
            yield place, written, _SQL if "SELECT" in text else _PROMQL
        return
    lines, mistakes = (r"(?:expr: |for: ).*$", _RULES) if file.suffix == ".yml" else (r"^GRANT .*$", _GRANTS)
    for line in re.finditer(lines, content, re.MULTILINE):
        yield line.start(), line.group(), mistakes


def _texts(board: Any) -> Iterator[str]:
    """Queries in the order of the file, whose keys are sorted."""
    if isinstance(board, list):
        for item in board:
            yield from _texts(item)
    elif isinstance(board, dict):
        for key, value in board.items():
            if isinstance(value, str) and (
                key in ("expr", "rawSql") or (key == "query" and "SELECT" in value)
            ):
                yield value
            else:
                yield from _texts(value)


def _of_text(place: int, text: str, mistakes: list[tuple[str, list[str]]]) -> Iterator[TextChange]:
    for pattern, replacements in mistakes:
        for match in re.finditer(pattern, text, re.MULTILINE):
            for replacement in replacements:
                yield TextChange(place + match.start(), place + match.end(), match.expand(replacement))
