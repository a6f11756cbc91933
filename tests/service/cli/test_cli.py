"""The command against a served control plane: results on standard output, exit code 0 only on success."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from service import cli
from service.control_plane import ControlPlane
from service.orchestrator.outcome import Backoff, Report, TimelineRecord, apply_report
from service.ports import free_ports
from service.settings import Settings, misspelt_settings
from service.store.database import utc_now
from service.store.steps import StepRecord
from service.store.timelines import SlotRecord
from tests.service.conftest import job_body
from tests.service.serving import Served, serve


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serve(Settings(data_dir=tmp_path, tick_s=0.05, retry_backoff_s=0)) as served:
        yield served


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request) -> Run:
    """Runs the command in this process; against `served` where a test has it."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("SLOTLINE_API_TOKEN", raising=False)
    if "served" in request.fixturenames:
        monkeypatch.setenv("SLOTLINE_URL", request.getfixturevalue("served").url)

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["slotline", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_body()))
    return file


def report(served: Served, job_id: str, sequence: int, **fields) -> None:
    async def work(service: ControlPlane) -> None:
        async with service.database.write() as session:
            await apply_report(
                session, f"{job_id}-1", Report(sequence, **fields), at=utc_now(), backoff=Backoff(), keep=5
            )

    served.run(work)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
        thread.join()
        assert (result.code, result.json["state"]) == (code, state), result
        served.cluster.submissions.clear()
    assert "NAN_LOSS: the loss is NaN" in result.err


def _end_first_attempt(served: Served, state: str) -> None:
    from service.jobspec import AttemptState

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


def test_events_and_logs_are_shown_whole_and_followed_to_the_end(run: Run, served: Served, job_file: Path):
    job_id = run("submit", job_file, "--json").json["id"]
    until(lambda: f"{job_id}-1" in served.cluster.submissions)
    served.cluster.logs[f"{job_id}-1"] = "one\n[red]two\n"
    assert run("logs", job_id).out == "one\n[red]two\n"
    from service.jobspec import AttemptState

    timer = threading.Timer(0.3, report, (served, job_id, 1), {"state": AttemptState.SUCCEEDED})
    timer.start()
    lines = run("events", job_id, "--follow", "--json").out.splitlines()
    timer.join()
    assert [json.loads(line)["number"] for line in lines] == list(range(1, len(lines) + 1))
    assert json.loads(lines[-1])["message"] == "SUCCEEDED"
    assert run("events", job_id, "--json").out.splitlines() == lines
    assert len(run("events", job_id).out.splitlines()) == len(lines)
    assert run("logs", job_id, "-f", "--attempt", 1).out == "one\n[red]two\n"


def test_a_timeline_is_shown_and_written_as_a_trace(run: Run, served: Served, job_file: Path, tmp_path: Path):
    job_id = run("submit", job_file, "--json").json["id"]
    until(lambda: f"{job_id}-1" in served.cluster.submissions)
    slot = SlotRecord("m0", "compute", "F", "s0", None, None, None, 0, 0.0, 0.004)
    timeline = TimelineRecord(step=2, started_at=1.0, uncertainty_s=None, slots=[slot])
    report(served, job_id, 1, timelines=[timeline], steps=[StepRecord(2, *([1.0] * 8))])
    trace = tmp_path / "trace.json"
    result = run("timeline", job_id, "-o", trace)
    assert result.code == 0 and "measured" in result.out and "4.00 ms" in result.out
    assert [e["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"] == ["F 0"]
    assert run("timeline", job_id, "--step", 2, "--json").json["step"] == 2
    missing = run("timeline", job_id, "--step", 9)
    assert missing.code == 1 and "choose one of 2" in missing.err
    nowhere = run("timeline", job_id, "-o", tmp_path / "none" / "trace.json")
    assert nowhere.code == 1 and "cannot write" in nowhere.err


def test_top_shows_accelerators_and_why_jobs_wait(run: Run, served: Served, job_file: Path):
    for _ in range(2):
        run("submit", job_file)
    until(lambda: "0 of 4 free" in run("top", "--once").out)
    state = run("top", "--json").json
    assert state["cluster"]["accelerators"][0]["used"] == 4 and len(state["jobs"]) == 2


def test_a_folder_of_code_is_uploaded_with_the_job(run: Run, served: Served, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.py").write_text("x = 1\n")
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_body(code={"working_dir": "mine"})))
    job = run("submit", file, "--json").json
    assert job["spec"]["code"]["working_dir"].startswith("package:")
    until(lambda: len(served.cluster.packages) == 1)
    file.write_text(yaml.safe_dump(job_body(code={"working_dir": "nowhere"})))
    refused = run("submit", file)
    assert refused.code == 1 and "is no folder" in refused.err


@pytest.mark.parametrize("content", ["", "[1]", "a: [", "\x00"])
def test_a_file_that_is_no_job_is_refused_without_a_server(run: Run, tmp_path: Path, content: str):
    file = tmp_path / "job.yaml"
    file.write_text(content)
    result = run("submit", file)
    assert (result.code, result.out) == (1, "") and str(file) in result.err.replace("\n", "")
    assert run("submit", tmp_path / "none.yaml").code == 1


def test_numbers_in_yaml_are_numbers_as_people_write_them(run: Run, served: Served, tmp_path: Path):
    file = tmp_path / "job.yaml"
    text = (
        yaml.safe_dump(job_body())
        + "optimizer: {factory: 'a:b', args: {lr: 1e-3, eps: 1.e-8, k: +2E5, n: 1e3x}}\n"
    )
    file.write_text(text)
    arguments = run("submit", file, "--json").json["spec"]["optimizer"]["args"]
    assert arguments == {"lr": 0.001, "eps": 1e-8, "k": 2e5, "n": "1e3x"}


@pytest.mark.parametrize("value", ["2020-01-01", ".nan", ".inf", "!!binary aGVsbG8="])
def test_values_that_json_has_not_are_named_before_anything_is_sent(run: Run, tmp_path: Path, value: str):
    file = tmp_path / "job.yaml"
    file.write_text(f"model: {{factory: 'a:b', args: {{x: {value}}}}}\n")
    result = run("submit", file)
    assert (result.code, result.out) == (1, "") and "JSON has not" in result.err.replace("\n", " ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("job", ""),
        ("job", "../cluster"),
        ("cancel", "job-a?x"),
        ("events", ""),
        ("timeline", "x/y"),
        ("submit", "job.yaml", "--key", "a b"),
        ("token", "create", "x" * 101),
        ("token", "create", ""),
    ],
    ids=str,
)
def test_names_that_cannot_be_are_refused_at_once(run: Run, arguments: tuple[str, ...]):
    result = run(*arguments)
    assert (result.code, result.out) == (2, "") and "Traceback" not in result.err


def test_a_job_is_waited_for_and_followed_while_the_server_restarts(
    monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path, job_file: Path
):
    """The same port, the same store; the driver reports to the second control plane."""
    from service.jobspec import AttemptState

    (port,) = free_ports(1)
    settings = Settings(data_dir=tmp_path, tick_s=0.05, port=port)
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
        until(
            lambda: (
                served.requests(f"/api/v1/jobs/{job_id}/events") and served.requests(f"/api/v1/jobs/{job_id}")
            )
        )
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


def test_a_bad_job_is_refused_with_the_servers_words(run: Run, served: Served, tmp_path: Path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_body(training={"global_batch": 10, "microbatches": 4})))
    result = run("submit", file)
    assert result.code == 1 and "set microbatches to 2" in result.err and not result.out


def test_every_verb_says_how_to_reach_a_server_when_there_is_none(
    run: Run, monkeypatch: pytest.MonkeyPatch, job_file: Path
):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("SLOTLINE_URL", f"http://127.0.0.1:{probe.getsockname()[1]}")
        verbs = (
            ("jobs",),
            ("job", "x"),
            ("submit", job_file),
            ("cancel", "x"),
            ("retry", "x"),
            ("events", "x"),
        )
        for verb in (*verbs, ("logs", "x"), ("timeline", "x"), ("top", "--once")):
            result = run(*verb)
            assert (result.code, result.out) == (1, ""), verb
            assert "slotline serve" in result.err and "SLOTLINE_URL" in result.err


def test_tokens_are_made_listed_and_revoked(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SLOTLINE_DATA_DIR", str(tmp_path / "tokens"))
    token = run("token", "create", "me", "--json").json["token"]
    with serve(Settings(data_dir=tmp_path / "tokens", require_token=True)) as served:
        monkeypatch.setenv("SLOTLINE_URL", served.url)
        refused = run("jobs")
        assert refused.code == 1 and "token" in refused.err
        monkeypatch.setenv("SLOTLINE_API_TOKEN", token)
        assert run("jobs", "--json").json == []
        again = run("token", "create", "me")
        assert again.code == 1 and "already" in again.err
        assert [one["name"] for one in run("token", "list", "--json").json] == ["me"]
        assert run("token", "revoke", "me").code == 0
        assert run("jobs").code == 1
        assert run("token", "revoke", "me").code == 1


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"SLOTLINE_PORT": "70000"}, "SLOTLINE_PORT='70000'"),
        ({"SLOTLINE_HOST": "0.0.0.0"}, "SLOTLINE_API_TOKEN"),
        ({"RAY_ADDRESS": "ray://head:10001"}, "http://head:8265"),
        ({"SLOTLINE_LOG_LEVEL": "loud"}, "SLOTLINE_LOG_LEVEL='loud'"),
        ({"SLOTLINE_QUEUES": "default"}, "JSON"),
        ({"SLOTLINE_QUEUES": '{"a b": 1}'}, "SLOTLINE_QUEUES"),
        ({"SLOTLINE_PUBLIC_URL": "slotline.internal"}, "write http://"),
        ({"SLOTLINE_DATABASE_URL": "mysql://me:secret@host/x"}, "write postgresql://"),
        ({"SLOTLINE_KEEP_HISTORY_DAYS": "-0.5"}, "-1 for ever"),
        ({"SLOTLINE_HOST": "203.0.113.7", "SLOTLINE_API_TOKEN": "x"}, "203.0.113.7"),
    ],
)
def test_wrong_settings_stop_the_server_with_their_names(
    run: Run, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], says: str
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = run("serve")
    assert result.code == 1 and says in result.err.replace("\n", " ")
    assert "secret" not in result.err and "Traceback" not in result.err


def test_a_setting_with_a_typing_mistake_is_told():
    of_others = ["SLOTLINE_URL", "SLOTLINE_METRICS_HOST", "SLOTLINE_ATTEMPT_TOKEN", "SLOTLINE_IMAGE", "HOME"]
    assert misspelt_settings(["SLOTLINE_QUEUE", "SLOTLINE_QUEUES", *of_others]) == {
        "SLOTLINE_QUEUE": "SLOTLINE_QUEUES"
    }


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("http://[::1", "no address"),
        ("localhost:8000", "no Slotline answers"),
        ("http://127.0.0.1:x", "no address"),
    ],
)
def test_an_address_that_is_none_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, address: str, says: str):
    monkeypatch.setenv("SLOTLINE_URL", address)
    result = run("jobs")
    assert result.code == 1 and says in result.err.replace("\n", " ")


def test_a_token_with_odd_characters_is_named_but_not_shown(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLOTLINE_API_TOKEN", "secré")
    result = run("jobs")
    assert result.code == 1 and "SLOTLINE_API_TOKEN" in result.err and "secr" not in result.err


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    run: Run, served: Served, monkeypatch: pytest.MonkeyPatch
):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert run("jobs", "--json").json == []


def test_a_second_server_on_the_same_data_is_refused_and_says_so(
    run: Run, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLOTLINE_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    monkeypatch.setattr("service.store.leader._TAKE_OVER_S", 0.0)
    result = run("serve", "--port", 0)
    assert result.code == 1 and "another Slotline serves" in result.err.replace("\n", " ")


def test_a_start_that_fails_as_it_may_is_told_in_one_line(tmp_path: Path):
    (tmp_path / "file").touch()
    for setting in (
        f"SLOTLINE_DATA_DIR={tmp_path / 'file'}",
        "SLOTLINE_DATABASE_URL=postgresql://127.0.0.1:9/x",
    ):
        name, _, value = setting.partition("=")
        environment = {**os.environ, name: value, "RAY_ADDRESS": "http://127.0.0.1:9"}
        command = [sys.executable, "-m", "service.cli", "serve", "--port", "0"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 1 and "error: the server did not start: " in done.stderr
        assert "Traceback" not in done.stderr + done.stdout


def test_a_port_in_use_is_named_before_anything_starts(run: Run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", "--port", port)
        assert result.code == 1 and str(port) in result.err


def test_planning_needs_no_server(run: Run, tmp_path: Path):
    from tests.service.api.test_plans_api import SPEC

    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(SPEC))
    assert run("plan", spec, "--json").json["chosen"] == "1f1b"
    assert run("plan", tmp_path / "none.json").code == 1
    nowhere = run("plan", spec, "-o", tmp_path / "none" / "plan.json")
    assert nowhere.code == 1 and "none/plan.json" in nowhere.err


def test_the_command_tells_its_version(run: Run):
    result = run("--version")
    assert (result.code, result.out) == (0, f"slotline {version('slotline')}\n")


def test_the_command_is_installed_and_knows_every_verb():
    done = subprocess.run(
        [sys.executable, "-m", "service.cli", "--help"], capture_output=True, text=True, timeout=200
    )
    verbs = (
        *("serve", "submit", "jobs", "job", "logs", "events", "cancel", "retry"),
        *("plan", "timeline", "top", "token", "demo"),
    )
    assert done.returncode == 0 and all(f" {verb} " in done.stdout for verb in verbs)
