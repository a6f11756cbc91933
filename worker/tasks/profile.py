"""Measures what a job costs with one worker alone, to plan a job that does not train.

Reads {"job": ..., "device": "cpu" or "cuda"} from SLOTLINE_PROFILE_JOB or stdin. Ends with one task_result line:
{"costs": ...}, the planning request of a driver with notes on what is only assumed, or {"failed": a reason code,
"message": ...}. Links are measured between processes of this machine. Needs no Ray and no control plane.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.actor.actor import NewWorker
from worker.benchmark.links import ProbeResult, choose_probes, endpoint, network_spec
from worker.benchmark.plan_request import MeshKind, plan_request
from worker.contract.costs import (
    PROFILE_REQUEST_VARIABLE,
    PROFILE_RESULT_MARK,
    EngineCosts,
    UpdateCosts,
    mean_engine_costs,
)
from worker.contract.failures import AttemptFailure, as_failure
from worker.contract.job import Bucket, Job
from worker.contract.profile import CollectiveCost, LayerProfile, MeshCollectiveCosts, OptimizerState
from worker.contract.reasons import Reason
from worker.contract.tasks import kill_pool
from worker.driver.limits import Limits
from worker.machine.device import choose_device
from worker.machine.node import processor_cores
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
    choose_device(device, list)
    measurements = LocalMeasurements(job, device)
    return {**plan_request(job, measurements), "notes": measurements.notes}


class LocalMeasurements:
    """The Measurements of one worker in this process, as if all workers were like it; `notes` say what is assumed.

    Links are measured between processes of this machine, on CPU; collectives are assumed to be as quick as a link.
    """

    def __init__(self, job: Job, device: str):
        self._job, self._device = job, device
        self._worker = NewWorker(job=job, mesh="m0", worker=0, device=device).prepare()
        self._is_checked = False
        self.notes: list[str] = []
        if device == "cpu" and (gang := sum(job.mesh_sizes)) > 1:
            self.notes.append(
                f"the layers were measured by one worker alone: {gang} that share cores are slower"
            )

    def memory_bytes(self) -> dict[str, int]:
        """The limit of this worker for every mesh; on CPU all of them share this machine."""
        on_gpu = int(os.environ.get("SLOTLINE_WORKERS_PER_GPU", "1"))
        sharing = sum(self._job.mesh_sizes) if self._device == "cpu" else on_gpu
        limit = self._worker.memory_limit(sharing)
        return {} if limit is None else {f"m{index}": limit for index in range(self._job.meshes)}

    def optimizer_state(self) -> OptimizerState:
        return self._worker.optimizer_state()

    def profile(self, microbatches: int, bucket: Bucket | None = None) -> LayerProfile:
        if not self._is_checked:  # it finds modules that run as they are, whose layers are others
            self._worker.trace(microbatches)
            self._is_checked = True
        return LayerProfile.from_json(self._worker.profile(microbatches, bucket))

    def smaller_buckets(self) -> Sequence[Bucket]:
        return self._worker.smaller_buckets()

    def tells_lengths(self) -> bool:
        return self._worker.tells_lengths()

    def leave_out(self, microbatches: int, why: str) -> None:
        self.notes.append(f"{microbatches} microbatches, and fewer, are not planned: {why}")

    def network(self, *, loops: bool, skips: bool) -> dict[str, Any]:
        meshes = [f"m{index}" for index in range(self._job.meshes)]
        here = dict.fromkeys(meshes, ("here",))
        measured = self._gang_costs.links
        probes = choose_probes(here, loops=False, skips=False)[: len(measured)]
        network = network_spec(probes, measured, here, loops=loops, skips=skips)
        if network["bandwidth_bytes_per_s"] is None and len(meshes) > 1:
            self.notes.append("the links between meshes were not measured: transfers count as nothing")
        return network

    def collectives(self, network: Mapping[str, Any]) -> MeshCollectiveCosts:
        """The costs of collectives over a link: an all-reduce has its latency and bandwidth, others move half the bytes."""
        training, latency_s = self._job.training, network["latency_s"]
        summed = {
            "sums over the workers of a tensor-parallel group": max(self._job.tensors) > 1,
            "sums of batch norms over the workers of a mesh": (
                training.sync_batch_norm and self._job.max_dp_size > 1
            ),
            "sums of gradients over the workers of a mesh": self._job.max_dp_size > 1,
        }
        bandwidth = network["bandwidth_bytes_per_s"]
        assumed = (
            "were not measured: they count as nothing"
            if bandwidth is None
            else "are taken to be as quick as a link"
        )
        self.notes += [f"{what} {assumed}" for what, needed in summed.items() if needed]
        if bandwidth is None:
            return MeshCollectiveCosts()
        half = latency_s, 2 * bandwidth
        cost = CollectiveCost((latency_s, bandwidth), half, half)
        return MeshCollectiveCosts(
            data=cost if self._job.max_dp_size > 1 else None,
            tensor=cost if max(self._job.tensors) > 1 else None,
        )

    def update_costs(self) -> UpdateCosts:
        return self._worker.update_costs()

    def engine_costs(self) -> EngineCosts:
        """Measured between processes on CPU; nothing is known of accelerators, whose margin must do for connections."""
        return self._gang_costs.engine

    def mesh_profiles(self, kind: MeshKind, counts: Sequence[int]) -> dict[int, LayerProfile]:
        """Measured by a worker with the samples of a mesh of this kind."""
        kinds = list(zip(self._job.mesh_sizes, self._job.tensors, strict=True))
        mesh = f"m{kinds.index(kind)}"
        worker = NewWorker(job=self._job, mesh=mesh, worker=0, device=self._device).prepare()
        return {count: LayerProfile.from_json(worker.profile(count)) for count in counts}

    def workers(self) -> list[dict[str, Any]]:
        return assumed_workers(self._job, self._device)

    @functools.cached_property
    def _gang_costs(self) -> _GangCosts:
        return _measure_gang_costs(self._job, self._device)


def assumed_workers(job: Job, device: str) -> list[dict[str, Any]]:
    """JSON of the workers at their assumed places: on CPU all of them on this machine, and on its cores. Tensors are
    planned (`place`) as if each mesh had its own node: a wrong guess costs a copy, the opposite one a slow link."""
    cores = processor_cores() if device == "cpu" else None
    return [
        {"mesh": mesh, "worker": worker, "node": "here", "place": mesh, "device": device, "cores": cores}
        for mesh, size in ((f"m{index}", size) for index, size in enumerate(job.mesh_sizes))
        for worker in range(size)
    ]


@dataclass(frozen=True)
class _GangCosts:
    """Measurements of several processes of this machine: links, and what the engine itself takes."""

    links: Sequence[ProbeResult] = ()
    engine: EngineCosts = field(default_factory=EngineCosts)


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
        kill_pool(pool)
    return _GangCosts(
        links=[link for cost in costs for link in cost.links],
        engine=mean_engine_costs([cost.engine for cost in costs]),
    )


def _measure_as_mesh(job: Job, mesh: str, meshes: list[str], links_port: int, action_port: int) -> _GangCosts:
    worker = NewWorker(job=job, mesh=mesh, worker=0, device="cpu")
    where = {
        "topology": Topology(tuple(meshes)),
        "host": "127.0.0.1",
        "connect_s": Limits().connect_s,
    }
    probes = choose_probes(dict.fromkeys(meshes, ("here",)), loops=False, skips=False)
    ends = Topology(tuple(endpoint(mesh, 0) for mesh in meshes))
    return _GangCosts(
        links=worker.measure_links(
            probes=probes, store=("127.0.0.1", links_port), **{**where, "topology": ends}
        )
        if probes
        else (),
        engine=worker.measure_engine(store=("127.0.0.1", action_port), **where),
    )
