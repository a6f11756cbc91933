"""The Prometheus rules, checked and run by Prometheus's own tool."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.missing import leave_out

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
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


def test_each_alert_fires_when_it_should_and_only_then():
    promtool("test", "rules", "rules_test.yml")


def test_no_alert_goes_untested():
    rules = yaml.safe_load((DASHBOARDS / "rules.yml").read_text())["groups"][0]["rules"]
    tests = (DASHBOARDS / "rules_test.yml").read_text()
    for rule in rules:
        if "alert" in rule:
            assert re.search(rf"alertname: {rule['alert']}\b", tests), rule["alert"]


def test_the_sample_configuration_is_well_formed():
    promtool("check", "config", "--syntax-only", "../deploy/prometheus.yml")
