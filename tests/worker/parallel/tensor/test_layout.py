"""A split of a tensor that is viewed with other sizes is the split of the view, element by element."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.parallel.tensor.placement import LayoutError, Split, reshaped_split

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@st.composite
def views(draw):
    """A shape, a split of it over so many workers, and another shape of as many elements."""
    before = draw(st.lists(SIZES, min_size=1, max_size=4))
    workers, parts = draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from([1, 2, 3]))
    dim = draw(st.integers(0, len(before) - 1))
    before[dim] *= workers * parts
    left, after = math.prod(before), []
    while left > 1 and len(after) < 5:
        size = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        after.append(size)
        left //= size
    after += [left] if left > 1 or not after else []
    return before, Split(dim, (before[dim] // parts,) * parts), after, workers


@given(views())
def test_a_part_of_the_view_is_the_view_of_the_part(case):
    before, split, after, workers = case
    found = reshaped_split(split, before, after, workers)
    whole = torch.arange(math.prod(before)).reshape(before)
    if found is None:
        return
    for worker in range(workers):
        part = split.pick(whole, worker, workers).reshape(found.local_shape(after, workers))
        assert torch.equal(part, found.pick(whole.reshape(after), worker, workers))


@pytest.mark.parametrize(
    ("before", "split", "after", "found"),
    [
        ([2, 16, 64], Split(2, (64,)), [2, 16, 4, 16], Split(2, (4,))),  # heads
        ([2, 16, 192], Split(2, (64, 64, 64)), [2, 16, 3, 4, 16], Split(3, (4,))),  # fused projections
        ([2, 16, 4, 16], Split(2, (4,)), [2, 16, 64], Split(2, (64,))),
        ([2, 16, 64], Split(2, (64,)), [32, 64], Split(1, (64,))),
        ([2, 4, 16, 16], Split(1, (4,)), [8, 16, 16], Split(0, (4, 4))),  # batches of heads
        ([8, 16, 16], Split(0, (4, 4)), [2, 4, 16, 16], Split(1, (4,))),
        ([2, 16, 192], Split(2, (192,)), [2, 16, 3, 64], None),  # a half of three
        ([2, 16, 64], Split(2, (40, 24)), [2, 16, 8, 8], None),
    ],
)
def test_views_of_models_keep_their_split(before, split, after, found):
    assert reshaped_split(split, before, after, 2) == found


def test_parts_come_apart_and_together_again():
    split, whole = Split(1, (8, 4, 4)), torch.arange(48.0).reshape(3, 16)
    again = torch.zeros_like(whole)
    for worker in range(4):
        split.place(split.pick(whole, worker, 4), again, worker, 4)
    assert torch.equal(again, whole)
    assert split.pick(whole, 1, 4)[0].tolist() == [2, 3, 9, 13]


def test_what_cannot_be_split_names_what_could():
    with pytest.raises(
        LayoutError, match=r"heads: 12 \+ 4 cannot be split over 3 workers; set `tensor` to one of 1, 2, 4"
    ):
        Split(0, (12, 4)).check(3, "heads")
