"""The Prometheus rules, checked and run by Prometheus's own tool."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.missing import leave_out

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
RUNBOOK = DASHBOARDS.parent / "deploy" / "RUNBOOK.md"
PROMTOOL = shutil.which("promtool")


@pytest.fixture(autouse=True)
def _tool() -> None:
    if PROMTOOL is None:
        leave_out("promtool is not installed (Debian package `prometheus`): the rules are not checked")


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        [PROMTOOL, *arguments], cwd=DASHBOARDS, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_well_formed():
    promtool("check", "rules", "rules.yml")


@pytest.mark.slow
def test_each_alert_fires_when_it_should_and_only_then():
    promtool("test", "rules", "rules_test.yml")


def test_no_alert_goes_untested():
    rules = yaml.safe_load((DASHBOARDS / "rules.yml").read_text())["groups"][0]["rules"]
    tests = (DASHBOARDS / "rules_test.yml").read_text()
    for rule in rules:
        if "alert" in rule:
            assert re.search(rf"alertname: {rule['alert']}\b", tests), rule["alert"]


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DASHBOARDS / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_every_alert_carries_the_address_of_its_section_in_the_runbook():
    sections = re.findall(r"^### (\S+)$", RUNBOOK.read_text(), flags=re.MULTILINE)
    for rule in alerts():
        address = rule["annotations"]["runbook_url"]
        assert address == f"deploy/RUNBOOK.md#{rule['alert'].lower()}"
    assert sorted(sections) == sorted(rule["alert"] for rule in alerts()), (
        "one section an alert, and no other"
    )


def test_alerts_ask_for_metrics_that_somebody_exports():
    """An alert on a metric that nobody has is silent for ever."""
    sources = "".join(
        (DASHBOARDS.parent / path).read_text()
        for path in ("service/api/metrics.py", "worker/driver/metrics.py", "service/store/queues.py")
    )
    for rule in alerts():
        for name in re.findall(r"\bslotline_[a-z_]+", rule["expr"]):
            short = re.sub(r"_(total|count|sum|bucket)$", "", name.removeprefix("slotline_"))
            assert re.search(rf'"(slotline_)?{short}"', sources), f"{rule['alert']}: nobody exports {name}"


def test_the_sample_configuration_is_well_formed():
    promtool("check", "config", "--syntax-only", "../deploy/prometheus.yml")
