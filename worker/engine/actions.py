"""Binds each instruction of a program to its action: compute, send, receive, reduce, optimizer step.

Joins stages, step state, receive buffers and transport. Must not know lanes, events or time.
A receive writes past autograd, so it bumps the buffer's version: a backward that still needs the old tensor
raises. The optimizer steps under RNG_LOCK, as it may draw; gathering ZeRO-1 parameters waits for others and
stays outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from worker.contract.failures import leave_breadcrumb
from worker.contract.program import RECEIVE_OPS, SEND_OPS, Instruction, Program
from worker.engine.buffers import plan_buffers
from worker.engine.lanes.base import Action, Finish, chain_finish
from worker.engine.optim.step import ModelUpdate
from worker.engine.reshardings import Reshardings
from worker.engine.results import StageError
from worker.engine.routes import Route, transfer_tag
from worker.engine.stage import StageRunner
from worker.engine.stage_io import StepState
from worker.model.rng import RNG_LOCK
from worker.transport.base import Transport


class ReceiveBuffers:
    """The tensors that receives write into: `of[i]` is the number of the one of instruction i, None without."""

    def __init__(
        self,
        program: Program,
        routes: Mapping[int, Route],
        dtype_of: Callable[[Route], torch.dtype],
        device: torch.device,
    ):
        plan = plan_buffers(program, routes)
        self.of: list[int | None] = list(plan.buffer)
        self.tensors = [
            torch.empty(route.shape, dtype=dtype_of(route), device=device) for route in plan.route
        ]
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in self.tensors}

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in one of them."""
        return tensor.untyped_storage().data_ptr() in self._memory


class Actions:
    """The actions of one mesh; `runners` by stage, parameters of `gradient_buckets` and sends of `releases` by
    instruction."""

    def __init__(
        self,
        program: Program,
        *,
        routes: Mapping[int, Route],
        microbatches: int,
        buffers: ReceiveBuffers,
        exchange: StepState,
        runners: Mapping[int, StageRunner],
        update: ModelUpdate,
        transport: Transport,
        gradient_buckets: Mapping[int, tuple[str, ...]],
        releases: Mapping[int, tuple[int, ...]],
        reshardings: Reshardings,
    ):
        self._program = program
        self._reshardings = reshardings
        self._gradient_buckets = gradient_buckets
        self._releases = releases
        self._routes = routes
        self._microbatches = microbatches
        self._buffers = buffers
        self._exchange = exchange
        self._runners = runners
        self._update = update
        self.transport = transport

    def of(self, index: int) -> Action:
        """What instruction `index` does."""
        instruction = self._program[index]
        if instruction.op in SEND_OPS:
            return self._send(instruction)
        if instruction.op in RECEIVE_OPS:
            return self._receive(index, instruction)
        if index in self._gradient_buckets:
            names = self._gradient_buckets[index]
            return lambda: self._update.reduce_bucket(names)
        if instruction.op == "REDUCE":
            return lambda: self._update.reduce(list(self._exchange.losses.values()))
        if instruction.op == "STEP":
            return self._step
        runner, microbatch = self._runners[instruction.stage], instruction.microbatch
        run = {
            "F": runner.forward,
            "B": runner.backward,
            "I": runner.backward_input,
            "W": runner.backward_weight,
        }[instruction.op]
        drops = [self._drop(self._program[send]) for send in self._releases.get(index, ())]
        if not drops:
            return lambda: run(microbatch)

        def action() -> None:
            for drop in drops:
                drop()
            run(microbatch)

        return action

    def _drop(self, sent: Instruction) -> Callable[[], Any]:
        key = (sent.edge, sent.microbatch)
        if sent.op == "SEND_F":
            return lambda: self._exchange.to_send.pop(key)
        return lambda: self._exchange.gradients_to_send.pop(key, None)  # one without a gradient has none

    def _send(self, instruction: Instruction) -> Action:
        key = (instruction.edge, instruction.microbatch)
        backward = instruction.op == "SEND_B"
        if backward and not self._routes[instruction.edge].differentiable:
            return _no_transfer
        tag = transfer_tag(instruction.edge, backward, instruction.microbatch, self._microbatches)
        peer, exchange = instruction.peer, self._exchange
        resharded = (instruction.edge, backward) in self._reshardings

        def action() -> Finish | None:
            # The tensor is dropped when the send has ended, not before: where a stream carries it, by an action
            # that waits for its end (sent.py), or with the step.
            waiting = exchange.gradients_to_send if backward else exchange.to_send
            if resharded:
                ended = self._reshardings.start((key[0], backward), key[1], tag, waiting[key], self.transport)
            else:
                ended = self.transport.send(peer, tag, waiting[key])
            return None if ended is None else chain_finish(ended, lambda: waiting.pop(key))

        return action

    def _receive(self, index: int, instruction: Instruction) -> Action:
        number = self._buffers.of[index]
        if number is None:
            return _no_transfer
        key = (instruction.edge, instruction.microbatch)
        backward = instruction.op == "RECV_B"
        tag = transfer_tag(instruction.edge, backward, instruction.microbatch, self._microbatches)
        buffer = self._buffers.tensors[number]
        peer, exchange = instruction.peer, self._exchange
        resharded = (instruction.edge, backward) in self._reshardings

        def action() -> Finish | None:
            # The write bypasses autograd: say so, and a backward that still needs the old tensor raises.
            torch.autograd.graph.increment_version(buffer)
            received = exchange.received_gradients if backward else exchange.received
            if resharded:
                ended = self._reshardings.start((key[0], backward), key[1], tag, buffer, self.transport)
            else:
                ended = self.transport.receive(peer, tag, buffer)
            return chain_finish(ended, lambda: received.update({key: buffer}))

        return action

    def _step(self) -> None:
        leave_breadcrumb(f"STEP of step {self._exchange.step}")
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
