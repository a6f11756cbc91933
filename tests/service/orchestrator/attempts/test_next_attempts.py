"""What the next attempt of a job runs on, and whether there is one."""

from __future__ import annotations

import pytest

from service.orchestrator.ray.jobs_api import RayNode
from service.spec.states import AttemptState
from tests.service.orchestrator.test_loop import World, world
from worker.contract.reasons import Reason

__all__ = ["world"]


def offer(world: World, **resources: float) -> None:
    async def nodes() -> list[RayNode]:
        return [RayNode("a", "10.0.0.1", {"slotline_worker": 4.0, **resources})]

    world.cluster.nodes = nodes


async def lose(world: World, job_id: str, number: int, reason: Reason = Reason.WORKER_LOST, **last) -> str:
    """The attempt `number` fails, perhaps with something to tell before; the job's state afterwards."""
    attempt = f"{job_id}-{number}"
    await world.rounds(2)
    await world.report(attempt, 1, state=AttemptState.RUNNING)
    if last:
        await world.report(attempt, 2, **last)
    await world.report(attempt, 3, state=AttemptState.FAILED, reason=reason, message="x")
    return (await world.job(job_id)).state


async def test_a_job_that_began_on_gpus_waits_for_them_when_one_is_lost(world: World):
    offer(world, GPU=4.0)
    job_id = await world.submit()
    await lose(world, job_id, 1, checkpoint=(5, "/c/5"))
    assert (await world.attempt(f"{job_id}-1")).device == "cuda"
    offer(world, GPU=3.0)
    await world.rounds(2)
    job = await world.job(job_id)
    assert (job.state, job.attempts_made, job.reason) == ("RECOVERING", 1, Reason.CLUSTER_TOO_SMALL)
    assert "4 accelerators of GPU, the cluster has 3; it began on cuda" in job.message
    offer(world, GPU=4.0)
    await world.rounds(2)
    assert (await world.attempt(f"{job_id}-2")).device == "cuda"


async def test_a_job_that_began_on_processors_stays_there_when_gpus_come(world: World):
    offer(world)
    job_id = await world.submit()
    await lose(world, job_id, 1)
    offer(world, GPU=8.0)
    await world.rounds(2)
    assert (await world.attempt(f"{job_id}-2")).device == "cpu"


async def test_losses_before_a_newer_checkpoint_are_forgiven(world: World):
    job_id = await world.submit(retry={"infrastructure": 1})
    for number in range(1, 5):
        checkpoint = (10 * number, f"/c/{number}")
        assert await lose(world, job_id, number, checkpoint=checkpoint) == "RECOVERING", number
    assert await lose(world, job_id, 5) == "FAILED", "two losses since the last checkpoint"


@pytest.mark.parametrize("step", [10, 5])
async def test_a_checkpoint_that_is_not_newer_forgives_nothing(world: World, step: int):
    job_id = await world.submit(retry={"infrastructure": 1})
    assert await lose(world, job_id, 1, checkpoint=(10, "/c/10")) == "RECOVERING"
    assert await lose(world, job_id, 2, checkpoint=(step, "/c/again")) == "FAILED"


async def test_a_checkpoint_forgives_no_failure_of_the_users_own_code(world: World):
    job_id = await world.submit(retry={"user": 1})
    own = Reason.MODEL_BUILD_FAILED
    assert await lose(world, job_id, 1, own, checkpoint=(10, "/c/10")) == "RECOVERING"
    assert await lose(world, job_id, 2, own, checkpoint=(20, "/c/20")) == "FAILED"
