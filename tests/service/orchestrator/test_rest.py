"""A control plane that is woken all the time still belongs to those who ask it, not to its rounds."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from service.orchestrator.loop import Orchestrator
from service.orchestrator.ray.clusters import build_clusters
from service.settings.settings import Settings
from service.store.database import Database
from tests.service.fake_cluster import FakeCluster


async def test_rounds_leave_most_of_the_time_however_often_they_are_woken(tmp_path: Path, monkeypatch):
    database, cluster = Database(f"sqlite+aiosqlite:///{tmp_path / 'store.db'}"), FakeCluster()
    await database.start()
    settings = Settings(tick_s=60)
    orchestrator = Orchestrator(
        settings, database, build_clusters(settings, {"default": cluster}, refresh_s=600)
    )
    rounds, ends = [], []

    async def slow_round() -> None:
        begun = time.monotonic()
        await asyncio.sleep(0.02)
        orchestrator.wake()  # as a submission meanwhile does
        rounds.append(time.monotonic() - begun)
        ends.append(time.monotonic())
        if len(rounds) == 6:
            orchestrator.stop()

    monkeypatch.setattr(orchestrator, "round", slow_round)
    begun = time.monotonic()
    async with asyncio.timeout(60):
        await orchestrator.run()
    inside, whole = sum(rounds[:5]), ends[4] - begun
    assert inside + rounds[5] < 0.5 * (ends[5] - begun), f"{inside:.2f} s of {whole:.2f} s were rounds"
    await database.close()


async def test_a_rest_ends_with_the_orchestrator(tmp_path: Path, monkeypatch):
    database, cluster = Database(f"sqlite+aiosqlite:///{tmp_path / 'store.db'}"), FakeCluster()
    await database.start()
    settings = Settings(tick_s=60)
    orchestrator = Orchestrator(
        settings, database, build_clusters(settings, {"default": cluster}, refresh_s=600)
    )
    monkeypatch.setattr("service.orchestrator.loop._REST_FACTOR", 1e9)
    running = asyncio.create_task(orchestrator.run())
    await asyncio.sleep(0.1)
    orchestrator.stop()
    async with asyncio.timeout(30):
        await running
    await database.close()
