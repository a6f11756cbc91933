"""What meshes sum together behind their last backward: a part of the planned REDUCE, by the links between them."""

from __future__ import annotations

import pytest

from service.scheduler.job.network import cross_mesh_all_reduce_s
from service.scheduler.job.plan_job import JobCosts, plan_job
from service.scheduler.problem.spec import NetworkSpec
from tests.service.scheduler.job.test_reduces import MIB, job, job_costs

LINKS = NetworkSpec.model_validate(
    {
        "bandwidth_bytes_per_s": 1e9,
        "latency_s": 1e-3,
        "links": [
            {"source": "m0", "target": "m2", "bandwidth_bytes_per_s": 1e8, "latency_s": 5e-3},
        ],
    }
)
ONE = {"m0": 1, "m1": 1, "m2": 1}


def test_a_sum_takes_the_slowest_link_and_its_share_of_the_bytes():
    assert cross_mesh_all_reduce_s(LINKS, ["m0", "m1"], 0, ONE, uniform=True) == pytest.approx(2e-3)
    assert cross_mesh_all_reduce_s(LINKS, ["m0", "m1"], 10**9, ONE, uniform=True) == pytest.approx(2e-3 + 1.0)
    assert cross_mesh_all_reduce_s(LINKS, ["m0", "m1", "m2"], 0, ONE, uniform=True) == pytest.approx(4 * 5e-3)
    assert cross_mesh_all_reduce_s(LINKS, ["m0", "m2"], 10**8, ONE, uniform=True) == pytest.approx(
        2 * 5e-3 + 1.0
    )
    sizes = {"m0": 3, "m1": 1}
    assert cross_mesh_all_reduce_s(LINKS, ["m0", "m1"], 10**9, sizes, uniform=True) == pytest.approx(
        2e-3 + 1.0
    ), "in pairs"
    assert cross_mesh_all_reduce_s(LINKS, ["m0", "m1"], 10**9, sizes, uniform=False) == pytest.approx(
        4e-3 + 1.5
    ), "all four"
    unknown = NetworkSpec.model_validate({"latency_s": 1e-3})
    assert cross_mesh_all_reduce_s(unknown, ["m0", "m1"], 10**9, ONE, uniform=True) == pytest.approx(2e-3)


@pytest.mark.parametrize("sums", [True, False])
def test_tied_parameters_and_the_norm_are_planned_with_the_links_between_their_meshes(sums):
    """`tied` is on both meshes: planned as nothing but a sum inside each, a step was late by what the link takes."""
    quick, slow = (job_costs(sums=sums) for _ in range(2))
    quick["network"] = {"bandwidth_bytes_per_s": 1e15, "latency_s": 0.0}
    slow["network"] = {"bandwidth_bytes_per_s": 1 * MIB, "latency_s": 0.25}
    found = [plan_job(job(), JobCosts.from_json(costs, job()), budget_s=0.2) for costs in (quick, slow)]
    for before, after in zip(found[0].update, found[1].update, strict=True):
        # two sums (the norm, `tied`) of two latencies each, and 2 MiB over a link of 1 MiB a second
        assert after.reduce_s - before.reduce_s == pytest.approx(4 * 0.25 + 2.0, rel=1e-6)
        assert after.step_s == before.step_s
    tails = [one.step_s - one.plan.makespan_s for one in found]
    assert tails[1] - tails[0] >= 3.0 - 0.35, "the step is longer by it, but for buckets that end early"
