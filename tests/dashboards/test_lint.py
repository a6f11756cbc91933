"""The built JSON of all dashboards: Grafana's schema, as the Foundation SDK has it, and the rules of lint.py."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.dashboards.lint import problems
from tests.dashboards.live import BOARDS, ROOT
from tests.missing import leave_out

ALL = (*BOARDS, "slotline-steps")
Board = dict[str, Any]


def board(name: str) -> Board:
    return json.loads((ROOT / "dashboards" / f"{name}.json").read_text())


def panel(built: Board, title: str) -> Board:
    return next(one for one in built["panels"] if one["title"] == title)


@pytest.mark.parametrize("name", ALL)
def test_every_field_is_one_that_grafanas_schema_has(name: str):
    """Read into the SDK's types and written again: what they do not know would be lost."""
    register_default_plugins()
    built = board(name)
    again = json.loads(json.dumps(Dashboard.from_json(built), cls=JSONEncoder))
    assert _differences(built, again) == []


def test_a_field_that_the_schema_does_not_have_is_noticed():
    register_default_plugins()
    built = board("slotline-job")
    panel(built, "Loss")["fieldConfig"]["defaults"]["units"] = "s"
    built["refreshes"] = "10s"
    again = json.loads(json.dumps(Dashboard.from_json(built), cls=JSONEncoder))
    assert len(_differences(built, again)) == 2


@pytest.mark.parametrize("name", ALL)
def test_no_rule_is_broken(name: str):
    assert problems(board(name)) == []


def _expression(title: str, text: str) -> Callable[[Board], None]:
    def plant(built: Board) -> None:
        panel(built, title)["targets"][0]["expr"] = text

    return plant


def _set(title: str, key: str, value: Any) -> Callable[[Board], None]:
    return lambda built: panel(built, title).__setitem__(key, value)


PLANTED: list[tuple[str, str, Callable[[Board], None], str]] = [
    ("title", "slotline-job", _set("Loss", "title", ""), "no title"),
    ("description", "slotline-job", _set("Loss", "description", ""), "no description"),
    ("unit", "slotline-job", lambda b: panel(b, "Loss")["fieldConfig"]["defaults"].pop("unit"), "unit None"),
    (
        "source",
        "slotline-job",
        _set("Loss", "datasource", {"type": "prometheus", "uid": "P1"}),
        "no variable",
    ),
    ("legend", "slotline-job", lambda b: panel(b, "Loss")["targets"][0].pop("legendFormat"), "no legend"),
    ("no query", "slotline-job", _set("Loss", "targets", []), "no query"),
    ("job", "slotline-job", _expression("Loss", "max by (job) (slotline_train_loss)"), "of all jobs"),
    ("counter", "slotline-cluster", _expression("Samples per second", "slotline_samples_total"), "a counter"),
    (
        "window",
        "slotline-cluster",
        _expression("Samples per second", "sum by (job) (rate(slotline_samples_total[5m]))"),
        "window of 5m",
    ),
    ("replicas", "slotline-cluster", _expression("Jobs by state", "slotline_jobs"), "every replica"),
    (
        "sum",
        "slotline-cluster",
        _expression("Queue depth", "sum by (queue) (slotline_queue_depth)"),
        "summed",
    ),
    ("variable", "slotline-timeline", lambda b: b["templating"]["list"].pop(0), "data source"),
    ("stale", "slotline-job", lambda b: b["templating"]["list"][1].update(refresh=1), "anew"),
    ("id", "slotline-job", lambda b: b["templating"]["list"].pop(1), "by its name"),
    ("place", "slotline-job", lambda b: panel(b, "Loss")["gridPos"].update(x=20), "over another panel"),
    ("links", "slotline-job", lambda b: b["links"].clear(), "other dashboards"),
]


@pytest.mark.parametrize(
    ("name", "plant", "word"), [case[1:] for case in PLANTED], ids=[case[0] for case in PLANTED]
)
def test_a_planted_mistake_is_told(name: str, plant: Callable[[Board], None], word: str):
    built = copy.deepcopy(board(name))
    plant(built)
    assert any(word in found for found in problems(built)), problems(built)


def test_every_query_is_promql(tmp_path: Path):
    """Read by Prometheus's own parser, as the expressions of recording rules."""
    promtool = shutil.which("promtool")
    if promtool is None:
        leave_out("promtool is not installed (Debian package `prometheus`): no query is parsed")
    rules = []
    for name in BOARDS:
        for one in board(name)["panels"]:
            for target in one.get("targets", []):
                text = target["expr"].replace("$__rate_interval", "1m").replace("$at", "1790000000")
                rules.append({"record": f"q:{len(rules)}", "expr": text})
    assert len(rules) > 70
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run(
        [promtool, "check", "rules", str(file)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_lead_to_dashboards_and_pages_that_there_are():
    """From each to the others, to the page of the job and to its trace, and back."""
    uids = {board(name)["uid"] for name in ALL}
    texts = {name: (ROOT / "dashboards" / f"{name}.json").read_text() for name in BOARDS}
    for name, text in texts.items():
        for part in text.split('"/d/')[1:]:
            assert part.split("?")[0] in uids, f"{name} links to {part[:60]}"
    assert (
        '"/d/slotline-job?' in texts["slotline-cluster"] and '"/d/slotline-job?' in texts["slotline-timeline"]
    )
    assert '"/d/slotline-timeline?' in texts["slotline-job"]
    for name in ("slotline-job", "slotline-timeline"):
        assert '"${url}/jobs/${job}"' in texts[name]
        assert '"${url}/api/v1/jobs/${job}/timeline?format=chrome"' in texts[name]


def _differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where the second lacks or changes what the first has."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            found
            for key, value in one.items()
            for found in (
                _differences(value, other[key], f"{where}.{key}")
                if key in other
                else [f"{where}.{key} is lost"]
            )
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for i, (a, b) in pairs for found in _differences(a, b, f"{where}[{i}]")]
    return [] if one == other else [f"{where}: {one!r} became {other!r}"]
