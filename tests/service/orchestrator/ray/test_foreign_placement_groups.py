"""Others use the same Ray: what they hold is waited for, with a reason, and costs a job none of its retries."""

from __future__ import annotations

from service.orchestrator.ray.clusters import ClusterWatcher
from service.orchestrator.ray.jobs_api import RayNode, ResourceUse
from service.spec.states import AttemptState
from tests.service.fake_cluster import FakeCluster
from tests.service.orchestrator.test_loop import World, world
from worker.contract.job import placement_group_name
from worker.contract.reasons import Cause, Reason

__all__ = ["world"]


async def test_accelerators_that_others_hold_are_waited_for_with_a_reason(world: World):
    world.cluster.others = [
        ResourceUse("", {"slotline_worker": 1.0}),
        ResourceUse("theirs", {"slotline_worker": 1.0, "CPU": 4}),
    ]
    small, large = await world.submit(pipeline={"stages": 2}), await world.submit()
    await world.rounds(2)
    assert (await world.job(small)).state == "STARTING"
    job = await world.job(large)
    assert (job.state, job.reason) == ("QUEUED", Reason.WAITS_FOR_ACCELERATORS)
    assert job.message == (
        f"waits for 4 accelerators of slotline_worker; 0 of 4 free (job {small} uses 2)"
        "; others than Slotline's running jobs hold 2"
    )
    await world.report(f"{small}-1", 1, state=AttemptState.SUCCEEDED)
    await world.rounds(2)
    assert (await world.job(large)).state == "QUEUED"
    world.cluster.others = []
    await world.rounds(2)
    assert (await world.job(large)).state == "STARTING"


async def test_what_our_own_attempts_hold_is_not_counted_twice(world: World):
    first = await world.start(pipeline={"stages": 2})
    world.cluster.others = [ResourceUse(placement_group_name(f"{first}-1"), {"slotline_worker": 2.0})]
    second = await world.submit(pipeline={"stages": 2})
    await world.rounds(2)
    assert (await world.job(second)).state == "STARTING"


async def test_an_attempt_that_is_over_and_holds_its_group_still_is_waited_for(world: World):
    job_id = await world.start()
    world.cluster.others = [ResourceUse(placement_group_name(f"{job_id}-1"), {"slotline_worker": 4.0})]
    await world.report(f"{job_id}-1", 2, state=AttemptState.FAILED, reason=Reason.WORKER_LOST, message="x")
    await world.rounds(2)
    assert (await world.job(job_id)).attempts_made == 1
    world.cluster.others = []
    await world.rounds(2)
    assert (await world.job(job_id)).attempts_made == 2


async def test_accelerators_that_were_taken_meanwhile_cost_no_retry_of_the_job(world: World):
    job_id = await world.submit(retry={"infrastructure": 0, "user": 0})
    for number in range(1, 6):
        await world.rounds(2)
        await world.report(
            f"{job_id}-{number}", 1, state=AttemptState.FAILED, reason=Reason.ACCELERATORS_TAKEN, message="x"
        )
        assert (await world.job(job_id)).state == "RECOVERING"
    assert Reason.ACCELERATORS_TAKEN.cause is Cause.PREEMPTION


async def test_a_part_of_a_gpu_is_counted_as_the_workers_that_it_could_serve():
    cluster = FakeCluster()

    async def nodes() -> list[RayNode]:
        return [RayNode("a", "10.0.0.1", {"GPU": 2.0})]

    cluster.nodes = nodes
    cluster.others = [
        ResourceUse("", {"GPU": 0.5}),
        ResourceUse("a", {"GPU": 0.3333}),
        ResourceUse("b", {"CPU": 9.0}),
    ]
    watcher = ClusterWatcher(cluster, refresh_s=600, workers_per_gpu=3)
    await watcher.refresh()
    capacity = watcher.capacity_without({}, ())
    assert capacity.others == {"cpu": 0, "cuda": 3} and capacity.total == {"cpu": 0, "cuda": 6}
