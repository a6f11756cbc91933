"""One worker of a planned job in a process of its own, as an actor is, without Ray: reads JSON, prints losses as JSON.

It may save after a step (`save`: URI and step) or go on from a checkpoint (`restore`: its URI).

On CUDA the processes take the GPUs of this machine in turn; where there are fewer, several share one.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import Counter
from typing import Any

import torch

from worker.actor.actor import NewWorker
from worker.actor.assignment import LoadLimits, make_assignments
from worker.actor.loaded import LoadedWorker
from worker.contract.job import Job
from worker.contract.planned import parse_planned_job
from worker.engine.results import SlotLimits
from worker.parallel.shard_spec import ShardSpec
from worker.transport.base import topology_of


def take_gpu(rank: int, workers: int) -> None:
    """Several ranks on one GPU: to NCCL each looks like a host of its own."""
    if workers > torch.cuda.device_count():
        os.environ.setdefault("NCCL_HOSTID", f"slotline-{rank}")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    torch.cuda.set_device(rank % torch.cuda.device_count())


def saved(worker: LoadedWorker, uri: str, step: int) -> dict[str, Any]:
    """Save now: the seconds, on CUDA the bytes held before and at most meanwhile, and the most host memory so far."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    held, began = torch.cuda.memory_allocated() if cuda else None, time.monotonic()
    worker.save(uri, step)
    return {
        "save_s": time.monotonic() - began,
        "held_bytes": held,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def trained(given: dict[str, Any]) -> dict[str, Any]:
    """The losses of one worker and whether each step was skipped, the sum of the squares of each of its parameters or
    shards, and what a save took."""
    torch.set_num_threads(1)
    job, planned, mesh, index = (
        Job.from_json(given["job"]),
        parse_planned_job(given["planned"]),
        *given["place"],
    )
    sizes = Counter({f"m{k}": size for k, size in enumerate(job.mesh_sizes)})
    topology = topology_of(sizes, job.tensors)
    if given["device"] == "cuda":
        take_gpu(topology.rank(mesh, index), topology.size)
    worker = NewWorker(job=job, mesh=mesh, worker=index, device=given["device"]).prepare()
    worker.trace(planned.microbatches)
    assignments = make_assignments(
        planned,
        [(name, "127.0.0.1") for name in topology.meshes for _ in range(topology.workers(name))],
        tensors=job.tensors,
        store=("127.0.0.1", given["port"]),
        limits=LoadLimits(120.0, 120.0, SlotLimits(factor=20.0, floor_s=60.0)),
    )
    worker = worker.load(assignments[topology.rank(mesh, index)])
    done = worker.restore(given["restore"]) if given.get("restore") else 0
    worker.warm_up(done + 1)
    uri, last = given.get("save") or (None, None)
    results, saving = [], None
    for step in range(done + 1, given["steps"] + 1):
        results.append(worker.run_step(step))
        if step == last:
            saving = saved(worker, uri, step)
    spec_of = ShardSpec if worker.tensor_shards is None else worker.tensor_shards.shard_spec
    squares = {
        spec_of(name).description: tensor.double().square().sum().item()
        for name, tensor in worker.engine.state()["parameters"].items()
    }
    worker.close()
    return {
        "losses": [result.losses for result in results],
        "skipped": [result.skipped for result in results],
        "squares": squares,
        "saved": saving,
    }


def main() -> None:
    print(json.dumps(trained(json.loads(sys.stdin.read()))))


if __name__ == "__main__":
    main()
