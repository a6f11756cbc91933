"""The command as a whole: its verbs, its version, how it reaches a server or says that it cannot."""

from __future__ import annotations

import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.service.cli.conftest import Run
from tests.service.serving import Served


def test_the_command_is_installed_and_knows_every_verb():
    done = subprocess.run(
        [sys.executable, "-m", "service.cli", "--help"], capture_output=True, text=True, timeout=200
    )
    verbs = (
        *("serve", "submit", "jobs", "job", "logs", "events", "cancel", "retry"),
        *("plan", "timeline", "top", "token", "demo"),
    )
    assert done.returncode == 0 and all(f" {verb} " in done.stdout for verb in verbs)


def test_the_command_tells_its_version(run: Run):
    result = run("--version")
    assert (result.code, result.out) == (0, f"slotline {version('slotline')}\n")


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
