"""Planning by the command, which needs no server."""

from __future__ import annotations

import json
from pathlib import Path

from tests.service.api.test_plans_api import SPEC
from tests.service.cli.conftest import Run


def test_planning_needs_no_server(run: Run, tmp_path: Path):
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(SPEC))
    assert run("plan", spec, "--json").json["chosen"] == "1f1b"
    assert run("plan", tmp_path / "none.json").code == 1
    nowhere = run("plan", spec, "-o", tmp_path / "none" / "plan.json")
    assert nowhere.code == 1 and "none/plan.json" in nowhere.err
