"""Plans a job from its measurements: reads JobCosts, derives what may be chosen, and answers the plan as JSON.

The search over stages, microbatches, placement and cut is joint.py's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from service.scheduler.job.cores import SharedCores, nodes_with_shared_cores
from service.scheduler.job.cut import PipelineSetup, Recompute, layer_ranges
from service.scheduler.job.heterogeneous import MeshGroups, heterogeneous_profile, uniform_profile
from service.scheduler.job.joint import JobPlan, JointSearchRequest, longest_update_s, plan_jointly
from service.scheduler.job.network import CrossMeshAllReduce, NodeLinks, network_per_worker_pair
from service.scheduler.job.partition import PartitionResult, device_and_host_seconds, partition
from service.scheduler.job.reduces import plan_gradient_reduces
from service.scheduler.job.step_plans import StepPlanner
from service.scheduler.planner import MeanMakespans, replan
from service.scheduler.problem.spec import MeshSpec, NetworkSpec, PipelineSpec, SpecError
from service.scheduler.programs.messages import check_messages
from service.scheduler.schedules.registry import AUTO
from worker.contract.buckets import with_buckets
from worker.contract.costs import MeshUpdate, UpdateCosts
from worker.contract.job import AUTOCAST_DTYPES, Bucket, Job, stage_counts
from worker.contract.profile import LayerCost, LayerProfile, OptimizerState, Zero1OptimizerState
from worker.contract.program import program_from_json


@dataclass(frozen=True)
class JobCosts:
    """The measurements of a job from which it is planned.

    `profiles` are the costs of its layers by number of microbatches, `memory_bytes` the limit of each mesh, `shared` the
    nodes whose workers share processor cores, `action_s` the engine's own seconds for each action. `mesh_profiles` are
    the profiles of heterogeneous meshes, by (microbatches, workers, tensor parallelism); `length_profiles` those of
    microbatches smaller than the largest, by (microbatches, bucket); `nodes` the node of each (mesh, worker), between
    which `node_links` were measured.
    """

    profiles: Mapping[int, LayerProfile]
    network: NetworkSpec
    memory_bytes: Mapping[str, int]
    optimizer: OptimizerState
    update: UpdateCosts
    shared: Sequence[SharedCores] = ()
    action_s: float = 0.0
    mesh_profiles: Mapping[tuple[int, int, int], LayerProfile] = field(default_factory=dict)
    length_profiles: Mapping[tuple[int, Bucket], LayerProfile] = field(default_factory=dict)
    nodes: Mapping[tuple[str, int], str] = field(default_factory=dict)
    node_links: NodeLinks = field(default_factory=dict)

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
        measured = data.get("network") or {}
        network = NetworkSpec.model_validate({name: measured[name] for name in measured if name != "nodes"})
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
            length_profiles={
                (item["microbatches"], Bucket(item["length"], item["rows"])): LayerProfile.from_json(
                    item["profile"]
                )
                for item in data.get("length_profiles") or ()
            },
            nodes={
                (worker["mesh"], worker["worker"]): worker.get("place") or worker["node"]
                for worker in data.get("workers") or ()
                if worker.get("node") is not None and worker.get("worker") is not None
            },
            node_links={
                (link["source"], link["target"]): link["bandwidth_bytes_per_s"]
                for link in measured.get("nodes") or ()
            },
        )


_MOST_PARAMETERS = 0.9  # of all: a stage with more of them is noted
_WAITED_SEARCH_SHARE = 0.01  # of the seconds that a job trains, which waits for its first plan
OFFLINE_SEARCH_SHARE = 0.1
"""Of the seconds that a job trains, for the search of a plan that no workers wait for."""
_LEAST_SEARCH_S = 0.2  # a shorter search finds what is found without one


def plan_for_training(
    job: Job,
    costs: JobCosts,
    *,
    earlier_microbatches: int | None = None,
    budget_s: float = 10.0,
    search_share: float = _WAITED_SEARCH_SHARE,
    expired: Callable[[], bool] | None = None,
) -> JobPlan:
    """The plan by which a job trains: `plan_job`, where a plan costs no more than it can bring.

    The first plan is made without a search. One follows for at most `search_share` of what all steps take by that plan, and
    of `budget_s` at most, unless a named schedule with a given cut leaves nothing to search for: a short job
    begins with the constructive plan, a long one waits for a search that its many steps repay. Raises as `plan_job`.
    """
    options = {"earlier_microbatches": earlier_microbatches, "expired": expired}
    try:
        first = plan_job(job, costs, budget_s=0.0, **options)
    except SpecError:  # a search finds some plans within memory that rules do not
        if budget_s <= 0:
            raise
        return plan_job(job, costs, budget_s=budget_s, **options)
    worth_s = min(budget_s, search_share * job.training.steps * first.step_s)
    given = job.pipeline.cut != "auto" and job.pipeline.schedule != AUTO and len(costs.profiles) == 1
    if given or worth_s < _LEAST_SEARCH_S or (expired is not None and expired()):
        return first
    found = plan_job(job, costs, budget_s=worth_s, **options)
    return min((found, first), key=lambda plan: plan.score_s)


def plan_job(
    job: Job,
    costs: JobCosts,
    *,
    earlier_microbatches: int | None = None,
    budget_s: float = 10.0,
    expired: Callable[[], bool] | None = None,
) -> JobPlan:
    """The plan of the shortest step among all that the job leaves open.

    The number of microbatches of an earlier attempt, `earlier_microbatches`, stays where it still fits, so that losses go
    on as they began: it decides how sums round, and which samples a layer sees together. Raises SpecError or CutError
    where nothing fits.
    """
    counts = costs.profiles
    if not counts:
        raise SpecError("no profile of the job's layers was sent: nothing can be planned")
    if earlier_microbatches in counts:
        try:
            return _plan_with_microbatches(job, costs, [earlier_microbatches], budget_s, expired)
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
    request = JointSearchRequest(
        profiles,
        _pipeline_setup(job, costs),
        stages=stage_counts(job, len(next(iter(profiles.values())).layers)),
        cut="auto" if job.pipeline.cut == "auto" else list(job.pipeline.cut),
        update=costs.update,
        across=_all_reduce_across(job, costs),
        shared=costs.shared,
    )
    planned = plan_jointly(request, budget_s=budget_s, expired=expired)
    profile = profiles[planned.partition.spec.microbatches]
    planned = _with_gradient_reduces(job, costs, profile, planned)
    notes = transfer_notes(job, profile, planned.partition)
    notes += host_notes(profile, planned.partition, costs.action_s)
    if job.pipeline.stages != "auto" or job.pipeline.cut != "auto":
        notes += cut_notes(profile, planned.partition.stage_starts)
    return replace(planned, notes=notes, step_planner=_step_planner(job, costs, planned))


def _step_planner(job: Job, costs: JobCosts, planned: JobPlan) -> StepPlanner | None:
    """The planner of the job's single steps; None where all microbatches have one length, where the job names its order, in
    which no step is shorter by another plan, and where workers share cores that decide how long steps are."""
    parallelism = _mesh_parallelism(job, costs)
    profiles = {
        bucket: uniform_profile(profile, parallelism)
        for (count, bucket), profile in costs.length_profiles.items()
        if count == planned.partition.spec.microbatches
    }
    if not profiles or job.pipeline.schedule != AUTO or planned.slowdown > 1.0:
        return None
    try:
        return StepPlanner.of(planned.partition, planned.plan, profiles, _pipeline_setup(job, costs))
    except (
        ValueError
    ):  # a length has other stages, by name or number: the workers refuse them with their names
        return None


def plan_steps(
    job: Job,
    costs: JobCosts,
    running: Mapping[str, Any],
    steps: Sequence[Sequence[int]],
    *,
    expired: Callable[[], bool] | None = None,
) -> list[dict[str, Any] | None]:
    """The plans of single steps of a running job, each by the buckets of its microbatches: JSON as of `job_plan_json`; None
    for a step for which the job's own plan is as short. `running` is that plan. Raises SpecError where it plans no steps.
    """
    if (planner := running.get("step_planner")) is None:
        raise SpecError("the job's plan knows no costs of other lengths: every step runs by it")
    planner = StepPlanner.from_json(planner)
    profile = measured_profile(job, costs, planner.spec.microbatches)
    answers: list[dict[str, Any] | None] = []
    for bucket_of in steps:
        found = planner.plan(bucket_of, shared=costs.shared, expired=expired)
        if found is None:
            answers.append(None)
            continue
        spec, plan = found
        planned = JobPlan(
            PartitionResult(list(running["begins"]), spec),
            plan,
            tuple(MeshUpdate(**mesh) for mesh in running.get("update", ())),
            score_s=plan.makespan_s,
            notes=tuple(running.get("planning_notes", ())),
        )
        answers.append(job_plan_json(_with_gradient_reduces(job, costs, profile, planned)))
    return answers


def _mesh_sizes(job: Job) -> dict[str, int]:
    """Workers by mesh."""
    return {f"m{index}": size for index, size in enumerate(job.mesh_sizes)}


def _pipeline_setup(job: Job, costs: JobCosts) -> PipelineSetup:
    return PipelineSetup(
        meshes=[
            MeshSpec(name=name, memory_bytes=job_memory_bytes(job, costs, name)) for name in _mesh_sizes(job)
        ],
        network=network_per_worker_pair(costs.network, _mesh_parallelism(job, costs), costs.node_links),
        schedule=job.pipeline.schedule,
        overlap=job.pipeline.overlap,
        recompute=job_recompute(job),
        optimizer=job_optimizer_state(job, costs),
        action_s=costs.action_s,
    )


def _all_reduce_across(job: Job, costs: JobCosts) -> CrossMeshAllReduce:
    parallelism = _mesh_parallelism(job, costs)
    between = (
        costs.network
        if job.heterogeneous
        else network_per_worker_pair(costs.network, parallelism, costs.node_links, sums=True)
    )
    return CrossMeshAllReduce(between, _mesh_sizes(job), uniform=not job.heterogeneous)


def _with_gradient_reduces(job: Job, costs: JobCosts, profile: LayerProfile, planned: JobPlan) -> JobPlan:
    """`planned`, its messages checked, with the all-reduces of gradients."""
    reshardings = planned.partition.reshardings
    if job.heterogeneous or reshardings:  # no message of a worker may wait for another in a circle
        programs = {name: planned.plan.program(name) for name in planned.plan.programs}
        forward_only = {
            index
            for index, edge in enumerate(planned.partition.spec.edges)
            if edge.backward_s == 0.0 and (index, True) not in reshardings
        }
        check_messages(programs, reshardings, _mesh_sizes(job), forward_only)
    workers = dict(zip(_mesh_sizes(job), job.dp_sizes, strict=True))
    return plan_gradient_reduces(planned, profile, costs.update, workers, _all_reduce_across(job, costs))


@dataclass(frozen=True)
class JobReplan:
    """A shorter plan of a running job: JSON of it as of `job_plan_json`, its makespan and that of the programs that run, at
    the same costs; where these vary, the means."""

    answer: Mapping[str, Any]
    planned_s: float
    running_s: float


def replan_job(
    job: Job,
    costs: JobCosts,
    running: Mapping[str, Any],
    spec: PipelineSpec,
    *,
    budget_s: float,
    expired: Callable[[], bool] | None = None,
    means: MeanMakespans | None = None,
) -> JobReplan | None:
    """A shorter plan of the same stages on the same meshes for a running job; None where none was found.

    `running` is the job's plan (JSON of `job_plan_json`), `spec` its pipeline at the costs of now: those measured while
    it ran, or those it was planned with, to search for longer. `costs` are the measurements that it was planned from;
    `means` are for costs that vary.
    """
    plan, names = running["plan"], [mesh.name for mesh in spec.meshes]
    programs = {mesh: with_buckets(program_from_json(p), ()).program for mesh, p in plan["programs"].items()}
    if running.get("slowdown", 1.0) > 1.0 and all(
        item.op not in ("I", "W") for program in programs.values() for item in program
    ):
        # the workers share processors, which no mesh of the spec knows: split backwards take more of them
        spec = spec.model_copy(update={"split_backward": False})
    recomputed = [stage["name"] for stage in plan.get("stages", ()) if stage["recomputed"]]
    shorter = replan(spec, programs, recomputed=recomputed, budget_s=budget_s, expired=expired, means=means)
    if shorter is None:
        return None
    profile = measured_profile(job, costs, spec.microbatches)
    cut = partition(
        profile,
        _pipeline_setup(job, costs),
        stages=len(spec.stages),
        microbatches=spec.microbatches,
        cut=running["begins"],
        placement=[names.index(stage.mesh) for stage in spec.stages],
    )
    planned = JobPlan(
        replace(cut, spec=spec),
        shorter.plan,
        tuple(MeshUpdate(**mesh) for mesh in running.get("update", ())),
        score_s=shorter.plan.makespan_s,
        slowdown=running.get("slowdown", 1.0),
        notes=tuple(running.get("planning_notes", ())),
    )
    planned = _with_gradient_reduces(job, costs, profile, planned)
    return JobReplan({**running, **job_plan_json(planned)}, shorter.planned_s, shorter.running_s)


def transfer_notes(job: Job, profile: LayerProfile, found: PartitionResult) -> tuple[str, ...]:
    """A note on what goes between meshes in float32 though the job computes in less, as sums and norms of autocast do."""
    if AUTOCAST_DTYPES[job.training.precision] is None or job.training.transfers != "auto":
        return ()
    names = [layer.name for layer in profile.layers]
    mesh_of = [
        stage.mesh
        for stage, (first, end) in zip(
            found.spec.stages,
            layer_ranges([names.index(name) for name in found.stage_starts], len(names)),
            strict=True,
        )
        for _ in range(first, end)
    ]
    wide = {
        (edge.tensor, mesh_of[edge.target]): edge.bytes
        for edge in profile.edges
        if mesh_of[edge.source] != mesh_of[edge.target]
        and edge.differentiable
        and edge.shape is not None
        and edge.bytes == 4 * math.prod(edge.shape)
    }
    if not wide:
        return ()
    return (
        f"{len(wide)} of the tensors between meshes, {sum(wide.values()):,} bytes a microbatch, are float32 under "
        f"{job.training.precision}: training.transfers: bf16 halves them and their gradients, and rounds both",
    )


def host_notes(profile: LayerProfile, found: PartitionResult, engine_s: float) -> tuple[str, ...]:
    """A note on the stages for which the host needs longer to enqueue a microbatch than the device to compute it."""
    names = [layer.name for layer in profile.layers]
    ranges = layer_ranges([names.index(name) for name in found.stage_starts], len(names))
    slower: dict[str, float] = {}
    for stage, (first, end) in zip(found.spec.stages, ranges, strict=True):
        times = [
            device_and_host_seconds(profile.layers[first:end], action, engine_s)
            for action in ("forward_s", "backward_s")
        ]
        if any(host_s is None for _, host_s in times):
            continue
        device_s, host_s = (sum(seconds) for seconds in zip(*times, strict=True))
        if host_s > device_s > 0:
            slower[stage.name] = host_s / device_s
    if not slower:
        return ()
    worst = max(slower, key=slower.__getitem__)
    return (
        f"the host is the limit of {len(slower)} of {len(found.spec.stages)} stages, most of {worst}, whose forward and "
        f"backward it enqueues in {slower[worst]:.2f} times the time that the device computes: fewer and larger "
        "microbatches, or training.compile, give the device more to do for each call",
    )


def cut_notes(profile: LayerProfile, stage_starts: Sequence[str]) -> tuple[str, ...]:
    """Notes on the stages of a cut that have no parameters of their own, and on one with nearly all of them, each with the
    modules that are the reason. A parameter of several stages is counted in the first."""
    names, sizes = [layer.name for layer in profile.layers], profile.parameter_sizes
    total, notes, earlier = sum(sizes.values()), [], set[str]()
    ranges = list(layer_ranges([names.index(name) for name in stage_starts], len(names)))
    for stage, (first, end) in enumerate(ranges):
        layers = profile.layers[first:end]
        used = {name for layer in layers for name in layer.parameters}
        own = used - earlier
        if total and not own:
            notes.append(
                f"stage {stage} ({_span(layers)}) has no parameters of its own: "
                + (
                    "its modules are used several times, and their parameters count in the first stage that uses them"
                    if used
                    else "none of its modules has any"
                )
            )
        share = sum(sizes[name] for name in own) / total if total else 0.0
        if len(ranges) > 1 and share >= _MOST_PARAMETERS:
            largest = max(layers, key=lambda layer: sum(sizes[name] for name in {*layer.parameters} & own))
            most = sum(sizes[name] for name in {*largest.parameters} & own) / total
            notes.append(
                f"stage {stage} ({_span(layers)}) has {share:.0%} of all parameters: "
                + (
                    f"module {largest.name!r} alone has {most:.0%}, and no stage can begin inside it: have its parts lie "
                    "in an nn.Sequential or nn.ModuleList of the model itself for stages of like size"
                    if most >= _MOST_PARAMETERS
                    else "the cut balances measured time, and these modules take little of it"
                )
            )
        earlier |= used
    return tuple(notes)


def _span(layers: Sequence[LayerCost]) -> str:
    return layers[0].name if len(layers) == 1 else f"{layers[0].name} to {layers[-1].name}"


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


def _mesh_parallelism(job: Job, costs: JobCosts) -> list[MeshGroups]:
    return [
        MeshGroups(
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
        "planning_notes": list(planned.notes),
        **({} if planned.step_planner is None else {"step_planner": planned.step_planner.to_json()}),
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
