"""The worker's benchmark calls (memory, layers, optimizer, collectives, links) and the profile cache key.

The cache key covers all that changes a layer's time: model, code, loss, shapes, precision, device name, torch
version, tensor parallelism, whether a compiler is there and, on CPU, the gang's size, since workers share the cores.
A setting that is left unset is not part of the key, so that older cached profiles stay valid.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from worker.actor.batch_feed import Batches
from worker.actor.device import device_kind, make_transport, processor_share
from worker.actor.model_host import JobModel
from worker.actor.optimizer import (
    check_optimizer_for_tensor_parallel,
    check_optimizer_for_zero1,
    make_optimizer,
    measure_optimizer_state,
)
from worker.actor.telemetry import memory_limit
from worker.benchmark.engine_overhead import measure_action
from worker.benchmark.layer_costs import TensorParallelProbe, measure_layers
from worker.benchmark.links import LARGE_BYTES, Probe, ProbeResult, measure_links, probe_groups, probe_lanes
from worker.benchmark.optimizer_step import (
    measure_all_reduce,
    measure_reduce_scatter_all_gather,
    measure_update,
)
from worker.contract.costs import UpdateCosts
from worker.contract.failures import attributed_to
from worker.contract.job import FP16, Job, LossScaling
from worker.contract.profile import PROFILE_FORMAT, CollectiveCost, MeshCollectiveCosts, OptimizerState
from worker.contract.reasons import Reason
from worker.engine.compile import StageCompiler, missing_compiler
from worker.engine.results import autocast_dtype
from worker.model.pytree import target_tensors
from worker.parallel.process_groups import dp_group, reduce_groups, tp_group
from worker.transport.base import Topology, Transport, closing_transport

PROFILE_REPEATS = 5


class BenchmarkCalls:
    """The calls of a worker that measure."""

    _job: Job
    _mesh: str
    _worker: int
    _device: str
    _workers_per_mesh: int
    _model: JobModel
    _batches: Batches
    _loss: Callable[..., torch.Tensor] | None

    def _set_microbatches(self, microbatches: int | None) -> None:
        raise NotImplementedError

    def memory_limit(self, sharing: int) -> int | None:
        """Bytes that this worker may plan with, one of `sharing` on the same node (CPU) or GPU; None if unknown."""
        given = self._job.resources.memory_per_worker
        return given if isinstance(given, int) else memory_limit(self._device, sharing)

    def processor_share(self) -> float:
        """The part of a processor core that this worker gets while all of them compute."""
        return processor_share()

    def optimizer_state(self) -> OptimizerState:
        """What the job's optimizer keeps of the parameters that it trains."""
        make = functools.partial(make_optimizer, self._job.optimizer)
        if self._job.sharded:
            check_optimizer_for_zero1(make, self._device)
        if self._job.resources.tensor > 1:
            check_optimizer_for_tensor_parallel(make, self._job.resources.tensor, self._device)
        return measure_optimizer_state(make, self._device)

    def update_costs(self) -> UpdateCosts:
        """What the engine's REDUCE and STEP take on this worker alone, with the job's optimizer."""
        make = functools.partial(make_optimizer, self._job.optimizer)
        training = self._job.training
        scaling = (training.loss_scaling or LossScaling()) if training.precision == FP16 else None
        return measure_update(make, self._device, training.clip_grad_norm, scaling)

    @attributed_to(Reason.START_TIMEOUT)
    def measure_collectives(
        self, *, store: tuple[str, int], host: str, connect_s: float
    ) -> MeshCollectiveCosts:
        """What sums over the workers of this mesh take: between those that have other samples, with the two halves of a sum
        where the job shares the optimizer's state, and between those that share matrices. All call this at the same
        time."""
        topology, tensor = (
            Topology((self._mesh,), self._workers_per_mesh),
            self._job.tp_size(self._mesh),
        )
        transport = self._transport(topology, store, host, connect_s)
        of_data, of_tensor = (named(self._mesh, self._worker, tensor) for named in (dp_group, tp_group))
        with closing_transport(transport):
            transport.connect(reduce_groups(topology, {}, (), tensor=tensor), ())

            def measured(group: str, workers: int, halves: bool) -> CollectiveCost | None:
                if workers == 1:
                    return None
                how = {"large_bytes": LARGE_BYTES[self._device], "group": group}
                sums = measure_all_reduce(transport, self._device, **how)
                more = (
                    measure_reduce_scatter_all_gather(transport, self._device, **how, workers=workers)
                    if halves
                    else ()
                )
                return CollectiveCost(sums, *more)

            return MeshCollectiveCosts(
                data=measured(of_data, topology.size // tensor, bool(self._job.sharded)),
                tensor=measured(of_tensor, tensor, True),
            )

    @attributed_to(Reason.START_TIMEOUT)
    def measure_links(
        self,
        *,
        probes: Sequence[Probe],
        topology: Topology,
        store: tuple[str, int],
        host: str,
        connect_s: float,
    ) -> list[ProbeResult]:
        """What the probes found whose hub this mesh is; every worker 0 calls this at the same time."""
        transport = self._transport(topology, store, host, connect_s)
        with closing_transport(transport):
            transport.connect(probe_groups(topology), probe_lanes(probes))
            return measure_links(transport, probes, self._device)

    @attributed_to(Reason.START_TIMEOUT)
    def measure_action(
        self, *, topology: Topology, store: tuple[str, int], host: str, connect_s: float
    ) -> float:
        """Processor seconds of the engine for an action; every worker 0 calls this at the same time."""
        return measure_action(self._transport(topology, store, host, connect_s))

    @attributed_to(Reason.USER_CODE_RAISED)
    def profile(self, microbatches: int | None = None) -> dict[str, Any]:
        """Measure every layer on this device, for the batch in so many microbatches; JSON of a LayerProfile."""
        self._set_microbatches(microbatches)
        traced = self._model.traced(self._batches.sample[0])
        tensor, plan = self._job.tp_size(self._mesh), self._job.resources.tensor_plan
        profile = measure_layers(
            traced,
            self._loss.with_output_spec(traced.tree_spec),
            self._batches.sample[1],
            device=self._device,
            repeats=PROFILE_REPEATS,
            sharing=TensorParallelProbe(tensor, plan) if tensor > 1 else None,
            compiler=self._compiler() if self._job.training.compile else None,
        )
        return profile.to_json()

    def _compiler(self) -> StageCompiler:
        training = self._job.training
        return StageCompiler(
            device=self._device, autocast=autocast_dtype(training.precision), limit_s=training.compile_limit_s
        )

    def _transport(
        self, topology: Topology, store: tuple[str, int], host: str, connect_s: float
    ) -> Transport:
        where = {"mesh": self._mesh, "worker": self._worker, "store": store, "host": host}
        return make_transport(self._device, topology, **where, connect_s=connect_s)


def profile_key(
    job: Job, device: str, batches: Batches, microbatches: int, workers: int, tensor: int = 1
) -> str:
    """Of model, shapes, precision, loss, whether compiled, kind of device, torch, how many share matrices (`tensor`), and
    on CPU the `workers` of the gang, which share the cores. Workers of two kinds thus have two keys."""
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
    """Nothing where a setting is left alone: what was measured before there was one keeps its key."""
    return [] if value is None else [value]
