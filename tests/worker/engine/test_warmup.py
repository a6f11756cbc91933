"""What happens before the first slot: kernels warmed, limits derived."""

import copy

import pytest
import torch
from engine_support import LocalPipeline, batch, chain, serial_programs, skips
from torch import nn

from worker.engine import SlotLimits, StageError
from worker.engine.results import slot_limits
from worker.engine.warmup import warm_up
from worker.program import Instruction

MESHES = ["m0", "m0", "m1", "m1"]


def prepare(graph, split=False):
    programs = serial_programs(graph, MESHES, 2, split)
    return LocalPipeline(graph, MESHES, programs, 2)


@pytest.mark.parametrize("split", [False, True])
def test_warming_up_runs_forward_and_backward_of_every_stage_and_leaves_no_trace(split):
    graph = skips()
    graph.stages[2].l = nn.Sequential(graph.stages[2].l, nn.BatchNorm1d(6, dtype=torch.float64))
    graph.stages[2].original_names = {n: f"2.{n}" for n in graph.stages[2].state_dict()}
    calls = []
    for stage in graph.stages:
        stage.register_forward_hook(lambda *_: calls.append(1))
        stage.register_full_backward_hook(lambda *_: calls.append(2))
    with prepare(graph, split) as pipeline:
        inputs, targets = batch(2)
        for engine in pipeline.engines.values():
            before = copy.deepcopy({i: module.state_dict() for i, (module, _) in engine._stages.items()})
            warm_up(engine._stages, inputs[0], targets[0], engine._settings, split)
            for index, (module, _) in engine._stages.items():
                for name, value in module.state_dict().items():
                    assert torch.equal(value, before[index][name]), name
                assert all(parameter.grad is None for parameter in module.parameters())
        assert calls.count(1) == 4 and calls.count(2) >= 1


def test_a_stage_that_raises_while_warming_up_is_named():
    graph = chain(4)
    graph.stages[3]._function = lambda module, x: 1 / 0
    with prepare(graph) as pipeline:
        engine = pipeline.engines["m1", 0]
        inputs, targets = batch(2)
        with pytest.raises(StageError, match="stage 3 raised ZeroDivisionError"):
            warm_up(engine._stages, inputs[0], targets[0], engine._settings, False)


def test_limits_allow_for_what_an_instruction_waits_for():
    program = (
        Instruction("F", "compute", stage=0, microbatch=0),
        Instruction("SEND_F", "send:m1", stage=0, microbatch=0, edge=0, peer="m1"),
        Instruction("B", "compute", stage=0, microbatch=0),
        Instruction("REDUCE", "compute"),
    )
    limits = SlotLimits(factor=10.0, floor_s=3.0)
    assert slot_limits(program, [1.0, 0.1, 2.0, 0.0], limits) == [10.0, 21.0, 20.0, 30.0]
    assert slot_limits(program, [0.01] * 4, limits) == [3.0] * 4
    assert slot_limits(program, None, limits) == [3.0] * 4
