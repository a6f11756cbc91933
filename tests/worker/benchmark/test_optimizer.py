"""What REDUCE and STEP are measured to cost: found again where somebody takes known times of a clock of ours."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from worker.benchmark import optimizer_step
from worker.benchmark.optimizer_step import measure_all_reduce, measure_update
from worker.contract.costs import LinearCost, MeshUpdate, UpdateCosts, mesh_update
from worker.contract.failures import AttemptFailure
from worker.contract.profile import LayerCost, LayerProfile
from worker.contract.reasons import Reason


class Clock:
    """What a module sees of `time`: it goes on only while somebody says that he takes his time."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(optimizer_step, "time", clock := Clock())
    return clock


def test_a_step_is_measured_by_its_tensors_and_bytes(clock):
    """One takes 2 ms, 1 ms for each tensor, and 5 ns for each byte; the first two are slow, and one is held up."""
    held_up_s = {0: 5.0, 1: 5.0, 4: 3.0}

    class Slow(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            parameters = [p for group in self.param_groups for p in group["params"]]
            clock.sleep(2e-3 + 1e-3 * len(parameters) + 5e-9 * sum(p.nbytes for p in parameters))
            clock.sleep(held_up_s.get(self.steps, 0.0))
            self.steps += 1

    found = measure_update(lambda parameters: Slow(parameters, lr=0.1), "cpu", 1.0)
    assert found.step.per_tensor_s == pytest.approx(1e-3, rel=1e-3)  # each has 64 bytes
    assert found.step.per_byte_s == pytest.approx(5e-9)
    assert found.step.seconds(1000, 10**9) == pytest.approx(2e-3 + 1.0 + 5.0, rel=1e-3)
    assert found.reduce == LinearCost(0.0, 0.0, 0.0), "a step is no part of it"


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_real_optimizers_cost_more_for_more_parameters(make):
    found = measure_update(make, "cpu", None)
    assert 0 < found.step.seconds(4, 0) < found.step.seconds(400, 10**9) < 100
    assert 0 <= found.reduce.seconds(4, 0) < found.reduce.seconds(400, 10**9) < 100


def test_an_optimizer_that_raises_is_the_users():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("not today")

    with pytest.raises(AttemptFailure, match="not today") as caught:
        measure_update(lambda parameters: Broken(parameters, lr=0.1), "cpu", None)
    assert caught.value.reason is Reason.USER_CODE_RAISED


def test_sums_over_workers_are_measured_by_latency_and_bandwidth(clock):
    """Of a wire that sums 100 MB a second after 4 ms."""
    wire = SimpleNamespace(all_reduce=lambda group, tensor: clock.sleep(4e-3 + tensor.nbytes / 1e8))
    latency_s, bandwidth = measure_all_reduce(wire, "cpu", large_bytes=4 << 20)
    assert latency_s == pytest.approx(4e-3, rel=1e-4) and bandwidth == pytest.approx(1e8, rel=1e-4)
    reduced = UpdateCosts(reduce=LinearCost(1.0, 2.0, 3.0)).with_all_reduce(4.0, 0.5).reduce
    assert reduced == LinearCost(5.0, 2.0, 5.0)


def test_a_mesh_pays_for_each_of_its_trained_parameters_once():
    layers = tuple(
        LayerCost(f"l{i}", 1.0, 1.0, 1.0, 1, 0, 0, names) for i, names in enumerate(("ab", "bc", "d"))
    )
    sizes = {"a": 1, "b": 10, "c": 100, "d": 1000}
    profile = LayerProfile(layers, (), "cpu", "[1]", sizes, frozen_parameters=("c", "d"))
    costs = UpdateCosts(LinearCost(0.5, 1.0, 2.0), LinearCost(0.25, 3.0, 4.0))
    assert mesh_update("m0", [0, 1], profile, costs) == MeshUpdate("m0", 0.5 + 2 + 22, 0.25 + 6 + 44)
    assert mesh_update("m1", [2], profile, costs) == MeshUpdate("m1", 0.0, 0.0), "nothing of it is trained"
    assert UpdateCosts.from_json(costs.to_json()) == costs and UpdateCosts.from_json({}) == UpdateCosts()


def test_on_cuda_a_sum_is_timed_by_events_behind_one_that_brings_the_workers_together():
    said = []

    class Event:
        made = 0

        def __init__(self, enable_timing):
            assert enable_timing
            Event.made += 1
            self.name = f"event {Event.made}"

        def record(self):
            said.append(self.name)

        def synchronize(self):
            said.append(f"wait for {self.name}")

        def elapsed_time(self, other):
            return {("event 1", "event 2"): 250.0}[self.name, other.name]

    cuda = SimpleNamespace(Event=Event, synchronize=lambda: said.append("wait"))
    taken = optimizer_step._action_seconds(
        lambda: said.append("sum"), "cuda", before=lambda: said.append("meet"), cuda=cuda
    )
    assert taken == 0.25
    assert said == ["wait", "meet", "event 1", "sum", "event 2", "wait for event 2"]


def test_where_it_is_the_hosts_nothing_comes_before():
    said = []
    optimizer_step._action_seconds(lambda: said.append("sum"), "cpu", before=lambda: said.append("meet"))
    assert said == ["sum"]
