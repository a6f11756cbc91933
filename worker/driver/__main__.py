"""The entry point of a Ray job: run the attempt that the environment names, report its end, exit.

SLOTLINE_CONTROL_URL, SLOTLINE_ATTEMPT_ID and SLOTLINE_ATTEMPT_TOKEN say which. Must not know how an attempt
trains.
"""

from __future__ import annotations

import logging
import os
import sys

from worker.driver.attempt import Outcome, run_attempt
from worker.driver.control_plane import ControlPlane, Refused
from worker.driver.limits import Limits
from worker.driver.metrics import JobMetrics
from worker.driver.report import Reporter
from worker.driver.spans import Spans
from worker.driver.termination import Termination
from worker.driver.trainer import Attempt
from worker.logs import TraceParent, bind, set_up
from worker.masking import mask_output
from worker.protocol import control_plane_is_too_old
from worker.reasons import Reason

log = logging.getLogger(__name__)

FINAL_REPORT_LIMIT_S = 3_600.0
TERMINATED_REPORT_LIMIT_S = 10.0


def main() -> int:
    """Run the attempt named by the environment; 0 when it succeeded or was cancelled."""
    mask = mask_output()
    set_up(
        level=os.environ.get("SLOTLINE_LOG_LEVEL", "INFO"), form=os.environ.get("SLOTLINE_LOG_FORMAT", "text")
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    termination = Termination()
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
        given = control.attempt()
    except Refused as refused:
        log.error("the control plane wants nothing of this attempt: %s", refused.detail)
        return 1
    secrets = given.get("secrets") or {}
    mask.hide(secrets.values())
    os.environ.update(secrets)
    bind(job=given["job_id"], attempt=given["number"], **({"trace_id": trace.trace_id} if trace else {}))
    attempt = Attempt(
        job_id=given["job_id"],
        number=given["number"],
        spec=given["job"],
        device=given["device"],
        limits=limits,
        resume_uri=(given.get("resume") or {}).get("uri"),
        secrets=secrets,
    )
    reporter = Reporter(control).start()
    metrics = JobMetrics(attempt.job_id)
    spans = Spans.from_environment(reporter.span)
    if too_old := control_plane_is_too_old(given.get("protocol")):
        outcome = Outcome("FAILED", Reason.VERSION_MISMATCH, too_old)
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
        delivered = reporter.flush(TERMINATED_REPORT_LIMIT_S if termination.asked else FINAL_REPORT_LIMIT_S)
        reporter.close()  # a finished attempt has no heartbeat
        linger_s = limits.linger_s if delivered and not termination.asked else 0.0
        log.info("%s; metrics stay for %.0f s", outcome.state, linger_s)
        metrics.close(linger_s)
    except KeyboardInterrupt:
        log.info("asked to end before the metrics' time was over")
    control.close()
    return 0 if outcome.state in ("SUCCEEDED", "CANCELLED") else 1


if __name__ == "__main__":
    sys.exit(main())
