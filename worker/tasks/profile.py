"""Measures what a job costs with one worker alone, to plan a job that does not train.

Reads {"job": ..., "device": "cpu" or "cuda"} from SLOTLINE_PROFILE_JOB or stdin. Ends with one task_result line:
{"costs": ...}, the planning request of a driver with notes on what is only assumed, or {"failed": a reason code,
"message": ...}. Links are measured between processes of this machine. Needs no Ray and no control plane.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from worker.actor.actor import Worker
from worker.actor.device import choose_device, processor_cores
from worker.benchmark.links import ProbeResult, choose_probes, network_spec
from worker.contract.costs import (
    PROFILE_REQUEST_VARIABLE,
    PROFILE_RESULT_MARK,
    UpdateCosts,
    layer_outgrows_memory,
    mesh_profile_json,
    min_memory_bytes,
    profiles_json,
)
from worker.contract.failures import AttemptFailure, as_failure
from worker.contract.job import Job, may_interleave
from worker.contract.profile import CollectiveCost, LayerProfile
from worker.contract.reasons import Reason
from worker.driver.limits import Limits
from worker.transport.base import Topology
from worker.transport.rendezvous import host_store

# The processes of this machine between which links are measured: a pair, and two peers at once.
_LINK_PROCESSES = 3
_LINKS_LIMIT_S = 120.0


def main() -> int:
    """Measure the job that the environment or standard input names; 0 when it was measured."""
    text = os.environ.get(PROFILE_REQUEST_VARIABLE) or sys.stdin.read()
    try:
        request = json.loads(text)
        answer = {"costs": measure_job(Job.from_json(request["job"]), request["device"])}
    except AttemptFailure as failure:
        print(failure.details, file=sys.stderr)
        answer = {"failed": failure.reason, "message": failure.message}
    except Exception as error:
        failure = as_failure(error, Reason.INTERNAL)
        print(failure.details, file=sys.stderr)
        answer = {"failed": failure.reason, "message": failure.message}
    print(f"\n{PROFILE_RESULT_MARK}{json.dumps(answer)}", flush=True)
    return 1 if "failed" in answer else 0


def measure_job(job: Job, device: str) -> dict[str, Any]:
    """The costs of `job` by one worker here, as a driver's request has them, and notes of what is only assumed.

    Raises AttemptFailure with the reason that an attempt would have ended for.
    """
    notes = []
    choose_device(device, list)
    worker = Worker(job=job, mesh="m0", worker=0, device=device)
    counts = worker.prepare(job.mesh_sizes[0])
    memory = _memory_limits(worker, job, device)
    optimizer, update = worker.optimizer_state(), worker.update_costs()
    profiles: dict[int, LayerProfile] = {}
    for count in sorted(counts, reverse=True):
        if profiles and layer_outgrows_memory(profiles, count, min_memory_bytes(memory)):
            notes.append(
                f"{count} microbatches, and fewer, are not planned: a layer's activations would not fit"
            )
            break
        profiles[count] = LayerProfile.from_json(worker.profile(count))
    gang = sum(job.mesh_sizes)
    if device == "cpu" and gang > 1:
        notes.append(f"the layers were measured by one worker alone: {gang} that share cores are slower")
    together = _measure_gang_costs(job, device)
    network = _network_json(job, together.links, next(iter(profiles.values())))
    if job.resources.tensor > 1:
        profiles = _with_tensor_collectives(profiles, network, notes)
    profiles = _with_batch_norm_collectives(job, profiles, network, notes)
    if network["bandwidth_bytes_per_s"] is None and job.meshes > 1:
        notes.append("the links between meshes were not measured: transfers count as nothing")
    return {
        **profiles_json(dict(sorted(profiles.items()))),
        **_heterogeneous_profiles(job, device, sorted(profiles), network),
        "tried": sorted(counts),
        "network": network,
        **memory,
        "workers": _worker_entries(job, device),
        "optimizer": asdict(optimizer),
        "update": _with_gradient_collectives(job, update, network, notes).to_json(),
        "action_s": together.action_s,
        "notes": notes,
    }


def _heterogeneous_profiles(
    job: Job, device: str, counts: Sequence[int], network: Mapping[str, Any]
) -> dict[str, Any]:
    """The profiles of heterogeneous meshes, each measured by a worker with the samples of one of them."""
    if not job.heterogeneous:
        return {}
    mesh_profiles = []
    kinds = list(zip(job.mesh_sizes, job.tensors, strict=True))
    for kind in sorted({*kinds}):
        worker = Worker(job=job, mesh=f"m{kinds.index(kind)}", worker=0, device=device)
        worker.prepare(kind[0])
        profiles = {count: LayerProfile.from_json(worker.profile(count)) for count in counts}
        if kind[1] > 1:
            profiles = _with_tensor_collectives(profiles, network, [])
        profiles = _with_batch_norm_collectives(job, profiles, network, [])
        mesh_profiles += [mesh_profile_json(count, kind, profile) for count, profile in profiles.items()]
    return {"mesh_profiles": mesh_profiles}


def _memory_limits(worker: Worker, job: Job, device: str) -> dict[str, Any]:
    """The memory limit of every mesh, if all workers are like this one; on CPU all of them share this machine."""
    on_gpu = int(os.environ.get("SLOTLINE_WORKERS_PER_GPU", "1"))
    sharing = sum(job.mesh_sizes) if device == "cpu" else on_gpu
    limit = worker.memory_limit(sharing)
    meshes = [] if limit is None else [f"m{index}" for index in range(job.meshes)]
    return {"memory": [{"mesh": mesh, "memory_bytes": limit} for mesh in meshes]}


def _worker_entries(job: Job, device: str) -> list[dict[str, Any]]:
    """The assumed places of the workers: on CPU all of them on this machine, and on its cores. Tensors are planned
    (`place`) as if each mesh had its own node: a wrong guess costs a copy, the opposite one a slow link."""
    cores = processor_cores() if device == "cpu" else None
    return [
        {"mesh": mesh, "worker": worker, "node": "here", "place": mesh, "device": device, "cores": cores}
        for mesh, size in ((f"m{index}", size) for index, size in enumerate(job.mesh_sizes))
        for worker in range(size)
    ]


def _with_tensor_collectives(
    profiles: Mapping[int, LayerProfile], network: Mapping[str, Any], notes: list[str]
) -> dict[int, LayerProfile]:
    if network["bandwidth_bytes_per_s"] is None:
        notes.append("sums over the workers that share matrices were not measured: they count as nothing")
        return dict(profiles)
    notes.append("sums over the workers that share matrices are taken to be as quick as a link")
    latency_s, bandwidth = network["latency_s"], network["bandwidth_bytes_per_s"]
    gathers = latency_s, 2 * bandwidth  # half the bytes of a sum
    between = CollectiveCost((latency_s, bandwidth), gathers, gathers)
    return {count: profile.with_tensor_parallel_sums(between) for count, profile in profiles.items()}


def _with_batch_norm_collectives(
    job: Job, profiles: Mapping[int, LayerProfile], network: Mapping[str, Any], notes: list[str]
) -> dict[int, LayerProfile]:
    if not job.training.sync_batch_norm or job.max_dp_size == 1:
        return dict(profiles)
    if network["bandwidth_bytes_per_s"] is None:
        notes.append(
            "sums of batch norms over the workers of a mesh were not measured: they count as nothing"
        )
        return dict(profiles)
    notes.append("sums of batch norms over the workers of a mesh are taken to be as quick as a link")
    between = CollectiveCost((network["latency_s"], network["bandwidth_bytes_per_s"]))
    return {count: profile.with_sync_batch_norm_sums(between) for count, profile in profiles.items()}


def _with_gradient_collectives(
    job: Job, update: UpdateCosts, network: Mapping[str, Any], notes: list[str]
) -> UpdateCosts:
    shares = {f"m{index}": tensor for index, tensor in enumerate(job.tensors) if tensor > 1}
    if shares and network["bandwidth_bytes_per_s"] is not None:
        update = update.with_tensor_parallel(shares, (network["latency_s"], network["bandwidth_bytes_per_s"]))
    if job.batch_multiple == 1:
        return update
    if network["bandwidth_bytes_per_s"] is None:
        notes.append("sums of gradients over the workers of a mesh were not measured: they count as nothing")
        return update
    notes.append("sums of gradients over the workers of a mesh are taken to be as quick as a link")
    latency_s, bandwidth = network["latency_s"], network["bandwidth_bytes_per_s"]
    if job.sharded:  # each moves half the bytes of a sum
        workers = {mesh: job.dp_sizes[int(mesh[1:])] for mesh in job.sharded}
        update = update.with_zero1(workers, (latency_s, 2 * bandwidth), (latency_s, 2 * bandwidth))
    alone = tuple(f"m{mesh}" for mesh, data in enumerate(job.dp_sizes) if data == 1)
    return update.with_all_reduce(latency_s, bandwidth, alone)


@dataclass(frozen=True)
class _GangCosts:
    """Measurements of several processes of this machine: links, and the engine's own time for an action."""

    links: Sequence[ProbeResult] = ()
    action_s: float = 0.0


def _network_json(job: Job, measured: Sequence[ProbeResult], profile: LayerProfile) -> dict[str, Any]:
    """JSON of a NetworkSpec from links between processes of this machine; with one GPU nothing is measured."""
    meshes = [f"m{index}" for index in range(job.meshes)]
    return network_spec(
        measured,
        meshes,
        dict.fromkeys(meshes, "here"),
        loops=may_interleave(job),
        skips=any(edge.target > edge.source + 1 for edge in profile.edges),
    )


def _measure_gang_costs(job: Job, device: str) -> _GangCosts:
    if device != "cpu":
        return _GangCosts()
    meshes = [f"m{index}" for index in range(min(job.meshes, _LINK_PROCESSES))]
    stores = [host_store("127.0.0.1") for _ in range(2)]
    ports = [store.port for store in stores]
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(len(meshes), mp_context=context)
    try:
        ends = [pool.submit(_measure_as_mesh, job, mesh, meshes, *ports) for mesh in meshes]
        _, late = concurrent.futures.wait(ends, _LINKS_LIMIT_S)
        if late:
            raise AttemptFailure(
                Reason.START_TIMEOUT, f"measuring the links: no answer within {_LINKS_LIMIT_S:.0f} s"
            )
        costs = [end.result() for end in ends]
    finally:
        processes = list((pool._processes or {}).values())  # no public way to end a running call before 3.14
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
    return _GangCosts(
        links=[link for cost in costs for link in cost.links],
        action_s=sum(cost.action_s for cost in costs) / len(costs),
    )


def _measure_as_mesh(job: Job, mesh: str, meshes: list[str], links_port: int, action_port: int) -> _GangCosts:
    worker = Worker(job=job, mesh=mesh, worker=0, device="cpu")
    where = {
        "topology": Topology(tuple(meshes)),
        "host": "127.0.0.1",
        "connect_s": Limits().connect_s,
    }
    probes = choose_probes(meshes, dict.fromkeys(meshes, "here"), loops=False, skips=False)
    return _GangCosts(
        links=worker.measure_links(probes=probes, store=("127.0.0.1", links_port), **where) if probes else (),
        action_s=worker.measure_action(store=("127.0.0.1", action_port), **where),
    )
