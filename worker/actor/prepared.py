"""PreparedWorker: a worker with the job's data, loss and model, which traces, measures and hands on what a plan needs.

One worker builds and traces the model for all; the others take its graph. `load` gives the state that trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from worker.actor.assignment import Assignment
from worker.actor.batch_feed import Batches
from worker.actor.benchmarks import (
    measure_job_optimizer_state,
    measure_mesh_collectives,
    profile_key,
    profile_layers,
)
from worker.actor.evaluation import EvaluationBatches
from worker.actor.loaded import LoadedWorker
from worker.actor.loss import JobLoss
from worker.actor.model_host import JobModel
from worker.actor.optimizer import (
    check_layout_of_optimizer,
    check_optimizer_of_meshes,
    check_optimizer_of_model,
    make_loss,
)
from worker.actor.state import KnownGraph, WorkerPlace, WorkerState
from worker.contract.failures import AttemptFailure, attributed_to
from worker.contract.job import Bucket, Job, microbatch_counts
from worker.contract.planned import ModelSignature
from worker.contract.profile import MeshCollectiveCosts, OptimizerState
from worker.contract.reasons import Reason
from worker.engine.compile import stage_compiler
from worker.model.eval_mode import EvaluationEdge
from worker.model.export import TracedModel
from worker.model.factory import moved_factory_notes, resolve
from worker.model.serialization import ParameterValues
from worker.transport.base import Topology

# How many microbatches behind the first the traced model is compared on, too.
_FURTHER_MICROBATCHES = 3


class PreparedWorker(WorkerState):
    """A worker that has the data and the loss of its job, and builds its model where it is asked to trace."""

    def __init__(self, place: WorkerPlace, known: KnownGraph | None = None):
        super().__init__(place)
        self._known = known
        if self.job.data.lengths is not None and self.device != "cpu":
            raise AttemptFailure(
                Reason.PLAN_INFEASIBLE,
                f"data.lengths is given and the job runs on {self.device}, where kernels are loaded for one length only: "
                "set resources.device to cpu, or leave data.lengths out and pad every sample to one length",
            )
        self._counts = microbatch_counts(self.job)
        data = {"worker": place.data_rank, "workers_per_mesh": place.data_workers}
        self.batches = Batches(self.job, **data, microbatches=self._counts[-1])
        self.model = JobModel(self.job, self.device, self.batches.keywords)
        self.evaluation_batches: EvaluationBatches | None = None
        if self.job.evaluation is not None:
            self.evaluation_batches = EvaluationBatches(self.job, **data, microbatches=self._counts[-1])
            self.evaluation_batches.check_matches_training(self.batches)
        self.loss = _make_loss(self.job, self.device)
        self._weights: ParameterValues | None = None  # of its stages, once they are known
        self._untried = ""  # the error for which the optimizer was not tried before the model was built

    def profile_keys(self) -> dict[int, str]:
        """The cache key of the profile for each number of microbatches that may be chosen."""
        workers = sum(self.job.mesh_sizes)
        return {
            count: profile_key(self.job, self.device, self.batches, count, workers, self.place.tensor)
            for count in self._counts
        }

    def smaller_buckets(self) -> tuple[Bucket, ...]:
        """The shapes of microbatches but the largest, ascending."""
        return self.batches.buckets[:-1]

    def tells_lengths(self) -> bool:
        """True where the data tells the lengths of steps to come, so that these can be planned."""
        return bool(self.batches.bucket_numbers(1))

    def optimizer_state(self) -> OptimizerState:
        """The bytes that the job's optimizer keeps of the parameters that it trains. Raises AttemptFailure where optimizers
        of each rank's own parameters, or parts of them, would train something else than one of them all."""
        self._untried = check_layout_of_optimizer(self.job, self.device)
        return measure_job_optimizer_state(self.job, self.device)

    def parts(self) -> Iterable[Any]:
        return (self, self.model, self.batches, self.loss)

    def close(self) -> None:
        self.batches.close()
        if self.evaluation_batches is not None:
            self.evaluation_batches.close()

    # Tracing

    def known_graph(self) -> KnownGraph | None:
        if self.model.sent_graph:
            return KnownGraph(self.batches.microbatches, self.model.sent_graph)
        return self._known

    def knows_graph(self, microbatches: int) -> bool:
        """True where this worker has the graph of an earlier attempt for this number of microbatches."""
        return self._known is not None and self._known.microbatches == microbatches

    def give_graph(self) -> bytes:
        """The graph of an earlier attempt."""
        return self._known.graph

    def trace(self, microbatches: int, graph: bytes = b"") -> list[str]:
        """Build the model and trace it for this number of microbatches, one worker for all, or take the `graph` of an
        earlier attempt; notes on the model, and on the job's factories that moved, which that attempt had already."""
        self.set_microbatches(microbatches)
        if graph:
            self.model.take_trace(graph, self.batches.buckets)
            return []
        inputs, target = self.batches.sample
        notes = self.model.check(
            inputs,
            target,
            further=self.batches.further_samples(_FURTHER_MICROBATCHES),
            examples=self.batches.examples,
            padded_twice=self.batches.padded_twice(),
            free_bytes=lambda: self.memory_limit(1),
        )
        if trained := self.model.trained_parameters():
            notes += check_optimizer_of_model(self.job, trained, self.device, untried=self._untried)
        evaluation = self.job.evaluation
        factories = (self.job.model, self.job.data, *([evaluation.data] if evaluation else ()))
        notes += self._notes_on_lengths()
        return [*moved_factory_notes(part.factory for part in factories), *notes]

    def _notes_on_lengths(self) -> list[str]:
        if not (buckets := self.batches.buckets):
            return []
        return [
            f"data.lengths: microbatches are padded to {', '.join(map(str, buckets))}, and weigh by their targets "
            "(training.loss_reduction: tokens)"
        ]

    @property
    def traced(self) -> TracedModel:
        """The model traced for this worker's microbatches; built by the first question."""
        return self.model.traced(self.batches.sample[0])

    def graph(self, workers: int | None = None) -> bytes:
        """The traced model for the other workers, without its parameters; for a mesh of another data-parallel size
        traced for its `workers`."""
        if workers in (None, self.place.data_workers):
            return self.model.graph(self.batches.sample[0], examples=self.batches.examples)
        return self.model.graph(self.batches.samples(workers)[0], workers)

    def take_graph(self, graph: bytes, microbatches: int) -> None:
        """Receive the model that another worker traced for this number of microbatches: nothing is built here."""
        self.set_microbatches(microbatches)
        self.model.receive_graph(graph, self.batches.buckets)

    def model_signature(self, whole: bool) -> ModelSignature:
        """The signature of the traced model, on the worker that traced; not `whole`: without its parameters."""
        return self.traced.signature(whole=whole)

    # Measuring

    @attributed_to(Reason.USER_CODE_RAISED)
    def profile(self, microbatches: int | None = None, bucket: Bucket | None = None) -> dict[str, Any]:
        """Measure every layer on this device, for the batch in this number of microbatches, of the largest `bucket` or of
        this one; JSON of a LayerProfile."""
        self.set_microbatches(microbatches)
        examples = self.batches.examples
        profile = profile_layers(
            self.job,
            self.traced if bucket is None else self.model.traced_smaller(examples)[bucket],
            (self.batches.sample if bucket is None else examples[bucket])[1],
            self.loss,
            mesh=self.mesh,
            device=self.device,
            compiler=stage_compiler(self.job.training.precision, self.device)
            if self.job.training.compile
            else None,
        )
        return profile.to_json()

    @attributed_to(Reason.START_TIMEOUT)
    def measure_collectives(
        self, *, store: tuple[str, int], host: str, connect_s: float
    ) -> MeshCollectiveCosts:
        """The costs of the collectives of this mesh; all its workers call this at the same time."""
        topology = Topology((self.mesh,), self.place.workers_per_mesh)
        transport = self.transport(topology, store, host, connect_s)
        return measure_mesh_collectives(self.job, transport, self.device)

    # From a plan to the state that trains

    def check_batch_sharding(self, stage_starts: Sequence[str], workers_of_stage: Sequence[int]) -> None:
        """Refuse a cut between heterogeneous meshes whose batch-sharded tensors would not arrive as they were sent."""
        self.model.check_batch_sharding(
            self.place.data_workers, self.batches.samples, stage_starts, workers_of_stage
        )

    def evaluation_edges(self, stage_starts: Sequence[str]) -> list[EvaluationEdge]:
        """The tensors between the stages of a cut in eval mode; on the worker that traced."""
        return self.model.evaluation_edges(self.batches.sample[0], stage_starts, self.place.data_workers)

    def weights(self, stage_starts: Sequence[str], stages: Sequence[int], *_taken: None) -> ParameterValues:
        """The initial values of the parameters of some stages, for the worker that runs them; once other workers have taken
        theirs, of whom nothing is needed but that they have."""
        return self.model.weights(self.batches.sample[0], stage_starts, stages)

    def take_weights(self, values: ParameterValues) -> None:
        """Keep the initial values that another worker gives of the parameters of this worker's stages, until it loads them.
        What lies in shared memory is copied: there those of other meshes follow."""
        self._weights = {
            name: value if value.flags.writeable else value.copy() for name, value in values.items()
        }

    def load(self, assignment: Assignment) -> LoadedWorker:
        """The worker that runs `assignment`, with the weights that it took where it took a graph. This one has no model any
        more."""
        self.set_microbatches(assignment.program.microbatches)
        with self.raising_attempt_failures():
            self._check_optimizer_of_meshes(assignment)
        weights, self._weights = self._weights, None
        return LoadedWorker(
            self.place,
            assignment,
            model=self.model,
            batches=self.batches,
            evaluation_batches=self.evaluation_batches,
            loss=self.loss,
            weights=weights,
        )

    def _check_optimizer_of_meshes(self, assignment: Assignment) -> None:
        """Refuse settings that differ from those in one process, on the worker that built the model."""
        if not (trained := self.model.trained_parameters()):
            return
        stages_of: dict[str, list[int]] = {}
        for stage, mesh in enumerate(assignment.mesh_of_stage):
            stages_of.setdefault(mesh, []).append(stage)
        names = {
            mesh: self.model.parameter_names(self.batches.sample[0], assignment.stage_starts, stages)
            for mesh, stages in stages_of.items()
        }
        check_optimizer_of_meshes(self.job, trained, names)

    def set_microbatches(self, microbatches: int | None) -> None:
        """Split the batch into this number of microbatches from now on; None changes nothing."""
        if microbatches is None or microbatches == self.batches.microbatches:
            return
        self.batches.set_microbatches(microbatches)
        if self.evaluation_batches is not None:
            self.evaluation_batches.set_microbatches(microbatches)
        self.model.forget_graph()  # it has the shapes of a microbatch


@attributed_to(Reason.MODEL_BUILD_FAILED)
def _make_loss(job: Job, device: str) -> JobLoss:
    """The loss of `job`. Raises AttemptFailure for a wrong name of a factory, before anything is measured."""
    loss = make_loss(job.loss, device)
    for part in (job.optimizer, job.optimizer.schedule, job.model):
        if part:
            resolve(part.factory)
    return loss
