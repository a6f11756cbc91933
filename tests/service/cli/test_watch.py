"""The verbs that look at jobs, also while the server restarts."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from service.orchestrator.attempts.outcome import TimelineRecord
from service.orchestrator.ray.local_ray import free_ports
from service.settings.settings import Settings
from service.spec.states import AttemptState
from service.store.measurements import EvaluationRecord, SlotRecord, StepRecord
from tests.polling import until
from tests.service.cli.conftest import Run
from tests.service.serving import Served, report, serve


def test_events_and_logs_are_shown_whole_and_followed_to_the_end(run: Run, served: Served, job_file: Path):
    job_id = run("submit", job_file, "--json").json["id"]
    until(lambda: f"{job_id}-1" in served.cluster.submissions)
    served.cluster.logs[f"{job_id}-1"] = "one\n[red]two\n"
    until(
        lambda: run("logs", job_id).out == "one\n[red]two\n"
    )  # the server keeps a log that it has read for a moment
    timer = threading.Timer(0.3, report, (served, job_id, 1), {"state": AttemptState.SUCCEEDED})
    timer.start()
    lines = run("events", job_id, "--follow", "--json").out.splitlines()
    timer.join()
    assert [json.loads(line)["number"] for line in lines] == list(range(1, len(lines) + 1))
    assert json.loads(lines[-1])["message"] == "SUCCEEDED"
    assert run("events", job_id, "--json").out.splitlines() == lines
    assert len(run("events", job_id).out.splitlines()) == len(lines)
    assert run("logs", job_id, "-f", "--attempt", 1).out == "one\n[red]two\n"


@pytest.mark.slow
def test_a_timeline_is_shown_and_written_as_a_trace(run: Run, served: Served, job_file: Path, tmp_path: Path):
    job_id = run("submit", job_file, "--json").json["id"]
    until(lambda: f"{job_id}-1" in served.cluster.submissions)
    slot = SlotRecord("m0", "compute", "F", "s0", None, None, None, 0, 0.0, 0.004)
    timeline = TimelineRecord(step=2, started_at=1.0, uncertainty_s=None, slots=[slot])
    report(served, job_id, 1, timelines=[timeline], steps=[StepRecord(2, *([1.0] * 8), {"accuracy": 0.25})])
    assert "loss 1, accuracy 0.25" in run("job", job_id).out
    assert run("evaluations", job_id).out == "no evaluations\n"
    evaluations = [EvaluationRecord(2, 0.75, 64, 1.5, None, {"accuracy": 0.5, "f1": None})]
    best = {"step": 2, "uri": "/runs/step-2", "metric": "accuracy", "value": 0.5}
    report(served, job_id, 2, evaluations=evaluations, best_checkpoint=best)
    assert run("evaluations", job_id).out.split()[-5:] == ["2", "0.75", "0.5", "64", "1.50"]
    assert run("evaluations", job_id, "--json").json["metrics"] == {"accuracy": 0.5, "f1": None}
    assert "best checkpoint: accuracy 0.5 after step 2, /runs/step-2" in run("job", job_id).out
    trace = tmp_path / "trace.json"
    result = run("timeline", job_id, "-o", trace)
    assert result.code == 0 and "measured" in result.out and "4.00 ms" in result.out
    assert [e["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"] == ["F s0/0"]
    assert run("timeline", job_id, "-o", tmp_path / "step.svg").code == 0
    assert (tmp_path / "step.svg").read_text().startswith("<svg")
    assert run("timeline", job_id, "--step", 2, "--json").json["step"] == 2
    missing = run("timeline", job_id, "--step", 9)
    assert missing.code == 1 and "choose one of 2" in missing.err
    nowhere = run("timeline", job_id, "-o", tmp_path / "none" / "trace.json")
    assert nowhere.code == 1 and "cannot write" in nowhere.err


def test_top_shows_accelerators_and_why_jobs_wait(run: Run, served: Served, job_file: Path):
    for _ in range(2):
        run("submit", job_file)
    until(lambda: "0 of 4 slotline_worker free" in run("top", "--once").out)
    state = run("top", "--json").json
    assert state["cluster"]["accelerators"][0]["used"] == 4 and len(state["jobs"]) == 2


def test_top_shows_queues_steps_a_second_and_nodes(run: Run, served: Served, job_file: Path):
    job_id = run("submit", job_file, "--json").json["id"]
    until(lambda: f"{job_id}-1" in served.cluster.submissions)
    waiting = run("submit", job_file, "--json").json["id"]
    step = {"grad_norm": None, "bubble_ratio": None, "makespan_s": None, "exposed_transfer_s": None}
    steps = [StepRecord(3, 2.5, 0.25, overlap_ratio=None, started_at=None, metrics={}, **step)]
    report(served, job_id, 1, state=AttemptState.RUNNING, steps=steps)
    until(lambda: "0 of 4 slotline_worker free" in run("top", "--once").out)
    until(lambda: "not looked at yet" not in run("top", "--once").out)
    lines = [line.strip() for line in run("top", "--once").out.splitlines()]
    (queue,) = [line.split() for line in lines if line.startswith("default")]
    assert queue[:4] == ["default", "4", "-", "1"] and "accelerators" in queue, (
        "used, quota, waiting, and why"
    )
    # a wrapped line of a reason may begin with a job's id, too
    shown = [
        words for line in lines if (words := line.split())[1:2] == ["small"] and words[0].startswith("job-")
    ]
    assert shown[0] == [job_id, "small", "default", "RUNNING", "3/10", "4", "2.5"], (
        "those that run come first"
    )
    assert shown[1][0] == waiting and shown[1][3:] == ["QUEUED", "0/10"]
    assert any(line.startswith("node-1") and "4 slotline_worker" in line for line in lines)


@pytest.mark.slow
def test_a_job_is_waited_for_and_followed_while_the_server_restarts(
    monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path, job_file: Path
):
    """The same port, the same store; the driver reports to the second control plane."""
    (port,) = free_ports(1)
    settings = Settings(data_dir=tmp_path, port=port)
    monkeypatch.setenv("SLOTLINE_URL", f"http://127.0.0.1:{port}")
    results: dict[str, subprocess.CompletedProcess] = {}

    def start(*arguments: str) -> threading.Thread:
        command = [sys.executable, "-m", "service.cli", *arguments]
        work = lambda: results.update(  # noqa: E731
            {arguments[0]: subprocess.run(command, capture_output=True, text=True, timeout=200)}
        )
        thread = threading.Thread(target=work)
        thread.start()
        return thread

    with serve(settings, port=port) as served:
        waits = start("submit", str(job_file), "--wait", "--json")
        until(lambda: bool(served.cluster.submissions))
        job_id = next(iter(served.cluster.submissions)).rpartition("-")[0]
        follows = start("events", job_id, "--follow", "--json")
        until(lambda: served.requests(f"/api/v1/jobs/{job_id}/events") == 2)
    with serve(settings, port=port) as served:
        report(served, job_id, 1, state=AttemptState.SUCCEEDED)
        waits.join()
        follows.join()
    assert results["submit"].returncode == 0, results["submit"].stderr
    assert json.loads(results["submit"].stdout)["state"] == "SUCCEEDED"
    numbers = [json.loads(line)["number"] for line in results["events"].stdout.splitlines()]
    assert (
        results["events"].returncode == 0 and numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 2
    )
