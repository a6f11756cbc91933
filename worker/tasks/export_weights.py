"""Exports a job's weights as safetensors or as a torch.distributed.checkpoint folder.

Reads the request from SLOTLINE_EXPORT or stdin. Ends with one task_result line: what was written, or
{"failed": why}. Needs no Ray and no control plane.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from dataclasses import asdict

from worker.checkpoint.weights import ExportTargetError, export_job
from worker.contract.checkpoint_files import CheckpointError
from worker.contract.tasks import EXPORT_REQUEST_VARIABLE, EXPORT_RESULT_MARK, ExportRequest


def main() -> int:
    """Export; 0 when all was written."""
    request = ExportRequest.from_json(os.environ.get(EXPORT_REQUEST_VARIABLE) or sys.stdin.read())
    try:
        answer = asdict(export_job(request))
    except (CheckpointError, ExportTargetError) as error:
        answer = {"failed": f"{error} (on {socket.gethostname()})"}
    except Exception as error:
        traceback.print_exc()
        answer = {"failed": f"{type(error).__name__}: {error} (on {socket.gethostname()})"}
    print(f"\n{EXPORT_RESULT_MARK}{json.dumps(answer)}", flush=True)
    return 1 if "failed" in answer else 0
