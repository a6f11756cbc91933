"""One attempt of a job, from its placement group to its last checkpoint: the order of things, and how it ended."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from worker.actor import Worker
from worker.driver.agreement import check_agreement
from worker.driver.control_plane import ControlPlane, Refused
from worker.driver.evaluation import Evaluations, plan_evaluation
from worker.driver.gang import Gang
from worker.driver.launch import Launch
from worker.driver.limits import Limits
from worker.driver.metrics import JobMetrics
from worker.driver.metrics_port import serve_in_range
from worker.driver.model_flops import ModelFlops, step_flops, whole_peak
from worker.driver.planned_times import planned_seconds, planned_starts
from worker.driver.planning import PlannedJob, Planner
from worker.driver.report import Reporter
from worker.driver.saving import Checkpoints
from worker.driver.spans import Spans
from worker.driver.step_loop import run_steps
from worker.driver.stopping import AskedToStop, raise_if
from worker.driver.termination import Termination
from worker.driver.versions import versions
from worker.engine.results import SlotLimits
from worker.evaluation import EvaluationProgram
from worker.failure import AttemptFailure, OutOfMemoryFailure, as_failure
from worker.job import Job
from worker.masking import take_environment
from worker.model.memory_plan import planned_peak_bytes
from worker.node import own_node_address
from worker.reasons import Reason
from worker.transport import topology_of
from worker.transport.rendezvous import serve_rendezvous

log = logging.getLogger(__name__)


class Cancelled(Exception):
    """The control plane asked to stop, or wants no more of this attempt."""


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


@dataclass(frozen=True)
class Outcome:
    """The final state of an attempt, as it is reported."""

    state: str
    reason: Reason | None = None
    message: str | None = None


def run_attempt(
    attempt: Attempt,
    control: ControlPlane,
    reporter: Reporter,
    metrics: JobMetrics,
    termination: Termination,
    spans: Spans,
) -> Outcome:
    """Train; how it ended. Leaves no actor and no placement group, and raises nothing."""

    def launched(phase: str, seconds: float) -> None:
        metrics.set_launch_phase(phase, seconds)
        spans.ended(f"launch: {phase}", seconds)

    launch = Launch(launched)
    try:
        job = Job.from_json(attempt.spec)
        address = os.environ.get("SLOTLINE_DRIVER_RAY_ADDRESS")  # None: the cluster that Ray finds
        ray.init(address, log_to_driver=True, logging_level=logging.WARNING)
        termination.listen()  # ray.init puts a handler of its own in place
        try:
            reporter.metrics_endpoint(_serve_metrics(metrics))
            launch.ended("connect")
            ended_early = _train(attempt, job, control, reporter, metrics, launch, spans)
        finally:
            ray.shutdown()
        if ended_early is not None:
            return Outcome("SUCCEEDED", Reason.STOPPED_EARLY, ended_early)
        return Outcome("SUCCEEDED")
    except Cancelled:
        return Outcome("CANCELLED", Reason.CANCELLED_BY_USER, "cancelled on request")
    except AskedToStop as asked:
        return Outcome("FAILED", Reason.PREEMPTED, str(asked))
    except (KeyboardInterrupt, SystemExit):
        return Outcome("CANCELLED", Reason.CANCELLED_BY_USER, "the driver was told to end (SIGTERM)")
    except Refused as refused:
        if refused.final:
            return Outcome(
                "CANCELLED", Reason.CANCELLED_BY_USER, f"the control plane wants no more: {refused.detail}"
            )
        log.exception("the control plane refused what the driver asked")
        return Outcome(
            "FAILED", Reason.INTERNAL, f"the control plane answered {refused.status}: {refused.detail}"
        )
    except AttemptFailure as failure:
        if failure.details:
            log.error("%s", failure.details)
        return Outcome("FAILED", failure.reason, failure.message)
    except Exception as error:
        log.exception("the driver itself failed")
        return Outcome("FAILED", Reason.INTERNAL, as_failure(error, Reason.INTERNAL).message)


def _train(
    attempt: Attempt,
    job: Job,
    control: ControlPlane,
    reporter: Reporter,
    metrics: JobMetrics,
    launch: Launch,
    spans: Spans,
) -> str | None:
    """Why training ended before its last step, if it did."""
    limits = attempt.limits
    if attempt.device == "cuda" and job.resources.workers is not None:
        raise AttemptFailure(
            Reason.PLAN_INFEASIBLE,
            f"meshes of unlike sizes ({', '.join(map(str, job.mesh_sizes))} workers) run on cpu so far: set "
            "resources.device to cpu, or give all meshes the same number of workers",
        )

    def raise_if_cancelled() -> None:
        if reporter.cancelled.is_set() or reporter.fenced.is_set():
            raise Cancelled

    def checkpointed(operation: str, seconds: float) -> None:
        metrics.set_checkpoint(operation, seconds)
        spans.ended(f"checkpoint: {operation}", seconds)

    def raise_if_told_to_end() -> None:
        raise_if_cancelled()
        raise_if(reporter.asked_to_stop.is_set)

    gang = Gang(
        sizes=job.mesh_sizes,
        device=attempt.device,
        start_timeout_s=limits.start_s,
        workers_per_gpu=int(os.environ.get("SLOTLINE_WORKERS_PER_GPU", "1")),
    )
    planner = Planner(
        control=control,
        reporter=reporter,
        gang=gang,
        device=attempt.device,
        limits=limits,
        job=job,
        interrupted=raise_if_told_to_end,
    )
    try:
        with gang:
            gang.start(
                ray.remote(Worker),
                lambda mesh, worker: {
                    "job": job,
                    "mesh": mesh,
                    "worker": worker,
                    "device": attempt.device,
                },
                raise_if_told_to_end,
            )
            if attempt.secrets:
                gang.call(
                    [
                        worker.__ray_call__.remote(take_environment, attempt.secrets)
                        for worker in gang.workers
                    ],
                    what="taking its environment",
                    limit_s=limits.start_s,
                    interrupted=raise_if_cancelled,
                )
            launch.ended("place")
            for mesh in gang.meshes:
                metrics.set_nodes(mesh.name, [a.node for a in gang.addresses if a.mesh == mesh.name])
            reporter.event(
                "placed", f"{len(gang.workers)} workers on {len({a.node for a in gang.addresses})} node(s)"
            )
            reporter.event("versions", versions())
            checkpoints = Checkpoints(
                job.checkpoint,
                attempt.job_id,
                gang=gang,
                reporter=reporter,
                limit_s=limits.checkpoint_s,
                interrupted=raise_if_cancelled,
                timed=checkpointed,
                keeps_best=job.evaluation is not None and job.evaluation.keep_best,
            )
            checkpoints.try_place()
            planned = planner.plan()
            launch.ended("plan")
            metrics.set_plan(planned.plan, step_s=planned.step_s)
            metrics.set_planned_memory(planned_peak_bytes(planned.spec, planned.plan))
            evaluation = plan_evaluation(
                job.evaluation,
                planned,
                gang=gang,
                control=control,
                limits=limits,
                interrupted=raise_if_cancelled,
            )
            _store, place = serve_rendezvous(own_node_address(), [a.node for a in gang.addresses])
            gang.call(
                _load(gang, planned, place, limits, job.model.weights is not None, evaluation),
                what="loading the stages",
                limit_s=limits.prepare_s,
                timeout_reason=Reason.START_TIMEOUT,
                interrupted=raise_if_told_to_end,
            )
            launch.ended("load")
            done = checkpoints.restore(attempt.resume_uri)
            launch.ended("restore")
            check_agreement(gang, limit_s=limits.prepare_s, interrupted=raise_if_told_to_end)
            launch.ended("check")
            gang.call(
                [worker.warm_up.remote(done + 1) for worker in gang.workers],
                what="the first run, without transfers",
                limit_s=limits.prepare_s,
                interrupted=raise_if_told_to_end,
            )
            launch.ended("warm up")
            metrics.set_model_flops(_model_flops(gang, planner, planned, attempt, job, raise_if_cancelled))
            reporter.state("RUNNING")
            ended_early = run_steps(
                done + 1,
                job.training.steps,
                samples=job.training.global_batch,
                planned=planned,
                gang=gang,
                reporter=reporter,
                metrics=metrics,
                checkpoints=checkpoints,
                limits=limits,
                interrupted=raise_if_cancelled,
                stopping=reporter.asked_to_stop.is_set,
                spans=spans,
                evaluations=Evaluations(
                    job.evaluation,
                    gang=gang,
                    reporter=reporter,
                    metrics=metrics,
                    limits=limits,
                    step_s=planned.step_s,
                    interrupted=raise_if_cancelled,
                    course=checkpoints.course,
                ),
            )
            if ended_early is not None:
                reporter.event("stopped_early", ended_early)
            return ended_early
    except OutOfMemoryFailure as failure:
        planner.correct(failure)
        raise


def _load(
    gang: Gang,
    planned: PlannedJob,
    store: tuple[str, int],
    limits: Limits,
    own_weights: bool,
    evaluation: Mapping[str, EvaluationProgram],
) -> list[ray.ObjectRef]:
    """Give every worker its stages and program."""
    planned_s = planned_seconds(planned.plan, planned.stage_names, planned.update)
    starts_s = planned_starts(planned.plan, planned.stage_names)
    peaks = planned_peak_bytes(planned.spec, planned.plan)
    first = gang.workers[0]  # has all parameters; the others wait for theirs, so it gives before it loads
    # those of model.weights every worker reads for itself
    weights = {
        mesh.name: first.weights.remote(planned.begins, planned.stages_of(mesh.name))
        for mesh in gang.meshes
        if any(worker is not first for worker in mesh.workers) and not own_weights
    }
    topology = topology_of({mesh.name: len(mesh.workers) for mesh in gang.meshes})
    return [
        worker.load.remote(
            begins=planned.begins,
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


def _model_flops(
    gang: Gang,
    planner: Planner,
    planned: PlannedJob,
    attempt: Attempt,
    job: Job,
    interrupted: Callable[[], None],
) -> ModelFlops | None:
    """What a step computes and its accelerators could, as far as either is known."""
    step = step_flops(
        [(address.mesh, own) for address, own in zip(gang.addresses, planner.profiles, strict=True)],
        begins=planned.begins,
        mesh_of_stage=planned.mesh_of_stage,
        microbatches=planned.microbatches,
    )
    if step is None or attempt.device != "cuda":
        return None if step is None else ModelFlops(step)
    peaks = gang.call(
        [worker.own_peak.remote() for worker in gang.workers],
        what="looking up what its GPU could do",
        limit_s=attempt.limits.start_s,
        interrupted=interrupted,
    )
    return ModelFlops(step, whole_peak(peaks, int(os.environ.get("SLOTLINE_WORKERS_PER_GPU", "1"))))


def _serve_metrics(metrics: JobMetrics) -> str:
    """Serve on this node's address; the endpoint goes to the control plane for service discovery."""
    host = os.environ.get("SLOTLINE_METRICS_HOST") or own_node_address()
    return serve_in_range(metrics, host, os.environ.get("SLOTLINE_METRICS_PORTS", ""))
