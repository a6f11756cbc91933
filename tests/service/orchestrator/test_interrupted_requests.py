"""A network that is cut between the leader and PostgreSQL: another takes over, and healthy jobs go on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from sqlalchemy import make_url

from service.spec.states import AttemptState
from service.store.database import Database
from service.store.leases import read_lease_status
from tests.polling import until_async
from tests.service.orchestrator.test_loop import World

LEASE_S, SILENCE_LIMIT_S = 2.0, 5.0


@dataclass
class Wire:
    """Between a client and PostgreSQL; while it is `cut` nothing passes, and nobody is told."""

    whole: asyncio.Event = field(default_factory=asyncio.Event)
    _carrying: set[asyncio.Task[None]] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def laid(self, folder: str) -> AsyncIterator[str]:
        """The folder of a socket that leads to the one in `folder`."""
        self.whole.set()
        place = Path("/tmp") / f"slotline-wire-{uuid.uuid4().hex[:8]}"  # a socket's path must be short
        place.mkdir(mode=0o700)

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_unix_connection(f"{folder}/.s.PGSQL.5432")
            for one, other in ((reader, there[1]), (there[0], writer)):
                task = asyncio.create_task(self._carry(one, other))
                self._carrying.add(task)
                task.add_done_callback(self._carrying.discard)

        server = await asyncio.start_unix_server(accept, place / ".s.PGSQL.5432")
        try:
            yield str(place)
        finally:
            self.whole.set()
            server.close()
            for task in self._carrying:
                task.cancel()
            await asyncio.gather(*self._carrying, return_exceptions=True)
            shutil.rmtree(place, ignore_errors=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                await self.whole.wait()
                writer.write(piece)
                await writer.drain()
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_leader_that_is_cut_off_from_the_database_is_replaced_and_no_healthy_job_is_stopped(
    database: Database,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr("service.orchestrator.attempts.watch._STOP_EVERY_S", 0.0)
    monkeypatch.setattr("service.orchestrator.loop.LEASE_S", LEASE_S)
    monkeypatch.setattr("service.orchestrator.loop.TICK_S", 0.05)
    wire, running = Wire(), list[asyncio.Task[None]]()
    url = make_url(database_url)
    async with wire.laid(str(url.query["host"])) as place:
        far = Database(str(url.set(query={"host": place})))
        cut_off, other = World(far), World(database)
        other.cluster = cut_off.cluster
        other.restart()
        cluster = cut_off.cluster
        for world in (cut_off, other):
            attempts = world.orchestrator.attempts
            attempts.limits = replace(attempts.limits, silence_limit_s=SILENCE_LIMIT_S)
            await world.watcher.refresh()
        driving = asyncio.create_task(asyncio.sleep(0))
        try:
            running.append(asyncio.create_task(cut_off.orchestrator.run()))

            async def cut_off_leads() -> bool:
                return cut_off.orchestrator.lease.token is not None

            await until_async(cut_off_leads, every_s=0.05)
            job_id = await other.submit(pipeline={"stages": 2})

            async def started() -> bool:
                return f"{job_id}-1" in cluster.submissions

            await until_async(started, every_s=0.05)

            async def drive() -> None:
                """The driver, which reaches a replica that is not cut off."""
                for sequence in range(1, 10**9):
                    await other.report(f"{job_id}-1", sequence, state=AttemptState.RUNNING)
                    await asyncio.sleep(0.3)

            driving = asyncio.create_task(drive())
            first = await read_lease_status(database)
            wire.whole.clear()

            async def other_leads() -> bool:
                return other.orchestrator.lease.token is not None

            began = time.monotonic()
            running.append(asyncio.create_task(other.orchestrator.run()))
            await until_async(other_leads, every_s=0.05)
            took_s = time.monotonic() - began
            later = await other.submit(pipeline={"stages": 2})

            async def later_started() -> bool:
                return f"{later}-1" in cluster.submissions

            await until_async(later_started, every_s=0.05)
            await asyncio.sleep(SILENCE_LIMIT_S)  # longer than a driver may be silent
            with caplog.at_level(logging.WARNING, "service.store.leases"):
                wire.whole.set()

                async def stepped_down() -> bool:
                    return any("steps down" in record.getMessage() for record in caplog.records)

                await until_async(stepped_down, every_s=0.05)
                await asyncio.sleep(0.5)
            told = [record.getMessage() for record in caplog.records]
            assert sum(f"(term {first.token}), steps down" in line for line in told) == 1, told
            assert first.holder == cut_off.orchestrator.lease.holder
            assert (await read_lease_status(database)).token > first.token
            assert cluster.stopped == [] and sorted(cluster.submissions) == sorted(
                [f"{job_id}-1", f"{later}-1"]
            )
            assert (await other.job(job_id)).state == "RUNNING"
            print(f"replaced after {took_s:.1f} s with a lease of {LEASE_S:g} s")
        finally:
            wire.whole.set()
            for world in (cut_off, other):
                world.orchestrator.stop()
            driving.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await far.close()
