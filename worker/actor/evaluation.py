"""Evaluates on one worker: feeds the evaluation data, in order and once, through a forwards-only program.

Changes nothing that training sees: parameters and buffers are only read; the loss's state and the process-wide RNGs
are restored afterwards. Runs on the transport of the training engine, between two training steps.
Samples behind the last whole microbatch are left out, as traced stages take no smaller one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from worker.actor.assignment import Assignment, run_options
from worker.actor.batch_feed import Batches, StageReader
from worker.actor.loss import JobLoss, Metrics
from worker.actor.optimizer import target_counter
from worker.actor.step_result import EvaluatedBatch
from worker.contract.failures import attributed_to
from worker.contract.job import Job
from worker.contract.reasons import Reason
from worker.data.dataset import SampleOrder
from worker.data.microbatches import MicrobatchTensors
from worker.engine.engine import Engine, engine_collectives
from worker.engine.local_stages import LocalStages
from worker.model.eval_mode import EvaluationStages
from worker.model.pytree import Target
from worker.parallel.collectives import Collectives
from worker.parallel.process_groups import dp_group
from worker.transport.base import Transport


@dataclass(frozen=True)
class EvaluationSize:
    """Runs of the program for one evaluation, the samples that count, and those behind the last whole microbatch."""

    batches: int
    samples: int
    left_out: int


class EvaluationBatches(Batches):
    """Batches of the evaluation data: batch k has the samples from k * training.global_batch on, in order.

    Samples behind the last whole microbatch are left out: traced stages take no smaller one.
    """

    def __init__(self, job: Job, *, worker: int, workers_per_mesh: int, microbatches: int):
        self._limit = job.evaluation.steps
        training = replace(job, data=job.evaluation.data)
        super().__init__(
            training, worker=worker, workers_per_mesh=workers_per_mesh, microbatches=microbatches
        )

    @property
    def whole_microbatches(self) -> int:
        """The number of microbatches that are evaluated."""
        wanted = None if self._limit is None else self._limit * self.microbatches
        if self._source.samples is None:
            return wanted
        whole = self._source.samples // self._samples_per_microbatch
        return whole if wanted is None else min(whole, wanted)

    @property
    def size(self) -> EvaluationSize:
        done = self.whole_microbatches * self._samples_per_microbatch
        wanted = done if self._source.samples is None else self._source.samples
        if self._limit is not None:
            wanted = min(wanted, self._limit * self._job.training.global_batch)
        batches = -(
            -self.whole_microbatches // self.microbatches
        )  # microbatches of the last one may count for nothing
        return EvaluationSize(batches, done, wanted - done)

    @attributed_to(Reason.DATA_FAILED)
    def check_matches_training(self, trained: Batches) -> None:
        """ValueError where samples have other names or shapes than the model was traced for."""
        for what, evaluated, training in (
            ("inputs", self.keywords or "by position", trained.keywords or "by position"),
            ("shapes", _input_shapes(self.sample), _input_shapes(trained.sample)),
        ):
            if evaluated != training:
                raise ValueError(
                    f"a microbatch of evaluation.data {self._job.data.factory!r} has the {what} {evaluated}, one of the "
                    f"training data {training}: give both the same"
                )

    @property
    def _samples_per_microbatch(self) -> int:
        """Over all workers."""
        return self._job.training.global_batch // self.microbatches

    def counted_microbatches(self, batch: int) -> int:
        """The number of microbatches of a batch that count."""
        return min(self.microbatches, self.whole_microbatches - batch * self.microbatches)

    def _set_microbatches(self, microbatches: int) -> None:
        super()._set_microbatches(microbatches)
        samples, size = self._source.samples, self._samples_per_microbatch
        if samples is None and self._limit is None:
            raise ValueError(
                f"evaluation.data {self._job.data.factory!r} is a stream, of which nobody knows the end: give "
                "evaluation.steps, the batches that are evaluated"
            )
        if samples is not None and samples < size:
            raise ValueError(
                f"evaluation.data {self._job.data.factory!r} has {samples} samples, a microbatch {size}: give it at least "
                "as many, or train with more microbatches"
            )

    def _order(self, microbatches: int) -> SampleOrder:
        return replace(super()._order(microbatches), first_step=0, once=True, row_multiple=None)

    def _last_step(self) -> int:
        return self.size.batches - 1


def _input_shapes(rows: MicrobatchTensors) -> str:
    inputs, _ = rows
    return ", ".join(f"{list(tensor.shape)} {tensor.dtype}" for tensor in inputs)


class Evaluator:
    """Runs the evaluation program on one worker. `stages` read the parameters of the trained ones."""

    def __init__(
        self,
        job: Job,
        assignment: Assignment,
        *,
        stages: EvaluationStages,
        batches: EvaluationBatches,
        loss: JobLoss,
        transport: Transport,
        device: str,
    ):
        self._stages, self._batches, self._loss = stages, batches, loss.with_output_spec(stages.tree_spec)
        self._device = device
        mesh, limits, program = assignment.mesh, assignment.slot_limits, assignment.evaluation
        self._count, self._tensor = target_counter(job, loss), job.tp_size(mesh)
        self._reader = StageReader(
            stages.stages,
            batches,
            device=device,
            last=batches.size.batches - 1,
            limit_s=limits.limit_s(program.longest_slot_s),
        )
        options = replace(
            run_options(job, mesh, limits=limits, device=device),
            count_targets=None,
            keeps_random=True,
            sharded=(),
        )
        self._collectives = engine_collectives(
            _ConnectedTransport(transport), program, assignment.mesh_of_stage, stages.tied, options
        )
        self._engine = Engine(
            program,
            LocalStages(stages.stages, assignment.mesh_of_stage, stages.edges, stages.tied),
            self._collectives,
            loss=self._loss_without_side_effects,
            options=options,
        )

    @property
    def lanes(self) -> tuple[tuple[str, str], ...]:
        """The pairs of peers that are to be connected before `start`."""
        return self._engine.lanes

    def start(self) -> None:
        """Make the lanes on the connected transport."""
        self._engine.connect()

    def run(self, batch: int) -> EvaluatedBatch:
        """The losses and metrics of a batch. Batch 0 begins an evaluation."""
        if batch == 0:
            self._begin()
        inputs, targets = self._reader.take(batch)
        result = self._engine.run_step(batch, inputs, targets)
        counted = self._batches.counted_microbatches(batch) if self._reader.has_output else 0
        return EvaluatedBatch(
            losses=result.losses[:counted],
            metrics={name: values[:counted] for name, values in result.metrics.items()},
            weights=[self._weight(target) for target in (targets or ())[:counted]],
        )

    def close(self) -> None:
        """End threads; the training engine closes the transport."""
        self._reader.close()
        self._engine.close()

    def _begin(self) -> None:
        """Take the buffers of worker 0 of the mesh, which a checkpoint stores."""
        take_buffers_of_first(self._stages.begin(), self._collectives, self._tensor)
        if self._device == "cuda":  # lanes are other streams
            torch.cuda.synchronize()

    def _weight(self, target: Target) -> float:
        return 1.0 if self._count is None else float(self._count(target))

    def _loss_without_side_effects(self, output: Any, target: Target) -> tuple[torch.Tensor, Metrics]:
        with loss_state_restored(self._loss.target):
            return self._loss.with_metrics(output, target)


@torch.no_grad()
def take_buffers_of_first(buffers: Sequence[torch.Tensor], collectives: Collectives, tensor: int) -> None:
    """Overwrite `buffers` by those of the first workers of the mesh, of any dtype, bit for bit: a sum over the dp group
    to which the others add zero bytes. The `tensor` tensor-parallel ranks of a replica have equal buffers."""
    mesh, worker = collectives.mesh, collectives.worker
    several = collectives.topology.workers(mesh) > tensor
    for buffer in buffers if several else ():
        sent = buffer.reshape(-1).resolve_conj().clone().view(torch.uint8)
        if worker >= tensor:
            sent.zero_()
        collectives.all_reduce(dp_group(mesh, worker, tensor), sent)
        buffer.copy_(sent.view(buffer.dtype).view(buffer.shape))


@contextlib.contextmanager
def loss_state_restored(loss: Any) -> Iterator[None]:
    """Put a loss module into eval mode; afterwards its attributes and buffers are restored."""
    modules = list(loss.modules()) if isinstance(loss, nn.Module) else [loss]
    attributes = [(vars(module), dict(vars(module))) for module in modules if hasattr(module, "__dict__")]
    buffers = [(buffer, buffer.clone()) for buffer in loss.buffers()] if isinstance(loss, nn.Module) else []
    tables = [(table, dict(table)) for module in modules for table in [getattr(module, "_buffers", {})]]
    try:
        if isinstance(loss, nn.Module):
            loss.eval()
        yield
    finally:
        for now, before in (*attributes, *tables):
            now.clear()
            now.update(before)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


class _ConnectedTransport:
    """A transport that the training's engine connects and closes."""

    def __init__(self, transport: Transport):
        self._transport = transport

    def connect(self, groups: Mapping[str, tuple[int, ...]], lanes: tuple[tuple[str, str], ...]) -> None:
        """It is."""

    def close(self) -> None:
        """It will be."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
