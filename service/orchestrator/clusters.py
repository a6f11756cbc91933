"""The Ray clusters by their names: each with its own calls, its own picture, and what its drivers are told.

One that is away holds up nobody else's jobs: each is asked by itself. A name that the settings do not have any more,
and that an attempt still has, is a cluster that answers nothing but that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from service.cluster_settings import DEFAULT, ClustersAndQueues
from service.orchestrator.cluster_view import ClusterWatcher
from service.orchestrator.decide import Capacity, RayJob
from service.orchestrator.ray_jobs import Cluster, ClusterUnreachableError, Held, Node, RayCluster, Submission

REFRESH_S = 2.0


@dataclass(frozen=True)
class DriverSettings:
    """What drivers of a cluster are given: their Python, where they join Ray, where they report (None: where all do)."""

    python: str = "python"
    ray_address: str | None = None
    url: str | None = None
    workers_per_gpu: int = 1


@dataclass(frozen=True)
class NamedCluster:
    """A cluster, what was last seen of it, and what its drivers are given."""

    name: str
    ray: Cluster
    watcher: ClusterWatcher
    drivers: DriverSettings = DriverSettings()


class Clusters:
    """All clusters of the settings, the default one first; `of` also answers for names that are not among them."""

    def __init__(self, known: Sequence[NamedCluster]) -> None:
        self._known = {one.name: one for one in known}

    def __iter__(self) -> Iterator[NamedCluster]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    @property
    def names(self) -> list[str]:
        return list(self._known)

    def of(self, name: str) -> NamedCluster:
        """The cluster of this name. One that is not there is away, and every call says why."""
        found = self._known.get(name)
        if found is not None:
            return found
        missing = _MissingCluster(name, self.names)
        watcher = ClusterWatcher(missing, refresh_s=REFRESH_S, workers_per_gpu=1)
        watcher.snapshot = replace(watcher.snapshot, error=missing.why)
        return NamedCluster(name, missing, watcher)

    def capacities(self, attempts: Mapping[str, Collection[str]]) -> dict[str, Capacity | None]:
        """The accelerators of each cluster, where others than `attempts` (by cluster, those that hold some) hold
        some; None for one that does not answer."""
        found = dict[str, Capacity | None]()
        for one in self:
            capacity = one.watcher.capacity
            others = one.watcher.others(attempts.get(one.name, ()))
            found[one.name] = None if capacity is None else replace(capacity, others=others)
        return found

    def on_change(self, listener: Callable[[], None]) -> None:
        for one in self:
            one.watcher.on_change(listener)

    def start(self) -> None:
        """Look at all of them from now on."""
        for one in self:
            one.watcher.start()

    async def stop(self) -> None:
        await asyncio.gather(*(one.watcher.stop() for one in self))

    async def close(self) -> None:
        await asyncio.gather(*(one.ray.close() for one in self))

    async def refresh(self) -> None:
        """Look at all of them once, beside each other."""
        await asyncio.gather(*(one.watcher.refresh() for one in self))


def ray_cluster(settings: ClustersAndQueues, name: str) -> RayCluster:
    """How the cluster of this name in the settings is called."""
    if name == DEFAULT:
        assert settings.ray_address is not None, "a local Ray has an address of its own"
        return RayCluster(settings.ray_address, timeout_s=settings.ray_timeout_s, token=settings.ray_token)
    given = settings.clusters[name]
    return RayCluster(
        given.address,
        timeout_s=given.timeout_s,
        token=given.ray_token,
        token_setting=f"the token of {name} in SLOTLINE_CLUSTERS",
    )


def driver_settings(settings: ClustersAndQueues, name: str, *, python: str = "python") -> DriverSettings:
    """What drivers of the cluster of this name are given; `python` where the default cluster's has no setting."""
    if name == DEFAULT:
        return DriverSettings(
            python=settings.driver_python or python,
            ray_address=settings.driver_ray_address,
            workers_per_gpu=settings.workers_per_gpu,
        )
    given = settings.clusters[name]
    return DriverSettings(
        python=given.driver_python,
        ray_address=given.driver_ray_address,
        url=given.driver_url,
        workers_per_gpu=given.workers_per_gpu,
    )


def named_clusters(
    settings: ClustersAndQueues, clusters: Mapping[str, Cluster], *, refresh_s: float, python: str = "python"
) -> Clusters:
    """These clusters as the settings have them; `python` runs drivers of the default one, unless that is set."""
    known = []
    for name, ray in clusters.items():
        drivers = driver_settings(settings, name, python=python)
        watcher = ClusterWatcher(ray, refresh_s=refresh_s, workers_per_gpu=drivers.workers_per_gpu)
        known.append(NamedCluster(name, ray, watcher, drivers))
    return Clusters(known)


class _MissingCluster:
    """Answers nothing, and says why."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.why = (
            f"there is no cluster {name} any more (SLOTLINE_CLUSTERS; there are: {', '.join(known)}): "
            "name it there again, with its address"
        )

    async def submit(self, submission: Submission) -> None:
        raise ClusterUnreachableError(self.why)

    async def job(self, submission_id: str) -> RayJob:
        raise ClusterUnreachableError(self.why)

    async def stop(self, submission_id: str) -> None:
        raise ClusterUnreachableError(self.why)

    async def log(self, submission_id: str) -> str:
        raise ClusterUnreachableError(self.why)

    async def read_log(self, submission_id: str, *, follow: bool = False) -> AsyncIterator[bytes]:
        raise ClusterUnreachableError(self.why)
        yield b""  # an iterator that ends before it begins

    async def nodes(self) -> list[Node]:
        raise ClusterUnreachableError(self.why)

    async def held(self) -> list[Held]:
        raise ClusterUnreachableError(self.why)

    async def upload_package(self, name: str, content: bytes) -> str:
        raise ClusterUnreachableError(self.why)

    async def close(self) -> None:
        pass
