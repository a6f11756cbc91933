"""Worker: the Ray actor of one accelerator; builds its stages, runs its program and answers the driver's calls.

The driver traces and measures first, then calls the methods in the order in which they are defined.
Everything a method raises is an AttemptFailure with a reason code.
Must not know Ray (the driver wraps the class), the driver or the control plane.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from worker.actor.assignment import Assignment, run_options
from worker.actor.batch_feed import Batches, StageReader
from worker.actor.benchmarks import (
    measure_job_optimizer_state,
    measure_job_update,
    measure_mesh_collectives,
    measure_mesh_links,
    plannable_bytes,
    profile_key,
    profile_layers,
)
from worker.actor.device import choose_device, make_transport, use_tf32
from worker.actor.evaluation import EvaluationBatches, EvaluationSize, Evaluator
from worker.actor.health import check_accelerator
from worker.actor.model_host import JobModel
from worker.actor.node import WorkerAddress, own_node_address, processor_share
from worker.actor.optimizer import (
    check_layout_of_optimizer,
    check_optimizer_of_meshes,
    check_optimizer_of_model,
    learning_rate,
    make_loss,
    make_optimizer,
    make_schedule,
    target_counter,
)
from worker.actor.saver import SavedState, ShardWriteResult, SnapshotMemory, WorkerCheckpoints
from worker.actor.step_result import EvaluatedBatch, PreparedProgram, WorkerStep
from worker.actor.telemetry import GpuMeter, PeakMemory, accelerator_name, gpu_peak_flops, requested_bytes
from worker.benchmark.engine_overhead import measure_action
from worker.benchmark.links import Probe, ProbeResult, endpoint
from worker.checkpoint.format import check_writable
from worker.checkpoint.resumption import ResumedWorker, Takeover
from worker.checks.replicas import Fingerprint, checksums, named_tensors
from worker.checks.sharding import StageCheckContext, check_tensor_parallel
from worker.contract import failures
from worker.contract.costs import UpdateCosts
from worker.contract.failures import (
    AttemptFailure,
    OutOfMemoryFailure,
    as_failure,
    attributed_to,
    is_device_assert,
)
from worker.contract.job import COMPILE_LIMIT_S, Job, microbatch_counts
from worker.contract.planned import MeshProgram, ModelSignature
from worker.contract.profile import MeshCollectiveCosts, OptimizerState
from worker.contract.reasons import Reason
from worker.engine.compile import StageCompiler, compile_stages
from worker.engine.engine import Engine, engine_collectives
from worker.engine.local_stages import LocalStages, named_buffers, named_parameters
from worker.engine.results import NonFiniteError, StageError, StallError, autocast_dtype
from worker.model.eval_mode import EvaluationEdge
from worker.model.factory import moved_factory_notes, resolve
from worker.model.opaque.call import opaque_calls
from worker.model.serialization import ParameterValues
from worker.model.stages import StageGraph, StageModule
from worker.parallel.process_groups import tp_group
from worker.parallel.shard_spec import CutPoints, ShardSpec
from worker.parallel.tensor.shards import TensorParallelShards, tensor_parallel_stages
from worker.transport.base import AbortedError, ConnectError, EngineError, PeerLostError, Topology, Transport

log = logging.getLogger(__name__)

# Every so many steps garbage is looked for among what is older than a step, too.
_FULL_COLLECTION_STEPS = 100
# How many microbatches behind the first the traced model is compared on, too.
_FURTHER_MICROBATCHES = 3


class Worker:
    """One accelerator of one mesh. The driver calls the methods in the order in which they are defined."""

    def __init__(self, *, job: Job, mesh: str, worker: int, device: str):
        torch.set_num_threads(1)
        use_tf32(job.training.tf32)
        self._job = job
        self._mesh = mesh
        self._worker = worker
        self._device = device
        self._engine: Engine | None = None
        self._reader: StageReader | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._memory = PeakMemory(device)
        self._gpu = GpuMeter(device)
        self._planned_bytes: int | None = None
        self._untried = ""  # the error for which the optimizer was not tried before the model was built
        self._evaluation_batches: EvaluationBatches | None = None
        self._evaluator: Evaluator | None = None
        self._tensor_shards: TensorParallelShards | None = None
        self._collects_garbage = False

    def address(self) -> WorkerAddress:
        """Take this worker's GPU, and return its address. RuntimeError when there is no GPU."""
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

    def check_accelerator(self) -> list[str]:
        """Notes on this worker's GPU. Raises AttemptFailure (ACCELERATOR_FAILED) where no job can trust it."""
        with self._raise_as_attempt_failure():
            return check_accelerator(self._device)

    def gpu_peak_flops(self) -> float | None:
        """The peak FLOP/s of this worker's GPU in the job's precision; None: not known."""
        return gpu_peak_flops(self._job.training.precision)

    def clock(self) -> float:
        """This process's monotonic clock, in seconds."""
        return time.monotonic()

    def prepare(self, workers_per_mesh: int) -> dict[int, str]:
        """Build the data and the loss; the cache key of the profile for each number of microbatches that may be
        chosen."""
        self._workers_per_mesh = workers_per_mesh
        counts = microbatch_counts(self._job)
        tensor = self._job.tp_size(self._mesh)  # tensor-parallel ranks have the same samples
        self._data_workers = workers_per_mesh // tensor
        data = {"worker": self._worker // tensor, "workers_per_mesh": self._data_workers}
        self._batches = Batches(self._job, **data, microbatches=counts[-1])
        self._model = JobModel(self._job, self._device, self._batches.keywords)
        if self._job.evaluation is not None:
            self._evaluation_batches = EvaluationBatches(self._job, **data, microbatches=counts[-1])
            self._evaluation_batches.check_matches_training(self._batches)
        self._build_loss()
        workers = sum(self._job.mesh_sizes)
        return {
            count: profile_key(self._job, self._device, self._batches, count, workers, tensor)
            for count in counts
        }

    def memory_limit(self, sharing: int) -> int | None:
        """Bytes that this worker may plan with, one of `sharing` on the same node (CPU) or GPU; None if unknown."""
        return plannable_bytes(self._job, self._device, sharing)

    def optimizer_state(self) -> OptimizerState:
        """The bytes that the job's optimizer keeps of the parameters that it trains. Raises AttemptFailure where optimizers
        of each rank's own parameters, or parts of them, would train something else than one of them all."""
        self._untried = check_layout_of_optimizer(self._job, self._device)
        return measure_job_optimizer_state(self._job, self._device)

    def trace(self, microbatches: int) -> list[str]:
        """Build the model and trace it for this number of microbatches, one worker for all; notes on the model, and on
        the job's factories that moved."""
        self._set_microbatches(microbatches)
        inputs, target = self._batches.sample
        notes = self._model.check(
            inputs,
            target,
            further=self._batches.further_samples(_FURTHER_MICROBATCHES),
            free_bytes=lambda: self.memory_limit(1),
        )
        if trained := self._model.trained_parameters():
            notes += check_optimizer_of_model(self._job, trained, self._device, untried=self._untried)
        evaluation = self._job.evaluation
        factories = (self._job.model, self._job.data, *([evaluation.data] if evaluation else ()))
        return [*moved_factory_notes(part.factory for part in factories), *notes]

    def graph(self, workers: int | None = None) -> bytes:
        """The traced model for the other workers, without its parameters; for a mesh of another data-parallel size
        traced for its `workers`."""
        if workers in (None, self._data_workers):
            return self._model.graph(self._batches.sample[0])
        return self._model.graph(self._batches.samples(workers)[0], workers)

    def take_graph(self, graph: bytes, microbatches: int) -> None:
        """Receive the model that another worker traced for this number of microbatches: nothing is built here."""
        self._set_microbatches(microbatches)
        self._model.receive_graph(graph)

    @attributed_to(Reason.USER_CODE_RAISED)
    def profile(self, microbatches: int | None = None) -> dict[str, Any]:
        """Measure every layer on this device, for the batch in this number of microbatches; JSON of a LayerProfile."""
        self._set_microbatches(microbatches)
        profile = profile_layers(
            self._job,
            self._model.traced(self._batches.sample[0]),
            self._batches,
            self._loss,
            mesh=self._mesh,
            device=self._device,
            compiler=self._compiler() if self._job.training.compile else None,
        )
        return profile.to_json()

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
        """The results of the probes whose hub this worker is; all endpoints of `topology` call this at the same time."""
        own = endpoint(self._mesh, self._worker)
        transport = make_transport(
            self._device, topology, mesh=own, worker=0, store=store, host=host, connect_s=connect_s
        )
        return measure_mesh_links(transport, probes, self._device)

    @attributed_to(Reason.START_TIMEOUT)
    def measure_collectives(
        self, *, store: tuple[str, int], host: str, connect_s: float
    ) -> MeshCollectiveCosts:
        """The costs of the collectives of this mesh; all its workers call this at the same time."""
        topology = Topology((self._mesh,), self._workers_per_mesh)
        transport = self._transport(topology, store, host, connect_s)
        return measure_mesh_collectives(self._job, transport, self._device)

    def update_costs(self) -> UpdateCosts:
        """The costs of the engine's REDUCE and STEP on this worker alone, with the job's optimizer."""
        return measure_job_update(self._job, self._device)

    @attributed_to(Reason.START_TIMEOUT)
    def measure_action(
        self, *, topology: Topology, store: tuple[str, int], host: str, connect_s: float
    ) -> float:
        """Processor seconds of the engine for an action; every worker 0 calls this at the same time."""
        return measure_action(self._transport(topology, store, host, connect_s))

    def processor_share(self) -> float:
        """The fraction of a processor core that this worker gets while all of them compute."""
        return processor_share()

    def model_signature(self, whole: bool) -> ModelSignature:
        """The signature of the traced model, on the worker that traced; not `whole`: without its parameters."""
        return self._model.traced(self._batches.sample[0]).signature(whole=whole)

    def check_batch_sharding(self, stage_starts: Sequence[str], workers_of_stage: Sequence[int]) -> None:
        """Refuse a cut between heterogeneous meshes whose batch-sharded tensors would not arrive as they were sent."""
        self._model.check_batch_sharding(
            self._data_workers, self._batches.samples, stage_starts, workers_of_stage
        )

    def evaluation_edges(self, stage_starts: Sequence[str]) -> list[EvaluationEdge]:
        """The tensors between the stages of a cut in eval mode; on the worker that traced."""
        return self._model.evaluation_edges(self._batches.sample[0], stage_starts, self._data_workers)

    def weights(self, stage_starts: Sequence[str], stages: Sequence[int]) -> ParameterValues:
        """The initial values of the parameters of some stages, for the worker that runs them."""
        return self._model.weights(self._batches.sample[0], stage_starts, stages)

    @attributed_to(Reason.CHECKPOINT_UNWRITABLE)
    def try_checkpoints(self, uri: str) -> None:
        """Write and remove a file where checkpoints will go, so that a wrong place is reported before training."""
        check_writable(uri)

    def load(self, assignment: Assignment, weights: ParameterValues | None = None) -> list[str]:
        """Cut the model, keep this mesh's stages, connect to every peer and compile; returns notes of the compiler.

        `weights` are those of a worker that took its graph.
        """
        self._planned_bytes = assignment.planned_bytes
        self._set_microbatches(assignment.program.microbatches)
        with self._raise_as_attempt_failure():
            self._check_optimizer_of_meshes(assignment)
            graph = self._model.cut(
                self._batches.sample[0], assignment.stage_starts, list(assignment.stages), weights
            )
            whole = {index: graph.stages[index] for index in assignment.stages}
            transport = self._transport(
                assignment.topology,
                assignment.store,
                assignment.host,
                assignment.connect_s,
                assignment.join_s,
            )
            self._engine = self._make_engine(assignment, graph, whole, transport)
            self._memory.set_baseline(
                t for stage in self._stages.values() for t in (*stage.parameters(), *stage.buffers())
            )
            if assignment.evaluation is not None:
                self._evaluator = self._make_evaluator(assignment, transport)
            try:
                self._engine.connect(self._evaluator.lanes if self._evaluator else ())
            except ConnectError as error:
                raise as_failure(error, Reason.START_TIMEOUT) from None
            if self._tensor_shards is not None and self._device == "cuda":
                self.check_tensor_parallel(whole)
            if self._evaluator is not None:
                self._evaluator.start()
            return self._compile_stages()

    def _check_optimizer_of_meshes(self, assignment: Assignment) -> None:
        """Refuse settings that differ from those in one process, on the worker that built the model."""
        if not (trained := self._model.trained_parameters()):
            return
        stages_of: dict[str, list[int]] = {}
        for stage, mesh in enumerate(assignment.mesh_of_stage):
            stages_of.setdefault(mesh, []).append(stage)
        names = {
            mesh: self._model.parameter_names(self._batches.sample[0], assignment.stage_starts, stages)
            for mesh, stages in stages_of.items()
        }
        check_optimizer_of_meshes(self._job, trained, names)

    def _make_engine(
        self,
        assignment: Assignment,
        graph: StageGraph,
        whole: Mapping[int, StageModule],
        transport: Transport,
    ) -> Engine:
        """The engine that trains this worker's stages, which it keeps; `whole` are those of its mesh, before tensor
        parallelism splits them."""
        training, schedule = self._job.training, self._job.optimizer.schedule
        program, limits = assignment.program, assignment.slot_limits
        options = run_options(
            self._job,
            self._mesh,
            limits=limits,
            device=self._device,
            count_targets=target_counter(self._job, self._loss),
        )
        collectives = engine_collectives(transport, program, assignment.mesh_of_stage, graph.tied, options)
        self._tensor_shards, own = None, whole
        if options.tensor > 1:
            communicator = collectives.in_stage(tp_group(self._mesh, self._worker, options.tensor))
            self._tensor_shards, own = tensor_parallel_stages(
                self._job, whole, self._mesh, self._worker, communicator
            )
        self._stages = {index: stage.to(self._device) for index, stage in own.items()}
        self._reader = StageReader(
            self._stages,
            self._batches,
            device=self._device,
            last=training.steps,
            limit_s=limits.limit_s(program.longest_slot_s),  # as others wait for this mesh
            counts_ignored=training.loss_reduction == "mean",
        )
        return Engine(
            program,
            LocalStages(self._stages, assignment.mesh_of_stage, graph.edges, graph.tied, self._tensor_shards),
            collectives,
            loss=self._loss.with_output_spec(self._model.tree_spec).with_metrics,
            optimizer=self._make_optimizer,
            lr_schedule=functools.partial(make_schedule, schedule) if schedule else None,
            options=options,
        )

    def _make_evaluator(self, assignment: Assignment, transport: Transport) -> Evaluator:
        like = [self._tensor_shards.shard_stage_like] if self._tensor_shards else []
        return Evaluator(
            self._job,
            assignment,
            stages=self._model.evaluation_stages(assignment.stage_starts, self._stages, self._device, *like),
            batches=self._evaluation_batches,
            loss=self._loss,
            transport=transport,
            device=self._device,
        )

    def _compile_stages(self) -> list[str]:
        """Compile what the job says, and return the compiler's notes."""
        if not self._job.training.compile:
            return []
        inputs, target = self._batches.sample
        return compile_stages(self._engine, self._compiler(), inputs, target, self._device)

    def check_tensor_parallel(self, whole: Mapping[int, StageModule]) -> None:
        """Compare the tensor-parallel stages with `whole` ones on this device, and refuse wrong results; all workers of a
        mesh call this at the same time."""
        training = self._job.training
        if not training.check_trace or training.sync_batch_norm:  # it normalises by rows of other workers
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
        """The slices of its stages' tensors that this worker owns, by original name."""
        return list(self._tensors_by_shard())

    @attributed_to(Reason.DATA_FAILED)
    def fingerprint(self, names: Sequence[str], cuts: Mapping[str, CutPoints]) -> Fingerprint:
        """Checksums of the local tensors among `names`, in the pieces of `cuts`, and of the first samples."""
        return Fingerprint(checksums(self._tensors_by_shard(), names, cuts), self._batches.checksums())

    def _tensors_by_shard(self) -> dict[ShardSpec, torch.Tensor]:
        shard_spec = ShardSpec if self._tensor_shards is None else self._tensor_shards.shard_spec
        return {shard_spec(name): tensor for name, tensor in named_tensors(self._stages).items()}

    def snapshot_memory(self, sharing: int) -> SnapshotMemory:
        """The memory of a copy of the state on this worker, one of `sharing` on its node."""
        return self._checkpoints.snapshot_memory(sharing)

    def restore(self, uri: str) -> int:
        """Load this worker's shard of a checkpoint; the number of the step after which it was taken."""
        return self._checkpoints.restore(uri)

    def begin_data_at(self, step: int, sample: int) -> None:
        """Have `step` begin at `sample` of the data's order; before a checkpoint is loaded."""
        self._reader.begin_at(step, sample)

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

    def _saved_tensors(self) -> dict[str, torch.Tensor]:
        return {**named_parameters(self._stages), **named_buffers(self._stages)}

    def warm_up(self, step: int) -> None:
        """Prefetch the samples of the first step, and on CUDA load and try all kernels on them, before another mesh waits
        for this one."""
        self._reader.ready(step)
        if self._device != "cuda":
            return
        with self._raise_as_attempt_failure():
            self._engine.warm_up(step, *self._reader.take(step, first=True))

    def collect_between_steps(self) -> None:
        """From now on this process looks for cyclic garbage between steps only, and no more among what is there now: a
        search of all that torch imports takes some tenths of a second, for which all meshes wait. Modules that run as they
        are may hold activations in cycles: with such there is no waiting for the end of the step."""
        gc.collect()
        gc.freeze()
        if not any(opaque_calls(stage) for stage in self._stages.values()):
            gc.disable()
            self._collects_garbage = True

    def has_data(self, step: int) -> bool | None:
        """True where the data has samples for this step; None on workers that read none."""
        return self._reader.has(step)

    def run_step(self, step: int) -> WorkerStep:
        """Run one optimizer step."""
        rate = None if self._optimizer is None else learning_rate(self._optimizer)
        self._memory.begin()
        with self._raise_as_attempt_failure():
            inputs, targets = self._reader.take(step)
            result = self._engine.run_step(step, inputs, targets)
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
            peak_memory_bytes=self._memory.read(),
            tokens_per_sample=self._batches.tokens_per_sample,
            gpu=self._gpu.read(),
            difference=result.difference,
            without_targets=result.without_targets,
            ignored_targets=self._reader.take_ignored(step),
        )

    def prepare_program(self, program: MeshProgram) -> PreparedProgram:
        """Make another program of this mesh ready for `swap_program`, between two steps; the running one stays whatever goes
        wrong here."""
        try:
            return PreparedProgram(same_sums=self._engine.prepare_program(program))
        except Exception as error:  # that there is no memory for its buffers, say
            self._engine.drop_program()
            return PreparedProgram(f"{type(error).__name__}: {error}")

    def swap_program(self, planned_bytes: int | None) -> None:
        """Run the prepared program from the next step on; `planned_bytes` as in an Assignment."""
        with self._raise_as_attempt_failure():
            self._engine.swap_program()
        self._planned_bytes = planned_bytes

    def drop_program(self) -> None:
        """Forget the prepared program, which other workers could not prepare."""
        self._engine.drop_program()

    def evaluation_size(self) -> EvaluationSize:
        """The size of an evaluation, in the planned microbatches."""
        return self._evaluation_batches.size

    def evaluate(self, batch: int) -> EvaluatedBatch:
        """Run one batch of the evaluation data; batch 0 begins an evaluation. Training state is not changed."""
        with self._raise_as_attempt_failure():
            return self._evaluator.run(batch)

    def save(self, uri: str, step: int) -> list[str]:
        """Write this mesh's shard of a checkpoint; the names of other shards that were written."""
        return self._checkpoints.save(uri, step)

    def begin_save(self, uri: str, step: int) -> None:
        """Copy the state, and write the copy while training goes on."""
        self._checkpoints.begin_save(uri, step)

    def saved(self) -> ShardWriteResult | None:
        """The result of the write that `begin_save` began; None while it is running. Never waits."""
        return self._checkpoints.saved()

    @functools.cached_property
    def _checkpoints(self) -> WorkerCheckpoints:
        saved = self._saved_tensors()
        return WorkerCheckpoints(
            self._job,
            mesh=self._mesh,
            worker=self._worker,
            device=self._device,
            engine=self._engine,
            reader=self._reader,
            saved=SavedState(
                {spec: tensor for spec, tensor in self._tensors_by_shard().items() if spec.name in saved},
                self._model.unused_state(),
            ),
            report_copied_bytes=self._memory.exclude_bytes,
        )

    def _compiler(self) -> StageCompiler:
        autocast = autocast_dtype(self._job.training.precision)
        return StageCompiler(device=self._device, autocast=autocast, limit_s=COMPILE_LIMIT_S)

    def _transport(
        self,
        topology: Topology,
        store: tuple[str, int],
        host: str,
        connect_s: float,
        join_s: float | None = None,
    ) -> Transport:
        place = {"mesh": self._mesh, "worker": self._worker, "store": store, "host": host}
        return make_transport(self._device, topology, **place, connect_s=connect_s, join_s=join_s)

    def _set_microbatches(self, microbatches: int | None) -> None:
        """Split the batch into this number of microbatches from now on; None changes nothing."""
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
                resolve(part.factory)  # report a wrong name before anything is measured

    def _make_optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        names = {id(tensor): name for name, tensor in named_tensors(self._stages).items()}
        optimizer = make_optimizer(
            self._job.optimizer, parameters, [names.get(id(p), "") for p in parameters]
        )
        if any(id(p) in names for p in parameters):  # else it only enters sums of other meshes
            self._optimizer = optimizer
        return optimizer

    def _raise_as_attempt_failure(self) -> AbstractContextManager[None]:
        return raise_as_attempt_failure(
            self._memory, mesh=self._mesh, device=self._device, planned_bytes=self._planned_bytes
        )


@contextlib.contextmanager
def raise_as_attempt_failure(
    memory: PeakMemory, *, mesh: str, device: str, planned_bytes: int | None
) -> Iterator[None]:
    """Raise every error of the body as an AttemptFailure; out of memory with planned and seen bytes, a fault of an
    accelerator with that and its node."""
    try:
        yield
    except Exception as error:
        failure = _attempt_failure(error)
        if failure.reason in (Reason.ACCELERATOR_FAILED, Reason.ILLEGAL_ADDRESS):
            raise AttemptFailure(
                failure.reason, f"{accelerator_name(device)}: {failure.message}", failure.details
            ) from None
        if failure.reason is not Reason.OUT_OF_MEMORY:
            raise failure from None
        raise out_of_memory_failure(failure, mesh, device, planned_bytes, memory.read()) from None


def _attempt_failure(error: Exception) -> AttemptFailure:
    if isinstance(error, AttemptFailure):
        return error
    return engine_failure(error) if isinstance(error, EngineError) else as_failure(error, Reason.INTERNAL)


def engine_failure(error: EngineError) -> AttemptFailure:
    """The failure of an attempt whose step ended with `error`."""
    if isinstance(error, StageError) or is_device_assert(error):
        return as_failure(error, Reason.USER_CODE_RAISED)
    if isinstance(error, NonFiniteError):
        return as_failure(error, Reason.NAN_LOSS)
    if isinstance(error, (StallError, PeerLostError, AbortedError)):
        return as_failure(error, Reason.SLOT_STALLED)
    return as_failure(error, Reason.INTERNAL)


def out_of_memory_failure(
    failure: AttemptFailure, mesh: str, device: str, planned_bytes: int | None, peak_bytes: int
) -> OutOfMemoryFailure:
    """`failure` of a worker of `mesh` that ran out of memory, with planned and seen bytes; in its details what torch's
    allocator holds."""
    details = failure.details
    if device == "cuda":
        with contextlib.suppress(Exception):  # a device that is out of memory may answer nothing
            details = f"{details}\n{torch.cuda.memory_summary(abbreviated=True)}"
    planned = "an unknown number of" if planned_bytes is None else f"{planned_bytes:,}"
    way = "allocated by torch" if device == "cuda" else "resident in its process"
    return OutOfMemoryFailure(
        f"{failure.message}; mesh {mesh} was planned with {planned} bytes and had come to "
        f"{peak_bytes:,} bytes ({way})",
        details,
        mesh,
        peak_bytes + min(requested_bytes(failure.message), peak_bytes),
    )
