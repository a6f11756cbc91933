"""Plans a job from its measurements: reads JobCosts, derives what may be chosen, and answers the plan as JSON.

The search over stages, microbatches, placement and cut is joint.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from service.scheduler.job.cores import SharedCores, nodes_with_shared_cores
from service.scheduler.job.cut import PipelineSetup, Recompute
from service.scheduler.job.heterogeneous import MeshParallelism, heterogeneous_profile, uniform_profile
from service.scheduler.job.joint import JobPlan, PlanRequest, longest_update_s, plan_jointly
from service.scheduler.job.network import CrossMeshAllReduce, network_per_worker_pair
from service.scheduler.job.reduces import plan_gradient_reduces
from service.scheduler.problem.spec import MeshSpec, NetworkSpec, SpecError
from service.scheduler.programs.messages import check_messages
from worker.contract.costs import UpdateCosts
from worker.contract.job import Job, stage_counts
from worker.contract.profile import LayerProfile, OptimizerState, Zero1OptimizerState


@dataclass(frozen=True)
class JobCosts:
    """The measurements of a job from which it is planned.

    `profiles` are the costs of its layers by number of microbatches, `memory_bytes` the limit of each mesh, `shared`
    the nodes whose workers share processor cores, `action_s` the engine's own seconds for each action. `mesh_profiles`
    are the profiles of heterogeneous meshes, by (microbatches, workers, tensor parallelism); `nodes` the node of each
    (mesh, worker).
    """

    profiles: Mapping[int, LayerProfile]
    network: NetworkSpec
    memory_bytes: Mapping[str, int]
    optimizer: OptimizerState
    update: UpdateCosts
    shared: Sequence[SharedCores] = ()
    action_s: float = 0.0
    mesh_profiles: Mapping[tuple[int, int, int], LayerProfile] = field(default_factory=dict)
    nodes: Mapping[tuple[str, int], str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], job: Job) -> JobCosts:
        """The costs in a driver's request for a plan; a single profile is for the job's own microbatches."""
        profiles = {
            item["microbatches"]: LayerProfile.from_json(item["profile"])
            for item in data.get("profiles") or ()
        }
        if data.get("profile") is not None:
            count = data.get("microbatches") or job.training.microbatches
            if not isinstance(count, int):
                raise SpecError("the request for a plan has a profile, and says not of how many microbatches")
            profiles[count] = LayerProfile.from_json(data["profile"])
        network = NetworkSpec.model_validate(data.get("network") or {})
        if network.contention == "none":  # the programs of a job serialise each pair, so its plan must too
            network = network.model_copy(update={"contention": "link"})
        return cls(
            profiles=dict(sorted(profiles.items())),
            network=network,
            memory_bytes={item["mesh"]: item["memory_bytes"] for item in data.get("memory") or ()},
            optimizer=OptimizerState(**data.get("optimizer") or {}),
            update=UpdateCosts.from_json(data.get("update") or {}),
            shared=nodes_with_shared_cores(
                (worker["mesh"], worker.get("node"), worker.get("cores"))
                for worker in data.get("workers") or ()
            ),
            action_s=data.get("action_s") or 0.0,
            mesh_profiles={
                (item["microbatches"], item["workers"], item.get("tensor", 1)): LayerProfile.from_json(
                    item["profile"]
                )
                for item in data.get("mesh_profiles") or ()
            },
            nodes={
                (worker["mesh"], worker["worker"]): worker.get("place") or worker["node"]
                for worker in data.get("workers") or ()
                if worker.get("node") is not None and worker.get("worker") is not None
            },
        )


def plan_job(
    job: Job,
    costs: JobCosts,
    *,
    kept_microbatches: int | None = None,
    budget_s: float = 10.0,
    expired: Callable[[], bool] | None = None,
) -> JobPlan:
    """The plan of the shortest step among all that the job leaves open.

    The number of microbatches of an earlier attempt, `kept_microbatches`, stays where it still fits, so that losses go
    on as they began: it decides how sums round, and which samples a layer sees together. Raises SpecError or CutError
    where nothing fits.
    """
    counts = costs.profiles
    if not counts:
        raise SpecError("no profile of the job's layers was sent: nothing can be planned")
    if kept_microbatches in counts:
        try:
            return _plan_with_microbatches(job, costs, [kept_microbatches], budget_s, expired)
        except SpecError:
            if len(counts) == 1:
                raise
    return _plan_with_microbatches(job, costs, counts, budget_s, expired)


def _plan_with_microbatches(
    job: Job,
    costs: JobCosts,
    counts: Iterable[int],
    budget_s: float,
    expired: Callable[[], bool] | None,
) -> JobPlan:
    profiles = {count: measured_profile(job, costs, count) for count in counts}
    names = [f"m{index}" for index in range(job.meshes)]
    sizes, parallelism = dict(zip(names, job.mesh_sizes, strict=True)), _mesh_parallelism(job, costs)
    between = (
        costs.network if job.heterogeneous else network_per_worker_pair(costs.network, parallelism, sums=True)
    )
    across = CrossMeshAllReduce(between, sizes, uniform=not job.heterogeneous)
    request = PlanRequest(
        profiles,
        PipelineSetup(
            meshes=[MeshSpec(name=name, memory_bytes=job_memory_bytes(job, costs, name)) for name in names],
            network=network_per_worker_pair(costs.network, parallelism),
            schedule=job.pipeline.schedule,
            overlap=job.pipeline.overlap,
            recompute=job_recompute(job),
            optimizer=job_optimizer_state(job, costs),
            action_s=costs.action_s,
        ),
        stages=stage_counts(job, len(next(iter(profiles.values())).layers)),
        cut="auto" if job.pipeline.cut == "auto" else list(job.pipeline.cut),
        update=costs.update,
        across=across,
        shared=costs.shared,
    )
    planned = plan_jointly(request, budget_s=budget_s, expired=expired)
    reshardings = planned.partition.reshardings
    if job.heterogeneous or reshardings:  # no message of a worker may wait for another in a circle
        programs = {name: planned.plan.program(name) for name in planned.plan.programs}
        forward_only = {
            index
            for index, edge in enumerate(planned.partition.spec.edges)
            if edge.backward_s == 0.0 and (index, True) not in reshardings
        }
        check_messages(programs, reshardings, sizes, forward_only)
    workers = dict(zip(names, job.dp_sizes, strict=True))
    profile = profiles[planned.partition.spec.microbatches]
    return plan_gradient_reduces(planned, profile, costs.update, workers, across)


def job_memory_bytes(job: Job, costs: JobCosts, mesh: str) -> int | None:
    """The memory limit of a mesh as measured, else as the job sets it for drivers that report none."""
    limit = job.resources.memory_per_worker
    return costs.memory_bytes.get(mesh, limit if isinstance(limit, int) else None)


def measured_profile(job: Job, costs: JobCosts, count: int) -> LayerProfile:
    """The profile of `count` microbatches; with that of each mesh and its parallelism, where tensors do not go in pairs of
    workers."""
    if not job.heterogeneous:
        return uniform_profile(costs.profiles[count], _mesh_parallelism(job, costs))
    kinds = list(zip(job.mesh_sizes, job.tensors, strict=True))
    if missing := sorted(kind for kind in {*kinds} if (count, *kind) not in costs.mesh_profiles):
        size, tensor = missing[0]
        parallel = f", tensor parallel over {tensor}," if tensor > 1 else ""
        raise SpecError(
            f"no profile was sent of a mesh of {size} workers{parallel} with {count} microbatches: heterogeneous meshes "
            "are planned with the costs of each"
        )
    return heterogeneous_profile(
        [costs.mesh_profiles[count, *kind] for kind in kinds], _mesh_parallelism(job, costs)
    )


def _mesh_parallelism(job: Job, costs: JobCosts) -> list[MeshParallelism]:
    return [
        MeshParallelism(
            f"m{mesh}",
            size // tensor,
            tensor,
            tuple(costs.nodes.get((f"m{mesh}", worker), "here") for worker in range(size)),
        )
        for mesh, (size, tensor) in enumerate(zip(job.mesh_sizes, job.tensors, strict=True))
    ]


def job_optimizer_state(job: Job, costs: JobCosts) -> OptimizerState:
    """The bytes of optimizer state; with ZeRO-1 each worker of a mesh keeps its part."""
    if not job.sharded:
        return costs.optimizer
    sizes = {name: job.dp_sizes[int(name[1:])] for name in job.sharded}
    return Zero1OptimizerState(**asdict(costs.optimizer), workers=sizes)


def job_recompute(job: Job) -> Recompute:
    """The stages that recompute, as the job says."""
    recompute = job.pipeline.recompute
    return recompute if isinstance(recompute, str) else list(recompute)


def job_plan_json(planned: JobPlan) -> dict[str, Any]:
    """The JSON that the control plane answers, and saves as the job's plan."""
    return {
        "begins": list(planned.partition.stage_starts),
        "spec": planned.partition.spec.model_dump(mode="json"),
        "plan": planned.plan.model_dump(mode="json"),
        "step_s": planned.step_s,
        "update_s": longest_update_s(planned.update) if planned.update_s is None else planned.update_s,
        "update": [asdict(mesh) for mesh in planned.update],
        "slowdown": planned.slowdown,
        **_reshardings_json(planned),
    }


def _reshardings_json(planned: JobPlan) -> dict[str, Any]:
    """The JSON of transfers that do not go in pairs of workers; empty where there is none."""
    plans = planned.partition.reshardings
    if not plans:
        return {}
    return {
        "reshardings": [
            {"edge": edge, "backward": backward, "plan": plan.to_json()}
            for (edge, backward), plan in plans.items()
        ]
    }
