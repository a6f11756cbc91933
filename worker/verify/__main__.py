"""`python -m worker.verify` reads {"job": ..., "planned": a plan's answer, "steps": ...} as JSON from standard input, and
ends with one line: PROOF_MARK and {"proof": ...} or {"failed": a reason code, "message": ...}. Needs no Ray and no
control plane."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from worker import last_action
from worker.driver.planning import planned_job
from worker.failure import AttemptFailure, as_failure
from worker.job import Job
from worker.proof_answer import PROOF_MARK
from worker.reasons import Reason
from worker.verify.proof import prove


def main() -> int:
    """Verify the job that standard input names; 0 when that could be done, whatever was found."""
    last_action.begin()
    answer: dict[str, Any]
    try:
        request = json.loads(sys.stdin.read())
        planned = planned_job(request["planned"])
        proof = prove(Job.from_json(request["job"]), lambda _: planned, request["steps"], told=_tell)
        answer = {"proof": proof.to_json()}
    except Exception as error:
        failure = error if isinstance(error, AttemptFailure) else as_failure(error, Reason.INTERNAL)
        print(failure.details, file=sys.stderr)
        answer = {"failed": failure.reason, "message": failure.message}
    print(f"\n{PROOF_MARK}{json.dumps(answer)}", flush=True)
    last_action.forget(os.getpid())
    return 1 if "failed" in answer else 0


def _tell(line: str) -> None:
    print(f"slotline: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
