"""A job's model on one worker: built and traced here, or taken from the worker that did so for all.

Everything it raises is an AttemptFailure with a reason code. Knows no gang, no Ray and no engine.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from worker.engine.results import autocast_dtype
from worker.failure import as_failure, attributed_to, is_out_of_memory
from worker.job import Job
from worker.job_loss import JobLoss
from worker.model import StageGraph, StageModule, TracedModel, trace
from worker.model.check import check_trace, needed_bytes
from worker.model.distance import tolerance_of
from worker.model.errors import ModelError
from worker.model.evaluating import (
    EvaluationEdge,
    EvaluationStages,
    evaluation_begins,
    evaluation_edges,
    evaluation_stages,
    trace_in_eval_mode,
)
from worker.model.interface import Interface, adapt
from worker.model.share_check import Samples, check_shares
from worker.model.shipping import Values, fill, pack_all, unpack_all, values_of
from worker.nests import Form, Target
from worker.precision import FP16
from worker.reasons import Reason
from worker.training import make_loss
from worker.weights.building import build_job_model
from worker.weights.record import SHARD, ModelRecord, state_of, unused_tensors
from worker.weights.start import fill_stages, fill_tensors

log = logging.getLogger(__name__)


class JobModel:
    """The traced model of `job`, whose stages will run on a `device`; see `worker/model/shipping.py` for what travels."""

    def __init__(self, job: Job, device: str):
        self._job, self._device = job, device
        self._built: nn.Module | None = None  # on the worker that builds, until it is cut
        self._traced: TracedModel | None = None
        self._evaluation: TracedModel | None = None
        self._evaluations_of_others: dict[int, TracedModel] = {}
        self._taken = False
        self._of_others: dict[int, TracedModel] = {}
        self._leads = True  # until another worker's graph is taken
        self._record: ModelRecord | None = None
        self._interface = Interface()
        self._rest: dict[str, Any] | None = None  # on the worker that leads, once it is cut
        self.form: Form | None = None  # of what the model returns, once it is cut
        self.keywords: tuple[str, ...] = ()  # the names of the inputs in samples, where they have any

    @attributed_to(Reason.MODEL_BUILD_FAILED)
    def traced(self, sample: tuple[torch.Tensor, ...]) -> TracedModel:
        """The model for inputs like `sample`; built and traced now where that was not done."""
        if self._traced is None:
            model = self._job.model
            if self._built is None:
                built = build_job_model(self._job)
                self._built, self._record = built.model, built.record
                _check_scalable(self._built, self._job.training.precision)
                self._interface = adapt(
                    self._built, self.keywords, output=model.output, own_loss=self._job.loss is None
                )
            self._traced = self._trace(sample)
        return self._traced

    def _trace(self, sample: tuple[torch.Tensor, ...]) -> TracedModel:
        traced = trace(self._built, sample, **self._as_it_runs)
        traced.form, traced.notes = self._interface.form, (*self._interface.notes, *traced.notes)
        return traced

    @property
    def _as_it_runs(self) -> dict[str, Any]:
        training = self._job.training
        return {
            "autocast": autocast_dtype(training.precision),
            "device": self._device,
            "transfers": training.transfers,
        }

    @attributed_to(Reason.MODEL_BUILD_FAILED)
    def _evaluated(self, sample: tuple[torch.Tensor, ...]) -> TracedModel:
        """The model in eval mode, where it was built; traced now where that was not done."""
        if self._evaluation is None:
            self.traced(sample)
            self._evaluation = self._trace_evaluated(sample)
        return self._evaluation

    def _trace_evaluated(self, sample: tuple[torch.Tensor, ...]) -> TracedModel:
        traced = trace_in_eval_mode(self._built, sample, **self._as_it_runs)
        traced.form = self._interface.form
        return traced

    @attributed_to(Reason.CUT_IMPOSSIBLE)
    def evaluation_edges(
        self, sample: tuple[torch.Tensor, ...], begins: Sequence[str], own: int = 1
    ) -> list[EvaluationEdge]:
        """What crosses the borders of a cut while it is evaluated; `own` workers share a microbatch here."""
        models = {own: self._evaluated(sample), **self._evaluations_of_others}
        return evaluation_edges(models, self._evaluation_begins(sample, begins, models))

    def _evaluation_begins(
        self, sample: tuple[torch.Tensor, ...], begins: Sequence[str], models: Mapping[int, TracedModel]
    ) -> dict[int, list[str]]:
        trained = self.traced(sample).layers
        return {size: evaluation_begins(trained, begins, model.layers) for size, model in models.items()}

    @attributed_to(Reason.CUT_IMPOSSIBLE)
    def evaluation_stages(
        self,
        begins: Sequence[str],
        trained: Mapping[int, StageModule],
        device: str,
        alike: Callable[[StageModule], StageModule] = lambda stage: stage,
    ) -> EvaluationStages:
        """The evaluated stages on the parameters of `trained`, as `cut` and `alike` made them; their origin is forgotten.

        Each worker of a mesh has running statistics of its own: where there are several an evaluation has those of one.
        """
        evaluated, self._evaluation = self._evaluation, None
        begins = evaluation_begins(self._layers, begins, evaluated.layers)
        several = self._job.data_workers > 1
        stages = evaluation_stages(
            evaluated, begins, trained, device=device, own_statistics=several, alike=alike
        )
        if path := self._job.model.weights:
            fill_tensors(path, stages.alone, evaluated.aliases)
        return stages

    @attributed_to(Reason.USER_CODE_RAISED)
    def check(
        self, sample: tuple[torch.Tensor, ...], target: Target, *, device: str, free_bytes: int | None
    ) -> list[str]:
        """Refuse a model whose graph computes something else than it does itself; what to tell of the check.

        Only where the model was built and finds place beside its graph in `free_bytes` of `device`.
        """
        traced = self.traced(sample)
        if self._built is None:
            return []
        needed = needed_bytes(self._built, traced, device)
        if free_bytes is not None and needed > free_bytes:
            return [
                f"the traced model was not compared with the model itself: both would take about {needed:,} bytes, "
                f"and {free_bytes:,} are free"
            ]
        loss = functools.partial(self._make_loss, device)
        try:
            return check_trace(self._built, traced, loss, target, device=device)
        except ModelError as error:
            raise as_failure(error, Reason.MODEL_BUILD_FAILED) from None
        except Exception as error:
            if device == "cpu":
                raise
            # the graph makes its constants on the accelerator, a model may only run where it was built
            lack = (
                "it has no room for both" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
            )
        return [f"the traced model was not compared with the model itself on the accelerator: {lack}"]

    def _make_loss(self, device: str) -> JobLoss:
        return make_loss(self._job.loss, device).reading(self._traced.form)

    @attributed_to(Reason.MODEL_BUILD_FAILED)
    def graph(self, sample: tuple[torch.Tensor, ...], workers: int | None = None) -> bytes:
        """What was traced, for other workers, without parameters; empty where the graph holds what cannot be sent.

        `workers`: of a mesh of another size, whose workers have other rows, like `sample`; traced now for them.
        """
        evaluates, evaluated = self._job.evaluation is not None, None
        if workers is None:
            traced = self.traced(sample)
            evaluated = self._evaluated(sample) if evaluates else None
        else:
            traced = self._of_others[workers] = self._trace(sample)
            if evaluates:
                evaluated = self._evaluations_of_others[workers] = self._trace_evaluated(sample)
        try:
            return pack_all([traced] if evaluated is None else [traced, evaluated])
        except Exception as error:  # an object of a user's own, say
            log.warning("every worker traces the model for itself, since its graph cannot be sent: %s", error)
            return b""

    @attributed_to(Reason.MODEL_BUILD_FAILED)
    def take(self, graph: bytes) -> None:
        """Have what another worker traced: nothing is built here, unless it could not be sent."""
        self._leads = False
        if graph:
            (self._traced, *others), self._taken = unpack_all(graph), True
            self._evaluation = others[0] if others else None

    @attributed_to(Reason.CUT_IMPOSSIBLE)
    def check_shares(
        self,
        own: int,
        samples: Callable[[int], Samples],
        begins: Sequence[str],
        workers_of_stage: Sequence[int],
    ) -> None:
        """Refuse a cut between meshes of unlike sizes where parts of a tensor are not what their shapes say; `samples`
        gives the inputs of each worker of a mesh of so many. On the worker that traced for all, of `own` workers."""
        if self._built is None or not self._of_others:
            return
        models = {own: self.traced(samples(own)[0]), **self._of_others}
        tolerance = tolerance_of(self._built, models[own].placed.autocast, "cpu")
        inputs = {size: samples(size) for size in models}
        check_shares(models, inputs, begins, workers_of_stage, tolerance)
        if self._job.evaluation is not None:
            evaluated = {own: self._evaluated(inputs[own][0]), **self._evaluations_of_others}
            starts = self._evaluation_begins(inputs[own][0], begins, evaluated)
            check_shares(evaluated, inputs, starts[own], workers_of_stage, tolerance, when=" in eval mode")

    @attributed_to(Reason.CUT_IMPOSSIBLE)
    def weights(
        self, sample: tuple[torch.Tensor, ...], begins: Sequence[str], stages: Sequence[int]
    ) -> Values:
        """The initial values of the parameters of some stages, for the worker that runs them."""
        traced = self.traced(sample)
        return values_of(traced, traced.parameters(begins, stages))

    @attributed_to(Reason.CUT_IMPOSSIBLE)
    def cut(
        self,
        sample: tuple[torch.Tensor, ...],
        begins: Sequence[str],
        keep: Sequence[int],
        weights: Values | None,
    ) -> StageGraph:
        """The stages `keep`, with their initial values or those of model.weights; all else is forgotten."""
        traced, path = self.traced(sample), self._job.model.weights
        if weights is not None and self._taken:
            fill(traced, weights)
        graph = traced.cut(begins, keep=keep)
        if self._job.evaluation is not None and self._evaluation is None:
            self._evaluated(sample)
        if path:
            fill_stages(path, [graph.stages[index] for index in keep], traced.aliases)
        if self._leads and self._built is not None:
            unused = unused_tensors(self._built, self._record, traced.held())
            if path:
                fill_tensors(path, unused, traced.aliases)
            self._rest = state_of(self._record, unused)
        self._layers, self.form = traced.layers, traced.form
        self._traced = self._built = None
        self._of_others, self._evaluations_of_others = {}, {}
        return graph

    def rest(self) -> dict[str, Any]:
        """The states by name of the shards of a checkpoint that are no mesh's, see worker/weights/record.py; they never
        change, and only one worker has any."""
        return {} if self._rest is None else {SHARD: self._rest}

    def forget_graph(self) -> None:
        """The next sample has other shapes: trace anew, or take a new graph."""
        self._traced, self._evaluation, self._taken = None, None, False
        self._of_others, self._evaluations_of_others = {}, {}


def _check_scalable(model: nn.Module, precision: str) -> None:
    """Refuse parameters whose gradients have no room for a loss scale, as torch's GradScaler does."""
    half = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16]
    if precision == FP16 and half:
        raise ModelError(
            f"training.precision is fp16, and parameter {half[0]!r} ({len(half)} in all) is float16 itself, whose "
            "gradient cannot be scaled: build the model in float32 (autocast computes in float16), or freeze it"
        )
