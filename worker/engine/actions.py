"""Binds each instruction of a program to its action: compute, send, receive, reduce, optimizer step.

Joins stages, step state, receive buffers and transport. Must not know lanes or time.
A receive may take a buffer only if the last action that used it is over, by the program's waits, before the receive
starts: buffers are assigned once, and no allocator and no timing is asked.
A receive writes past autograd, so it bumps the buffer's version: a backward that still needs the old tensor
raises. The optimizer steps under RNG_LOCK, as it may draw; gathering ZeRO-1 parameters waits for others and
stays outside of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from worker.contract.failures import leave_breadcrumb
from worker.contract.program import COMPUTE_LANE, COMPUTE_OPS, RECEIVE_OPS, SEND_OPS, Instruction, Program
from worker.engine.lanes.base import Action, Finish, chain_finish
from worker.engine.lowering import LoweredProgram
from worker.engine.optim.reduce_and_step import ModelUpdate
from worker.engine.reshardings import Reshardings
from worker.engine.results import StageError
from worker.engine.routes import Route, transfer_tag
from worker.engine.stage import StageRunner
from worker.engine.stage_io import StepState
from worker.model.rng import RNG_LOCK
from worker.transport.base import Transport


class ReceiveBuffers:
    """The tensors that receives write into: `buffer_of[i]` is the index in `tensors` for instruction i, None where it
    receives nothing."""

    def __init__(
        self,
        program: Program,
        routes: Sequence[Mapping[int, Route]],
        dtype_of: Callable[[Route], torch.dtype],
        device: torch.device,
    ):
        """`routes` as those of Actions."""
        plan = plan_buffers(program, routes[0])
        self.buffer_of: list[int | None] = list(plan.buffer)
        sizes = [0] * len(plan.route)
        for instruction, buffer in zip(program, plan.buffer, strict=True):
            if buffer is not None:
                shapes = (of_shape[instruction.edge].shape for of_shape in routes)
                sizes[buffer] = max(sizes[buffer], *map(math.prod, shapes))
        self.tensors = [
            torch.empty(size, dtype=dtype_of(route), device=device)
            for size, route in zip(sizes, plan.route, strict=True)
        ]
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in self.tensors}

    def views(self, instruction: int, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """The begin of an instruction's buffer as a tensor of each of `shapes`, none of which is larger."""
        buffer = self.tensors[self.buffer_of[instruction]]
        return [buffer[: math.prod(shape)].view(shape) for shape in shapes]

    def contains(self, tensor: torch.Tensor) -> bool:
        """True where the memory of `tensor` is a receive buffer."""
        return tensor.untyped_storage().data_ptr() in self._memory


class Actions:
    """The actions of one mesh.

    `runners` are by stage, `routes` the transfers: those of the largest microbatches first, then those of each smaller
    shape, with the same keys.
    """

    def __init__(
        self,
        program: LoweredProgram,
        *,
        routes: Sequence[Mapping[int, Route]],
        buffers: ReceiveBuffers,
        state: StepState,
        runners: Sequence[Mapping[int, StageRunner]],
        update: ModelUpdate,
        transport: Transport,
        reshardings: Reshardings,
    ):
        self._program = program.instructions
        self._reshardings = reshardings
        self._gradient_buckets = program.buckets
        self._releases = program.released_before
        self._routes = routes
        self._microbatches = program.microbatches
        self._buffers = buffers
        self._state = state
        self._runners = runners
        self._update = update
        self._transport = transport

    def of(self, index: int) -> Action:
        """The action of instruction `index`."""
        instruction = self._program[index]
        if instruction.op in SEND_OPS:
            return self._send(instruction)
        if instruction.op in RECEIVE_OPS:
            return self._receive(index, instruction)
        if index in self._gradient_buckets:
            names = self._gradient_buckets[index]
            return lambda: self._update.reduce_bucket(names)
        if instruction.op == "REDUCE":
            return lambda: self._update.reduce(list(self._state.losses.values()))
        if instruction.op == "STEP":
            return self._step
        microbatch, run = instruction.microbatch, self._run(instruction)
        drops = [self._drop(self._program[send]) for send in self._releases.get(index, ())]
        if not drops:
            return lambda: run(microbatch)

        def action() -> None:
            for drop in drops:
                drop()
            run(microbatch)

        return action

    def _run(self, instruction: Instruction) -> Callable[[int], None]:
        """The method of the runner for the shape of the microbatch."""
        method = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
        runs = [getattr(runners[instruction.stage], method[instruction.op]) for runners in self._runners]
        state = self._state
        return runs[0] if len(runs) == 1 else lambda microbatch: runs[state.shape_of(microbatch)](microbatch)

    def _drop(self, sent: Instruction) -> Callable[[], Any]:
        key = (sent.edge, sent.microbatch)
        if sent.op == "SEND_F":
            return lambda: self._state.to_send.pop(key)
        return lambda: self._state.gradients_to_send.pop(key, None)  # one without a gradient has none

    def _send(self, instruction: Instruction) -> Action:
        key = (instruction.edge, instruction.microbatch)
        backward = instruction.op == "SEND_B"
        if backward and not self._routes[0][instruction.edge].differentiable:
            return _no_transfer
        tag = transfer_tag(instruction.edge, backward, instruction.microbatch, self._microbatches)
        peer, state = instruction.peer, self._state
        resharded = (instruction.edge, backward) in self._reshardings

        def action() -> Finish | None:
            # The tensor is dropped when the send has ended, not before: where a stream carries it, by an action
            # that waits for its end (lowering.py), or with the step.
            waiting = state.gradients_to_send if backward else state.to_send
            if resharded:
                ended = self._reshardings.start((key[0], backward), key[1], tag, waiting[key])
            else:
                ended = self._transport.send(peer, tag, waiting[key])
            return None if ended is None else chain_finish(ended, lambda: waiting.pop(key))

        return action

    def _receive(self, index: int, instruction: Instruction) -> Action:
        number = self._buffers.buffer_of[index]
        if number is None:
            return _no_transfer
        key = (instruction.edge, instruction.microbatch)
        backward = instruction.op == "RECV_B"
        tag = transfer_tag(instruction.edge, backward, instruction.microbatch, self._microbatches)
        buffers = self._buffers.views(index, [routes[instruction.edge].shape for routes in self._routes])
        peer, state = instruction.peer, self._state
        resharded = (instruction.edge, backward) in self._reshardings

        def action() -> Finish | None:
            # The write bypasses autograd: say so, and a backward that still needs the old tensor raises.
            buffer = buffers[state.shape_of(key[1])]
            torch.autograd.graph.increment_version(buffer)
            received = state.received_gradients if backward else state.received
            if resharded:
                ended = self._reshardings.start((key[0], backward), key[1], tag, buffer)
            else:
                ended = self._transport.receive(peer, tag, buffer)
            return chain_finish(ended, lambda: received.update({key: buffer}))

        return action

    def _step(self) -> None:
        leave_breadcrumb(f"STEP of step {self._state.step}")
        try:
            with RNG_LOCK:  # an optimizer may draw (noise, dithering)
                self._update.step()
            leave_breadcrumb("")
        except Exception as error:
            raise StageError(
                f"the optimizer raised {type(error).__name__}: {error}", "STEP", None, None
            ) from error
        self._update.gather()  # not inside: it waits for others, which in a process of several draw too


def _no_transfer() -> None:
    """A gradient that does not exist (of an integer tensor, say) needs no transfer."""


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
