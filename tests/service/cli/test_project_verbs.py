"""Projects by the command: members set, listed and taken out; jobs submitted to a project and listed by it."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.service.cli.conftest import Run
from tests.service.conftest import job_body
from tests.service.serving import Served


def test_members_are_set_shown_and_taken_out(run: Run, served: Served):
    assert run("project", "member", "nlp", "alice", "submitter").out == "alice submitter\n"
    shown = run("project", "member", "nlp", "ci-*", "viewer", "--json").json
    assert shown["members"] == [
        {"principal": "alice", "role": "submitter"},
        {"principal": "ci-*", "role": "viewer"},
    ]
    assert run("project", "show", "nlp").out == "alice submitter\nci-* viewer\n"
    assert [project["name"] for project in run("project", "list", "--json").json] == ["default", "nlp"]
    rows = [line.split() for line in run("project", "list").out.splitlines()[1:] if line.strip()]
    assert rows[-2:] == [["default", "admin", "everybody"], ["nlp", "admin", "2"]]
    assert run("project", "member", "nlp", "ci-*", "none").out == "removed ci-*\n"
    assert run("project", "show", "nlp", "--json").json["members"] == shown["members"][:1]
    again = run("project", "member", "nlp", "ci-*", "none")
    assert again.code == 1 and "has no member ci-*" in again.err
    wrong = run("project", "member", "nlp", "alice", "operator")
    assert wrong.code == 1 and "give viewer, submitter, admin, or none" in " ".join(wrong.err.split())
    assert "there is no project vision" in run("project", "show", "vision").err


def test_quotas_of_a_project_are_set_shown_and_taken_away(run: Run, served: Served):
    run("project", "member", "nlp", "alice", "submitter")
    shown = "alice submitter\nqueue default: 0 of a quota of 8 accelerators used\n"
    assert run("quota", "default", "8", "--project", "nlp").out == shown
    assert run("project", "show", "nlp").out == shown
    quotas = run("project", "show", "nlp", "--json").json["quotas"]
    assert quotas == [{"queue": "default", "quota": 8, "used": 0}]
    assert run("quota", "default", "none", "--project", "nlp", "--json").json["quotas"] == []
    wrong = run("quota", "default", "configured", "--project", "nlp")
    assert wrong.code == 1 and "no quotas of projects" in wrong.err
    unknown = run("quota", "large", "8", "--project", "nlp")
    assert unknown.code == 1 and "there is no queue large" in unknown.err


def test_jobs_are_submitted_to_a_project_and_listed_by_it(run: Run, served: Served, tmp_path: Path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_body(name="plain")))
    run("submit", file)
    assert "project" not in run("jobs").out, "no column where nobody uses projects"
    refused = run("submit", file, "--project", "nlp")
    assert refused.code == 1 and "there is no such project" in " ".join(refused.err.split())
    run("project", "member", "nlp", "alice", "submitter")
    made = run("submit", file, "--project", "nlp", "--json").json
    assert made["project"] == "nlp"
    (listed,) = run("jobs", "--project", "nlp", "--json").json
    assert listed["id"] == made["id"]
    shown = run("jobs").out
    assert "project" in shown and "nlp" in shown
