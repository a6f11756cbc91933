"""Entry point of the Ray job (`python -m worker.driver`): runs one attempt, reports its outcome and exits.

SLOTLINE_CONTROL_URL, SLOTLINE_ATTEMPT_ID and SLOTLINE_ATTEMPT_TOKEN name the attempt. run_attempt maps every way in
which training can end to the final state that is reported, and raises nothing. Behind a lost worker the others wait
until the control plane has answered the last report: with the job's next attempt, which this driver then runs with them,
or without one. Neither actors nor a placement group are left when the driver ends.
Must not know how an attempt trains.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from worker.checkpoint.resumption import ResumeSource
from worker.contract.failures import AttemptFailure, as_failure
from worker.contract.job import Job
from worker.contract.logs import (
    LogCopy,
    SecretMask,
    TraceParent,
    bind_process_fields,
    goes_on_line,
    mask_output,
    set_up_logging,
)
from worker.contract.reasons import Reason
from worker.contract.timeline import LAUNCH_EVENT, launch_message
from worker.contract.versions import control_plane_too_old_message
from worker.driver.control_plane_client import ControlPlaneClient, Refused
from worker.driver.gang.gang import Gang
from worker.driver.limits import Limits
from worker.driver.metrics import DriverMetrics, serve_in_range
from worker.driver.reporter import LaunchPhases, Reporter, Spans
from worker.driver.stopping import Cancelled, GracefulStop, SigtermHandler
from worker.driver.tracking.run_tracking import RunTracking
from worker.driver.tracking.trackers import FINISH_LIMIT_S
from worker.driver.trainer import Attempt, Trainer
from worker.machine.node import own_node_address

log = logging.getLogger("worker.driver")
_LOST = (Reason.WORKER_LOST, Reason.NODE_LOST)
"""What is lost, is lost with new workers too."""


@dataclass(frozen=True)
class AttemptOutcome:
    """The final state of an attempt, as it is reported, and what is kept for the next one of this driver."""

    state: str
    reason: Reason | None = None
    message: str | None = None
    failed_nodes: tuple[str, ...] = ()
    kept_gang: Gang | None = None


def run_attempt(
    attempt: Attempt,
    control: ControlPlaneClient,
    reporter: Reporter,
    metrics: DriverMetrics,
    termination: SigtermHandler,
    spans: Spans,
    tracking: RunTracking,
    earlier: Gang | None = None,
) -> AttemptOutcome:
    """Train, with the workers of an `earlier` gang where these are of use, and return the outcome. Leaves no actor and no
    placement group but those of `kept_gang`, and raises nothing; trackers are not ended."""

    def launched(phase: str, seconds: float) -> None:
        reporter.event(LAUNCH_EVENT, launch_message(phase, seconds))
        metrics.add_launch_phase(phase, seconds)
        spans.add_ended(f"launch: {phase}", seconds)

    launch = LaunchPhases(launched)
    trainer: Trainer | None = None
    keeps = False
    try:
        try:
            job = Job.from_json(attempt.spec)
            tracking.prepare(job.tracking)
            if earlier is None:
                address = os.environ.get("SLOTLINE_DRIVER_RAY_ADDRESS")  # None: the cluster that Ray finds
                # Ray would log the answer of each call that was given up, behind a failure that has been named
                os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
                ray.init(address, log_to_driver=True, logging_level=logging.WARNING)
                termination.listen()  # ray.init puts a handler of its own in place
            reporter.metrics_endpoint(_serve_metrics(metrics))
            launch.end_phase("connect")

            def make_trainer() -> Trainer:
                return Trainer(
                    attempt,
                    job,
                    control=control,
                    reporter=reporter,
                    metrics=metrics,
                    launch=launch,
                    spans=spans,
                    tracking=tracking,
                )

            trainer = make_trainer()
            try:
                stop_reason = trainer.train(earlier)
            except AttemptFailure as failure:
                if earlier is None or trainer.has_begun or failure.reason in _LOST:
                    raise
                reporter.event(
                    "started_anew",
                    f"all workers are started anew: with those that were kept, {failure.message}",
                )
                trainer = make_trainer()
                stop_reason = trainer.train()
        except AttemptFailure as failure:
            keeps = failure.reason is Reason.WORKER_LOST  # what it really was may come behind
            raise
        finally:
            kept = None if trainer is None else trainer.kept_gang
            if kept is None or not keeps:
                _end(kept, earlier)
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
        kept = None if trainer is None else trainer.kept_gang
        return AttemptOutcome("FAILED", failure.reason, failure.message, failure.nodes, kept)
    except Exception as error:
        log.exception("the driver itself failed")
        return AttemptOutcome("FAILED", Reason.INTERNAL, as_failure(error, Reason.INTERNAL).message)


def _end(*gangs: Gang | None) -> None:
    """End the workers of these gangs, and leave Ray."""
    try:
        for gang in gangs:
            if gang is not None:
                gang.stop()
    finally:
        ray.shutdown()


def _serve_metrics(metrics: DriverMetrics) -> str:
    """Serve on this node's address; the endpoint goes to the control plane for service discovery."""
    host = os.environ.get("SLOTLINE_METRICS_HOST") or own_node_address()
    return serve_in_range(metrics, host, os.environ.get("SLOTLINE_METRICS_PORTS", ""))


FINAL_REPORT_LIMIT_S = 3_600.0
KEPT_LIMIT_S = 30.0
"""For the answer to the last report, for which kept workers wait."""
TERMINATED_REPORT_LIMIT_S = 10.0
TERMINATED_TRACKING_LIMIT_S = 5.0


def attempt_from(body: Mapping[str, Any], limits: Limits) -> Attempt:
    """The attempt that the control plane's answer describes."""
    return Attempt(
        job_id=body["job_id"],
        number=body["number"],
        spec=body["job"],
        device=body["device"],
        limits=limits,
        resume_uri=(body.get("resume") or {}).get("uri"),
        resume_from=ResumeSource(**source) if (source := body.get("resume_from")) else None,
        recorded=body.get("recorded") or {},
        secrets=body.get("secrets") or {},
        checked=bool(body.get("checked")),
        left_out_nodes=frozenset(body.get("left_out_nodes") or ()),
    )


@dataclass(frozen=True)
class AttemptEnd:
    """The end of an attempt: the exit code (0 when it succeeded or was cancelled), the attempt that this driver is to run
    next, and the workers that it may have for it."""

    code: int
    following: Mapping[str, Any] | None = None
    kept_gang: Gang | None = None


def run_to_end(
    attempt: Attempt,
    control: ControlPlaneClient,
    termination: SigtermHandler,
    *,
    protocol: object,
    earlier: Gang | None = None,
) -> AttemptEnd:
    """Run the attempt, with the workers of an `earlier` gang that was kept, and report its outcome. `protocol` is the
    control plane's."""
    reporter = Reporter(control, recorded_step=attempt.recorded.get("steps", -1)).start()
    metrics = DriverMetrics(attempt.job_id)
    spans, tracking = Spans.from_environment(reporter.span), RunTracking(reporter.event)
    if too_old := control_plane_too_old_message(protocol):
        outcome = AttemptOutcome("FAILED", Reason.VERSION_MISMATCH, too_old)
        if earlier is not None:
            _end(earlier)
    else:
        outcome = run_attempt(attempt, control, reporter, metrics, termination, spans, tracking, earlier)
    if outcome.state == "FAILED":
        log.error(
            "attempt %s of job %s failed: %s: %s",
            attempt.number,
            attempt.job_id,
            outcome.reason,
            outcome.message,
        )
    try:
        tracking.finish(
            outcome.state, limit_s=TERMINATED_TRACKING_LIMIT_S if termination.requested else FINISH_LIMIT_S
        )
    except KeyboardInterrupt:
        log.info("asked to end before the trackers had written everything")
    kept = outcome.kept_gang
    reporter.state(
        outcome.state,
        reason=outcome.reason,
        message=outcome.message,
        failed_nodes=outcome.failed_nodes,
        takes_next=kept is not None,
    )
    try:
        delivered = kept is not None and reporter.flush(KEPT_LIMIT_S)
        if kept is not None and reporter.next is None:
            kept = _end(kept)
        delivered = delivered or reporter.flush(
            TERMINATED_REPORT_LIMIT_S if termination.requested else FINAL_REPORT_LIMIT_S
        )
        reporter.close()  # a finished attempt has no heartbeat
        if reporter.next is not None and not termination.requested and not tracking.abandoned:
            threading.Thread(target=metrics.close, args=(attempt.limits.linger_s,), daemon=True).start()
            return AttemptEnd(1, reporter.next, kept)
        linger_s = attempt.limits.linger_s if delivered and not termination.requested else 0.0
        log.info("%s; metrics stay for %.0f s", outcome.state, linger_s)
        metrics.close(linger_s)
    except KeyboardInterrupt:
        log.info("asked to end before the metrics' time was over")
    if kept is not None:
        _end(kept)
    code = 0 if outcome.state in ("SUCCEEDED", "CANCELLED") else 1
    if tracking.abandoned:
        end_process_now(code)
    return AttemptEnd(code)


def main() -> int:
    """Run the attempt named by the environment; 0 when it succeeded or was cancelled."""
    mask = mask_output()
    set_up_logging(
        level=os.environ.get("SLOTLINE_LOG_LEVEL", "INFO"),
        log_format=os.environ.get("SLOTLINE_LOG_FORMAT", "text"),
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if path := os.environ.get("SLOTLINE_LOG_COPY_TO"):
        try:
            logging.getLogger().addHandler(LogCopy(path, mask))
        except OSError as error:
            log.warning("SLOTLINE_LOG_COPY_TO is %s, which cannot be written to: %s", path, error)
    termination = SigtermHandler()
    termination.listen()
    end = _run_one(os.environ["SLOTLINE_ATTEMPT_ID"], os.environ["SLOTLINE_ATTEMPT_TOKEN"], mask, termination)
    while (following := end.following) is not None:
        print(goes_on_line(following["attempt_id"]), flush=True)  # whatever is logged: its log begins here
        if following.get("traceparent"):
            os.environ["SLOTLINE_TRACEPARENT"] = following["traceparent"]
        mask.hide([following["token"]])
        end = _run_one(following["attempt_id"], following["token"], mask, termination, earlier=end.kept_gang)
    return end.code


def _run_one(
    attempt_id: str,
    token: str,
    mask: SecretMask,
    termination: SigtermHandler,
    *,
    earlier: Gang | None = None,
) -> AttemptEnd:
    """Run the attempt that the control plane has under this id, with the workers of an `earlier` gang that was kept."""
    limits = Limits.from_environment()
    trace = TraceParent.read(os.environ.get("SLOTLINE_TRACEPARENT"))
    control = ControlPlaneClient(
        os.environ["SLOTLINE_CONTROL_URL"],
        attempt_id,
        token,
        mask=mask,
        traceparent=str(trace) if trace else None,  # the attempt's own span
    )
    try:
        body = control.attempt()
        secrets = body.get("secrets") or {}
        mask.hide(secrets.values())
        os.environ.update(secrets)
        bind_process_fields(
            job=body["job_id"], attempt=body["number"], **({"trace_id": trace.trace_id} if trace else {})
        )
        attempt, protocol = attempt_from(body, limits), body.get("protocol")
        kept, earlier = earlier, None
        return run_to_end(attempt, control, termination, protocol=protocol, earlier=kept)
    except Refused as refused:
        log.error("the control plane wants nothing of this attempt: %s", refused.detail)
        return AttemptEnd(1)
    finally:
        if earlier is not None:
            _end(earlier)
        control.close()


def end_process_now(code: int) -> None:
    """End this process without exit hooks: those of a tracker's library would wait for what hangs."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
