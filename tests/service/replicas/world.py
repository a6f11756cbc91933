"""Control planes as processes on one PostgreSQL and one stand-in for Ray; killed, frozen and started again."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from service.orchestrator.ray.local_ray import free_ports
from service.store.database import Database
from service.store.leases import LeaseStatus, read_lease_status
from tests.polling import until_async
from tests.service.replicas.ray_stand_in import RayStandIn, ask_any

ROOT = Path(__file__).parents[3]


@dataclass
class Replica:
    """One of the control planes; its port stays when it is started again."""

    number: int
    url: str
    log: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.service.replicas.replica"],
                cwd=ROOT,
                env=dict(self.environment),
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def frozen(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@dataclass
class Replicas:
    """All of them, the database that they share and the stand-in for Ray."""

    all: list[Replica]
    ray: RayStandIn
    database: Database
    client: httpx.AsyncClient
    chance: random.Random
    lost: list[str] = field(default_factory=list)

    @property
    def urls(self) -> list[str]:
        return [one.url for one in self.all]

    async def leader(self) -> tuple[Replica, LeaseStatus] | None:
        """Who has a lease that has not expired."""
        seen = await read_lease_status(self.database)
        if seen is None or seen.left_s <= 0:
            return None
        pid = int(seen.holder.rsplit("-", 2)[1])
        return next(((one, seen) for one in self.all if one.process and one.pid == pid), None)

    async def ready(self, replica: Replica) -> None:
        await until(lambda: self._is_ready(replica), f"{replica.url} to be ready")

    async def _is_ready(self, replica: Replica) -> bool:
        with suppress(httpx.HTTPError):
            return (await self.client.get(f"{replica.url}/readyz")).is_success
        return False

    async def ask(self, method: str, path: str, **kwargs: Any) -> Any:
        """An answer of any of them; None for a 409."""
        return await ask_any(self.client, self.urls, self.chance, method, path, **kwargs)


until = functools.partial(until_async, limit_s=400.0, every_s=0.05)
"""The limit is for what never comes, not for slow machines."""


@asynccontextmanager
async def replicas(
    number: int, database_url: str, folder: Path, *, seed: int, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Replicas]:
    """Started and ready; ended, also the frozen ones, with the context."""
    database = Database(database_url)
    await database.start()
    ports = free_ports(number)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    ray = RayStandIn(urls, capacity=8, quotas={"small": 2}, seed=seed)
    chance = random.Random(seed)
    async with ray.serve(), httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
        given = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("SLOTLINE_") and name != "RAY_ADDRESS"
        }
        settings = {
            "SLOTLINE_DATABASE_URL": database_url,
            "RAY_ADDRESS": ray.url,
            "SLOTLINE_PREEMPTION": "false",
            "SLOTLINE_QUEUES": '{"default": null, "small": 2}',
            "SLOTLINE_DATA_DIR": str(folder),
        }
        made = [
            Replica(
                n,
                url,
                folder / f"replica-{n}.log",
                {**given, **settings, **(environment or {}), "SLOTLINE_PORT": str(port)},
            )
            for n, (url, port) in enumerate(zip(urls, ports, strict=True))
        ]
        world = Replicas(made, ray, database, client, chance)
        try:
            for one in made:
                one.start()
            for one in made:
                await world.ready(one)
            yield world
        finally:
            for one in made:
                with suppress(ProcessLookupError):
                    one.signal(signal.SIGCONT)
                one.kill()
            await database.close()
