"""Tensors that workers share otherwise than others are compared in pieces, each whole or not at all on every worker."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.checks.replicas import Fingerprint, checksums, tensor_mismatch
from worker.parallel.shard_spec import ShardSpec, common_cuts, common_pieces, copy_common
from worker.parallel.tensor.placement import Split

SHAPE = (24, 12)
WAYS = [None, (0, (24,), 2), (0, (24,), 3), (0, (12, 12), 4), (0, (8, 16), 2), (1, (12,), 2), (1, (6, 6), 3)]


def shared(way, whole):
    """What each worker has of it, as a stage's parameters are split."""
    if way is None:
        return [(ShardSpec("w"), whole)]
    dim, parts, workers = way
    split = Split(dim, parts)
    return [(ShardSpec("w", dim, parts, n, workers), split.pick(whole, n, workers)) for n in range(workers)]


@settings(max_examples=40, deadline=None)
@given(
    ways=st.lists(st.sampled_from(WAYS), min_size=2, max_size=3, unique=True),
    changed=st.integers(0, math.prod(SHAPE) - 1),
    of=st.integers(0, 10),
)
def test_every_element_is_compared_by_all_that_have_it(ways, changed, of):
    """Where nothing differs nothing is told; of one element that differs in one of the ways the piece that it is in."""
    whole = torch.arange(math.prod(SHAPE)).view(SHAPE)
    other = whole.clone()
    other.view(-1)[changed] = -1

    def told(values):
        found = [one for way, value in zip(ways, values, strict=True) for one in shared(way, value)]
        cuts = common_cuts([[held] for held, _ in found])
        assert set(cuts) == {"w"}
        for held, tensor in found:
            mine = common_pieces(held, tensor, cuts["w"]).values()
            assert sorted(e for p in mine for e in p.flatten().tolist()) == sorted(tensor.flatten().tolist())
        prints = [Fingerprint(checksums({held: tensor}, [], cuts), ("", "")) for held, tensor in found]
        return tensor_mismatch([str(n) for n in range(len(found))], prints)

    assert told([whole] * len(ways)) is None
    wrong = [other if n == of % len(ways) else whole for n in range(len(ways))]
    said = told(wrong)
    assert said is not None and said.count("along dimension") == len({w[0] for w in ways if w})


@pytest.mark.parametrize("source", WAYS)
@pytest.mark.parametrize("target", WAYS)
def test_slices_of_one_layout_are_filled_from_those_of_another(source, target):
    whole = torch.arange(math.prod(SHAPE)).view(SHAPE)
    for spec, expected in shared(target, whole):
        assert spec.local_shape(SHAPE) == expected.shape
        found = torch.full(expected.shape, -1)
        for held, tensor in shared(source, whole):
            copy_common(held, tensor, spec, found)
        assert torch.equal(found, expected)


def test_what_all_share_alike_is_compared_as_it_is():
    halves = [ShardSpec("w", 0, (4,), n, 2) for n in range(2)]
    assert common_cuts([[halves[0], ShardSpec("x")], [halves[1]], [halves[0]]]) == {}
    assert common_cuts([[halves[0]], [ShardSpec("w")]]) == {"w": {0: (0, 2, 4)}}
    assert halves[1].description == "w (part 2 of 2 along dimension 0 of 4)"


@pytest.mark.parametrize(
    ("dim", "index", "place"), [(0, 3, None), (0, 4, 0), (0, 7, 3), (0, 11, None), (0, 12, 4), (1, 7, 7)]
)
def test_a_part_knows_where_it_has_what(dim, index, place):
    """The second of two workers has 4 to 7 and 12 to 15 of 16 rows in two parts."""
    assert ShardSpec("w", 0, (8, 8), 1, 2).local_index(dim, index) == place
