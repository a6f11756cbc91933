"""Lowers a planned program for one engine: checks stages and batches, bounds send lifetimes on CUDA, compares programs.

The host enqueues ahead of the device, so it cannot see a send end, and record_stream would keep every sent tensor of
the step. Here the plan says which sends have ended when a compute action starts; that action waits for them on the
device, which by the plan costs nothing, and later allocations may reuse their memory. Waits for a send that stands
earlier in the program cannot make a cycle: the programs of all meshes follow one order of all actions and transfers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from worker.contract.buckets import Gradient, with_buckets
from worker.contract.planned import MeshProgram
from worker.contract.program import COMPUTE_OPS, FINAL_OPS, SEND_OPS, Instruction, Program
from worker.engine.local_stages import LocalStages
from worker.engine.results import RunOptions
from worker.engine.routes import Route


def check_stages(mesh: str, program: Program, stages: Collection[int]) -> None:
    """ValueError for stages that the program runs and that this mesh does not have."""
    needed = {i.stage for i in program if i.op in COMPUTE_OPS}
    if missing := sorted(needed - set(stages)):
        raise ValueError(f"the program of mesh {mesh} runs stages {missing}, which were not given")


def check_batch(
    inputs: Sequence[tuple[torch.Tensor, ...]],
    targets: Sequence[torch.Tensor] | None,
    *,
    microbatches: int,
    needs_targets: bool,
) -> None:
    """ValueError unless there are samples, and where they are needed targets, of every microbatch."""
    if len(inputs) != microbatches:
        raise ValueError(f"run_step got {len(inputs)} microbatches, the program has {microbatches}")
    if needs_targets and (targets is None or len(targets) != microbatches):
        raise ValueError(f"run_step needs {microbatches} targets where the model's output is")


def check_smaller_stages(mesh: str, stages: LocalStages, program: MeshProgram, options: RunOptions) -> None:
    """ValueError where stages of several shapes would run what knows one only."""
    if not stages.smaller:
        return
    if options.device != "cpu":
        raise ValueError(
            f"mesh {mesh} has stages of several lengths (data.lengths) and runs on {options.device}, where kernels are "
            "loaded for one length only: train on cpu, or pad every sample to one length"
        )
    if program.reshardings or options.tensor > 1 or options.sync_batch_norm:
        raise ValueError(
            f"mesh {mesh} has stages of several lengths (data.lengths), and heterogeneous meshes, tensor parallelism and "
            "training.sync_batch_norm know one length only: leave them out, or pad every sample to one length"
        )


def _methods(program: MeshProgram) -> str:
    return ", ".join(f"{stage} ({method})" for stage, method in sorted(program.recomputed.items())) or "none"


def check_exchange(mesh: str, before: MeshProgram, after: MeshProgram) -> None:
    """ValueError where `after` is more than another order of `before`, its backwards split or whole."""
    if after.microbatches != before.microbatches:
        raise ValueError(
            f"mesh {mesh} runs {before.microbatches} microbatches, the other program {after.microbatches}: a running job "
            "keeps its microbatches"
        )
    if after.recomputed != before.recomputed:
        raise ValueError(
            f"on mesh {mesh} these stages recompute: {_methods(before)}, in the other program {_methods(after)}: a running "
            "job keeps what recomputes"
        )
    if {*after.reshardings} != {*before.reshardings}:
        raise ValueError(
            f"mesh {mesh} reshards other transfers in the other program: a running job keeps its transfers"
        )
    here, there = _work(before.instructions), _work(after.instructions)
    if here != there:
        work = next(iter((here - there) or (there - here)))
        raise ValueError(
            f"the other program of mesh {mesh} is of another cut or placement: {' '.join(map(str, work))} is in one of the "
            "two only"
        )


def _work(program: Program) -> Counter[tuple]:
    """The operations of a program in whatever order: forwards, backwards whether split or whole, transfers."""
    return Counter(
        ("backward" if i.op in ("B", "I") else i.op, i.stage, i.microbatch)
        if i.op in COMPUTE_OPS
        else (i.op, i.edge, i.microbatch, i.peer)
        for i in program
        if i.op not in ("W", *FINAL_OPS)
    )


def order_of_sums(program: LoweredProgram, shared: bool) -> Hashable:
    """Equal for two programs that add to gradients and change buffers in the same order. `shared`: several stages of the
    mesh have tensors in common, so that the order of their actions among each other counts too."""
    forwards, backwards = defaultdict(list), defaultdict(list)
    for i in program.instructions:
        if i.op in ("F", "B", "W"):
            order = forwards if i.op == "F" else backwards
            order["all" if shared else i.stage].append((i.op, i.stage, i.microbatch))
    orders = [frozenset((key, tuple(order)) for key, order in of.items()) for of in (forwards, backwards)]
    return (*orders, frozenset(program.buckets.values()))


@dataclass(frozen=True)
class LoweredProgram:
    """The instructions that an engine runs for a planned program, by their index: the planned seconds of each (None:
    not planned), the parameters that a bucket sums (`buckets`), the sends whose tensors a compute instruction drops
    before it runs (`released_before`)."""

    instructions: Program
    microbatches: int
    planned_s: list[float] | None
    buckets: Mapping[int, tuple[str, ...]]
    released_before: Mapping[int, tuple[int, ...]]


def lower_program(
    program: MeshProgram,
    gradients: Sequence[Gradient],
    routes: Mapping[int, Route],
    sent_bytes: Callable[[Route], int] | None,
) -> LoweredProgram:
    """`program` with the buckets of `gradients`; where lanes are streams, and `sent_bytes` is given, also with waits that
    bound the lifetimes of sends."""
    bucketed = with_buckets(program.instructions, gradients)
    instructions, released = bucketed.program, {}
    planned_s = None
    if program.planned_s is not None:
        planned_s = [0.0 if i is None else program.planned_s[i] for i in bucketed.source]
        if program.planned_starts_s is not None and sent_bytes is not None:
            starts_s = [None if i is None else program.planned_starts_s[i] for i in bucketed.source]
            lifetimes = bound_send_lifetimes(instructions, starts_s, planned_s, routes, sent_bytes)
            instructions, released = lifetimes.program, lifetimes.released_before
    return LoweredProgram(instructions, program.microbatches, planned_s, bucketed.buckets, released)


_TIME_TOLERANCE = 1e-9


@dataclass(frozen=True)
class SendLifetimes:
    """`program` with the waits for sends; `released_before[i]` has the sends whose tensors instruction i drops before it
    runs; `peak_bytes` is the most that sent tensors hold, with those that an action just made."""

    program: Program
    released_before: Mapping[int, tuple[int, ...]]
    peak_bytes: int


def bound_send_lifetimes(
    program: Program,
    starts_s: Sequence[float | None],
    planned_s: Sequence[float],
    routes: Mapping[int, Route],
    size_of: Callable[[Route], int],
) -> SendLifetimes:
    """Release sends as late as the plan's own peak allows, so that a late one is waited for as late as can be.

    `starts_s` and `planned_s` are the planned start and length of each instruction.
    """
    sends = {i: size_of(routes[s.edge]) for i, s in enumerate(program) if s.op in SEND_OPS}
    ends_s = {i: starts_s[i] + planned_s[i] for i in sends if starts_s[i] is not None}
    made_by = _sends_by_producer(program, routes, sends)
    actions = [
        i
        for i, instruction in enumerate(program)
        if instruction.op in COMPUTE_OPS and starts_s[i] is not None
    ]

    def over(send: int, action: int) -> bool:
        limit_s = starts_s[action] + _TIME_TOLERANCE * abs(starts_s[action])
        return send in ends_s and send < action and ends_s[send] <= limit_s

    made: list[int] = []
    peak = 0
    for action in actions:
        made += made_by.get(action, ())
        peak = max(peak, sum(sends[s] for s in made if not over(s, action)))
    held: list[int] = []
    of: dict[int, tuple[int, ...]] = {}
    for action in actions:
        new = made_by.get(action, [])
        excess = sum(sends[s] for s in (*held, *new)) - peak
        dropped = []
        for send in sorted((s for s in held if over(s, action)), key=lambda s: (ends_s[s], s)):
            if excess <= 0:
                break
            dropped.append(send)
            held.remove(send)
            excess -= sends[send]
        held += new
        if dropped:
            of[action] = tuple(dropped)
    return SendLifetimes(_with_send_waits(program, of), of, peak)


def _sends_by_producer(
    program: Program, routes: Mapping[int, Route], sends: Mapping[int, int]
) -> dict[int, list[int]]:
    """The sends whose tensor is complete with each compute action, by the index of that action."""
    made: dict[tuple[str, int, int], int] = {}
    for index, instruction in enumerate(program):
        if instruction.op in ("F", "B", "I"):
            made["F" if instruction.op == "F" else "B", instruction.stage, instruction.microbatch] = index
    sends_of: dict[int, list[int]] = {}
    for send in sends:
        instruction = program[send]
        route = routes[instruction.edge]
        forward = instruction.op == "SEND_F"
        stages = (route.source,) if forward else route.consumers
        kind = "F" if forward else "B"
        sends_of.setdefault(max(made[kind, stage, instruction.microbatch] for stage in stages), []).append(
            send
        )
    return sends_of


def _with_send_waits(program: Program, of: Mapping[int, tuple[int, ...]]) -> Program:
    out: list[Instruction] = list(program)
    free = 1 + max((i.record for i in program if i.record is not None), default=-1)
    for action, sends in of.items():
        last: dict[str, int] = {}
        for send in sends:  # the last one of a lane stands for those before it
            last[program[send].lane] = max(send, last.get(program[send].lane, send))
        for send in last.values():
            if out[send].record is None:
                out[send] = replace(out[send], record=free)
                free += 1
        events = {out[send].record for send in last.values()} - {*out[action].wait}
        out[action] = replace(out[action], wait=(*out[action].wait, *sorted(events)))
    return tuple(out)
