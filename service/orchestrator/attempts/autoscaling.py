"""Tells Ray's autoscalers what the queues need, so that a cluster grows for a gang that waits and shrinks behind it.

`decisions.cluster_demand` says what is needed. A request is sent by a short process on Ray's head (`python -m worker.tasks
scale`), since Ray takes one inside the cluster only, and finds out there whether the cluster has an autoscaler: no
setting says so. It is sent where the need has differed for a while from what Ray was told, so that a job that starts at
once asks for nothing, and again after Ray's head was started anew, which forgets it. A row of the store says where a
request may stand: whichever control plane has the lease later withdraws it. Nothing waits for a request, and one that
fails is a warning, a metric, and tried again.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic as _monotonic
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from service.observability.instruments import AUTOSCALER_REQUESTS
from service.orchestrator.decisions.attempt_lifecycle import (
    RAY_RESOURCES,
    AcceleratorKind,
    Capacity,
    Holder,
    Wait,
    WaitingJob,
    resource_text,
)
from service.orchestrator.decisions.cluster_demand import ClusterDemand, WaitingGang, cluster_demand
from service.orchestrator.ray.clusters import Clusters, ClusterWatcher, NamedCluster
from service.orchestrator.ray.jobs_api import ClusterError
from service.orchestrator.tasks.runner import (
    NoTaskResultError,
    TaskTimeoutError,
    run_ray_task,
    task_submission,
)
from service.spec.principals import QuotaScope
from service.spec.states import BY_RAY, NodeMark
from service.store.database import Sessions
from service.store.leases import clusters_with_requests, set_request_stands
from worker.contract.job import gpu_share
from worker.contract.reasons import Reason
from worker.contract.tasks import (
    SCALE_REQUEST_VARIABLE,
    Bundles,
    ScaleRequest,
    ScaleResult,
    read_scale_result,
)

logger = logging.getLogger(__name__)
SETTLE_S = 10.0
"""Time for which the need differs before Ray is told: some looks at the nodes and rounds."""
PAUSE_S = 30.0
"""Time between two requests to one cluster at least: each is a process on Ray's head."""
REPEAT_S = 600.0
"""A request that stands is made again after this time, and what the autoscaler did not take is tried again."""
_LIMIT_S = 180.0


@dataclass
class _ClusterRequest:
    """The request for accelerators that a cluster was sent, and its demand. Times are of the monotonic clock."""

    stands: dict[AcceleratorKind, int] | None = field(default_factory=dict)
    """Accelerators in all of the request that Ray has; None where it may have one that is not known."""
    demand: ClusterDemand = field(default_factory=ClusterDemand)
    asked: Mapping[str, WaitingGang] = field(default_factory=dict)
    """Gangs by job for which the cluster is to grow."""
    ceilings: dict[AcceleratorKind, int] = field(default_factory=dict)
    head: str | None = None
    differs_since: float | None = None
    begun_at: float = -math.inf
    sending: bool = False


class Autoscaling:
    """The requests to the autoscalers of all clusters, of the control plane that has the lease."""

    def __init__(self, database: Sessions, clusters: Clusters) -> None:
        self._database, self._clusters = database, clusters
        self.forget()

    def forget(self) -> None:
        """Begin a term: other control planes may have made requests since the last one."""
        self._requests = defaultdict[str, _ClusterRequest](_ClusterRequest)
        self.recalled = False

    async def recall(self, session: AsyncSession) -> None:
        """Read where requests of earlier terms may stand; once a term."""
        for name in set(await clusters_with_requests(session)) & set(self._clusters.names):
            self._requests[name].stands = None
        self.recalled = True

    @property
    def is_idle(self) -> bool:
        """True where nothing was needed at the last look, and Ray has no request of ours: nothing is to be withdrawn."""
        return all(request.stands == {} and not request.demand for request in self._requests.values())

    def update(
        self,
        turns: Sequence[WaitingJob],
        holders: Sequence[Holder],
        starting: Collection[str],
        *,
        capacities: Mapping[str, Capacity | None],
        quotas: Mapping[QuotaScope, int | None],
        left_out: Mapping[str, Mapping[str, NodeMark]],
    ) -> None:
        """Decide anew what each cluster that answers needs, for the jobs that wait in the order of their `turns`."""
        for cluster in self._clusters:
            capacity = capacities.get(cluster.name)
            if capacity is None or not cluster.drivers.may_scale:
                continue
            request = self._requests[cluster.name]
            self._age(request, cluster)
            request.demand = cluster_demand(
                turns,
                holders,
                cluster=cluster.name,
                capacity=capacity,
                others=_no_gangs(cluster.watcher, left_out.get(cluster.name, {})),
                quotas=quotas,
                ceilings=request.ceilings,
                starting=starting if request.stands != {} else (),
            )
            if request.demand.totals == request.stands:
                request.asked = {gang.job_id: gang for gang in request.demand.grown_for(capacity)}

    def _age(self, request: _ClusterRequest, cluster: NamedCluster) -> None:
        """Forget what Ray has forgotten, and what was found out long ago."""
        head = next((node.id for node in cluster.watcher.snapshot.nodes if node.is_head), None)
        if head is not None and head != request.head:
            if request.head is not None:
                logger.info("cluster %s has another head: its autoscaler is told anew", cluster.name)
                request.stands, request.asked = {}, {}
                request.ceilings.clear()
            request.head = head
        if _monotonic() - request.begun_at >= REPEAT_S and not request.sending:
            if request.stands:
                request.stands = None
            if (
                not request.asked
            ):  # else one that is too large would cost it the nodes that have come, and are idle
                request.ceilings.clear()

    def due(self) -> list[Coroutine[Any, Any, None]]:
        """The requests to be made now, to be awaited beside the rounds."""
        now, due = _monotonic(), list[Coroutine[Any, Any, None]]()
        for name, request in self._requests.items():
            cluster = self._clusters.of(name)
            if request.demand.totals == request.stands or not cluster.watcher.snapshot.available:
                request.differs_since = None
                continue
            if request.differs_since is None:
                request.differs_since = now
            settled = now - request.differs_since >= SETTLE_S
            if settled and now - request.begun_at >= PAUSE_S and not request.sending:
                request.begun_at, request.sending = now, True
                due.append(self._send(cluster, request))
        return due

    async def _send(self, cluster: NamedCluster, request: _ClusterRequest) -> None:
        demand = request.demand
        try:
            async with self._database.write() as session:  # refused where another control plane has the lease
                await set_request_stands(session, cluster.name, True)
            request.stands = None
            result = await _run(cluster, demand)
            self._note(request, cluster, demand, result)
            if not request.stands:
                async with self._database.write() as session:
                    await set_request_stands(session, cluster.name, False)
        except (ClusterError, NoTaskResultError, TaskTimeoutError) as error:
            AUTOSCALER_REQUESTS.labels(cluster.name, "failed").inc()
            logger.warning(
                "the autoscaler of cluster %s was not told what is needed: %s", cluster.name, error
            )
        finally:
            request.sending = False

    def _note(
        self, request: _ClusterRequest, cluster: NamedCluster, demand: ClusterDemand, result: ScaleResult
    ) -> None:
        accepted = demand.first(result.accepted)
        request.stands = accepted.totals if result.stands else {}
        if not result.autoscaler:
            request.ceilings.update(dict.fromkeys((gang.kind for gang in demand.gangs), 0))
            outcome = "no autoscaler"
        elif result.accepted < len(demand.gangs):
            kind = demand.gangs[result.accepted].kind
            request.ceilings[kind] = accepted.totals.get(kind, 0)
            outcome = "partly" if result.accepted else "refused"
        else:
            outcome = "accepted" if demand else "withdrawn"
        AUTOSCALER_REQUESTS.labels(cluster.name, outcome).inc()
        logger.info(
            "the autoscaler of cluster %s was asked for %s in all, with %d of %d gangs that wait: %s",
            cluster.name,
            demand.totals,
            result.accepted,
            len(demand.gangs),
            outcome,
        )

    def explained(self, waits: Iterable[Wait]) -> list[Wait]:
        """The waits, with those said to be granted nodes for which the cluster is to grow."""
        asked = {
            job_id: gang for request in self._requests.values() for job_id, gang in request.asked.items()
        }
        return [_explained(wait, asked.get(wait.job_id)) for wait in waits]


def _no_gangs(watcher: ClusterWatcher, left_out: Mapping[str, NodeMark]) -> Counter[AcceleratorKind]:
    """Accelerators by device and type that the autoscaler counts and no gang gets. A node that Ray drains it leaves out."""
    accelerators = watcher.strangers(left_out)
    for node in watcher.snapshot.nodes:
        if node.id in left_out and left_out[node.id].by != BY_RAY:
            accelerators.update(watcher.kinds(node))
    return accelerators


def _explained(wait: Wait, gang: WaitingGang | None) -> Wait:
    if gang is None or wait.reason not in (Reason.CLUSTER_TOO_SMALL, Reason.WAITS_FOR_ACCELERATORS):
        return wait
    said = wait.message
    if wait.reason is Reason.CLUSTER_TOO_SMALL:  # whose message says to add nodes
        wanted = resource_text(*gang.kind)
        said = f"waits for {gang.accelerators} accelerators of {wanted}, which the cluster has not"
    message = f"{said}; Ray's autoscaler was asked for more nodes"
    return replace(wait, reason=Reason.WAITS_FOR_ACCELERATORS, message=message)


async def _run(cluster: NamedCluster, demand: ClusterDemand) -> ScaleResult:
    """Make one request. Raises ClusterError, NoTaskResultError and TaskTimeoutError."""
    request = _scale_request(demand, cluster.drivers.workers_per_gpu)
    environment = {SCALE_REQUEST_VARIABLE: request.to_json(), **cluster.drivers.ray_environment}
    submission = task_submission(cluster, "scale", environment)
    return await run_ray_task(cluster.ray, submission, read_scale_result, limit_s=_LIMIT_S)


def _scale_request(demand: ClusterDemand, workers_per_gpu: int) -> ScaleRequest:
    """One bundle for each worker, as the placement group of an attempt has them."""

    def bundles(kind: AcceleratorKind, number: int) -> Bundles:
        amount = gpu_share(workers_per_gpu) if kind.device == "cuda" else 1.0
        return Bundles(RAY_RESOURCES[kind.device], amount, number, kind.accelerator_type)

    return ScaleRequest(
        held=tuple(bundles(kind, number) for kind, number in demand.held.items() if number),
        gangs=tuple(bundles(gang.kind, gang.accelerators) for gang in demand.gangs),
    )
