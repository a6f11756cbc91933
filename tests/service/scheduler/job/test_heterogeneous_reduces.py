"""Plans of jobs whose meshes share matrices unlike, and the optimizer's state each as it says: their sums and memory."""

from __future__ import annotations

import pytest

from service.scheduler.job.plan_job import JobCosts, job_plan_json, plan_job
from tests.service.scheduler.job.test_heterogeneous_meshes import _costs, _job
from worker.contract.costs import LinearCost, UpdateCosts
from worker.contract.job import Job

SIZES, TENSORS = (4, 2), (2, 1)
"""DESIGN section 12: data 2 of both, tensor 2 of the first."""
BYTES = 1 << 20
SUM, SCATTER, GATHER = (1e-3, 1e9), (2e-3, 2e9), (3e-3, 4e9)


def planned(shard):
    """Of four layers of a matrix each, the first on m0 and three on m1; with what a driver measured."""
    spec = _job(SIZES, TENSORS)
    spec["resources"]["shard"] = shard
    costs = _costs(SIZES, tensors=TENSORS)
    for one in costs["mesh_profiles"]:
        sizes = one["profile"]["parameter_sizes"]
        one["profile"]["parameter_sizes"] = dict.fromkeys(sizes, BYTES // one["tensor"])
    job = Job.from_json(spec)
    update = UpdateCosts(norm=LinearCost(), step=LinearCost(1e-4, 0.0, 1e-9))
    if job.sharded:
        update = update.with_zero1(dict.fromkeys(job.sharded, 2), SCATTER, GATHER)
    costs["update"] = update.with_all_reduce(*SUM).to_json()
    costs["optimizer"] = {"bytes_per_parameter_byte": 2.0, "bytes_per_tensor": 0}
    return job_plan_json(plan_job(job, JobCosts.from_json(costs, job), budget_s=0.1))


@pytest.mark.parametrize(
    ("shard", "sums", "states", "steps"),
    [
        ("none", (SUM, SUM), (1, 1), (0.0, 0.0)),
        (["none", "optimizer"], (SUM, SCATTER), (1, 2), (0.0, 3e-3 + 3 * BYTES / 4e9)),
        (["optimizer", "none"], (SCATTER, SUM), (2, 1), (3e-3 + BYTES / 2 / 4e9, 0.0)),
        ("optimizer", (SCATTER, SCATTER), (2, 2), (3e-3 + BYTES / 2 / 4e9, 3e-3 + 3 * BYTES / 4e9)),
    ],
)
def test_each_mesh_sums_and_keeps_its_own_part_in_its_own_way(shard, sums, states, steps):
    """Slots as long as a sum, or the first half of one, of what a worker of the mesh has; a part of the state where its
    workers share that; parameters gathered behind the update."""
    answer = planned(shard)
    held = (BYTES // 2, 3 * BYTES)
    for mesh, (latency_s, speed), size, parts, gathered_s in zip(
        ("m0", "m1"), sums, held, states, steps, strict=True
    ):
        slots = [s for s in answer["plan"]["slots"] if s["mesh"] == mesh and s["lane"] == "reduce"]
        assert len(slots) == 1
        assert slots[0]["end_s"] - slots[0]["start_s"] == pytest.approx(latency_s + size / speed)
        (stage,) = [one for one in answer["spec"]["stages"] if one["mesh"] == mesh]
        assert stage["static_bytes"] == 2 * size + 2 * size // parts
        (update,) = [one for one in answer["update"] if one["mesh"] == mesh]
        assert update["step_s"] == pytest.approx(1e-4 + 1e-9 * size / parts + gathered_s)
