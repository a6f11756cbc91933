"""Runs a job's pipeline beside its plain model for some steps, and reports the first difference or equality.

The pipeline is the job's own: its plan's programs, meshes, stages and transports, run by the engine with all
workers in this process (a thread each). After every step the plain model updates by the pipeline's gradients,
which were found equal: each step is compared by itself, and what Adam makes of rounding in the smallest gradients
is no error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from worker.actor.loaded import LoadedWorker
from worker.actor.prepared import PreparedWorker
from worker.checkpoint.format import describe_checkpoint
from worker.contract.failures import AttemptFailure, attributed_to
from worker.contract.job import Job
from worker.contract.planned import PlannedJob
from worker.contract.reasons import Reason
from worker.model.export import TracedModel
from worker.model.parity import FULL_PRECISION, PIPELINE_FULL_PRECISION, Tolerance, tolerance_for
from worker.model.rng_ops import RngOp, RngOpMismatchError, traced_rng_ops
from worker.verify.comparison import (
    ComparisonContext,
    DifferenceFound,
    PipelineStep,
    StepComparison,
    WorkerTensors,
    WorstDistances,
    by_original_name,
    check_transfers,
    compare_initial,
)
from worker.verify.local_gang import LocalGang, prepare_workers
from worker.verify.locate import (
    TARGET_CHANGED,
    TracedStages,
    different_alone,
    first_different_forward,
    with_tensors,
)
from worker.verify.plain import InputShapes, PlainModel, PlainStep, input_shapes
from worker.verify.recorder import Probes, RecordedStep, Recorder
from worker.verify.rng_replay import mesh_rng_ops
from worker.verify.shared_parts import check_batch_loss, check_resumed_stream

NOT_COVERED = (
    "the job runs on CPU and in one process: CUDA's kernels and streams, NCCL, several nodes and Ray are not covered",
    "the plan is made from costs measured on this machine: on the job's own cluster it may be another",
    "reading samples, building the model and the loss are the job's own in both: what is wrong there is wrong in both",
)


@dataclass
class Proof:
    """The result of a proof: the equal steps, the worst distances by kind, and the first difference."""

    steps: int = 0
    difference: str | None = None
    worst: WorstDistances = field(default_factory=WorstDistances)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "equal": self.difference is None,
            "steps": self.steps,
            "difference": self.difference,
            "compared": [
                {"what": kind, "count": count, "worst": most, "allowed": allowed}
                for kind, (count, most, allowed) in self.worst.kinds.items()
            ],
            "notes": self.notes,
            "not_covered": list(NOT_COVERED),
        }


def prove(
    job: Job,
    plan: Callable[[Sequence[PreparedWorker]], PlannedJob],
    steps: int = 3,
    *,
    resume: str | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Proof:
    """Run `steps` steps of both on CPU. `plan` makes the job's plan, when the workers are prepared.

    With `resume`, the URI of a checkpoint of the same model on any layout, both go on from there. Raises AttemptFailure
    where the job itself cannot be built, traced or loaded, and where the checkpoint cannot be read.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}: compare 1 step or more")
    if job.training.sync_batch_norm and job.max_dp_size > 1:
        raise ValueError(
            "verify runs the plain model on the rows of one worker after the other, and training.sync_batch_norm takes "
            f"those of all {job.max_dp_size} at once: verify the job with one data-parallel worker a mesh"
        )
    proof, probes = Proof(), Probes()
    if job.training.transfers == "bf16":
        proof.notes.append(
            "tensors travel as they are here, not rounded by training.transfers: bf16, which rounds more than most "
            "mistakes change"
        )
    with attributed_to(Reason.CHECKPOINT_FAILED):
        first = 1 if resume is None else describe_checkpoint(resume).step + 1
    last = first + steps - 1
    job = replace(job, training=replace(job.training, steps=last, transfers="auto"))
    workers = prepare_workers(job)
    planned = plan(workers)
    traces: list[TracedModel] = []
    calls: list[list[RngOp]] = []

    def look(traced: TracedModel) -> None:
        traces.append(traced)
        calls.append(traced_rng_ops(traced))

    with LocalGang(workers, planned, look=look) as gang:
        proof.notes += gang.notes
        sizes = len({*job.dp_sizes})  # behind them stand the traces for other lengths
        of_lengths = {input_shapes(one.example_inputs): one for one in traces[sizes:]}
        shaped_calls = dict(zip(of_lengths, calls[sizes:], strict=True))
        plain = _make_plain_model(job, planned, gang, calls[:sizes], probes, shaped_calls)
        if resume is not None:
            gang.call(lambda worker: worker.restore(resume))
            with attributed_to(Reason.CHECKPOINT_FAILED):
                plain.restore(resume)
        run = _ProofRun(gang, plain, job, planned, (traces[:sizes], of_lengths), proof, probes)
        traces.clear()
        try:
            compare_initial(plain.parameters, plain.buffers[0], run.holders, proof.worst)
            for step in range(first, last + 1):
                run.step(step)
                proof.steps += 1
                report(f"step {step} of {last} is equal")
            proof.notes += filter(None, [check_resumed_stream(job, planned.microbatches)])
        except DifferenceFound as difference:
            proof.difference = str(difference)
        except RngOpMismatchError as error:
            proof.difference = f"not comparable: {error}"
    if plain.loss_changes_target:
        proof.notes.append(f"the loss: {TARGET_CHANGED}")
    return proof


def _make_plain_model(
    job: Job,
    planned: PlannedJob,
    gang: LocalGang,
    calls: Sequence[list[RngOp]],
    probes: Probes,
    calls_of_shapes: Mapping[InputShapes, Sequence[RngOp]],
) -> PlainModel:
    """With the rows of the workers that have the loss; `calls` are those of each size of a mesh, in their order."""
    if len({*job.dp_sizes}) == 1:
        return PlainModel(job, planned.microbatches, calls[0], probes, calls_of_shapes=calls_of_shapes)
    for worker in gang.workers:
        for index, stage in sorted(worker.stages.items()):
            if stage.updated_buffers:
                raise ValueError(
                    f"stage {index} keeps {stage.tensor_names[stage.updated_buffers[-1]]!r} of the rows that a worker has, "
                    f"and meshes of {', '.join(map(str, job.mesh_sizes))} workers have different numbers of rows: no plain "
                    "model computes that; verify the job with equal sizes"
                )
    sizes = [*dict.fromkeys(job.dp_sizes)]
    by_workers = dict(zip(sizes, calls, strict=True))
    sharing = _dp_sizes(job)
    workers_of = {
        node.name: sharing[worker.mesh]
        for worker in gang.workers
        for stage in worker.stages.values()
        for part in stage.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
        if node.op
        != "placeholder"  # what a stage receives has the name of the operation that made it elsewhere
    }
    last = sharing[planned.mesh_of_stage[-1]]
    return PlainModel(
        job,
        planned.microbatches,
        by_workers[last],
        probes,
        workers=last,
        of_meshes=mesh_rng_ops(by_workers, last, workers_of),
    )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Its parameters and buffers by all their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _dp_sizes(job: Job) -> dict[str, int]:
    """The number of workers that share a microbatch, by mesh."""
    return {f"m{mesh}": size for mesh, size in enumerate(job.dp_sizes)}


def _tolerance(plain: PlainModel) -> Tolerance:
    tolerance = tolerance_for(plain.model, plain.autocast, "cpu")
    return PIPELINE_FULL_PRECISION if tolerance == FULL_PRECISION else tolerance


class _ProofRun:
    """Both, step by step."""

    def __init__(
        self,
        gang: LocalGang,
        plain: PlainModel,
        job: Job,
        planned: PlannedJob,
        traces: tuple[Sequence[TracedModel], Mapping[InputShapes, TracedModel]],
        proof: Proof,
        probes: Probes,
    ) -> None:
        """`traces` are those of each size of a mesh, in their order, and those for other lengths."""
        of_sizes, of_shapes = traces
        self._gang, self._plain, self._job, self._proof = gang, plain, job, proof
        self._probes = probes
        place = planned.stage_starts, planned.mesh_of_stage, _dp_sizes(job)
        tensors = _tensors(plain.model)  # in place of the initial values
        by_size = dict(zip(dict.fromkeys(job.dp_sizes), of_sizes, strict=True))
        self._traced = TracedStages(
            {size: with_tensors(traced, tensors) for size, traced in by_size.items()}, *place
        )
        self._traced_of_shapes = {
            shapes: TracedStages({job.max_dp_size: with_tensors(traced, tensors)}, *place)
            for shapes, traced in of_shapes.items()
        }
        self._tolerance = _tolerance(plain)
        self.holders = [_worker_state(worker) for worker in gang.workers]
        self._recorders = [
            Recorder(
                w.mesh,
                w.index,
                w.stages,
                probes,
                rows=w.place.data_rank,
                share=w.tensor_shards,
                plans=planned.reshardings,
            )
            for w in gang.workers
        ]
        self._optimizer_gradients = [_OptimizerGradients(worker) for worker in gang.workers]
        for worker, recorder in zip(gang.workers, self._recorders, strict=True):
            worker.engine.observe(recorder)

    def step(self, step: int) -> None:
        """Run and compare one step; raises Different."""
        plain = self._plain
        before = {name: p.detach().clone() for name, p in plain.parameters.items()}
        buffers = [*plain.buffers]
        pipeline = self._pipeline_step(step)
        expected = self._plain_step(step)

        def located(worker: int, microbatch: int) -> str:
            if self._traced_of_shapes and buffers[worker]:
                return "any of its forwards, which are not tried alone where stages of several lengths have buffers"
            shapes = input_shapes(plain.rows(step, worker, microbatch)[0])
            return first_different_forward(
                plain,
                expected,
                pipeline.record,
                self._probes,
                self._traced_of_shapes.get(shapes, self._traced),
                buffers=buffers[worker],
                at=(worker, step, microbatch),
                tolerance=self._tolerance.values,
            )

        def alone(holder: WorkerTensors, name: str) -> str:
            return different_alone(plain, holder, name, before, self._first_of_each(pipeline.gradients))

        compared = StepComparison(
            step,
            expected,
            pipeline,
            ComparisonContext(
                self.holders,
                self._tolerance,
                self._proof.worst,
                clip=self._job.training.clip_grad_norm,
                heterogeneous=len({*self._job.dp_sizes}) > 1,
            ),
            first_forward=located,
            optimizer_reason=alone,
        )
        compared.check_transfers()
        compared.check_losses()
        self._note(check_batch_loss(plain, step, self._job.training.loss_reduction, self._proof.worst))
        compared.check_scale()
        if expected.finite:
            compared.check_gradients()
        compared.check_skipped()
        compared.check_rate()
        if not pipeline.skipped:
            plain.update(self._first_of_each(pipeline.gradients))
        compared.check_parameters(before, plain.parameters)
        compared.check_buffers(plain.buffers)

    def _note(self, note: str | None) -> None:
        self._proof.notes += [note] if note is not None and note not in self._proof.notes else []

    def _plain_step(self, step: int) -> PlainStep:
        try:
            return self._plain.forward_and_backward(step)
        except RngOpMismatchError:
            raise
        except Exception as error:
            raise DifferenceFound(
                f"step {step}: the plain model raises {_error_text(error)}, and the pipeline made this step"
            ) from error

    def _pipeline_step(self, step: int) -> PipelineStep:
        record = RecordedStep(self._probes)
        for recorder in self._recorders:
            recorder.begin(record)
        for given in self._optimizer_gradients:
            given.begin()
        try:
            results = self._gang.step(step)
        except AttemptFailure as failure:
            check_transfers(step, record, self._proof.worst)
            try:
                finite = self._plain.forward_and_backward(step).finite
            except Exception as error:
                beside = f"the plain model raises, too: {_error_text(error)}"
            else:
                values = "finite" if finite else "not finite either"
                beside = f"the plain model made this step: its losses and gradients are {values}"
            raise DifferenceFound(
                f"step {step}: the pipeline failed: {failure.message} ({beside})"
            ) from failure
        losses = {
            (worker.place.data_rank, microbatch): loss
            for worker, result in zip(self._gang.workers, results, strict=True)
            for microbatch, loss in enumerate(result.losses)
        }
        norms = [result.grad_norm for result in results if result.grad_norm is not None]
        return PipelineStep(
            losses=losses,
            norm=norms[0] if norms else None,
            learning_rates={
                str(holder): result.learning_rate
                for holder, result in zip(self.holders, results, strict=True)
                if result.learning_rate is not None
            },
            skipped=any(result.skipped for result in results),
            gradients=self._merge_tensor_parallel(
                self._merge_zero1([given.gradients() for given in self._optimizer_gradients])
            ),
            record=record,
            loss_scales=[result.loss_scale for result in results if result.loss_scale is not None],
        )

    def _merge_zero1(self, gradients: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The gradients with those of ZeRO-1 meshes, whose optimizers have partitions, joined to whole parameters: to shards
        of them, where the mesh is tensor parallel too."""
        shares = [
            (m, self._job.tp_size(m), n) for m in self._job.sharded for n in range(self._job.tp_size(m))
        ]
        for mesh, tensor, share in shares:
            own = [k for k, h in enumerate(self.holders) if h.mesh == mesh and h.worker % tensor == share]
            shapes = {name: p.shape for name, p in self.holders[own[0]].parameters.items()}
            whole = {
                name: torch.cat([gradients[k][name] for k in own]).view(shapes[name])
                for name in gradients[own[0]]
            }
            for k in own:
                gradients[k] = whole
        return gradients

    def _merge_tensor_parallel(self, gradients: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Whole gradients from the parts that the workers of a tensor-parallel group have."""
        if self._job.resources.tensor == 1:
            return gradients
        workers, found = self._gang.workers, []
        for worker, gradient in zip(workers, gradients, strict=True):
            if worker.tensor_shards is None:
                found.append(gradient)
                continue
            own = [
                k
                for k, one in enumerate(workers)
                if (one.mesh, one.place.data_rank) == (worker.mesh, worker.place.data_rank)
            ]
            found.append(
                {
                    name: sum(
                        workers[k].tensor_shards.zero_padded(name, gradients[k][name])
                        for k in own
                        if workers[k].tensor_shards.counts(name)
                    )
                    for name in gradients[own[0]]
                }
            )
        return found

    def _first_of_each(self, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The gradient of the first holder that has it, by name; what the plain model has no gradient of gets none."""
        found: dict[str, Tensor] = {}
        for own in gradients:
            for name, gradient in own.items():
                if self._plain.trained[name].grad is not None:
                    found.setdefault(name, gradient)
        return found


def _error_text(error: Exception) -> str:
    return ": ".join(filter(None, (type(error).__name__, str(error))))


class _OptimizerGradients:
    """The gradients that a worker's optimizer is given, before it may change them."""

    def __init__(self, worker: LoadedWorker) -> None:
        held = _worker_state(worker).parameters
        self._parameters = {
            name: p for name, p in worker.engine.updated.items() if p.requires_grad and name in held
        }
        self._kept: dict[str, Tensor] | None = None
        if worker.engine.optimizer is not None:
            worker.engine.optimizer.register_step_pre_hook(lambda *_: self._keep())

    def begin(self) -> None:
        self._kept = None

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that the optimizer was given in this step; the present ones where it was given none."""
        if self._kept is None:
            self._keep()
        return self._kept

    def _keep(self) -> None:
        self._kept = {
            name: p.grad.detach().clone() for name, p in self._parameters.items() if p.grad is not None
        }


def _worker_state(worker: LoadedWorker) -> WorkerTensors:
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    stages_of: dict[str, list[int]] = {}
    for index, stage in sorted(worker.stages.items()):
        names: Mapping[str, str] = stage.original_names
        own = (
            by_original_name(stage.named_parameters(), names),
            by_original_name(stage.named_buffers(), names),
        )
        parameters |= {name: p for name, p in own[0].items() if name not in parameters}
        buffers |= own[1]
        for name in [*own[0], *own[1]]:
            stages_of.setdefault(name, []).append(index)
    return WorkerTensors(
        worker.mesh,
        worker.index,
        parameters,
        buffers,
        {name: tuple(stages) for name, stages in stages_of.items()},
        worker.place.data_rank,
        *([worker.tensor_shards.part] if worker.tensor_shards is not None else []),
    )
