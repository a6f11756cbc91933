"""The verbs of queues: change, and the filters of jobs."""

from __future__ import annotations

from pathlib import Path

import yaml

from service.client.client import Client
from tests.polling import until
from tests.service.cli.conftest import Run
from tests.service.conftest import job_body
from tests.service.serving import Served


def test_jobs_are_filtered_and_a_waiting_one_is_changed(run: Run, served: Served, tmp_path: Path):
    file = tmp_path / "labelled.yaml"
    body = job_body(name="labelled", labels={"team": "nlp"}, max_duration="2h")
    file.write_text(yaml.safe_dump(body))
    running = run("submit", file, "--json").json["id"]
    until(lambda: f"{running}-1" in served.cluster.submissions)
    file.write_text(yaml.safe_dump(job_body(name="plain", checkpoint={"uri": str(tmp_path)})))
    waiting = run("submit", file, "--json").json["id"]

    def found(*options: object) -> list[str]:
        return [job["name"] for job in run("jobs", *options, "--json").json]

    assert found() == ["plain", "labelled"]
    assert found("--label", "team=nlp") == found("--label", "team") == ["labelled"]
    assert found("--name", "plain") == found("--state", "QUEUED", "--state", "RECOVERING") == ["plain"]
    assert found("--since", 10) == ["plain", "labelled"] and found("--until", 10) == []
    assert run("jobs", "--label", "=x").code == 1
    changed = run("change", waiting, "--priority", 5, "--json")
    assert (changed.code, changed.json["priority"]) == (0, 5)
    nothing = run("change", waiting)
    assert nothing.code == 1 and "give --queue, --priority or --meshes" in nothing.err
    ranged = run("change", waiting, "--meshes", "2-3", "--json").json["spec"]["resources"]
    assert (ranged["fewest_meshes"], ranged["meshes"]) == (2, 3)
    fixed = run("change", waiting, "--meshes", 3, "--json").json
    assert (fixed["accelerators"], fixed["spec"]["resources"]["fewest_meshes"]) == (3, None)
    wrong = run("change", waiting, "--meshes", "2..3")
    assert wrong.code == 1 and "write 3, or 2-4" in wrong.err
    many = run("change", waiting, "--meshes", 9)
    assert many.code == 1 and "resources.meshes 9 is more than pipeline.stages 4" in " ".join(
        many.err.split()
    )
    refused = run("change", running, "--priority", 5)
    assert refused.code == 1 and "only a job that waits" in refused.err
    assert run("jobs", "--since", 1e18).code == 1


def test_who_was_told_of_a_job_is_listed(run: Run, served: Served, tmp_path: Path):
    served.run(lambda service: service.notifier.close())  # nothing leaves this machine
    with Client(served.url) as client:
        client.set_secret("HOOK_KEY", "a-signing-key")
    told = {"url": "https://hooks.example.com/x", "secret": "HOOK_KEY", "states": ["QUEUED"]}
    file = tmp_path / "telling.yaml"
    file.write_text(yaml.safe_dump(job_body(notifications=[told])))
    job_id = run("submit", file, "--json").json["id"]
    (one,) = run("notifications", job_id, "--json").json
    assert (one["url"], one["job_state"], one["state"], one["tries"]) == (told["url"], "QUEUED", "PENDING", 0)
    assert "https://hooks.example.com/x" in run("notifications", job_id).out
    file.write_text(yaml.safe_dump(job_body()))
    assert "no notifications" in run("notifications", run("submit", file, "--json").json["id"]).out


def test_an_operator_sets_a_quota_and_leaves_it_to_the_configuration(run: Run, served: Served):
    assert run("quota", "default", 3, "--json").json == {"name": "default", "quota": 3, "configured": None}
    assert "a quota of 3 accelerators" in run("quota", "default", 3).out
    assert run("quota", "default", "none", "--json").json["quota"] is None
    assert run("quota", "default", "configured").out == "queue default has no quota\n"
    assert "is no quota" in run("quota", "default", "many").err
    nowhere = run("quota", "nowhere", 1)
    assert nowhere.code == 1 and "there is no queue nowhere" in nowhere.err
