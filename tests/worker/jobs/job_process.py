"""One worker of a planned job in a process of its own, as an actor is, without Ray: reads JSON, prints losses as JSON.

On CUDA the processes take the GPUs of this machine in turn; where there are fewer, several share one.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

import torch

from worker.contract.job import Job
from worker.contract.planned import parse_planned_job, planned_seconds, planned_starts
from worker.engine.results import SlotLimits
from worker.transport.base import topology_of
from worker.verify.local_gang import InspectableWorker


def take_gpu(rank: int, workers: int) -> None:
    """Several ranks on one GPU: to NCCL each looks like a host of its own."""
    if workers > torch.cuda.device_count():
        os.environ.setdefault("NCCL_HOSTID", f"slotline-{rank}")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    torch.cuda.set_device(rank % torch.cuda.device_count())


def trained(given: dict[str, Any]) -> dict[str, Any]:
    """The losses of one worker, and the sum of the squares of its mesh's parameters."""
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
    worker = InspectableWorker(job=job, mesh=mesh, worker=index, device=given["device"])
    worker.prepare(topology.workers(mesh))
    worker.trace(planned.microbatches)
    worker.load(
        begins=planned.stage_starts,
        mesh_of_stage=planned.mesh_of_stage,
        program=planned.plan["programs"][mesh],
        recomputed=planned.recomputed,
        planned_s=planned_seconds(planned.plan, planned.stage_names, planned.update)[mesh],
        planned_starts_s=planned_starts(planned.plan, planned.stage_names)[mesh],
        topology=topology,
        reshardings=planned.reshardings,
        store=("127.0.0.1", given["port"]),
        host="127.0.0.1",
        connect_s=120.0,
        slot_limits=SlotLimits(factor=20.0, floor_s=60.0),
        microbatches=planned.microbatches,
    )
    worker.warm_up(1)
    losses = [worker.run_step(step).losses for step in range(1, given["steps"] + 1)]
    state = worker.engine.state()["parameters"]
    norm = torch.stack([tensor.double().square().sum().cpu() for tensor in state.values()]).sum()
    worker.close()
    return {"losses": losses, "squares": norm.item()}


def main() -> None:
    print(json.dumps(trained(json.loads(sys.stdin.read()))))


if __name__ == "__main__":
    main()
