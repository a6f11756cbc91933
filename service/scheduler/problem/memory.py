"""Memory use of a timeline: activations, send and receive buffers, their limits, and the waits that keep them.

Activations depend on compute orders alone, receive buffers on orders and on the action after which each receive
is posted, so both hold at run time whatever the durations turn out to be. Bytes over time (`peak_memory`) count
static bytes, activations and stashes, and tensors on their way at both ends. Two times within TOLERANCE are one
instant.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from service.scheduler.kernels import BACKWARD, FORWARD, OPS, TOLERANCE, WEIGHT
from service.scheduler.problem.problem import Problem
from service.scheduler.problem.timeline import Edges, Timeline, resource_edges

_TIME_SUM_ERROR = 1e-13  # relative: what sums of some thousand durations are off by


def peak_activation(problem: Problem, lane: np.ndarray) -> tuple[int, int]:
    """(peak bytes, position in the lane where it is first reached) of one mesh's compute order."""
    if not len(lane):
        return 0, 0
    change = activation_changes(problem, lane)
    before_end = np.cumsum(change[:, 0]) + np.concatenate(([0], np.cumsum(change[:-1, 1])))
    position = int(before_end.argmax())
    return int(before_end[position]), position


def keeps_activation_limits(problem: Problem, lanes: list[np.ndarray]) -> bool:
    """True where compute orders keep every activation limit and max_in_flight."""
    for mesh, lane in enumerate(lanes):
        limit = int(problem.activation_capacity[mesh])
        if 0 <= limit < peak_activation(problem, lane)[0] or in_flight_violation(problem, lane) is not None:
            return False
    return True


def in_flight_violation(problem: Problem, lane: np.ndarray) -> str | None:
    """A message on the first place where a compute order breaks max_in_flight at a source stage, or None."""
    most = problem.spec.max_in_flight
    if most is None or most >= problem.microbatches or problem.inference:
        return None
    position = np.full(problem.compute_tasks, -1, dtype=np.int64)
    position[lane] = np.arange(len(lane))
    microbatches = problem.microbatches
    for stage in range(problem.stages):
        if problem.sources[stage] or position[problem.task(stage, FORWARD, 0)] < 0:
            continue
        rows = position.reshape(problem.stages, OPS, microbatches)[stage]
        begun, ended = rows[FORWARD], rows[BACKWARD:].max(axis=0)
        names = np.arange(microbatches), np.arange(microbatches)
        if (
            not problem.interchangeable
        ):  # in whatever order they come: number m to begin after number m - most has ended
            names = np.argsort(begun), np.argsort(ended)
            begun, ended = begun[names[0]], ended[names[1]]
        late = np.flatnonzero(begun[most:] < ended[: microbatches - most])
        if len(late):
            return (
                f"stage {stage} starts forward {names[0][late[0] + most]} before its backward {names[1][late[0]]} has "
                f"ended, against max_in_flight {most}"
            )
    return None


def activation_changes(problem: Problem, lane: np.ndarray) -> np.ndarray:
    """int[len(lane), 2]: bytes taken at the start and (negative) given back at the end of each action."""
    kind, microbatch = np.divmod(np.asarray(lane), problem.microbatches)
    stage, op = problem.stage_and_op(kind)
    if problem.interchangeable:  # the same, sooner
        activation, stash = problem.activation[stage], problem.whole_stash[stage]
        again = problem.rematerialised[stage]
    else:
        activation = problem.activation_by_microbatch[stage, microbatch]
        stash = problem.whole_stash_by_microbatch[stage, microbatch]
        again = problem.rematerialised_by_microbatch[stage, microbatch]
    change = np.zeros((len(lane), 2), dtype=np.int64)
    change[:, 0] = np.where(op == FORWARD, activation, np.where(op == BACKWARD, again, 0))
    if problem.inference:
        change[:, 1] = -change[:, 0]
        return change
    whole = problem.fused[stage, microbatch]
    held = activation + again
    change[:, 1] = -np.where(op == BACKWARD, np.where(whole, held, held - stash), 0)
    change[:, 1] -= np.where(op == WEIGHT, stash, 0)
    return change


def latest_compute(timeline: Timeline, compute: np.ndarray, receives: np.ndarray) -> np.ndarray:
    """For each receive the position in `compute` of the last action that ended when its transfer starts, or −1."""
    start = timeline.start[receives]
    ends = np.maximum.accumulate(timeline.end[compute]) if len(compute) else np.empty(0)
    by_time = np.searchsorted(ends, start + _same_instant(timeline, start), side="right") - 1
    by_cause = np.searchsorted(timeline.rank[compute], timeline.rank[receives], side="left") - 1
    return np.minimum(by_time, by_cause)


def _same_instant(timeline: Timeline, times: np.ndarray) -> np.ndarray:
    """Seconds by which another time may differ from each of `times` and still be the same instant.

    At most half the shortest action or transfer: to take a task that ends later for one that has ended would
    hold a transfer up, and each of a chain of them the next, until the programs are later than their plan.
    """
    shortest = timeline.problem.shortest_s
    if not shortest:  # nothing takes any time: there is one instant
        return np.zeros_like(times)
    return np.abs(times) * np.clip(
        shortest / 2 / np.maximum(np.abs(times), shortest), _TIME_SUM_ERROR, TOLERANCE
    )


def limited_posting_waits(timeline: Timeline) -> Edges:
    """(compute tasks, receives): the last action that ended when a transfer starts, where buffers are limited."""
    return _posting_waits_of(timeline, np.flatnonzero(timeline.problem.receive_limit >= 0).tolist())


def posting_waits(timeline: Timeline) -> Edges:
    """(compute tasks, receives): the last action that ended when a transfer starts; the receive is posted after it."""
    return _posting_waits_of(timeline, list(range(timeline.problem.meshes)))


def send_buffer_waits(timeline: Timeline) -> Edges:
    """(transfers, compute tasks): where an action begins later than its causes and its lane let it, the last transfer
    that its mesh has sent by then. So an action waits for memory: what was sent is gone."""
    problem, nothing = timeline.problem, np.empty(0, dtype=np.int64)
    limited = np.flatnonzero(problem.memory_limit >= 0)
    if not len(limited):
        return nothing, nothing
    ready = np.zeros(problem.tasks)
    for causes, effects in (problem.dependency_edges, resource_edges(problem, timeline.sequence)):
        np.maximum.at(ready, effects, timeline.end[causes])
    late = timeline.start - ready > _same_instant(timeline, timeline.start)
    transfers = timeline.transfers
    senders = problem.sender_of_kind[transfers // problem.microbatches]
    sent, held = [nothing], [nothing]
    for mesh in limited.tolist():
        lane = timeline.lanes[mesh]
        waiting, gone = lane[late[lane]], transfers[senders == mesh]
        if not len(waiting) or not len(gone):
            continue
        gone = gone[np.argsort(timeline.end[gone], kind="stable")]
        begin = timeline.start[waiting]
        place = np.searchsorted(timeline.end[gone], begin + _same_instant(timeline, begin), side="right") - 1
        # of those that end at that very instant one may stand behind the action that waits for another
        behind = (place >= 0) & (timeline.rank[gone[place]] > timeline.rank[waiting])
        while behind.any():
            place[behind] -= 1
            behind = (place >= 0) & (timeline.rank[gone[place]] > timeline.rank[waiting])
        sent.append(gone[place[place >= 0]])
        held.append(waiting[place >= 0])
    return np.concatenate(sent), np.concatenate(held)


def _posting_waits_of(timeline: Timeline, meshes: list[int]) -> Edges:
    problem = timeline.problem
    transfers = timeline.transfers
    receivers = problem.receiver_of_kind[transfers // problem.microbatches]
    causes, effects = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for mesh in meshes:
        received, lane = transfers[receivers == mesh], timeline.lanes[mesh]
        posted = latest_compute(timeline, lane, received)
        causes.append(lane[posted[posted >= 0]])
        effects.append(received[posted >= 0])
    return np.concatenate(causes), np.concatenate(effects)


def keeps_receive_limits(timeline: Timeline) -> bool:
    """True where no mesh needs more receive buffers than it has."""
    limits = timeline.problem.receive_limit.tolist()
    return all(
        limit < 0 or peak <= limit for peak, limit in zip(peak_receive_buffers(timeline), limits, strict=True)
    )


def peak_receive_buffers(timeline: Timeline) -> list[int]:
    """For each mesh the most received tensors that wait for, or are in use by, their consumers."""
    problem = timeline.problem
    transfers = timeline.transfers
    receivers = problem.receiver_of_kind[transfers // problem.microbatches]
    position = np.full(problem.tasks, -1, dtype=np.int64)
    peaks = []
    for mesh, lane in enumerate(timeline.lanes):
        received = transfers[receivers == mesh]
        posted = latest_compute(timeline, lane, received)
        position[lane] = np.arange(len(lane))
        peaks.append(buffers_in_use(len(lane), posted, last_use(problem, received, position)))
    return peaks


def peak_memory(timeline: Timeline) -> np.ndarray:
    """int[meshes]: the most bytes that each mesh holds at an instant of the timeline.

    Static bytes, activations and stashes, received tensors from the start of their transfer to the end of their
    last direct user, and sent ones from the end of their (first) maker to the end of their transfer.
    """
    return timeline.problem.static_bytes + _peak_bytes(timeline, activations=True)


def peak_buffer_bytes(timeline: Timeline) -> np.ndarray:
    """int[meshes]: the most bytes of received and sent tensors at an instant."""
    return _peak_bytes(timeline, activations=False)


def over_memory(timeline: Timeline) -> list[tuple[str, int, int]]:
    """(mesh, bytes held, memory_bytes) of every mesh that holds more than it has."""
    limits = timeline.problem.memory_limit.tolist()
    if max(limits) < 0:
        return []
    names = [mesh.name for mesh in timeline.problem.spec.meshes]
    held = peak_memory(timeline).tolist()
    return [
        (name, peak, limit)
        for name, peak, limit in zip(names, held, limits, strict=True)
        if 0 <= limit < peak
    ]


def keeps_memory_limits(timeline: Timeline) -> bool:
    """True where no mesh ever holds more than its memory_bytes."""
    return not over_memory(timeline)


def first_over_memory(timeline: Timeline) -> tuple[int, float] | None:
    """(mesh, seconds): the first instant from which a mesh holds more than its memory_bytes; None where none does."""
    problem, first = timeline.problem, None
    room = (problem.memory_limit - problem.static_bytes).tolist()
    for mesh, times, held in _held_over_time(timeline, activations=True):
        over = np.flatnonzero(held > room[mesh]) if problem.memory_limit[mesh] >= 0 else ()
        if len(over) and (first is None or times[over[0]] < first[1]):
            first = mesh, float(times[over[0]])
    return first


def _peak_bytes(timeline: Timeline, *, activations: bool) -> np.ndarray:
    peaks = np.zeros(timeline.problem.meshes, dtype=np.int64)
    for mesh, _, held in _held_over_time(timeline, activations=activations):
        peaks[mesh] = held.max(initial=0)
    return peaks


def _held_over_time(timeline: Timeline, *, activations: bool) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(mesh, the end of each instant, bytes held from then on) of every mesh, by time."""
    problem = timeline.problem
    times, meshes, changes = _buffer_changes(timeline)
    if activations:
        for mesh, lane in enumerate(timeline.lanes):
            change = activation_changes(problem, lane)
            times += [timeline.start[lane], timeline.end[lane]]
            meshes += [np.full(2 * len(lane), mesh)]
            changes += [change[:, 0], change[:, 1]]
    if not times:
        return
    when, where, change = np.concatenate(times), np.concatenate(meshes), np.concatenate(changes)
    order = np.argsort(when)  # whatever the order inside an instant
    when = when[order]
    instant = _instant_numbers(when)
    # mesh by mesh, and of each instant what holds at its end: ends come before starts, and only starts take
    by_mesh = np.argsort(where[order].astype(np.int32), kind="stable")
    when, where, instant = when[by_mesh], where[order][by_mesh], instant[by_mesh]
    held = np.cumsum(change[order][by_mesh])
    last = np.append((where[1:] != where[:-1]) | (instant[1:] != instant[:-1]), True)
    begin = np.searchsorted(where, np.arange(problem.meshes))
    for mesh, (first, end) in enumerate(zip(begin, np.append(begin[1:], len(where)), strict=True)):
        before = held[first - 1] if first else 0
        ends = last[first:end]
        yield mesh, when[first:end][ends], held[first:end][ends] - before


def _buffer_changes(timeline: Timeline) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """(times, meshes, bytes taken or given back) of the tensors that travel."""
    problem, start, end = timeline.problem, timeline.start, timeline.end
    times: list[np.ndarray] = []
    meshes: list[np.ndarray] = []
    changes: list[np.ndarray] = []
    column = np.arange(problem.microbatches)
    for kind in range(problem.compute_kinds, problem.kinds):
        there = column[problem.exists[kind]]
        if not problem.size[kind] or not len(there):
            continue
        size = np.full(len(there), problem.size[kind])
        if not problem.interchangeable:
            size = problem.size_by_microbatch[kind, there]
        users = [user * problem.microbatches + there for user in problem.dependents[kind]]
        makers = [maker * problem.microbatches + there for maker in problem.dependencies[kind]]
        transfer = kind * problem.microbatches + there
        spans = (
            (problem.receiver_of_kind[kind], start[transfer], np.max([end[user] for user in users], axis=0)),
            (problem.sender_of_kind[kind], np.min([end[maker] for maker in makers], axis=0), end[transfer]),
        )
        for mesh, begin, until in spans:
            times += [begin, until]
            meshes += [np.full(2 * len(there), mesh)]
            changes += [size, -size]
    return times, meshes, changes


def _instant_numbers(ordered: np.ndarray) -> np.ndarray:
    """A number for each of ascending times; times that are equal within the tolerance share one."""
    return np.cumsum(np.diff(ordered, prepend=ordered[:1]) > TOLERANCE * np.abs(ordered))


def last_use(problem: Problem, received: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Position in the compute order of the last action that reads each received tensor directly."""
    pointer, dependents = problem.dependent_rows
    kind, microbatch = np.divmod(received, problem.microbatches)
    last = np.full(len(received), -1, dtype=np.int64)
    for offset in range(int((pointer[kind + 1] - pointer[kind]).max(initial=0))):
        has = pointer[kind] + offset < pointer[kind + 1]
        user = dependents[np.minimum(pointer[kind] + offset, len(dependents) - 1)]
        last = np.where(has, np.maximum(last, position[user * problem.microbatches + microbatch]), last)
    return last


def buffers_in_use(actions: int, posted: np.ndarray, last: np.ndarray) -> int:
    """Most tensors between `posted` (after that action) and the end of action `last`."""
    change = np.zeros(actions + 2, dtype=np.int64)
    np.add.at(change, posted + 1, 1)
    np.add.at(change, last + 1, -1)
    return int(np.cumsum(change).max(initial=0))
