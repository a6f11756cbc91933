"""The engine of one worker: runs its mesh's program step after step.

Joins stages, transport, actions, lanes and the watchdog over them; an engine that raised can only be closed.
The thread that calls `run_step` polls: limits, failures of others, progress to publish. `abort` may come from
any thread. Must not know schedules, Ray or the control plane.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from worker.contract.buckets import BucketedProgram, with_buckets
from worker.contract.planned import MeshProgram
from worker.contract.program import TRANSFER_OPS, Instruction, MeasuredSlot, Program
from worker.engine.actions import Actions, ReceiveBuffers
from worker.engine.lanes.base import Action, Lanes
from worker.engine.lanes.cpu import CpuLanes
from worker.engine.lanes.cuda import CudaLanes
from worker.engine.local_stages import LocalStages, tie_local_parameters
from worker.engine.lowering import bound_send_lifetimes, check_batch, check_stages
from worker.engine.optim.grad_scaler import make_grad_scaler
from worker.engine.optim.reduce_and_step import UpdateResult, UpdateSettings, bucket_candidates
from worker.engine.optim.zero1 import make_update
from worker.engine.reshardings import Reshardings, check_resharding_plans
from worker.engine.results import RunOptions, StepResult, slot_limits
from worker.engine.routes import Route, directed_pairs, find_routes, transfer_tag, wire_stage
from worker.engine.stage import StageRunner
from worker.engine.stage_io import ComputeSettings, LossValue, StageObserver, StepState
from worker.engine.warmup import StateSnapshot, batch_on_device
from worker.engine.watchdog import Watchdog
from worker.model.stages import transfer_dtype
from worker.parallel.collectives import Collectives, token_weights
from worker.parallel.process_groups import batch_norm_groups, reduce_groups
from worker.parallel.sync_batch_norm import synchronize_batch_norms
from worker.transport.base import AbortedError, ConnectError, EngineError, Transport


def step_result(
    step: int, started_s: float, state: StepState, updated: UpdateResult, slots: list[MeasuredSlot]
) -> StepResult:
    """The step that began at `started_s` of time.monotonic() and ends now."""
    return StepResult(
        step=step,
        losses=state.losses_in_order(),
        metrics=state.metrics_by_name(),
        outputs=state.outputs_in_order(),
        slots=slots,
        grad_norm=updated.grad_norm,
        skipped=updated.skipped,
        started_s=started_s,
        ended_s=time.monotonic(),
        loss_scale=updated.loss_scale,
        overflowed=updated.overflowed,
    )


def measured_slots(
    mesh: str, routes: Mapping[int, Route], program: Program, measured: Iterable[tuple[float, float]]
) -> list[MeasuredSlot]:
    """The slots of `program` on `mesh`, each from start to end of time.monotonic()."""
    return [
        measured_slot(mesh, routes, instruction, start_s, end_s)
        for instruction, (start_s, end_s) in zip(program, measured, strict=True)
    ]


def measured_slot(
    mesh: str, routes: Mapping[int, Route], instruction: Instruction, start_s: float, end_s: float
) -> MeasuredSlot:
    """The slot of `instruction` of `mesh`, from `start_s` to `end_s` of time.monotonic()."""
    peer_stage = None
    if instruction.op in TRANSFER_OPS:
        route = routes[instruction.edge]
        peer_stage = route.consumers[0] if mesh == route.source_mesh else route.source
    return MeasuredSlot(
        lane=instruction.lane,
        action=instruction.op,
        stage=instruction.stage,
        microbatch=instruction.microbatch,
        edge=instruction.edge,
        peer_mesh=instruction.peer,
        peer_stage=peer_stage,
        start_s=start_s,
        end_s=end_s,
    )


# How often a running step is looked at: limits, failures of others, progress to publish.
_POLL_S = 0.25
# How long lanes may take to end after an abort.
_STOP_LIMIT_S = 2.0
# How long the first run, which loads kernels, may take.
_WARM_UP_LIMIT_S = 600.0


def engine_collectives(
    transport: Transport,
    program: MeshProgram,
    mesh_of_stage: Sequence[str],
    tied: Mapping[str, Sequence[int]],
    options: RunOptions,
) -> Collectives:
    """The collectives of an engine that runs `program` by `options`: their groups are equal on every worker."""
    topology = transport.topology
    groups = reduce_groups(topology, tied, mesh_of_stage, bool(options.sharded), options.tensor)
    if program.trains and options.sync_batch_norm:
        groups |= batch_norm_groups(topology, options.tensor)
    return Collectives(transport, groups, "steps" if program.trains else "forwards")


class Engine:
    """Runs the program of one mesh on one worker: see `connect`, `run_step` and `close`; not reusable after an error.

    `collectives` are those of `engine_collectives` with the same arguments. A program without backwards makes no
    optimizer.
    """

    def __init__(
        self,
        program: MeshProgram,
        stages: LocalStages,
        collectives: Collectives,
        *,
        loss: Callable[[torch.Tensor, torch.Tensor], LossValue],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        lr_schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        options: RunOptions | None = None,
    ):
        self._mesh, self._worker = collectives.mesh, collectives.worker
        self._microbatches = program.microbatches
        self._training = program.trains
        self._options = options or RunOptions()
        self._device = torch.device(self._options.device)
        self._collectives = collectives
        self._transport = collectives.transport
        self._mesh_of_stage = tuple(stages.mesh_of_stage)
        self._routes = find_routes(stages.edges, self._mesh_of_stage)
        check_stages(self._mesh, program.instructions, stages.modules)
        check_resharding_plans(
            program.reshardings, self._routes, collectives.topology, training=self._training
        )
        tie_local_parameters(stages.modules, stages.tied)
        if self._training and self._options.sync_batch_norm:
            synchronize_batch_norms(stages.modules, collectives, self._options.tensor)
        bucketed = with_buckets(
            program.instructions, bucket_candidates(stages, collectives, self._options.tensor)
        )
        self._update = make_update(
            stages,
            collectives,
            UpdateSettings.of(self._options, self._device),
            optimizer=optimizer if self._training else None,
            lr_schedule=lr_schedule if self._training else None,
            scaler=make_grad_scaler(self._options) if self._training else None,
            bucketed=[name for names in bucketed.buckets.values() for name in names],
        )
        self._program, planned_s, releases = self._with_planned_times(bucketed, program)
        self._limits_s = slot_limits(self._program, planned_s, self._options.limits)
        self._buffers = ReceiveBuffers(self._program, self._routes, self._transfer_dtype, self._device)
        self._state = StepState()
        settings = self._compute_settings(loss)
        self.stages = {
            index: (
                module,
                wire_stage(
                    index, module.inputs, module.outputs, stages.edges, self._mesh_of_stage, self._routes
                ),
            )
            for index, module in stages.modules.items()
        }
        self.runners = {
            index: StageRunner(wiring, module, self._state, settings, recompute=index in program.recomputed)
            for index, (module, wiring) in self.stages.items()
        }
        self._reshardings = Reshardings(
            program.reshardings,
            self._transport,
            transfers=transfer_tag(len(stages.edges), False, 0, self._microbatches),
            slot_limit_s=max(self._limits_s, default=1.0),
            streams=self._enqueues(),
        )
        self._actions = Actions(
            self._program,
            reshardings=self._reshardings,
            routes=self._routes,
            microbatches=self._microbatches,
            buffers=self._buffers,
            state=self._state,
            runners=self.runners,
            update=self._update,
            transport=self._transport,
            gradient_buckets=bucketed.buckets,
            releases=releases,
        )
        self._needs_targets = self._training and stages.have_output
        self._updated = UpdateResult()
        self._lanes: Lanes | None = None
        self._warm = False
        self._abort_reason: str | None = None
        self._dead: EngineError | None = None

    @property
    def lanes(self) -> tuple[tuple[str, str], ...]:
        """The directed pairs of meshes, or of workers, that exchange tensors."""
        pairs = directed_pairs(self._routes, self._training, self._reshardings.planned)
        return pairs + self._reshardings.lanes()

    def connect(self, more: Iterable[tuple[str, str]] = ()) -> None:
        """Block until every peer is there, of the pairs `more` too. ConnectError names who is missing."""
        try:
            self._collectives.connect(tuple(sorted({*self.lanes, *more})))
        except ConnectError as error:
            self._transport.announce(str(error))
            raise
        self._lanes = self._make_lanes(
            self._collectives.log.attribute_to_slots(self._program, self._actions.of)
        )
        self._watch = Watchdog(
            mesh=self._mesh,
            program=self._program,
            limits_s=self._limits_s,
            transport=self._transport,
            lanes=self._lanes,
            reshardings=self._reshardings,
            gathers=self._mesh in self._options.sharded,
            collectives=self._collectives,
        )

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
        check_batch(inputs, targets, microbatches=self._microbatches, needs_targets=self._needs_targets)
        with self._ended_by_errors():
            if self._enqueues() and not self._warm:
                self._warm_up(step, inputs, targets)
            inputs, targets = batch_on_device(inputs, targets, self._device)
            self._begin(step, inputs, targets)
            self._collectives.log.compare_before_step()
            started = time.monotonic()
            if started - self._watch.published_s > _POLL_S:
                self._watch.publish(step, ())
            self._lanes.start()
            while not self._lanes.wait(_POLL_S):
                self._poll()
            self._raise_if_aborted()
            self._updated = self._update.finish(step)
            # The slots behind the last sum may take others longer.
            self._collectives.log.compare_after_step(max(self._limits_s, default=0.0))
        return step_result(
            step,
            started,
            self._state,
            self._updated,
            measured_slots(self._mesh, self._routes, self._program, self._lanes.measured()),
        )

    def warm_up(
        self,
        step: int,
        inputs: Sequence[tuple[torch.Tensor, ...]],
        targets: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Run the program once without transfers; see warmup.py. `run_step` would do it before its first step, while
        the peers wait for this mesh. Leaves nothing changed; raises as `run_step` does."""
        if self._lanes is None:
            raise EngineError("the engine is not connected: call connect() before warm_up()")
        if self._dead is not None:
            raise EngineError(f"the engine ended before: {self._dead}")
        check_batch(inputs, targets, microbatches=self._microbatches, needs_targets=self._needs_targets)
        with self._ended_by_errors():
            self._warm_up(step, inputs, targets)

    def observe(self, observer: StageObserver | None) -> None:
        """Report to `observer` from now on what the stages do; None ends it."""
        for runner in self.runners.values():
            runner.observe(observer)

    def muted(self) -> contextlib.AbstractContextManager[None]:
        """A context in whose body nothing is sent, received or summed."""
        return self._collectives.muted()

    def state(self) -> dict[str, Any]:
        """Parameters, buffers and optimizer state by the original names of the model. Where the workers of this mesh share
        the optimizer's state all of them ask at the same time, and worker 0 gets it."""
        with contextlib.nullcontext() if self._lanes is None else self._lanes.computing():
            return self._update.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load this mesh's part of `state`, which may hold all meshes'."""
        with contextlib.nullcontext() if self._lanes is None else self._lanes.computing():
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
            stuck = self._lanes.close(_STOP_LIMIT_S)
        self._transport.close()
        return stuck

    # Construction

    def _with_planned_times(
        self, bucketed: BucketedProgram, program: MeshProgram
    ) -> tuple[Program, list[float] | None, Mapping[int, tuple[int, ...]]]:
        """The instructions of `bucketed` with what `program` says of them: on streams with waits that bound the lifetimes
        of sends; the planned seconds of each; and the sends that each may release."""
        if program.planned_s is None:
            return bucketed.program, None, {}
        planned_s = [0.0 if i is None else program.planned_s[i] for i in bucketed.source]
        if program.planned_starts_s is None or not self._enqueues():
            return bucketed.program, planned_s, {}
        starts_s = [None if i is None else program.planned_starts_s[i] for i in bucketed.source]
        lifetimes = bound_send_lifetimes(
            bucketed.program, starts_s, planned_s, self._routes, self._sent_bytes
        )
        return lifetimes.program, planned_s, lifetimes.released_before

    def _compute_settings(self, loss: Callable[[torch.Tensor, torch.Tensor], LossValue]) -> ComputeSettings:
        return ComputeSettings(
            device=self._device,
            training=self._training,
            microbatches=self._microbatches,
            loss=loss,
            autocast_dtype=self._options.autocast_dtype,
            seed=self._options.seed,
            worker=self._worker // self._options.tensor,
            transfer_dtype=self._transfer_dtype,
            is_pooled=self._buffers.contains,
            weights=None
            if (ignored := self._options.ignored_target) is None
            else lambda targets: token_weights(targets, ignored, self._collectives, self._options.tensor),
            keeps_random=self._options.keeps_random,
            scaler=self._update.scaler,
        )

    def _transfer_dtype(self, route: Route) -> torch.dtype:
        return transfer_dtype(route.dtype, route.differentiable, self._options.transfers)

    def _enqueues(self) -> bool:
        """True where lanes are streams, on which the host enqueues a step before any of it has run."""
        return self._device.type == "cuda"

    def _sent_bytes(self, route: Route) -> int:
        return math.prod(route.shape) * self._transfer_dtype(route).itemsize

    def _make_lanes(self, actions: Sequence[Action]) -> Lanes:
        if self._enqueues():
            return CudaLanes(self._program, actions, self._options.priorities)
        return CpuLanes(self._program, actions)

    def _begin(self, step, inputs, targets) -> None:
        """Forget the last step and take the batch of this one."""
        self._state.begin(step, inputs, targets)
        for runner in self.runners.values():
            runner.reset()
        self._update.begin()
        self._collectives.log.begin()

    def _warm_up(self, step, inputs, targets) -> None:
        snapshot = StateSnapshot([module for module, _ in self.stages.values()], self._update.optimizer)
        inputs, targets = batch_on_device(inputs, targets, self._device)
        self._begin(step, inputs, targets)
        with self.muted():
            self._lanes.start()
            deadline = time.monotonic() + _WARM_UP_LIMIT_S
            while not self._lanes.wait(_POLL_S):
                self._watch.publish(step, ())
                self._raise_if_aborted()
                self._watch.check(())  # no slot has a limit yet: kernels are being loaded
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"mesh {self._mesh}: the program's first run, without transfers, took longer than "
                        f"{_WARM_UP_LIMIT_S:.0f} s; does the model compile something?"
                    )
        self._collectives.log.record_dry_run()
        snapshot.restore()
        self._begin(step, (), None)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._warm = True

    # While a step runs, and when it ends early

    def _poll(self) -> None:
        """Publish the progress of this worker; raise when a slot is over its limit or another worker failed."""
        statuses = self._lanes.statuses()
        self._watch.publish(self._state.step, statuses)
        self._raise_if_aborted()
        self._watch.check(statuses)

    def _raise_if_aborted(self) -> None:
        if self._abort_reason is not None:
            raise AbortedError("", self._abort_reason)

    @contextlib.contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """Whatever the body raises ends the engine, and is raised as the error that names the cause."""
        try:
            yield
        except BaseException as error:
            cause = self._end(error)
            if cause is error:
                raise
            raise cause from error

    def _end(self, error: BaseException) -> BaseException:
        """Announce the failure, stop lanes and transport, and return the error that names the cause."""
        if self._abort_reason is not None:
            cause: BaseException = AbortedError("", self._abort_reason)
        else:
            cause = self._watch.diagnose(error)
        if not isinstance(cause, AbortedError):
            self._transport.announce(str(cause))
        self._dead = cause if isinstance(cause, EngineError) else EngineError(str(cause))
        self._lanes.stop()
        self._transport.abort()
        deadline = time.monotonic() + _STOP_LIMIT_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                if self._lanes.wait(left):
                    break
            except Exception:
                continue  # what the abort made a lane raise
        return cause
