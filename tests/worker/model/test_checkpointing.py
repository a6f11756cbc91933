"""A model's own checkpoints: no gradient is lost, and the stages around them are recomputed."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from service.scheduler.job.cut import PipelineSetup
from service.scheduler.job.partition import partition
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import MeshSpec
from tests.worker.cuts import cut_evenly
from tests.worker.engine.engine_support import LocalPipeline, planned
from worker.benchmark.layer_costs import measure_layers
from worker.contract.profile import LayerProfile
from worker.model.export import trace

WIDTH = 6


class Block(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.first, self.second, self.way = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), way
        self.drop = nn.Dropout(0.3)

    def run(self, x):
        return x + self.drop(self.second(torch.relu_(self.first(x))))

    def forward(self, x):
        if self.way is None:
            return self.run(x)
        if self.way == "keywords":
            return checkpoint(self.run, x=x, use_reentrant=False)
        if self.way == "sequential":
            return x + checkpoint_sequential([self.first, self.second], 2, x, use_reentrant=True)
        if self.way == "frozen":
            with torch.no_grad():
                return checkpoint(self.run, x, use_reentrant=False)
        return checkpoint(self.run, x, use_reentrant=self.way == "reentrant")


class Model(nn.Module):
    """The second and third of four blocks are checkpointed."""

    def __init__(self, way):
        super().__init__()
        self.blocks = nn.ModuleList(Block(w) for w in (None, way, way, None))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@functools.cache
def made(way):
    torch.manual_seed(0)
    model = Model(way).double()
    draw = torch.Generator().manual_seed(1)
    batch = [(torch.randn(3, WIDTH, generator=draw, dtype=torch.float64),) for _ in range(4)]
    targets = [torch.randn(3, WIDTH, generator=draw, dtype=torch.float64) for _ in range(4)]
    return model, batch, targets


WAYS = ["reentrant", "not reentrant", "keywords", "sequential"]


@pytest.mark.parametrize("way", [*WAYS, None, "frozen"])
def test_the_layers_with_a_region_are_known(way):
    model, batch, _ = made(way)
    traced = trace(model, batch[0])
    assert traced.checkpointed == (frozenset() if way is None else {"blocks.1", "blocks.2"})
    profile = measure_layers(traced, functional.mse_loss, batch[0][0], repeats=1)
    assert LayerProfile.from_json(profile.to_json()).checkpointed == traced.checkpointed


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_model_as_it_is(way):
    model, batch, targets = made(way)
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    without = copy.deepcopy(plain)
    graph = cut_evenly(trace(plain, batch[0]), 4)
    for arguments, target in zip(batch, targets, strict=True):
        # a reentrant one wants an input that takes a gradient
        output = without(arguments[0].clone().requires_grad_())
        (functional.mse_loss(output, target) / len(batch)).backward()
    meshes = [f"m{s}" for s in range(4)]
    _, programs = planned(graph, meshes, 4, "1f1b")
    with LocalPipeline(graph, meshes, programs, 4, loss=functional.mse_loss, recomputed={1, 2}) as pipeline:
        pipeline.step(0, [(batch, targets)])
        found = pipeline.gradients()
    for name, parameter in without.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-12)


def test_the_stages_around_them_recompute_and_keep_as_little():
    model, batch, _ = made("not reentrant")
    traced = trace(model, batch[0])
    profile = measure_layers(traced, functional.mse_loss, batch[0][0], repeats=1)

    def plan(recompute):
        found = partition(
            profile,
            PipelineSetup([MeshSpec(name=f"m{i}") for i in range(4)], schedule="gpipe", recompute=recompute),
            stages=4,
            microbatches=4,
        )
        return make_plan(found.spec, budget_s=0.1)

    assert [stage.recomputed for stage in plan("auto").stages] == [False, True, True, False]
    assert not any(stage.recomputed for stage in plan("none").stages)
    own, all_kept = plan("auto").meshes[1], plan("none").meshes[1]
    assert own.peak_activation_bytes < all_kept.peak_activation_bytes / 2


def test_torch_is_as_before_when_a_model_cannot_be_traced():
    before = torch.utils.checkpoint.CheckpointFunction

    class Bad(nn.Module):
        def forward(self, x):
            return checkpoint(lambda y: y.nothing, x, use_reentrant=False)

    with pytest.raises(ValueError, match="nothing"):
        trace(Bad(), (torch.ones(1),))
    assert torch.utils.checkpoint.CheckpointFunction is before
