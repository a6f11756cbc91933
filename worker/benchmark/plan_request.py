"""Prices a job: the request for a plan, from Measurements of a whole gang or of one worker alone.

`plan_request` is the only path from measurements to a request, whether the job trains (worker/driver) or is only
planned (worker/tasks/profile.py). Pure: measuring, caching and reporting are done by the Measurements. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from worker.contract.costs import EngineCosts, UpdateCosts
from worker.contract.failures import AttemptFailure
from worker.contract.job import AUTO, Bucket, Job, may_interleave, microbatch_counts
from worker.contract.profile import LayerProfile, MeshCollectiveCosts, OptimizerState
from worker.contract.reasons import Reason

MeshKind = tuple[int, int]
"""The workers of a mesh, and its tensor-parallel size."""


class Measurements(Protocol):
    """The measured costs of one job. Methods are called once each, in this order; all may raise AttemptFailure."""

    def memory_bytes(self) -> Mapping[str, int]:
        """The memory limit of each mesh (that of its worker with the least) by name; without those not known."""

    def optimizer_state(self) -> OptimizerState:
        """The bytes that the optimizer keeps."""

    def profile(self, microbatches: int, bucket: Bucket | None = None) -> LayerProfile:
        """The costs of the layers on the slowest kind of accelerator; called for every number of microbatches, and with
        data.lengths for smaller buckets than the largest."""

    def leave_out(self, microbatches: int, why: str) -> None:
        """Report that this number of microbatches, and smaller ones, are not planned."""

    def network(self, *, loops: bool, skips: bool) -> dict[str, Any]:
        """JSON of a NetworkSpec; `loops`: the last mesh sends to the first; `skips`: any mesh to any later one."""

    def collectives(self, network: Mapping[str, Any]) -> MeshCollectiveCosts:
        """The costs of collectives in the slowest mesh: measured, or assumed from the links of `network`."""

    def update_costs(self) -> UpdateCosts:
        """The costs of REDUCE and STEP on one worker alone, without collectives."""

    def engine_costs(self) -> EngineCosts:
        """The engine's own processor seconds for an action, and what connections between meshes hold of an accelerator."""

    def mesh_profiles(self, kind: MeshKind, counts: Sequence[int]) -> Mapping[int, LayerProfile]:
        """The costs of the layers by number of microbatches on meshes of one kind; for heterogeneous jobs, by kind."""

    def smaller_buckets(self) -> Sequence[Bucket]:
        """The shapes of microbatches but the largest, ascending; of jobs with data.lengths."""

    def tells_lengths(self) -> bool:
        """True where the data tells the lengths of steps to come; of jobs with data.lengths."""

    def workers(self) -> list[dict[str, Any]]:
        """JSON of each worker: mesh, number, node, device and the processor cores of its node."""


def plan_request(job: Job, measurements: Measurements) -> dict[str, Any]:
    """JSON of the request for a plan of `job`. Raises AttemptFailure as `measurements` does."""
    memory = measurements.memory_bytes()
    optimizer = measurements.optimizer_state()
    measured = layer_profiles(
        measurements, microbatch_counts(job), least_bytes=min(memory.values(), default=None)
    )
    smaller = _smaller_profiles(job, measurements, list(measured))
    measured = {count: profile.with_bytes_of(smaller.values()) for count, profile in measured.items()}
    network = measurements.network(
        loops=may_interleave(job),
        skips=any(edge.target > edge.source + 1 for edge in next(iter(measured.values())).edges),
    )
    collectives = measurements.collectives(network)
    update, engine = measurements.update_costs(), measurements.engine_costs()
    profiles = [
        {"microbatches": count, "profile": _with_collectives(job, profile, collectives).to_json()}
        for count, profile in measured.items()
    ]
    return {
        # a single profile stands where control planes have always read it
        **(profiles[0] if len(profiles) == 1 else {"profiles": profiles}),
        "tried": list(microbatch_counts(job)),
        "network": network,
        "memory": [
            {"mesh": mesh, "memory_bytes": limit}
            for mesh, limit in _without_connections(job, memory, collectives, engine).items()
        ],
        "optimizer": asdict(optimizer),
        "update": update_with_collectives(job, update, collectives).to_json(),
        "action_s": engine.action_s,
        **_mesh_profiles(job, measurements, list(measured), collectives),
        **_length_profiles(job, measurements, smaller, list(measured)),
        "workers": measurements.workers(),
    }


def layer_profiles(
    measurements: Measurements, counts: Sequence[int], *, least_bytes: int | None
) -> dict[int, LayerProfile]:
    """The costs of the layers by number of microbatches, ascending.

    Small microbatches first: where a layer of larger ones would not fit in `least_bytes`, or runs out of memory,
    these are left out.
    """
    profiles: dict[int, LayerProfile] = {}
    for count in sorted(counts, reverse=True):
        if profiles and _layer_outgrows_memory(profiles, count, least_bytes):
            measurements.leave_out(count, "a layer's activations would not fit")
            break
        try:
            profiles[count] = measurements.profile(count)
        except AttemptFailure as failure:
            if not profiles or failure.reason is not Reason.OUT_OF_MEMORY:
                raise
            measurements.leave_out(count, failure.message)
            break
    return dict(sorted(profiles.items()))


def _without_connections(
    job: Job, memory: Mapping[str, int], collectives: MeshCollectiveCosts, engine: EngineCosts
) -> dict[str, int]:
    """The limit of each mesh, if it is what is free, less what connections will hold of it; a byte where they would take
    all, for which no plan is found."""
    if job.resources.memory_per_worker != "auto":
        return dict(memory)
    held = collectives.connection_bytes + engine.connection_bytes
    return {mesh: max(1, limit - held) for mesh, limit in memory.items()}


def _layer_outgrows_memory(profiles: Mapping[int, LayerProfile], count: int, least_bytes: int | None) -> bool:
    """True if, by the measured profiles, one layer would exceed `least_bytes` with only `count` microbatches."""
    nearest = min(profiles)
    largest = max((layer.activation_bytes for layer in profiles[nearest].layers), default=0)
    return least_bytes is not None and largest * nearest / count > least_bytes


def _with_collectives(job: Job, profile: LayerProfile, collectives: MeshCollectiveCosts) -> LayerProfile:
    """`profile` with the seconds of the collectives of tensor parallelism and of synchronised batch norms."""
    if collectives.tensor is not None:
        profile = profile.with_tensor_parallel_sums(collectives.tensor)
    if job.training.sync_batch_norm and collectives.data is not None:
        profile = profile.with_sync_batch_norm_sums(collectives.data)
    return profile


def update_with_collectives(job: Job, costs: UpdateCosts, collectives: MeshCollectiveCosts) -> UpdateCosts:
    """`costs` of REDUCE and STEP with the collectives of the data- and tensor-parallel groups of the job's meshes."""
    sizes = {f"m{mesh}": pair for mesh, pair in enumerate(zip(job.dp_sizes, job.tensors, strict=True))}
    tp_sizes = {mesh: tp_size for mesh, (_, tp_size) in sizes.items() if tp_size > 1}
    if tp_sizes and collectives.tensor is not None:
        costs = costs.with_tensor_parallel(tp_sizes, collectives.tensor.reduce)
    if (data := collectives.data) is None:
        return costs
    if job.sharded:
        costs = costs.with_zero1({mesh: sizes[mesh][0] for mesh in job.sharded}, data.scatter, data.gather)
    single_replica_meshes = tuple(mesh for mesh, (dp_size, _) in sizes.items() if dp_size == 1)
    return costs.with_all_reduce(*data.reduce, single_replica_meshes)


def _mesh_profiles(
    job: Job, measurements: Measurements, counts: Sequence[int], collectives: MeshCollectiveCosts
) -> dict[str, Any]:
    """The entry with the profiles of every kind of mesh of a heterogeneous job."""
    if not job.heterogeneous:
        return {}
    return {
        "mesh_profiles": [
            mesh_profile_json(count, kind, _with_collectives(job, profile, collectives))
            for kind in sorted({*zip(job.mesh_sizes, job.tensors, strict=True)})
            for count, profile in measurements.mesh_profiles(kind, counts).items()
        ]
    }


def _smaller_profiles(
    job: Job, measurements: Measurements, counts: Sequence[int]
) -> Mapping[Bucket, LayerProfile]:
    """The profiles of microbatches smaller than the largest, ascending, where these are needed: to plan single steps, and
    where some have more rows, of which a tensor without a length may need more bytes."""
    if job.data.lengths is None or len(counts) > 1:
        return {}
    buckets, rows = measurements.smaller_buckets(), job.training.global_batch // counts[0]
    plans_steps = plans_single_steps(job) and measurements.tells_lengths()
    if not plans_steps and all(bucket.rows <= rows for bucket in buckets):
        return {}
    return {bucket: measurements.profile(counts[0], bucket) for bucket in buckets}


def _length_profiles(
    job: Job, measurements: Measurements, profiles: Mapping[Bucket, LayerProfile], counts: Sequence[int]
) -> dict[str, Any]:
    """The entry with the profiles of smaller microbatches, where single steps are to be planned: the job leaves their order
    open, and has one number of microbatches."""
    if not plans_single_steps(job) or len(counts) > 1:
        return {}
    known = profiles if profiles and measurements.tells_lengths() else {}
    return {
        "length_profiles": [
            {
                "microbatches": counts[0],
                "length": bucket.length,
                "rows": bucket.rows,
                "profile": profile.to_json(),
            }
            for bucket, profile in known.items()
        ]
    }


def plans_single_steps(job: Job) -> bool:
    """True where the steps of `job` have unequal lengths, and an order that is neither named nor kept."""
    return (
        job.data.lengths is not None
        and job.pipeline.schedule == AUTO
        and job.pipeline.replan != "off"
        and job.meshes > 1
    )


def mesh_profile_json(microbatches: int, kind: MeshKind, profile: LayerProfile) -> dict[str, Any]:
    """JSON of a profile of meshes of one kind."""
    workers, tensor = kind
    tp_size = {"tensor": tensor} if tensor > 1 else {}
    return {"microbatches": microbatches, "workers": workers, **tp_size, "profile": profile.to_json()}
