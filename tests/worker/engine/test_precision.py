"""bf16 by autocast, and what travels: the pipelined run is the plain autocast run."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from tests.worker.cuts import cut_evenly
from tests.worker.engine.engine_support import (
    Edge,
    Graph,
    LocalPipeline,
    make_stage,
    planned,
    serial_programs,
)
from worker.engine.forward import run_forward
from worker.model.export import trace

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
        graph = cut_evenly(trace(self.model, self.inputs[0], autocast=autocast, transfers=transfers), 4)
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


class Watched(nn.Module):
    """A block that notes where the weights lie that its backward keeps."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.kept = []

    def forward(self, x):
        def note(tensor):
            if tuple(tensor.shape) in ((WIDTH, WIDTH), tuple(x.shape)):
                self.kept.append((tuple(tensor.shape), tensor.dtype, tensor.untyped_storage().data_ptr()))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return self.lin(torch.tanh(x))


def watched_chain():
    """Four watched stages without a graph, in fp32."""
    torch.manual_seed(4)
    blocks = [Watched() for _ in range(4)]
    ends = ["input:0", "h0", "h1", "h2", "output"]
    stages = [
        make_stage(s, [ends[s]], [ends[s + 1]], lambda m, x: (m.block(x),), block=block)
        for s, block in enumerate(blocks)
    ]
    edges = tuple(Edge(s, s + 1, f"h{s}", (8, WIDTH), torch.bfloat16) for s in range(3))
    return Graph(stages, edges)


@pytest.mark.parametrize("split", [False, True])
def test_all_microbatches_in_flight_share_one_cast_of_a_weight(split):
    graph = watched_chain()
    inputs = [(torch.randn(8, WIDTH),) for _ in range(MICROBATCHES)]
    targets = [torch.randn(8, WIDTH) for _ in range(MICROBATCHES)]
    one = ["m0"] * 4  # the casts belong to the process
    programs = serial_programs(graph, one, MICROBATCHES, split=split)
    with LocalPipeline(
        graph, one, programs, MICROBATCHES, precision="bf16", loss=loss_of, optimizer=None
    ) as pipeline:
        pipeline.step(0, [(inputs, targets)])
        kept = [stage.block.kept for stage in pipeline.engines["m0", 0].stages.values()]
    casts = [{note for note in one if note[0] == (WIDTH, WIDTH)} for one in kept]
    assert [len(one) for one in casts] == [0, 1, 1, 1], (
        "the first stage passes no gradient on and keeps no weight"
    )
    assert {dtype for one in casts for _, dtype, _ in one} == {torch.bfloat16}


def test_a_cast_is_made_anew_in_every_step_and_from_weights_that_were_loaded():
    """Three steps with updates, then other weights: a cast of old weights would show in the losses."""
    case = Case(Residual)
    graph = cut_evenly(trace(case.model, case.inputs[0], autocast=torch.bfloat16), 4)
    programs = planned(graph, MESHES, MICROBATCHES, "1f1b")[1]
    model = copy.deepcopy(case.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(4):
        optimizer.zero_grad()
        losses = []
        for (x,), target in zip(case.inputs, case.targets, strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model(x), target)
            (loss / MICROBATCHES).backward()
            losses.append(loss.item())
        expected.append(losses)
        optimizer.step()
    with LocalPipeline(graph, MESHES, programs, MICROBATCHES, precision="bf16", loss=loss_of) as pipeline:
        first = {mesh: copy.deepcopy(engine.state()) for mesh, engine in pipeline.engines.items()}

        def run():
            return pipeline.step(0, [(case.inputs, case.targets)])["m3", 0].losses

        found = [run() for _ in range(4)]
        for mesh, engine in pipeline.engines.items():
            engine.load_state(first[mesh])
        again = run()
    assert found == [pytest.approx(losses, rel=1e-5) for losses in expected]
    assert again == found[0]


@pytest.mark.slow
def test_what_arrives_is_no_weight_whose_cast_is_kept():
    """torch keeps the cast of every fp32 leaf that takes a gradient: of a received tensor, until the step ends."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    torch.clear_autocast_cache()
    places, graphs = [], []

    def note(tensor):
        places.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    for _ in range(3):
        leaf = torch.randn(8, WIDTH, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            run = run_forward(layer, [leaf], device_type="cpu", training=True, autocast_dtype=torch.bfloat16)
        graphs.append((leaf, run.outputs[0]))
    for leaf, output in graphs:
        output.sum().backward()
        assert leaf.grad is not None
    del graphs, leaf, output, run
    gc.collect()
    alive = {id(storage) for place in places if (storage := place()) is not None}
    torch.clear_autocast_cache()
    assert len(places) == 6 and len(alive) <= 1, "the weight's cast, not the three inputs'"
