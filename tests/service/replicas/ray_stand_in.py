"""Ray's HTTP API as the control plane asks it, with drivers that speak to the control plane and train nothing.

It keeps its own account of what was started and of who held what, and of whatever should not have been: the tests ask
this, and not the control plane. Like Ray it starts one driver for a submission id, and holds no gang back.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from worker.contract.job import placement_group_name

AGAIN_S = 0.05
SOON_S = 0.5
"""So long an answer is waited for before another is asked; twice as long each time, for machines that are busy."""


@dataclass
class Driver:
    """One that was started: its Ray job, and what it does."""

    id: str
    token: str
    status: str = "RUNNING"
    holds: int = 0
    task: asyncio.Task[None] | None = None

    @property
    def job_id(self) -> str:
        return self.id.rpartition("-")[0]


@dataclass
class RayStandIn:
    """`replicas` are the addresses of the control planes, any of which a driver may be answered by."""

    replicas: Sequence[str]
    capacity: int
    quotas: dict[str, int]
    seed: int
    step_s: float = 0.15
    crashes: float = 0.0
    """So many of the drivers end without a word."""
    drivers: dict[str, Driver] = field(default_factory=dict)
    crashed: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)
    """Drivers whose first question was answered with 409."""
    stopped: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """What should never have been, in words."""
    url: str = ""
    _queue_of: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def started(self, job_id: str) -> list[str]:
        return [driver.id for driver in self.drivers.values() if driver.job_id == job_id]

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        routes = [
            Route("/api/jobs/", self._submit, methods=["POST"]),
            Route("/api/jobs/{id}", self._job),
            Route("/api/jobs/{id}/stop", self._stop, methods=["POST"]),
            Route("/api/version", lambda _: JSONResponse({"ray_version": "2.60.0"})),
            Route("/api/v0/nodes", self._nodes),
            Route("/api/v0/placement_groups", self._groups),
            Route("/api/v0/actors", lambda _: _listed([])),
        ]
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_config=None, lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            async with httpx.AsyncClient(timeout=2.0, trust_env=False) as self._client:
                try:
                    yield
                finally:
                    tasks = [driver.task for driver in self.drivers.values() if driver.task is not None]
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            server.should_exit = True
            await serving

    # What Ray answers

    async def _submit(self, request: Request) -> Response:
        body = await request.json()
        id_ = body["submission_id"]
        if id_ in self.drivers:
            return PlainTextResponse(f"Job with submission_id {id_} already exists", status_code=500)
        driver = Driver(id_, body["runtime_env"]["env_vars"]["SLOTLINE_ATTEMPT_TOKEN"])
        others = [other for other in self.started(driver.job_id) if self.drivers[other].status == "RUNNING"]
        if others:
            self.wrong.append(f"{id_} was started while {others} ran")
        self.drivers[id_] = driver
        driver.task = asyncio.create_task(self._drive(driver))
        return JSONResponse({"submission_id": id_})

    async def _job(self, request: Request) -> Response:
        driver = self.drivers.get(request.path_params["id"])
        return (
            Response(status_code=404)
            if driver is None
            else JSONResponse({"status": driver.status, "message": None})
        )

    async def _stop(self, request: Request) -> Response:
        driver = self.drivers.get(request.path_params["id"])
        if driver is not None and driver.status == "RUNNING":
            self.stopped.append(driver.id)
            driver.task.cancel()
            driver.status, driver.holds = "STOPPED", 0
        return JSONResponse({"stopped": driver is not None})

    async def _nodes(self, _: Request) -> Response:
        node = {"node_id": "n", "node_ip": "127.0.0.1", "state": "ALIVE"}
        return _listed([{**node, "resources_total": {"slotline_worker": float(self.capacity)}}])

    async def _groups(self, _: Request) -> Response:
        return _listed(
            [
                {
                    "name": placement_group_name(driver.id),
                    "bundles": [{"unit_resources": {"slotline_worker": float(driver.holds)}}],
                }
                for driver in self.drivers.values()
                if driver.holds
            ]
        )

    # What drivers do

    async def _drive(self, driver: Driver) -> None:
        given = await self._ask(driver, "GET", "")
        if given is None:
            self.refused.append(driver.id)
            driver.status = "FAILED"
            return
        job, sequence = given["job"], 1
        self._queue_of[driver.job_id] = job["queue"]
        self._take(driver, job["pipeline"]["stages"])
        answer = await self._report(driver, sequence, state="RUNNING")
        crashes = self._random.random() < self.crashes
        for step in range(1, job["training"]["steps"] + 1):
            if answer != "continue":
                break
            await asyncio.sleep(self.step_s)
            if crashes:
                driver.status, driver.holds = "FAILED", 0
                self.crashed[driver.job_id] += 1
                return
            sequence += 1
            answer = await self._report(driver, sequence, steps=[{"step": step, "loss": 1.0 / step}])
        driver.holds = 0
        final = {"continue": "SUCCEEDED", "cancel": "CANCELLED", "stop": "FAILED"}.get(answer)
        if final is not None:  # None: it was told that somebody else has the job
            reason = {"reason": "PREEMPTED"} if final == "FAILED" else {}
            await self._report(driver, sequence + 1, state=final, **reason)
        driver.status = "SUCCEEDED"

    def _take(self, driver: Driver, accelerators: int) -> None:
        driver.holds = accelerators
        running = [one for one in self.drivers.values() if one.holds]
        if (held := sum(one.holds for one in running)) > self.capacity:
            self.wrong.append(f"{held} of {self.capacity} are held once {driver.id} has its own")
        queue = self._queue_of[driver.job_id]
        held = sum(one.holds for one in running if self._queue_of[one.job_id] == queue)
        if held > self.quotas.get(queue, held):
            self.wrong.append(f"{held} of the quota of {queue} are held once {driver.id} has its own")

    async def _report(self, driver: Driver, sequence: int, **fields: Any) -> str | None:
        answer = await self._ask(driver, "POST", "/reports", json={"sequence": sequence, **fields})
        return None if answer is None else answer["command"]

    async def _ask(self, driver: Driver, method: str, path: str, **kwargs: Any) -> Any:
        """Any replica's answer; None where the control plane wants no more of the attempt."""
        return await ask_any(
            self._client,
            self.replicas,
            self._random,
            method,
            f"/api/v1/attempts/{driver.id}{path}",
            headers={"Authorization": f"Bearer {driver.token}"},
            **kwargs,
        )


async def ask_any(
    client: httpx.AsyncClient,
    urls: Sequence[str],
    chance: random.Random,
    method: str,
    path: str,
    **kwargs: Any,
) -> Any:
    """The JSON of one's answer, asking another whenever one does not give any; None for a 409."""
    timeout_s = SOON_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            url = f"{chance.choice(urls)}{path}"
            response = await client.request(method, url, timeout=timeout_s, **kwargs)
            if response.status_code == 409:
                return None
            if response.status_code < 500:
                return response.raise_for_status().json()
        timeout_s = min(2 * timeout_s, 20.0)
        await asyncio.sleep(AGAIN_S)


def _listed(rows: list[Any]) -> Response:
    return JSONResponse({"data": {"result": {"result": rows}}})
