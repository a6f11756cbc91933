"""One attempt of a job, and how it ended: what the driver reports last."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import ray

from worker.driver.control_plane import ControlPlane, Refused
from worker.driver.launch import Launch
from worker.driver.metrics import JobMetrics
from worker.driver.metrics_port import serve_in_range
from worker.driver.report import Reporter
from worker.driver.spans import Spans
from worker.driver.stopping import AskedToStop, Cancelled
from worker.driver.termination import Termination
from worker.driver.trainer import Attempt, Trainer
from worker.failure import AttemptFailure, as_failure
from worker.job import Job
from worker.node import own_node_address
from worker.reasons import Reason

log = logging.getLogger(__name__)


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
            trainer = Trainer(
                attempt, job, control=control, reporter=reporter, metrics=metrics, launch=launch, spans=spans
            )
            ended_early = trainer.train()
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


def _serve_metrics(metrics: JobMetrics) -> str:
    """Serve on this node's address; the endpoint goes to the control plane for service discovery."""
    host = os.environ.get("SLOTLINE_METRICS_HOST") or own_node_address()
    return serve_in_range(metrics, host, os.environ.get("SLOTLINE_METRICS_PORTS", ""))
