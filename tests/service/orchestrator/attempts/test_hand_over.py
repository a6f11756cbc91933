"""A driver that lost a worker runs the job's next attempt: what the store, Ray and admission see of it, and who may not."""

from __future__ import annotations

from datetime import timedelta

import pytest

from service.orchestrator.attempts.outcome import StaleAttemptError, hand_over, request_graceful_stop
from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.orchestrator.ray.driver_logs import LogReader
from service.orchestrator.ray.jobs_api import ResourceUse
from service.spec.states import AttemptState
from service.store.attempts import log_locations, placements_of, record_placement
from service.store.database import utc_now
from service.store.events import events_of
from service.store.measurements import StepRecord, steps_of
from service.store.tables import AttemptRow, PlacedMeshRow
from service.store.transitions import lock_job
from tests.service.orchestrator.test_loop import World, world
from worker.contract.job import placement_group_name
from worker.contract.logs import goes_on_line
from worker.contract.reasons import Reason

__all__ = ["world"]

RETRIES = {"infrastructure": 3}


async def running(world: World, **changes) -> str:
    """A job of four meshes on `node-1`, whose first attempt runs."""
    job_id = await world.start(retry=RETRIES, **changes)
    async with world.database.write() as session:
        await record_placement(
            session,
            f"{job_id}-1",
            [
                PlacedMeshRow(
                    attempt_id=f"{job_id}-1",
                    job_id=job_id,
                    cluster="default",
                    mesh=f"m{mesh}",
                    node_id="node-1",
                    node="node-1",
                    workers=1,
                )
                for mesh in range(4)
            ],
        )
    return job_id


async def lose_a_worker(
    world: World, attempt_id: str, sequence: int = 50, reason: Reason = Reason.WORKER_LOST
):
    await world.report(attempt_id, sequence, state=AttemptState.FAILED, reason=reason, message="m1 is gone")


async def asked(world: World, attempt_id: str, *, cluster: str = "default", left_out=()) -> AttemptRow | None:
    """The answer to the final report of an attempt's driver."""
    async with world.database.write() as session:
        return await hand_over(session, attempt_id, cluster=cluster, left_out=left_out, at=utc_now())


async def test_the_driver_of_an_attempt_that_lost_a_worker_runs_the_next_one_as_any_attempt(world: World):
    job_id = await running(world)
    await lose_a_worker(world, f"{job_id}-1")
    following = await asked(world, f"{job_id}-1")
    before, job = await world.attempt(f"{job_id}-1"), await world.job(job_id)
    assert (following.id, following.number, following.driver_id) == (f"{job_id}-2", 2, f"{job_id}-1")
    assert (job.state, job.current_attempt, job.attempts_made) == ("STARTING", f"{job_id}-2", 2)
    assert (before.state, before.reason) == ("FAILED", "WORKER_LOST")
    assert following.token != before.token and following.accelerators == before.accelerators
    async with world.database.read() as session:
        placed = await placements_of(session, [following.id])
        told = [(e.kind, e.attempt) for e in await events_of(session, job_id)]
    assert [(mesh.mesh, mesh.node_id, mesh.workers) for mesh in placed] == [
        (f"m{i}", "node-1", 1) for i in range(4)
    ]
    assert ("handed_over", 2) in told

    await world.rounds(3)
    assert {*world.cluster.submissions} == {f"{job_id}-1"}, "Ray has the driver already"
    await world.report(
        f"{job_id}-2", 1, state=AttemptState.RUNNING, steps=[StepRecord(1, 2.0, 0.1, *[None] * 6)]
    )
    assert (await world.job(job_id)).state == "RUNNING"


async def test_what_the_old_attempt_says_late_changes_nothing(world: World):
    job_id = await running(world)
    await world.report(f"{job_id}-1", 2, steps=[StepRecord(1, 2.0, 0.1, *[None] * 6)])
    await lose_a_worker(world, f"{job_id}-1")
    await asked(world, f"{job_id}-1")
    with pytest.raises(StaleAttemptError, match="was replaced by attempt 2"):
        await world.report(f"{job_id}-1", 51, steps=[StepRecord(2, 9.0, 0.1, *[None] * 6)])
    assert (
        await world.report(f"{job_id}-1", 50, state=AttemptState.FAILED, reason=Reason.INTERNAL) == "continue"
    )
    async with world.database.read() as session:
        assert [step.step for step in await steps_of(session, job_id, after=-1, limit=9)] == [1]
    assert (await world.job(job_id)).current_attempt == f"{job_id}-2"


async def test_an_answer_that_was_lost_is_given_again_until_the_attempt_has_begun(world: World):
    job_id = await running(world)
    await lose_a_worker(world, f"{job_id}-1")
    first, again = await asked(world, f"{job_id}-1"), await asked(world, f"{job_id}-1")
    assert (again.id, again.token) == (first.id, first.token)
    assert (await world.job(job_id)).attempts_made == 2
    await world.report(first.id, 1)
    assert await asked(world, f"{job_id}-1") is None


@pytest.mark.parametrize(
    "reason",
    [Reason.NODE_LOST, Reason.USER_CODE_RAISED, Reason.SLOT_STALLED, Reason.INTERNAL, Reason.PREEMPTED],
)
async def test_only_behind_a_lost_worker_is_there_a_hand_over(world: World, reason: Reason):
    job_id = await running(world)
    await lose_a_worker(world, f"{job_id}-1", reason=reason)
    assert await asked(world, f"{job_id}-1") is None
    assert (await world.job(job_id)).attempts_made == 1


async def test_a_node_that_takes_no_work_another_cluster_and_another_size_are_admitted_anew(world: World):
    job_id = await running(world)
    await lose_a_worker(world, f"{job_id}-1")
    assert await asked(world, f"{job_id}-1", left_out=["node-1"]) is None
    assert await asked(world, f"{job_id}-1", cluster="east") is None
    async with world.database.write() as session:
        (await lock_job(session, job_id)).accelerators = 2
    assert await asked(world, f"{job_id}-1") is None
    async with world.database.write() as session:
        (await lock_job(session, job_id)).accelerators = 4
    assert await asked(world, f"{job_id}-1", left_out=["node-2"]) is not None


async def test_a_pause_before_the_retry_and_the_end_of_the_budget_hold_as_ever(world: World):
    job_id = await running(world)
    await lose_a_worker(world, f"{job_id}-1")
    async with world.database.write() as session:
        (await lock_job(session, job_id)).not_before = utc_now() + timedelta(seconds=4)
    assert await asked(world, f"{job_id}-1") is None

    other = await world.submit(retry={"infrastructure": 1})
    await world.cancel(job_id)
    world.cluster.others.clear()
    await world.rounds(2)
    await world.report(f"{other}-1", 1, state=AttemptState.RUNNING)
    await lose_a_worker(world, f"{other}-1")
    async with world.database.write() as session:
        row = PlacedMeshRow(
            attempt_id=f"{other}-1",
            job_id=other,
            cluster="default",
            mesh="m0",
            node_id="node-1",
            node="n",
            workers=4,
        )
        await record_placement(session, f"{other}-1", [row])
    assert (await asked(world, f"{other}-1")).number == 2
    await lose_a_worker(world, f"{other}-2")
    assert await asked(world, f"{other}-2") is None
    assert (await world.job(other)).state == "FAILED", "retry.infrastructure is 1"


async def test_a_driver_that_was_asked_to_end_gets_no_other_attempt(world: World):
    job_id = await running(world)
    async with world.database.write() as session:
        await request_graceful_stop(session, f"{job_id}-1", Reason.PREEMPTED, "gives way", at=utc_now())
    await lose_a_worker(world, f"{job_id}-1")
    assert await asked(world, f"{job_id}-1") is None


async def test_a_cancelled_job_does_not_go_on(world: World):
    job_id = await running(world)
    await world.cancel(job_id)
    await lose_a_worker(world, f"{job_id}-1")
    assert await asked(world, f"{job_id}-1") is None
    assert (await world.job(job_id)).state == "CANCELLED"


async def test_what_the_driver_holds_in_the_hand_over_is_given_to_nobody_else(world: World):
    job_id = await running(world)
    group = placement_group_name(f"{job_id}-1")
    world.cluster.others.append(ResourceUse(group, "node-1", {"slotline_worker": 4.0}))
    waiting = await world.submit(pipeline={"stages": 1})
    await lose_a_worker(world, f"{job_id}-1")
    await asked(world, f"{job_id}-1")
    await world.rounds(3)
    assert (await world.job(waiting)).attempts_made == 0
    assert "held by other programs" not in ((await world.job(waiting)).message or "")
    capacity = world.watcher.capacity_without({}, [(await world.attempt(f"{job_id}-2")).driver_id])
    assert capacity.others["cpu"] == 0
    await world.report(f"{job_id}-2", 1, state=AttemptState.SUCCEEDED)
    world.cluster.others.clear()
    await world.rounds(2)
    assert (await world.job(waiting)).attempts_made == 1


async def test_a_driver_that_is_killed_in_the_hand_over_is_lost_and_the_next_one_is_its_own(world: World):
    job_id = await running(world)
    await lose_a_worker(world, f"{job_id}-1")
    await asked(world, f"{job_id}-1")
    world.restart()  # the control plane, too: what it knows stands in the store
    world.cluster.states[f"{job_id}-1"] = RayJob(RayState.FAILED, exit_code=-9)
    await world.rounds(4)
    lost, fresh = await world.attempt(f"{job_id}-2"), await world.attempt(f"{job_id}-3")
    assert (lost.state, lost.reason) == ("FAILED", "DRIVER_LOST")
    assert fresh.driver_of is None and f"{job_id}-3" in world.cluster.submissions


async def test_a_control_plane_that_restarts_finds_the_driver_under_its_first_attempt(world: World):
    job_id = await running(world)
    await lose_a_worker(world, f"{job_id}-1")
    await asked(world, f"{job_id}-1")
    world.restart()
    await world.rounds(4)
    assert (await world.attempt(f"{job_id}-2")).state == "STARTING"
    assert {*world.cluster.submissions} == {f"{job_id}-1"} and not world.cluster.stopped


async def test_a_job_that_is_cancelled_in_the_hand_over_stops_the_driver_that_has_it(world: World):
    job_id = await running(world)
    await lose_a_worker(world, f"{job_id}-1")
    await asked(world, f"{job_id}-1")
    await world.cancel(job_id)
    await world.rounds(4)
    assert world.cluster.stopped[:1] == [f"{job_id}-1"]
    assert (await world.job(job_id)).state == "CANCELLED"


async def test_a_job_that_is_preempted_in_the_hand_over_is_told_by_the_answer_to_its_first_report(
    world: World,
):
    job_id = await running(world)
    await lose_a_worker(world, f"{job_id}-1")
    await asked(world, f"{job_id}-1")
    async with world.database.write() as session:
        assert await request_graceful_stop(
            session, f"{job_id}-2", Reason.PREEMPTED, "gives way", at=utc_now()
        )
    assert await world.report(f"{job_id}-2", 1) == "stop"


async def test_each_attempt_has_its_part_of_the_log_of_their_driver_live_and_stored(world: World):
    job_id = await running(world)
    await lose_a_worker(world, f"{job_id}-1")
    await asked(world, f"{job_id}-1")
    await world.report(f"{job_id}-2", 1)
    mark = f"2026-05-17T12:00:00.000Z INFO worker.driver: {goes_on_line(f'{job_id}-2')}"
    world.cluster.logs[f"{job_id}-1"] = f"one\ntwo\n{mark}\nthree\nfour\n"
    parts = {1: ["one", "two"], 2: [mark, "three", "four"]}

    async def read() -> dict[int, list[str]]:
        async with world.database.read() as session:
            places = await log_locations(session, job_id)
        reader = LogReader(world.database, world.clusters)
        found = {place.number: [*await reader.lines(place, 0)] for place in places}
        assert all([number for number, _ in lines] == [*range(1, len(lines) + 1)] for lines in found.values())
        return {number: [text for _, text in lines] for number, lines in found.items()}

    assert await read() == parts
    await world.rounds(2)
    assert (await world.attempt(f"{job_id}-1")).log == "one\ntwo\n"
    await world.report(f"{job_id}-2", 2, state=AttemptState.SUCCEEDED)
    await world.rounds(2)
    assert (await world.attempt(f"{job_id}-2")).log == f"{mark}\nthree\nfour\n"
    world.cluster.away = True
    assert await read() == parts
