"""LoadedWorker: a worker with its stages, connected to all peers; it trains, evaluates and writes checkpoints."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from worker.actor.assignment import Assignment, run_options
from worker.actor.batch_feed import Batches, StageReader
from worker.actor.evaluation import EvaluationBatches, EvaluationSize, Evaluator
from worker.actor.loss import JobLoss
from worker.actor.model_host import JobModel
from worker.actor.optimizer import learning_rate, make_optimizer, make_schedule, target_counter
from worker.actor.saver import SavedState, ShardWriteResult, SnapshotMemory, WorkerCheckpoints
from worker.actor.state import KnownGraph, WorkerPlace, WorkerState
from worker.actor.step_result import EvaluatedBatch, PreparedProgram, WorkerStep
from worker.checkpoint.copies import CopyKey
from worker.checkpoint.resumption import ResumedWorker, Takeover
from worker.checks.replicas import Fingerprint, checksums, named_tensors
from worker.checks.sharding import StageCheckContext, check_tensor_parallel
from worker.contract.failures import as_failure, attributed_to
from worker.contract.planned import MeshProgram
from worker.contract.reasons import Reason
from worker.engine.compile import compile_stages, stage_compiler
from worker.engine.engine import Engine, engine_collectives
from worker.engine.local_stages import (
    LocalStages,
    named_buffers,
    named_parameters,
    tie_local_parameters,
)
from worker.engine.optim.reduce_and_step import optimizer_of
from worker.engine.results import autocast_dtype
from worker.machine.telemetry import GpuMeter, bytes_open_to_torch
from worker.model.opaque.call import opaque_calls
from worker.model.serialization import ParameterValues
from worker.model.stages import StageGraph, StageModule
from worker.parallel.process_groups import tp_group
from worker.parallel.shard_spec import CutPoints, ShardSpec
from worker.parallel.tensor.shards import TensorParallelShards, tensor_parallel_stages
from worker.transport.base import ConnectError, Transport

log = logging.getLogger(__name__)

# Every so many steps garbage is looked for among what is older than a step, too.
_FULL_COLLECTION_STEPS = 100


class LoadedWorker(WorkerState):
    """A worker that cut `model`, kept the stages of `assignment`, connected to every peer and compiled what the job says.

    `weights` are those of a worker that took its graph. Threads and connections end where the construction fails.
    """

    def __init__(
        self,
        place: WorkerPlace,
        assignment: Assignment,
        *,
        model: JobModel,
        batches: Batches,
        evaluation_batches: EvaluationBatches | None,
        loss: JobLoss,
        weights: ParameterValues | None,
    ):
        super().__init__(place)
        self.planned_bytes = assignment.planned_bytes
        self._model, self.batches, self._loss = model, batches, loss
        self._evaluation_batches = evaluation_batches
        self._gpu = GpuMeter(self.device)
        self._collects_garbage = False
        with self.raising_attempt_failures(), contextlib.ExitStack() as failing:
            graph = model.cut(
                batches.sample[0],
                assignment.stage_starts,
                list(assignment.stages),
                weights,
                examples=batches.examples,
            )
            whole = {index: graph.stages[index] for index in assignment.stages}
            transport = self.transport(
                assignment.topology,
                assignment.store,
                assignment.host,
                assignment.connect_s,
                assignment.join_s,
            )
            self.engine = self._make_engine(assignment, graph, whole, transport)
            self.evaluator: Evaluator | None = None
            failing.callback(self.close)
            failing.callback(transport.abort)  # first: it waits for nobody
            self.memory.set_baseline(
                t for stage in self.stages.values() for t in (*stage.parameters(), *stage.buffers())
            )
            if assignment.evaluation is not None:
                self.evaluator = self._make_evaluator(assignment, transport)
            self._connect()
            if self.tensor_shards is not None and self.device == "cuda":
                self.check_tensor_parallel(whole)
            if self.evaluator is not None:
                self.evaluator.start()
            self._notes = self._compile_stages()
            self._checkpoints = self._make_checkpoints()
            failing.pop_all()

    def loading_notes(self) -> list[str]:
        """Notes of the compiler on the stages."""
        return self._notes

    def _make_engine(
        self,
        assignment: Assignment,
        graph: StageGraph,
        whole: Mapping[int, StageModule],
        transport: Transport,
    ) -> Engine:
        """The engine that trains this worker's stages, which it keeps; `whole` are those of its mesh, before tensor
        parallelism splits them."""
        training, schedule = self.job.training, self.job.optimizer.schedule
        program, limits = assignment.program, assignment.slot_limits
        options = run_options(
            self.job,
            self.mesh,
            limits=limits,
            device=self.device,
            count_targets=target_counter(self.job, self._loss),
        )
        collectives = engine_collectives(transport, program, assignment.mesh_of_stage, graph.tied, options)
        self.tensor_shards: TensorParallelShards | None = None
        own = whole
        if options.tensor > 1:
            communicator = collectives.in_stage(tp_group(self.mesh, self.index, options.tensor))
            self.tensor_shards, own = tensor_parallel_stages(
                self.job, whole, self.mesh, self.index, communicator
            )
        self.stages = {index: stage.to(self.device) for index, stage in own.items()}
        tie_local_parameters(self.stages, graph.tied)
        smaller = self._model.smaller_stages(assignment.stage_starts, graph, self.stages, self.device)
        self._number_of_bucket = {stages.bucket: number for number, stages in enumerate(smaller, start=1)}
        self.reader = StageReader(
            self.stages,
            self.batches,
            device=self.device,
            last=training.steps,
            limit_s=limits.limit_s(program.longest_slot_s),  # as others wait for this mesh
            counts_ignored=training.loss_reduction == "mean",
        )
        make = functools.partial(make_optimizer, self.job.optimizer)
        optimizer = optimizer_of(self.stages, make, self.device)
        return Engine(
            program,
            LocalStages(
                self.stages,
                assignment.mesh_of_stage,
                graph.edges,
                graph.tied,
                self.tensor_shards,
                smaller,
            ),
            collectives,
            loss=self._loss.with_output_spec(self._model.tree_spec).with_metrics,
            optimizer=optimizer,
            lr_schedule=make_schedule(schedule, optimizer) if schedule and optimizer else None,
            options=options,
        )

    def _make_evaluator(self, assignment: Assignment, transport: Transport) -> Evaluator:
        like = [self.tensor_shards.shard_stage_like] if self.tensor_shards else []
        return Evaluator(
            self.job,
            assignment,
            stages=self._model.evaluation_stages(assignment.stage_starts, self.stages, self.device, *like),
            batches=self._evaluation_batches,
            loss=self._loss,
            transport=transport,
            device=self.device,
        )

    def _connect(self) -> None:
        try:
            self.engine.connect(self.evaluator.lanes if self.evaluator else ())
        except ConnectError as error:
            raise as_failure(error, Reason.START_TIMEOUT) from None

    def _compile_stages(self) -> list[str]:
        """Compile what the job says, and return the compiler's notes."""
        if not self.job.training.compile:
            return []
        inputs, target = self.batches.sample
        compiler = stage_compiler(self.job.training.precision, self.device)
        loss = self._loss.with_output_spec(self._model.tree_spec)
        return compile_stages(self.engine, compiler, inputs, target, loss)

    def _make_checkpoints(self) -> WorkerCheckpoints:
        saved = self._saved_tensors()
        return WorkerCheckpoints(
            self.job,
            mesh=self.mesh,
            worker=self.index,
            device=self.device,
            engine=self.engine,
            reader=self.reader,
            saved=SavedState(
                {spec: tensor for spec, tensor in self._tensors_by_shard().items() if spec.name in saved},
                self._model.unused_state(),
            ),
            report_copied_bytes=self.memory.exclude_bytes,
        )

    # Checks before the first step

    def check_tensor_parallel(self, whole: Mapping[int, StageModule]) -> None:
        """Compare the tensor-parallel stages with `whole` ones on this device, and refuse wrong results; all workers of a
        mesh call this at the same time."""
        training = self.job.training
        if not training.check_trace or training.sync_batch_norm:  # it normalises by rows of other workers
            return
        place = StageCheckContext(
            f"{self.mesh}/{self.index}",
            torch.device(self.device),
            autocast_dtype(training.precision),
            training.seed,
            self.place.data_rank,
            self.batches.sample[0],
        )
        for note in check_tensor_parallel(self.stages, whole, self.tensor_shards, place):
            log.warning(note)

    def shard_specs(self) -> list[ShardSpec]:
        """The slices of its stages' tensors that this worker owns, by original name."""
        return list(self._tensors_by_shard())

    @attributed_to(Reason.DATA_FAILED)
    def fingerprint(self, names: Sequence[str], cuts: Mapping[str, CutPoints]) -> Fingerprint:
        """Checksums of the local tensors among `names`, in the pieces of `cuts`, and of the first samples."""
        return Fingerprint(checksums(self._tensors_by_shard(), names, cuts), self.batches.checksums())

    def _tensors_by_shard(self) -> dict[ShardSpec, torch.Tensor]:
        shard_spec = ShardSpec if self.tensor_shards is None else self.tensor_shards.shard_spec
        return {shard_spec(name): tensor for name, tensor in named_tensors(self.stages).items()}

    def warm_up(self, step: int) -> str | None:
        """Prefetch the samples of the first step, and on CUDA load and try all kernels on them, then all collectives,
        before another mesh waits for this one; a note where these leave less memory than the plan needs."""
        self.reader.ready(step)
        if self.device != "cuda":
            return None
        with self.raising_attempt_failures():
            self.engine.warm_up(step, *self.reader.take(step, first=True))
            self.engine.rehearse(step)
        open_bytes = bytes_open_to_torch(self.device)
        if self.planned_bytes is None or self.planned_bytes <= open_bytes:
            return None
        return (
            f"kernels, NCCL's connections and other processes leave {open_bytes:,} bytes of the accelerator to torch, and "
            f"the plan needs {self.planned_bytes:,}: if a step runs out of memory, the next attempt is planned with less"
        )

    def collect_between_steps(self) -> None:
        """From now on this process looks for cyclic garbage between steps only, and no more among what is there now: a
        search of all that torch imports takes some tenths of a second, for which all meshes wait. Modules that run as they
        are may hold activations in cycles: with such there is no waiting for the end of the step."""
        gc.collect()
        gc.freeze()
        if not any(opaque_calls(stage) for stage in self.stages.values()):
            gc.disable()
            self._collects_garbage = True

    # Steps

    def has_data(self, step: int) -> bool | None:
        """True where the data has samples for this step; None on workers that read none."""
        return self.reader.has(step)

    def run_step(
        self, step: int, program: MeshProgram | None = None, copy: CopyKey | None = None
    ) -> WorkerStep:
        """Run one optimizer step, by the `program` of its mesh that was made for its lengths, if one was; before it copy the
        state behind the one before for keepers, where that is asked for."""
        if copy is not None:
            self._checkpoints.begin_copy(copy)
        optimizer = self.engine.optimizer
        rate = None if optimizer is None else learning_rate(optimizer)
        self.memory.begin()
        with self.raising_attempt_failures():
            self.engine.take_program(program)
            inputs, targets = self.reader.take(step)
            lengths = self.reader.lengths(step)
            numbers = [self._number_of_bucket.get(bucket, 0) for bucket in lengths.buckets] if lengths else ()
            result = self.engine.run_step(step, inputs, targets, numbers)
        if self._collects_garbage:
            gc.collect(2 if step % _FULL_COLLECTION_STEPS == 0 else 1)
        return WorkerStep(
            slots=result.slots,
            losses=result.losses,
            metrics=result.metrics,
            grad_norm=result.grad_norm,
            learning_rate=rate,
            skipped=result.skipped,
            loss_scale=result.loss_scale,
            overflowed=result.overflowed,
            peak_memory_bytes=self.memory.read(),
            tokens_per_sample=self.batches.tokens_per_sample,
            gpu=self._gpu.read(),
            difference=result.difference,
            without_targets=result.without_targets,
            ignored_targets=self.reader.take_ignored(step),
            lengths=lengths,
            copied=self._checkpoints.take_copied(),
        )

    def prepare_program(self, program: MeshProgram) -> PreparedProgram:
        """Make another program of this mesh ready for `swap_program`, between two steps; the running one stays whatever goes
        wrong here."""
        try:
            return PreparedProgram(same_sums=self.engine.prepare_program(program))
        except Exception as error:  # that there is no memory for its buffers, say
            self.engine.drop_program()
            return PreparedProgram(f"{type(error).__name__}: {error}")

    def swap_program(self, planned_bytes: int | None) -> None:
        """Run the prepared program from the next step on; `planned_bytes` as in an Assignment."""
        with self.raising_attempt_failures():
            self.engine.swap_program()
        self.planned_bytes = planned_bytes

    def drop_program(self) -> None:
        """Forget the prepared program, which other workers could not prepare."""
        self.engine.drop_program()

    def evaluation_size(self) -> EvaluationSize:
        """The size of an evaluation, in the planned microbatches."""
        return self._evaluation_batches.size

    def evaluate(self, batch: int) -> EvaluatedBatch:
        """Run one batch of the evaluation data; batch 0 begins an evaluation. Training state is not changed."""
        with self.raising_attempt_failures():
            return self.evaluator.run(batch)

    # Checkpoints

    def snapshot_memory(self, sharing: int) -> SnapshotMemory:
        """The memory of a copy of the state on this worker, one of `sharing` on its node."""
        return self._checkpoints.snapshot_memory(sharing)

    def restore(self, uri: str) -> int:
        """Load this worker's shard of a checkpoint; the number of the step after which it was taken."""
        return self._checkpoints.restore(uri)

    def begin_data_at(self, step: int, sample: int) -> None:
        """Have `step` begin at `sample` of the data's order; before a checkpoint is loaded."""
        self.reader.begin_at(step, sample)

    def tensor_names(self) -> list[str]:
        """The names of the parameters and buffers that this worker saves in checkpoints."""
        unused = self._model.unused_state().values()
        return [
            *self._saved_tensors(),
            *(name for shard in unused for kind in ("parameters", "buffers") for name in shard[kind]),
        ]

    def resume(self, uri: str, takeover: Takeover) -> ResumedWorker:
        """Load this worker's part of the checkpoint of another training, as `takeover` says."""
        return self._checkpoints.resume(uri, takeover)

    def save(self, uri: str, step: int) -> list[str]:
        """Write this mesh's shard of a checkpoint; the names of other shards that were written."""
        return self._checkpoints.save(uri, step)

    def begin_save(self, uri: str, step: int) -> None:
        """Copy the state, and write the copy while training goes on."""
        self._checkpoints.begin_save(uri, step)

    def saved(self) -> ShardWriteResult | None:
        """The result of the write that `begin_save` began; None while it is running. Never waits."""
        return self._checkpoints.saved()

    def copy_to(self, keepers: Sequence[Any]) -> bool:
        """Give copies of the state to these keepers from now on, the first of which is on this node; False where this worker
        has none to give."""
        return self._checkpoints.copy_to(keepers)

    def _saved_tensors(self) -> dict[str, torch.Tensor]:
        return {**named_parameters(self.stages), **named_buffers(self.stages)}

    def known_graph(self) -> KnownGraph | None:
        graph = self._model.sent_graph
        return KnownGraph(self.batches.microbatches, graph) if graph else None

    def parts(self) -> Iterable[Any]:
        tensors = (t for stage in self.stages.values() for t in (*stage.parameters(), *stage.buffers()))
        return (self, self.engine, self.batches, *self.stages.values(), *tensors)

    def abandon(self) -> None:
        self.engine.abort("its attempt has ended")
        self.close()

    def close(self) -> None:
        self.reader.close()
        if self.evaluator is not None:
            self.evaluator.close()
        self.engine.close()
