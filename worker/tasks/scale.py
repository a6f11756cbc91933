"""Tells Ray's autoscaler the size that the cluster is to have, as the request in SLOTLINE_SCALE says.

Runs inside the cluster, as Ray has no HTTP route for it. A request takes the place of the one before, of whomever, and
stands until the next. The autoscaler (version 2: KubeRay's, and that of `ray up`) takes one whole or ignores it, so
the longest part of the queue that it takes is found by bisection. The older autoscaler, which every head has that was
started by hand, does not say what it takes: it counts as none. Light: no torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Protocol

import ray
from ray._raylet import GcsClient
from ray.autoscaler.sdk import request_resources
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

from worker.contract.codec import to_json
from worker.contract.tasks import (
    SCALE_REQUEST_VARIABLE,
    SCALE_RESULT_MARK,
    Bundles,
    ScaleRequest,
    ScaleResult,
)

_ANSWER_LIMIT_S = 20.0
"""The autoscaler looks at requests every 5 s."""
_SEARCH_LIMIT_S = 90.0
_POLL_S = 0.5


class Autoscaler(Protocol):
    """An autoscaler that keeps the last request."""

    def request(self, bundles: Sequence[Bundles]) -> None: ...

    def takes_request(self) -> bool | None:
        """True where the nodes of the last request are there or can be had; None where nobody answers."""


def scale(
    request: ScaleRequest, autoscaler: Autoscaler, *, search_limit_s: float = _SEARCH_LIMIT_S
) -> ScaleResult:
    """Leave the request for as many gangs, from the first on, as `autoscaler` takes; none where it takes no gang, or
    where there is no autoscaler."""
    if not request.held and not request.gangs:
        autoscaler.request([])
        return ScaleResult(autoscaler=True)

    def takes(gangs: int) -> bool | None:
        autoscaler.request([*request.held, *request.gangs[:gangs]])
        return autoscaler.takes_request()

    all_gangs = len(request.gangs)
    answer = takes(all_gangs)
    if answer:
        return ScaleResult(autoscaler=True, accepted=all_gangs, stands=True)
    accepted, refused, last = 0, all_gangs, all_gangs
    deadline = time.monotonic() + search_limit_s
    while answer is not None and refused - accepted > 1 and time.monotonic() < deadline:
        last = (accepted + refused) // 2
        answer = takes(last)
        if answer:
            accepted = last
        else:
            refused = last
    if answer is None or not accepted:
        autoscaler.request([])
        return ScaleResult(autoscaler=answer is not None)
    if last != accepted:
        autoscaler.request([*request.held, *request.gangs[:accepted]])
    return ScaleResult(autoscaler=True, accepted=accepted, stands=True)


class RayAutoscaler:
    """The autoscaler of the Ray that this process has joined."""

    def __init__(self) -> None:
        self._gcs = GcsClient(address=ray.get_runtime_context().gcs_address)

    def request(self, bundles: Sequence[Bundles]) -> None:
        each_bundle = [each for each in bundles for _ in range(each.number)]
        request_resources(
            bundles=[each.bundle for each in each_bundle],
            bundle_label_selectors=[each.label_selector for each in each_bundle],
        )

    def takes_request(self) -> bool | None:
        asked_at = self._status().cluster_resource_state.cluster_resource_state_version
        deadline = time.monotonic() + _ANSWER_LIMIT_S
        while time.monotonic() < deadline:
            answer = self._status().autoscaling_state
            if answer.last_seen_cluster_resource_state_version > asked_at:
                return not answer.infeasible_cluster_resource_constraints
            time.sleep(_POLL_S)
        return None

    def _status(self) -> GetClusterStatusReply:
        reply = GetClusterStatusReply()
        reply.ParseFromString(self._gcs.get_cluster_status(timeout_s=10))
        return reply


def main() -> int:
    """Make the request; 0 when Ray has it."""
    request = ScaleRequest.from_json(os.environ[SCALE_REQUEST_VARIABLE])
    ray.init(os.environ.get("SLOTLINE_DRIVER_RAY_ADDRESS"), log_to_driver=False)
    # where an older autoscaler is, or none, whatever others asked of it is left alone
    result = (
        scale(request, RayAutoscaler()) if is_autoscaler_v2(fetch_from_server=True) else ScaleResult(False)
    )
    print(f"\n{SCALE_RESULT_MARK}{json.dumps(to_json(result))}", flush=True)
    return 0
