"""The request for a plan: the slowest profile of each kind of mesh, as the control plane reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType

import pytest

from service.schemas.drivers import PlanRequest
from tests.worker.driver.fake_gang import SimpleGang
from tests.worker.driver.test_planning import JOB
from worker.benchmark.links import network_spec
from worker.benchmark.plan_request import plan_request
from worker.contract.costs import EngineCosts, UpdateCosts
from worker.contract.job import Bucket, Lengths
from worker.contract.profile import (
    CollectiveCost,
    LayerCost,
    LayerEdge,
    LayerProfile,
    MeshCollectiveCosts,
    OptimizerState,
)
from worker.driver.benchmarks import GangMeasurements
from worker.driver.limits import Limits

KINDS = ((2, 2), (2, 1))
COUNT = JOB.training.microbatches


def _profile(seconds: float) -> LayerProfile:
    sums = (("forward_s", "reduce", 1, 0),)
    layer = LayerCost("l0", seconds, seconds, seconds, 10, 0, 4, sums=sums)
    return LayerProfile((layer,), (), "cpu", "", {})


class Known(GangMeasurements):
    """Of a gang whose layers are measured, the rest given."""

    connection_bytes = 0
    data_tells_lengths = True
    of_buckets = MappingProxyType({Bucket(64, 2): "a", Bucket(128, 1): "c"})

    def memory_bytes(self):
        return {"m0": 100, "m1": 200}

    def optimizer_state(self):
        return OptimizerState(2.0, 4)

    def profile(self, microbatches, bucket=None):
        return self.profiles["b" if bucket is None else self.of_buckets[bucket]]

    def smaller_buckets(self):
        return list(self.of_buckets)

    def tells_lengths(self):
        return self.data_tells_lengths

    def network(self, *, loops, skips):
        return network_spec([], [], {"m0": "n", "m1": "n"}, loops=loops, skips=skips)

    def collectives(self, network):
        return MeshCollectiveCosts(tensor=CollectiveCost((0.5, 1e9)), connection_bytes=self.connection_bytes)

    def update_costs(self):
        return UpdateCosts()

    def engine_costs(self):
        return EngineCosts(0.25, self.connection_bytes)

    def workers(self):
        return [{"mesh": "m0", "worker": 0, "node": "n", "device": "cpu", "cores": None}]


def known(kinds) -> tuple:
    """A job with a mesh of each of `kinds`, and its measurements."""
    sizes, tensors = zip(*kinds, strict=True)
    resources = replace(JOB.resources, meshes=len(kinds), workers=sizes, tensors=tensors)
    job = replace(JOB, resources=resources)
    made = Known(job, SimpleGang(), control=None, reporter=None, device="cpu", limits=Limits())
    made.profiles = {"a": _profile(1.0), "b": _profile(3.0), "c": _profile(2.0)}
    made.keys = [{COUNT: key} for key in "ccab"]
    return job, made


def test_each_kind_of_mesh_has_the_profile_of_its_slowest_worker():
    """Kinds are the workers of a mesh and its tensor-parallel size."""
    request = plan_request(*known(KINDS))
    read = PlanRequest.model_validate_json(json.dumps(request))
    assert [
        (one.microbatches, one.workers, one.tensor, one.profile["layers"][0]["forward_s"])
        for one in read.mesh_profiles
    ] == [(COUNT, 2, 1, 3.5), (COUNT, 2, 2, 2.5)]
    assert request["update"]["tensor"] == {"m0": 2}
    assert request["memory"] == [{"mesh": "m0", "memory_bytes": 100}, {"mesh": "m1", "memory_bytes": 200}]


def test_what_connections_will_hold_is_taken_from_what_is_free_and_not_from_what_the_job_sets():
    job, measurements = known(KINDS)
    measurements.connection_bytes = 30

    def limits(job):
        return [mesh["memory_bytes"] for mesh in plan_request(job, measurements)["memory"]]

    assert limits(job) == [100 - 60, 200 - 60]
    assert limits(replace(job, resources=replace(job.resources, memory_per_worker=100))) == [100, 200]
    measurements.connection_bytes = 60
    assert limits(job) == [1, 200 - 120], "not one that is none"


def test_a_uniform_job_needs_no_profiles_of_its_meshes():
    job, measurements = known(KINDS)
    job = replace(job, resources=replace(job.resources, workers=None, tensors=None))
    request = plan_request(job, measurements)
    assert "mesh_profiles" not in request
    assert request["microbatches"] == COUNT and request["profile"]["layers"][0]["forward_s"] == pytest.approx(
        3.5
    )


def test_shorter_microbatches_are_measured_where_single_steps_are_planned_by_their_lengths():
    job, measurements = known(KINDS)
    job = replace(job, resources=replace(job.resources, workers=None, tensors=None))
    planned = replace(job, data=replace(job.data, lengths=Lengths()))
    read = PlanRequest.model_validate_json(json.dumps(plan_request(planned, measurements)))
    assert [
        (one.microbatches, one.length, one.rows, one.profile["layers"][0]["forward_s"])
        for one in read.length_profiles
    ] == [(COUNT, 64, 2, 1.0), (COUNT, 128, 1, 2.0)]
    for other in (
        job,
        replace(planned, pipeline=replace(job.pipeline, schedule="1f1b")),
        replace(planned, pipeline=replace(job.pipeline, replan="off")),
        replace(planned, resources=replace(job.resources, meshes=1)),
    ):
        assert "length_profiles" not in plan_request(other, measurements)
    measurements.data_tells_lengths = False
    assert plan_request(planned, measurements)["length_profiles"] == []


def bytes_of(request):
    ((layer, edge),) = [(one["layers"][0], one["edges"][0]) for one in [request["profile"]]]
    return layer["activation_bytes"], layer["weight_stash_bytes"], edge["bytes"]


def test_the_plan_has_room_for_the_bytes_of_every_bucket_also_where_no_single_step_is_planned():
    """What has no length needs more bytes where there are more rows."""
    job, measurements = known(KINDS)
    resources = replace(job.resources, workers=None, tensors=None)
    job = replace(job, resources=resources, data=replace(job.data, lengths=Lengths()))
    job = replace(job, pipeline=replace(job.pipeline, schedule="1f1b"))
    edge = LayerEdge(0, 0, "x", 7, True)
    made = {name: replace(one, edges=(edge,)) for name, one in measurements.profiles.items()}
    layer = replace(made["a"].layers[0], activation_bytes=50, weight_stash_bytes=3)
    made["a"] = replace(made["a"], layers=(layer,), edges=(replace(edge, bytes=90),))
    measurements.profiles = made
    measurements.data_tells_lengths = False
    rows = job.training.global_batch // COUNT
    measurements.of_buckets = {Bucket(64, rows + 1): "a"}
    assert bytes_of(plan_request(job, measurements)) == (50, 3, 90)
    measurements.of_buckets = {Bucket(64, rows): "a"}
    assert bytes_of(plan_request(job, measurements)) == (10, 0, 7), "it has fewer tokens, and no more rows"
