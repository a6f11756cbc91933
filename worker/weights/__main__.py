"""`python -m worker.weights`: export a job's weights, as the request in SLOTLINE_EXPORT says, or on standard input.

Ends with one line: ANSWER_MARK and what was written, or {"failed": why}. Needs no Ray and no control plane.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from dataclasses import asdict

from worker.checkpoint_files import CheckpointError
from worker.weights.export import ExportTargetError, export_job
from worker.weights.request import ANSWER_MARK, REQUEST_VARIABLE, ExportRequest


def main() -> int:
    """Export; 0 when all was written."""
    request = ExportRequest.from_json(os.environ.get(REQUEST_VARIABLE) or sys.stdin.read())
    try:
        answer = asdict(export_job(request))
    except (CheckpointError, ExportTargetError) as error:
        answer = {"failed": f"{error} (on {socket.gethostname()})"}
    except Exception as error:
        traceback.print_exc()
        answer = {"failed": f"{type(error).__name__}: {error} (on {socket.gethostname()})"}
    print(f"\n{ANSWER_MARK}{json.dumps(answer)}", flush=True)
    return 1 if "failed" in answer else 0


if __name__ == "__main__":
    sys.exit(main())
