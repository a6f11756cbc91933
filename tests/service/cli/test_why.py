"""The verb `why`: what a person reads of an answer."""

from __future__ import annotations

import pytest

from service.cli import why
from service.schemas.activity import WhyView
from tests.service.cli.conftest import Run
from tests.service.serving import Served


def answer(**changes) -> WhyView:
    side = {
        "makespan_s": 0.3,
        "meshes": [{"mesh": "m0", "compute_s": 0.2, "idle_s": {"waits upstream": 0.1}}],
        "links": [{"source": "m0", "target": "m1", "transfers": 8, "transfer_s": 0.05, "exposed_s": 0.01}],
    }
    found = {
        "job_id": "job-abcdefghij",
        "attempt": 2,
        "step": 40,
        "verdict": "The timeline is over its plan [see below].",
        "healthy": False,
        "step_s": 0.5,
        "planned_step_s": 0.3,
        "lower_bound_s": 0.3,
        "planned": side,
        "measured": {**side, "makespan_s": 0.5},
        "calibrated": {
            "steps": 5,
            "makespan_s": 0.45,
            "measured_makespan_s": 0.46,
            "spread_s": 0.01,
            "update_s": 0.02,
            "costs": [],
        },
        "causes": [{"kind": "slow link", "subject": "m0 -> m1", "cost_s": 0.1, "message": "it is slow"}],
        "changes": [
            {
                "kind": "faster link",
                "subject": "m0 - m1",
                "gain_s": 0.2,
                "alone_s": 0.1,
                "step_s": 0.3,
                "message": "x",
            }
        ],
        "left_out": ["another cut"],
        "notes": ["a note"],
    }
    return WhyView.model_validate({**found, **changes})


def test_causes_changes_and_shares_are_printed(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(why, "Client", lambda: type("One", (), {"why": lambda self, job, step: answer()})())
    shown = run("why", "job-abcdefghij").out
    assert "step 40 of attempt 2" in shown and "over its plan [see below]" in shown
    assert "100.00 ms 20 %" in shown and "200.00 ms 40 %" in shown
    assert "m0 -> m1" in shown and "waits upstream" in shown and "200.00 ms (200.00 ms)" in shown
    assert "makespan: first plan 300.00 ms, calibrated 450.00 ms, measured 500.00 ms" in shown
    assert "a note" in shown and "another cut" in shown
    assert run("why", "job-abcdefghij", "--json").json == answer().model_dump(mode="json")


def test_a_job_that_cannot_be_explained_ends_with_the_servers_words(run: Run, served: Served):
    refused = run("why", "job-nonexistent")
    assert refused.code == 1 and "job-nonexistent" in refused.err
