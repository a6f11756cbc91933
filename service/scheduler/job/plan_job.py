"""Plans a job from its measurements: reads JobCosts, derives what may be chosen, and answers the plan as JSON.

The search over stages, microbatches, placement and cut is joint.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from service.scheduler.job.cores import SharedCores, nodes_with_shared_cores
from service.scheduler.job.heterogeneous import MeshParallelism, heterogeneous_profile, uniform_profile
from service.scheduler.job.joint import JobPlan, longest_update_s, plan_jointly
from service.scheduler.job.network import CrossMeshAllReduce, network_per_worker_pair
from service.scheduler.job.recompute import Recompute
from service.scheduler.job.reduces import plan_gradient_reduces
from service.scheduler.problem.spec import MeshSpec, NetworkSpec, SpecError
from service.scheduler.programs.messages import check_messages
from worker.contract.costs import UpdateCosts
from worker.contract.job import Job, stage_counts
from worker.contract.profile import LayerProfile, OptimizerState, Zero1OptimizerState


@dataclass(frozen=True)
class JobCosts:
    """What was measured of a job: its layers at each number of microbatches, its network, the bytes that each
    mesh may hold, what its optimizer keeps and takes, which workers share processor cores, and what the engine
    itself takes for each action. `of_meshes` are the profiles of meshes of unlike sizes, by number of microbatches, of
    workers and of those that share matrices; `nodes` where each worker runs, or would."""

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
        found = {
            one["microbatches"]: LayerProfile.from_json(one["profile"]) for one in data.get("profiles") or ()
        }
        if data.get("profile") is not None:
            count = data.get("microbatches") or job.training.microbatches
            if not isinstance(count, int):
                raise SpecError("the request for a plan has a profile, and says not of how many microbatches")
            found[count] = LayerProfile.from_json(data["profile"])
        network = NetworkSpec.model_validate(data.get("network") or {})
        if network.contention == "none":  # the programs of a job serialise each pair: so must its plan
            network = network.model_copy(update={"contention": "link"})
        return cls(
            profiles=dict(sorted(found.items())),
            network=network,
            memory_bytes={one["mesh"]: one["memory_bytes"] for one in data.get("memory") or ()},
            optimizer=OptimizerState(**data.get("optimizer") or {}),
            update=UpdateCosts.from_json(data.get("update") or {}),
            shared=nodes_with_shared_cores(
                (one["mesh"], one.get("node"), one.get("cores")) for one in data.get("workers") or ()
            ),
            action_s=data.get("action_s") or 0.0,
            mesh_profiles={
                (one["microbatches"], one["workers"], one.get("tensor", 1)): LayerProfile.from_json(
                    one["profile"]
                )
                for one in data.get("mesh_profiles") or ()
            },
            nodes={
                (one["mesh"], one["worker"]): one.get("place") or one["node"]
                for one in data.get("workers") or ()
                if one.get("node") is not None and one.get("worker") is not None
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

    `kept_microbatches`, those of an earlier attempt, are kept where they still fit, so that losses go on as they
    began: the number of microbatches is what rounds, and what layers that mix a batch see. Raises SpecError or
    CutError where nothing fits.
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
    given = job.resources.memory_per_worker  # for drivers that tell no memory
    limit = given if isinstance(given, int) else None
    names = [f"m{index}" for index in range(job.meshes)]
    sizes, shares = dict(zip(names, job.mesh_sizes, strict=True)), _mesh_parallelism(job, costs)
    between = (
        costs.network if job.heterogeneous else network_per_worker_pair(costs.network, shares, sums=True)
    )
    across = CrossMeshAllReduce(between, sizes, alike=not job.heterogeneous)
    found = plan_jointly(
        profiles,
        stages=stage_counts(job, len(next(iter(profiles.values())).layers)),
        meshes=[MeshSpec(name=name, memory_bytes=costs.memory_bytes.get(name, limit)) for name in names],
        cut="auto" if job.pipeline.cut == "auto" else list(job.pipeline.cut),
        network=network_per_worker_pair(costs.network, shares),
        schedule=job.pipeline.schedule,
        overlap=job.pipeline.overlap,
        optimizer=job_optimizer_state(job, costs),
        update=costs.update,
        across=across,
        shared=costs.shared,
        action_s=costs.action_s,
        recompute=job_recompute(job),
        budget_s=budget_s,
        expired=expired,
    )
    if (
        job.heterogeneous or found.partition.reshardings
    ):  # no message of a worker may wait for another in a circle
        programs = {name: found.plan.program(name) for name in found.plan.programs}
        reshardings = found.partition.reshardings
        forward_only = {
            index
            for index, edge in enumerate(found.partition.spec.edges)
            if edge.backward_s == 0.0 and (index, True) not in reshardings
        }
        check_messages(programs, reshardings, sizes, forward_only)
    workers = dict(zip(names, job.dp_sizes, strict=True))
    return plan_gradient_reduces(
        found, profiles[found.partition.spec.microbatches], costs.update, workers, across
    )


def measured_profile(job: Job, costs: JobCosts, count: int) -> LayerProfile:
    """The profile of so many microbatches; with that of each mesh and how it shares its work, where tensors go otherwise
    than in pairs of workers."""
    if not job.heterogeneous:
        return uniform_profile(costs.profiles[count], _mesh_parallelism(job, costs))
    kinds = list(zip(job.mesh_sizes, job.tensors, strict=True))
    if missing := sorted(kind for kind in {*kinds} if (count, *kind) not in costs.mesh_profiles):
        size, tensor = missing[0]
        among = f", {tensor} of which share matrices," if tensor > 1 else ""
        raise SpecError(
            f"no profile was sent of a mesh of {size} workers{among} with {count} microbatches: meshes of unlike sizes are "
            "planned with the costs of each"
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
    """What the optimizer keeps; of it each worker has its part where those of a mesh share it."""
    if not job.sharded:
        return costs.optimizer
    sizes = {name: job.dp_sizes[int(name[1:])] for name in job.sharded}
    return Zero1OptimizerState(**asdict(costs.optimizer), workers=sizes)


def job_recompute(job: Job) -> Recompute:
    """Which stages recompute, as the job says."""
    wanted = job.pipeline.recompute
    return wanted if isinstance(wanted, str) else list(wanted)


def job_plan_json(found: JobPlan) -> dict[str, Any]:
    """What the control plane answers, and keeps as the job's plan."""
    return {
        "begins": list(found.partition.stage_starts),
        "spec": found.partition.spec.model_dump(mode="json"),
        "plan": found.plan.model_dump(mode="json"),
        "step_s": found.step_s,
        "update_s": longest_update_s(found.update) if found.update_s is None else found.update_s,
        "update": [asdict(one) for one in found.update],
        "slowdown": found.slowdown,
        **_reshardings_json(found),
    }


def _reshardings_json(found: JobPlan) -> dict[str, Any]:
    """The transfers that do not go in pairs of workers, where there are some."""
    plans = found.partition.reshardings
    if not plans:
        return {}
    return {
        "reshardings": [
            {"edge": edge, "backward": backward, "plan": plan.to_json()}
            for (edge, backward), plan in plans.items()
        ]
    }
