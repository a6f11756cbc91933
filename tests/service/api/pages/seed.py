"""A store with three jobs, and the real application over it: one runs, one waits, one has failed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from unittest import mock

import uvicorn
from pydantic import SecretStr

from service.control_plane import control_plane_app
from service.orchestrator.attempts import watch
from service.orchestrator.decisions.attempt_lifecycle import WatchLimits
from service.orchestrator.ray.jobs_api import ClusterUnreachableError, RayNode, ResourceUse
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.programs.plan import Plan
from service.settings.settings import Settings
from service.spec.job import JobSpec
from service.spec.states import AttemptState, JobState
from service.store import transitions
from service.store.attempts import create_attempt
from service.store.database import Database, utc_now
from service.store.measurements import (
    EvaluationRecord,
    SlotRecord,
    StepRecord,
    record_evaluations,
    record_steps,
    record_timeline,
)
from service.store.plans import record_job_plan
from tests.polling import until
from tests.service.api.routers.test_weights import lay
from tests.service.conftest import create_job
from worker.contract.checkpoint_files import step_folder_name
from worker.contract.timeline import LAUNCH_EVENT, launch_message

STAGES = 3
MICROBATCHES = 4
STEPS = 40
SLOWER = 1.25
LAUNCH_S = {"place": 6.0, "trace": 1.5, "plan": 0.02, "first step": 0.25}


class NoCluster:
    """A cluster with a node that offers nothing: nothing starts, so that the seeded jobs stay as they are."""

    async def _away(self, *_: object) -> None:
        raise ClusterUnreachableError("there is no cluster in this test")

    submit = job = stop = log = upload_package = _away

    async def read_log(self, *_: object) -> AsyncIterator[bytes]:
        await self._away()
        yield b""

    async def nodes(self) -> list[RayNode]:
        return [RayNode("node-1", "127.0.0.1", {})]

    async def resources_in_use(self) -> list[ResourceUse]:
        return []

    async def close(self) -> None:
        return None


@dataclass
class Site:
    url: str
    running: str
    waiting: str
    failed: str
    plan: Plan
    interrupted_at: datetime
    """When the running job's earlier attempt saved and ended, where there was one."""


@contextlib.contextmanager
def seeded_site(
    data_dir: Path, *, serve_metrics: Callable[[str], str] | None = None, api_token: str | None = None
) -> Iterator[Site]:
    """Serve the application over a new store; the running attempt has two profiled steps.

    `serve_metrics` takes a job's id and returns the endpoint that its driver would report; that of the
    failed job lingers, and so does that of an earlier attempt of the running job, which is told first.
    With `api_token`, every call must carry it.
    """
    never_s = 3600
    settings = Settings(
        data_dir=data_dir,
        port=0,
        api_token=None if api_token is None else SecretStr(api_token),
    )
    seeded = asyncio.run(seed_store(settings.sqlalchemy_url, serve_metrics))
    with (
        mock.patch.object(watch, "HEARTBEAT_TIMEOUT_S", never_s),
        mock.patch.object(watch, "WatchLimits", functools.partial(WatchLimits, start_timeout_s=never_s)),
        mock.patch("service.jobs.clusters.METRICS_LINGER_S", never_s),
        _serve(settings) as url,
    ):
        yield Site(url, **seeded)


def pipeline() -> PipelineSpec:
    stage = {"forward_s": 0.002, "backward_input_s": 0.002, "backward_weight_s": 0.002, "activation_bytes": 1}
    again = {"activation_bytes": 1, "extra_s": 0.0, "required": True}
    return PipelineSpec.model_validate(
        {
            "microbatches": MICROBATCHES,
            "meshes": [{"name": f"mesh{i}"} for i in range(STAGES)],
            "stages": [
                {"name": f"stage{i}", "mesh": f"mesh{i}", **stage, "recompute": again if i == 1 else None}
                for i in range(STAGES)
            ],
            "edges": [
                {"source": f"stage{i}", "target": f"stage{i + 1}", "forward_s": 0.001, "backward_s": 0.001}
                for i in range(STAGES - 1)
            ],
            "schedule": "1f1b",
        }
    )


def job_spec(name: str) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": name,
            "model": {"factory": "worker.examples.gpt:build"},
            "data": {"factory": "worker.examples.text:ByteWindows"},
            "loss": {"factory": "torch.nn.functional:cross_entropy"},
            "training": {"steps": 100, "global_batch": 8, "microbatches": "auto"},
            "pipeline": {"stages": "auto"},
            "resources": {"meshes": STAGES},
        }
    )


async def seed_store(url: str, serve_metrics: Callable[[str], str] | None = None) -> dict:
    """Fill an empty database; answers the fields of Site but its `url`."""
    database = Database(url)
    await database.start()
    try:
        return await _seed_jobs(database, serve_metrics)
    finally:
        await database.close()


async def _seed_jobs(database: Database, serve_metrics: Callable[[str], str] | None) -> dict:
    spec = pipeline()
    plan = make_plan(spec)
    now = utc_now()
    async with database.write() as session:
        failed = await create_job(session, job_spec("broken"), at=now - timedelta(minutes=2))
        broken = await create_attempt(session, failed, device="cpu", at=now)
        broken.metrics_endpoint = serve_metrics(failed.id) if serve_metrics else None
        broken.log = "building <i>nope</i>\nTraceback: no module\n"
        reason = {"reason": "MODEL_BUILD_FAILED", "message": "<b>no module named 'nope'</b>"}
        transitions.move_attempt(broken, AttemptState.FAILED, at=now, **reason)
        transitions.move_job(session, failed, JobState.FAILED, at=now, **reason)
        running = await create_job(session, job_spec("gpt"), at=now - timedelta(minutes=1))
        if serve_metrics:
            earlier = await create_attempt(session, running, device="cpu", at=now)
            earlier.metrics_endpoint = serve_metrics(running.id)
            lost = {"reason": "WORKER_LOST", "message": "node a is gone"}
            saved = "after step 7: 12 MB at /runs/7"
            transitions.add_event(session, running, "checkpoint", saved, at=now, attempt=earlier.number)
            transitions.move_attempt(earlier, AttemptState.FAILED, at=now, **lost)
            transitions.move_job(session, running, JobState.RECOVERING, at=now, **lost)
        attempt = await create_attempt(session, running, device="cpu", at=now)
        attempt.submitted_at = now
        for phase, seconds in LAUNCH_S.items():
            told = launch_message(phase, seconds)
            transitions.add_event(session, running, LAUNCH_EVENT, told, at=now, attempt=attempt.number)
        attempt.peak_memory_bytes = {"mesh0": 3 << 20, "mesh1": 1536}
        attempt.metrics_endpoint = serve_metrics(running.id) if serve_metrics else None
        transitions.move_attempt(attempt, AttemptState.RUNNING, at=now)
        transitions.move_job(session, running, JobState.RUNNING, at=now)
        running.step, running.loss, running.step_s, running.trained_s = STEPS, 1.25, 0.05, STEPS * 0.05
        await record_job_plan(session, attempt, plan_body(spec, plan), at=now)
        await record_steps(session, attempt, [step(number) for number in range(1, STEPS + 1)])
        running.step_flops, running.peak_flops_per_s = running.step_s * 3e12, 8e12
        running.best_checkpoint = {"step": 20, "uri": "/runs/20", "metric": "loss", "value": 1.5}
        found = [EvaluationRecord(number, 1.5, 64, 0.1, None, {"f1": 0.5}) for number in (0, 10, 20)]
        await record_evaluations(session, attempt, found)
        for profiled in (20, 40):
            await record_timeline(
                session,
                attempt,
                step=profiled,
                started_at=1.8e9,
                uncertainty_s=2e-5,
                slots=measured(plan),
                keep=9,
            )
        waiting = await create_job(session, job_spec("patient"), at=now)
    ids = {"running": running.id, "waiting": waiting.id, "failed": failed.id}
    return ids | {"plan": plan, "interrupted_at": now}


EVALUATIONS = range(0, STEPS + 1)
STARTING = ("traced: 8 layers", "profiled: 3 meshes", "planned: makespan 15 ms, bubble 20 %")


async def seed_states(url: str, storage: Path) -> tuple[str, str]:
    """A job that starts, with events of its driver, and one that has succeeded, with an evaluation after each step, and two
    checkpoints and an export below `storage`; answers their ids."""
    database = Database(url)
    now = utc_now()
    async with database.write() as session:
        starting = await create_job(session, job_spec("begins"), at=now)
        attempt = await create_attempt(session, starting, device="cpu", at=now)
        attempt.submitted_at = now
        for message in STARTING:
            transitions.add_event(session, starting, "progress", message, at=now, attempt=attempt.number)
        saves = {"checkpoint": {"uri": str(storage), "every_steps": 20}}
        body = job_spec("done").model_dump(mode="json")
        body["training"]["steps"] = STEPS
        spec = JobSpec.model_validate(body | saves)
        done = await create_job(session, spec, at=now - timedelta(minutes=3))
        attempt = await create_attempt(session, done, device="cpu", at=now)
        attempt.submitted_at = now
        transitions.move_attempt(attempt, AttemptState.RUNNING, at=now)
        transitions.move_job(session, done, JobState.RUNNING, at=now)
        done.step, done.loss, done.step_s, done.checkpoint_step = STEPS, step(STEPS).loss, 0.05, STEPS
        done.best_checkpoint = {"step": 20, "uri": f"{storage}/20", "metric": "loss", "value": 3.0}
        await record_steps(session, attempt, [step(number) for number in range(1, STEPS + 1)])
        evaluated = [EvaluationRecord(number, 3.0, 64, 0.1, None) for number in EVALUATIONS]
        await record_evaluations(session, attempt, evaluated)
        transitions.move_attempt(attempt, AttemptState.SUCCEEDED, at=now)
        transitions.move_job(session, done, JobState.SUCCEEDED, at=now)
    await database.close()
    for saved in (20, STEPS):
        lay(storage, done.id, saved)
    export = storage / done.id / f"export-{step_folder_name(20)}"
    export.mkdir()
    (export / "model.safetensors").write_bytes(b"x" * 2048)
    return starting.id, done.id


PAGES = {
    "jobs": ("/", "#jobs tbody tr"),
    "job-starting": ("/jobs/{starting}", "#events tbody tr"),
    "job-running": ("/jobs/{running}", "svg[data-panel=measured] rect.slot"),
    "job-ended": ("/jobs/{done}", "#events tbody tr"),
    "job-failed": ("/jobs/{failed}", "#events tbody tr"),
    "job-missing": ("/jobs/job-nowhere", "h1"),
    "cluster": ("/cluster", "#waiting tbody tr"),
    "compare": ("/compare?first={running}&second={done}", "#differences tbody tr"),
    "docs": ("/docs", "openapi-explorer"),
    "missing": ("/no/such/address", "h1"),
}
"""Of every page a path, with names of jobs, and an element that is there once it is drawn."""


def plan_body(spec: PipelineSpec, plan: Plan) -> str:
    """What a driver runs, as the store has it."""
    body = {
        "begins": ["a"],
        "spec": spec.model_dump(mode="json"),
        "plan": plan.model_dump(mode="json"),
        "step_s": plan.makespan_s + 0.0025,
        "update_s": 0.0025,
        "update": [{"mesh": f"mesh{i}", "reduce_s": 0.001 * i, "step_s": 0.0005} for i in range(STAGES)],
    }
    return json.dumps(body)


def step(number: int) -> StepRecord:
    return StepRecord(
        step=number,
        loss=5 * math.exp(-number / 20),
        step_s=0.05,
        makespan_s=0.04,
        bubble_ratio=0.3,
        exposed_transfer_s=0.001,
        overlap_ratio=0.9,
        grad_norm=1.0,
        learning_rate=1e-3 * number,
        started_at=1.8e9 + number,
        metrics={"accuracy": 0.5 + number / 1000},
    )


def measured(plan: Plan) -> list[SlotRecord]:
    """The plan's slots, everything a quarter slower, and a STEP on every mesh."""
    fields = SlotRecord._fields
    slots = []
    for slot in plan.slots:
        values = {name: getattr(slot, name) for name in fields}
        values |= {"start_s": slot.start_s * SLOWER, "end_s": slot.end_s * SLOWER}
        slots.append(SlotRecord(**values))
    end_s = plan.makespan_s * SLOWER
    for mesh in plan.meshes:
        nothing = dict.fromkeys(("stage", "peer_stage", "peer_mesh", "edge", "microbatch"))
        slots.append(SlotRecord(mesh.name, "compute", "STEP", **nothing, start_s=end_s, end_s=end_s + 0.002))
    return slots


@contextlib.contextmanager
def _serve(settings: Settings) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(control_plane_app(settings, cluster=NoCluster()), log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive(), "the application")
    assert thread.is_alive(), "the application did not start"
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=100)
