"""ProfileTask: layer and link costs of a job that does not train, from the store or measured by one Ray worker.

Each kind of job (by its costs digest, owner and cluster) is measured once at a time, few at once on a cluster. Jobs
with secrets are not profiled: secrets are given to attempts only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from service.orchestrator.decisions.attempt_lifecycle import (
    RAY_RESOURCES,
    AcceleratorKind,
    Capacity,
    device_of,
)
from service.orchestrator.ray.clusters import Clusters, NamedCluster, working_dir_uri
from service.orchestrator.ray.jobs_api import ClusterError, RayJobSubmission
from service.orchestrator.tasks.runner import ENVIRONMENT_LIMIT, Task
from service.spec.job import stored_field
from service.spec.principals import ANONYMOUS
from service.spec.resources import stored_mesh_sizes
from service.store.database import Sessions, run_to_completion, utc_now
from service.store.measurements import MEASURED_BY_ONE_WORKER, find_costs, record_costs, scoped_costs_digest
from service.store.secrets import spec_environment, spec_secret_names
from worker.contract.costs import PROFILE_REQUEST_VARIABLE, PROFILE_RESULT_MARK, costs_digest
from worker.contract.job import gpu_share
from worker.contract.tasks import task_result

PROFILE_LIMIT_S = 1200.0
"""Limit of one measurement, the wait for its accelerator included: large models take minutes to build."""


class ProfilingFailedError(ValueError):
    """The job could not be measured; the message says why, as an attempt would have."""


@dataclass(frozen=True)
class ProfileRequest:
    """A job of `owner` (JSON of a JobSpec), to be measured with each number of microbatches of `microbatch_counts`."""

    spec: Mapping[str, Any]
    microbatch_counts: Sequence[int]
    owner: str = ANONYMOUS

    def digest(self, cluster: str) -> str:
        """The digest under which the store has the costs of this kind of job on `cluster`."""
        return scoped_costs_digest(costs_digest(self.spec), self.owner, cluster)


@dataclass(frozen=True)
class MeasuredCosts:
    """Measured costs (JSON of a driver's request for a plan), and who measured them."""

    costs: Mapping[str, Any]
    measured_by: str


class ProfileTask(Task[ProfileRequest, MeasuredCosts]):
    """Measures the costs of a job by one worker on an accelerator of its own; they are kept in the store."""

    name = "profile"
    concurrency = 4
    queue_limit = 64
    limit_s = PROFILE_LIMIT_S
    error = ProfilingFailedError

    def __init__(self, database: Sessions, clusters: Clusters) -> None:
        super().__init__(database)
        self._clusters = clusters

    def key(self, request: ProfileRequest, cluster: str) -> str:
        return request.digest(cluster)

    async def stored_result(self, request: ProfileRequest, cluster: str) -> MeasuredCosts | None:
        if (costs := await self._find(request, cluster)) is not None:
            return costs
        if names := spec_secret_names(request.spec):
            raise ProfilingFailedError(
                f"its secrets ({', '.join(names)}) are given to attempts only: submit it, or plan it without them"
            )
        return None

    async def perform(self, request: ProfileRequest, cluster: NamedCluster) -> None:
        if await run_to_completion(self._find(request, cluster.name)) is not None:
            return  # the last run ended just when its costs were looked for
        named = "the Ray cluster" if len(self._clusters) == 1 else f"the Ray cluster {cluster.name}"
        if (capacity := cluster.watcher.capacity) is None:
            raise ProfilingFailedError(f"{named} does not answer: ask again when it does")
        kind = usual_kind(request.spec, capacity)
        if kind is None:
            raise ProfilingFailedError(
                f"{named} has no accelerators of type {request.spec['resources']['accelerator']}: ask again when it has, "
                "or ask without resources.accelerator"
            )
        submission = await self._submission(request.spec, kind, cluster)
        costs = await self.run_in_ray(cluster, submission, read_profile_result)
        await run_to_completion(self._record(request.digest(cluster.name), costs, kind.accelerator_type))

    def busy_message(self, runs: int) -> str:
        return f"{runs} jobs are being measured or wait for it"

    def timeout_message(self, began: bool) -> str:
        return (
            f"one worker {'measured' if began else 'waited for a free accelerator'} for more than {self.limit_s:g} s "
            "and was ended: ask again when the cluster is less busy, or submit the job, which measures as it starts"
        )

    def no_result_message(self, detail: str) -> str:
        return f"the worker that measured the job ended without a result ({detail})"

    async def _find(self, request: ProfileRequest, cluster: str) -> MeasuredCosts | None:
        async with self._database.read() as session:
            row = await find_costs(session, request.digest(cluster), request.microbatch_counts)
        return None if row is None else MeasuredCosts(*row)

    async def _record(self, digest: str, costs: dict[str, Any], accelerator_type: str | None) -> None:
        async with self._database.write() as session:
            await record_costs(
                session,
                digest,
                costs,
                measured_by=MEASURED_BY_ONE_WORKER,
                accelerator_type=accelerator_type,
                at=utc_now(),
            )

    async def _submission(
        self, spec: Mapping[str, Any], kind: AcceleratorKind, cluster: NamedCluster
    ) -> RayJobSubmission:
        request = json.dumps({"job": spec, "device": kind.device})
        if len(request) > ENVIRONMENT_LIMIT:
            raise ClusterError(
                f"the job's specification has {len(request)} characters, more than the {ENVIRONMENT_LIMIT} that can "
                "be handed to one worker: shorten its arguments, or submit the job, which plans it too"
            )
        workers_per_gpu = cluster.drivers.workers_per_gpu
        environment = {
            **spec_environment(spec),
            PROFILE_REQUEST_VARIABLE: request,
            "SLOTLINE_WORKERS_PER_GPU": str(workers_per_gpu),
        }
        return replace(
            self.submission(cluster, environment, pip=stored_field(spec, "code", "pip", [])),
            working_dir=await working_dir_uri(self._database, spec, cluster),
            resources={RAY_RESOURCES[kind.device]: 1 if kind.device == "cpu" else gpu_share(workers_per_gpu)},
            avoid=cluster.watcher.nodes_without([kind]),
        )


def usual_kind(spec: Mapping[str, Any], capacity: Capacity) -> AcceleratorKind | None:
    """The accelerators that a job (JSON of a JobSpec) would have: where it asks for no type, the type of which there are
    most; None where there are none of the type that it asks for."""
    resources = spec["resources"]
    gang = sum(stored_mesh_sizes(resources))
    wanted = resources.get("accelerator")
    device = device_of(resources["device"], gang, capacity, accelerator_type=wanted)
    there = {each: part.in_all(device) for each, part in capacity.by_type.items()}
    if wanted is not None:
        return AcceleratorKind(device, wanted) if there.get(wanted) else None
    return AcceleratorKind(device, max(there, key=there.__getitem__))


def read_profile_result(output: str) -> dict[str, Any] | None:
    """The costs in the output of worker/tasks/profile.py; None where it has not come to its end.

    Raises ProfilingFailedError with what it says of its failure.
    """
    answer = task_result(output, PROFILE_RESULT_MARK)
    if answer is None:
        return None
    if "failed" in answer:
        raise ProfilingFailedError(f"{answer['failed']}: {answer['message']}")
    return answer["costs"]
