"""Worker: the Ray actor of one accelerator; builds its stages, runs its program and answers the driver's calls.

The driver traces and measures first, then calls the methods in the order in which they are defined.
Everything a method raises is an AttemptFailure with a reason code.
Must not know Ray (the driver wraps the class), the driver or the control plane.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from worker.actor.assignment import raise_as_attempt_failure, run_options
from worker.actor.batch_feed import Batches, StageReader
from worker.actor.benchmarks import BenchmarkCalls, profile_key
from worker.actor.device import WorkerAddress, choose_device, own_node_address, use_tf32
from worker.actor.evaluation import EvaluationBatches, EvaluationProgram, EvaluationSize, Evaluator
from worker.actor.model_host import JobModel, ModelCalls
from worker.actor.optimizer import learning_rate, make_loss, make_optimizer, make_schedule
from worker.actor.saver import CheckpointCalls
from worker.actor.step_result import EvaluatedBatch, WorkerStep
from worker.actor.telemetry import GpuMeter, PeakMemory, gpu_peak_flops
from worker.checks.replicas import Fingerprint, checksums, named_tensors
from worker.checks.sharding import StageCheckContext, check_tensor_parallel
from worker.contract import failures
from worker.contract.failures import as_failure, attributed_to
from worker.contract.job import Job, microbatch_counts
from worker.contract.program import program_from_json
from worker.contract.reasons import Reason
from worker.engine.compile import compile_stages
from worker.engine.engine import Engine
from worker.engine.reshardings import ReshardingPlans
from worker.engine.results import SlotLimits, autocast_dtype
from worker.model.factory import resolve
from worker.model.serialization import ParameterValues
from worker.model.stages import StageModule
from worker.parallel.shard_spec import CutPoints, ShardSpec
from worker.parallel.tensor.shards import TensorParallelShards, tensor_parallel_stages
from worker.transport.base import ConnectError, Topology

log = logging.getLogger(__name__)


class Worker(BenchmarkCalls, CheckpointCalls, ModelCalls):
    """One accelerator of one mesh. The driver traces and measures first; then it calls the methods in the order in which
    they stand here."""

    def __init__(self, *, job: Job, mesh: str, worker: int, device: str):
        torch.set_num_threads(1)
        use_tf32(job.training.tf32)
        self._job = job
        self._mesh = mesh
        self._worker = worker
        self._device = device
        self._model = JobModel(job, device)
        self._engine: Engine | None = None
        self._reader: StageReader | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._memory = PeakMemory(device)
        self._gpu = GpuMeter(device)
        self._planned_bytes: int | None = None
        self._evaluation_batches: EvaluationBatches | None = None
        self._evaluator: Evaluator | None = None
        self._tensor_shards: TensorParallelShards | None = None

    def address(self) -> WorkerAddress:
        """Where this worker runs; takes its GPU. RuntimeError when there is none."""
        import ray

        failures.start_breadcrumbs()
        choose_device(self._device, ray.get_gpu_ids, self._job.meshes)

        context = ray.get_runtime_context()
        return WorkerAddress(
            mesh=self._mesh,
            worker=self._worker,
            node=own_node_address(),
            node_id=context.get_node_id(),
            process_id=os.getpid(),
            device=self._device,
        )

    def gpu_peak_flops(self) -> float | None:
        """What this worker's GPU could do in the job's precision, in operations a second; None: not known."""
        return gpu_peak_flops(self._job.training.precision)

    def clock(self) -> float:
        """This process's monotonic clock, in seconds."""
        return time.monotonic()

    def prepare(self, workers_per_mesh: int) -> dict[int, str]:
        """Build the data and the loss; of each number of microbatches that may be chosen the key under which its
        profile is cached."""
        self._workers_per_mesh = workers_per_mesh
        counts = microbatch_counts(self._job)
        tensor = self._job.tp_size(self._mesh)  # so many workers have the same samples
        self._data_workers = workers_per_mesh // tensor
        data = {"worker": self._worker // tensor, "workers_per_mesh": self._data_workers}
        self._batches = Batches(self._job, **data, microbatches=counts[-1])
        self._model.keywords = self._batches.keywords
        if self._job.evaluation is not None:
            self._evaluation_batches = EvaluationBatches(self._job, **data, microbatches=counts[-1])
            self._evaluation_batches.check_matches_training(self._batches)
        self._build_loss()
        workers = sum(self._job.mesh_sizes)
        return {
            count: profile_key(self._job, self._device, self._batches, count, workers, tensor)
            for count in counts
        }

    def load(
        self,
        *,
        begins: Sequence[str],
        mesh_of_stage: Sequence[str],
        program: Sequence[Mapping[str, Any]],
        planned_s: Sequence[float] | None,
        topology: Topology,
        store: tuple[str, int],
        host: str,
        connect_s: float,
        slot_limits: SlotLimits,
        planned_bytes: int | None = None,
        microbatches: int | None = None,
        recomputed: Sequence[int] = (),
        weights: ParameterValues | None = None,
        planned_starts_s: Sequence[float | None] | None = None,
        reshardings: ReshardingPlans | None = None,
        evaluation: EvaluationProgram | None = None,
    ) -> list[str]:
        """Cut the model, keep this mesh's stages, connect to every peer and compile; what to tell of that.

        The stages `recomputed` run their forward again in the backward. `planned_bytes` is the most that this
        mesh holds by the plan, for messages; `microbatches` what was planned, where the job leaves it open;
        `weights` are those of a worker that took its graph; `reshardings` the transfers not in pairs;
        `evaluation` is run by `evaluate`.
        """
        self._planned_bytes = planned_bytes
        self._set_microbatches(microbatches)
        with self._raise_as_attempt_failure():
            training, schedule = self._job.training, self._job.optimizer.schedule
            here = [i for i, mesh in enumerate(mesh_of_stage) if mesh == self._mesh]
            graph = self._model.cut(self._batches.sample[0], begins, here, weights)
            self._tensor_shards, whole = None, {i: graph.stages[i] for i in here}
            own = whole
            if self._job.tp_size(self._mesh) > 1:
                self._tensor_shards, own = tensor_parallel_stages(self._job, whole, self._mesh, self._worker)
            self._stages = stages = {i: stage.to(self._device) for i, stage in own.items()}
            self._reader = StageReader(
                stages,
                self._batches,
                device=self._device,
                last=training.steps,
                limit_s=slot_limits.limit_s(max(planned_s or (0.0,))),  # as others wait for this mesh
            )
            transport = self._transport(topology, store, host, connect_s)
            self._engine = Engine(
                mesh=self._mesh,
                worker=self._worker,
                program=program_from_json(program),
                stages=stages,
                edges=graph.edges,
                mesh_of_stage=tuple(mesh_of_stage),
                tied=graph.tied,
                microbatches=self._batches.microbatches,
                loss=self._loss.with_output_spec(self._model.tree_spec).with_metrics,
                optimizer=self._make_optimizer,
                lr_schedule=functools.partial(make_schedule, schedule) if schedule else None,
                transport=transport,
                options=run_options(self._job, self._mesh, limits=slot_limits, device=self._device),
                planned_s=planned_s,
                recomputed=frozenset(recomputed),
                planned_starts_s=planned_starts_s,
                reshardings=reshardings,
                tensor=self._tensor_shards,
            )
            self._memory.set_baseline(
                t for stage in stages.values() for t in (*stage.parameters(), *stage.buffers())
            )
            if evaluation is not None:
                self._evaluator = Evaluator(
                    self._job,
                    evaluation,
                    mesh=self._mesh,
                    worker=self._worker,
                    mesh_of_stage=tuple(mesh_of_stage),
                    stages=self._model.evaluation_stages(
                        begins,
                        stages,
                        self._device,
                        *([self._tensor_shards.shard_stage_like] if self._tensor_shards else []),
                    ),
                    batches=self._evaluation_batches,
                    loss=self._loss,
                    transport=transport,
                    limits=slot_limits,
                    device=self._device,
                )
            try:
                self._engine.connect(self._evaluator.lanes if self._evaluator else ())
            except ConnectError as error:
                raise as_failure(error, Reason.START_TIMEOUT) from None
            if self._tensor_shards is not None and self._device == "cuda":
                self.check_tensor_parallel(whole)
            if self._evaluator is not None:
                self._evaluator.start()
            if not training.compile:
                return []
            inputs, target = self._batches.sample
            meets = self._tensor_shards is not None or training.sync_batch_norm
            return compile_stages(self._engine, self._compiler(), inputs, target, self._device, meets=meets)

    def check_tensor_parallel(self, whole: Mapping[int, StageModule]) -> None:
        """Refuse sums of shared matrices that are wrong where they run, beside the stages with `whole` ones; on all workers
        of a mesh at the same time."""
        training = self._job.training
        if not training.check_trace or training.sync_batch_norm:  # that normalises by rows of others
            return
        place = StageCheckContext(
            f"{self._mesh}/{self._worker}",
            torch.device(self._device),
            autocast_dtype(training.precision),
            training.seed,
            self._worker // self._job.tp_size(self._mesh),
            self._batches.sample[0],
        )
        for note in check_tensor_parallel(self._stages, whole, self._tensor_shards, place):
            log.warning(note)

    def shard_specs(self) -> list[ShardSpec]:
        """What this worker has of its stages' tensors, by original name."""
        return list(self._tensors_by_shard())

    @attributed_to(Reason.DATA_FAILED)
    def fingerprint(self, names: Sequence[str], cuts: Mapping[str, CutPoints]) -> Fingerprint:
        """Checksums of those of the tensors `names` that are here, of pieces of those that are cut, and of the first
        samples."""
        return Fingerprint(checksums(self._tensors_by_shard(), names, cuts), self._batches.checksums())

    def _tensors_by_shard(self) -> dict[ShardSpec, torch.Tensor]:
        held = ShardSpec if self._tensor_shards is None else self._tensor_shards.held
        return {held(name): tensor for name, tensor in named_tensors(self._stages).items()}

    def warm_up(self, step: int) -> None:
        """Have the samples of the first step, and on CUDA load and try all kernels on them, before anybody waits for this
        mesh."""
        self._reader.ready(step)
        if self._device != "cuda":
            return
        with self._raise_as_attempt_failure():
            self._engine.warm_up(step, *self._reader.take(step, first=True))

    def has_data(self, step: int) -> bool | None:
        """Whether the data goes on as far as this step; None on workers that read none."""
        return self._reader.has(step)

    def run_step(self, step: int) -> WorkerStep:
        """Run one optimizer step."""
        rate = None if self._optimizer is None else learning_rate(self._optimizer)
        self._memory.begin()
        with self._raise_as_attempt_failure():
            inputs, targets = self._reader.take(step)
            result = self._engine.run_step(step, inputs, targets)
        return WorkerStep(
            slots=result.slots,
            losses=result.losses,
            metrics=result.metrics,
            grad_norm=result.grad_norm,
            learning_rate=rate,
            skipped=result.skipped,
            loss_scale=result.loss_scale,
            overflowed=result.overflowed,
            peak_memory_bytes=self._memory.read(),
            tokens_per_sample=self._batches.tokens_per_sample,
            gpu=self._gpu.read(),
        )

    def evaluation_size(self) -> EvaluationSize:
        """How much there is to evaluate, in the microbatches that were planned."""
        return self._evaluation_batches.size

    def evaluate(self, batch: int) -> EvaluatedBatch:
        """Run one batch of the evaluation data through the evaluated stages; batch 0 begins an evaluation. Changes
        nothing else."""
        with self._raise_as_attempt_failure():
            return self._evaluator.run(batch)

    def _set_microbatches(self, microbatches: int | None) -> None:
        """Deal the batch in so many microbatches from now on; None keeps what is."""
        if microbatches is None or microbatches == self._batches.microbatches:
            return
        self._batches.set_microbatches(microbatches)
        if self._evaluation_batches is not None:
            self._evaluation_batches.set_microbatches(microbatches)
        self._model.forget_graph()  # it has the shapes of a microbatch

    def close(self) -> None:
        """End threads and connections; an actor that is killed needs no such call."""
        if self._reader is not None:
            self._reader.close()
        if self._evaluator is not None:
            self._evaluator.close()
        if self._engine is not None:
            self._engine.close()

    @attributed_to(Reason.MODEL_BUILD_FAILED)
    def _build_loss(self) -> None:
        self._loss = make_loss(self._job.loss, self._device)
        for part in (self._job.optimizer, self._job.optimizer.schedule, self._job.model):
            if part:
                resolve(part.factory)  # a wrong name is told before anything is measured

    def _make_optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        names = {id(tensor): name for name, tensor in named_tensors(self._stages).items()}
        self._optimizer = make_optimizer(self._job.optimizer, parameters, [names[id(p)] for p in parameters])
        return self._optimizer

    def _raise_as_attempt_failure(self) -> AbstractContextManager[None]:
        return raise_as_attempt_failure(
            self._memory, mesh=self._mesh, device=self._device, planned_bytes=self._planned_bytes
        )
