"""Verifies a job's pipeline against its plain model on one worker, step by step.

Reads {"job": ..., "planned": a plan's answer, "steps": ..., "resume": a checkpoint or null} from stdin. Ends with one
task_result line: {"proof": ...} or {"failed": a reason code, "message": ...}. Needs no Ray and no control plane.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from worker.contract import failures
from worker.contract.failures import AttemptFailure, as_failure
from worker.contract.job import Job
from worker.contract.planned import parse_planned_job
from worker.contract.reasons import Reason
from worker.contract.tasks import PROOF_RESULT_MARK
from worker.verify.proof import prove


def main() -> int:
    """Verify the job that standard input names; 0 when it could be compared, whether or not it agrees."""
    failures.start_breadcrumbs()
    answer: dict[str, Any]
    try:
        request = json.loads(sys.stdin.read())
        planned = parse_planned_job(request["planned"])
        proof = prove(
            Job.from_json(request["job"]),
            lambda _: planned,
            request["steps"],
            resume=request.get("resume"),
            report=_print_progress,
        )
        answer = {"proof": proof.to_json()}
    except Exception as error:
        failure = error if isinstance(error, AttemptFailure) else as_failure(error, Reason.INTERNAL)
        print(failure.details, file=sys.stderr)
        answer = {"failed": failure.reason, "message": failure.message}
    print(f"\n{PROOF_RESULT_MARK}{json.dumps(answer)}", flush=True)
    failures.remove_crash_report(os.getpid())
    return 1 if "failed" in answer else 0


def _print_progress(line: str) -> None:
    print(f"slotline: {line}", file=sys.stderr, flush=True)
