"""The verbs that change jobs: results on standard output, exit code 0 only on success."""

from __future__ import annotations

import threading
from pathlib import Path

import yaml

from service.spec.states import AttemptState
from tests.service.cli.conftest import Run
from tests.service.conftest import job_body
from tests.service.serving import Served, report, until


def test_a_job_is_submitted_listed_and_shown(run: Run, served: Served, job_file: Path):
    job = run("submit", job_file, "--json").json
    assert job["state"] == "QUEUED"
    text = run("submit", job_file)
    assert text.code == 0 and "QUEUED" in text.out and f"{served.url}/jobs/job-" in text.out
    jobs = run("jobs", "--json").json
    assert [one["id"] for one in jobs][1] == job["id"] and len(jobs) == 2
    assert len(run("jobs", "--limit", 1, "--json").json) == 1
    assert job["id"] in run("jobs").out
    assert run("job", job["id"], "--json").json["id"] == job["id"]
    assert "small" in run("job", job["id"]).out


def test_the_same_key_submits_once(run: Run, served: Served, job_file: Path):
    first, second = (run("submit", job_file, "--key", "k", "--json").json for _ in range(2))
    assert first["id"] == second["id"]


def test_a_job_waited_for_ends_the_command_as_it_ended(run: Run, served: Served, job_file: Path):
    for state, code in (("SUCCEEDED", 0), ("FAILED", 1)):
        thread = threading.Thread(target=_end_first_attempt, args=(served, state))
        thread.start()
        result = run("submit", job_file, "--wait", "--json")
        assert result.err.startswith(f"slotline: waiting for {result.json['id']}, {served.url}/jobs/")
        thread.join()
        assert (result.code, result.json["state"]) == (code, state), result
        served.cluster.submissions.clear()
    assert "NAN_LOSS: the loss is NaN" in result.err


def _end_first_attempt(served: Served, state: str) -> None:
    until(lambda: bool(served.cluster.submissions))
    job_id = next(iter(served.cluster.submissions)).rpartition("-")[0]
    reason = None if state == "SUCCEEDED" else "NAN_LOSS"
    report(served, job_id, 1, state=AttemptState(state), reason=reason, message=reason and "the loss is NaN")


def test_a_job_is_cancelled_and_retried(run: Run, served: Served, job_file: Path):
    blocker = run("submit", job_file, "--json").json["id"]
    until(lambda: f"{blocker}-1" in served.cluster.submissions)
    job_id = run("submit", job_file, "--json").json["id"]
    assert run("cancel", job_id, "--json").json["state"] == "CANCELLED"
    assert run("retry", job_id, "--json").json["state"] == "QUEUED"
    refused = run("retry", job_id)
    assert refused.code == 1 and "QUEUED" in refused.err and not refused.out


def test_a_bad_job_is_refused_with_the_servers_words(run: Run, served: Served, tmp_path: Path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_body(training={"global_batch": 10, "microbatches": 4})))
    result = run("submit", file)
    assert result.code == 1 and "set microbatches to 2" in result.err and not result.out
