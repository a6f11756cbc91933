"""What meshes sum in a step is planned as what it is: how often, and of how many bytes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.worker.actor.test_actor import job
from tests.worker.jobs.test_cross_mesh_collectives import GATHER, REDUCE, SCATTER
from tests.worker.jobs.test_tensor_parallel import on
from tests.worker.workers import Workers
from worker.benchmark import optimizer_step
from worker.benchmark.layer_costs import measure_layers
from worker.benchmark.optimizer_step import measure_update
from worker.benchmark.plan_request import update_with_collectives
from worker.contract.costs import LinearCost, UpdateCosts, mesh_update
from worker.contract.job import Job, LossScaling
from worker.contract.profile import CollectiveCost, LayerCost, LayerProfile, MeshCollectiveCosts
from worker.engine.optim.reduce_and_step import ModelUpdate
from worker.model.export import trace
from worker.parallel import sync_batch_norm
from worker.parallel.tensor.graph_collectives import TensorGroup
from worker.parallel.tensor.placement import Split
from worker.parallel.tensor.shards import TensorParallelShards
from worker.tasks.profile import LocalMeasurements

MIB = 1 << 20


class Counted:
    """Stands for the group: every sum as if the other had the same."""

    def __init__(self):
        self.sizes = []

    def all_reduce(self, tensor):
        self.sizes.append(tensor.nbytes)
        tensor.mul_(2)


def of_layers(sizes, split=(), **more):
    layers = (LayerCost("l0", 1.0, 1.0, 1.0, 1, 0, 0, tuple(sizes)),)
    return LayerProfile(layers, (), "cpu", "[1]", sizes, split_parameters=frozenset(split), **more)


def test_a_plan_counts_the_sums_by_which_workers_that_share_matrices_agree():
    """As many as the engine makes, of as many bytes; with the norm's one more. Halves where states are shared too."""
    sizes = {"a": 10 * MIB, "split": 30 * MIB, "b": 12 * MIB, "c": 8 * MIB, "d": 40 * MIB, "e": 4}
    between = Counted()
    group = TensorGroup(0, 2, between)
    share = TensorParallelShards(group, {"split": Split(0, (2,), frozenset())})
    gradients = {name: torch.randn(size // 4) for name, size in sizes.items()}
    before = {name: one.clone() for name, one in gradients.items()}
    share.average_replicated(gradients)
    share.sum(torch.zeros(()))
    assert all(torch.equal(gradients[name], one) for name, one in before.items())
    *agreed, norm = between.sizes
    assert agreed == [22 * MIB, 8 * MIB, 40 * MIB, 4] and norm == 4
    profile = of_layers(sizes, split=["split"])
    bare = UpdateCosts(reduce=LinearCost(0.5))
    costs = bare.with_tensor_parallel({"m0": 2}, (0.01, 100 * MIB))
    planned = mesh_update("m0", [0], profile, costs).reduce_s
    assert planned == pytest.approx(0.5 + len(between.sizes) * 0.01 + sum(agreed) / (100 * MIB))
    assert mesh_update("m1", [0], profile, costs) == mesh_update("m1", [0], profile, bare), "not of that mesh"
    halves = UpdateCosts(shared={"m0": 2}).with_tensor_parallel({"m0": 2}, (0.0, 100 * MIB))
    assert mesh_update("m0", [0], profile, halves).reduce_s == pytest.approx(sum(agreed) / (200 * MIB))
    assert UpdateCosts.from_json(costs.to_json()) == costs
    assert LayerProfile.from_json(profile.to_json()) == profile


def test_frozen_parameters_are_not_agreed_on():
    profile = of_layers({"a": MIB, "b": MIB}, frozen_parameters=("b",))
    costs = UpdateCosts().with_tensor_parallel({"m0": 2}, (0.0, MIB))
    assert mesh_update("m0", [0], profile, costs).reduce_s == pytest.approx(1.0)


def test_a_driver_and_a_profiler_tell_which_meshes_agree_and_what_that_takes():
    read = Job.from_json(on([(1, 2), (2, 1)], job()))
    sums = MeshCollectiveCosts(CollectiveCost(REDUCE, SCATTER, GATHER), CollectiveCost((7e-3, 7e9)))
    costs = update_with_collectives(read, UpdateCosts(), sums)
    assert (costs.agree, costs.tensor) == (LinearCost(7e-3, 0.0, 1 / 7e9), {"m0": 2})
    assert costs.alone == ("m0",)
    only = update_with_collectives(read, UpdateCosts(), MeshCollectiveCosts(tensor=sums.tensor))
    assert only.tensor == {"m0": 2}, "where nothing else is summed"
    network = {"latency_s": 1e-3, "bandwidth_bytes_per_s": 1e9}
    assumed = update_with_collectives(
        read, UpdateCosts(), LocalMeasurements(read, "cpu").collectives(network)
    )
    assert (assumed.agree, assumed.tensor) == (LinearCost(1e-3, 0.0, 1 / 1e9), {"m0": 2})


@pytest.mark.slow
def test_copies_of_what_is_whole_stay_one_on_processors_that_round_otherwise(monkeypatch):
    """As on CPUs of two kinds: a worker's own gradients are off by a little."""
    norm = ModelUpdate._global_norm

    def rounded(update, losses):
        for parameter in update.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(1 + 1e-6 * update.collectives.worker)
        return norm(update, losses)

    monkeypatch.setattr(ModelUpdate, "_global_norm", rounded)
    with Workers(on([(1, 2)], job(stages=1))) as run:
        run.losses(range(1, 3))
        first, second = (
            {name: p for name, p in w.engine.updated.items() if name not in w.tensor_shards._splits}
            for w in run.workers
        )
        assert len(first) > 3
        assert [name for name, one in first.items() if not torch.equal(one, second[name])] == []
        (update,) = run.planned["update"]
        assert update["mesh"] == "m0"


def normed():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6),
        nn.Flatten(), nn.Linear(6 * 16, 4),
    )  # fmt: skip


def test_a_profile_counts_the_sums_of_batch_norms_as_they_run():
    torch.manual_seed(0)
    x, target = torch.randn(5, 3, 6, 6), torch.randint(4, (5,))
    traced = trace(normed(), (x,))
    profile = measure_layers(traced, nn.functional.cross_entropy, target, repeats=1)
    counted = {}
    for layer in profile.layers:
        for name, count, size in layer.norm_sums:
            of = counted.setdefault(name, [0, 0])
            of[0], of[1] = of[0] + count, of[1] + size
    sums = []
    builder = traced.builder([0])
    stage = copy.deepcopy(builder.stage(0))
    for part in stage.modules():
        if isinstance(part, torch.fx.GraphModule):
            sync_batch_norm._replace_batch_norms(part, lambda tensor: sums.append(tensor.nbytes), 1)
    stage.train()
    (made,) = stage(x)
    forward = [len(sums), sum(sums)]
    nn.functional.cross_entropy(made, target).backward()
    backward = [len(sums) - forward[0], sum(sums) - forward[1]]
    assert forward == [4, 2 * 14 * 4] and backward == [2, 2 * 14 * 4]
    assert counted == {"forward_s": forward, "backward_s": backward, "backward_input_s": backward}
    longer = profile.with_sync_batch_norm_sums(CollectiveCost((1.0, 1e3)))
    assert sum(one.forward_s for one in longer.layers) == pytest.approx(
        sum(one.forward_s for one in profile.layers) + 4 + 0.112
    )
    assert sum(one.whole_backward_s for one in longer.layers) == pytest.approx(
        sum(one.whole_backward_s for one in profile.layers) + 2 + 0.112
    )
    assert LayerProfile.from_json(profile.to_json()) == profile


def test_sums_within_a_backward_of_one_piece_come_on_top_of_its_parts():
    layer = LayerCost("l", 1.0, 2.0, 3.0, 1, 0, 0, sums=(("backward_s", "reduce", 1, 0),))
    assert layer.with_tensor_parallel_sums(CollectiveCost((0.5, 1.0))).whole_backward_s == 5.5


def test_sums_within_a_forward_come_again_where_it_is_recomputed_selectively():
    sums = (("forward_s", "reduce", 1, 0),)
    layer = LayerCost("l", 1.0, 2.0, 3.0, 1, 0, 0, sums=sums, selective_s=0.25)
    longer = layer.with_tensor_parallel_sums(CollectiveCost((0.5, 1.0)))
    assert (longer.forward_s, longer.selective_s) == (1.5, 0.75)
    wholly = replace(layer, selective_s=None).with_tensor_parallel_sums(CollectiveCost((0.5, 1.0)))
    assert (wholly.forward_s, wholly.selective_s) == (1.5, None)


def test_fp16_is_measured_with_what_scales_its_gradients_back(monkeypatch):
    seen = []
    reduce = ModelUpdate.reduce
    monkeypatch.setattr(
        ModelUpdate, "reduce", lambda update, losses: seen.append(update.scaler) or reduce(update, losses)
    )
    measure_update(torch.optim.AdamW, "cpu", 1.0, LossScaling())
    assert seen and all(scaler is not None and float(scaler.found_inf) == 0 for scaler in seen)
    seen.clear()
    measure_update(torch.optim.AdamW, "cpu", 1.0)
    assert seen and all(scaler is None for scaler in seen)


def test_an_update_is_measured_with_its_norm_on_the_device(monkeypatch):
    """A sum of a GPU's norms is none of the host's."""
    devices = []

    class Stop(Exception):
        pass

    def made(stages, collectives, settings, **_):
        devices.append(str(settings.device))
        raise Stop

    monkeypatch.setattr(optimizer_step, "ModelUpdate", made)
    for device in ("cpu", "meta"):
        with pytest.raises(Stop):
            optimizer_step._update_seconds(torch.optim.SGD, device, None, None, tensors=1, width=2)
    assert devices == ["cpu", "meta"]
