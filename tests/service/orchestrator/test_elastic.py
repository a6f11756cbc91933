# ruff: noqa: F811 (the fixture is imported)
"""Jobs whose number of meshes changes: they start with what is free, go on with what is left, and grow."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from service.jobs.lifecycle import change_job
from service.jobs.problems import ProblemError
from service.orchestrator.attempts.outcome import ELASTIC_PATIENCE_S, Backoff, DriverReport, apply_report
from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.orchestrator.ray.jobs_api import RayNode
from service.schemas.jobs import JobChange
from service.spec.principals import OPEN_ACCESS_PRINCIPAL
from service.spec.states import AttemptState
from service.store.attempts import find_attempt
from service.store.database import utc_now
from service.store.jobs import find_job
from service.store.measurements import StepRecord
from tests.service.orchestrator.test_preemption import SAVED, World, told, world  # noqa: F401 (a fixture)
from worker.contract.reasons import Reason


def elastic(least: int = 2, most: int = 4, *, steps: int = 1000) -> dict:
    """What a job of `world` is to be changed by."""
    return {
        "resources": {"meshes": {"min": least, "max": most}, "device": "cpu"},
        "pipeline": {"stages": "auto"},
        "training": {"steps": steps, "global_batch": 8, "microbatches": 4},
        "checkpoint": {"uri": "/there"},
    }


ONE = {"resources": {"meshes": 1, "device": "cpu"}, "pipeline": {"stages": 1}}


def has(world: World, accelerators: int) -> None:
    async def nodes() -> list[RayNode]:
        return [RayNode("a", "10.0.0.1", {"slotline_worker": float(accelerators)})]

    world.cluster.nodes = nodes


async def lost(world: World, job_id: str, number: int) -> None:
    """The attempt of a job that is an hour old fails with a node."""
    async with world.database.write() as session:
        job = await find_job(session, job_id)
        job.created_at -= timedelta(hours=1)
    await world.report(
        f"{job_id}-{number}", 50, state=AttemptState.FAILED, reason=Reason.NODE_LOST, message="a node is gone"
    )
    world.cluster.states[f"{job_id}-{number}"] = RayJob(RayState.FAILED)
    await world.rounds(2)


async def ended(world: World, job_id: str, number: int) -> None:
    """The attempt has saved and ended, as it was asked to."""
    report = DriverReport(50, state=AttemptState.FAILED, reason=Reason.PREEMPTED, message=SAVED)
    async with world.database.write() as session:
        await apply_report(
            session, f"{job_id}-{number}", report, at=utc_now(), backoff=Backoff(1000.0, 1000.0), keep=10
        )
    world.cluster.states[f"{job_id}-{number}"] = RayJob(RayState.FAILED)
    await world.rounds(2)


async def waited(world: World, job_id: str, seconds: float) -> None:
    async with world.database.write() as session:
        (await find_job(session, job_id)).patient_until -= timedelta(seconds=seconds)


async def trained(
    world: World, job_id: str, number: int, *, step: int, step_s: float, start_s: float
) -> None:
    """The attempt, which took `start_s` to its first step, has come to `step`."""
    step_record = StepRecord(step, 0.5, step_s, step_s, 0.2, 0.0, 1.0, 1.0, time.time())
    await world.report(f"{job_id}-{number}", 10, steps=[step_record])
    async with world.database.write() as session:
        attempt = await find_attempt(session, f"{job_id}-{number}")
        attempt.created_at = attempt.started_at - timedelta(seconds=start_s)


async def test_it_starts_with_as_many_as_are_free(world: World):
    await world.start(**ONE)
    job_id = await world.start(**elastic())
    attempt = await world.attempt(f"{job_id}-1")
    assert (attempt.accelerators, (await world.job(job_id)).accelerators) == (3, 4)
    assert "attempt 1 takes 3 accelerators (cpu)" in " ".join(await told(world, job_id))


async def test_what_is_left_takes_over_when_a_node_stays_away(world: World):
    job_id = await world.start(**elastic())
    has(world, 3)
    await lost(world, job_id, 1)
    waiting = await world.job(job_id)
    assert (waiting.state, waiting.attempts_made) == ("RECOVERING", 1)
    assert "goes on with fewer" in " ".join(await told(world, job_id))
    await waited(world, job_id, ELASTIC_PATIENCE_S - 10)
    await world.rounds(2)
    assert (await world.job(job_id)).attempts_made == 1
    await waited(world, job_id, 10)
    await world.rounds(2)
    assert (await world.attempt(f"{job_id}-2")).accelerators == 3


async def test_a_node_that_comes_back_in_time_is_used(world: World):
    job_id = await world.start(**elastic())
    has(world, 3)
    await lost(world, job_id, 1)
    has(world, 4)
    await world.rounds(2)
    assert (await world.attempt(f"{job_id}-2")).accelerators == 4


async def test_one_that_had_fewer_waits_for_no_more_than_these(world: World):
    has(world, 3)
    job_id = await world.start(**elastic())
    await lost(world, job_id, 1)
    assert (await world.attempt(f"{job_id}-2")).accelerators == 3


async def test_it_never_goes_below_its_least(world: World):
    job_id = await world.start(**elastic(3))
    has(world, 2)
    await lost(world, job_id, 1)
    await waited(world, job_id, 10 * ELASTIC_PATIENCE_S)
    await world.rounds(2)
    waiting = await world.job(job_id)
    assert (waiting.state, waiting.reason, waiting.attempts_made) == ("RECOVERING", "CLUSTER_TOO_SMALL", 1)


async def test_it_saves_and_grows_when_accelerators_are_free_again(world: World):
    other = await world.start(**ONE)
    job_id = await world.start(**elastic())
    await trained(world, job_id, 1, step=100, step_s=1.0, start_s=20.0)
    await world.rounds(2)
    assert (await world.attempt(f"{job_id}-1")).end_asked_at is None, "nothing is free"
    await world.report(f"{other}-1", 60, state=AttemptState.SUCCEEDED)
    await world.rounds(2)
    assert "goes on with 4 accelerators, as 1 more than its 3 are free" in (await world.job(job_id)).message
    assert await world.report(f"{job_id}-1", 11, checkpoint=(101, "/there/101")) == "stop"
    await world.report(f"{job_id}-1", 12, state=AttemptState.FAILED, reason=Reason.PREEMPTED, message=SAVED)
    world.cluster.states[f"{job_id}-1"] = RayJob(RayState.FAILED)
    await world.rounds(2)
    assert (await world.attempt(f"{job_id}-2")).accelerators == 4
    await world.report(f"{job_id}-2", 1, state=AttemptState.RUNNING)
    await trained(world, job_id, 2, step=102, step_s=0.8, start_s=20.0)
    await world.rounds(2)
    assert (await world.attempt(f"{job_id}-2")).end_asked_at is None, "it has all that it may have"


async def test_a_job_that_grows_or_is_given_other_meshes_uses_up_no_retry(world: World):
    """Nor does it pause: nothing failed."""
    has(world, 2)
    job_id = await world.start(**elastic(), retry={"infrastructure": 0, "user": 0, "preemption": 1})
    for number, accelerators in enumerate((3, 4), 1):
        await trained(world, job_id, number, step=100 * number, step_s=1.0, start_s=20.0)
        has(world, accelerators)
        await world.rounds(2)
        assert (await world.attempt(f"{job_id}-{number}")).end_asked_for == "RESIZED"
        await ended(world, job_id, number)
        attempt = await world.attempt(f"{job_id}-{number + 1}")
        assert attempt.accelerators == accelerators
        await world.report(attempt.id, 1, state=AttemptState.RUNNING)
    assert (await world.attempt(f"{job_id}-1")).reason == "RESIZED"
    await changed(world, job_id, 2)
    await ended(world, job_id, 3)
    assert (await world.attempt(f"{job_id}-4")).accelerators == 2
    await world.report(f"{job_id}-4", 1, state=AttemptState.FAILED, reason=Reason.PREEMPTED, message=SAVED)
    assert "preemption retry 1 of 1" in (await world.job(job_id)).message, "what others need does count"


async def test_no_job_grows_while_another_is_checked_before_it_may_start(world: World, monkeypatch):
    has(world, 3)
    job_id = await world.start(**elastic())
    await trained(world, job_id, 1, step=100, step_s=1.0, start_s=20.0)
    has(world, 4)
    beside = await world.submit(**ONE)
    checks = SimpleNamespace(
        unchecked=lambda *_: [], held=lambda *_: {beside}, look=AsyncMock(), apply_answers=AsyncMock()
    )
    monkeypatch.setattr(world.orchestrator, "_checks", checks)
    await world.rounds(2)
    assert (await world.attempt(f"{job_id}-1")).end_asked_at is None
    checks.held = lambda *_: set()
    await world.rounds(2)
    assert (await world.attempt(f"{beside}-1")).accelerators == 1


@pytest.mark.parametrize(
    ("step", "step_s", "start_s", "grows"),
    [
        (100, 1.0, 112.0, True),  # 900 s left, of which a quarter is saved
        (100, 1.0, 113.0, False),
        (919, 1.0, 2.0, True),  # a start counts as 10 s at least
        (921, 1.0, 2.0, False),
    ],
)
async def test_it_grows_where_that_saves_twice_the_time_of_a_start(
    world: World,
    step: int,
    step_s: float,
    start_s: float,
    grows: bool,
):
    has(world, 3)
    job_id = await world.start(**elastic())
    await trained(world, job_id, 1, step=step, step_s=step_s, start_s=start_s)
    has(world, 4)
    await world.rounds(2)
    assert ((await world.attempt(f"{job_id}-1")).end_asked_at is not None) == grows


async def test_what_no_plan_fits_is_not_tried_again_with_as_few(world: World):
    """Fewer accelerators have less memory: that ends the attempt, not the job."""
    has(world, 2)
    job_id = await world.start(**elastic())
    refused = {
        "state": AttemptState.FAILED,
        "reason": Reason.PLAN_INFEASIBLE,
        "message": "m0 needs 9 GB of 8",
    }
    await world.report(f"{job_id}-1", 2, **refused)
    world.cluster.states[f"{job_id}-1"] = RayJob(RayState.FAILED)
    job = await world.job(job_id)
    assert (job.state, job.message) == (
        "RECOVERING",
        "m0 needs 9 GB of 8; goes on with 3 accelerators or more",
    )
    await world.rounds(2)
    assert (await world.job(job_id)).attempts_made == 1
    has(world, 4)
    await world.rounds(2)
    assert (await world.attempt(f"{job_id}-2")).accelerators == 4
    await world.report(f"{job_id}-2", 1, **refused)
    assert (await world.job(job_id)).state == "FAILED", "it can have no more"


async def test_one_that_gives_way_soon_goes_on_with_what_is_left(world: World):
    job_id = await world.start(**elastic())
    await world.submit(**ONE, priority=5)
    await world.rounds()
    assert (await world.attempt(f"{job_id}-1")).end_asked_for == "PREEMPTED"
    await world.report(f"{job_id}-1", 2, checkpoint=(7, "/there/7"))
    await world.report(f"{job_id}-1", 3, state=AttemptState.FAILED, reason=Reason.PREEMPTED, message=SAVED)
    world.cluster.states[f"{job_id}-1"] = RayJob(RayState.FAILED)
    await world.rounds(2)
    assert (await world.job(job_id)).state == "RECOVERING"
    await waited(world, job_id, 10)
    await world.rounds(2)
    assert (await world.attempt(f"{job_id}-2")).accelerators == 3


async def test_no_job_of_one_size_is_asked_to_grow(world: World):
    job_id = await world.start(**ONE)
    await trained(world, job_id, 1, step=1, step_s=100.0, start_s=1.0)
    await world.rounds(2)
    assert (await world.attempt(f"{job_id}-1")).end_asked_at is None


async def changed(world: World, job_id: str, meshes: int | dict) -> None:
    """As the API has it."""
    service = SimpleNamespace(database=world.database, settings=world.settings, wake=lambda: None)
    await change_job(service, job_id, OPEN_ACCESS_PRINCIPAL, JobChange.model_validate({"meshes": meshes}))


async def test_a_job_that_trains_saves_and_goes_on_with_the_meshes_that_it_is_given(world: World):
    job_id = await world.start(checkpoint={"uri": "/there"})
    await changed(world, job_id, {"min": 3, "max": 4})
    assert await world.report(f"{job_id}-1", 2) == "continue", "four are among them"
    await changed(world, job_id, 3)
    assert await world.report(f"{job_id}-1", 3, checkpoint=(7, "/there/7")) == "stop"
    await world.report(f"{job_id}-1", 4, state=AttemptState.FAILED, reason=Reason.PREEMPTED, message=SAVED)
    world.cluster.states[f"{job_id}-1"] = RayJob(RayState.FAILED)
    await world.rounds(2)
    assert (await world.attempt(f"{job_id}-2")).accelerators == 3
    changes = [line for line in await told(world, job_id) if line.startswith("changed")]
    assert changes == ["changed meshes 4 become 3 to 4", "changed meshes 3 to 4 become 3"]


async def test_a_job_that_waits_starts_with_the_meshes_that_it_is_given(world: World):
    await world.start(**ONE)
    job_id = await world.submit(checkpoint={"uri": "/there"})
    await world.rounds(2)
    assert (await world.job(job_id)).state == "QUEUED"
    await changed(world, job_id, {"min": 2, "max": 4})
    await changed(world, job_id, {"min": 2, "max": 4})
    await world.rounds(2)
    assert (await world.attempt(f"{job_id}-1")).accelerators == 3
    assert len([line for line in await told(world, job_id) if line.startswith("changed")]) == 1


@pytest.mark.parametrize(
    ("changes", "meshes", "status", "said"),
    [
        ({}, 3, 409, "has no checkpoint.uri"),
        ({"checkpoint": {"uri": "/there"}}, 5, 422, "resources.meshes 5 is more than pipeline.stages 4"),
        ({"checkpoint": {"uri": "/there"}}, {"min": 3, "max": 2}, 422, "meshes.min 3 is above meshes.max 2"),
    ],
)
async def test_meshes_that_a_job_cannot_have_are_refused(world: World, changes, meshes, status, said):
    job_id = await world.start(**changes)
    with pytest.raises(ProblemError, match=said) as refused:
        await changed(world, job_id, meshes)
    assert refused.value.status == status
    assert (await world.job(job_id)).accelerators == 4
    assert await world.report(f"{job_id}-1", 2) == "continue"


async def test_a_job_that_has_ended_has_the_meshes_that_it_had(world: World):
    job_id = await world.start()
    await world.report(f"{job_id}-1", 2, state=AttemptState.SUCCEEDED)
    with pytest.raises(ProblemError, match="is SUCCEEDED: submit it anew"):
        await changed(world, job_id, 3)


async def test_meshes_that_differ_in_size_are_not_counted_anew(world: World):
    unlike = {
        "resources": {"meshes": [{"workers": 2}, {"workers": 1}], "device": "cpu"},
        "pipeline": {"stages": 2},
    }
    job_id = await world.submit(**unlike)
    with pytest.raises(ProblemError, match="differ in size"):
        await changed(world, job_id, 3)
