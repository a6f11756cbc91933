"""Microbatches of like length: which samples each takes and which shapes there are, beside all cuts of small steps."""

from __future__ import annotations

import itertools
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.contract.job import Bucket
from worker.data.length_buckets import choose_buckets, choose_lengths, cut_into_groups, equal_buckets

LONGEST = 40


def log_normal(count: int, seed: int, longest: int = 256) -> list[int]:
    draw = np.random.default_rng(seed).lognormal(3.67, 0.8, count)
    return [int(length) for length in np.clip(np.round(draw), 1, longest)]


def tokens_of(
    sizes: tuple[int, ...], lengths: tuple[int, ...], buckets: tuple[Bucket, ...]
) -> list[int] | None:
    """The tokens of each microbatch of a cut, in the smallest bucket that holds it; None where none does."""
    ends, found = list(itertools.accumulate(sizes)), []
    for size, end in zip(sizes, ends, strict=True):
        held = [one.tokens for one in buckets if one.rows >= size and one.length >= lengths[end - 1]]
        if not held:
            return None
        found.append(min(held))
    return found


def cost_of(tokens: list[int]) -> int:
    return sum(tokens) + 3 * max(tokens)


def all_cuts(samples: int, count: int, least: int) -> list[tuple[int, ...]]:
    ends = itertools.combinations(range(least, samples - least + 1), count - 1)
    cuts = [tuple(b - a for a, b in pairwise((0, *end, samples))) for end in ends]
    return [cut for cut in cuts if min(cut) >= least]


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Bucket, ...], int, int]:
    count, least = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    rows = least * draw(st.integers(1, 3))
    lengths = sorted(draw(st.lists(st.integers(1, LONGEST), min_size=count * rows, max_size=count * rows)))
    ends = sorted({*draw(st.lists(st.integers(1, LONGEST - 1), max_size=3)), LONGEST})
    others = draw(
        st.lists(
            st.builds(Bucket, st.sampled_from(ends), st.integers(1, 9).map(lambda k: k * least)), max_size=4
        )
    )
    kept = [one for one in others if one.tokens <= rows * LONGEST]
    return tuple(lengths), tuple(sorted({*equal_buckets(ends, rows), *kept})), count, least


@settings(deadline=None, max_examples=150)
@given(case=cases())
def test_the_cut_is_one_of_all_cuts_no_worse_than_equal_rows_and_near_the_best(case):
    lengths, buckets, count, least = case
    found = cut_into_groups(lengths, buckets, count, least)
    cuts = all_cuts(len(lengths), count, least)
    assert found.sizes in cuts
    tokens = [bucket.tokens for bucket in found.buckets]
    assert tokens == tokens_of(found.sizes, lengths, buckets) and found.cost == cost_of(tokens)
    equal = (len(lengths) // count,) * count
    assert found.cost <= cost_of(tokens_of(equal, lengths, buckets))
    costs = [cost_of(one) for cut in cuts if (one := tokens_of(cut, lengths, buckets)) is not None]
    assert min(costs) <= found.cost <= 1.25 * min(costs)


@pytest.mark.parametrize(("rows", "microbatches", "least_gain"), [(4, 16, 1.15), (8, 16, 1.25), (8, 8, 1.3)])
def test_chosen_buckets_cost_less_than_equal_rows_on_other_samples(rows, microbatches, least_gain):
    known = log_normal(3000, 1)
    lengths = choose_lengths(known)
    chosen = choose_buckets(lengths, known, microbatches=microbatches, rows=rows, multiple=1)
    equal = equal_buckets(lengths, rows)
    batches = [tuple(sorted(log_normal(rows * microbatches, seed, lengths[-1]))) for seed in range(2, 22)]
    costs = [
        sum(cut_into_groups(batch, buckets, microbatches, 1).cost for batch in batches)
        for buckets in (equal, chosen)
    ]
    assert costs[0] >= least_gain * costs[1]


@settings(deadline=None, max_examples=60)
@given(
    known=st.lists(st.integers(1, 90), min_size=1, max_size=50),
    rows=st.integers(1, 4),
    multiple=st.integers(1, 3),
    microbatches=st.integers(1, 6),
)
def test_chosen_buckets_are_few_none_has_more_tokens_than_the_last_and_workers_share_each(
    known, rows, multiple, microbatches
):
    rows *= multiple
    lengths = choose_lengths(known)
    chosen = choose_buckets(lengths, known, microbatches=microbatches, rows=rows, multiple=multiple)
    assert chosen == tuple(sorted({*chosen})) and len(chosen) <= 2 * len(lengths)
    assert chosen[-1] == Bucket(lengths[-1], rows)
    assert max(one.tokens for one in chosen) == chosen[-1].tokens
    assert all(one.rows % multiple == 0 and one.length in lengths for one in chosen)
    assert max(one.rows for one in chosen) <= rows * microbatches - multiple * (microbatches - 1)
    again = choose_buckets(lengths, list(known), microbatches=microbatches, rows=rows, multiple=multiple)
    assert again == chosen


def test_samples_of_like_length_stay_in_equal_rows():
    assert choose_buckets((32,), [30, 31, 32], microbatches=8, rows=4, multiple=1) == (Bucket(32, 4),)
