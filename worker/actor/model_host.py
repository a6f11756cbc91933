"""Builds, traces and cuts the job's model on one worker, or receives the graph from the worker that traced it.

Only the worker that traces ever holds all parameters; the others receive the graph without them and then the initial
values of their own stages. After the cut the whole model is dropped.
build_job_model freezes parameters and checks optimizer groups and weights by name; the plain reference model of
`verify` is built by it as well.
Everything raised is an AttemptFailure with a reason code. Must not know the gang, Ray or the engine.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from worker.actor.loss import JobLoss
from worker.actor.optimizer import check_parameter_groups, ignored_target, make_loss, target_counter
from worker.checkpoint.record import RECORD_SHARD, ModelRecord, make_record, record_to_state, unused_tensors
from worker.checkpoint.sources import check_weights, fill_stages, fill_tensors
from worker.checks.hazards import SKIP_CHECK_HINT, check_trainable, unchecked_state
from worker.checks.loss_reduction import Rows, check_loss_reduction, check_own_loss, check_padding
from worker.checks.sharding import SamplesByRank, check_batch_sharding
from worker.checks.trace import (
    OwnBackwardError,
    check_evaluation_trace,
    check_trace,
    trace_check_bytes,
)
from worker.contract.failures import AttemptFailure, as_failure, attributed_to, is_out_of_memory
from worker.contract.job import AUTO, FP16, Bucket, Job
from worker.contract.profile import ModelError, TraceError
from worker.contract.reasons import Reason
from worker.data.microbatches import MicrobatchTensors
from worker.engine.results import autocast_dtype
from worker.machine.device import tf32_notes
from worker.machine.file_backed import file_backed_tensors
from worker.model.eval_mode import (
    EvaluationEdge,
    EvaluationStages,
    evaluation_edges,
    evaluation_stage_starts,
    evaluation_stages,
    trace_in_eval_mode,
)
from worker.model.export import TracedModel, tensor_aliases, trace
from worker.model.factory import build_model, check_patterns_match, pattern_matches, set_modes
from worker.model.interface import ModelInterface, adapt_model
from worker.model.opaque.call import opaque_calls
from worker.model.parity import tolerance_for
from worker.model.pytree import Target, TreeSpec
from worker.model.serialization import (
    ParameterValues,
    deserialize_models,
    load_values,
    parameter_values,
    serialize_models,
    storage_values,
)
from worker.model.stages import BucketStages, StageGraph, StageModule, share_stages
from worker.model.untraceable import modules_with_own_backwards
from worker.parallel.sync_batch_norm import batch_norm_notes
from worker.parallel.tensor.shards import check_tensor_plan_of


@dataclass(frozen=True)
class BuiltModel:
    """A model, its record from before it was changed, and notes on the modes of its modules and where its tensors lie."""

    model: nn.Module
    record: ModelRecord
    notes: tuple[str, ...] = ()


def build_job_model(job: Job) -> BuiltModel:
    """The model of `job` with its initial weights, without model.weights.

    Its modules are in the modes that `model.train` says. Frozen parameters take no gradient. One that takes more than half
    of the free memory lies in files in part (worker/machine/file_backed.py). Raises ModelError where weights, patterns of
    frozen parameters or of optimizer groups do not fit the model's names.
    """
    spec = job.model
    with file_backed_tensors() as tensors:
        model = build_model(spec.factory, spec.args, seed=job.training.seed)
    record, modes = make_record(model), set_modes(model, spec.train)
    built = BuiltModel(model, record, (*modes, *filter(None, [tensors.note()])))
    names, aliases = [name for name, _ in model.named_parameters()], tensor_aliases(model)
    check_patterns_match("model.freeze", spec.freeze, names, aliases)
    for name, parameter in model.named_parameters():
        if any(pattern_matches(pattern, name) for pattern in spec.freeze):
            parameter.requires_grad_(False)
    check_trainable(model)
    check_parameter_groups(
        job.optimizer.groups, [name for name, p in model.named_parameters() if p.requires_grad], aliases
    )
    if spec.weights:
        check_weights(spec.weights, built.record)
    return built


log = logging.getLogger(__name__)
BucketExamples = Mapping[Bucket, MicrobatchTensors]
"""Rows of a microbatch for each shape to which microbatches are padded, ascending; none where all have one."""


class JobModel:
    """The traced model of `job`, whose stages will run on a `device`.

    worker/model/serialization.py says what of it goes to other workers.
    """

    def __init__(self, job: Job, device: str, keywords: tuple[str, ...] = ()):
        self._job, self._device, self._keywords = job, device, keywords
        self._built: nn.Module | None = None  # on the worker that builds, until it is cut
        self._traced: TracedModel | None = None
        self._evaluation: TracedModel | None = None
        self._eval_traces_by_workers: dict[int, TracedModel] = {}
        self._graph_received = False
        self.sent_graph = b""
        """The graph as this worker gave it to others, or was given it; empty before, and where it cannot be sent."""
        self._traces_by_workers: dict[int, TracedModel] = {}
        self._smaller: dict[Bucket, TracedModel] = {}  # without the largest
        self._traces_for_all = True  # until another worker's graph is taken
        self._record: ModelRecord | None = None
        self._notes: tuple[str, ...] = ()  # on the model as it was built
        self._interface = ModelInterface()
        self._opaque: dict[str, str] = {}  # the modules that run as they are, and why
        self._unused_state: dict[str, Any] | None = None  # on the worker that leads, once it is cut
        self.tree_spec: TreeSpec | None = None  # of the model's output, once it is cut

    @attributed_to(Reason.MODEL_BUILD_FAILED)
    def traced(self, sample: tuple[torch.Tensor, ...]) -> TracedModel:
        """The model traced for inputs like `sample`; built and traced by the first call."""
        if self._traced is None:
            self._build()
            self._traced = self._trace(sample)
        return self._traced

    def _build(self) -> None:
        if self._built is not None:
            return
        built = build_job_model(self._job)
        self._built, self._record, self._notes = built.model, built.record, built.notes
        _check_loss_scalable(self._built, self._job.training.precision)
        self._interface = adapt_model(
            self._built, self._keywords, output=self._job.model.output, own_loss=self._job.loss is None
        )

    @attributed_to(Reason.MODEL_BUILD_FAILED)
    def take_trace(self, graph: bytes, buckets: Sequence[Bucket] = ()) -> None:
        """Build the model, and take the graph that was traced of it, and compared with it, in an earlier attempt, with those
        of other `buckets`: this worker traces for all, and does not trace."""
        self._build()
        self.receive_graph(graph, buckets)
        self._traces_for_all = True
        named = dict(self._built.named_parameters(remove_duplicate=False))
        load_values(
            self._traced,
            storage_values({name: named[name] for name in self._traced.placed.parameters.values()}),
        )

    @attributed_to(Reason.MODEL_BUILD_FAILED)
    def traced_smaller(self, examples: BucketExamples) -> dict[Bucket, TracedModel]:
        """The model traced for each bucket of `examples` but the largest; by the first call. Raises TraceError for modules
        that run as they are, whose state the stages of several buckets would not share."""
        *smaller, largest = examples or (None,)
        for bucket in (bucket for bucket in smaller if bucket not in self._smaller):
            self.traced(examples[largest][0])
            with _naming_bucket(bucket):
                self._smaller[bucket] = self._trace(examples[bucket][0])
        for traced in (self._traced, *self._smaller.values()) if smaller else ():
            if calls := opaque_calls(traced.placed.module):
                raise TraceError(
                    f"data.lengths has {len(examples)} buckets, and the model has {calls[0]}: what it keeps would not be "
                    f"shared by the stages of each bucket; give one bucket, or change that module: "
                    f"{traced.opaque[calls[0].record.path]}"
                )
        return self._smaller

    def _trace(self, sample: tuple[torch.Tensor, ...]) -> TracedModel:
        traced = trace(self._built, sample, opaque=self._opaque, **self._trace_options)
        self._opaque |= traced.opaque
        return traced.with_interface(self._interface.tree_spec, self._interface.notes)

    @property
    def _trace_options(self) -> dict[str, Any]:
        training = self._job.training
        return {
            "autocast": autocast_dtype(training.precision),
            "device": self._device,
            "transfers": training.transfers,
            "whole": self._job.meshes == 1 and self._job.pipeline.stages in (1, AUTO),
        }

    @attributed_to(Reason.MODEL_BUILD_FAILED)
    def _traced_in_eval_mode(self, sample: tuple[torch.Tensor, ...]) -> TracedModel:
        """The model in eval mode, on the worker that built it; traced by the first call."""
        if self._evaluation is None:
            self.traced(sample)
            self._evaluation = self._trace_in_eval_mode(sample)
        return self._evaluation

    def _trace_in_eval_mode(self, sample: tuple[torch.Tensor, ...]) -> TracedModel:
        # what is one node in training is one here, so that both are cut at the same modules
        traced = trace_in_eval_mode(self._built, sample, opaque=self._opaque, **self._trace_options)
        return traced.with_interface(self._interface.tree_spec)

    @attributed_to(Reason.CUT_IMPOSSIBLE)
    def evaluation_edges(
        self, sample: tuple[torch.Tensor, ...], stage_starts: Sequence[str], own: int = 1
    ) -> list[EvaluationEdge]:
        """The tensors between the stages of a cut in eval mode; a mesh of this worker has `own` data-parallel ranks."""
        models = {own: self._traced_in_eval_mode(sample), **self._eval_traces_by_workers}
        return evaluation_edges(models, self._evaluation_starts(sample, stage_starts, models))

    def _evaluation_starts(
        self, sample: tuple[torch.Tensor, ...], stage_starts: Sequence[str], models: Mapping[int, TracedModel]
    ) -> dict[int, list[str]]:
        trained = self.traced(sample).layers
        return {
            size: evaluation_stage_starts(trained, stage_starts, model.layers)
            for size, model in models.items()
        }

    @attributed_to(Reason.CUT_IMPOSSIBLE)
    def evaluation_stages(
        self,
        stage_starts: Sequence[str],
        trained: Mapping[int, StageModule],
        device: str,
        shard_stage: Callable[[StageModule], StageModule] = lambda stage: stage,
    ) -> EvaluationStages:
        """The stages in eval mode on the parameters of `trained`, made by `cut` and split by `shard_stage`.

        Each worker of a mesh has its own running statistics: where there are several, an evaluation uses those of one.
        """
        evaluated, self._evaluation = self._evaluation, None
        stage_starts = evaluation_stage_starts(self._layers, stage_starts, evaluated.layers)
        several = self._job.max_dp_size > 1
        stages = evaluation_stages(
            evaluated, stage_starts, trained, device=device, own_statistics=several, share=shard_stage
        )
        if path := self._job.model.weights:
            fill_tensors(path, stages.alone, evaluated.aliases)
        return stages

    def check(
        self,
        sample: tuple[torch.Tensor, ...],
        target: Target,
        *,
        further: Sequence[MicrobatchTensors] = (),
        examples: BucketExamples = MappingProxyType({}),
        padded_twice: Sequence[MicrobatchTensors] = (),
        free_bytes: Callable[[], int | None],
    ) -> list[str]:
        """Notes on the traced model, and on those of other buckets, which `examples` has. Refuses a tensor plan that does
        not fit it, and with training.check_trace a graph that computes something else than the model, or that nobody can
        compare and whose forward moves tensors which are no buffers; `further` are other microbatches of these shapes,
        `padded_twice` the same rows in two lengths, `free_bytes` those of the device."""
        traced, job = self.traced(sample), self._job
        self._check_layout(traced)
        for tensor in sorted({*job.tensors} - {1}):
            check_tensor_plan_of(traced, job.resources.tensor_plan, tensor)
        notes = [*self._notes, *batch_norm_notes(traced, job), *tf32_notes(job, self._device)]
        if not job.training.check_trace:
            self.traced_smaller(examples)
            return [*notes, *traced.notes, *_loss_untried(job), *filter(None, self._unchecked_state(traced))]
        notes += self._check_trace(traced, target, further, free_bytes())
        for bucket, smaller in self.traced_smaller(examples).items():
            with _naming_bucket(bucket):
                found = self._check_trace(smaller, examples[bucket][1], (), free_bytes())
            notes += [note for note in found if note not in notes]
        if padded_twice and self._built is not None:
            with attributed_to(Reason.MODEL_BUILD_FAILED):
                check_padding(self._built, self._make_loss("cpu"), padded_twice)
        return notes

    @property
    def traced_for_other_sizes(self) -> list[TracedModel]:
        """The models that this worker traced for workers of meshes of other sizes, in their order."""
        return list(self._traces_by_workers.values())

    @property
    def traced_for_other_buckets(self) -> list[TracedModel]:
        """The models that were traced for smaller microbatches, ascending."""
        return list(self._smaller.values())

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters of the model itself by name, on the worker that built it until it is cut; else none."""
        if self._built is None:
            return {}
        return {name: p for name, p in self._built.named_parameters() if p.requires_grad}

    @attributed_to(Reason.CUT_IMPOSSIBLE)
    def parameter_names(
        self, sample: tuple[torch.Tensor, ...], stage_starts: Sequence[str], stages: Sequence[int]
    ) -> list[str]:
        """The names of the parameters of some stages, in the order in which their mesh has them."""
        return self.traced(sample).parameters(stage_starts, stages)

    def _check_layout(self, traced: TracedModel) -> None:
        """Refuse layouts that need to look into a module that runs as it is."""
        job = self._job
        calls = opaque_calls(traced.placed.module)
        if calls and {*job.tensors} != {1}:
            raise ModelError(
                f"parallelism.tp is {max(job.tensors)}, and the model has {calls[0]}: tensor parallelism cannot split "
                f"what it computes; set tp to 1, or change that module: {traced.opaque[calls[0].record.path]}"
            )
        if calls and len({*job.dp_sizes}) > 1:
            raise ModelError(
                f"resources.meshes have {', '.join(map(str, job.dp_sizes))} data-parallel workers, and the model has "
                f"{calls[0]}: it may look at other rows of a worker; give all meshes the same number, or "
                f"change that module: {traced.opaque[calls[0].record.path]}"
            )

    @attributed_to(Reason.USER_CODE_RAISED)
    def _check_trace(
        self,
        traced: TracedModel,
        target: Target,
        further: Sequence[MicrobatchTensors],
        free_bytes: int | None,
    ) -> list[str]:
        """Compare the graphs with the model, where this worker built it and both fit in `free_bytes`."""
        if self._built is None:
            return []
        device = self._device
        needed = trace_check_bytes(self._built, traced, device)
        if free_bytes is not None and needed > free_bytes:
            return self._notes_unchecked(
                traced,
                f"the traced model was not compared with the model itself: both would take about {needed:,} bytes, "
                f"and {free_bytes:,} are free",
            )
        loss = functools.partial(self._make_loss, device)
        options = {"further": further, "check_loss": self._check_loss, "device": device}
        try:
            try:
                notes = check_trace(self._built, traced, loss, target, **options)
            except OwnBackwardError:
                if not self._trace_own_backwards(traced):
                    raise
                notes = check_trace(self._built, self._traced, loss, target, **options)
            if self._job.evaluation is not None and traced is self._traced:
                evaluated = self._traced_in_eval_mode(traced.example_inputs)
                evaluated_loss = functools.partial(self._make_loss, device, evaluated)
                check_evaluation_trace(self._built, evaluated, evaluated_loss, target, device=device)
            return notes
        except AttemptFailure:
            raise
        except ModelError as error:
            raise as_failure(error, Reason.MODEL_BUILD_FAILED) from None
        except Exception as error:
            if device == "cpu":
                raise
            # the graph makes its constants on the accelerator, a model may only run where it was built
            lack = (
                "it has no room for both" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
            )
        return self._notes_unchecked(
            traced, f"the traced model was not compared with the model itself on the accelerator: {lack}"
        )

    def _check_loss(self, seen: Sequence[Rows], microbatches: Sequence[MicrobatchTensors]) -> list[str]:
        """Notes on whether the losses of microbatches make up that of a batch; refuses a loss of which they do not."""
        job = self._job
        if job.training.loss_reduction == "microbatches":
            return []
        if job.loss is None:
            return check_own_loss(self._built, microbatches)
        loss = self._make_loss(self._device)
        return check_loss_reduction(
            loss, seen, count=target_counter(job, loss), ignored=ignored_target(job.loss)
        )

    def _notes_unchecked(self, traced: TracedModel, why: str) -> list[str]:
        """Notes on a graph that was not compared, for the reason `why`. Refuses one whose forward moved tensors that are no
        buffers."""
        tensors, values = self._unchecked_state(traced)
        if tensors:
            error = TraceError(f"{tensors}; {why}; {SKIP_CHECK_HINT}")
            raise as_failure(error, Reason.MODEL_BUILD_FAILED)
        return [*traced.notes, why, *_loss_untried(self._job), *filter(None, [values])]

    def _unchecked_state(self, traced: TracedModel) -> tuple[str, str]:
        return unchecked_state(type(self._built).__name__, traced.moved)

    def _trace_own_backwards(self, traced: TracedModel) -> bool:
        """Trace anew with the modules as they are whose autograd functions have backwards of their own; False where the
        model itself calls such a function, or none is found."""
        options = self._trace_options
        found = modules_with_own_backwards(
            self._built, traced.example_inputs, autocast=options["autocast"], device=options["device"]
        )
        if not found or ("" in found and not options["whole"]):
            return False
        self._opaque |= found
        self._traced = self._trace(traced.example_inputs)
        self._check_layout(self._traced)
        return True

    def _make_loss(self, device: str, traced: TracedModel | None = None) -> JobLoss:
        """The job's loss of what `traced` returns, by default the trained model's trace."""
        return make_loss(self._job.loss, device).with_output_spec((traced or self._traced).tree_spec)

    @attributed_to(Reason.MODEL_BUILD_FAILED)
    def graph(
        self,
        sample: tuple[torch.Tensor, ...],
        workers: int | None = None,
        *,
        examples: BucketExamples = MappingProxyType({}),
    ) -> bytes:
        """The traced model for other workers, without parameters; empty where the graph cannot be serialised. With it go
        those of other buckets, which `examples` has.

        `workers`: the data-parallel size of a mesh of another size, for whose rows (`sample`) it is traced now.
        """
        if workers is None and self._graph_received:
            return self.sent_graph
        evaluates, evaluated = self._job.evaluation is not None, None
        smaller = self.traced_smaller(examples)
        if workers is None:
            traced = self.traced(sample)
            evaluated = self._traced_in_eval_mode(sample) if evaluates else None
        else:
            traced = self._traces_by_workers[workers] = self._trace(sample)
            if evaluates:
                evaluated = self._eval_traces_by_workers[workers] = self._trace_in_eval_mode(sample)
        try:
            models = [traced, *smaller.values()]
            graph = serialize_models(models if evaluated is None else [*models, evaluated])
        except Exception as error:  # for example an object of a user's class
            log.warning("every worker traces the model for itself, since its graph cannot be sent: %s", error)
            return b""
        if workers is None:
            self.sent_graph = graph
        return graph

    @attributed_to(Reason.MODEL_BUILD_FAILED)
    def receive_graph(self, graph: bytes, buckets: Sequence[Bucket] = ()) -> None:
        """Take the graph that another worker traced, with those of other `buckets`, the largest of which is the graph's own;
        nothing is built here, unless it could not be sent."""
        self._traces_for_all = False
        self.sent_graph = graph
        if graph:
            (self._traced, *others), self._graph_received = deserialize_models(graph), True
            self._smaller = dict(zip(buckets[:-1], others, strict=False))
            others = others[len(self._smaller) :]
            self._evaluation = others[0] if others else None

    @attributed_to(Reason.CUT_IMPOSSIBLE)
    def check_batch_sharding(
        self,
        own: int,
        samples: Callable[[int], SamplesByRank],
        stage_starts: Sequence[str],
        workers_of_stage: Sequence[int],
    ) -> None:
        """Refuse a cut between heterogeneous meshes where batch-sharding a tensor over n and over m ranks does not give
        the same tensor; `samples(n)` are the inputs of each of n ranks. On the worker that traced, of `own` ranks."""
        if self._built is None or not self._traces_by_workers:
            return
        models = {own: self.traced(samples(own)[0]), **self._traces_by_workers}
        tolerance = tolerance_for(self._built, models[own].placed.autocast, "cpu")
        inputs = {size: samples(size) for size in models}
        check_batch_sharding(models, inputs, stage_starts, workers_of_stage, tolerance)
        if self._job.evaluation is not None:
            evaluated = {own: self._traced_in_eval_mode(inputs[own][0]), **self._eval_traces_by_workers}
            starts = self._evaluation_starts(inputs[own][0], stage_starts, evaluated)
            check_batch_sharding(
                evaluated, inputs, starts[own], workers_of_stage, tolerance, when=" in eval mode"
            )

    @attributed_to(Reason.CUT_IMPOSSIBLE)
    def weights(
        self, sample: tuple[torch.Tensor, ...], stage_starts: Sequence[str], stages: Sequence[int]
    ) -> ParameterValues:
        """The initial values of the parameters of some stages, for the worker that runs them."""
        traced = self.traced(sample)
        return parameter_values(traced, traced.parameters(stage_starts, stages))

    @attributed_to(Reason.CUT_IMPOSSIBLE)
    def cut(
        self,
        sample: tuple[torch.Tensor, ...],
        stage_starts: Sequence[str],
        keep: Sequence[int],
        weights: ParameterValues | None,
        *,
        examples: BucketExamples = MappingProxyType({}),
    ) -> StageGraph:
        """The stages `keep`, with their initial values or those of model.weights; the model and other stages are dropped.
        Graphs of other buckets, which `examples` has, are left for `smaller_stages`."""
        traced, path = self.traced(sample), self._job.model.weights
        self.traced_smaller(examples)
        if weights is not None and self._graph_received:
            load_values(traced, weights)
        graph = traced.cut(stage_starts, keep=keep)
        if self._job.evaluation is not None and self._evaluation is None:
            self._traced_in_eval_mode(sample)
        if path:
            fill_stages(path, [graph.stages[index] for index in keep], traced.aliases)
        if self._traces_for_all and self._built is not None:
            unused = unused_tensors(self._built, self._record, traced.state_names())
            if path:
                fill_tensors(path, unused, traced.aliases)
            self._unused_state = record_to_state(self._record, unused)
        self._layers, self.tree_spec = traced.layers, traced.tree_spec
        self._traced = self._built = None
        self._traces_by_workers, self._eval_traces_by_workers = {}, {}
        return graph

    @attributed_to(Reason.CUT_IMPOSSIBLE)
    def smaller_stages(
        self, stage_starts: Sequence[str], graph: StageGraph, trained: Mapping[int, StageModule], device: str
    ) -> list[BucketStages]:
        """The stages for each smaller bucket, ascending, on the parameters and buffers of `trained`, which `cut` made with
        `graph`; the graphs are dropped."""
        smaller, self._smaller = self._smaller, {}
        found = []
        for bucket, traced in smaller.items():
            with _naming_bucket(bucket):
                other = traced.cut(stage_starts, keep=list(trained))
            for index in trained:
                other.stages[index].to(device)
            found.append(share_stages(other, graph, trained, bucket))
        return found

    def unused_state(self) -> dict[str, Any]:
        """The states by name of checkpoint shards that belong to no mesh, see worker/checkpoint/record.py; they never
        change, and only one worker has any."""
        return {} if self._unused_state is None else {RECORD_SHARD: self._unused_state}

    def forget_graph(self) -> None:
        """Drop the graphs, as the next sample has other shapes."""
        self._traced, self._evaluation, self._graph_received, self.sent_graph = None, None, False, b""
        self._smaller = {}
        self._traces_by_workers, self._eval_traces_by_workers = {}, {}


@contextlib.contextmanager
def _naming_bucket(bucket: Bucket) -> Iterator[None]:
    """Errors of the body about the model say for which shape of a microbatch it was traced."""
    try:
        yield
    except AttemptFailure as error:
        message = f"for microbatches of {bucket} (data.lengths): {error.message}"
        raise AttemptFailure(error.reason, message, error.details) from None
    except ModelError as error:
        raise type(error)(f"for microbatches of {bucket} (data.lengths): {error}") from error


def _loss_untried(job: Job) -> list[str]:
    """The note on a loss that was not compared with the loss of a whole batch, as the model itself was not run."""
    if job.training.loss_reduction == "microbatches":
        return []
    return ["the loss was not tried on parts of a batch, as the model itself was not run before training"]


def _check_loss_scalable(model: nn.Module, precision: str) -> None:
    """Refuse float16 parameters, whose gradients cannot be scaled, as torch's GradScaler does."""
    half = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16]
    if precision == FP16 and half:
        raise ModelError(
            f"training.precision is fp16, and parameter {half[0]!r} ({len(half)} in all) is float16 itself, whose "
            "gradient cannot be scaled: build the model in float32 (autocast computes in float16), or freeze it"
        )
