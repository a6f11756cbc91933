"""Trainer: checks and plans a job, places its gang, loads and restores stages, checks that replicas agree, and trains.

The phases of a launch are recorded without a gap from the driver's first line to the end of the first step. Before it
all workers must hold equal values of replicated tensors and read the same data, or the attempt ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from worker.actor.actor import Worker
from worker.actor.assignment import Assignment, LoadLimits, make_assignments
from worker.actor.saver import SnapshotMemory
from worker.checkpoint.resumption import ResumeSource
from worker.checks.replicas import replicated_names, sample_mismatch, shard_mismatch, tensor_mismatch
from worker.contract.failures import AttemptFailure, OutOfMemoryFailure
from worker.contract.forkserver.spawn import forking_interpreter
from worker.contract.job import AUTO, SKIP_LIMIT_S, Job
from worker.contract.planned import MeshProgram, PlannedJob, planned_peak_bytes
from worker.contract.reasons import Reason
from worker.contract.tasks import CHECK_LIMIT_S, JobCheck, check_job_process
from worker.contract.versions import installed_versions
from worker.driver.benchmarks import GangMeasurements
from worker.driver.checkpoints import Checkpoints, snapshot_rooms, snapshot_shortfall
from worker.driver.control_plane_client import ControlPlaneClient
from worker.driver.evaluation import Evaluations, mesh_parallelisms, plan_evaluation
from worker.driver.gang.gang import Gang, PerWorker
from worker.driver.gang.phases import Phase
from worker.driver.gang.reservation import CPU_RESOURCE, placement_text
from worker.driver.limits import Limits
from worker.driver.metrics import DriverMetrics, ModelFlops, step_flops, total_peak_flops
from worker.driver.planning import Planner, Replanner, StepPlans
from worker.driver.reporter import LaunchPhases, Reporter, Spans
from worker.driver.saving.state_copies import StateCopies
from worker.driver.step_loop import DataEnd, StepLog, StepLoop, StepPublisher
from worker.driver.stopping import (
    CAUSE_LIMIT_S,
    Cancelled,
    Interruption,
    LaunchCheck,
    RunningCheck,
)
from worker.driver.tracking.run_tracking import RunTracking, run_config
from worker.engine.results import SlotLimits
from worker.machine.node import cluster_nodes, own_node_address
from worker.model.serialization import ParameterValues
from worker.parallel.shard_spec import common_cuts
from worker.transport.rendezvous import announce_loss, serve_rendezvous

log = logging.getLogger(__name__)
_CHECK_START_S = 60.0
"""For Ray to start the process of a task."""
_CANCEL_S = 5.0
_NOT_CHECKED = "the job was not checked beside its launch"
UNTESTED_ON_GPUS = (
    "shared matrices and heterogeneous meshes on CUDA have been tested without GPUs only: every NCCL connection carries "
    "known values first, and stages that share matrices are compared with whole ones (training.check_trace); compare the "
    "first losses with those of resources.device: cpu"
)


@dataclass(frozen=True)
class Attempt:
    """The attempt as the control plane describes it (`spec`: JSON of the job), and the limits of its waits."""

    job_id: str
    number: int
    spec: Mapping[str, Any]
    device: str
    limits: Limits
    resume_uri: str | None = None
    resume_from: ResumeSource | None = None
    recorded: Mapping[str, int] = field(default_factory=dict)
    """The last step that the control plane has of `steps` and of `evaluations`."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the workers' environment, held by their processes and this one only."""
    checked: bool = False
    """The control plane had the job checked before this attempt."""
    left_out_nodes: Collection[str] = frozenset()
    """Ray's ids of the nodes on which nothing is to start."""

    @property
    def was_checked(self) -> bool:
        """True where the control plane had the job checked, or an attempt before it, whose checkpoint it goes on from."""
        return self.checked or (self.number > 1 and self.resume_uri is not None)


class Trainer:
    """One attempt's training, from its placement group to its last step."""

    def __init__(
        self,
        attempt: Attempt,
        job: Job,
        *,
        control: ControlPlaneClient,
        reporter: Reporter,
        metrics: DriverMetrics,
        launch: LaunchPhases,
        spans: Spans,
        tracking: RunTracking,
    ):
        self._attempt, self._job, self._limits = attempt, job, attempt.limits
        self._control, self._reporter, self._metrics, self._launch = control, reporter, metrics, launch
        self._spans, self._tracking = spans, tracking
        self._job_check = LaunchCheck(
            lambda: start_check(
                attempt.spec, device=attempt.device, secrets=attempt.secrets, left_out=attempt.left_out_nodes
            ),
            reporter.event,
        )
        self._interruption = Interruption(
            cancelled=lambda: reporter.cancelled.is_set() or reporter.fenced.is_set(),
            stop_requested=reporter.stop_requested.is_set,
            raise_if_wrong=self._job_check.raise_if_wrong,
        )
        self._gang = Gang(
            sizes=job.mesh_sizes,
            device=attempt.device,
            limits=self._limits,
            interruption=self._interruption,
            workers_per_gpu=int(os.environ.get("SLOTLINE_WORKERS_PER_GPU", "1")),
            place=self._placement,
            report_draining=reporter.draining,
            # packages of the job's own have an interpreter of their own, with which Ray starts
            interpreter=None if job.code.pip else forking_interpreter(),
        )
        measurements = GangMeasurements(
            job,
            self._gang,
            control=control,
            reporter=reporter,
            device=attempt.device,
            limits=self._limits,
            launch=launch,
        )
        self._planner = Planner(job, measurements, control=control, reporter=reporter, launch=launch)
        self._snapshot_rooms: Sequence[SnapshotMemory] = ()  # none where checkpoints are not made of copies
        self.has_begun = False
        """True once everything is ready for the first step."""

    @property
    def kept_gang(self) -> Gang | None:
        """The gang whose workers are left behind a lost one, for the next attempt of this driver; else it is ended."""
        return self._gang if self._gang.kept else None

    def train(self, earlier: Gang | None = None) -> str | None:
        """Train, with the workers of an `earlier` gang that was kept; why training ended before its last step, None where it
        did not. Raises AttemptFailure, Cancelled and GracefulStop."""
        self._reporter.event("versions", installed_versions())
        if not self._attempt.was_checked:
            self._job_check.begin()
        try:
            with self._gang, self._keeping_workers(), self._keeping_copies() as copies:
                self._place(earlier)
                if copies is not None:
                    copies.open()
                checkpoints = self._checkpoints(copies)
                checkpoints.check_writable()
                planned = self._plan()
                self._load(planned)
                self._enable_asynchronous_writes(checkpoints, planned)
                done = checkpoints.restore(
                    self._attempt.resume_uri, self._attempt.resume_from, recorded=self._attempt.recorded
                )
                if copies is not None:
                    peaks = planned_peak_bytes(planned.spec, planned.plan)
                    copies.enable(snapshot_rooms(self._gang), peaks, device=self._attempt.device)
                self._launch.end_phase("restore")
                self._check()
                self._warm_up(done + 1)
                return self._run(done + 1, planned, checkpoints)
        except OutOfMemoryFailure as failure:
            self._planner.correct(failure)
            raise
        except AttemptFailure:
            self._job_check.raise_if_wrong(CAUSE_LIMIT_S)
            raise
        finally:
            self._job_check.end()

    @contextlib.contextmanager
    def _keeping_workers(self) -> Iterator[None]:
        """Have the workers that are left behind a lost one wait for the next attempt."""
        try:
            yield
        except AttemptFailure as failure:
            if failure.reason is Reason.WORKER_LOST:
                self._gang.keep_workers()
            raise

    def _place(self, earlier: Gang | None) -> None:
        """Start the gang, and give its processes the secrets."""
        gang, job, device = self._gang, self._job, self._attempt.device
        gang.start(ray.remote(Worker), self._arguments_of, earlier, spares=job.resources.spares)
        for name in () if earlier is None else earlier.replaced:
            self._reporter.event("spare", f"a spare has the place of {name}")
        if self._attempt.secrets:
            gang.call(
                "set_environment",
                self._attempt.secrets,
                phase=Phase.SETUP,
                what="taking its environment",
            )
        self._launch.end_phase("place")
        for mesh in gang.meshes:
            self._metrics.set_nodes(mesh.name, [a.node for a in gang.addresses if a.mesh == mesh.name])
        self._reporter.event("placed", placement_text(gang.addresses, cluster_nodes()))
        if device == "cuda" and (job.resources.tensor > 1 or job.heterogeneous):
            self._reporter.event("not_yet_run_on_gpus", UNTESTED_ON_GPUS)

    def _arguments_of(self, mesh: str, worker: int) -> dict[str, Any]:
        return {"job": self._job, "mesh": mesh, "worker": worker, "device": self._attempt.device}

    def _placement(self, nodes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The control plane's placement of the job's meshes on these nodes."""
        shapes = zip(self._job.mesh_sizes, self._job.tensors, strict=True)
        meshes = [{"workers": workers, "tensor": tensor} for workers, tensor in shapes]
        return self._control.place({"nodes": list(nodes), "meshes": meshes})

    @contextlib.contextmanager
    def _keeping_copies(self) -> Iterator[StateCopies | None]:
        """The copies of the state in host memory, where the job wants such; their keepers end with the job."""
        policy, attempt = self._job.checkpoint, self._attempt
        if policy is None or policy.copy_every_steps is None:
            yield None
            return
        copies = StateCopies(
            attempt.job_id,
            attempt.number,
            policy.copy_every_steps,
            gang=self._gang,
            reporter=self._reporter,
            interpreter=None if self._job.code.pip else forking_interpreter(),
            timed=self._checkpointed,
        )
        job_goes_on = True  # where that is not known, the control plane ends them when it does not
        try:
            yield copies
            job_goes_on = False
        except Cancelled:
            job_goes_on = self._reporter.fenced.is_set()
            raise
        finally:
            copies.close(job_goes_on=job_goes_on)

    def _checkpoints(self, copies: StateCopies | None) -> Checkpoints:
        return Checkpoints(
            self._job.checkpoint,
            self._attempt.job_id,
            gang=self._gang,
            reporter=self._reporter,
            limit_s=self._limits.checkpoint_s,
            timed=self._checkpointed,
            keeps_best=self._job.evaluation is not None and self._job.evaluation.keep_best,
            spec=self._attempt.spec,
            wanted_steps=lambda: self._reporter.wanted_checkpoints,
            copies=copies,
        )

    def _checkpointed(self, operation: str, seconds: float) -> None:
        self._metrics.set_checkpoint(operation, seconds)
        self._spans.add_ended(f"checkpoint: {operation}", seconds)

    def _plan(self) -> PlannedJob:
        planned = self._planner.plan()
        self._gang.expect_steps(planned.step_s)
        self._launch.end_phase("plan")
        self._metrics.set_plan(planned.plan, step_s=planned.step_s)
        self._metrics.set_planned_memory(planned_peak_bytes(planned.spec, planned.plan))
        return planned

    def _load(self, planned: PlannedJob) -> None:
        """Give every worker its stages and program, and connect them."""
        evaluation = plan_evaluation(
            self._job.evaluation,
            planned,
            parallelisms=mesh_parallelisms(self._job, ((a.mesh, a.node) for a in self._gang.addresses)),
            gang=self._gang,
            control=self._control,
            reporter=self._reporter,
        )
        store, place = serve_rendezvous(own_node_address(), [a.node for a in self._gang.addresses])
        # so the gang holds it: the store ends with its last reference, and the workers' connections with it
        self._gang.announce_loss = partial(announce_loss, store)
        if self._job.model.weights is None:  # else every worker reads those of its own stages
            _hand_out_weights(self._gang, planned)
        self._gang.call(
            "load",
            PerWorker(self._assignments(planned, place, evaluation)),
            phase=Phase.PREPARE,
            what="loading the stages",
            extra_s=self._job.training.compiling_s,
        )
        notes = self._gang.call("loading_notes", phase=Phase.PREPARE, what="reading the compiler's notes")
        for address, of_worker in zip(self._gang.addresses, notes, strict=True):
            for note in of_worker or ():
                self._reporter.event("compiled", f"mesh {address.mesh}, worker {address.worker}: {note}")
        self._reporter.event(
            "connected", f"{len(self._gang.addresses)} workers, with {len(planned.stage_starts)} stages"
        )
        self._launch.end_phase("load")

    def _enable_asynchronous_writes(self, checkpoints: Checkpoints, planned: PlannedJob) -> None:
        """Have checkpoints written while training goes on, where the job wants that and there is room for it."""
        if self._job.checkpoint is None or not self._job.checkpoint.asynchronous:
            return
        rooms = snapshot_rooms(self._gang)
        shortfall = snapshot_shortfall(planned, rooms, gang=self._gang, device=self._attempt.device)
        if shortfall is None:
            checkpoints.write_asynchronously()
            self._snapshot_rooms = rooms
        else:
            self._reporter.event("checkpoint", f"training waits while checkpoints are written: {shortfall}")

    def _check(self) -> None:
        check_replicas(self._gang, heterogeneous=self._job.heterogeneous)
        self._launch.end_phase("check")

    def _warm_up(self, step: int) -> None:
        notes = self._gang.call(
            "warm_up",
            step,
            phase=Phase.CHECK,
            what="the first run, without transfers",
            extra_s=SKIP_LIMIT_S + self._job.data.loader.timeout_s,
        )
        for address, note in zip(self._gang.addresses, notes, strict=True):
            if note is not None:
                self._reporter.event("memory_short", f"mesh {address.mesh}, worker {address.worker}: {note}")
        self._gang.call(
            "collect_between_steps", phase=Phase.CHECK, what="collecting the garbage of the start"
        )
        self._launch.end_phase("warm up")

    def _run(self, first: int, planned: PlannedJob, checkpoints: Checkpoints) -> str | None:
        self.has_begun = True
        self._gang.start_spares(ray.remote(Worker), self._arguments_of, self._attempt.secrets)
        flops = self._model_flops(planned)
        self._metrics.set_model_flops(flops)
        self._reporter.model_flops(flops and flops.step, flops and flops.peak_per_s)
        self._reporter.state("RUNNING")
        spec = self._attempt.spec
        name = spec.get("name", "job")
        self._tracking.start(self._attempt.job_id, name, run_config(spec, planned), flops)
        evaluations = Evaluations(
            self._job.evaluation,
            gang=self._gang,
            reporter=self._reporter,
            metrics=self._metrics,
            early_stopping=checkpoints.early_stopping,
            tracking=self._tracking,
            first_step=checkpoints.first_step,
        )
        publisher = StepPublisher(
            self._reporter,
            self._metrics,
            profile_every_s=self._limits.profile_every_s,
            spans=self._spans,
            step_log=StepLog(self._job.training.steps, flops),
            tracking=self._tracking,
            watches=self._planner.watches(planned),
            launch=self._launch,
        )
        loop = StepLoop(
            planned,
            samples=self._job.training.global_batch,
            gang=self._gang,
            checkpoints=checkpoints,
            evaluations=evaluations,
            data_end=DataEnd(self._job, gang=self._gang),
            publisher=publisher,
            interruption=self._interruption,
            replanner=self._replanner(planned),
            step_plans=self._step_plans(planned),
        )
        stop_reason = loop.run(first, self._job.training.steps)
        if stop_reason is not None:
            self._reporter.event("stopped_early", stop_reason)
        return stop_reason

    def _snapshot_obstacle(self, found: PlannedJob) -> str | None:
        """Why there is no room for copies of the state beside this plan, where checkpoints are made of copies."""
        if not self._snapshot_rooms:
            return None
        return snapshot_shortfall(found, self._snapshot_rooms, gang=self._gang, device=self._attempt.device)

    def _replanner(self, planned: PlannedJob) -> Replanner | None:
        """None for a job that keeps its plan, and for one whose microbatches have unequal lengths: the costs that one step
        measures are not those of the next."""
        if self._keeps_plan(planned) or self._job.data.lengths is not None:
            return None
        return Replanner(
            planned,
            self._planner.answer,
            gang=self._gang,
            control=self._control,
            reporter=self._reporter,
            metrics=self._metrics,
            obstacle=self._snapshot_obstacle,
        )

    def _step_plans(self, planned: PlannedJob) -> StepPlans | None:
        """None for a job that keeps its plan, and for one whose microbatches have one length; an event says why other jobs
        have no plans of single steps."""
        if self._job.data.lengths is None or self._keeps_plan(planned):
            return None
        if "step_planner" not in self._planner.answer:
            why = (
                "data.lengths has one bucket, or the data is a stream or has no attribute `lengths`, which tells them "
                "before they are read"
            )
            if (schedule := self._job.pipeline.schedule) != AUTO:
                why = f"pipeline.schedule is {schedule}, whose order stays; auto plans steps by their lengths"
            elif planned.slowdown > 1:
                why = "workers share processor cores, which decide how long steps are in any order"
            elif self._job.training.microbatches == AUTO:
                why = "training.microbatches is auto; with a number steps are planned by their lengths"
            self._reporter.event(
                "plan_kept", f"all steps run by the plan for their largest microbatches: {why}"
            )
            return None
        return StepPlans(
            planned,
            self._planner.answer,
            control=self._control,
            reporter=self._reporter,
            metrics=self._metrics,
            obstacle=self._snapshot_obstacle,
        )

    def _keeps_plan(self, planned: PlannedJob) -> bool:
        """True for a job that says so, whose plan was saved, that has one mesh, or that runs on CUDA, where another program
        would load kernels within a step."""
        return (
            self._job.pipeline.replan == "off"
            or planned.saved_plan is not None
            or self._job.meshes == 1
            or self._attempt.device == "cuda"
        )

    def _assignments(
        self, planned: PlannedJob, store: tuple[str, int], evaluation: Mapping[str, MeshProgram]
    ) -> list[Assignment]:
        """Make what each worker runs, in the order of the gang."""
        limits = self._limits
        return make_assignments(
            planned,
            [(address.mesh, address.node) for address in self._gang.addresses],
            tensors=self._job.tensors,
            store=store,
            limits=LoadLimits(
                limits.prepare_s,
                limits.connect_s,
                SlotLimits(factor=limits.slot_factor, floor_s=limits.slot_floor_s),
            ),
            planned_bytes=planned_peak_bytes(planned.spec, planned.plan),
            evaluation=evaluation,
        )

    def _model_flops(self, planned: PlannedJob) -> ModelFlops | None:
        """The FLOPs of a step, and the peak FLOP/s of all accelerators on CUDA; None where a layer was not counted, or
        microbatches have unequal lengths."""
        if self._job.data.lengths is not None:
            return None
        gang, profiles = self._gang, self._planner.profiles
        step = step_flops(
            [(address.mesh, own) for address, own in zip(gang.addresses, profiles, strict=True)],
            stage_starts=planned.stage_starts,
            mesh_of_stage=planned.mesh_of_stage,
            microbatches=planned.microbatches,
        )
        if step is None or self._attempt.device != "cuda":
            return None if step is None else ModelFlops(step)
        peaks = gang.call("gpu_peak_flops", phase=Phase.SETUP, what="looking up what its GPU could do")
        return ModelFlops(step, total_peak_flops(peaks, int(os.environ.get("SLOTLINE_WORKERS_PER_GPU", "1"))))


def _hand_out_weights(gang: Gang, planned: PlannedJob) -> None:
    """Give every worker but the first, which built the model, the initial values of its stages. Those of a mesh are packed
    once the last mesh but one has its own: object stores hold those of two meshes, never the whole model."""
    first = gang.workers[0]
    taken: list[list[ray.ObjectRef]] = []
    for mesh in gang.meshes:
        before = taken[-2] if len(taken) > 1 else []
        values: ray.ObjectRef | ParameterValues = {}
        if any(worker is not first for worker in mesh.workers):
            stages = planned.stages_of(mesh.name)
            values = first.call.remote("weights", planned.stage_starts, stages, *before)
        taken.append(
            [worker.call.remote("take_weights", {} if worker is first else values) for worker in mesh.workers]
        )
    gang.wait(
        [ref for of_mesh in taken for ref in of_mesh],
        phase=Phase.PREPARE,
        what="handing each worker the weights of its stages",
    )


def check_replicas(gang: Gang, *, heterogeneous: bool = False) -> None:
    """Raise AttemptFailure MODEL_BUILD_FAILED, DATA_FAILED or PLAN_INFEASIBLE with the names of tensors that differ, and
    on which workers.

    Only tensors that several workers hold are compared. Between `heterogeneous` meshes a tied parameter, whose gradients
    are summed whole there, may be sharded differently: it is compared in pieces.
    """
    what = "comparing what the workers start from"
    shard_specs = gang.call("shard_specs", phase=Phase.CHECK, what=what)
    workers = [f"{address.mesh}/{address.worker}" for address in gang.addresses]
    if not heterogeneous and (message := shard_mismatch(workers, shard_specs)):
        raise AttemptFailure(Reason.PLAN_INFEASIBLE, message)
    names, cuts = replicated_names(shard_specs), common_cuts(shard_specs)
    fingerprints = gang.call("fingerprint", names, cuts, phase=Phase.CHECK, what=what)
    if message := sample_mismatch(workers, fingerprints):
        raise AttemptFailure(Reason.DATA_FAILED, message)
    if message := tensor_mismatch(workers, fingerprints):
        raise AttemptFailure(Reason.MODEL_BUILD_FAILED, message)


def check_node(nodes: Collection[str], *, own: str, left_out: Collection[str]) -> str | None:
    """The node (Ray's id) on which a job is checked: the driver's own where it offers accelerators; None where none is
    left."""
    open_nodes = [node for node in nodes if node not in left_out]
    return own if own in open_nodes else min(open_nodes, default=None)


def start_check(
    spec: Mapping[str, Any], *, device: str, secrets: Mapping[str, str], left_out: Collection[str]
) -> RunningCheck:
    """Check the job `spec` in a process of a node that offers accelerators of `device`, of which it takes none, and takes
    work. Without such a node there are only notes."""
    resource = "GPU" if device == "cuda" else CPU_RESOURCE
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource)]
    node_id = check_node(nodes, own=ray.get_runtime_context().get_node_id(), left_out=left_out)
    if node_id is None:
        others = f" but {len(nodes)} that take no work" if nodes else ""
        return _Unchecked(f"no node offers {resource}{others}")
    # softly Ray would take any other node where this one is lost meanwhile, also one that is to have no work
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=not left_out)
    task = ray.remote(check_job_process).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    return _TaskOfRay(task.remote(spec, environment=dict(secrets)))


class _Unchecked:
    """A check that could not be started."""

    def __init__(self, why: str) -> None:
        self._why = why

    def answer(self, wait_s: float) -> JobCheck:
        return JobCheck(notes=(f"{_NOT_CHECKED}: {self._why}",))

    def end(self) -> None:
        """Nothing runs."""


class _TaskOfRay:
    """A check in a task of Ray."""

    def __init__(self, result: ray.ObjectRef) -> None:
        self._result = result
        self._deadline = time.monotonic() + CHECK_LIMIT_S + _CHECK_START_S

    def answer(self, wait_s: float) -> JobCheck | None:
        if not ray.wait([self._result], timeout=wait_s)[0]:
            if time.monotonic() < self._deadline:
                return None
            self.end()
            return JobCheck(notes=(f"{_NOT_CHECKED}: no answer in time",))
        try:
            return ray.get(self._result)
        except ray.exceptions.RayError as error:
            reason = " ".join(str(error).split())[:500]
            return JobCheck(notes=(f"{_NOT_CHECKED}: {reason}",))

    def end(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.cancel(self._result, force=True)
            # Ray may crash where it is shut down in the middle of a cancellation
            ray.wait([self._result], timeout=_CANCEL_S)
