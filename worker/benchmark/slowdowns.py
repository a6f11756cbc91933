"""Watches the slots of profiled steps for links and meshes that are not what they were.

Pure: the slots of a step as they are reported go in, what was found goes to a callback. No torch, no Ray.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from worker.contract.job import Bucket
from worker.contract.program import COMPUTE_LANE

_WATCHED_STEPS, _FEWEST_WATCHED = 9, 5
_STALE_FACTOR = 2.0  # a card that jobs share by turns gives one of them half
_NEGLIGIBLE_S = 1e-3  # what the engine and a busy processor add to a transfer
_SPREADS = 3.0


class LinkWatch:
    """Compares the transfers of profiled steps with the plan; calls `stale` once for each pair of meshes whose transfers
    take twice as long as planned, or half as long, beyond their spread.

    `planned` are the slots of the plan, JSON. `stale` gets the sending and the receiving mesh, and the mean seconds of a
    transfer, measured and planned: the median over the last steps.
    """

    def __init__(self, planned: Iterable[Mapping[str, Any]], stale: Callable[[str, str, float, float], None]):
        self._planned_s = _mean_transfers_s(planned)
        self._stale = stale
        self._measured_s: dict[tuple[str, str], deque[float]] = {
            link: deque(maxlen=_WATCHED_STEPS) for link in self._planned_s
        }

    def observe(self, slots: Iterable[Mapping[str, Any]], buckets: Sequence[Bucket] = ()) -> None:
        """Take the slots of a measured step, as they are reported."""
        for link, seconds in _mean_transfers_s(slots).items():
            if (steps := self._measured_s.get(link)) is None:
                continue
            steps.append(seconds)
            if len(steps) < _FEWEST_WATCHED:
                continue
            measured_s, planned_s = statistics.median(steps), self._planned_s[link]
            spread_s = statistics.median(abs(step_s - measured_s) for step_s in steps)
            margin_s = _SPREADS * spread_s + _NEGLIGIBLE_S
            slower = measured_s - margin_s > _STALE_FACTOR * planned_s
            if slower or planned_s > _STALE_FACTOR * (measured_s + margin_s):
                del self._measured_s[link]
                self._stale(*link, measured_s, planned_s)


def _mean_transfers_s(slots: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """The mean seconds of the transfers of each directed pair of meshes, by their receiving ends."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for slot in slots:
        direction, _, peer = slot["lane"].partition(":")
        if direction == "recv":
            seconds.setdefault((peer, slot["mesh"]), []).append(slot["end_s"] - slot["start_s"])
    return {link: statistics.fmean(values) for link, values in seconds.items()}


class SlotWatch(Protocol):
    """Takes the slots of one profiled step after the other."""

    def observe(self, slots: Iterable[Mapping[str, Any]], buckets: Sequence[Bucket] = ()) -> None:
        """Take the slots of a measured step, as they are reported; `buckets` are those of its microbatches, where they
        differ."""


@dataclass(frozen=True)
class MeshPace:
    """The compute actions of a mesh that its first steps had too: `seconds` of a step now, `first_s` then, the `factor`
    between them."""

    mesh: str
    factor: float
    seconds: float
    first_s: float


_FIRST_STEPS, _LAST_STEPS = 9, 5
_SLOW_FACTOR, _AS_BEFORE_FACTOR = 1.5, 1.15
"""The factor of each of the last steps of a slow mesh at least, and of their median of one that is as before at most."""

_Action = tuple[int | None, str, Bucket | None]
"""The stage, the action and the shape of its microbatch (None: all have one)."""


class MeshWatch:
    """Compares the compute actions of each mesh with those of its first profiled steps, of which the very first, which
    warms up, is left out. Calls `changed` when all of the last steps say that a mesh has become slow, and when it is as
    quick as before again.

    An action is compared with the same action of the same stage, of a microbatch of this shape: a program with other
    backwards is no slower mesh, nor is a step with larger microbatches.
    """

    def __init__(self, changed: Callable[[MeshPace, bool], None]):
        self._changed = changed
        self._warm = False
        self._first: dict[str, list[dict[_Action, list[float]]]] = {}
        self._usual_s: dict[str, dict[_Action, float]] = {}
        self._factors: dict[str, deque[float]] = {}
        self._slow: set[str] = set()

    def observe(self, slots: Iterable[Mapping[str, Any]], buckets: Sequence[Bucket] = ()) -> None:
        """Take the slots of a measured step, as they are reported; `buckets` are those of its microbatches, where they
        differ."""
        if not self._warm:
            self._warm = True
            return
        for mesh, actions in _compute_s(slots, buckets).items():
            if (usual_s := self._usual_s.get(mesh)) is None:
                first = self._first.setdefault(mesh, [])
                first.append(actions)
                if len(first) == _FIRST_STEPS:
                    self._usual_s[mesh] = _medians_s(self._first.pop(mesh))
                continue
            known = actions.keys() & usual_s.keys()
            first_s = sum(usual_s[action] * len(actions[action]) for action in known)
            if first_s > 0:
                self._judge(mesh, sum(sum(actions[action]) for action in known), first_s)

    def _judge(self, mesh: str, seconds: float, first_s: float) -> None:
        factors = self._factors.setdefault(mesh, deque(maxlen=_LAST_STEPS))
        factors.append(seconds / first_s)
        if len(factors) < _LAST_STEPS:
            return
        factor, slow = statistics.median(factors), mesh in self._slow
        if not slow and min(factors) > _SLOW_FACTOR:
            self._slow.add(mesh)
        elif slow and factor < _AS_BEFORE_FACTOR:
            self._slow.remove(mesh)
        else:
            return
        self._changed(MeshPace(mesh, factor, factor * first_s, first_s), not slow)


def _compute_s(
    slots: Iterable[Mapping[str, Any]], buckets: Sequence[Bucket]
) -> dict[str, dict[_Action, list[float]]]:
    """The seconds of the compute actions of each mesh in a step, one for each microbatch."""
    seconds: dict[str, dict[_Action, list[float]]] = {}
    for slot in slots:
        if slot["lane"] == COMPUTE_LANE:
            bucket = buckets[slot["microbatch"]] if buckets and slot["microbatch"] is not None else None
            of_mesh = seconds.setdefault(slot["mesh"], {})
            of_action = of_mesh.setdefault((slot["stage"], slot["action"], bucket), [])
            of_action.append(slot["end_s"] - slot["start_s"])
    return seconds


def _medians_s(steps: Iterable[Mapping[_Action, Sequence[float]]]) -> dict[_Action, float]:
    """The median over the steps of the mean seconds of each action."""
    means: dict[_Action, list[float]] = {}
    for actions in steps:
        for action, seconds in actions.items():
            means.setdefault(action, []).append(statistics.fmean(seconds))
    return {action: statistics.median(of_steps) for action, of_steps in means.items()}
