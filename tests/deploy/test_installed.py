"""The images by what they install: their own commands, in an empty environment, and what they are for.

Some minutes and gigabytes of packages, so only where SLOTLINE_IMAGE_TESTS is set (see deploy/README.md).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from service.orchestrator.ray.local_ray import free_ports
from tests.deploy.rendering import ROOT, image_environment

DOCKERFILE = ROOT / "deploy" / "Dockerfile.control-plane"
PREFIX = "/opt/slotline"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not os.environ.get("SLOTLINE_IMAGE_TESTS"), reason="SLOTLINE_IMAGE_TESTS is not set: long and large"
    ),
]


@dataclass(frozen=True)
class Image:
    """Where the image's environment lies here, and what a container of it would have in its own."""

    prefix: Path
    environment: dict[str, str]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The control plane's: what its build stage makes."""
    folder = tmp_path_factory.mktemp("image")
    prefix = folder / "slotline"
    _build(DOCKERFILE.read_text().split("\nFROM ")[1], folder, {PREFIX: str(prefix)}, {})
    environment = {"PATH": f"{prefix}/bin:/usr/bin:/bin"} | image_environment()
    environment |= {"HOME": str(folder), "SLOTLINE_DATA_DIR": str(folder / "data")}
    return Image(prefix, environment)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """A Ray node's, for CPUs: an empty environment stands for the Python of its base image."""
    index = os.environ.get("TORCH_INDEX")
    if not index:
        pytest.skip("TORCH_INDEX is not set: the index of torch's CPU wheels")
    folder = tmp_path_factory.mktemp("worker")
    prefix = folder / "python"
    subprocess.run([sys.executable, "-m", "venv", prefix], check=True, timeout=120)
    path = {"PATH": f"{prefix}/bin:/usr/bin:/bin", "CUDA_MAJOR": "", "TORCH_INDEX": index}
    text = (ROOT / "deploy" / "Dockerfile.worker").read_text().split("\nFROM ")[1]
    _build(text, folder, {}, path)
    return Image(prefix, {"PATH": path["PATH"], "HOME": str(folder)})


def _build(stage: str, folder: Path, places: dict[str, str], environment: dict[str, str]) -> None:
    """A stage, line by line: COPY into an empty folder, RUN with a bare environment; Debian's packages are left out."""
    source, tools = folder / "src", folder / "bin"
    source.mkdir()
    tools.mkdir()
    (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tools / "python").chmod(0o755)
    bare = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(folder)} | environment
    bare |= {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
    text = re.sub(r"^\s*#.*\n", "", stage, flags=re.MULTILINE).replace("\\\n", " ")
    for line in text.splitlines()[1:]:
        word, _, argument = line.strip().partition(" ")
        if word == "COPY":
            *names, target = argument.split()
            for name in names:
                _copy(ROOT / name, source / (target if len(names) == 1 else ""))
        elif word == "RUN" and "apt-get" not in argument:
            command = argument
            for place, here in places.items():
                command = command.replace(place, here)
            done = subprocess.run(
                ["/bin/sh", "-ec", command],
                cwd=source,
                env=bare,
                capture_output=True,
                text=True,
                timeout=1500,
                check=False,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"


def _packages(image: Image) -> set[str]:
    listed = subprocess.run(
        [image.prefix / "bin" / "python", "-m", "pip", "list", "--format=freeze"],
        env=image.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout.lower()
    return {line.partition("==")[0] for line in listed.splitlines()}


def _copy(what: Path, to: Path) -> None:
    if what.is_dir():
        shutil.copytree(what, to, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    else:
        shutil.copy(what, to / what.name if to.is_dir() else to)


def test_nothing_of_the_workers_is_installed(image: Image):
    names = _packages(image)
    assert {"slotline", "fastapi", "ortools", "psycopg"} <= names
    assert not [
        name for name in names if name in ("torch", "ray", "scikit-learn") or name.startswith("nvidia")
    ]


def test_the_cpu_image_of_a_node_has_buckets_and_no_cuda(worker: Image, tmp_path: Path):
    names = _packages(worker)
    assert {"slotline", "torch", "ray", "s3fs", "gcsfs", "virtualenv"} <= names
    assert not [name for name in names if name.startswith(("nvidia", "cupy"))], "gigabytes that nobody uses"
    program = (
        "import ray, torch, worker.driver.__main__, worker.actor.actor, worker.tasks.profile\n"
        "import worker.checkpoint.format, fsspec\n"
        "assert not torch.cuda.is_available()\n"
        "s3, gs = fsspec.core.url_to_fs('s3://bucket/runs')[0], fsspec.get_filesystem_class('gs')\n"
        "print(type(s3).__module__, gs.__module__)"
    )
    done = subprocess.run(
        [worker.prefix / "bin" / "python", "-c", program],
        cwd=tmp_path,  # away from the sources
        env=worker.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [name.partition(".")[0] for name in done.stdout.split()] == ["s3fs", "gcsfs"]


def test_what_was_installed_trains_a_job_of_one_step(image: Image, worker: Image, tmp_path: Path):
    """A Ray node from the one environment, the control plane from the other, and a job that both of them run."""
    dashboard, gcs, client, port = free_ports(4)
    shared = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 32, "RAY_USAGE_STATS_ENABLED": "0"}
    node = worker.environment | shared | {"OMP_NUM_THREADS": "1", "SLOTLINE_LIMIT_LINGER_S": "0"}
    start = [
        *("start", "--head", "--block", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
        *(f"--port={gcs}", "--metrics-export-port=0", f"--ray-client-server-port={client}"),
        *("--node-ip-address=127.0.0.1", "--num-cpus=2", '--resources={"slotline_worker": 2}'),
        *("--dashboard-agent-listen-port=0", "--object-store-memory=134217728"),
    ]
    cluster = {
        "address": f"http://127.0.0.1:{dashboard}",
        "token": shared["RAY_AUTH_TOKEN"],
        "driver_ray_address": f"127.0.0.1:{gcs}",
    }
    plane = image.environment | {
        "SLOTLINE_PORT": str(port),
        "SLOTLINE_OPEN_ACCESS": "true",
        "SLOTLINE_DATA_DIR": str(tmp_path / "data"),
        "SLOTLINE_QUEUES": json.dumps({"default": {"cluster": "node"}}),
        "SLOTLINE_CLUSTERS": json.dumps({"node": cluster}),
    }
    length = {"length": 16}
    job = {
        "name": "one-step",
        "model": {
            "factory": "worker.examples.gpt:build",
            "args": {"layers": 2, "width": 16, "heads": 2} | length,
        },
        "data": {"factory": "worker.examples.text:ByteWindows", "args": length},
        "loss": {"factory": "torch.nn.functional:cross_entropy"},
        "optimizer": {"factory": "torch.optim:AdamW", "args": {"lr": 1e-3}},
        "training": {"steps": 1, "global_batch": 4, "microbatches": 2},
        "pipeline": {"stages": 2, "schedule": "auto"},
        "resources": {"meshes": 2, "device": "cpu"},
        "checkpoint": {"uri": str(tmp_path / "kept"), "every_steps": 1},
    }
    url = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryDirectory(
            prefix="slr", ignore_cleanup_errors=True
        ) as short,  # for names of sockets
        _running(worker, ["ray", *start], node | {"RAY_TMPDIR": short}, tmp_path) as ray_log,
        _running(image, ["slotline", "serve"], plane, tmp_path) as log,
    ):
        _until_it_answers(f"{url}/readyz", 300, ray_log, log)
        submitted = httpx.post(f"{url}/api/v1/jobs", json=job, timeout=60).raise_for_status().json()
        deadline = time.monotonic() + 600
        while (seen := httpx.get(f"{url}/api/v1/jobs/{submitted['id']}", timeout=60).json())["state"] not in (
            "SUCCEEDED",
            "FAILED",
        ):
            assert time.monotonic() < deadline, f"{seen}{log.read_text()[-3000:]}"
            time.sleep(1)
        told = httpx.get(f"{url}/api/v1/jobs/{submitted['id']}/logs", timeout=60).text
        assert (seen["state"], seen["progress"]["step"]) == ("SUCCEEDED", 1), f"{seen}{told[-3000:]}"
        assert 0 < seen["progress"]["loss"] < 10
    assert any(one.is_file() for one in (tmp_path / "kept").rglob("*")), "it saved what it had"
    assert "Traceback" not in log.read_text(), log.read_text()


@contextlib.contextmanager
def _running(image: Image, command: list[str], environment: dict[str, str], folder: Path) -> Iterator[Path]:
    """A process of an image, away from the sources, until the context is left; its log."""
    log = folder / f"{command[0]}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            executable=image.prefix / "bin" / command[0],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(90)


def _until_it_answers(url: str, limit_s: float, *logs: Path) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        assert time.monotonic() < deadline, "\n".join(log.read_text()[-3000:] for log in logs)
        try:
            httpx.get(url, timeout=5).raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(0.5)


def test_it_serves_and_plans_with_what_was_installed(image: Image, tmp_path: Path):
    """`slotline serve` as the image starts it, away from the sources; it shows its pages and makes a plan."""
    (port,) = free_ports(1)
    given = image.environment | {
        "SLOTLINE_PORT": str(port),
        "SLOTLINE_OPEN_ACCESS": "true",
        "RAY_ADDRESS": "http://127.0.0.1:9",
    }
    url = f"http://127.0.0.1:{port}"
    with _running(image, ["slotline", "serve"], given, tmp_path) as log:
        _until_it_answers(f"{url}/healthz", 120, log)
        assert "<html" in httpx.get(url, timeout=30).raise_for_status().text
        stages = [{"name": f"s{i}", "mesh": f"m{i}", "forward_s": 1, "backward_input_s": 1} for i in range(2)]
        spec = {
            "microbatches": 2,
            "meshes": [{"name": "m0"}, {"name": "m1"}],
            "stages": stages,
            "edges": [{"source": "s0", "target": "s1", "forward_s": 0, "backward_s": 0}],
            "schedule": "auto",
        }
        plan = httpx.post(f"{url}/api/v1/plans", json=spec, timeout=120).raise_for_status().json()
        assert plan["makespan_s"] == pytest.approx(6)
    assert "Traceback" not in log.read_text(), log.read_text()
