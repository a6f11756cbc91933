"""Measures a job on one worker (memory, layers, optimizer, collectives, links) and makes the profile cache key.

The cache key covers all that changes a layer's time: model, code, loss, shapes, precision, device name, torch
version, tensor parallelism, whether a compiler is there and, on CPU, the gang's size, since workers share the cores.
A setting that is left unset is not part of the key, so that older cached profiles stay valid.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from worker.actor.batch_feed import Batches
from worker.actor.loss import JobLoss
from worker.actor.optimizer import make_optimizer, measure_optimizer_state
from worker.benchmark.layer_costs import TensorParallelProbe, measure_layers
from worker.benchmark.links import LARGE_BYTES, Probe, ProbeResult, measure_links, probe_groups, probe_lanes
from worker.benchmark.optimizer_step import (
    measure_all_reduce,
    measure_reduce_scatter_all_gather,
    measure_update,
)
from worker.contract.costs import UpdateCosts
from worker.contract.job import FP16, Job, LossScaling
from worker.contract.profile import (
    PROFILE_FORMAT,
    CollectiveCost,
    LayerProfile,
    MeshCollectiveCosts,
    OptimizerState,
)
from worker.engine.compile import StageCompiler, missing_compiler
from worker.machine.device import device_kind
from worker.machine.telemetry import bytes_open_to_torch, memory_limit
from worker.model.export import TracedModel
from worker.model.pytree import Target, target_tensors
from worker.parallel.process_groups import dp_group, reduce_groups, tp_group
from worker.transport.base import Transport, closing_transport

PROFILE_REPEATS = 5


def plannable_bytes(job: Job, device: str, sharing: int) -> int | None:
    """Bytes that a worker may plan with, one of `sharing` on the same node (CPU) or GPU; None if unknown."""
    configured = job.resources.memory_per_worker
    return configured if isinstance(configured, int) else memory_limit(device, sharing)


def measure_job_optimizer_state(job: Job, device: str) -> OptimizerState:
    """The bytes that the job's optimizer keeps of the parameters that it trains."""
    return measure_optimizer_state(functools.partial(make_optimizer, job.optimizer), device)


def measure_job_update(job: Job, device: str) -> UpdateCosts:
    """The costs of the engine's REDUCE and STEP on one worker alone, with the job's optimizer."""
    make = functools.partial(make_optimizer, job.optimizer)
    training = job.training
    scaling = (training.loss_scaling or LossScaling()) if training.precision == FP16 else None
    return measure_update(make, device, training.clip_grad_norm, scaling)


def measure_mesh_collectives(job: Job, transport: Transport, device: str) -> MeshCollectiveCosts:
    """The costs of all-reduce in the data- and the tensor-parallel groups of this mesh; also of reduce-scatter and
    all-gather in tensor-parallel groups, and in data-parallel ones where the job uses ZeRO-1. Closes `transport`, of
    which every worker of the mesh calls this at the same time."""
    topology, mesh, worker = transport.topology, transport.mesh, transport.worker
    tp_size = job.tp_size(mesh)

    def measured(group: str, workers: int, halves: bool) -> CollectiveCost | None:
        if workers == 1:
            return None
        options = {"large_bytes": LARGE_BYTES[device], "group": group}
        reduce = measure_all_reduce(transport, device, **options)
        if not halves:
            return CollectiveCost(reduce)
        return CollectiveCost(
            reduce, *measure_reduce_scatter_all_gather(transport, device, **options, workers=workers)
        )

    open_bytes = bytes_open_to_torch(device)
    with closing_transport(transport):
        transport.connect(reduce_groups(topology, {}, (), tensor=tp_size), ())
        data = measured(dp_group(mesh, worker, tp_size), topology.size // tp_size, bool(job.sharded))
        tensor = measured(tp_group(mesh, worker, tp_size), tp_size, True)
        return MeshCollectiveCosts(data, tensor, max(0, open_bytes - bytes_open_to_torch(device)))


def measure_mesh_links(transport: Transport, probes: Sequence[Probe], device: str) -> list[ProbeResult]:
    """The results of the probes whose hub this endpoint is. Closes `transport`, of which all endpoints call this at the same
    time."""
    with closing_transport(transport):
        transport.connect(probe_groups(transport.topology), probe_lanes(probes))
        return measure_links(transport, probes, device)


def profile_layers(
    job: Job,
    traced: TracedModel,
    target: Target,
    loss: JobLoss,
    *,
    mesh: str,
    device: str,
    compiler: StageCompiler | None,
) -> LayerProfile:
    """The profile of every layer of `traced` on this device, whose inputs have this `target`; with a `compiler` of compiled
    layers."""
    tp_size = job.tp_size(mesh)
    probe = TensorParallelProbe(tp_size, job.resources.tensor_plan) if tp_size > 1 else None
    return measure_layers(
        traced,
        loss.with_output_spec(traced.tree_spec),
        target,
        device=device,
        repeats=PROFILE_REPEATS,
        tensor_parallel=probe,
        compiler=compiler,
    )


def profile_key(
    job: Job, device: str, batches: Batches, microbatches: int, workers: int, tensor: int = 1
) -> str:
    """The cache key of a layer profile: a hash of model, shapes, precision, loss, compilation, kind of device, torch,
    tensor-parallel size (`tensor`), and on CPU the `workers` of the gang, which share the cores."""
    inputs, target = batches.sample
    rows = batches.rows(microbatches)
    parts = {
        "model": asdict(replace(job.model, weights=None)),
        "code": asdict(job.code),
        "loss": job.loss and asdict(job.loss),
        "keywords": batches.keywords,
        "shapes": [[[rows, *t.shape[1:]], str(t.dtype)] for t in (*inputs, *target_tensors(target))],
        "precision": [job.training.precision, job.training.transfers, *_value_if_set(job.training.tf32)],
        "device": device,
        "device_name": device_kind(device),
        "workers": workers if device == "cpu" else 1,
        "torch": torch.__version__,
        "format": PROFILE_FORMAT,
    }
    if job.training.compile:  # what is measured without a compiler is not what runs once there is one
        parts["compiled"] = missing_compiler(device) is None
    if tensor > 1:
        parts["tensor"] = [tensor, job.resources.tensor_plan]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _value_if_set(value: bool | None) -> list[bool]:
    """Nothing where a setting is left unset: profiles that are older than the setting keep their keys."""
    return [] if value is None else [value]
