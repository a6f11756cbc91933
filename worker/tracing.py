"""What a worker traces of the model, and what it hands of that to the others. Part of `Worker` (worker/actor.py)."""

from __future__ import annotations

from collections.abc import Sequence

from worker.batches import Batches
from worker.job import Job
from worker.model.batch_norms import batch_norm_notes
from worker.model.evaluating import EvaluationEdge
from worker.model.form import ModelForm
from worker.model.shipping import Values
from worker.sharing_matrices import check_matrices
from worker.tf32 import tf32_notes
from worker.traced_model import JobModel


class Tracing:
    """The calls of a worker before its stages are known: one worker traces for all."""

    _job: Job
    _device: str
    _model: JobModel
    _batches: Batches
    _data_workers: int

    def _use(self, microbatches: int | None) -> None:
        raise NotImplementedError

    def memory_limit(self, sharing: int) -> int | None:
        raise NotImplementedError

    def trace(self, microbatches: int) -> list[str]:
        """Build the model and trace it for so many microbatches, one worker for all; what to tell of the check."""
        self._use(microbatches)
        inputs, target = self._batches.sample
        traced, resources = self._model.traced(inputs), self._job.resources
        for tensor in sorted({*self._job.tensors} - {1}):
            check_matrices(traced, resources.tensor_plan, tensor)
        notes = batch_norm_notes(traced, self._job) + tf32_notes(self._job, self._device)
        if not self._job.training.check_trace:
            return notes
        return notes + self._model.check(inputs, target, device=self._device, free_bytes=self.memory_limit(1))

    def graph(self, workers: int | None = None) -> bytes:
        """The traced model for the other workers, without its parameters; for those that are `workers` to share a
        microbatch."""
        if workers in (None, self._data_workers):
            return self._model.graph(self._batches.sample[0])
        return self._model.graph(self._batches.samples(workers)[0], workers)

    def form(self, whole: bool) -> ModelForm:
        """Of the traced model, for the worker that traced; not `whole`: without its parameters."""
        return self._model.traced(self._batches.sample[0]).signature(whole=whole)

    def check_shares(self, begins: Sequence[str], workers_of_stage: Sequence[int]) -> None:
        """Refuse a cut whose tensors would not arrive as they are meant, between meshes of unlike sizes."""
        self._model.check_shares(self._data_workers, self._batches.samples, begins, workers_of_stage)

    def take_graph(self, graph: bytes, microbatches: int) -> None:
        """Have what another worker traced for so many microbatches: nothing is built here."""
        self._use(microbatches)
        self._model.take(graph)

    def weights(self, begins: Sequence[str], stages: Sequence[int]) -> Values:
        """The initial values of the parameters of some stages, for the worker that runs them."""
        return self._model.weights(self._batches.sample[0], begins, stages)

    def evaluation_edges(self, begins: Sequence[str]) -> list[EvaluationEdge]:
        """What crosses the borders of the stages of a cut while they are evaluated; for the worker that traced."""
        return self._model.evaluation_edges(self._batches.sample[0], begins, self._data_workers)
