"""A Ray cluster in memory, for tests of what surrounds it: the interface of ray_jobs.Cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from service.orchestrator.attempts.watch import AttemptWatcher
from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.orchestrator.ray.jobs_api import (
    ClusterError,
    ClusterUnreachableError,
    RayJobSubmission,
    RayNode,
    ResourceUse,
)


class FakeCluster:
    """Remembers what it is asked. Drivers do nothing: a test says how they fare through `states`."""

    def __init__(self, workers: int = 4) -> None:
        self.workers = workers
        self.node_names: Sequence[str] = ("node-1",)
        self.submissions: dict[str, RayJobSubmission] = {}
        self.states: dict[str, RayJob] = {}
        self.stopped: list[str] = []
        self.logs: dict[str, str] = {}
        self.packages: dict[str, bytes] = {}
        self.away = False
        self.loses_answers = False
        self.stops_nothing = False
        self.refusal: str | None = None
        self.not_now: str | None = None
        self.others: list[ResourceUse] = []
        self.lost_logs: set[str] = set()
        self.log_readers: dict[str, int] = {}
        self.log_bytes_read = 0

    async def submit(self, submission: RayJobSubmission) -> None:
        self._answer()
        if self.not_now is not None:
            raise ClusterUnreachableError(self.not_now)
        if self.refusal is not None:
            raise ClusterError(self.refusal)
        if submission.id not in self.submissions:
            self.submissions[submission.id] = submission
            self.states[submission.id] = RayJob(RayState.RUNNING)
        if self.loses_answers:
            raise ClusterUnreachableError("the answer was lost")

    async def job(self, submission_id: str) -> RayJob:
        self._answer()
        return self.states.get(submission_id, RayJob(RayState.MISSING))

    async def stop(self, submission_id: str) -> None:
        self._answer()
        self.stopped.append(submission_id)
        if submission_id in self.states and not self.stops_nothing:
            self.states[submission_id] = RayJob(RayState.STOPPED)

    async def log(self, submission_id: str) -> str:
        return b"".join([piece async for piece in self.read_log(submission_id)]).decode("utf-8", "replace")

    async def read_log(self, submission_id: str, *, follow: bool = False) -> AsyncIterator[bytes]:
        self._answer()
        if submission_id in self.lost_logs:
            raise ClusterUnreachableError("its node is gone")
        self.log_readers[submission_id] = self.log_readers.get(submission_id, 0) + 1
        known, text, content = 0, "", b""
        while True:
            if self.logs.get(submission_id, "") is not text:
                text = self.logs.get(submission_id, "")
                content = text.encode()
            while known < len(content):
                piece = content[known : known + 65536]
                known += len(piece)
                self.log_bytes_read += len(piece)
                yield piece
                await asyncio.sleep(0)
            if not follow:
                return
            await asyncio.sleep(0.002)
            self._answer()

    async def nodes(self) -> list[RayNode]:
        self._answer()
        offered = {"slotline_worker": float(self.workers), "CPU": 2.0}
        return [RayNode(name, "127.0.0.1", offered, host=name) for name in self.node_names]

    async def resources_in_use(self) -> list[ResourceUse]:
        self._answer()
        return list(self.others)

    async def upload_package(self, name: str, content: bytes) -> str:
        self._answer()
        self.packages[name] = content
        return f"gcs://{name}"

    async def close(self) -> None:
        pass

    def _answer(self) -> None:
        if self.away:
            raise ClusterUnreachableError("the cluster is away")


def ask_at_once(attempts: AttemptWatcher) -> None:
    """The next look at every attempt asks Ray, however short ago it was asked."""
    for watched in attempts._watched.values():
        watched.asked_at = 0.0
