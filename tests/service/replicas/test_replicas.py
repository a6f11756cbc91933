"""Three control planes under load, one of them killed or frozen every few seconds: nothing twice, nothing lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from service.spec.states import JobState
from service.store.leases import read_lease_status
from tests.service.conftest import job_body
from tests.service.replicas.replica import LEASE_S, UNFENCED
from tests.service.replicas.world import Replicas, replicas, until

SECONDS = float(os.environ.get("SLOTLINE_KILL_TEST_S", "14"))
USERS = 2
SEED = int(os.environ.get("SLOTLINE_KILL_TEST_SEED", "0"))
postgresql = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


@dataclass
class Load:
    """Users of all replicas: what they submitted, cancelled and were told."""

    world: Replicas
    submitted: list[str] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    events: dict[str, list[tuple[int, str, str]]] = field(default_factory=dict)
    _followers: list[asyncio.Task[None]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def submit_until(self, enough: asyncio.Event) -> None:
        chance = self.world.chance
        while not enough.is_set():
            job_id = await self.submit_one()
            if len(self.submitted) % 5 == 1 or not self._followers:
                self._followers.append(asyncio.create_task(self._follow(job_id)))
            if chance.random() < 0.2:
                await asyncio.sleep(chance.random() / 2)
                if await self.world.ask("POST", f"/api/v1/jobs/{job_id}/cancel") is not None:
                    self.cancelled.add(job_id)
            await asyncio.sleep(chance.random() / 3)

    async def submit_one(self, *, urgent: bool = False) -> str:
        """An urgent one comes before all others, and takes half of the cluster for three seconds."""
        chance, number = self.world.chance, next(self._numbers)
        stages = 4 if urgent else chance.choice([1, 2, 4])
        steps = 20 if urgent else chance.randrange(1, 5)
        body = job_body(
            name=f"job-{number}",
            pipeline={"stages": stages},
            training={"steps": steps, "global_batch": 8, "microbatches": 4},
            priority=1000 if urgent else chance.randrange(100),
            queue="small" if stages < 4 and chance.random() < 0.3 else "default",
            retry={"infrastructure": 10},
        )
        key = {"Idempotency-Key": f"key-{number}"}
        job = await self.world.ask("POST", "/api/v1/jobs", json=body, headers=key)
        self.submitted.append(job["id"])
        return job["id"]

    async def followed(self) -> None:
        """Once every follower has seen the end of its job."""
        async with asyncio.timeout(400):
            await asyncio.gather(*self._followers)

    async def _follow(self, job_id: str) -> None:
        """As a browser does: from what it has seen on, at another replica whenever one falls away."""
        seen = self.events[job_id] = []
        while True:
            url = f"{self.world.chance.choice(self.world.urls)}/api/v1/jobs/{job_id}/events"
            headers = {"Accept": "text/event-stream", "Last-Event-ID": str(seen[-1][0] if seen else 0)}
            with suppress(httpx.HTTPError):
                async with self.world.client.stream("GET", url, headers=headers) as answer:
                    if answer.status_code == 204:
                        return
                    kind = ""
                    async for line in answer.aiter_lines():
                        name, _, value = line.partition(": ")
                        if name == "event":
                            kind = value
                        elif name == "data" and kind == "end":
                            return
                        elif name == "data" and value.startswith("{"):
                            said = json.loads(value)
                            seen.append((said["number"], said["kind"], said["message"]))
            await asyncio.sleep(0.1)


async def trouble(world: Replicas, load: Load, enough: asyncio.Event) -> Counter[str]:
    """Kill one of them every few seconds, mostly the one that orchestrates, or freeze it, or have it freeze where that
    does most harm; frozen ones wake when their lease is long over. For SECONDS, and until something came of it."""
    done, wakes = Counter[str](), dict[int, float]()
    next_at = time.monotonic()
    deadline = next_at + SECONDS
    while (
        time.monotonic() < deadline or done.total() < 3 or (await read_lease_status(world.database)).token < 3
    ):
        for one in world.all:
            if not one.frozen:
                wakes.pop(one.number, None)
            elif one.number not in wakes:  # by itself, with a decision in its hands
                done["froze at a start"] += 1
                wakes[one.number] = time.monotonic() + 2 * LEASE_S
                await asyncio.gather(*(load.submit_one(urgent=True) for _ in range(2)))
            elif time.monotonic() >= wakes[one.number]:
                one.signal(signal.SIGCONT)
        if time.monotonic() >= next_at and not wakes:
            leader = await world.leader()
            one = world.chance.choice(world.all)
            if leader is not None and world.chance.random() < 0.8:
                one = leader[0]
            what = world.chance.choice(["kill", "freeze", "freeze at a start", "freeze at a start"])
            if what == "kill":
                one.kill()
                one.start()
                done["killed"] += 1
            elif what == "freeze":
                one.signal(signal.SIGSTOP)
                wakes[one.number] = time.monotonic() + 2 * LEASE_S
                done["frozen"] += 1
            elif leader is not None:
                leader[0].signal(signal.SIGUSR1)
            next_at = time.monotonic() + 1.5
        await asyncio.sleep(0.05)
    enough.set()
    return done


async def wake_for_ever(world: Replicas) -> None:
    while True:
        for one in world.all:
            one.signal(signal.SIGCONT)
        await asyncio.sleep(0.5)


async def jobs(world: Replicas) -> dict[str, dict]:
    found: dict[str, dict] = {}
    token = None
    while True:
        page = await world.ask(
            "GET", "/api/v1/jobs", params={"limit": 100} | ({"page_token": token} if token else {})
        )
        found |= {job["id"]: job for job in page["items"]}
        if not (token := page.get("next_page_token")):
            return found


@pytest.mark.slow
@postgresql
@pytest.mark.timeout(600)
async def test_three_replicas_start_every_job_once_and_lose_none_though_one_is_always_in_trouble(
    database_url: str, tmp_path: Path
):
    planted = {UNFENCED: "1"} if UNFENCED in os.environ else {}
    async with replicas(3, database_url, tmp_path, seed=SEED, environment=planted) as world:
        world.ray.crashes = 0.1
        load, enough = Load(world), asyncio.Event()
        done, *_ = await asyncio.gather(
            trouble(world, load, enough), *(load.submit_until(enough) for _ in range(USERS))
        )
        waking = asyncio.create_task(wake_for_ever(world))
        ended_at, world.ray.step_s = time.monotonic(), 0.02

        async def over() -> dict[str, dict] | None:
            found = await jobs(world)
            return found if all(JobState(job["state"]).final for job in found.values()) else None

        found = await until(over, "every job to end")
        print(f"ended after {time.monotonic() - ended_at:.1f} s")
        await load.followed()
        waking.cancel()
        ray = world.ray
        logs = "\n".join(one.log.read_text() for one in world.all)
        terms = re.findall(r"orchestrates now \(term (\d+)\)", logs)
        print(f"{len(found)} jobs, {len(ray.drivers)} drivers, {dict(done)}, {len(terms)} terms")

        assert ray.wrong == []
        assert sorted(found) == sorted(load.submitted), "each that was answered, and no other"
        for job_id, job in found.items():
            started = ray.started(job_id)
            if job["state"] == "SUCCEEDED":
                assert len(started) == 1 + ray.crashed[job_id], (job, started)
            else:
                assert job["state"] == "CANCELLED" and job_id in load.cancelled, job
                assert len(started) <= 1 + ray.crashed[job_id], (job, started)
        assert {one.rpartition("-")[0] for one in [*ray.stopped, *ray.refused]} <= load.cancelled
        assert load.events and "Traceback" not in logs
        for job_id, seen in load.events.items():
            assert [number for number, *_ in seen] == list(range(1, len(seen) + 1)), job_id
            assert seen[-1][1] == "state" and found[job_id]["state"] in seen[-1][2]
        assert len(terms) == len(set(terms)), "each term is one's alone"


@pytest.mark.slow
@postgresql
async def test_a_leader_that_was_frozen_is_replaced_and_steps_down_when_it_wakes(
    database_url: str, tmp_path: Path
):
    async with replicas(2, database_url, tmp_path, seed=SEED) as world:
        world.ray.step_s = 0.5
        long = job_body(
            pipeline={"stages": 2}, training={"steps": 10_000, "global_batch": 8, "microbatches": 4}
        )

        async def submit(key: str) -> str:
            headers = {"Idempotency-Key": key}
            return (await world.ask("POST", "/api/v1/jobs", json=long, headers=headers))["id"]

        running = await submit("first")

        async def runs(job_id: str) -> bool:
            return (await world.ask("GET", f"/api/v1/jobs/{job_id}"))["state"] == "RUNNING"

        await until(lambda: runs(running), "the job to run")
        old, seen = await until(world.leader, "somebody to orchestrate")
        old.signal(signal.SIGSTOP)

        async def another() -> bool:
            now = await world.leader()
            return now is not None and now[1].token > seen.token

        await until(another, "another to orchestrate")
        later = await submit("second")
        await until(lambda: runs(later), "a job to start while one is frozen")
        old.signal(signal.SIGCONT)
        await until(lambda: _says(old, "steps down"), "it to see that it was replaced")
        await world.ready(old)
        await asyncio.sleep(2 * LEASE_S)
        lost = re.findall(r"\(term (\d+)\), steps down", old.log.read_text())
        assert lost.count(str(seen.token)) == 1, "one line, however much it had in hand"
        assert all("Traceback" not in one.log.read_text() for one in world.all)
        assert [one for one in (running, later) if not await runs(one)] == []
        assert sorted(world.ray.drivers) == sorted([f"{running}-1", f"{later}-1"])
        assert world.ray.stopped == [] and world.ray.wrong == []


async def _says(replica, words: str) -> bool:
    return words in replica.log.read_text()
