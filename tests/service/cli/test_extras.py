"""The client installed alone: its verbs need nothing else, and the others say which extra they need."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from service.cli.extras import MODULES_OF_EXTRA
from service.cli.main import VERBS_OF
from tests.extras import PROJECT, ROOT, modules_beyond, normal

HEAVY = {"torch", "ray", "numba", "ortools", "sqlalchemy", "fastapi", "numpy"}
RUN = """
import contextlib, io, json, sys
blocked, calls = json.loads(sys.stdin.read())
sys.modules.update(dict.fromkeys(blocked))
from service.cli.main import main
import service.client
answers = []
for arguments in calls:
    sys.argv, out, err = ["slotline", *arguments], io.StringIO(), io.StringIO()
    from service.cli import output
    output.err.file, output.out.file = err, out
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
    answers.append((code, out.getvalue() + err.getvalue()))
loaded = [name for name, module in sys.modules.items() if module is not None]
print(json.dumps([answers, loaded]))
"""


def answers_of(*calls: list[str], blocked: list[str]) -> tuple[list[tuple[int, str]], set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps([blocked, calls]),
        capture_output=True,
        text=True,
        timeout=100,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "200",
            "SLOTLINE_URL": "http://127.0.0.1:9",
        },
    )
    assert done.returncode == 0, done.stderr
    answers, loaded = json.loads(done.stdout)
    return [(code, text) for code, text in answers], set(loaded)


@pytest.mark.slow
def test_every_verb_of_the_client_works_where_it_is_installed_alone():
    client_verbs = [
        verb for module, verbs in VERBS_OF.items() if module not in ("serve", "demo") for verb in verbs
    ]
    calls = [["--version"], ["--help"], *([verb, "--help"] for verb in client_verbs), ["jobs"]]
    answers, loaded = answers_of(*calls, blocked=modules_beyond())
    for call, (code, text) in zip(calls[:-1], answers[:-1], strict=True):
        assert code == 0 and text, (call, text)
    code, text = answers[-1]
    assert code == 1 and "http://127.0.0.1:9" in text and "SLOTLINE_URL" in text
    assert "Traceback" not in text
    assert not HEAVY & loaded


@pytest.mark.slow
def test_the_clients_verbs_import_nothing_heavy_where_all_of_it_is_installed():
    calls = [["--help"], *([verb, "--help"] for verb in VERBS_OF["jobs"]), ["jobs"], ["top"], ["whoami"]]
    _, loaded = answers_of(*calls, blocked=[])
    assert "httpx" in loaded and not HEAVY & loaded


def test_a_verb_that_needs_more_says_which_extra_brings_it(tmp_path: Path):
    job, spec = tmp_path / "job.yaml", tmp_path / "pipeline.yaml"
    job.write_text(
        "{name: a, model: {factory: 'm:build'}, data: {factory: 'm:data'}, loss: {factory: 'm:loss'}, "
        "optimizer: {factory: 'm:optimizer'}, training: {steps: 1, global_batch: 2, microbatches: 2}, "
        "pipeline: {stages: 1}, resources: {meshes: 1}}"
    )
    spec.write_text("{microbatches: 2, meshes: [{name: m}], stages: [{name: s, mesh: m, forward_s: 1}]}")
    calls = {
        "serve": (["serve"], "server"),
        "migrate": (["migrate"], "server"),
        "backup": (["backup", str(tmp_path / "file")], "server"),
        "token": (["token", "list"], "server"),
        "plan": (["plan", str(spec)], "server"),
        "plan of a job": (["plan", str(job), "--local"], "server,worker"),
        "verify": (["verify", str(job)], "server,worker"),
        "demo": (["demo"], "server,worker,demo"),
    }
    answers, _ = answers_of(*(call for call, _ in calls.values()), blocked=modules_beyond())
    for (name, (_, extra)), (code, text) in zip(calls.items(), answers, strict=True):
        assert code == 1 and f"pip install 'slotline[{extra}]'" in text, (name, text)
        assert "Traceback" not in text, name


@pytest.mark.slow
def test_a_server_without_a_cluster_needs_ray_or_an_address():
    ((code, text),), _ = answers_of(["serve", "--port", "0"], blocked=["ray"])
    assert code == 1 and "slotline[worker]" in text and "RAY_ADDRESS" in text


@pytest.mark.parametrize("extra", ["server", "worker", "demo"])
def test_every_package_of_an_extra_is_known_by_a_module(extra: str):
    """Else a missing one ends in a traceback."""
    modules_of = {}
    for module, names in packages_distributions().items():
        for name in names:
            modules_of.setdefault(normal(name), set()).add(module)
    known = {name for modules in MODULES_OF_EXTRA.values() for name in modules}
    for text in PROJECT["optional-dependencies"][extra]:
        name = normal(Requirement(text).name)
        assert name == "slotline" or modules_of[name] & known, f"{name} is not in MODULES_OF_EXTRA"
