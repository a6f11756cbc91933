"""The command as a whole: its verbs, its version, how it reaches a server or says that it cannot."""

from __future__ import annotations

import importlib
import json
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.main import get_command, get_group

from service.cli.main import VERBS_OF, app, completion_app
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


def test_every_verb_of_a_module_is_known_and_each_known_one_is_there():
    """Modules are imported by the verbs that the command says they have."""
    for module, verbs in VERBS_OF.items():
        registered = (
            importlib.import_module(f"service.cli.{module}").app if module != "main" else completion_app
        )
        assert list(get_group(registered).commands) == list(verbs), module
    group = get_command(app)
    assert all(group.get_command(None, verb) is not None for verb in group.list_commands(None))


@pytest.mark.parametrize(
    ("arguments", "too_heavy"),
    [
        (["--version"], {"httpx", "pydantic", "sqlalchemy", "numpy", "numba", "torch", "ray"}),
        (["jobs", "--help"], {"sqlalchemy", "alembic", "uvicorn", "numpy", "numba", "torch", "ray"}),
    ],
    ids=["version", "jobs"],
)
def test_a_verb_imports_what_it_needs(arguments: list[str], too_heavy: set[str]):
    imported = _imported_by(arguments)
    assert "typer" in imported and not too_heavy & imported


def test_a_named_schedule_is_planned_without_solver_client_and_models_of_a_job(tmp_path: Path):
    """16 stages and 64 microbatches: as for all but the smallest pipelines no solver rearranges the transfers."""
    stages = [
        {"name": f"s{i}", "mesh": f"m{i}", "forward_s": 1.0, "backward_input_s": 2.0, "activation_bytes": 1}
        for i in range(16)
    ]
    edges = [
        {"source": f"s{i}", "target": f"s{i + 1}", "forward_s": 0.3, "backward_s": 0.3} for i in range(15)
    ]
    spec = {"microbatches": 64, "schedule": "1f1b", "stages": stages, "edges": edges}
    file = tmp_path / "spec.json"
    file.write_text(json.dumps({**spec, "meshes": [{"name": stage["mesh"]} for stage in stages]}))
    imported = _imported_by(["plan", str(file)])
    assert "numba" in imported
    too_heavy = {"ortools", "pandas", "httpx", "sqlalchemy", "pydantic_settings", "service.spec.job"}
    assert not too_heavy & imported


def _imported_by(arguments: list[str]) -> set[str]:
    """Modules that a process has imported when the command with these arguments has printed its answer."""
    code = (
        f"import sys\nsys.argv = ['slotline', *{arguments!r}]\nfrom service.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nprint(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout, done.stderr
    return set(done.stderr.split())


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
