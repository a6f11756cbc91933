"""Upgrades the control plane of another revision to this tree's while a job trains, and checks the job's record.

`python -m tests.benchmarks.upgrade REVISION [postgresql]`, in a clone that has this revision. Ray, driver and workers keep
the other revision's code, as pods that KubeRay leaves running do; only the control plane and its tables change. On
PostgreSQL, a new cluster of this run, the tables are migrated first, by `slotline migrate` as the chart's hook does: the
other revision's control plane goes on with them for a hundred steps of the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import create_engine, text

from service.orchestrator.ray.local_ray import LocalRay, free_ports
from service.settings.settings import Settings
from tests.benchmarks.service.server import ROOT
from tests.service.postgres import private_postgres

STEPS = 1200
_START_LIMIT_S = 120.0
_TRAIN_LIMIT_S = 600.0
_TOKEN = "upgrade"

_JOB = {
    "name": "upgrade",
    "model": {
        "factory": "worker.examples.gpt:build",
        "args": {"layers": 4, "width": 64, "length": 32, "vocab": 256},
    },
    "data": {"factory": "worker.examples.text:ByteWindows", "args": {"length": 32}},
    "loss": {"factory": "torch.nn.functional:cross_entropy"},
    "optimizer": {"factory": "torch.optim:AdamW", "args": {"lr": 3e-3}},
    "training": {"steps": STEPS, "global_batch": 16, "microbatches": 4},
    "resources": {"meshes": 2},
    "pipeline": {"stages": 2},
}


@contextlib.contextmanager
def control_plane(tree: Path, environment: dict[str, str], log: Path) -> Iterator[httpx.Client]:
    """The control plane of a tree; ended by SIGTERM, as a pod is. Raises TimeoutError where it does not answer in time."""
    url = f"http://127.0.0.1:{environment['SLOTLINE_PORT']}"
    command = [sys.executable, "-c", "from service.cli.main import main; main()", "serve"]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=tree,
            env={**environment, "PYTHONPATH": str(tree)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {_TOKEN}"}) as client:
                _wait(
                    lambda: _answers(client), _START_LIMIT_S, f"the control plane of {tree}; its log is {log}"
                )
                yield client
        finally:
            process.terminate()
            process.wait(60)


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def _wait(done: Any, limit_s: float, what: str) -> None:
    ends = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > ends:
            raise TimeoutError(f"not within {limit_s:g} s: {what}")
        time.sleep(0.5)


def _revision(database: str) -> str:
    return _read(database, "SELECT version_num FROM alembic_version")[0]


def _migrate(environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", "from service.cli.main import main; main()", "migrate"]
    own = {**environment, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=own, check=True, timeout=_START_LIMIT_S, stdout=subprocess.DEVNULL)


def _job(client: httpx.Client, job: str) -> dict[str, Any]:
    found = client.get(f"/api/v1/jobs/{job}").json()
    if found["state"] in ("FAILED", "CANCELLED"):
        raise RuntimeError(f"the job is {found['state']}: {found['message']}")
    return found


def _read(database: str, query: str) -> tuple[Any, ...]:
    engine = create_engine(database)
    with engine.connect() as connection:
        found = tuple(connection.execute(text(query)).one())
    engine.dispose()
    return found


async def upgrade(revision: str, folder: Path, postgres: str | None = None) -> dict[str, Any]:
    """What was seen: revisions of the tables, the step at each control plane's end and begin, steps in the record.

    On the database of the URL `postgres`, or else on SQLite.
    """
    other = folder / "other"
    other.mkdir()
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "x", "-C", str(other)], input=archive.stdout, check=True)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SLOTLINE_DATA_DIR": str(folder / "state"),
        "SLOTLINE_PORT": str(free_ports(1)[0]),
        "SLOTLINE_API_TOKEN": _TOKEN,
    }
    os.environ |= {"PATH": environment["PATH"], "PYTHONPATH": str(other)}  # of Ray's workers
    ray = LocalRay(Settings(data_dir=folder / "ray"))
    await ray.start()
    environment |= {"SLOTLINE_RAY_ADDRESS": ray.address, "SLOTLINE_RAY_AUTH_TOKEN": ray.token}
    database = postgres or f"sqlite:///{folder / 'state' / 'slotline.db'}"
    if postgres is not None:
        environment["SLOTLINE_DATABASE_URL"] = postgres
    seen: dict[str, Any] = {"from": revision, "database": database.partition(":")[0]}
    spec = {**_JOB, "checkpoint": {"uri": (folder / "checkpoints").as_uri(), "every_steps": 200}}
    try:
        with control_plane(other, environment, folder / "before.log") as client:
            answer = client.post("/api/v1/jobs", json=spec)
            answer.raise_for_status()
            job = answer.json()["id"]
            _wait(lambda: _job(client, job)["progress"]["step"] >= 100, _TRAIN_LIMIT_S, "step 100 of the job")
            seen["tables before"] = _revision(database)
            if postgres is not None:
                seen["step migrated"] = _job(client, job)["progress"]["step"]
                _migrate(environment)
                seen["tables migrated"], goal = _revision(database), seen["step migrated"] + 100
                _wait(
                    lambda: _job(client, job)["progress"]["step"] >= goal,
                    _TRAIN_LIMIT_S,
                    f"step {goal} of the job",
                )
                if client.get("/readyz").status_code != 200:
                    raise RuntimeError("the other control plane does not go on with migrated tables")
            seen["step before"] = _job(client, job)["progress"]["step"]
        with control_plane(ROOT, environment, folder / "after.log") as client:
            seen["tables after"] = _revision(database)
            seen["step after"] = _job(client, job)["progress"]["step"]
            _wait(lambda: _job(client, job)["state"] == "SUCCEEDED", _TRAIN_LIMIT_S, "the job's end")
            seen["attempts"] = len(client.get(f"/api/v1/jobs/{job}").json()["attempts"])
            seen["page"] = client.get(f"/jobs/{job}").status_code
        count, first, last = _read(database, "SELECT count(DISTINCT step), min(step), max(step) FROM steps")
        seen["steps in the record"] = f"{count}, {first} to {last}"
        if seen["attempts"] != 1 or (count, first, last) != (STEPS, 1, STEPS):
            raise RuntimeError(f"the job was disturbed: {json.dumps(seen)}")
    finally:
        await ray.stop()
    return seen


def main() -> None:
    if sys.argv[2:] not in ([], ["postgresql"]) or len(sys.argv) < 2:
        sys.exit("usage: python -m tests.benchmarks.upgrade REVISION [postgresql]")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        url = None
        if sys.argv[2:]:
            url = stack.enter_context(private_postgres(durable=True)).format("postgres")
        for what, value in asyncio.run(upgrade(sys.argv[1], Path(folder), url)).items():
            print(f"{what:20} {value}")


if __name__ == "__main__":
    main()
