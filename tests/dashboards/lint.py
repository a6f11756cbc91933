"""Rules for dashboards, after those of Grafana's own dashboard-linter and with what is particular to ours.

`problems(board)` takes the JSON that Grafana imports and returns one line for each thing that is wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

ONE_JOB = {"slotline-job", "slotline-timeline"}
SOURCES = {"prometheus": "${datasource}", "grafana-postgresql-datasource": "${database}"}
UNITS = {
    "none",
    "short",
    "s",
    "µs",
    "h",
    "percent",
    "percentunit",
    "bytes",
    "flops",
    "mbytes",
    "Bps",
    "reqps",
}
COUNTER = re.compile(r"\b[a-zA-Z_]+_(?:total|count|sum|bucket)\b")
OF_THE_STORE = (
    *("jobs", "queue_depth", "attempts_total", "queue_wait_seconds_bucket", "queue_oldest_wait_seconds"),
    *("job_info", "job_attempts", "job_start_seconds", "checkpoint_age_seconds"),
    *("checkpoint_timestamp_seconds", "attempt_end_timestamp_seconds"),
    *(
        "checkpoint_interval_seconds",
        "job_effective_training_ratio",
        "mesh_compute_seconds_over_plan",
        "calibrated_makespan_seconds",
        "link_seconds_over_plan",
        "link_bytes",
    ),
    *("link_bandwidth_bytes_per_second", "plan_link_bandwidth_bytes_per_second", "control_plane_info"),
)
"""What every replica of the control plane tells alike: to be taken once."""


def problems(board: dict[str, Any]) -> list[str]:
    return [
        *_of_the_board(board),
        *(f"{_name(p)}: {found}" for p in _panels(board) for found in _of(board, p)),
    ]


def _of_the_board(board: dict[str, Any]) -> Iterator[str]:
    variables = board["templating"]["list"]
    kinds = [variable["query"] for variable in variables if variable["type"] == "datasource"]
    if len(kinds) != 1 or kinds[0] not in SOURCES:
        yield "there is not one variable for the data source"
    for variable in variables:
        if not variable.get("label"):
            yield f"variable {variable['name']} has no label"
        if variable["type"] == "query" and variable["refresh"] != 2:
            yield f"variable {variable['name']} is not asked anew when the time range changes"
        if variable["type"] == "query" and variable["datasource"]["uid"] not in SOURCES.values():
            yield f"variable {variable['name']} asks a source of its own"
    if board["uid"] in ONE_JOB and not {"name", "job"} <= {variable["name"] for variable in variables}:
        yield "a job is not chosen by its name"
    if not any(link["type"] == "dashboards" for link in board.get("links", [])):
        yield "there is no link to the other dashboards"
    for name, times in Counter(map(_name, _panels(board))).items():
        if times > 1:
            yield f"{times} panels are called {name}"
    for mark in board["annotations"].get("list", []):
        if mark["datasource"]["uid"] not in SOURCES.values() or not mark["useValueForTime"]:
            yield f"{mark['name']} asks a source of its own, or marks times that are no values"
        yield from _of_promql(board["uid"], mark["expr"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        if cells & taken or place["x"] + place["w"] > 24:
            yield f"{_name(panel)} lies over another panel, or beyond the edge"
        taken |= cells


def _of(board: dict[str, Any], panel: dict[str, Any]) -> Iterator[str]:
    if not panel.get("title"):
        yield "no title"
    if not panel.get("description"):
        yield "no description"
    if panel["datasource"]["uid"] not in SOURCES.values():
        yield "a data source that is no variable"
    defaults = panel["fieldConfig"]["defaults"]
    if panel["type"] not in ("table", "state-timeline") and defaults.get("unit") not in UNITS:
        yield f"unit {defaults.get('unit')!r} is none that Grafana knows of those we use"
    if not panel["targets"]:
        yield "no query"
    names = [target["refId"] for target in panel["targets"]]
    if len(set(names)) < len(names):
        yield "two queries of one name"
    for target in panel["targets"]:
        if target["datasource"]["uid"] != panel["datasource"]["uid"]:
            yield "a query asks another source than its panel"
        if panel["datasource"]["type"] == "prometheus":
            is_table = target.get("format") == "table"
            if not is_table and not target.get("legendFormat"):
                yield f"query {target['refId']} has no legend"
            yield from _of_promql(board["uid"], target["expr"])


def _of_promql(uid: str, expression: str) -> Iterator[str]:
    for selector in re.finditer(r"\bslotline_[a-z_]+(\{[^}]*\})?", expression):
        if uid in ONE_JOB and 'job="$job"' not in (selector[1] or "") and "info" not in selector[0]:
            yield f"{selector[0]} is of all jobs"
        if uid not in ONE_JOB and "$job" in (selector[1] or ""):
            yield f"{selector[0]} is of one job"
    for counter in COUNTER.finditer(expression):
        if not re.search(r"(?:rate|increase)\($", expression[: counter.start()]):
            yield f"{counter[0]} is a counter and shown as it is"
    for window in re.findall(r"\[([^\]]+)\]", expression):
        if window not in ("$__rate_interval", "1h"):
            yield f"a window of {window}: $__rate_interval follows the scrapes"
    for name in re.finditer(rf"\bslotline_(?:{'|'.join(OF_THE_STORE)})\b", expression):
        if not re.search(r"max by \([a-z_, ]+\) \((?:increase\()?$", expression[: name.start()]):
            yield f"{name[0]} is told by every replica of the control plane: take it once, max by (...)"
    for name in re.finditer(r"\bslotline_[a-z_]+", expression):
        summed = re.search(r"(?:sum|avg|count)(?: by \([^)]*\))? ?\($", expression[: name.start()])
        if summed and "planning" not in name[0]:  # each process has its own pool
            yield f"{name[0]}: a gauge of two replicas, or of two attempts of a job, would be summed"


def _panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def _name(panel: dict[str, Any]) -> str:
    return panel.get("title") or f"panel {panel.get('id')}"
