"""The Ray clusters by name: client, watched nodes and capacity, and the settings that drivers get.

Each cluster is polled by itself, so that one that is away holds up no other's jobs; no other module asks Ray for
its nodes. A name that the settings dropped while an attempt still has it is a cluster whose every call fails with the
reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import shlex
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from service.orchestrator.decisions.attempt_lifecycle import (
    RAY_RESOURCES,
    AcceleratorKind,
    Capacity,
    RayJob,
)
from service.orchestrator.ray.jobs_api import (
    Cluster,
    ClusterError,
    ClusterUnreachableError,
    RayCluster,
    RayJobSubmission,
    RayNode,
    ResourceUse,
)
from service.settings.clusters import DEFAULT_CLUSTER
from service.settings.settings import Settings
from service.spec.job import PACKAGE_PREFIX, stored_field
from service.spec.states import NodeMark, mark_in_force
from service.store.database import Sessions
from service.store.files import PackagesUnreachableError, PackageUnreadableError, read_package
from worker.contract.forkserver.spawn import through_server
from worker.contract.job import (
    accelerator_type_of,
    is_placement_group_name,
    job_of_keeper,
    placement_group_name,
)

logger = logging.getLogger(__name__)
_RETRY_INTERVAL_S = 0.5
_RELEASE_INTERVAL_S, _RELEASE_LIMIT_S = 0.25, 5.0
_SHARE_ROUNDING = 0.01  # a third of a GPU is 0.3333 for Ray
CLUSTER_REFRESH_S = 2.0
"""Time between two looks at a cluster's nodes: what a job that needs a new node waits longer at most."""


@dataclass(frozen=True)
class DriverSettings:
    """Settings of drivers of a cluster: their Python, the address of Ray (None: the one that Ray finds), and the control
    plane's URL (None: the common one)."""

    python: str = "python"
    forks: bool = False
    """Its nodes have a fork server (worker/contract/forkserver)."""
    ray_address: str | None = None
    url: str | None = None
    workers_per_gpu: int = 1
    may_scale: bool = True
    """The cluster may have an autoscaler; a local Ray has none."""

    def entrypoint(self, module: str, *, pip: Sequence[str] = ()) -> str:
        """The words of a shell that run a module there, from the fork server where there is one: packages of a job's own
        (`pip`) come with an interpreter that has nothing imported."""
        return f"{self.interpreter(pip) or shlex.quote(self.python)} -m {module}"

    def interpreter(self, pip: Sequence[str] = ()) -> str | None:
        """The words of a shell that run Python from the fork server; None where there is none to use."""
        return through_server(self.python) if self.forks and not pip else None

    @property
    def ray_environment(self) -> dict[str, str]:
        """The variables by which a process on the cluster finds its Ray."""
        return {"SLOTLINE_DRIVER_RAY_ADDRESS": self.ray_address} if self.ray_address else {}


@dataclass(frozen=True)
class NamedCluster:
    """A cluster with its name, its watcher, and the settings of its drivers."""

    name: str
    ray: Cluster
    watcher: ClusterWatcher
    drivers: DriverSettings = DriverSettings()

    def left_out(self, marks: Sequence[NodeMark]) -> dict[str, NodeMark]:
        """The mark in force on each living node that takes no work, by Ray's node id."""
        now, own = datetime.now(UTC), [mark for mark in marks if mark.cluster == self.name]
        return {
            node.id: mark
            for node in self.watcher.snapshot.nodes
            if (mark := mark_in_force(own, node.name, node.id, now=now)) is not None
        }


class Clusters:
    """All clusters of the settings, the default one first; `of` also answers for names that the settings dropped."""

    def __init__(self, known: Sequence[NamedCluster]) -> None:
        self._known = {cluster.name: cluster for cluster in known}

    def __iter__(self) -> Iterator[NamedCluster]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    @property
    def names(self) -> list[str]:
        return list(self._known)

    def of(self, name: str) -> NamedCluster:
        """The cluster of this name. An unknown one is a cluster that is away, and every call says why."""
        if (known := self._known.get(name)) is not None:
            return known
        missing = _MissingCluster(name, self.names)
        watcher = ClusterWatcher(missing, refresh_s=CLUSTER_REFRESH_S, workers_per_gpu=1)
        watcher.snapshot = replace(watcher.snapshot, error=missing.why)
        return NamedCluster(name, missing, watcher)

    def capacities(
        self, attempts: Mapping[str, Collection[str]], marks: Sequence[NodeMark] = ()
    ) -> dict[str, Capacity | None]:
        """Capacity of each cluster; None for a cluster that does not answer.

        `attempts` (by cluster) hold accelerators of ours; everything else that is held counts as held by others. Nodes
        that `marks` keep work off are left out.
        """
        left_out = self.left_out(marks)
        return {
            cluster.name: cluster.watcher.capacity_without(
                left_out[cluster.name], attempts.get(cluster.name, ())
            )
            for cluster in self
        }

    def left_out(self, marks: Sequence[NodeMark]) -> dict[str, dict[str, NodeMark]]:
        """The mark in force on each living node that takes no work, by cluster and Ray's node id."""
        return {cluster.name: cluster.left_out(marks) for cluster in self}

    def on_change(self, listener: Callable[[], None]) -> None:
        for cluster in self:
            cluster.watcher.on_change(listener)

    def start(self) -> None:
        """Poll all clusters from now on."""
        for cluster in self:
            cluster.watcher.start()

    async def stop(self) -> None:
        await asyncio.gather(*(cluster.watcher.stop() for cluster in self))

    async def close(self) -> None:
        await asyncio.gather(*(cluster.ray.close() for cluster in self))

    async def refresh(self) -> None:
        """Poll all clusters once, concurrently."""
        await asyncio.gather(*(cluster.watcher.refresh() for cluster in self))


def build_clusters(
    settings: Settings,
    clusters: Mapping[str, Cluster],
    *,
    refresh_s: float,
    default: DriverSettings = DriverSettings(),
) -> Clusters:
    """Clusters by name, with their settings; `default` is for drivers of the cluster of that name."""
    known = []
    for name, ray in clusters.items():
        drivers = default if name == DEFAULT_CLUSTER else driver_settings(settings, name)
        watcher = ClusterWatcher(ray, refresh_s=refresh_s, workers_per_gpu=drivers.workers_per_gpu)
        known.append(NamedCluster(name, ray, watcher, drivers))
    return Clusters(known)


def ray_cluster(settings: Settings, name: str) -> RayCluster:
    """The client of the cluster of this name in the settings."""
    if name == DEFAULT_CLUSTER:
        assert settings.ray_address is not None, "a local Ray has an address of its own"
        return RayCluster(settings.ray_address, token=settings.ray_token)
    cluster = settings.clusters[name]
    return RayCluster(
        cluster.address,
        token=cluster.ray_token,
        token_setting=f"the token of {name} in SLOTLINE_CLUSTERS",
    )


def driver_settings(settings: Settings, name: str) -> DriverSettings:
    """Settings of drivers of this cluster of SLOTLINE_CLUSTERS."""
    cluster = settings.clusters[name]
    return DriverSettings(
        python=cluster.driver_python,
        ray_address=cluster.driver_ray_address,
        url=cluster.driver_url,
        workers_per_gpu=cluster.workers_per_gpu,
    )


@dataclass(frozen=True)
class ClusterSnapshot:
    """State of the cluster at the last poll; `error` says why `nodes` is empty or old."""

    nodes: tuple[RayNode, ...] = ()
    in_use: tuple[ResourceUse, ...] = ()
    seen_at: float | None = None
    error: str | None = "not asked yet"

    @property
    def available(self) -> bool:
        return self.error is None


class ClusterWatcher:
    """Renews `snapshot` every `refresh_s` between `start` and `stop`, sooner while the cluster is away, and when an attempt
    has just ended."""

    def __init__(self, cluster: Cluster, *, refresh_s: float, workers_per_gpu: int) -> None:
        self.snapshot = ClusterSnapshot()
        self._cluster, self._refresh_s, self._workers_per_gpu = cluster, refresh_s, workers_per_gpu
        self._listeners: list[Callable[[], None]] = []
        self._refreshing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._release_until = 0.0

    @property
    def capacity(self) -> Capacity | None:
        """Accelerators by device; None while the cluster does not answer."""
        capacity = self.capacity_without({}, ())
        return None if capacity is None else Capacity(capacity.total, types=capacity.types)

    def capacity_without(
        self, left_out: Mapping[str, NodeMark], attempts: Collection[str]
    ) -> Capacity | None:
        """Accelerators by device of all nodes but those that are left out, by id. `others` are held outside `attempts`,
        by other programs on the same Ray and by attempts that have ended but not released them yet. None while the cluster
        does not answer."""
        if not self.snapshot.available:
            return None
        ours = {placement_group_name(attempt) for attempt in attempts}
        nodes, others = self.snapshot.nodes, self._held_by_kind(left_out, lambda use: use.name not in ours)

        def part(accelerator_types: Collection[str | None]) -> Capacity:
            total, without = dict.fromkeys(RAY_RESOURCES, 0), dict.fromkeys(RAY_RESOURCES, 0)
            marks = dict[str, None]()
            for node in nodes:
                for kind, number in self.kinds(node).items():
                    if number and kind.accelerator_type in accelerator_types:
                        (without if node.id in left_out else total)[kind.device] += number
                        if node.id in left_out:
                            marks[str(left_out[node.id])] = None
            held = dict.fromkeys(RAY_RESOURCES, 0)
            for kind, number in others.items():
                if kind.accelerator_type in accelerator_types:
                    held[kind.device] += number
            return Capacity(total, held, without, tuple(marks))

        types = dict.fromkeys(
            kind.accelerator_type for node in nodes for kind, number in self.kinds(node).items() if number
        )
        whole = part({*types, *(kind.accelerator_type for kind in others)})
        if {*types} <= {None}:
            return whole
        return replace(whole, types={one: part({one}) for one in types})

    def kinds(self, node: RayNode) -> dict[AcceleratorKind, int]:
        """The workers that a node has room for, by device and type."""
        numbers = dict[AcceleratorKind, int]()
        for device, number in self.accelerators(node).items():
            accelerator_type = accelerator_type_of(RAY_RESOURCES[device], node.labels, node.resources)
            numbers[AcceleratorKind(device, accelerator_type)] = number
        return numbers

    def nodes_without(self, kinds: Collection[AcceleratorKind]) -> tuple[str, ...]:
        """Ray's ids of the nodes without an accelerator of these kinds. Ray itself finds a type only where it detected the
        accelerators: where a label tells it, no resource does."""
        return tuple(
            node.id
            for node in self.snapshot.nodes
            if not any(number and kind in kinds for kind, number in self.kinds(node).items())
        )

    def accelerators(self, node: RayNode) -> dict[str, int]:
        """The workers that a node has room for, by device."""
        return {
            device: int(node.resources.get(name, 0) * self._shares[device])
            for device, name in RAY_RESOURCES.items()
        }

    def used_by_node(self) -> dict[str, dict[str, int]]:
        """Accelerators that are held, by whomever, by device, of each living node (its id)."""
        uses: dict[str, list[Mapping[str, float]]] = {node.id: [] for node in self.snapshot.nodes}
        for use in self.snapshot.in_use:
            if use.node_id in uses:
                uses[use.node_id].append(use.resources)
        return {node_id: self._held(resources) for node_id, resources in uses.items()}

    def strangers(self, left_out: Collection[str]) -> Counter[AcceleratorKind]:
        """Accelerators by device and type that are held by no attempt of any Slotline, but on nodes that are left out. An
        attempt that has just ended, and counts among the others of a capacity, gives back what it holds."""
        return self._held_by_kind(left_out, lambda use: not is_placement_group_name(use.name))

    @property
    def jobs_with_keepers(self) -> set[str]:
        """The jobs, of whomever, of which keepers hold copies in the memory of nodes."""
        return {job for use in self.snapshot.in_use if (job := job_of_keeper(use.name)) is not None}

    def _held_by_kind(
        self, left_out: Collection[str], counts: Callable[[ResourceUse], bool]
    ) -> Counter[AcceleratorKind]:
        """Accelerators held by uses that count, but on nodes that are left out."""
        kinds = {node.id: {kind.device: kind for kind in self.kinds(node)} for node in self.snapshot.nodes}
        held = Counter[AcceleratorKind]()
        for use in self.snapshot.in_use:
            if use.resources and counts(use) and use.node_id not in left_out:
                own = kinds.get(use.node_id, {})
                for device, number in self._held([use.resources]).items():
                    held[own.get(device) or AcceleratorKind(device, None)] += number
        return held

    def _held(self, uses: Sequence[Mapping[str, float]]) -> dict[str, int]:
        return {
            device: sum(
                math.ceil(resources.get(name, 0) * self._shares[device] - _SHARE_ROUNDING)
                for resources in uses
            )
            for device, name in RAY_RESOURCES.items()
        }

    @property
    def _shares(self) -> dict[str, int]:
        return {"cpu": 1, "cuda": self._workers_per_gpu}

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` when nodes came or went, when a cluster that was away is back, and when accelerators of an attempt
        that has just ended may be free."""
        self._listeners.append(listener)

    def start(self) -> None:
        self._refreshing = asyncio.create_task(self._refresh_for_ever())

    async def stop(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    def expect_release(self) -> None:
        """Look often for a while: an attempt has ended, and Ray gives its accelerators back a moment later."""
        self._release_until = time.monotonic() + _RELEASE_LIMIT_S
        self._hurry.set()

    async def refresh(self) -> None:
        """Read the cluster's nodes and the resources in use."""
        try:
            nodes, in_use = await self._cluster.nodes(), await self._cluster.resources_in_use()
        except ClusterError as error:
            if self.snapshot.error != str(error):
                logger.warning("%s", error)
            self.snapshot = replace(self.snapshot, error=str(error))
            return
        before, self.snapshot = self.snapshot, ClusterSnapshot(tuple(nodes), tuple(in_use), time.time(), None)
        released = time.monotonic() < self._release_until and self.snapshot.in_use != before.in_use
        if not before.available or self.snapshot.nodes != before.nodes or released:
            for listener in self._listeners:
                listener()

    async def _refresh_for_ever(self) -> None:
        while True:
            try:
                await self.refresh()
            except Exception:
                logger.exception("the cluster's answer was not understood")
            self._hurry.clear()
            if time.monotonic() < self._release_until:
                await asyncio.sleep(min(_RELEASE_INTERVAL_S, self._refresh_s))
            elif not self.snapshot.available:
                await asyncio.sleep(_RETRY_INTERVAL_S)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), self._refresh_s)


async def working_dir_uri(database: Sessions, spec: Mapping[str, Any], cluster: NamedCluster) -> str | None:
    """The URI of the code.working_dir of a job (JSON of a JobSpec), from which Ray unpacks it; None for an empty one.

    Uploads a package of the store to the cluster. Raises ClusterError where the package is gone, ClusterUnreachableError
    where its place does not answer.
    """
    place = stored_field(spec, "code", "working_dir", "")
    if not place.startswith(PACKAGE_PREFIX):
        return place or None
    digest = place.removeprefix(PACKAGE_PREFIX)
    try:
        content = await read_package(database, digest)
    except PackageUnreadableError as error:
        raise ClusterError(str(error)) from None
    except PackagesUnreachableError as error:
        raise ClusterUnreachableError(str(error)) from None
    if content is None:
        raise ClusterError(f"package {digest} is gone from the store: upload it again")
    return await cluster.ray.upload_package(f"_ray_pkg_{digest[:32]}.zip", content)


class _MissingCluster:
    """Cluster that the settings do not name: every call raises ClusterUnreachableError with the reason."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.why = (
            f"there is no cluster {name} any more (SLOTLINE_CLUSTERS; there are: {', '.join(known)}): "
            "name it there again, with its address"
        )

    async def submit(self, submission: RayJobSubmission) -> None:
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

    async def nodes(self) -> list[RayNode]:
        raise ClusterUnreachableError(self.why)

    async def resources_in_use(self) -> list[ResourceUse]:
        raise ClusterUnreachableError(self.why)

    async def upload_package(self, name: str, content: bytes) -> str:
        raise ClusterUnreachableError(self.why)

    async def close(self) -> None:
        pass
