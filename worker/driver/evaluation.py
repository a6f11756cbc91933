"""Schedules evaluations between steps, combines their results, keeps the best value and stops training early.

An evaluation runs forwards only on the trained pipeline's stages, beside the memory that training holds all along; as
gradients are gone by then it may take what the training plan takes of each mesh. One call of all workers a batch; no
training step runs meanwhile.
EarlyStopping is stored in every checkpoint's manifest, so that a resumed attempt goes on with it: keep its
field names.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from worker.actor.evaluation import EvaluationSize
from worker.actor.step_result import EvaluatedBatch
from worker.contract.failures import AttemptFailure
from worker.contract.job import Evaluation, Job
from worker.contract.planned import MeshProgram, PlannedJob, mesh_programs, parse_reshardings
from worker.contract.reasons import Reason
from worker.driver.control_plane_client import ControlPlaneClient, Refused
from worker.driver.gang.gang import Gang
from worker.driver.gang.phases import Phase
from worker.driver.metrics import DriverMetrics
from worker.driver.planning import planning_failure
from worker.driver.reporter import Reporter
from worker.driver.step_measurement import metric_names
from worker.driver.tracking.run_tracking import RunTracking
from worker.model.eval_mode import EvaluationEdge

LOSS_METRIC = "loss"


@dataclass(frozen=True)
class EvaluationResult:
    """The loss and the metrics of an evaluation: NaN where nothing counted."""

    loss: float
    metrics: dict[str, float]

    def value(self, metric: str) -> float | None:
        """The value of a metric by name, or of the loss; None where there is no such metric."""
        return self.loss if metric == LOSS_METRIC else self.metrics.get(metric)


def combine_batches(results: Sequence[EvaluatedBatch]) -> EvaluationResult:
    """The means over all microbatches of all workers and batches, weighted. Microbatches of weight 0 are left out, also
    where they are not finite."""
    counted = [result for result in results if result.losses]
    weights = [weight for result in counted for weight in result.weights]
    total = sum(weights)

    def mean(values: Iterable[float]) -> float:
        weighted = (w * value for w, value in zip(weights, values, strict=True) if w > 0)
        return sum(weighted) / total if total else math.nan

    names = metric_names([result.metrics for result in counted])
    return EvaluationResult(
        loss=mean(value for result in counted for value in result.losses),
        metrics={name: mean(value for result in counted for value in result.metrics[name]) for name in names},
    )


@dataclass(frozen=True)
class BestCheckpoint:
    """The step whose checkpoint is kept for being the best by `metric`."""

    step: int
    metric: str
    value: float


@dataclass(frozen=True)
class EarlyStopping:
    """The best value so far and the step after which it was found (None: none yet), and how many evaluations since
    were no better."""

    best_value: float | None = None
    best_step: int | None = None
    worse: int = 0

    def after(self, step: int, value: float | None, policy: Evaluation) -> EarlyStopping:
        """The state after the evaluation of `step`; a value that is not finite is no better."""
        if value is not None and math.isfinite(value) and self._is_better(value, policy):
            return EarlyStopping(value, step, 0)
        return EarlyStopping(self.best_value, self.best_step, self.worse + 1)

    def stop_reason(self, policy: Evaluation) -> str | None:
        """Why training ends here; None while it goes on."""
        if policy.patience is None or self.worse < policy.patience:
            return None
        best = (
            "there was none that is a number"
            if self.best_step is None
            else f"the best was {self.best_value:.6g} after step {self.best_step}"
        )
        return f"evaluation.patience: {policy.metric} was no better in {self.worse} evaluations; {best}"

    def _is_better(self, value: float, policy: Evaluation) -> bool:
        if self.best_value is None:
            return True
        return value > self.best_value if policy.mode == "max" else value < self.best_value

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EarlyStopping:
        """Inverse of `to_json`."""
        return cls(data["best_value"], data["best_step"], data["worse"])


@dataclass(frozen=True)
class MeshParallelism:
    """The data-parallel (`data`) and tensor-parallel (`tensor`) sizes of a mesh, and the node of each of its workers."""

    name: str
    data: int
    tensor: int
    nodes: tuple[str, ...]


def mesh_parallelisms(job: Job, nodes: Iterable[tuple[str, str]]) -> tuple[MeshParallelism, ...]:
    """The parallelism of each mesh where meshes are heterogeneous or tensor parallel; else none. `nodes` has mesh and node
    of each worker."""
    if not job.heterogeneous and job.resources.tensor == 1:
        return ()
    nodes_of: dict[str, list[str]] = {}
    for mesh, node in nodes:
        nodes_of.setdefault(mesh, []).append(node)
    return tuple(
        MeshParallelism(mesh, len(own) // (tensor := job.tp_size(mesh)), tensor, tuple(own))
        for mesh, own in nodes_of.items()
    )


def evaluation_spec(
    planned: PlannedJob, edges: Sequence[EvaluationEdge], parallelisms: Sequence[MeshParallelism] = ()
) -> dict[str, Any]:
    """JSON of the PipelineSpec of an evaluation by the stages and meshes of `planned`; `parallelisms` is part of it, as
    transfers between heterogeneous meshes may have to be resharded."""
    spec, names = planned.spec, planned.stage_names
    dp_sizes = {mesh.name: mesh.data for mesh in parallelisms}
    dp_size_of_stage = [dp_sizes.get(mesh, 1) for mesh in planned.mesh_of_stage]
    peaks = {mesh["name"]: mesh for mesh in planned.plan["meshes"]}
    mesh_of = planned.mesh_of_stage
    # tensors of one microbatch wait on a mesh for several of its stages, in another order than while it trains
    arriving = Counter(mesh_of[edge.target] for edge in edges if mesh_of[edge.source] != mesh_of[edge.target])
    return {
        "microbatches": planned.microbatches,
        "meshes": [
            {
                "name": mesh["name"],
                "memory_bytes": mesh.get("memory_bytes"),
                "receive_buffer_limit": max(
                    1, arriving[mesh["name"]], peaks[mesh["name"]]["peak_receive_buffers"]
                ),
            }
            for mesh in spec["meshes"]
        ],
        "stages": [
            {key: stage[key] for key in ("name", "mesh", "forward_s", "activation_bytes", "static_bytes")}
            for stage in spec["stages"]
        ],
        "edges": [
            {
                "source": names[edge.source],
                "target": names[edge.target],
                "tensor": edge.tensor,
                **_transfer_cost(
                    spec["network"],
                    max(edge.bytes_of(dp_size_of_stage[stage]) for stage in (edge.source, edge.target)),
                ),
            }
            for edge in edges
        ],
        "network": spec["network"],
        "overlap": spec.get("overlap", True),
        "schedule": "inference",
        **_heterogeneous(edges, parallelisms),
    }


def _transfer_cost(network: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The cost fields of an edge of `size` bytes, forwards only; as in training's plan, links whose bandwidth nobody
    measured take their latency."""
    if network.get("bandwidth_bytes_per_s") is not None:
        return {"forward_bytes": size, "backward_bytes": 0}
    return {"forward_s": network.get("latency_s", 0.0), "backward_s": 0.0, "held_bytes": size}


def _heterogeneous(
    edges: Sequence[EvaluationEdge], parallelisms: Sequence[MeshParallelism]
) -> dict[str, Any]:
    if not parallelisms:
        return {}
    tensors = [
        {
            "shapes": [{"data": data, "shape": list(shape)} for data, shape in edge.shapes.items()],
            "element_bytes": edge.element_bytes,
        }
        for edge in edges
    ]
    return {"unlike": {"meshes": [asdict(mesh) for mesh in parallelisms], "tensors": tensors}}


def evaluation_programs(planned: PlannedJob, plan: dict[str, Any]) -> dict[str, MeshProgram]:
    """The programs of an evaluation's plan, by mesh."""
    return mesh_programs(plan, planned.stage_names, planned.microbatches, reshardings=parse_reshardings(plan))


def plan_evaluation(
    policy: Evaluation | None,
    planned: PlannedJob,
    *,
    parallelisms: Sequence[MeshParallelism] = (),
    gang: Gang,
    control: ControlPlaneClient,
    reporter: Reporter,
) -> Mapping[str, MeshProgram]:
    """The programs of an evaluation by mesh; none without `policy`. An event says what is unusual about their plan. Raises
    AttemptFailure PLAN_INFEASIBLE or PLANNING_TIMEOUT."""
    if policy is None:
        return {}
    (edges,) = gang.call(
        "evaluation_edges",
        planned.stage_starts,
        workers=gang.workers[:1],
        phase=Phase.PREPARE,
        what="cutting the evaluated model",
    )
    try:
        plan = control.plan_forwards(evaluation_spec(planned, edges, parallelisms))
    except Refused as refused:
        if refused.final:
            raise
        raise planning_failure(refused, "evaluation: ") from None
    for note in plan.get("planning_notes", ()):
        reporter.event("evaluation_planned", f"the evaluation's plan was {note}")
    return evaluation_programs(planned, plan)


class Evaluations:
    """The evaluations of one attempt. `policy` is the job's, None for none; checkpoints store `early_stopping`;
    `first_step` is the job's first."""

    def __init__(
        self,
        policy: Evaluation | None,
        *,
        gang: Gang,
        reporter: Reporter,
        metrics: DriverMetrics,
        early_stopping: EarlyStopping | None = None,
        tracking: RunTracking | None = None,
        first_step: int = 1,
    ):
        self._first_step = first_step
        self._policy = policy
        self._tracking = tracking or RunTracking()
        self._gang, self._reporter, self._metrics = gang, reporter, metrics
        self._size: EvaluationSize | None = None
        self.early_stopping = early_stopping or EarlyStopping()

    def before(self, first: int) -> None:
        """Evaluate before the job's first step where it wants that; a later attempt already did."""
        if self._policy is not None and self._policy.at_start and first == self._first_step:
            self._evaluate(self._policy, first - 1)

    def due(self, step: int, *, last: bool) -> bool:
        """True where `after` of this step evaluates."""
        return self._policy is not None and (step % self._policy.every_steps == 0 or last)

    def after(self, step: int, *, last: bool) -> None:
        """Evaluate when it is due."""
        if self.due(step, last=last):
            self._evaluate(self._policy, step)

    @property
    def best(self) -> BestCheckpoint | None:
        """The best checkpoint so far, where the job keeps it."""
        policy, stopping = self._policy, self.early_stopping
        if policy is None or not policy.keep_best or stopping.best_step is None:
            return None
        return BestCheckpoint(stopping.best_step, policy.metric, stopping.best_value)

    @property
    def stop_reason(self) -> str | None:
        """Why training ends here, before its last step; None while it goes on."""
        return None if self._policy is None else self.early_stopping.stop_reason(self._policy)

    def _evaluate(self, policy: Evaluation, step: int) -> None:
        began_at, began = time.time(), time.monotonic()
        size = self._first_size(policy)
        result = self._run(size, step)
        value = result.value(policy.metric)
        if value is None:
            raise AttemptFailure(
                Reason.USER_CODE_RAISED,
                f"evaluation.metric is {policy.metric!r}, and the loss returned "
                f"{', '.join(sorted(result.metrics)) or 'no metrics'}: return it, or name another",
            )
        self.early_stopping = self.early_stopping.after(step, value, policy)
        report = {
            "step": step,
            "loss": result.loss,
            "metrics": result.metrics,
            "samples": size.samples,
            "evaluation_s": time.monotonic() - began,
            "started_at": began_at,
        }
        self._reporter.evaluation(report)
        self._metrics.observe_evaluation(report)
        self._tracking.evaluation(report)

    def _run(self, size: EvaluationSize, step: int) -> EvaluationResult:
        """One batch is asked for while the one before it runs, as with steps."""
        results: list[Any] = []
        pending = self._gang.ask("evaluate", 0)
        for batch in range(size.batches):
            following = self._gang.ask("evaluate", batch + 1) if batch + 1 < size.batches else []
            what = f"evaluation after step {step}, batch {batch + 1} of {size.batches}"
            results += self._gang.wait(pending, phase=Phase.STEP, what=what)
            pending = following
        return combine_batches(results)

    def _first_size(self, policy: Evaluation) -> EvaluationSize:
        if self._size is None:
            (self._size,) = self._gang.call(
                "evaluation_size",
                workers=self._gang.workers[:1],
                phase=Phase.STEP,
                what="evaluation: its size",
            )
            if self._size.left_out:
                self._reporter.event(
                    "evaluation",
                    f"{self._size.samples} samples of {policy.data.factory} are evaluated; {self._size.left_out} behind "
                    "the last whole microbatch are left out",
                )
        return self._size
