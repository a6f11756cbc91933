"""Shells complete verbs, options and ids of jobs: asked as the printed scripts ask, and in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from service.client.client import Client
from tests.service.cli.conftest import Run
from tests.service.conftest import job_body
from tests.service.serving import Served


def asked(shell: str, words: str, **environment: str) -> str:
    """What the command answers a shell whose line is `words`, as the scripts of `slotline completion` ask."""
    given = {
        "_SLOTLINE_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": words,
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        **environment,
    }
    if shell == "fish":
        given["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    code = "from service.cli.main import main; import sys; sys.argv = ['slotline']; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **given}, capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_that_asks_the_command(run: Run, shell: str):
    made = run("completion", shell)
    assert made.code == 0 and f"_SLOTLINE_COMPLETE=complete_{shell}" in made.out and "slotline" in made.out


def test_another_shell_is_refused(run: Run):
    assert run("completion", "tcsh").code == 2


@pytest.mark.slow
def test_verbs_options_and_jobs_are_completed(served: Served):
    with Client(served.url) as client:
        job_id = client.submit(job_body(name="one-of-mine")).id
    assert asked("bash", "slotline not").split() == ["notifications"]
    assert "--follow" in asked("bash", "slotline logs --fo")
    assert asked("bash", "slotline job job-", SLOTLINE_URL=served.url).split() == [job_id]
    assert "one-of-mine" in asked("zsh", "slotline cancel ", SLOTLINE_URL=served.url)
    assert job_id in asked("fish", "slotline cancel ", SLOTLINE_URL=served.url)


def test_no_server_completes_nothing_and_says_nothing():
    assert asked("bash", "slotline job job-", SLOTLINE_URL="http://127.0.0.1:9").strip() == ""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_takes_the_script(run: Run, tmp_path: Path):
    (tmp_path / "slotline").write_text(f"#!{sys.executable}\nfrom service.cli.main import main\nmain()\n")
    (tmp_path / "slotline").chmod(0o755)
    script = run("completion", "bash").out
    asks = "COMP_WORDS=(slotline notif); COMP_CWORD=1; _slotline_completion slotline notif slotline; echo ${COMPREPLY[@]}"
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\n{asks}"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["notifications"], done.stderr
