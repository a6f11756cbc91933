"""How long one request can keep everybody else from being answered: bodies made to hurt."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

import aiohttp

from tests.benchmarks.service.server import Served
from tests.service.conftest import job_body

_KIB = 1024


@dataclass(frozen=True)
class Hostile:
    name: str
    path: str
    body: bytes


def bodies() -> list[Hostile]:
    """Each as large as its route takes, or far larger."""
    many = ",".join(["0"] * 15_000_000).encode()  # 30 MB of small values
    spec = job_body()
    args = {f"a{n}": n for n in range(9_000)}
    long_job = json.dumps({**spec, "model": {**spec["model"], "args": args}}).encode()
    blank = json.dumps({**spec, "name": "x" * (255 * _KIB - 1000)}).encode()
    stages = [{"name": f"s{n}", "mesh": f"m{n}", "forward_s": 1, "backward_input_s": 1} for n in range(1000)]
    plan = {
        "microbatches": 10**6,
        "meshes": [{"name": f"m{n}"} for n in range(1000)],
        "stages": stages,
        "edges": [],
    }
    wrong = json.dumps([{"a": []}] * 2000).encode()
    return [
        Hostile("30 MB of small values", "/api/v1/jobs", b'{"name": [' + many + b"]}"),
        Hostile("the same to plans", "/api/v1/plans", b'{"stages": [' + many + b"]}"),
        Hostile("lists 100,000 deep", "/api/v1/jobs", b"[" * 100_000 + b"]" * 100_000),
        Hostile("9,000 arguments", "/api/v1/jobs", long_job),
        Hostile("a name of 254 KiB", "/api/v1/jobs", blank),
        Hostile("10,000 values, 255 KiB", "/api/v1/jobs", b"[" + b",".join([b'"' + b"y" * 22 + b'"'] * 9_900) + b"]"),
        Hostile("1,000 stages x 10^6 microbatches", "/api/v1/plans", json.dumps(plan).encode()),
        Hostile("2,000 wrong stages", "/api/v1/plans", b'{"stages": ' + wrong + b"}"),
        Hostile("2,000 wrong meshes of a job", "/api/v1/jobs", b'{"resources": {"meshes": ' + wrong + b"}}"),
    ]  # fmt: skip


@dataclass(frozen=True)
class Blocked:
    """The longest that the loop did not turn, by the clock and in its own processor time; of 3 times the shortest
    by the clock, since other programs of the machine lengthen it."""

    wall_s: float
    cpu_s: float
    answered_s: float
    status: int | None


async def blocking(served: Served, body: Hostile) -> Blocked:
    """What one such request does to the server."""
    found = []
    for _ in range(3):
        await asyncio.sleep(0.3)
        served.told()
        begun, status = time.perf_counter(), None
        async with aiohttp.ClientSession(served.url, trust_env=False) as session:
            try:
                headers = {"Content-Type": "application/json"}
                async with session.post(body.path, data=body.body, headers=headers) as response:
                    await response.read()
                    status = response.status
            except aiohttp.ClientError:  # it hangs up on bodies that it does not read
                pass
        answered_s = time.perf_counter() - begun
        await asyncio.sleep(0.2)
        told = served.told()
        found.append(Blocked(told["blocked_wall_s"], told["blocked_cpu_s"], answered_s, status))
    return min(found, key=lambda one: one.wall_s)
