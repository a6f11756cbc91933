"""A control plane that is woken all the time still belongs to those who ask it, not to its rounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from service.orchestrator.loop import Orchestrator
from service.orchestrator.ray.clusters import build_clusters
from service.settings.settings import Settings
from service.store.database import Database
from tests.polling import until_async
from tests.service.fake_cluster import FakeCluster


@pytest.fixture
async def orchestrator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Orchestrator]:
    database, cluster = Database(f"sqlite+aiosqlite:///{tmp_path / 'store.db'}"), FakeCluster()
    await database.start()
    monkeypatch.setattr("service.orchestrator.loop.TICK_S", 60.0)
    settings = Settings()
    yield Orchestrator(settings, database, build_clusters(settings, {"default": cluster}, refresh_s=600))
    await database.close()


async def test_rounds_leave_most_of_the_time_however_often_they_are_woken(
    orchestrator: Orchestrator, monkeypatch: pytest.MonkeyPatch
):
    clock, rounds_s, rests_s = SimpleNamespace(now_s=1000.0), [], []
    rest = orchestrator._rest

    async def slow_round() -> None:
        took_s = 0.001 * (1 + len(rounds_s))
        clock.now_s += took_s
        orchestrator.wake()  # as a submission meanwhile does
        rounds_s.append(took_s)
        if len(rounds_s) == 6:
            orchestrator.stop()

    async def noted_rest(seconds: float) -> None:
        rests_s.append(seconds)
        await rest(seconds)

    monkeypatch.setattr("service.orchestrator.loop.time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(orchestrator, "round", slow_round)
    monkeypatch.setattr(orchestrator, "_rest", noted_rest)
    async with asyncio.timeout(60):
        await orchestrator.run()
    assert len(rests_s) == len(rounds_s) == 6
    assert all(took_s < 0.5 * (took_s + rest_s) for took_s, rest_s in zip(rounds_s, rests_s, strict=True))


async def test_a_rest_is_kept_when_somebody_wakes_the_orchestrator_and_ends_with_it_or_for_what_is_urgent(
    orchestrator: Orchestrator, monkeypatch: pytest.MonkeyPatch
):
    rounds = []

    async def short_round() -> None:
        rounds.append(len(rounds))

    monkeypatch.setattr("service.orchestrator.loop._REST_FACTOR", 1e9)
    monkeypatch.setattr(orchestrator, "round", short_round)
    running = asyncio.create_task(orchestrator.run())
    await until_async(lambda: rounds)
    for _ in range(20):  # turns of the event loop, in each of which a round would begin
        orchestrator.wake()
        await asyncio.sleep(0)
    assert rounds == [0]
    orchestrator.wake_at_once()
    await until_async(lambda: rounds == [0, 1])
    orchestrator.stop()
    async with asyncio.timeout(30):
        await running
