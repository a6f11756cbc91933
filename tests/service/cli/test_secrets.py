"""Secrets by the command: piped in, named, removed; never shown."""

from __future__ import annotations

import io
import os

import pytest

from service.cli.local import plan as local_plan
from service.cli.local import verify
from service.spec.job import JobSpec
from tests.service.cli.conftest import Run
from tests.service.conftest import job_body

VALUE = "hunter2-and-more"


def test_a_secret_is_piped_in_named_and_removed(run: Run, served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{VALUE}\n".encode())))
    done = run("secret", "set", "HF_TOKEN")
    assert (done.code, done.out) == (0, "set HF_TOKEN\n"), done.err
    listed = run("secret", "list", "--json")
    assert [one["name"] for one in listed.json] == ["HF_TOKEN"]
    assert VALUE not in done.out + done.err + listed.out
    assert run("secret", "list").out.startswith("HF_TOKEN 2")
    assert run("secret", "remove", "HF_TOKEN").out == "removed HF_TOKEN\n"
    again = run("secret", "remove", "HF_TOKEN")
    assert again.code == 1 and "no secret HF_TOKEN" in again.err
    assert run("secret", "list", "--json").json == []


@pytest.mark.parametrize("value", ["", "\n", "short\n"])
def test_what_is_no_secret_is_refused(run: Run, served, monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(value.encode())))
    assert run("secret", "set", "HF_TOKEN").code == 1
    assert run("secret", "set", "A-B").code == 2


def test_a_key_that_is_refused_is_not_shown(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLOTLINE_SECRETS_KEY", "not-long-enough")
    refused = run("token", "list")
    assert refused.code == 1 and "SLOTLINE_SECRETS_KEY=...: a key has at least 32" in refused.err
    assert "not-long-enough" not in refused.err


class Started(Exception):
    """A process was to be started, with this environment."""


def test_what_runs_a_job_on_this_machine_has_its_variables(monkeypatch: pytest.MonkeyPatch):
    def started(*_: object, env: dict[str, str], **__: object) -> None:
        raise Started(env["A_VARIABLE"], env["PATH"])

    monkeypatch.setattr("subprocess.run", started)
    monkeypatch.setattr("subprocess.Popen", started)
    spec = JobSpec.model_validate(job_body(env={"A_VARIABLE": "of the job"})).model_dump(mode="json")
    for start in (
        lambda: local_plan._measure_costs(spec, "cpu", None),
        lambda: verify._run_verification({"job": spec}, None, 1.0),
    ):
        with pytest.raises(Started) as told:
            start()
        assert told.value.args == ("of the job", os.environ["PATH"])
