"""Assigns each receive of a program its buffer, once, from the order that the program's own waits prove.

A receive may take a buffer only if the last action that used it is over, by the program's waits, before the
receive starts; no allocator and no timing is asked. Pure; must not know torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from worker.contract.program import COMPUTE_LANE, COMPUTE_OPS, RECEIVE_OPS, Program
from worker.engine.routes import Route


@dataclass(frozen=True)
class BufferPlan:
    """`buffer[i]` is the buffer of instruction i (None: not a receive), `route[b]` a route that says the
    shape and dtype of buffer b."""

    buffer: tuple[int | None, ...]
    route: tuple[Route, ...]


def plan_buffers(program: Program, routes: Mapping[int, Route]) -> BufferPlan:
    """Assign a buffer to every receive of `program`, reusing those that are surely free.

    ValueError when an instruction waits for an event that no earlier instruction records: the host
    would enqueue the wait before the record, which on CUDA waits for nothing.
    """
    finished_before = compute_finished_before(program)
    last_use = _last_uses(program, routes)
    buffer: list[int | None] = [None] * len(program)
    route_of: list[Route] = []
    free_after: list[int] = []
    kind_of: list[Hashable] = []
    for i, instruction in enumerate(program):
        if instruction.op not in RECEIVE_OPS:
            continue
        route = routes[instruction.edge]
        if instruction.op == "RECV_B" and not route.differentiable:
            continue
        kind = (route.shape, route.dtype)
        candidates = [b for b, k in enumerate(kind_of) if k == kind and free_after[b] <= finished_before[i]]
        if candidates:
            chosen = max(candidates, key=lambda b: free_after[b])
        else:
            chosen = len(kind_of)
            kind_of.append(kind)
            route_of.append(route)
            free_after.append(0)
        free_after[chosen] = last_use[i]
        buffer[i] = chosen
    return BufferPlan(tuple(buffer), tuple(route_of))


def compute_finished_before(program: Program) -> list[int]:
    """For each instruction, how many actions of the compute lane are surely over when it starts."""
    before: list[int] = []
    after: list[int] = []
    recorder: dict[int, int] = {}
    tail: dict[str, int] = {}
    position = 0
    for i, instruction in enumerate(program):
        known = after[tail[instruction.lane]] if instruction.lane in tail else 0
        for event in instruction.wait:
            if event not in recorder:
                raise ValueError(f"{instruction} waits for event {event}, which nothing before it records")
            known = max(known, after[recorder[event]])
        before.append(known)
        if instruction.lane == COMPUTE_LANE:
            position += 1
            known = position
        after.append(known)
        tail[instruction.lane] = i
        if instruction.record is not None:
            recorder[instruction.record] = i
    return before


def _last_uses(program: Program, routes: Mapping[int, Route]) -> dict[int, int]:
    """For each receive, the number of compute actions up to and with the last one that uses its tensor."""
    last: dict[tuple[int, int], int] = {}
    position = 0
    for instruction in program:
        if instruction.lane == COMPUTE_LANE:
            position += 1
        if instruction.op in COMPUTE_OPS:
            last[instruction.stage, instruction.microbatch] = position
    uses = {}
    for i, instruction in enumerate(program):
        if instruction.op not in RECEIVE_OPS:
            continue
        route = routes[instruction.edge]
        users = route.consumers if instruction.op == "RECV_F" else (route.source,)
        uses[i] = max(last.get((stage, instruction.microbatch), position) for stage in users)
    return uses
