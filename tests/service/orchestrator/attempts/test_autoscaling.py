"""What the autoscalers of clusters are told, and when; Ray's part is played by the test."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import update

from service.observability.instruments import REGISTRY
from service.orchestrator.attempts import autoscaling
from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.orchestrator.ray.jobs_api import ClusterError, RayJobSubmission, RayNode, ResourceUse
from service.settings.settings import Settings
from service.spec.states import BY_RAY, AttemptState, NodeMark, NodeState
from service.store.database import Database, utc_now
from service.store.leases import clusters_with_requests
from service.store.node_states import set_node_mark
from service.store.tables import Base, LeaseRow
from tests.service.fake_cluster import FakeCluster
from tests.service.orchestrator.test_loop import World
from worker.contract.codec import to_json
from worker.contract.job import placement_group_name
from worker.contract.reasons import Reason
from worker.contract.tasks import SCALE_REQUEST_VARIABLE, SCALE_RESULT_MARK, ScaleRequest, ScaleResult

ALL = autoscaling.SETTLE_S + autoscaling.PAUSE_S


class ScalingCluster(FakeCluster):
    """A head with a worker node, and an autoscaler that takes requests for up to `most` accelerators."""

    def __init__(self) -> None:
        super().__init__()
        self.most: int | None = 100
        self.requests: list[ScaleRequest] = []
        self.breaks = False
        self.head = "head-1"

    async def nodes(self) -> list[RayNode]:
        head = RayNode(self.head, "127.0.0.2", {"node:__internal_head__": 1.0}, host="head")
        return [*await super().nodes(), head]

    async def submit(self, submission: RayJobSubmission) -> None:
        if SCALE_REQUEST_VARIABLE in submission.env and self.breaks:
            raise ClusterError("no memory")
        await super().submit(submission)
        if SCALE_REQUEST_VARIABLE in submission.env:
            request = ScaleRequest.from_json(submission.env[SCALE_REQUEST_VARIABLE])
            self.requests.append(request)
            result = json.dumps(to_json(self._answer_to(request)))
            self.logs[submission.id] = f"started\n{SCALE_RESULT_MARK}{result}\n"
            self.states[submission.id] = RayJob(RayState.SUCCEEDED)

    def _answer_to(self, request: ScaleRequest) -> ScaleResult:
        if self.most is None:
            return ScaleResult(autoscaler=False)
        total, accepted = sum(held.number for held in request.held), 0
        for gang in request.gangs:
            if (total := total + gang.number) > self.most:
                break
            accepted += 1
        return ScaleResult(True, accepted, stands=bool(accepted or (request.held and not request.gangs)))

    @property
    def asked_in_all(self) -> list[float]:
        """Of each request, the accelerators in all."""
        return [sum(b.amount * b.number for b in (*r.held, *r.gangs)) for r in self.requests]


class ScalingWorld(World):
    """A world on such a cluster, and a clock that only the test moves."""

    def __init__(self, database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(autoscaling, "_monotonic", lambda: self.now)
        super().__init__(database, settings)
        self.cluster = ScalingCluster()
        self.restart()

    async def later(self, seconds: float = ALL) -> None:
        """Some rounds until the time is up, and those that it takes to act."""
        await self.rounds()
        self.now += seconds
        await self.rounds(2)


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScalingWorld]:
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'store.db'}")
    async with database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield ScalingWorld(database, Settings(queues={"default": None, "small": 4}), monkeypatch)
    await database.close()


def count(outcome: str) -> float:
    labels = {"cluster": "default", "outcome": outcome}
    return REGISTRY.get_sample_value("slotline_autoscaler_requests_total", labels) or 0.0


async def test_a_cluster_is_asked_to_grow_for_a_gang_beside_what_runs(world: ScalingWorld):
    first, second = await world.start(), await world.submit()
    await world.later()
    (request,) = world.cluster.requests
    assert [(held.resource, held.number) for held in request.held] == [("slotline_worker", 4)]
    assert [(gang.resource, gang.amount, gang.number) for gang in request.gangs] == [
        ("slotline_worker", 1.0, 4)
    ]
    job = await world.job(second)
    assert (job.state, job.reason) == ("QUEUED", Reason.WAITS_FOR_ACCELERATORS)
    assert job.message == (
        f"waits for 4 accelerators of slotline_worker; 0 of 4 free (job {first} uses 4)"
        "; Ray's autoscaler was asked for more nodes"
    )


async def test_a_cluster_that_is_too_small_says_that_it_was_asked_to_grow(world: ScalingWorld):
    world.cluster.workers = 2
    job_id = await world.submit()
    await world.later(5.0)
    assert (await world.job(job_id)).reason == Reason.CLUSTER_TOO_SMALL and not world.cluster.requests
    await world.later()
    job = await world.job(job_id)
    assert job.reason == Reason.WAITS_FOR_ACCELERATORS
    assert job.message == (
        "waits for 4 accelerators of slotline_worker, which the cluster has not"
        "; Ray's autoscaler was asked for more nodes"
    )
    world.cluster.workers = 4
    await world.rounds(2)
    assert (await world.job(job_id)).state == "STARTING"


async def test_a_job_that_starts_at_once_asks_for_nothing(world: ScalingWorld):
    await world.start()
    await world.later(10 * autoscaling.REPEAT_S)
    assert world.cluster.requests == []


async def test_an_unchanged_need_is_told_once_whichever_jobs_it_is_of(world: ScalingWorld):
    running, waiting = await world.start(), await world.submit()
    await world.later()
    await world.later()
    assert world.cluster.asked_in_all == [8]
    await world.report(f"{running}-1", 2, state=AttemptState.SUCCEEDED)
    await world.submit()
    await world.later()  # one starts and another waits: 8 in all, as before
    assert (await world.job(waiting)).state == "STARTING" and world.cluster.asked_in_all == [8]
    await world.submit()
    await world.later()
    assert world.cluster.asked_in_all == [8, 12]


async def test_a_request_is_withdrawn_once_nothing_waits_or_starts(world: ScalingWorld):
    running, waiting = await world.start(), await world.submit()
    await world.later()
    await world.report(f"{running}-1", 2, state=AttemptState.SUCCEEDED)
    await world.later()
    assert (await world.job(waiting)).state == "STARTING" and len(world.cluster.requests) == 2
    assert world.cluster.asked_in_all[1] == 4, "the nodes that it came to are kept for it"
    await world.report(f"{waiting}-1", 1, state=AttemptState.RUNNING)
    await world.later()
    assert world.cluster.requests[2:] == [ScaleRequest()]
    await world.later(10 * autoscaling.REPEAT_S)
    assert len(world.cluster.requests) == 3


async def test_quota_bounds_what_is_asked_for(world: ScalingWorld):
    await world.start(queue="small")
    await world.submit(queue="small")
    await world.later()
    assert world.cluster.requests == []


async def test_what_the_autoscaler_does_not_take_is_not_said_to_come_and_not_asked_for_again(
    world: ScalingWorld,
):
    world.cluster.most = 8
    await world.start()
    granted, refused = await world.submit(), await world.submit()
    await world.later()
    assert world.cluster.asked_in_all == [12]
    await world.later()
    assert "was asked for more nodes" in (await world.job(granted)).message
    assert "was asked for more nodes" not in (await world.job(refused)).message
    assert world.cluster.asked_in_all == [12], "8 stand"
    await world.later(autoscaling.REPEAT_S)
    await world.later()
    assert world.cluster.asked_in_all == [12, 8], "what stands is repeated alone, as long as it is waited for"


async def test_a_cluster_without_an_autoscaler_is_seldom_asked(world: ScalingWorld):
    world.cluster.most = None
    await world.start()
    job_id = await world.submit()
    await world.later()
    await world.later()
    assert len(world.cluster.requests) == 1
    assert "autoscaler" not in (await world.job(job_id)).message
    async with world.database.read() as session:
        assert await clusters_with_requests(session) == []
    await world.later(autoscaling.REPEAT_S)
    await world.later()
    assert len(world.cluster.requests) == 2


async def test_a_head_that_was_started_anew_is_told_again(world: ScalingWorld):
    await world.start()
    await world.submit()
    await world.later()
    world.cluster.head = "head-2"
    await world.later()
    assert world.cluster.asked_in_all == [8, 8]


async def test_the_next_control_plane_withdraws_what_an_earlier_one_asked_for(world: ScalingWorld):
    await world.start()
    waiting = await world.submit()
    await world.later()
    await world.cancel(waiting)
    world.restart()  # nothing is known but what the store has
    await world.later()
    assert world.cluster.requests[1:] == [ScaleRequest()]
    world.restart()
    await world.later()
    assert len(world.cluster.requests) == 2


async def test_a_control_plane_that_was_replaced_tells_nothing(world: ScalingWorld):
    await world.start()
    await world.submit()
    await world.rounds()
    world.now += ALL
    (request,) = world.orchestrator.autoscaling.due()
    async with world.database.write() as session:
        await session.execute(update(LeaseRow).values(token=LeaseRow.token + 1))
    with pytest.raises(Exception, match="orchestrates"):
        await request
    assert world.cluster.requests == []


async def test_a_request_that_fails_is_told_and_tried_again_and_stops_nothing(
    world: ScalingWorld, caplog: pytest.LogCaptureFixture
):
    world.cluster.breaks = True
    running, waiting = await world.start(), await world.submit()
    before = count("failed")
    with caplog.at_level(logging.WARNING):
        await world.later()
    assert "the autoscaler of cluster default was not told what is needed: no memory" in caplog.text
    assert count("failed") == before + 1
    assert "was asked" not in (await world.job(waiting)).message
    world.cluster.breaks = False
    await world.later()
    assert world.cluster.asked_in_all == [8]
    await world.report(f"{running}-1", 2, state=AttemptState.SUCCEEDED)
    await world.rounds(2)
    assert (await world.job(waiting)).state == "STARTING"


async def test_a_cluster_that_is_away_is_told_nothing_until_it_is_back(world: ScalingWorld):
    await world.start()
    await world.submit()
    await world.rounds()
    world.cluster.away = True
    before = count("failed")
    await world.later()
    assert count("failed") == before
    world.cluster.away = False
    await world.later()
    assert world.cluster.asked_in_all == [8]


async def test_a_local_ray_has_no_autoscaler(world: ScalingWorld):
    world.drivers = replace(world.drivers, may_scale=False)
    world.restart()
    await world.start()
    await world.submit()
    await world.later()
    assert world.cluster.requests == []


async def test_workers_that_share_a_gpu_ask_for_their_parts_of_it(world: ScalingWorld):
    world.drivers = replace(world.drivers, workers_per_gpu=3, ray_address="head:6379")
    world.restart()
    await world.submit(resources={"device": "cuda"})
    await world.later()
    (request,) = world.cluster.requests
    assert [(gang.resource, gang.amount, gang.number) for gang in request.gangs] == [("GPU", 0.3333, 4)]
    (submission,) = (one for one in world.cluster.submissions.values() if SCALE_REQUEST_VARIABLE in one.env)
    assert submission.env["SLOTLINE_DRIVER_RAY_ADDRESS"] == "head:6379"
    assert submission.entrypoint.endswith("-m worker.tasks scale")


@pytest.mark.parametrize(("by", "in_all"), [("ann", 4 + 4), (BY_RAY, 4)], ids=["operator", "ray"])
async def test_a_node_that_takes_no_work_is_asked_for_in_addition_unless_ray_leaves_it_out_too(
    world: ScalingWorld, by: str, in_all: int
):
    async with world.database.write() as session:
        mark = NodeMark("default", "node-1", NodeState.EXCLUDED, by, utc_now())
        await set_node_mark(session, mark)
    await world.submit()
    await world.later()
    assert world.cluster.asked_in_all == [in_all]


async def test_what_other_programs_hold_is_asked_for_in_addition_and_what_ended_attempts_hold_is_not(
    world: ScalingWorld,
):
    world.cluster.others = [
        ResourceUse("theirs", {"slotline_worker": 3.0}),
        ResourceUse(placement_group_name("job-of-before-1"), {"slotline_worker": 1.0}),
    ]
    await world.submit()
    await world.later()
    assert world.cluster.asked_in_all == [4 + 3]
