"""One worker's evaluation: its batches through the evaluated stages, by a program of forwards only.

Nothing that training sees is changed: parameters and buffers are only read, the loss and the process's random generators
are afterwards what they were. Runs on the transport of the training's engine, between two of its steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from worker.data.evaluation import EvaluationBatches
from worker.engine import Engine, SlotLimits
from worker.engine.groups import workers_group
from worker.engine.reshard import Plans
from worker.job import Job
from worker.job_loss import JobLoss, Metrics
from worker.model.evaluating import EvaluationStages
from worker.nests import Target, tokens_of
from worker.program import program_from_json
from worker.reading import StageReader
from worker.running import run_options
from worker.step_values import EvaluatedBatch
from worker.training import ignored_target
from worker.transport.base import Transport


@dataclass(frozen=True)
class EvaluationProgram:
    """A mesh's program of forwards only (JSON), with the planned seconds and starts of its instructions; `reshardings`
    are the transfers of all meshes that do not go in pairs of workers."""

    program: Sequence[Mapping[str, Any]]
    planned_s: Sequence[float]
    planned_starts_s: Sequence[float | None]
    reshardings: Plans = field(default_factory=dict)


class Evaluator:
    """See `start`, `run` and `close`. `stages` read the parameters of the trained ones."""

    def __init__(
        self,
        job: Job,
        planned: EvaluationProgram,
        *,
        mesh: str,
        worker: int,
        mesh_of_stage: tuple[str, ...],
        stages: EvaluationStages,
        batches: EvaluationBatches,
        loss: JobLoss,
        transport: Transport,
        limits: SlotLimits,
        device: str,
    ):
        self._stages, self._batches, self._loss = stages, batches, loss.reading(stages.form)
        self._transport, self._device = transport, device
        self._ignored, self._tensor = ignored_target(job), job.tensor_of(mesh)
        self._reader = StageReader(
            stages.stages,
            batches,
            device=device,
            last=batches.size.batches - 1,
            limit_s=limits.limit_s(max(planned.planned_s, default=0.0)),
        )
        self._engine = Engine(
            mesh=mesh,
            worker=worker,
            program=program_from_json(planned.program),
            stages=stages.stages,
            edges=stages.edges,
            mesh_of_stage=mesh_of_stage,
            tied=stages.tied,
            microbatches=batches.microbatches,
            loss=self._undisturbed_loss,
            optimizer=None,
            transport=_Connected(transport),
            options=replace(
                run_options(job, mesh, limits=limits, device=device),
                ignored_target=None,
                keeps_random=True,
                sharded=(),
            ),
            planned_s=planned.planned_s,
            planned_starts_s=planned.planned_starts_s,
            reshardings=planned.reshardings,
        )

    @property
    def lanes(self) -> tuple[tuple[str, str], ...]:
        """The pairs of peers that are to be connected before `start`."""
        return self._engine.lanes

    def start(self) -> None:
        """Make the lanes; the transport is connected."""
        self._engine.connect()

    def run(self, batch: int) -> EvaluatedBatch:
        """What batch `batch` gave. Batch 0 begins an evaluation."""
        if batch == 0:
            self._begin()
        inputs, targets = self._reader.take(batch)
        result = self._engine.run_step(batch, inputs, targets)
        counted = self._batches.counted(batch) if self._reader.has_output else 0
        return EvaluatedBatch(
            losses=result.losses[:counted],
            metrics={name: values[:counted] for name, values in result.metrics.items()},
            weights=[self._weight(target) for target in (targets or ())[:counted]],
        )

    def close(self) -> None:
        """End threads; the transport is not this one's to close."""
        self._reader.close()
        self._engine.close()

    @torch.no_grad()
    def _begin(self) -> None:
        """Have the buffers of worker 0 of the mesh, as a checkpoint has."""
        transport, tensor = self._transport, self._tensor  # those that share matrices have the same buffers
        buffers, several = self._stages.begin(), transport.topology.workers(transport.mesh) > tensor
        for buffer in buffers if several else ():
            sent = buffer.reshape(-1).resolve_conj().clone().view(torch.uint8)  # of any type, to the bit
            if transport.worker >= tensor:
                sent.zero_()
            transport.all_reduce(workers_group(transport.mesh, transport.worker, tensor), sent)
            buffer.copy_(sent.view(buffer.dtype).view(buffer.shape))
        if self._device == "cuda":  # lanes are other streams
            torch.cuda.synchronize()

    def _weight(self, target: Target) -> float:
        return 1.0 if self._ignored is None else float(tokens_of(target, self._ignored))

    def _undisturbed_loss(self, output: Any, target: Target) -> tuple[torch.Tensor, Metrics]:
        with undisturbed(self._loss.target):
            return self._loss.with_metrics(output, target)


@contextlib.contextmanager
def undisturbed(loss: Any) -> Iterator[None]:
    """A loss in eval mode, where it has one; afterwards its attributes and buffers are what they were."""
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


class _Connected:
    """A transport that the training's engine connects and closes."""

    def __init__(self, transport: Transport):
        self._transport = transport

    def connect(self, groups: Mapping[str, tuple[int, ...]], lanes: tuple[tuple[str, str], ...]) -> None:
        """It is."""

    def close(self) -> None:
        """It will be."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
