"""Accelerators of an attempt that has ended are seen to be free at once, not at the next look at the cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from service.orchestrator.ray.clusters import ClusterWatcher
from service.orchestrator.ray.jobs_api import ResourceUse
from tests.polling import until_async
from tests.service.fake_cluster import FakeCluster

HELD = ResourceUse("slotline-job-1-1", {"slotline_worker": 4.0})


class Counted(FakeCluster):
    """Counts how often it was looked at."""

    looks = 0

    async def resources_in_use(self) -> list[ResourceUse]:
        self.looks += 1
        return await super().resources_in_use()


@pytest.fixture
async def watched() -> AsyncIterator[tuple[Counted, ClusterWatcher, list[str]]]:
    """A cluster that is looked at once an hour, and who was told of it."""
    cluster, told = Counted(), []
    cluster.others = [HELD]
    watcher = ClusterWatcher(cluster, refresh_s=3600.0, workers_per_gpu=1)
    watcher.start()
    await until_async(lambda: cluster.looks == 1, "the first look")
    watcher.on_change(lambda: told.append("changed"))
    yield cluster, watcher, told
    await watcher.stop()


async def test_what_an_attempt_gives_back_is_told_as_soon_as_ray_has_it(watched, monkeypatch):
    cluster, watcher, told = watched
    monkeypatch.setattr("service.orchestrator.ray.clusters._RELEASE_INTERVAL_S", 0.01)
    watcher.expect_release()
    await until_async(lambda: cluster.looks > 3, "looks while it is still held")
    assert told == []
    cluster.others = []
    await until_async(lambda: told == ["changed"], "the news")
    assert watcher.capacity_without({}, ()).others == {"cpu": 0, "cuda": 0}


async def test_after_a_while_it_is_looked_at_as_seldom_as_ever(watched, monkeypatch):
    cluster, watcher, _ = watched
    monkeypatch.setattr("service.orchestrator.ray.clusters._RELEASE_INTERVAL_S", 0.01)
    monkeypatch.setattr("service.orchestrator.ray.clusters._RELEASE_LIMIT_S", 0.05)
    watcher.expect_release()
    await until_async(lambda: cluster.looks > 2, "looks")
    await until_async(lambda: watcher._hurry._waiters, "the hour's wait to begin")
