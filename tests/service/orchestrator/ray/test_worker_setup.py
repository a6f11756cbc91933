"""A worker's command, as the interpreter of a local Ray runs it, beside what Ray itself would run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray._private.runtime_env.context import RuntimeEnvContext
from ray._private.workers import setup_worker
from ray.core.generated.common_pb2 import Language

from service.orchestrator.ray import worker_setup
from service.orchestrator.ray.worker_setup import worker_command

SETUP = str(Path(setup_worker.__file__))
WORKER = ["/ray/default_worker.py", "--node-ip-address=1.2.3.4", "--it's=a b", "--startup-token=3", ""]
ENVIRONMENT = {"PATH": "/usr/bin", "COLOUR": "red", "lower": "x"}


def by_ray(arguments, monkeypatch):
    """The program that Ray's setup executes, its words and environment."""
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", dict(ENVIRONMENT))
        patch.setattr(os, "execvp", lambda file, args: found.append((file, args, dict(os.environ))))
        given, left = setup_worker.parser.parse_known_args(arguments[1:])
        context = RuntimeEnvContext.deserialize(given.serialized_runtime_env_context or "{}")
        context.exec_worker(left, Language.Value(given.language))
    return found


@pytest.mark.parametrize(
    "context",
    [
        None,
        {},
        {"py_executable": "/usr/bin/python -S -E /spawn.py"},
        {"env_vars": {"A": "1", "PATH": "/own:${PATH}", "B": "${NONE}-${lower}-$COLOUR", "COLOUR": "blue"}},
        {
            "command_prefix": ["cd", "/working dir", "&&"],
            "py_executable": "python",
            "env_vars": {"X": "a 'b'"},
        },
        json.loads(RuntimeEnvContext(env_vars={"A": "b"}).serialize()),
    ],
)
def test_a_worker_runs_with_the_words_and_the_environment_that_ray_gives_it(context, monkeypatch):
    given = [] if context is None else [f"--serialized-runtime-env-context={json.dumps(context)}"]
    arguments = [SETUP, *WORKER[:2], *given, "--language=PYTHON", *WORKER[2:]]
    ran = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", dict(ENVIRONMENT))
        patch.setattr(os, "execvp", lambda file, args: ran.append((file, args, dict(os.environ))))
        patch.setattr(sys, "argv", ["worker_setup.py", *arguments])
        worker_setup.main()
    assert ran == by_ray(arguments, monkeypatch) != []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["-c", "pass"],
        ["-m", "ray.dashboard"],
        [SETUP, "--language=JAVA", "worker"],
        [SETUP, "worker"],
        ["/elsewhere/setup_worker.py", "--language=PYTHON"],
        [SETUP, "--language=PYTHON", "--serialized-runtime-env-context=[]"],
        [SETUP, "--language=PYTHON", "--serialized-runtime-env-context={"],
        [SETUP, "--language=PYTHON", '--serialized-runtime-env-context={"env_vars": {"A": "1"}, "later": 1}'],
        [SETUP, "--language=PYTHON", '--serialized-runtime-env-context={"override_worker_entrypoint": "x"}'],
    ],
)
def test_what_is_no_plain_worker_is_left_to_rays_own_way(arguments):
    environment = {}
    assert worker_command(arguments, environment) is None and environment == {}


def test_any_other_command_is_run_by_the_interpreter_itself_with_its_packages():
    words = [sys.executable, "-S", "-E", worker_setup.__file__]
    code = "import pydantic, sys; print(sys.argv[1:], sys.flags.no_site)"
    done = subprocess.run([*words, "-c", code, "a b"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "['a b'] 0\n", done.stderr
