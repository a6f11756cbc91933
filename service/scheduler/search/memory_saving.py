"""Lowers the peak memory of a plan at the same makespan: rules under tighter limits, and later forwards.

A search for the shortest timeline stops at the first order that reaches it, however much memory that order takes.
The saved plan is also no slower when transfers take two and four times as long: that slack is worth more than
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from service.scheduler.kernels import FORWARD, TOLERANCE
from service.scheduler.problem.memory import (
    activation_changes,
    keeps_activation_limits,
    keeps_memory_limits,
    peak_activation,
    peak_memory,
    peak_receive_buffers,
    posting_waits,
    send_buffer_waits,
)
from service.scheduler.problem.problem import Problem
from service.scheduler.problem.timeline import OrderError, Timeline, earliest_times, lane_edges, simulate
from service.scheduler.search import priority_rules
from service.scheduler.search.microbatch_orders import begun_order

STRETCH_FACTORS = (2.0, 4.0)  # of the length of transfers


class TransferSlack:
    """The makespans of a plan whose transfers take two and four times as long as planned; other plans are compared."""

    def __init__(self, timeline: Timeline) -> None:
        self._latest = [stretched_makespan(timeline, factor) * (1 + TOLERANCE) for factor in STRETCH_FACTORS]

    def kept_by(self, other: Timeline) -> bool:
        """True where another plan is no slower under the same delays."""
        return all(
            stretched_makespan(other, factor) <= latest
            for factor, latest in zip(STRETCH_FACTORS, self._latest, strict=True)
        )


def stretch_transfers(problem: Problem, factor: float) -> Problem:
    """The same problem with transfers that take `factor` times as long."""
    costs = tuple(
        tuple(
            replace(transfer, forward_s=transfer.forward_s * factor, backward_s=transfer.backward_s * factor)
            for transfer in transfers
        )
        for transfers in problem.transfer_costs
    )
    return replace(problem, transfer_costs=costs)


def stretched_makespan(timeline: Timeline, factor: float) -> float:
    """The makespan, in seconds, when every transfer lasts `factor` times as long.

    As its programs run it: each lane, port and directed pair in the planned order, receives posted after the action
    that the plan names. Infinite where these orders contradict each other.
    """
    problem = timeline.problem
    kinds = timeline.sequence // problem.microbatches
    orders = [timeline.sequence[problem.kinds_on(r)[kinds]] for r in problem.exclusive_resources]
    moves = timeline.transfers
    pairs = problem.sender_of_kind * problem.meshes + problem.receiver_of_kind
    pair = pairs[moves // problem.microbatches]
    orders += [moves[pair == number] for number in np.unique(pair)]
    durations = problem.duration.copy()
    durations[problem.compute_kinds :] *= factor
    flat = durations.reshape(-1)
    waits = posting_waits(timeline), send_buffer_waits(timeline), lane_edges(orders)
    times = earliest_times(problem, problem.dependency_edges, *waits, durations=flat)
    if not times.complete:
        return float("inf")
    return float((times.start + flat)[times.topological].max())


_ROUNDING = 1e-12  # relative: sums of the same times in another order
_RULES_WITHOUT_CAP = 6  # the first standard rules have no cap of their own
_MIN_RUNS_FOR_STRETCHED = 100  # with fewer than these the rules are tried for the planned transfers only
_RULE_RUN_BUDGET_TASKS = 800_000  # tasks of all runs of rules for one plan
_SIMULATION_BUDGET_TASKS = 300_000  # tasks of all simulations of changed orders for one plan


def save_memory(timeline: Timeline, enough_bytes: Sequence[int] | None = None) -> Timeline:
    """A timeline that is no longer, no mesh of which holds more activations, nor all together more receive buffers.

    Nor is it slower when every transfer takes longer than planned: that slack is worth more than the memory.

    Bisects the number of microbatches held everywhere, first with new plans, then moving the forwards of this
    one; then the bytes of each mesh, first meshes first. Ends where each mesh holds no more than its `enough_bytes`.
    """
    return _MemorySaver(timeline, enough_bytes).run()


class _MemorySaver:
    def __init__(self, timeline: Timeline, enough_bytes: Sequence[int] | None) -> None:
        self.problem = timeline.problem
        self.best = timeline
        self._enough_bytes = None if enough_bytes is None else np.asarray(enough_bytes)
        self._latest = timeline.makespan * (1 + _ROUNDING)
        self._rule_runs = _RULE_RUN_BUDGET_TASKS // (100 + self.problem.tasks)
        self._simulations = _SIMULATION_BUDGET_TASKS // (100 + self.problem.tasks)
        self._runners: list[priority_rules.RuleRunner] = []
        self._peaks, self._buffers = self._costs(timeline)
        self._slack = TransferSlack(timeline)
        by_mesh = [np.flatnonzero(self.problem.mesh_of_stage == p) for p in range(self.problem.meshes)]
        self._bytes_per_microbatch = self.problem.most_activation_of_mesh.tolist()
        columns = self.problem.representatives
        held = np.hstack(
            [self.problem.activation_by_microbatch[:, columns], self.problem.stash_by_microbatch[:, columns]]
        )
        self._unit = [math.gcd(*held[stages].ravel().tolist()) for stages in by_mesh]

    def run(self) -> Timeline:
        holding = [p for p in range(self.problem.meshes) if self._unit[p]]
        if self.problem.inference or not holding:
            return self.best
        for attempt in (self._try_rules, self._try_later_forwards):
            if self._has_enough():
                return self.best
            most = max(-(-self._peaks[p] // self._bytes_per_microbatch[p]) for p in holding)
            _bisect(most, lambda count, attempt=attempt: attempt(self._microbatches(count)))
        order = [int(self.problem.mesh_of_stage[stage]) for stage in self.problem.stage_order]
        for mesh in dict.fromkeys(order):
            if self._has_enough():
                break
            if self._unit[mesh]:
                units = self._peaks[mesh] // self._unit[mesh]
                _bisect(
                    units,
                    lambda count, p=mesh: self._try_later_forwards(self._bytes_of(p, count * self._unit[p])),
                )
        return self.best

    def _has_enough(self) -> bool:
        enough = self._enough_bytes
        return enough is not None and bool((peak_memory(self.best) <= enough).all())

    def _microbatches(self, count: int) -> list[int]:
        return [
            min(peak, count * whole)
            for peak, whole in zip(self._peaks, self._bytes_per_microbatch, strict=True)
        ]

    def _bytes_of(self, mesh: int, limit: int) -> list[int]:
        return [limit if p == mesh else peak for p, peak in enumerate(self._peaks)]

    def _try_rules(self, limits: Sequence[int]) -> bool:
        """True where the order of a rule keeps the limits, for the planned transfers or for longer ones.

        Orders for longer transfers keep more slack in the same memory.
        """
        if not self._runners:
            problems = [self.problem]
            if self._rule_runs > _MIN_RUNS_FOR_STRETCHED:
                problems += [stretch_transfers(self.problem, factor) for factor in STRETCH_FACTORS]
            self._runners = [priority_rules.RuleRunner(problem) for problem in problems]
        order = None if self.problem.interchangeable else begun_order(self.best)
        for runner in self._runners:
            for rule in islice(priority_rules.standard_rules(self.problem), _RULES_WITHOUT_CAP):
                if order is not None:
                    rule = replace(rule, order=order)
                if sum(other.runs for other in self._runners) == self._rule_runs:
                    return False
                timeline = runner.timeline(rule, np.array(limits, dtype=np.int64))
                stretched = runner is not self._runners[0]
                if (
                    timeline is not None
                    and (stretched or timeline.makespan <= self._latest)
                    and self._accept(timeline.lanes)
                ):
                    return True
        return False

    def _try_later_forwards(self, limits: Sequence[int]) -> bool:
        if not self._simulations:
            return False
        self._simulations -= 1
        lanes = [
            lane if limit >= peak else _delay_forwards_within(self.problem, lane, limit)
            for lane, limit, peak in zip(self.best.lanes, limits, self._peaks, strict=True)
        ]
        return all(lane is not None for lane in lanes) and self._accept(lanes)

    def _accept(self, lanes: Sequence[np.ndarray]) -> bool:
        try:
            timeline = simulate(self.problem, lanes)
        except OrderError:
            return False
        if timeline.makespan > self._latest or not keeps_activation_limits(self.problem, timeline.lanes):
            return False
        if not keeps_memory_limits(timeline):  # transfers that waited for memory start at once in a new plan
            return False
        if not self._slack.kept_by(timeline):
            return False
        peaks, buffers = self._costs(timeline)
        if buffers > self._buffers or any(new > old for new, old in zip(peaks, self._peaks, strict=True)):
            return False
        self.best, self._peaks, self._buffers = timeline, peaks, buffers
        return True

    def _costs(self, timeline: Timeline) -> tuple[list[int], int]:
        peaks = [peak_activation(self.problem, lane)[0] for lane in timeline.lanes]
        return peaks, sum(peak_receive_buffers(timeline))


def _bisect(most: int, works: Callable[[int], bool]) -> None:
    """Try counts below `most`, less where it works, more where it does not."""
    least = 0
    while most - least > 1:
        middle = (least + most) // 2
        if works(middle):
            most = middle
        else:
            least = middle


def _delay_forwards_within(problem: Problem, lane: np.ndarray, limit: int) -> np.ndarray | None:
    """A compute order with every forward late enough to stay within `limit` bytes; None where there is none."""
    change = activation_changes(problem, lane).tolist()
    tasks, microbatches = lane.tolist(), problem.microbatches
    place = {task: index for index, task in enumerate(tasks)}
    order: list[int] = []
    waiting: list[int] = []
    first = held_bytes = 0
    for index, task in enumerate(tasks):
        kind, m = divmod(task, microbatches)
        stage, op = problem.stage_and_op(kind)
        if op == FORWARD:
            waiting.append(index)
        else:
            forward = problem.task(stage, FORWARD, m)
            if first < len(waiting) and place[forward] >= waiting[first]:
                return None
            order.append(index)
            held_bytes += sum(change[index])
        while first < len(waiting) and held_bytes + change[waiting[first]][0] <= limit:
            order.append(waiting[first])
            held_bytes += sum(change[waiting[first]])
            first += 1
    return lane[order] if first == len(waiting) else None
