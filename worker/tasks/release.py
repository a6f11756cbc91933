"""Ends the keepers of copies of jobs that have ended, as the request in SLOTLINE_RELEASE says, and frees their memory.

Runs inside the cluster, as Ray has no HTTP route that ends an actor. Drivers end the keepers of jobs that succeed or are
cancelled while they run: this is for the others. Light: no torch.
"""

from __future__ import annotations

import json
import logging
import os

import ray

from worker.contract.codec import to_json
from worker.contract.tasks import RELEASE_REQUEST_VARIABLE, RELEASE_RESULT_MARK, ReleaseRequest, ReleaseResult
from worker.machine.keepers import end_keepers


def main() -> int:
    """End the keepers of the jobs of the request; 0 when Ray was asked to."""
    request = ReleaseRequest.from_json(os.environ[RELEASE_REQUEST_VARIABLE])
    ray.init(
        os.environ.get("SLOTLINE_DRIVER_RAY_ADDRESS"), log_to_driver=False, logging_level=logging.WARNING
    )
    result = ReleaseResult(tuple(end_keepers(request.jobs)))
    print(f"\n{RELEASE_RESULT_MARK}{json.dumps(to_json(result))}", flush=True)
    return 0
