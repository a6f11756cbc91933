"""Trainer: places a gang, plans the job, loads and restores its stages, checks that replicas agree, and trains.

Each phase takes what the ones before left, and its duration is recorded without a gap from the driver's first line to
the first step. Before the first step all workers must hold equal values of what they share and read the same data, or
the attempt ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from worker.actor.actor import Worker
from worker.actor.device import own_node_address
from worker.actor.evaluation import EvaluationProgram
from worker.checks.replicas import replicated_names, sample_mismatch, shard_mismatch, tensor_mismatch
from worker.contract.failures import AttemptFailure, OutOfMemoryFailure
from worker.contract.job import Job
from worker.contract.logs import set_environment
from worker.contract.planned import PlannedJob, planned_peak_bytes, planned_seconds, planned_starts
from worker.contract.reasons import Reason
from worker.contract.versions import installed_versions
from worker.driver.checkpoints import Checkpoints, snapshot_shortfall
from worker.driver.control_plane_client import ControlPlane
from worker.driver.evaluation import Evaluations, mesh_parallelisms, plan_evaluation
from worker.driver.gang import Gang
from worker.driver.limits import Limits
from worker.driver.metrics import JobMetrics, ModelFlops, step_flops, total_peak_flops
from worker.driver.planning import Planner
from worker.driver.reporter import Reporter, Spans
from worker.driver.step_loop import DataEnd, run_steps
from worker.driver.stopping import Cancelled, raise_if_stopping
from worker.engine.results import SlotLimits
from worker.parallel.shard_spec import common_cuts
from worker.transport.base import topology_of
from worker.transport.rendezvous import serve_rendezvous


def check_replicas(
    gang: Gang, *, limit_s: float, interrupted: Callable[[], None], unlike: bool = False
) -> None:
    """Raise AttemptFailure MODEL_BUILD_FAILED, DATA_FAILED or PLAN_INFEASIBLE with the names of what differs, and on whom.

    `interrupted` is that of `Gang.call`. Only what several workers hold is looked at. Between `unlike` meshes a tied
    parameter, whose gradients are summed whole there, may be shared otherwise: it is compared in pieces.
    """
    what = "comparing what the workers start from"
    held = gang.call(
        [worker.shard_specs.remote() for worker in gang.workers],
        what=what,
        limit_s=limit_s,
        interrupted=interrupted,
    )
    workers = [f"{address.mesh}/{address.worker}" for address in gang.addresses]
    if not unlike and (told := shard_mismatch(workers, held)):
        raise AttemptFailure(Reason.PLAN_INFEASIBLE, told)
    several, cuts = replicated_names(held), common_cuts(held)
    found = gang.call(
        [worker.fingerprint.remote(several, cuts) for worker in gang.workers],
        what=what,
        limit_s=limit_s,
        interrupted=interrupted,
    )
    if told := sample_mismatch(workers, found):
        raise AttemptFailure(Reason.DATA_FAILED, told)
    if told := tensor_mismatch(workers, found):
        raise AttemptFailure(Reason.MODEL_BUILD_FAILED, told)


class LaunchPhases:
    """Phases follow each other without a gap; the first one begins now. `ended` is told each with its seconds."""

    def __init__(
        self, ended: Callable[[str, float], None], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._ended, self._now = ended, now
        self._since = now()

    def ended(self, phase: str) -> None:
        """The phase that this one names is over, and the next one begins."""
        since, self._since = self._since, self._now()
        self._ended(phase, self._since - since)


UNTESTED_ON_GPUS = (
    "shared matrices and meshes of unlike sizes on CUDA have been tested without GPUs only: every NCCL connection carries "
    "known values first, and stages that share matrices are compared with whole ones (training.check_trace); compare the "
    "first losses with those of resources.device: cpu"
)


@dataclass(frozen=True)
class Attempt:
    """What the control plane says of the attempt (`spec`: JSON of the job), and how long it may wait for what."""

    job_id: str
    number: int
    spec: Mapping[str, Any]
    device: str
    limits: Limits
    resume_uri: str | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the workers' environment that nothing but their processes and this one may hold."""


class Trainer:
    """One attempt's training, from its placement group to its last step; every station takes what those before left."""

    def __init__(
        self,
        attempt: Attempt,
        job: Job,
        *,
        control: ControlPlane,
        reporter: Reporter,
        metrics: JobMetrics,
        launch: LaunchPhases,
        spans: Spans,
    ):
        self._attempt, self._job, self._limits = attempt, job, attempt.limits
        self._control, self._reporter, self._metrics, self._launch = control, reporter, metrics, launch
        self._spans = spans
        self._gang = Gang(
            sizes=job.mesh_sizes,
            device=attempt.device,
            start_timeout_s=self._limits.start_s,
            workers_per_gpu=int(os.environ.get("SLOTLINE_WORKERS_PER_GPU", "1")),
        )
        self._planner = Planner(
            control=control,
            reporter=reporter,
            gang=self._gang,
            device=attempt.device,
            limits=self._limits,
            job=job,
            interrupted=self._raise_if_stopping,
        )

    def train(self) -> str | None:
        """Train; why it ended before its last step, if it did. Raises AttemptFailure, Cancelled and AskedToStop."""
        try:
            with self._gang:
                self._place()
                checkpoints = self._checkpoints()
                checkpoints.check_writable()
                planned = self._plan()
                self._load(planned)
                self._enable_asynchronous_writes(checkpoints, planned)
                done = checkpoints.restore(self._attempt.resume_uri)
                self._launch.ended("restore")
                self._check()
                self._warm_up(done + 1)
                return self._run(done + 1, planned, checkpoints)
        except OutOfMemoryFailure as failure:
            self._planner.correct(failure)
            raise

    def _raise_if_cancelled(self) -> None:
        if self._reporter.cancelled.is_set() or self._reporter.fenced.is_set():
            raise Cancelled

    def _raise_if_stopping(self) -> None:
        self._raise_if_cancelled()
        raise_if_stopping(self._reporter.stop_requested.is_set)

    def _place(self) -> None:
        """Start the gang, and give its processes what only they may hold."""
        gang, job, device = self._gang, self._job, self._attempt.device
        gang.start(
            ray.remote(Worker),
            lambda mesh, worker: {"job": job, "mesh": mesh, "worker": worker, "device": device},
            self._raise_if_stopping,
        )
        if self._attempt.secrets:
            gang.call(
                [
                    worker.__ray_call__.remote(set_environment, self._attempt.secrets)
                    for worker in gang.workers
                ],
                what="taking its environment",
                limit_s=self._limits.start_s,
                interrupted=self._raise_if_cancelled,
            )
        self._launch.ended("place")
        for mesh in gang.meshes:
            self._metrics.set_nodes(mesh.name, [a.node for a in gang.addresses if a.mesh == mesh.name])
        nodes = len({a.node for a in gang.addresses})
        self._reporter.event("placed", f"{len(gang.workers)} workers on {nodes} node(s)")
        self._reporter.event("versions", installed_versions())
        if device == "cuda" and (job.resources.tensor > 1 or job.heterogeneous):
            self._reporter.event("not_yet_run_on_gpus", UNTESTED_ON_GPUS)

    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(
            self._job.checkpoint,
            self._attempt.job_id,
            gang=self._gang,
            reporter=self._reporter,
            limit_s=self._limits.checkpoint_s,
            interrupted=self._raise_if_cancelled,
            timed=self._checkpointed,
            keeps_best=self._job.evaluation is not None and self._job.evaluation.keep_best,
        )

    def _checkpointed(self, operation: str, seconds: float) -> None:
        self._metrics.set_checkpoint(operation, seconds)
        self._spans.ended(f"checkpoint: {operation}", seconds)

    def _plan(self) -> PlannedJob:
        planned = self._planner.plan()
        self._launch.ended("plan")
        self._metrics.set_plan(planned.plan, step_s=planned.step_s)
        self._metrics.set_planned_memory(planned_peak_bytes(planned.spec, planned.plan))
        return planned

    def _load(self, planned: PlannedJob) -> None:
        """Give every worker its stages and program, and connect them."""
        evaluation = plan_evaluation(
            self._job.evaluation,
            planned,
            shares=mesh_parallelisms(self._job, ((a.mesh, a.node) for a in self._gang.addresses)),
            gang=self._gang,
            control=self._control,
            limits=self._limits,
            interrupted=self._raise_if_cancelled,
        )
        # held as long as this trainer: the store ends with its last reference, and the workers' connections with it
        self._store, place = serve_rendezvous(own_node_address(), [a.node for a in self._gang.addresses])
        own_weights = self._job.model.weights is not None
        notes = self._gang.call(
            _load_calls(self._gang, planned, place, self._limits, own_weights, evaluation, self._job.tensors),
            what="loading the stages",
            limit_s=self._limits.prepare_s + self._job.training.compiling_s,
            timeout_reason=Reason.START_TIMEOUT,
            interrupted=self._raise_if_stopping,
        )
        for address, of_worker in zip(self._gang.addresses, notes, strict=True):
            for note in of_worker or ():
                self._reporter.event("compiled", f"mesh {address.mesh}, worker {address.worker}: {note}")
        self._launch.ended("load")

    def _enable_asynchronous_writes(self, checkpoints: Checkpoints, planned: PlannedJob) -> None:
        """Have checkpoints written while training goes on, where the job wants that and there is room for it."""
        if self._job.checkpoint is None or not self._job.checkpoint.asynchronous:
            return
        lack = snapshot_shortfall(
            planned,
            gang=self._gang,
            limits=self._limits,
            interrupted=self._raise_if_stopping,
            device=self._attempt.device,
        )
        if lack is None:
            checkpoints.write_asynchronously()
        else:
            self._reporter.event("checkpoint", f"training waits while checkpoints are written: {lack}")

    def _check(self) -> None:
        check_replicas(
            self._gang,
            limit_s=self._limits.prepare_s,
            interrupted=self._raise_if_stopping,
            unlike=self._job.heterogeneous,
        )
        self._launch.ended("check")

    def _warm_up(self, step: int) -> None:
        self._gang.call(
            [worker.warm_up.remote(step) for worker in self._gang.workers],
            what="the first run, without transfers",
            limit_s=self._limits.prepare_s + self._job.data.skip_limit_s + self._job.data.loader.timeout_s,
            interrupted=self._raise_if_stopping,
        )
        self._launch.ended("warm up")

    def _run(self, first: int, planned: PlannedJob, checkpoints: Checkpoints) -> str | None:
        flops = self._model_flops(planned)
        self._metrics.set_model_flops(flops)
        self._reporter.model_flops(flops and flops.step, flops and flops.peak_per_s)
        self._reporter.state("RUNNING")
        evaluations = Evaluations(
            self._job.evaluation,
            gang=self._gang,
            reporter=self._reporter,
            metrics=self._metrics,
            limits=self._limits,
            step_s=planned.step_s,
            interrupted=self._raise_if_cancelled,
            course=checkpoints.course,
        )
        ended_early = run_steps(
            first,
            self._job.training.steps,
            samples=self._job.training.global_batch,
            planned=planned,
            gang=self._gang,
            reporter=self._reporter,
            metrics=self._metrics,
            checkpoints=checkpoints,
            limits=self._limits,
            interrupted=self._raise_if_cancelled,
            stopping=self._reporter.stop_requested.is_set,
            spans=self._spans,
            evaluations=evaluations,
            data_end=DataEnd(
                self._job,
                gang=self._gang,
                limit_s=self._limits.step_s(planned.step_s) + self._job.data.skip_limit_s,
                interrupted=self._raise_if_cancelled,
            ),
        )
        if ended_early is not None:
            self._reporter.event("stopped_early", ended_early)
        return ended_early

    def _model_flops(self, planned: PlannedJob) -> ModelFlops | None:
        """What a step computes and its accelerators could, as far as either is known."""
        gang, profiles = self._gang, self._planner.profiles
        step = step_flops(
            [(address.mesh, own) for address, own in zip(gang.addresses, profiles, strict=True)],
            begins=planned.stage_starts,
            mesh_of_stage=planned.mesh_of_stage,
            microbatches=planned.microbatches,
        )
        if step is None or self._attempt.device != "cuda":
            return None if step is None else ModelFlops(step)
        peaks = gang.call(
            [worker.gpu_peak_flops.remote() for worker in gang.workers],
            what="looking up what its GPU could do",
            limit_s=self._limits.start_s,
            interrupted=self._raise_if_cancelled,
        )
        return ModelFlops(step, total_peak_flops(peaks, int(os.environ.get("SLOTLINE_WORKERS_PER_GPU", "1"))))


def _load_calls(
    gang: Gang,
    planned: PlannedJob,
    store: tuple[str, int],
    limits: Limits,
    own_weights: bool,
    evaluation: Mapping[str, EvaluationProgram],
    tensors: tuple[int, ...],
) -> list[ray.ObjectRef]:
    """Give every worker its stages and program."""
    planned_s = planned_seconds(planned.plan, planned.stage_names, planned.update)
    starts_s = planned_starts(planned.plan, planned.stage_names)
    peaks = planned_peak_bytes(planned.spec, planned.plan)
    first = gang.workers[0]  # has all parameters; the others wait for theirs, so it gives before it loads
    # those of model.weights every worker reads for itself
    weights = {
        mesh.name: first.weights.remote(planned.stage_starts, planned.stages_of(mesh.name))
        for mesh in gang.meshes
        if any(worker is not first for worker in mesh.workers) and not own_weights
    }
    topology = topology_of({mesh.name: len(mesh.workers) for mesh in gang.meshes}, tensors)
    return [
        worker.load.remote(
            begins=planned.stage_starts,
            mesh_of_stage=planned.mesh_of_stage,
            program=planned.plan["programs"][address.mesh],
            recomputed=planned.recomputed,
            weights=None if worker is first else weights.get(address.mesh),
            planned_s=planned_s[address.mesh],
            planned_starts_s=starts_s[address.mesh],
            topology=topology,
            store=store,
            host=address.node,
            connect_s=limits.connect_s,
            slot_limits=SlotLimits(factor=limits.slot_factor, floor_s=limits.slot_floor_s),
            planned_bytes=peaks[address.mesh],
            microbatches=planned.microbatches,
            reshardings=planned.reshardings,
            evaluation=evaluation.get(address.mesh),
        )
        for worker, address in zip(gang.workers, gang.addresses, strict=True)
    ]
