"""bf16 by autocast, and what travels: the pipelined run is the plain autocast run."""

import copy

import pytest
import torch
from engine_support import LocalPipeline, planned
from torch import nn

from worker.model import trace

MESHES = ["m0", "m1", "m2", "m3"]
MICROBATCHES = 4
WIDTH = 32


class AsComputed(nn.Module):
    """A block that computes a part in fp32 and goes back to the type that its product has."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.lin(x)
        scale = h.float().square().mean(-1, keepdim=True).rsqrt()
        return (h.float() * scale).to(h.dtype) * 1.7


class Residual(nn.Module):
    """A block that adds its bf16 part to an fp32 stream."""

    def __init__(self):
        super().__init__()
        self.lin, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.out(torch.tanh(self.lin(x)))


def loss_of(output, target):
    return (output.float() - target).square().mean()


class Case:
    """Four blocks of a kind, their microbatches, and the plain autocast run."""

    def __init__(self, block):
        torch.manual_seed(3)
        self.model = nn.Sequential(*(block() for _ in range(4)))
        self.inputs = [(torch.randn(8, WIDTH),) for _ in range(MICROBATCHES)]
        self.targets = [torch.randn(8, WIDTH) for _ in range(MICROBATCHES)]

    def plain(self, autocast=True):
        model, losses = copy.deepcopy(self.model), []
        for (x,), target in zip(self.inputs, self.targets, strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = loss_of(model(x), target)
            (loss / MICROBATCHES).backward()
            losses.append(loss.item())
        return losses, {name: parameter.grad for name, parameter in model.named_parameters()}

    def pipelined(self, schedule="1f1b", transfers="auto", precision="bf16"):
        autocast = torch.bfloat16 if precision == "bf16" else None
        graph = trace(self.model, self.inputs[0], autocast=autocast, transfers=transfers).cut_evenly(4)
        programs = planned(graph, MESHES, MICROBATCHES, schedule)[1]
        options = {"precision": precision, "transfers": transfers, "loss": loss_of}
        with LocalPipeline(graph, MESHES, programs, MICROBATCHES, **options) as pipeline:
            results = pipeline.step(0, [(self.inputs, self.targets)])
            wires = {b.dtype for engine in pipeline.engines.values() for b in engine._buffers.tensors}
            return results["m3", 0].losses, pipeline.gradients(), wires


def distance(found, expected):
    """The largest error of a gradient, in parts of its norm."""
    assert found.keys() == expected.keys()
    return max(((found[n] - expected[n]).norm() / expected[n].norm()).item() for n in expected)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_block_that_goes_back_to_its_own_type_is_that_of_the_plain_autocast_run(schedule):
    case = Case(AsComputed)
    losses, gradients = case.plain()
    found, found_gradients, wires = case.pipelined(schedule)
    assert wires == {torch.bfloat16}, "the stream is bf16 by itself"
    assert found == pytest.approx(losses, rel=1e-6)
    assert distance(found_gradients, gradients) < 1e-6


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_an_fp32_residual_stream_crosses_exactly(schedule):
    case = Case(Residual)
    losses, gradients = case.plain()
    found, found_gradients, wires = case.pipelined(schedule)
    assert wires == {torch.float32}
    assert found == pytest.approx(losses, rel=1e-6)
    assert distance(found_gradients, gradients) < 1e-6


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_transfers_in_bf16_halve_what_travels_and_round_it(precision):
    case = Case(Residual)
    losses, gradients = case.plain(autocast=precision == "bf16")
    found, found_gradients, wires = case.pipelined(transfers="bf16", precision=precision)
    assert wires == {torch.bfloat16}
    assert found == pytest.approx(losses, rel=2e-2) != pytest.approx(losses, rel=1e-6)
    assert 1e-5 < distance(found_gradients, gradients) < 3e-2
    assert {gradient.dtype for gradient in found_gradients.values()} == {torch.float32}


def test_a_way_to_travel_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="transfers 'fp8' is unknown: use one of auto, bf16"):
        Case(Residual).pipelined(transfers="fp8")
