# ruff: noqa: F811 (the fixture is imported)
"""Jobs with spares: as many as are free when an attempt starts, and none is waited for."""

from __future__ import annotations

import pytest

from service.orchestrator.attempts.outcome import hand_over
from service.spec.job import spec_with_meshes
from service.spec.states import AttemptState
from service.store.attempts import record_placement
from service.store.database import utc_now
from service.store.tables import PlacedMeshRow
from tests.service.orchestrator.test_elastic import ONE, changed, elastic, has, lost, trained
from tests.service.orchestrator.test_preemption import World, told, world  # noqa: F401 (a fixture)
from worker.contract.job import Job
from worker.contract.reasons import Reason


def spared(spares: int = 2, meshes: int = 2) -> dict:
    """What a job of `world`, whose cluster has four accelerators, is to be changed by."""
    return {
        "resources": {"meshes": meshes, "spares": spares, "device": "cpu"},
        "pipeline": {"stages": 4},
        "checkpoint": {"uri": "/there"},
        "retry": {"infrastructure": 3},
    }


async def gang_of(world: World, attempt_id: str) -> tuple[int, int]:
    """The workers and the spares of an attempt, as its driver is told."""
    attempt = await world.attempt(attempt_id)
    job = Job.from_json(spec_with_meshes((await world.job(attempt.job_id)).spec, attempt.accelerators))
    return sum(job.mesh_sizes), job.resources.spares


@pytest.mark.parametrize(("others", "spares"), [(0, 2), (1, 1), (2, 0)])
async def test_it_starts_with_as_many_spares_as_are_free(world: World, others: int, spares: int):
    for _ in range(others):
        await world.start(**ONE)
    job_id = await world.start(**spared())
    assert await gang_of(world, f"{job_id}-1") == (2, spares)
    assert f"attempt 1 takes {2 + spares} accelerators" in " ".join(await told(world, job_id))


async def test_it_waits_for_its_meshes(world: World):
    await world.start(resources={"meshes": 3, "device": "cpu"}, pipeline={"stages": 3})
    job_id = await world.submit(**spared())
    await world.rounds(2)
    assert (await world.job(job_id)).state == "QUEUED"


async def test_it_goes_on_at_once_with_fewer_spares_where_a_node_is_lost(world: World):
    job_id = await world.start(**spared())
    has(world, 3)
    await lost(world, job_id, 1)
    assert await gang_of(world, f"{job_id}-2") == (2, 1)
    has(world, 2)
    await lost(world, job_id, 2)
    assert await gang_of(world, f"{job_id}-3") == (2, 0)


async def test_it_does_not_start_anew_for_spares_that_are_free_again(world: World):
    await world.start(**elastic(1, 2))  # rounds look for jobs that grow
    job_id = await world.start(**spared())
    assert await gang_of(world, f"{job_id}-1") == (2, 0)
    await trained(world, job_id, 1, step=1, step_s=100.0, start_s=1.0)
    has(world, 6)
    await world.rounds(2)
    assert (await world.attempt(f"{job_id}-1")).end_asked_at is None


async def test_what_no_plan_fits_is_not_tried_again_with_more_spares(world: World):
    has(world, 2)
    job_id = await world.start(**spared())
    has(world, 4)
    await world.report(
        f"{job_id}-1", 2, state=AttemptState.FAILED, reason=Reason.PLAN_INFEASIBLE, message="too large"
    )
    assert (await world.job(job_id)).state == "FAILED"


@pytest.mark.parametrize("accelerators", [4, 3])
async def test_the_driver_that_lost_a_worker_goes_on_with_the_spares_that_it_has(
    world: World, accelerators: int
):
    has(world, accelerators)
    job_id = await world.start(**spared())
    row = PlacedMeshRow(
        attempt_id=f"{job_id}-1",
        job_id=job_id,
        cluster="default",
        mesh="m0",
        node_id="a",
        node="a",
        workers=1,
    )
    async with world.database.write() as session:
        await record_placement(session, f"{job_id}-1", [row])
    await world.report(
        f"{job_id}-1", 50, state=AttemptState.FAILED, reason=Reason.WORKER_LOST, message="m1 is gone"
    )
    async with world.database.write() as session:
        following = await hand_over(session, f"{job_id}-1", cluster="default", left_out=(), at=utc_now())
    assert following.accelerators == accelerators
    assert await gang_of(world, f"{job_id}-2") == (2, accelerators - 2)


async def test_other_meshes_are_taken_up_though_as_many_accelerators_have_them(world: World):
    has(world, 3)
    job_id = await world.start(**spared(spares=1, meshes=3))
    assert await gang_of(world, f"{job_id}-1") == (3, 0)
    await changed(world, job_id, 2)
    assert await world.report(f"{job_id}-1", 2, checkpoint=(7, "/there/7")) == "stop"
