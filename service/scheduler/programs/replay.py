"""Replays decoded programs under rendezvous semantics: start times, or the cycle of waits that deadlocks them.

A transfer is one node: it starts when both its send and its receive may. Each directed pair of meshes is one
lane; with contention `none` the planning model lets its messages overlap, and so does the replayed timeline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.scheduler import kernels
from service.scheduler.problem.memory import latest_compute
from service.scheduler.problem.problem import Problem
from service.scheduler.problem.timeline import Timeline, earliest_times, lane_edges, make_timeline
from service.scheduler.programs.decode import DecodedProgram, PlanError


@dataclass(frozen=True, eq=False)
class Replay:
    """`timeline` times the programs as the spec's contention does; `serialised_makespan_s` as lanes really run."""

    timeline: Timeline
    serialised_makespan_s: float

    def latest_compute(self, program: DecodedProgram, received: np.ndarray) -> np.ndarray:
        """For each receive the position of the last local action that has surely ended when its transfer starts.

        Actions that start at the same instant as the transfer have no length, or nearly none: they
        may come before or after it.
        """
        start = self.timeline.start[received]
        begun = np.maximum.accumulate(self.timeline.start[program.compute])
        earlier = np.searchsorted(begun, start - kernels.TOLERANCE * np.abs(start), side="left") - 1
        return np.minimum(earlier, latest_compute(self.timeline, program.compute, received))


def replay(problem: Problem, meshes: list[DecodedProgram]) -> Replay:
    """Play the programs; raises PlanError naming a cycle when they wait for each other for ever.

    A transfer is one node: it starts when its send and its receive both may. Each directed pair
    is one lane, so its messages follow each other; where contention is `none` the planning model
    lets them overlap, and so does `timeline`.
    """
    sources, targets, posting = _lane_and_wait_edges(meshes)
    times = earliest_times(problem, (sources, targets))
    if not times.complete:
        raise PlanError(_cycle_message(problem, meshes, sources, targets, times.topological))
    serialised = make_timeline(problem, times.start, times.topological).end[times.topological].max()
    if problem.spec.network.contention == "none" and problem.spec.overlap:
        # messages of one pair may overlap: only what they carry, when receives are posted and what actions wait for
        # says when they start
        lanes = lane_edges([program.compute for program in meshes])
        posted = (sources[posting], targets[posting])
        times = earliest_times(problem, problem.dependency_edges, lanes, posted)
    return Replay(make_timeline(problem, times.start, times.topological), float(serialised))


def _lane_and_wait_edges(meshes: list[DecodedProgram]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(sources, targets, posting): orders of lanes and waits; posting marks the waits of receives or actions."""
    sources, targets, posting = [], [], []
    for program in meshes:
        for lane in range(len(program.lane_names)):
            members = program.task[(program.lane == lane) & (program.task >= 0)]
            sources.append(members[:-1])
            targets.append(members[1:])
            posting.append(np.zeros(max(len(members) - 1, 0), dtype=bool))
        waiting = np.repeat(np.arange(len(program.task)), np.diff(program.wait_pointer))
        a, b = program.task[program.waits], program.task[waiting]
        both = (a >= 0) & (b >= 0)
        sources.append(a[both])
        targets.append(b[both])
        posting.append(program.receiving[waiting[both]] | (program.lane[waiting[both]] == 0))
    return np.concatenate(sources), np.concatenate(targets), np.concatenate(posting)


def _cycle_message(
    problem: Problem, meshes: list[DecodedProgram], sources: np.ndarray, targets: np.ndarray, done: np.ndarray
) -> str:
    stuck = problem.exists.reshape(-1).copy()
    stuck[done] = False
    blocker = {b: a for a, b in zip(sources.tolist(), targets.tolist(), strict=True) if stuck[a] and stuck[b]}
    path = [min(blocker)]
    while blocker[path[-1]] not in path:
        path.append(blocker[path[-1]])
    cycle = path[path.index(blocker[path[-1]]) :][::-1]
    names = {}
    for program in meshes:
        for index, task in enumerate(program.task.tolist()):
            if task in cycle and not program.receiving[index]:
                names[task] = f"{program.show(index)} on {program.name}"
    listed = [names[task] for task in cycle]
    return f"deadlock: {' -> '.join([*listed[:8], listed[0]])} wait for each other in a cycle"
