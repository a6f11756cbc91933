"""A traced model that came as bytes is cut, measured and run as the one that was traced."""

import gc

import pytest
import torch
from torch.nn import functional

from tests.tiers import some_by_day
from tests.worker.cuts import cut_evenly
from tests.worker.model.odd_models import ODD_MODELS, make
from tests.worker.model.running import buffers, gradients, step
from worker.benchmark.layer_costs import measure_layers
from worker.examples import gpt
from worker.model.export import trace
from worker.model.serialization import deserialize_model, load_values, parameter_values, serialize_model


def fill_all(traced, shipped):
    load_values(shipped, parameter_values(traced, [*traced.placed.parameters.values()]))


@some_by_day("name", ODD_MODELS, by_day=10)
def test_every_model_comes_out_as_it_was(name):
    model, inputs = make(name)
    traced = trace(model, inputs)
    shipped = deserialize_model(serialize_model(traced))
    fill_all(traced, shipped)
    assert shipped.layers == traced.layers
    stages = min(3, len(traced.layers))
    ours, theirs = cut_evenly(traced, stages), cut_evenly(shipped, stages)
    assert theirs.edges == ours.edges and theirs.tied == ours.tied
    for one, other in zip(ours.stages, theirs.stages, strict=True):
        assert other.original_names == one.original_names
        assert other.updated_buffers == one.updated_buffers
        assert [n.name for n in other.body.graph.nodes] == [n.name for n in one.body.graph.nodes]
    assert torch.equal(step(theirs, inputs, seed=1), step(ours, inputs, seed=1))
    for mine, same in ((gradients(ours), gradients(theirs)), (buffers(ours), buffers(theirs))):
        assert mine.keys() == same.keys()
        assert all(torch.equal(mine[key], same[key]) for key in mine)


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(6, 9)[:, :6],
        torch.randn(6, 6).t(),
        torch.randn(6, 1).expand(6, 6),
        torch.randn(6, 6, dtype=torch.bfloat16).float(),
    ],
)
def test_parameters_come_as_a_copy_of_the_original_would_be_however_they_lie(weight):
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
    model[0].weight = torch.nn.Parameter(weight)
    traced = trace(model, (torch.randn(2, 6),))
    shipped = deserialize_model(serialize_model(traced))
    fill_all(traced, shipped)
    (ours,), (theirs,) = cut_evenly(traced, 1).stages, cut_evenly(shipped, 1).stages
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()


@pytest.mark.slow
def test_what_is_sent_has_no_parameters_and_a_worker_takes_its_own_only():
    model = gpt.build(layers=6, width=64, heads=2, length=8, tied=True)
    traced = trace(model, (torch.zeros(2, 8, dtype=torch.int64),))
    whole = sum(p.nbytes for p in model.parameters())
    data = serialize_model(traced)
    assert len(data) < whole / 5
    shipped = deserialize_model(data)
    begins = [traced.layers[i] for i in (0, 3, 6)]
    builder = traced.builder({traced.layers.index(name) for name in begins})
    values = parameter_values(traced, builder.parameters(1))
    own = builder.stage(1)
    assert set(values) == {own.original_names[local] for local, _ in own.named_parameters()}
    assert sum(value.nbytes for value in values.values()) == sum(p.nbytes for p in own.parameters())
    load_values(shipped, values)
    gc.collect()
    before = {id(t) for t in gc.get_objects() if isinstance(t, torch.Tensor)}
    graph = shipped.cut(begins, keep=[1])
    new = [t for t in gc.get_objects() if isinstance(t, torch.nn.Parameter) and id(t) not in before]
    made = sum(t.nbytes for t in new if not t.is_meta)
    assert made == sum(p.nbytes for p in own.parameters()) < whole / 2
    assert graph.stages[0] is None and graph.edges == traced.cut(begins).edges
    for local, parameter in graph.stages[1].named_parameters():
        assert torch.equal(parameter, dict(own.named_parameters())[local])


def test_layers_are_measured_before_any_parameter_has_come():
    model = gpt.build(layers=2, width=16, heads=2, length=8, vocab=32)
    tokens = torch.randint(0, 32, (2, 8))
    traced = trace(model, (tokens,))
    ours = measure_layers(traced, functional.cross_entropy, tokens)
    shipped = deserialize_model(serialize_model(traced))
    theirs = measure_layers(shipped, functional.cross_entropy, tokens)
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert (one.name, one.activation_bytes, one.parameters) == (
            other.name,
            other.activation_bytes,
            other.parameters,
        )
    assert theirs.edges == ours.edges and theirs.parameter_sizes == ours.parameter_sizes
    assert all(tensor.is_meta for tensor in map(shipped.placed.tensors.shape, ours.parameter_sizes))
