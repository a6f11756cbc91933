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
from dataclasses import dataclass
from typing import Any

import torch

from worker.contract.planned import MeshProgram
from worker.contract.program import COMPUTE_LANE, TRANSFER_OPS, Instruction, MeasuredSlot, Program
from worker.engine.actions import Actions, ReceiveBuffers
from worker.engine.lanes.base import Action, Lanes
from worker.engine.lanes.cpu import CpuLanes
from worker.engine.lanes.cuda import CudaLanes
from worker.engine.local_stages import LocalStages, tie_local_parameters
from worker.engine.lowering import (
    LoweredProgram,
    check_batch,
    check_exchange,
    check_smaller_stages,
    check_stages,
    lower_program,
    order_of_sums,
)
from worker.engine.optim.grad_scaler import make_grad_scaler
from worker.engine.optim.reduce_and_step import UpdateResult, UpdateSettings, bucket_candidates
from worker.engine.optim.zero1 import make_update
from worker.engine.reshardings import Reshardings, check_resharding_plans
from worker.engine.results import RunOptions, StepResult, slot_limits
from worker.engine.routes import (
    Route,
    directed_pairs,
    find_routes,
    transfer_tag,
    wire_stage,
)
from worker.engine.spot_check import ForwardCheck, choose_spot
from worker.engine.stage import StageRunner
from worker.engine.stage_io import ComputeSettings, LossValue, StageObserver, StepState
from worker.engine.warmup import StateSnapshot, batch_on_device
from worker.engine.watchdog import Watchdog
from worker.model.stages import transfer_dtype
from worker.parallel.chunks import FlatRun
from worker.parallel.collectives import Collectives, token_weights
from worker.parallel.process_groups import batch_norm_groups, reduce_groups
from worker.parallel.sync_batch_norm import synchronize_batch_norms
from worker.transport.base import AbortedError, ConnectError, EngineError, Transport


def step_result(
    step: int,
    started_s: float,
    state: StepState,
    updated: UpdateResult,
    slots: list[MeasuredSlot],
    check: ForwardCheck | None = None,
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
        difference=None if check is None else check.difference(),
        without_targets=state.weights.count(0.0) if state.weights is not None else 0,
    )


def label_slot_times(
    mesh: str, routes: Mapping[int, Route], program: Program, times: Iterable[tuple[float, float]]
) -> list[MeasuredSlot]:
    """The slots of `program` on `mesh` with the `times` that its lanes measured: start and end of time.monotonic()."""
    return [
        label_slot_time(mesh, routes, instruction, start_s, end_s)
        for instruction, (start_s, end_s) in zip(program, times, strict=True)
    ]


def label_slot_time(
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


@dataclass(frozen=True)
class _BoundProgram:
    """The state of an engine that belongs to the program it runs: the planned program, as it was lowered, the limits of
    its slots, the buffers of its receives and the actions of its instructions."""

    planned: MeshProgram
    lowered: LoweredProgram
    limits_s: list[float]
    buffers: ReceiveBuffers
    actions: Actions


class Engine:
    """Runs the program of one mesh on one worker: see `connect`, `run_step` and `close`; not reusable after an error.

    `collectives` are those of `engine_collectives` with the same arguments, `optimizer` that of `optimizer_of` for the same
    stages; a program without backwards has none.
    """

    def __init__(
        self,
        program: MeshProgram,
        stages: LocalStages,
        collectives: Collectives,
        *,
        loss: Callable[[torch.Tensor, torch.Tensor], LossValue],
        optimizer: torch.optim.Optimizer | None = None,
        lr_schedule: Any | None = None,
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
        check_smaller_stages(self._mesh, stages, program, self._options)
        check_stages(self._mesh, program.instructions, stages.modules)
        check_resharding_plans(
            program.reshardings, self._routes, collectives.topology, training=self._training
        )
        tie_local_parameters(stages.modules, stages.tied)
        if self._training and self._options.sync_batch_norm:
            synchronize_batch_norms(stages.modules, collectives, self._options.tensor)
        self._gradients = bucket_candidates(stages, collectives, self._options.tensor)
        lowered = self._lower(program)
        self._update = make_update(
            stages,
            collectives,
            UpdateSettings.of(self._options, self._device),
            optimizer=optimizer if self._training else None,
            lr_schedule=lr_schedule if self._training else None,
            scaler=make_grad_scaler(self._options) if self._training else None,
            bucketed=[name for names in lowered.buckets.values() for name in names],
        )
        limits_s = slot_limits(lowered.instructions, lowered.planned_s, self._options.limits)
        self._state = StepState()
        settings = self._compute_settings(loss)
        self.stages = stages.modules
        self._routes_by_shape: list[Mapping[int, Route]] = []
        self._runners_by_shape: list[dict[int, StageRunner]] = []
        for of_shape in (stages, *stages.smaller):
            edges = of_shape.edges
            routes = find_routes(edges, self._mesh_of_stage)
            self._routes_by_shape.append(routes)
            self._runners_by_shape.append(
                {
                    index: StageRunner(
                        wire_stage(index, module.inputs, module.outputs, edges, self._mesh_of_stage, routes),
                        module,
                        self._state,
                        settings,
                        recompute=program.recomputed.get(index),
                    )
                    for index, module in of_shape.modules.items()
                }
            )
        self.runners = self._runners_by_shape[0]
        self._reshardings = Reshardings(
            program.reshardings,
            self._transport,
            transfers=transfer_tag(len(stages.edges), False, 0, self._microbatches),
            slot_limit_s=max(limits_s, default=1.0),
            streams=self._enqueues(),
        )
        self._own = program
        self._install(self._bind(program, lowered))
        tensors = [
            id(tensor)
            for module in stages.modules.values()
            for tensor in (*module.parameters(), *module.buffers())
        ]
        self._stages_share_tensors = len({*tensors}) < len(tensors)
        self._needs_targets = self._training and stages.have_output
        self._updated = UpdateResult()
        self._lanes: Lanes | None = None
        self._prepared: tuple[_BoundProgram, Lanes] | None = None
        self._warm, self._rehearsed = False, False
        self._first_step: int | None = None
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
        self._start_on(self._make_lanes(self._recorded(self._program, self._actions)))

    def run_step(
        self,
        step: int,
        inputs: Sequence[tuple[torch.Tensor, ...]],
        targets: Sequence[torch.Tensor] | None = None,
        shapes: Sequence[int] = (),
    ) -> StepResult:
        """Run the program once. `inputs[m]`: all model inputs of microbatch m; `targets[m]` is needed where
        the model's output is. `shapes[m]` is 0, or the number (from 1) of the smaller stages that run microbatch m.
        Raises an EngineError, after which the engine can only be closed."""
        if self._lanes is None:
            raise EngineError("the engine is not connected: call connect() before run_step()")
        if self._dead is not None:
            raise EngineError(f"the engine ended before: {self._dead}")
        check_batch(inputs, targets, microbatches=self._microbatches, needs_targets=self._needs_targets)
        with self._ended_by_errors():
            if self._enqueues() and not self._rehearsed:
                if not self._warm:
                    self._warm_up(step, inputs, targets)
                self._rehearse(step)
            inputs, targets = batch_on_device(inputs, targets, self._device)
            self._begin(step, inputs, targets, shapes)
            check = self._spot_check(step)
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
            label_slot_times(self._mesh, self._routes, self._program, self._lanes.slot_times()),
            check,
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

    def rehearse(self, step: int) -> None:
        """Run the collectives of a warmed-up program alone, each kind once, so that none connects within a step. Every
        worker calls this behind `warm_up`; else `run_step` does it. Raises as `run_step` does, and where a worker does
        not come."""
        if not self._warm:
            raise EngineError("the engine is not warmed up: call warm_up() before rehearse()")
        with self._ended_by_errors():
            self._rehearse(step)

    def prepare_program(self, program: MeshProgram) -> bool:
        """Make another order of this engine's program ready for `swap_program`, between two steps; whether it adds up
        gradients in the same order, so that they are the same to the bit. ValueError for a program with which this engine
        cannot go on. Until it is swapped in the present one runs, whatever is raised here."""
        if self._lanes is None or self._dead is not None:
            raise EngineError("an engine that is not connected, or that has ended, runs no other program")
        self.drop_program()
        if self._enqueues():
            raise ValueError(
                "on CUDA a running job keeps its program: another one would load kernels within a step"
            )
        check_exchange(self._mesh, self._bound.planned, program)
        bound = self._bind(program, self._lower(program))
        lanes = CpuLanes(
            bound.lowered.instructions, self._recorded(bound.lowered.instructions, bound.actions)
        )
        self._prepared = bound, lanes
        shared = self._stages_share_tensors
        return order_of_sums(bound.lowered, shared) == order_of_sums(self._bound.lowered, shared)

    def swap_program(self) -> None:
        """Run the prepared program from the next step on; between two steps, on all workers."""
        if self._prepared is None:
            raise EngineError("no program was prepared: call prepare_program() before swap_program()")
        self._swap()
        self._own = self._bound.planned

    def take_program(self, program: MeshProgram | None) -> None:
        """Run the next step by `program`, another order of the engine's own; None: by its own. Between two steps, on all
        workers; raises as `prepare_program` does."""
        program = program or self._own
        if program != self._bound.planned:
            self.prepare_program(program)
            self._swap()

    def _swap(self) -> None:
        (bound, lanes), self._prepared = self._prepared, None
        before = self._lanes
        self._install(bound)
        self._start_on(lanes)
        before.close(_STOP_LIMIT_S)

    def drop_program(self) -> None:
        """Forget the prepared program, if there is one."""
        if self._prepared is not None:
            (_, lanes), self._prepared = self._prepared, None
            lanes.close(_STOP_LIMIT_S)

    def observe(self, observer: StageObserver | None) -> None:
        """Report to `observer` from now on what the stages do; None ends it."""
        for runners in self._runners_by_shape:
            for runner in runners.values():
                runner.observe(observer)

    def muted(self) -> contextlib.AbstractContextManager[None]:
        """A context in whose body nothing is sent, received or summed."""
        return self._collectives.muted()

    def state(self) -> dict[str, Any]:
        """Parameters, buffers and optimizer state by the original names of the model, of tensor-parallel ones this rank's
        shards, and of the optimizer's state its `partitions`."""
        with contextlib.nullcontext() if self._lanes is None else self._lanes.computing():
            return self._update.state()

    @property
    def partitions(self) -> Mapping[str, FlatRun]:
        """The elements of which this worker has the optimizer's state, by name of a parameter; none without ZeRO-1."""
        return self._update.partitions

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load this worker's tensors from `state`, of tensor-parallel ones its shards; it may hold other meshes' too."""
        with contextlib.nullcontext() if self._lanes is None else self._lanes.computing():
            self._update.load_state(state)

    def advance_schedule(self, steps: int) -> None:
        """Move the learning-rate schedule on by `steps`, without training."""
        self._update.advance_schedule(steps)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of this worker's parameters; None where it trains none."""
        return self._update.optimizer

    @property
    def updated(self) -> Mapping[str, torch.Tensor]:
        """The parameters that the optimizer updates, by name; their partitions under ZeRO-1."""
        return self._update.updated

    @property
    def host_s(self) -> float | None:
        """Processor seconds of the thread that enqueued the last step on CUDA; None where lanes are no streams."""
        return self._lanes.host_s if isinstance(self._lanes, CudaLanes) else None

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
        self.drop_program()
        if self._lanes is not None:
            if self._dead is not None:
                self._transport.abort()
            stuck = self._lanes.close(_STOP_LIMIT_S)
        self._transport.close()
        return stuck

    # Construction

    def _lower(self, program: MeshProgram) -> LoweredProgram:
        return lower_program(
            program, self._gradients, self._routes, self._sent_bytes if self._enqueues() else None
        )

    def _bind(self, program: MeshProgram, lowered: LoweredProgram) -> _BoundProgram:
        instructions = lowered.instructions
        buffers = ReceiveBuffers(instructions, self._routes_by_shape, self._transfer_dtype, self._device)
        actions = Actions(
            lowered,
            reshardings=self._reshardings,
            routes=self._routes_by_shape,
            buffers=buffers,
            state=self._state,
            runners=self._runners_by_shape,
            update=self._update,
            transport=self._transport,
        )
        limits_s = slot_limits(instructions, lowered.planned_s, self._options.limits)
        return _BoundProgram(program, lowered, limits_s, buffers, actions)

    def _install(self, bound: _BoundProgram) -> None:
        self._bound = bound
        self._program, self._limits_s = bound.lowered.instructions, bound.limits_s
        self._buffers, self._actions = bound.buffers, bound.actions

    def _recorded(self, program: Program, actions: Actions) -> Sequence[Action]:
        return self._collectives.log.attribute_to_slots(program, actions.of)

    def _start_on(self, lanes: Lanes) -> None:
        self._lanes = lanes
        gathers, sums = self._mesh in self._options.sharded, self._update.sums_in_step
        everybody = [tuple(self._transport.topology.meshes)] if sums else []
        self._watch = Watchdog(
            mesh=self._mesh,
            program=self._program,
            limits_s=self._limits_s,
            transport=self._transport,
            lanes=lanes,
            reshardings=self._reshardings,
            step_waits_for=[(self._mesh,), *everybody] if gathers or sums else (),
            collectives=self._collectives,
        )

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
            is_pooled=lambda tensor: self._buffers.contains(tensor),
            weights=None
            if (count := self._options.count_targets) is None
            else lambda targets: token_weights(targets, count, self._collectives, self._options.tensor),
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
            return CudaLanes(self._program, actions, self._launches(), self._options.priorities)
        return CpuLanes(self._program, actions)

    def _launches(self) -> list[int]:
        """About how many kernels each instruction enqueues on the compute lane; 0 for those of other lanes."""
        parameters = len(self._update.parameters)
        # an optimizer that runs parameter by parameter has about ten operations for each
        of_update = {"REDUCE": parameters, "STEP": 10 * parameters}
        return [
            0
            if i.lane != COMPUTE_LANE
            else of_update[i.op]
            if i.op in of_update
            else self.runners[i.stage].launches(i.op)
            for i in self._program
        ]

    def _begin(self, step, inputs, targets, shapes=()) -> None:
        """Forget the last step and take the batch of this one."""
        self._state.begin(step, inputs, targets, shapes)
        for runners in self._runners_by_shape:
            for runner in runners.values():
                runner.reset()
        self._update.begin()
        self._collectives.log.begin()

    def _spot_check(self, step: int) -> ForwardCheck | None:
        """The check of a forward of this step, where it is the chosen step of this run and the stage is here."""
        until, seed = self._options.spot_check_until, self._options.seed
        if self._first_step is None:
            self._first_step = step
        if until is None or seed is None or not self._training:
            return None
        spot = choose_spot(seed, self._first_step, until, len(self._mesh_of_stage), self._microbatches)
        if spot is None or spot.step != step or spot.stage not in self.runners:
            return None
        runners = self._runners_by_shape[self._state.shape_of(spot.microbatch)]
        return runners[spot.stage].check_forward(spot)

    def _warm_up(self, step, inputs, targets) -> None:
        snapshot = StateSnapshot(
            list(self.stages.values()),
            self._update.optimizer,
            skips=self._update.can_skip,
        )
        for buffer in self._buffers.tensors:  # what stands there may be no number, or no index of any table
            buffer.zero_()
        inputs, targets = batch_on_device(inputs, targets, self._device)
        self._begin(step, inputs, targets)
        with self.muted():
            self._lanes.start()
            deadline = time.monotonic() + _WARM_UP_LIMIT_S
            while not self._lanes.wait(_POLL_S):
                self._poll_warm_up(step)
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

    def _rehearse(self, step: int) -> None:
        self._collectives.rehearse(
            self._device, limit_s=_WARM_UP_LIMIT_S, poll=lambda: self._poll_warm_up(step)
        )
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._rehearsed = True

    def _poll_warm_up(self, step: int) -> None:
        self._watch.publish(step, ())
        self._raise_if_aborted()
        self._watch.check(())  # no slot has a limit yet: kernels are being loaded

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
