"""A stage's graph in pieces computes what it did, to the bit, and what draws or sums with others is in none of them."""

from __future__ import annotations

import copy
import operator
from itertools import chain

import pytest
import torch
from torch import fx, nn

from tests.worker.engine.compile.staged import gpt_stage, made
from worker.engine.compile import detached_arguments, pieces_of, record_arguments, split_into_pieces
from worker.model.rng import is_random_op


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_pieces_compute_to_the_bit_what_the_graph_does_with_the_same_masks(dropout):
    stage, state = gpt_stage(layers=2, dropout=dropout)
    expected = [made(stage, state, step=step) for step in (1, 2)]
    split_into_pieces(stage.body)
    found = [made(stage, state, step=step) for step in (1, 2)]
    for one, other in zip(chain(*expected), chain(*found), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(expected[0][0], expected[1][0]) is (dropout == 0)


def test_without_dropout_a_stage_is_one_piece_and_with_it_no_piece_draws():
    stage, _ = gpt_stage(layers=2)
    assert len(split_into_pieces(stage.body)) == 1
    stage, _ = gpt_stage(layers=2, dropout=0.3)
    pieces = split_into_pieces(stage.body)
    assert len(pieces) == len(pieces_of(stage)) > 5
    assert not [
        n for piece in pieces for n in piece.graph.graph.nodes if is_random_op(n) or n.op == "call_module"
    ]
    assert all(not list(piece.parameters()) for piece in pieces)


def test_a_loss_that_draws_finds_the_generator_where_the_graph_leaves_it():
    """The restart in front of an attention that drops nothing is the last one, and no dropout comes behind it."""
    drawn = []
    for pieces in (False, True):
        stage, state = gpt_stage()
        if pieces:
            split_into_pieces(stage.body)
        torch.manual_seed(11 if pieces else 12)
        made(stage, state)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def test_calls_of_modules_stay_outside_and_elements_of_tuples_with_what_made_them():
    class Sums(nn.Module):
        def forward(self, x):
            return 2 * x

    root = nn.Module()
    root.sums, root.weight = Sums(), nn.Parameter(torch.randn(4, 4))
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    product = graph.call_function(torch.ops.aten.mm.default, (x, weight))
    parts = graph.call_function(torch.ops.aten.split.Tensor, (product, 2, 1))
    summed = graph.call_module("sums", (product,))
    half = graph.call_function(operator.getitem, (parts, 0))
    last = graph.call_function(torch.ops.aten.cat.default, ([half, summed], 1))
    graph.output((graph.call_function(torch.ops.aten.relu.default, (last,)),))
    body = fx.GraphModule(root, graph)
    given = torch.randn(4, 3).t()  # as a stage of the same mesh may hand it on
    (expected,) = copy.deepcopy(body)(given)
    first, _ = split_into_pieces(body)
    assert torch.equal(body(given)[0], expected)
    assert [n.target for n in body.graph.nodes if n.op == "call_module"] == ["piece_0", "sums", "piece_1"]
    # the product, and the one element that is used
    assert len(list(first.graph.graph.nodes)[-1].args[0]) == 2
    (seen,) = record_arguments([first], lambda: body(given))
    assert all(one.is_contiguous() for one in seen)
    assert any(torch.equal(one, given) for one in seen if one.shape == given.shape)


def test_an_example_keeps_what_is_one_tensor_one_and_parameters_themselves():
    parameter, value = nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True) * 2
    one, two, three, four = detached_arguments((parameter, value, value, value.detach()))
    assert one is parameter
    assert two is three
    assert two.is_leaf and two.requires_grad and not four.requires_grad
