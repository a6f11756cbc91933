"""Buckets of samples of unequal lengths: which shapes microbatches are padded to, and which samples are in which.

A step's samples, sorted by length, are cut into microbatches by dynamic programming over (samples, microbatches), as in
DynaPipe (Jiang et al., arXiv 2311.10418), with padded tokens as the cost: many short samples stand beside few long ones.
Pure, and the same on every worker and at every resume: integers only, and no measured cost. Knows no samples.
"""

from __future__ import annotations

import bisect
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from worker.contract.job import Bucket

MAX_AUTO_BUCKETS = 8
_CANDIDATES = 64
_MULTIPLE = 8
"""Chosen lengths but the largest are multiples of this, which matrix products like."""
_WEIGHT_OF_LARGEST = 3
"""Of the largest microbatch beside the sum of all, as in a pipeline of four stages: it passes through the others alone."""
_LONGEST_SAMPLES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""As many as these have tokens is tried for a microbatch."""
_DRAWN_SAMPLES = 512
_LEAST_GAIN = 0.05
"""Of the cost with equal rows, below which stages for more shapes are not worth their trace."""
_NEVER = 1 << 50


@dataclass(frozen=True)
class Groups:
    """The samples of a step in microbatches: how many of the sorted ones each takes, one behind the other, and its bucket;
    `cost` is what was minimised."""

    sizes: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    cost: int


def choose_lengths(lengths: Sequence[int], most: int = MAX_AUTO_BUCKETS) -> tuple[int, ...]:
    """At most `most` ascending lengths, the last one the longest of `lengths`, of about the fewest padded tokens in all.

    Candidates are quantiles, of which the best are found by dynamic programming over (candidate, lengths).
    """
    ordered = sorted(lengths)
    longest = max(ordered[-1], 1)
    quantiles = {
        ordered[min(len(ordered) * k // _CANDIDATES, len(ordered) - 1)] for k in range(1, _CANDIDATES)
    }
    rounded = {-(-max(length, 1) // _MULTIPLE) * _MULTIPLE for length in quantiles}
    ends = [*sorted(end for end in rounded if end < longest), longest]
    counts = [0, *(bisect.bisect_right(ordered, end) for end in ends)]
    # padded[k]: tokens of the samples up to ends[k], and the lengths that hold them
    padded = [(counts[k + 1] * end, (end,)) for k, end in enumerate(ends)]
    for _ in range(most - 1):
        padded = [
            min(
                padded[k],
                *(
                    (padded[j][0] + (counts[k + 1] - counts[j + 1]) * end, (*padded[j][1], end))
                    for j in range(k)
                ),
            )
            if k
            else padded[k]
            for k, end in enumerate(ends)
        ]
    return padded[-1][1]


def equal_buckets(lengths: Sequence[int], rows: int) -> tuple[Bucket, ...]:
    """A bucket of `rows` for each of the ascending lengths."""
    return tuple(Bucket(length, rows) for length in lengths)


def choose_buckets(
    lengths: Sequence[int], known: Sequence[int], *, microbatches: int, rows: int, multiple: int
) -> tuple[Bucket, ...]:
    """The buckets of batches of `microbatches` with `rows` samples each on average, of ascending `lengths`.

    Beside `rows` samples of each length there may be microbatches of about equally many tokens, whose rows are a `multiple`
    (of the workers that share them); how many tokens, batches drawn from the `known` lengths of samples decide. The largest
    bucket, `rows` of the longest, comes last: none has more tokens, and it holds any batch. Of the others those are left
    out that no drawn batch uses.
    """
    equal = equal_buckets(lengths, rows)
    most = microbatches * rows - multiple * (microbatches - 1)  # as each microbatch has some
    drawn = _draw(known, samples=microbatches * rows)
    tried: dict[tuple[Bucket, ...], list[Groups]] = {}
    for count in (0.0, *(count for count in _LONGEST_SAMPLES if count < rows)):
        tokens = count * lengths[-1]
        budgeted = (
            Bucket(length, min(int(tokens / length), most) // multiple * multiple) for length in lengths
        )
        buckets = tuple(sorted({*equal, *(one for one in budgeted if one.rows)}))
        tried[buckets] = [cut_into_groups(batch, buckets, microbatches, multiple) for batch in drawn]

    def cost(buckets: tuple[Bucket, ...]) -> int:
        return sum(groups.cost for groups in tried[buckets])

    best = min(tried, key=cost)
    if cost(best) > (1 - _LEAST_GAIN) * cost(equal):
        return equal
    used = {bucket for groups in tried[best] for bucket in groups.buckets}
    return tuple(sorted({*used, equal[-1]}))


@functools.lru_cache(maxsize=64)
def cut_into_groups(
    lengths: tuple[int, ...], buckets: tuple[Bucket, ...], microbatches: int, least: int
) -> Groups:
    """The ascending `lengths` of a step's samples in `microbatches` of at least `least` samples, each in the bucket of
    fewest tokens that holds it: of about the least sum of tokens and _WEIGHT_OF_LARGEST times those of the largest.

    Each takes as many samples as its bucket holds, but for what the ones before it need. The last bucket must hold
    len(lengths) / microbatches samples of any of the lengths.
    """
    count = len(lengths)
    tokens = np.array([bucket.tokens for bucket in buckets])
    rows = np.array([bucket.rows for bucket in buckets])
    ends = np.arange(count + 1)
    holds = np.array([bucket.length for bucket in buckets])[:, None] >= np.array([0, *lengths])[None, :]
    limits = np.unique(tokens[holds[:, -1]])  # of the largest microbatch: the longest sample is in one
    cost = np.where(tokens[None, :] <= limits[:, None], tokens[None, :], _NEVER)[:, :, None]
    cost = cost + np.where(holds, 0, _NEVER)[None]
    # sums[l, e]: of the first e samples in the microbatches up to now, none of which has more than limits[l] tokens
    sums = np.full((len(limits), count + 1), _NEVER)
    sums[:, 0] = 0
    chosen = []
    for number in range(microbatches):
        begins = np.maximum(least * number, ends[None, :] - rows[:, None])
        tried = np.minimum(sums[:, np.minimum(begins, count)] + cost, _NEVER)
        chosen.append(tried.argmin(axis=1))
        sums = tried.min(axis=1)
    totals = np.where(sums[:, -1] < _NEVER, sums[:, -1] + _WEIGHT_OF_LARGEST * limits, _NEVER)
    limit, end, sizes, found = int(totals.argmin()), count, [], []
    for number in reversed(range(microbatches)):
        bucket = buckets[chosen[number][limit, end]]
        begin = max(least * number, end - bucket.rows)
        sizes.append(end - begin)
        found.append(bucket)
        end = begin
    return Groups(tuple(reversed(sizes)), tuple(reversed(found)), int(totals[limit]))


def _draw(known: Sequence[int], *, samples: int) -> list[tuple[int, ...]]:
    """A few batches of samples of known lengths, each sorted; the same ones at every call."""
    draw = random.Random(0)
    return [
        tuple(sorted(draw.choices(known, k=samples)))
        for _ in range(max(1, min(8, _DRAWN_SAMPLES // samples)))
    ]
