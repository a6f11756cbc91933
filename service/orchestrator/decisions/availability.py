"""AvailabilityProfile: accelerators (or quota) free from now on, as a step function of time, for backfill.

Pure values over numpy arrays. Times are Unix seconds; an unknown end is infinite, and one in the past counts as
unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np


class AvailabilityProfile:
    """What is free at each time from `now` on, of `total`; `held` is (how many, until when)."""

    def __init__(self, total: int, now: float, held: Iterable[tuple[int, float]] = ()) -> None:
        self.now = now
        taken, back = 0, dict[float, int]()
        for amount, until in held:
            taken += amount
            if now < until < math.inf:  # one that should have ended has an end that nobody knows
                back[until] = back.get(until, 0) + amount
        ends = sorted(back)
        self._times = np.array([now, *ends])
        self._free = (total - taken) + np.cumsum([0, *(back[end] for end in ends)])

    @property
    def free(self) -> int:
        """What is free now."""
        return int(self._free[0])

    def copy(self) -> AvailabilityProfile:
        other = AvailabilityProfile(0, self.now)
        other._times, other._free = self._times.copy(), self._free.copy()
        return other

    def fits_now(self, amount: int, length_s: float) -> bool:
        """Whether so much stays free from now on for so long."""
        if self._free[0] < amount:
            return False
        if length_s == math.inf:
            return bool(self._free.min() >= amount)
        last = np.searchsorted(self._times, self.now + length_s)
        return bool(self._free[:last].min() >= amount)

    def first_fit(self, amount: int, length_s: float, not_before: float | None = None) -> float | None:
        """The first time from which on so much is free for so long; None where none is known."""
        begin = self.now if not_before is None else not_before
        short = np.flatnonzero(self._free < amount)
        if not short.size:
            return begin
        ends_of_short = np.append(self._times, math.inf)[short + 1]
        begins = np.maximum(np.append(self.now, ends_of_short), begin)
        ends = np.append(self._times[short], math.inf)
        fits = (begins < math.inf) & (begins + length_s <= ends)
        if not fits.any():
            return None
        return float(begins[np.argmax(fits)])

    def take(self, amount: int, begin: float, end: float) -> None:
        """Hold so much from `begin` to `end`; a negative amount gives it back."""
        first = self._cut(begin)
        last = len(self._times) if end == math.inf else self._cut(end)
        self._free[first:last] -= amount

    def _cut(self, time: float) -> int:
        """The index of the step that begins at `time`, made where there is none."""
        place = int(np.searchsorted(self._times, time))
        if place == len(self._times) or self._times[place] != time:
            self._times = np.insert(self._times, place, time)
            self._free = np.insert(self._free, place, self._free[max(place - 1, 0)])
        return place
