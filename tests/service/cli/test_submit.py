"""The verbs that change jobs: results on standard output, exit code 0 only on success."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from service.cli import jobs
from service.spec.states import AttemptState
from service.store.measurements import StepRecord
from tests.polling import until
from tests.service.cli.conftest import Run
from tests.service.conftest import job_body
from tests.service.serving import Served, report


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


@pytest.mark.slow
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
    assert (
        "slotline: state: QUEUED: submitted" in result.err
        and "slotline: state: FAILED: NAN_LOSS" in result.err
    ), "events meanwhile"


@pytest.mark.slow
def test_a_job_that_is_followed_shows_its_log_until_it_ends(run: Run, served: Served, job_file: Path):
    def write_log_and_end() -> None:
        until(lambda: bool(served.cluster.submissions))
        (attempt,) = served.cluster.submissions
        served.cluster.logs[attempt] = "step 1/10  loss 2.5\nstep 2/10  loss 2.25\n"
        _end_first_attempt(served, "SUCCEEDED")

    thread = threading.Thread(target=write_log_and_end)
    thread.start()
    result = run("submit", job_file, "--follow")
    thread.join()
    assert result.code == 0, result
    assert result.out.splitlines()[:2] == ["step 1/10  loss 2.5", "step 2/10  loss 2.25"]
    assert "SUCCEEDED" in result.out.splitlines()[2]


@pytest.mark.slow
def test_a_terminal_has_a_progress_bar_below_the_log_of_a_followed_job(
    run: Run, served: Served, job_file: Path, monkeypatch: pytest.MonkeyPatch
):
    reader, writer = os.openpty()
    shown: list[str] = []

    def read_terminal() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while piece := os.read(reader, 65536):
                shown.append(piece.decode())

    def train_and_end() -> None:
        until(lambda: bool(served.cluster.submissions))
        (attempt,) = served.cluster.submissions
        served.cluster.logs[attempt] = "step 3/10  loss 2.5\n"
        job_id = attempt.rpartition("-")[0]
        steps = [StepRecord(3, 2.5, *([None] * 7))]
        report(served, job_id, 1, state=AttemptState.RUNNING, steps=steps)
        try:
            until(lambda: "3/10" in "".join(shown))
        finally:
            report(served, job_id, 2, state=AttemptState.SUCCEEDED)

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(jobs, "_PROGRESS_EVERY_S", 0.02)
    threads = [threading.Thread(target=work, daemon=True) for work in (read_terminal, train_and_end)]
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(jobs, "err", Console(file=terminal, width=100))
        for thread in threads:
            thread.start()
        result = run("submit", job_file, "--follow")
    for thread in threads:
        thread.join(60)
    os.close(reader)
    assert result.code == 0, result
    text = "".join(shown)
    assert "loss 2.5" in text and "3/10" in text, text
    assert "step 3/10  loss 2.5" in result.out, "the log goes to standard output"


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


def test_a_file_has_no_body_and_unknown_jobs_are_listed_by_a_verb(run: Run, served: Served, tmp_path: Path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_body(resources={"meshes": 8})))
    result = run("submit", file)
    assert result.code == 1 and "body:" not in result.err and "error: " in result.err
    assert "`slotline jobs`" in run("job", "job-none").err
    file.write_text(yaml.safe_dump(job_body(pipeline={"stages": 4, "schedule": "1F1B"})))
    assert run("submit", file, "--json").json["spec"]["pipeline"]["schedule"] == "1f1b"


def test_code_that_would_stand_in_the_way_of_slotline_is_refused_by_name(
    run: Run, served: Served, tmp_path: Path
):
    (tmp_path / "mine" / "worker").mkdir(parents=True)
    (tmp_path / "mine" / "worker" / "model.py").write_text("x = 1\n")
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_body(code={"working_dir": "mine"})))
    result = run("submit", file)
    assert result.code == 1 and "'worker/model.py'" in result.err and "rename it" in result.err
    (tmp_path / "mine" / "worker" / "model.py").rename(tmp_path / "mine" / "workers.py")
    assert run("submit", file).code == 0
