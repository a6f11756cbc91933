"""The engine of one worker: runs its mesh's program step after step and watches over it.

Joins stages, transport and lanes. Must not know schedules, Ray or the control plane.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from worker.engine.buffers import plan_buffers
from worker.engine.cuda_lanes import CudaLanes
from worker.engine.errors import (
    AbortedError,
    ConnectError,
    EngineError,
    PeerLostError,
    StageError,
    StallError,
)
from worker.engine.lanes import Action, CpuLanes, Finish, LaneStatus
from worker.engine.results import MeasuredSlot, RunOptions, StepResult, slot_limits
from worker.engine.routes import Edge, Route, directed_pairs, find_routes, transfer_tag, wire_stage
from worker.engine.stage import ComputeSettings, Exchange, StageRunner
from worker.engine.update import ModelUpdate, UpdateResult, UpdateSettings, tie_local_parameters
from worker.engine.warmup import warm_up
from worker.program import (
    COMPUTE_LANE,
    COMPUTE_OPS,
    RECEIVE_OPS,
    SEND_OPS,
    TRANSFER_OPS,
    Instruction,
    Program,
)
from worker.transport.base import Failure, Progress, Transport

# How often a running step is looked at: limits, failures of others, progress to publish.
_LOOK_S = 0.25
# How long lanes may take to end after an abort, and how long a lost peer may take to say why.
_END_S = 2.0
# A transfer over its limit waits this much longer for a peer that lives: that peer watches itself, and
# it or someone behind it will name the slot that everybody waits for.
_PEER_GRACE_S = 2.0
_PEER_LIVES_S = 1.0


class Engine:
    """See `connect`, `run_step` and `close`; not reusable after an error.

    `stages` are the local ones; `edges`, `mesh_of_stage` and `tied` describe the whole graph, the same on
    every worker. `planned_s` has one planned duration for each instruction of `program`.
    """

    def __init__(
        self,
        *,
        mesh: str,
        worker: int,
        program: Program,
        stages: Mapping[int, nn.Module],
        edges: Sequence[Edge],
        mesh_of_stage: Sequence[str],
        tied: Mapping[str, Sequence[int]],
        microbatches: int,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None,
        transport: Transport,
        lr_schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        options: RunOptions | None = None,
        planned_s: Sequence[float] | None = None,
    ):
        self._mesh, self._worker = mesh, worker
        self._program = tuple(program)
        self._mesh_of_stage = tuple(mesh_of_stage)
        self._microbatches = microbatches
        self._transport = transport
        self._options = options or RunOptions()
        self._training = any(instruction.op in ("B", "I") for instruction in self._program)
        self._device = torch.device(self._options.device)
        self._check(stages, planned_s)
        self._limits_s = slot_limits(self._program, planned_s, self._options.limits)
        self._routes = find_routes(edges, self._mesh_of_stage)
        self._exchange = Exchange()
        self._make_buffers()
        tie_local_parameters(stages, tied)
        self._update = ModelUpdate(
            stages=stages,
            tied=tied,
            mesh_of_stage=self._mesh_of_stage,
            optimizer=optimizer if self._training else None,
            lr_schedule=lr_schedule if self._training else None,
            transport=transport,
            settings=UpdateSettings(self._options.clip_grad_norm, self._options.non_finite),
        )
        self._settings = self._compute_settings(loss)
        self._stages = {
            index: (
                module,
                wire_stage(index, module.inputs, module.outputs, edges, self._mesh_of_stage, self._routes),
            )
            for index, module in stages.items()
        }
        self._runners = {
            index: StageRunner(wiring, module, self._exchange, self._settings)
            for index, (module, wiring) in self._stages.items()
        }
        self._has_output = any("output" in module.outputs for module in stages.values())
        self._updated = UpdateResult()
        self._lanes: CpuLanes | CudaLanes | None = None
        self._warm = False
        self._abort_reason: str | None = None
        self._published_s = 0.0
        self._dead: EngineError | None = None

    def connect(self) -> None:
        """Block until every peer is there. ConnectError names who is missing."""
        try:
            self._transport.connect(self._update.groups, directed_pairs(self._routes, self._training))
        except ConnectError as error:
            self._transport.announce(str(error))
            raise
        actions = [self._action(i) for i in range(len(self._program))]
        if self._device.type == "cuda":
            self._lanes = CudaLanes(self._program, actions, self._options.priorities)
        else:
            self._lanes = CpuLanes(self._program, actions)

    def run_step(
        self,
        step: int,
        inputs: Sequence[tuple[torch.Tensor, ...]],
        targets: Sequence[torch.Tensor] | None = None,
    ) -> StepResult:
        """Run the program once. `inputs[m]`: all model inputs of microbatch m; `targets[m]` is needed where
        the model's output is. Raises an EngineError, after which the engine can only be closed."""
        if self._lanes is None:
            raise EngineError("the engine is not connected: call connect() before run_step()")
        if self._dead is not None:
            raise EngineError(f"the engine ended before: {self._dead}")
        self._check_batch(inputs, targets)
        try:
            if self._device.type == "cuda":
                inputs, targets = self._prepare_device(inputs, targets)
            self._exchange.begin(step, inputs, targets)
            for runner in self._runners.values():
                runner.reset()
            self._update.begin()
            started = time.monotonic()
            if started - self._published_s > _LOOK_S:
                self._publish(started, ())
            self._lanes.start()
            while not self._lanes.wait(_LOOK_S):
                self._look()
            if self._abort_reason is not None:
                raise AbortedError("", self._abort_reason)
            self._updated = self._update.finish(step)
        except BaseException as error:
            cause = self._end(error)
            if cause is error:
                raise
            raise cause from error
        return self._result(step, started)

    def state(self) -> dict[str, Any]:
        """Parameters, buffers and optimizer state by the original names of the model."""
        return self._update.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take this mesh's part of `state`, which may hold all meshes'."""
        self._update.load_state(state)

    def abort(self, reason: str) -> None:
        """End a running step from any thread; its run_step raises AbortedError."""
        self._abort_reason = reason
        self._transport.announce(reason)
        if self._lanes is not None:
            self._lanes.stop()
        self._transport.abort()

    def close(self) -> list[str]:
        """End threads and connections; the names of lanes that are stuck inside a user's code, if any."""
        stuck = []
        if self._lanes is not None:
            if self._dead is not None:
                self._transport.abort()
            stuck = self._lanes.close(_END_S)
        self._transport.close()
        return stuck

    # Construction

    def _check(self, stages: Mapping[int, nn.Module], planned_s: Sequence[float] | None) -> None:
        needed = {i.stage for i in self._program if i.op in COMPUTE_OPS}
        if missing := sorted(needed - set(stages)):
            raise ValueError(f"the program of mesh {self._mesh} runs stages {missing}, which were not given")
        if planned_s is not None and len(planned_s) != len(self._program):
            raise ValueError(f"planned_s has {len(planned_s)} times for {len(self._program)} instructions")

    def _make_buffers(self) -> None:
        plan = plan_buffers(self._program, self._routes)
        self._buffer_of = plan.buffer
        self._buffers = [
            torch.empty(route.shape, dtype=self._transfer_dtype(route), device=self._device)
            for route in plan.route
        ]
        self._pooled = {buffer.untyped_storage().data_ptr() for buffer in self._buffers}

    def _compute_settings(
        self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> ComputeSettings:
        return ComputeSettings(
            device=self._device,
            training=self._training,
            microbatches=self._microbatches,
            loss=loss,
            autocast_dtype=torch.bfloat16 if self._options.precision == "bf16" else None,
            seed=self._options.seed,
            worker=self._worker,
            transfer_dtype=self._transfer_dtype,
            is_pooled=lambda tensor: tensor.untyped_storage().data_ptr() in self._pooled,
        )

    def _transfer_dtype(self, route: Route) -> torch.dtype:
        if self._options.precision == "bf16" and route.differentiable and route.dtype == torch.float32:
            return torch.bfloat16
        return route.dtype

    def _prepare_device(self, inputs, targets):
        """Before a step: the batch on the device, and before the first one all kernels loaded."""
        inputs = [tuple(t.to(self._device, non_blocking=True) for t in arguments) for arguments in inputs]
        if targets is not None:
            targets = [target.to(self._device, non_blocking=True) for target in targets]
        if not self._warm:
            split = any(instruction.op == "I" for instruction in self._program)
            torch.cuda.synchronize(self._device)
            with self._lanes.computing():  # memory and workspaces belong to a stream
                warm_up(self._stages, inputs[0], targets[0] if targets else None, self._settings, split)
            self._warm = True
        torch.cuda.synchronize(self._device)
        return inputs, targets

    # What each instruction does

    def _action(self, index: int) -> Action:
        instruction = self._program[index]
        if instruction.op in SEND_OPS:
            return self._send_action(instruction)
        if instruction.op in RECEIVE_OPS:
            return self._receive_action(index, instruction)
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
        return lambda: run(microbatch)

    def _send_action(self, instruction: Instruction) -> Action:
        key = (instruction.edge, instruction.microbatch)
        backward = instruction.op == "SEND_B"
        if backward and not self._routes[instruction.edge].differentiable:
            return _nothing
        tag = transfer_tag(instruction.edge, backward, instruction.microbatch, self._microbatches)
        peer, send, exchange = instruction.peer, self._transport.send, self._exchange

        def action() -> Finish | None:
            # The tensor is dropped when the send has ended, not before.
            waiting = exchange.gradients_to_send if backward else exchange.to_send
            return _then(send(peer, tag, waiting[key]), lambda: waiting.pop(key))

        return action

    def _receive_action(self, index: int, instruction: Instruction) -> Action:
        if self._buffer_of[index] is None:
            return _nothing
        key = (instruction.edge, instruction.microbatch)
        backward = instruction.op == "RECV_B"
        tag = transfer_tag(instruction.edge, backward, instruction.microbatch, self._microbatches)
        buffer = self._buffers[self._buffer_of[index]]
        peer, receive, exchange = instruction.peer, self._transport.receive, self._exchange

        def action() -> Finish | None:
            # The write bypasses autograd: say so, and a backward that still needs the old tensor raises.
            torch.autograd.graph.increment_version(buffer)
            received = exchange.received_gradients if backward else exchange.received
            return _then(receive(peer, tag, buffer), lambda: received.update({key: buffer}))

        return action

    def _step(self) -> None:
        try:
            self._update.step()
        except Exception as error:
            raise StageError(
                f"the optimizer raised {type(error).__name__}: {error}", "STEP", None, None
            ) from error

    # Watching

    def _look(self) -> None:
        """Raise when a slot is over its limit or somebody else failed; tell the others how far we are."""
        now = time.monotonic()
        statuses = self._lanes.statuses()
        self._publish(now, statuses)
        if self._abort_reason is not None:
            raise AbortedError("", self._abort_reason)
        failure = self._transport.failure()
        if failure is not None:
            raise AbortedError(failure.origin, failure.reason)
        for status in statuses:
            if status.current is None or status.waits_for is not None:
                continue
            waited = now - status.since_s
            over = waited - self._limits_s[status.current]
            if over > 0 and not (over < _PEER_GRACE_S and self._peer_lives(status.current)):
                raise self._stall(status.current, waited)

    def _peer_lives(self, index: int) -> bool:
        peer = self._program[index].peer
        progress = self._progress(peer) if peer is not None else None
        return progress is not None and progress.age_s < _PEER_LIVES_S

    def _stall(self, index: int, waited_s: float) -> StallError:
        instruction = self._program[index]
        parts = [
            f"mesh {self._mesh}: {instruction} on lane {instruction.lane} has not ended after {waited_s:.1f} s "
            f"(limit {self._limits_s[index]:.1f} s)"
        ]
        if instruction.peer is not None:
            peer = instruction.peer
            parts.append(f"it waits for {peer}")
            progress = self._progress(peer)
            parts.append(
                f"{peer} said {progress.age_s:.1f} s ago: {progress.text}"
                if progress
                else f"{peer} has said nothing"
            )
        for status in self._lanes.statuses():
            if status.waits_for is not None:
                waiter = self._program[status.current]
                since = time.monotonic() - status.since_s
                parts.append(
                    f"{waiter} on lane {waiter.lane} waits for event {status.waits_for} "
                    f"({self._recorder(status.waits_for)}) since {since:.1f} s"
                )
        return StallError("; ".join(parts), str(instruction), instruction.lane, waited_s)

    def _recorder(self, event: int) -> str:
        return next((str(i) for i in self._program if i.record == event), "nobody")

    def _publish(self, now: float, statuses: Sequence[LaneStatus]) -> None:
        last = self._lanes.last_compute()
        text = (
            f"step {self._exchange.step}, last finished {'nothing' if last is None else self._program[last]}"
        )
        for status in statuses:
            if status.lane == COMPUTE_LANE and status.current is not None:
                doing = "running" if status.waits_for is None else "waiting to run"
                text += f", {doing} {self._program[status.current]} for {now - status.since_s:.1f} s"
        self._published_s = now
        try:
            self._transport.publish(text)
        except RuntimeError as error:
            raise PeerLostError(f"the rendezvous store is gone: {error}", "driver") from error

    def _progress(self, mesh: str) -> Progress | None:
        try:
            return self._transport.progress(mesh)
        except RuntimeError:
            return None

    def _failure(self) -> Failure | None:
        """What somebody announced; a broken connection that the transport has noticed says less."""
        try:
            return self._transport.failure()
        except PeerLostError:
            return None

    def _end(self, error: BaseException) -> BaseException:
        """Tell the others, stop everything, and find the error that names the cause."""
        cause = self._cause(error)
        if not isinstance(cause, AbortedError):
            self._transport.announce(str(cause))
        self._dead = cause if isinstance(cause, EngineError) else EngineError(str(cause))
        self._lanes.stop()
        self._transport.abort()
        deadline = time.monotonic() + _END_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                if self._lanes.wait(left):
                    break
            except Exception:
                continue  # what the abort made a lane raise
        return cause

    def _cause(self, error: BaseException) -> BaseException:
        if self._abort_reason is not None:
            return AbortedError("", self._abort_reason)
        if isinstance(error, PeerLostError):
            # Whoever broke the connection may have said why; give the word a moment to arrive.
            deadline = time.monotonic() + _END_S
            while time.monotonic() < deadline:
                if failure := self._failure():
                    return AbortedError(failure.origin, failure.reason)
                time.sleep(0.05)
            return self._lost(error)
        if isinstance(error, EngineError):
            return error
        if isinstance(error, Exception):
            return EngineError(f"mesh {self._mesh}: {type(error).__name__}: {error}")
        return error

    def _lost(self, error: PeerLostError) -> PeerLostError:
        text = f"mesh {self._mesh}: {error}"
        if progress := (
            self._progress(error.peer) if error.peer in self._transport.topology.meshes else None
        ):
            text += f"; {error.peer} said {progress.age_s:.1f} s ago: {progress.text}"
        return PeerLostError(text, error.peer)

    # Results

    def _check_batch(
        self, inputs: Sequence[tuple[torch.Tensor, ...]], targets: Sequence[torch.Tensor] | None
    ) -> None:
        if len(inputs) != self._microbatches:
            raise ValueError(f"run_step got {len(inputs)} microbatches, the program has {self._microbatches}")
        if self._training and self._has_output and (targets is None or len(targets) != self._microbatches):
            raise ValueError(f"run_step needs {self._microbatches} targets where the model's output is")

    def _result(self, step: int, started: float) -> StepResult:
        losses = self._exchange.losses
        outputs = self._exchange.outputs
        slots = [
            self._slot(instruction, start, end)
            for instruction, (start, end) in zip(self._program, self._lanes.measured(), strict=True)
        ]
        return StepResult(
            step=step,
            losses=torch.stack([losses[m] for m in sorted(losses)]).tolist() if losses else [],
            outputs=[outputs[m] for m in sorted(outputs)],
            slots=slots,
            grad_norm=self._updated.grad_norm,
            skipped=self._updated.skipped,
            started_s=started,
            ended_s=time.monotonic(),
        )

    def _slot(self, instruction: Instruction, start: float, end: float) -> MeasuredSlot:
        peer_stage = None
        if instruction.op in TRANSFER_OPS:
            route = self._routes[instruction.edge]
            ours = self._mesh == route.source_mesh
            peer_stage = route.consumers[0] if ours else route.source
        return MeasuredSlot(
            lane=instruction.lane,
            action=instruction.op,
            stage=instruction.stage,
            microbatch=instruction.microbatch,
            edge=instruction.edge,
            peer_mesh=instruction.peer,
            peer_stage=peer_stage,
            start_s=start,
            end_s=end,
        )


def _nothing() -> None:
    """A gradient that does not exist (of an integer tensor, say) needs no transfer."""


def _then(ended: Finish | None, last: Callable[[], Any]) -> Finish | None:
    """Do `last` when a transfer has ended: at once where the lane's stream carries it."""
    if ended is None:
        last()
        return None

    def finish() -> None:
        ended()
        last()

    return finish
