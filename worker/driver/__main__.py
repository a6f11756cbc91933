"""Entry point of the Ray job (`python -m worker.driver`): runs one attempt, reports its outcome and exits.

SLOTLINE_CONTROL_URL, SLOTLINE_ATTEMPT_ID and SLOTLINE_ATTEMPT_TOKEN name the attempt. run_attempt maps every way in
which training can end to the final state that is reported; it raises nothing, and leaves neither actors nor a
placement group behind.
Must not know how an attempt trains.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass

import ray

from worker.actor.device import own_node_address
from worker.contract.failures import AttemptFailure, as_failure
from worker.contract.job import Job
from worker.contract.logs import TraceParent, bind_process_fields, mask_output, set_up_logging
from worker.contract.reasons import Reason
from worker.contract.versions import control_plane_too_old_message
from worker.driver.control_plane_client import ControlPlane, Refused
from worker.driver.limits import Limits
from worker.driver.metrics import JobMetrics, serve_in_range
from worker.driver.reporter import Reporter, Spans
from worker.driver.stopping import Cancelled, GracefulStop, SigtermHandler
from worker.driver.trainer import Attempt, LaunchPhases, Trainer

log = logging.getLogger("worker.driver")


@dataclass(frozen=True)
class AttemptOutcome:
    """The final state of an attempt, as it is reported."""

    state: str
    reason: Reason | None = None
    message: str | None = None


def run_attempt(
    attempt: Attempt,
    control: ControlPlane,
    reporter: Reporter,
    metrics: JobMetrics,
    termination: SigtermHandler,
    spans: Spans,
) -> AttemptOutcome:
    """Train and return the outcome. Leaves no actor and no placement group, and raises nothing."""

    def launched(phase: str, seconds: float) -> None:
        metrics.set_launch_phase(phase, seconds)
        spans.add_ended(f"launch: {phase}", seconds)

    launch = LaunchPhases(launched)
    try:
        job = Job.from_json(attempt.spec)
        address = os.environ.get("SLOTLINE_DRIVER_RAY_ADDRESS")  # None: the cluster that Ray finds
        ray.init(address, log_to_driver=True, logging_level=logging.WARNING)
        termination.listen()  # ray.init puts a handler of its own in place
        try:
            reporter.metrics_endpoint(_serve_metrics(metrics))
            launch.end_phase("connect")
            trainer = Trainer(
                attempt, job, control=control, reporter=reporter, metrics=metrics, launch=launch, spans=spans
            )
            stop_reason = trainer.train()
        finally:
            ray.shutdown()
        if stop_reason is not None:
            return AttemptOutcome("SUCCEEDED", Reason.STOPPED_EARLY, stop_reason)
        return AttemptOutcome("SUCCEEDED")
    except Cancelled:
        return AttemptOutcome("CANCELLED", Reason.CANCELLED_BY_USER, "cancelled on request")
    except GracefulStop as stop:
        return AttemptOutcome("FAILED", Reason.PREEMPTED, str(stop))
    except (KeyboardInterrupt, SystemExit):
        return AttemptOutcome("CANCELLED", Reason.CANCELLED_BY_USER, "the driver was told to end (SIGTERM)")
    except Refused as refused:
        if refused.final:
            return AttemptOutcome(
                "CANCELLED", Reason.CANCELLED_BY_USER, f"the control plane wants no more: {refused.detail}"
            )
        log.exception("the control plane refused a request of the driver")
        return AttemptOutcome(
            "FAILED", Reason.INTERNAL, f"the control plane answered {refused.status}: {refused.detail}"
        )
    except AttemptFailure as failure:
        if failure.details:
            log.error("%s", failure.details)
        return AttemptOutcome("FAILED", failure.reason, failure.message)
    except Exception as error:
        log.exception("the driver itself failed")
        return AttemptOutcome("FAILED", Reason.INTERNAL, as_failure(error, Reason.INTERNAL).message)


def _serve_metrics(metrics: JobMetrics) -> str:
    """Serve on this node's address; the endpoint goes to the control plane for service discovery."""
    host = os.environ.get("SLOTLINE_METRICS_HOST") or own_node_address()
    return serve_in_range(metrics, host, os.environ.get("SLOTLINE_METRICS_PORTS", ""))


FINAL_REPORT_LIMIT_S = 3_600.0
TERMINATED_REPORT_LIMIT_S = 10.0


def main() -> int:
    """Run the attempt named by the environment; 0 when it succeeded or was cancelled."""
    mask = mask_output()
    set_up_logging(
        level=os.environ.get("SLOTLINE_LOG_LEVEL", "INFO"),
        log_format=os.environ.get("SLOTLINE_LOG_FORMAT", "text"),
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    termination = SigtermHandler()
    termination.listen()
    limits = Limits.from_environment()
    trace = TraceParent.read(os.environ.get("SLOTLINE_TRACEPARENT"))
    control = ControlPlane(
        os.environ["SLOTLINE_CONTROL_URL"],
        os.environ["SLOTLINE_ATTEMPT_ID"],
        os.environ["SLOTLINE_ATTEMPT_TOKEN"],
        mask=mask,
        traceparent=str(trace) if trace else None,  # the attempt's own span
    )
    try:
        body = control.attempt()
    except Refused as refused:
        log.error("the control plane wants nothing of this attempt: %s", refused.detail)
        return 1
    secrets = body.get("secrets") or {}
    mask.hide(secrets.values())
    os.environ.update(secrets)
    bind_process_fields(
        job=body["job_id"], attempt=body["number"], **({"trace_id": trace.trace_id} if trace else {})
    )
    attempt = Attempt(
        job_id=body["job_id"],
        number=body["number"],
        spec=body["job"],
        device=body["device"],
        limits=limits,
        resume_uri=(body.get("resume") or {}).get("uri"),
        secrets=secrets,
    )
    reporter = Reporter(control).start()
    metrics = JobMetrics(attempt.job_id)
    spans = Spans.from_environment(reporter.span)
    if too_old := control_plane_too_old_message(body.get("protocol")):
        outcome = AttemptOutcome("FAILED", Reason.VERSION_MISMATCH, too_old)
    else:
        outcome = run_attempt(attempt, control, reporter, metrics, termination, spans)
    if outcome.state == "FAILED":
        log.error(
            "attempt %s of job %s failed: %s: %s",
            attempt.number,
            attempt.job_id,
            outcome.reason,
            outcome.message,
        )
    reporter.state(outcome.state, reason=outcome.reason, message=outcome.message)
    try:
        delivered = reporter.flush(
            TERMINATED_REPORT_LIMIT_S if termination.requested else FINAL_REPORT_LIMIT_S
        )
        reporter.close()  # a finished attempt has no heartbeat
        linger_s = limits.linger_s if delivered and not termination.requested else 0.0
        log.info("%s; metrics stay for %.0f s", outcome.state, linger_s)
        metrics.close(linger_s)
    except KeyboardInterrupt:
        log.info("asked to end before the metrics' time was over")
    control.close()
    return 0 if outcome.state in ("SUCCEEDED", "CANCELLED") else 1


if __name__ == "__main__":
    sys.exit(main())
