"""CheckTask: a job checked by one process without accelerators, on a node where its workers would run.

Files and packages are there as workers will have them. Equal jobs of one owner on one cluster share a run. What keeps
a check from an answer decides nothing: CheckUndecidedError says it, and the driver of an attempt checks again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from service.orchestrator.decisions.attempt_lifecycle import AcceleratorKind, code_setup_failure, device_of
from service.orchestrator.ray.clusters import NamedCluster, working_dir_uri
from service.orchestrator.ray.jobs_api import RayJobSubmission
from service.orchestrator.tasks.runner import ENVIRONMENT_LIMIT, Task
from service.spec.job import stored_field
from service.store.secrets import spec_environment, spec_secret_names
from worker.contract.codec import from_json, to_json
from worker.contract.reasons import Reason
from worker.contract.tasks import (
    CHECK_LIMIT_S,
    CHECK_REQUEST_VARIABLE,
    JobCheck,
    JobProblem,
    read_check_result,
)

_START_S = 180.0
"""For Ray to start the process, the installation of code.pip included."""
_WITHOUT_EFFECT = (
    *("name", "queue", "priority", "labels", "notifications", "max_duration", "retry", "plan", "checkpoint"),
)
"""Fields of a job that a check does not read."""


class CheckUndecidedError(ValueError):
    """The job could not be checked; the message says why."""


@dataclass(frozen=True)
class CheckRequest:
    """A job of `owner` (JSON of a JobSpec) with the `device` and the number of `accelerators` that it wants."""

    spec: Mapping[str, Any]
    owner: str
    device: str
    accelerators: int


@dataclass(frozen=True)
class CheckAnswer:
    """The result of a check, and the time from its start to its answer."""

    check: JobCheck
    seconds: float


class CheckTask(Task[CheckRequest, CheckAnswer]):
    """Checks a job as `slotline check` does, in a process that holds nothing."""

    name = "check"
    concurrency = 4
    limit_s = CHECK_LIMIT_S + _START_S
    start_limit_s = _START_S
    error = CheckUndecidedError

    def key(self, request: CheckRequest, cluster: str) -> str:
        spec = {name: value for name, value in request.spec.items() if name not in _WITHOUT_EFFECT}
        return json.dumps([request.owner, request.device, spec], sort_keys=True)

    async def stored_result(self, request: CheckRequest, cluster: str) -> CheckAnswer | None:
        if names := spec_secret_names(request.spec):
            raise CheckUndecidedError(f"its secrets ({', '.join(names)}) are given to attempts only")
        return None

    async def perform(self, request: CheckRequest, cluster: NamedCluster) -> str:
        began_at = time.monotonic()
        submission = await self._submission(request, cluster)
        try:
            check = await self.run_in_ray(cluster, submission, read_check_result)
        except CheckUndecidedError as error:
            if (message := code_setup_failure(str(error))) is None:
                raise
            check = JobCheck(problems=(JobProblem("code", message, Reason.CODE_SETUP_FAILED),))
        return json.dumps(to_json(CheckAnswer(check, time.monotonic() - began_at)))

    def read_result(self, text: str) -> CheckAnswer:
        return from_json(CheckAnswer, json.loads(text))

    def busy_message(self, runs: int) -> str:
        return f"{runs} jobs are being checked"

    def timeout_message(self, began: bool) -> str:
        if began:
            return f"no answer within {self.limit_s:g} s"
        return f"Ray did not start its process within {self.start_limit_s:g} s"

    def no_result_message(self, detail: str) -> str:
        return detail if code_setup_failure(detail) else f"its process ended without a result ({detail})"

    async def _submission(self, request: CheckRequest, cluster: NamedCluster) -> RayJobSubmission:
        capacity = cluster.watcher.capacity
        if capacity is None:
            raise CheckUndecidedError("the Ray cluster does not answer")
        text = json.dumps({"job": request.spec})
        if len(text) > ENVIRONMENT_LIMIT:
            raise CheckUndecidedError(
                f"its specification has {len(text)} characters, more than the {ENVIRONMENT_LIMIT} that can be handed over"
            )
        wanted = stored_field(request.spec, "resources", "accelerator", None)
        device = device_of(request.device, request.accelerators, capacity, accelerator_type=wanted)
        types = capacity.by_type if wanted is None else [wanted]
        kinds = [AcceleratorKind(device, each) for each in types]
        hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return replace(
            self.submission(
                cluster,
                {**spec_environment(request.spec), CHECK_REQUEST_VARIABLE: text, **hidden},
                pip=stored_field(request.spec, "code", "pip", []),
            ),
            working_dir=await working_dir_uri(self._database, request.spec, cluster),
            avoid=cluster.watcher.nodes_without(kinds),
        )
