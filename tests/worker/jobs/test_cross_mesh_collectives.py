"""What sums between the workers of a mesh take: measured in the groups in which they train, and what plans make of it."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.worker.actor.test_actor import job
from tests.worker.driver.fake_gang import FakeActor, SimpleGang
from tests.worker.jobs.test_tensor_parallel_zero1 import BOTH, on
from worker.benchmark.plan_request import update_with_collectives
from worker.contract.costs import LinearCost, UpdateCosts
from worker.contract.job import Job
from worker.contract.profile import CollectiveCost, MeshCollectiveCosts, slowest_collective_cost
from worker.driver.benchmarks import measure_collective_costs
from worker.tasks.profile import LocalMeasurements
from worker.transport.rendezvous import host_store
from worker.verify.local_gang import prepare_workers

REDUCE, SCATTER, GATHER = (1e-3, 1e9), (2e-3, 2e9), (3e-3, 4e9)


@pytest.mark.parametrize(
    ("layout", "data", "tensor"),
    [(BOTH, True, True), ((1, 2, "none"), False, True), ((2, 1, "none"), True, False)],
)
def test_workers_measure_in_the_groups_in_which_they_train(layout, data, tensor):
    read = Job.from_json(on([layout], job()))
    workers = prepare_workers(read)
    store = host_store("127.0.0.1")
    found = [None] * len(workers)

    def measure(index, worker):
        where = {"store": ("127.0.0.1", store.port), "host": "127.0.0.1", "connect_s": 60.0}
        found[index] = worker.measure_collectives(**where)

    threads = [threading.Thread(target=measure, args=item) for item in enumerate(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for one in found:
        assert (one.data is not None, one.tensor is not None) == (data, tensor)
        for costs, halves in ((one.data, layout[2] == "optimizer"), (one.tensor, True)):
            if costs is not None:
                assert (costs.scatter is not None, costs.gather is not None) == (halves, halves)
                assert all(latency > 0 and speed > 0 for latency, speed in filter(None, vars(costs).values()))


def test_the_slowest_mesh_counts_and_what_was_not_measured_is_a_sum():
    one = CollectiveCost(REDUCE, SCATTER, GATHER)
    other = CollectiveCost((5e-3, 5e8), (1e-3, 1e9), (1e-3, 9e9))
    assert slowest_collective_cost([one, None, other]) == CollectiveCost(
        (5e-3, 5e8), (2e-3, 1e9), (3e-3, 4e9)
    )
    assert slowest_collective_cost([None]) is None
    assert one.seconds("gather", 3, 8_000) == pytest.approx(3 * 3e-3 + 8_000 / 4e9)
    assert CollectiveCost(REDUCE).seconds("gather", 3, 8_000) == pytest.approx(3 * 1e-3 + 8_000 / 1e9)


def test_a_plan_takes_gradients_from_one_and_matrices_from_the_other(monkeypatch):
    """The driver asks every mesh of several workers; only those with other samples sum gradients."""
    monkeypatch.setattr("worker.driver.benchmarks.own_node_address", lambda: "127.0.0.1")
    monkeypatch.setattr("worker.driver.benchmarks.serve_rendezvous", lambda *_: (None, ("127.0.0.1", 1)))
    read = Job.from_json(on([BOTH, BOTH], job()))
    meshes = [SimpleNamespace(name=f"m{k}", workers=[None] * 4) for k in range(2)]
    addresses = [SimpleNamespace(mesh=f"m{k // 4}", node="127.0.0.1") for k in range(8)]
    answer = MeshCollectiveCosts(
        CollectiveCost(REDUCE, SCATTER, GATHER), CollectiveCost((9e-3, 9e9), (1.0, 1.0), (8e-3, 8e9)), 500
    )
    worker = FakeActor(measure_collectives=lambda **_: answer)
    gang = SimpleGang(meshes=meshes, addresses=addresses, workers=[worker] * 8)
    gang.workers_sharing_memory = lambda address: 2
    events = []
    reporter = SimpleNamespace(event=lambda *said: events.append(said))
    limits = SimpleNamespace(connect_s=1.0)
    sums = measure_collective_costs(read, gang, reporter=reporter, limits=limits)
    assert sums == replace(answer, connection_bytes=250), "two workers share a GPU"
    costs = update_with_collectives(read, UpdateCosts(step=LinearCost(0.0, 0.0, 1e-6)), sums)
    assert costs.shared == {"m0": 2, "m1": 2}, "two of four have the same part of a matrix"
    assert costs.collective_cost("m0") == LinearCost(2e-3, 0.0, 1 / 2e9)
    assert costs.step_cost("m0") == LinearCost(3e-3, 0.0, 1e-6 / 2 + 1 / 4e9)
    assert len(events) == 2


def test_without_a_gang_each_mesh_is_taken_to_sum_what_its_own_workers_would():
    """Two of m0's four have the same part of a matrix, both of m1 all of it; those of m2 have the same samples."""
    read = Job.from_json(on([(2, 2, "optimizer"), (2, 1, "optimizer"), (1, 2, "optimizer")], job(stages=3)))
    network = {"latency_s": 1e-3, "bandwidth_bytes_per_s": 1e9}
    measurements = LocalMeasurements(read, "cpu")
    costs = update_with_collectives(read, UpdateCosts(), measurements.collectives(network))
    assert [note.partition(" are ")[0] for note in measurements.notes[1:]] == [
        "sums over the workers of a tensor-parallel group",
        "sums of gradients over the workers of a mesh",
    ]
    assert (costs.shared, costs.alone) == ({"m0": 2, "m1": 2}, ("m2",))
    assert costs.collective_cost("m2") is None
    assert costs.collective_cost("m0") == costs.collective_cost("m1") == LinearCost(1e-3, 0.0, 1 / 2e9)
