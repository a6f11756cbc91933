"""What a worker measures before there is a plan: its device, its layers, its links. Part of `Worker` (worker/actor.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from worker.batches import Batches
from worker.compiled.compiler import Compiler
from worker.device import make_transport
from worker.engine.groups import reduce_groups, tensor_group, workers_group
from worker.engine.results import autocast_dtype
from worker.engine_measure import measure_action
from worker.failure import attributed_to
from worker.job import Job
from worker.memory import memory_limit
from worker.model import measure_layers
from worker.model.profile import OptimizerState
from worker.model.sum_costs import MeshSums, SumCosts
from worker.model.update_costs import UpdateCosts
from worker.node import processor_share
from worker.precision import FP16, LossScaling
from worker.reasons import Reason
from worker.tensor.measuring import Sharing
from worker.traced_model import JobModel
from worker.training import check_of_parts, check_shared, make_optimizer, measure_optimizer_state
from worker.transport import Topology
from worker.transport.base import Transport, for_a_while
from worker.transport.links import LARGE_BYTES, groups_of, lanes_of, measure_links
from worker.transport.network import Measured, Probe
from worker.update_measure import measure_sharing, measure_sum, measure_update

PROFILE_REPEATS = 5


class Measuring:
    """The calls of a worker that measure."""

    _job: Job
    _mesh: str
    _worker: int
    _device: str
    _workers_per_mesh: int
    _model: JobModel
    _batches: Batches
    _loss: Callable[..., torch.Tensor] | None

    def _use(self, microbatches: int | None) -> None:
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
            check_shared(make, self._device)
        if self._job.resources.tensor > 1:
            check_of_parts(make, self._job.resources.tensor, self._device)
        return measure_optimizer_state(make, self._device)

    def update_costs(self) -> UpdateCosts:
        """What the engine's REDUCE and STEP take on this worker alone, with the job's optimizer."""
        make = functools.partial(make_optimizer, self._job.optimizer)
        training = self._job.training
        scaling = (training.loss_scaling or LossScaling()) if training.precision == FP16 else None
        return measure_update(make, self._device, training.clip_grad_norm, scaling)

    @attributed_to(Reason.START_TIMEOUT)
    def measure_sum(self, *, store: tuple[str, int], host: str, connect_s: float) -> MeshSums:
        """What sums over the workers of this mesh take: between those that have other samples, with the two halves of a sum
        where the job shares the optimizer's state, and between those that share matrices. All call this at the same
        time."""
        topology, tensor = (
            Topology((self._mesh,), self._workers_per_mesh),
            self._job.tensor_of(self._mesh),
        )
        transport = self._transport(topology, store, host, connect_s)
        of_data, of_tensor = (
            named(self._mesh, self._worker, tensor) for named in (workers_group, tensor_group)
        )
        with for_a_while(transport):
            transport.connect(reduce_groups(topology, {}, (), tensor=tensor), ())

            def measured(group: str, workers: int, halves: bool) -> SumCosts | None:
                if workers == 1:
                    return None
                how = {"large_bytes": LARGE_BYTES[self._device], "group": group}
                sums = measure_sum(transport, self._device, **how)
                more = measure_sharing(transport, self._device, **how, workers=workers) if halves else ()
                return SumCosts(sums, *more)

            return MeshSums(
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
    ) -> list[Measured]:
        """What the probes found whose hub this mesh is; every worker 0 calls this at the same time."""
        transport = self._transport(topology, store, host, connect_s)
        with for_a_while(transport):
            transport.connect(groups_of(topology), lanes_of(probes))
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
        self._use(microbatches)
        traced = self._model.traced(self._batches.sample[0])
        tensor, plan = self._job.tensor_of(self._mesh), self._job.resources.tensor_plan
        profile = measure_layers(
            traced,
            self._loss.reading(traced.form),
            self._batches.sample[1],
            device=self._device,
            repeats=PROFILE_REPEATS,
            sharing=Sharing(tensor, plan) if tensor > 1 else None,
            compiler=self._compiler() if self._job.training.compile else None,
        )
        return profile.to_json()

    def _compiler(self) -> Compiler:
        training = self._job.training
        return Compiler(
            device=self._device, autocast=autocast_dtype(training.precision), limit_s=training.compile_limit_s
        )

    def _transport(
        self, topology: Topology, store: tuple[str, int], host: str, connect_s: float
    ) -> Transport:
        where = {"mesh": self._mesh, "worker": self._worker, "store": store, "host": host}
        return make_transport(self._device, topology, **where, connect_s=connect_s)
