"""The Ray actor of one accelerator: builds its stages, runs its program, answers the driver.

Everything it raises is an AttemptFailure with a reason code. Does not know Ray (the driver wraps
the class) and does not know the control plane.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from worker import checkpoint
from worker.data.ahead import ReadAhead, ReadTooSlowError
from worker.data.sampler import BatchSampler, collate
from worker.data.staging import read_steps
from worker.device import choose_device, device_kind, make_transport
from worker.engine import Engine, EngineError, RunOptions, SlotLimits
from worker.engine_failure import engine_failure
from worker.failure import (
    AttemptFailure,
    OutOfMemoryFailure,
    as_failure,
    attributed_to,
)
from worker.job import Job
from worker.memory import PeakMemory, memory_limit, tried_bytes
from worker.model import TracedModel, build_model, call_factory, measure_layers, resolve, trace
from worker.model.errors import FactoryError
from worker.model.profile import PROFILE_FORMAT, OptimizerState
from worker.node import WorkerAddress, own_node_address
from worker.program import program_from_json
from worker.reasons import Reason
from worker.training import (
    learning_rate,
    make_loss,
    make_optimizer,
    make_schedule,
    measure_optimizer_state,
    without_implementation,
)
from worker.transport import ConnectError, Topology
from worker.transport.links import groups_of, lanes_of, measure_links
from worker.transport.network import Measured, Probe
from worker.turns import GENERATORS

PROFILE_REPEATS = 5


class Worker:
    """One accelerator of one mesh. The driver calls the methods in the order in which they stand here."""

    def __init__(self, *, job: Job, mesh: str, worker: int, device: str):
        torch.set_num_threads(1)
        self._job = job
        self._mesh = mesh
        self._worker = worker
        self._device = device
        self._traced: TracedModel | None = None
        self._engine: Engine | None = None
        self._reader: ReadAhead | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._memory = PeakMemory(device)
        self._planned_bytes: int | None = None

    def address(self) -> WorkerAddress:
        """Where this worker runs; takes its GPU. RuntimeError when there is none."""
        import ray

        choose_device(self._device, ray.get_gpu_ids)

        context = ray.get_runtime_context()
        return WorkerAddress(
            mesh=self._mesh,
            worker=self._worker,
            node=own_node_address(),
            node_id=context.get_node_id(),
            process_id=os.getpid(),
            device=self._device,
        )

    def clock(self) -> float:
        """This process's monotonic clock, in seconds."""
        return time.monotonic()

    def prepare(self, workers_per_mesh: int) -> str:
        """Build the data, the loss and the model; the key under which its profile is cached."""
        self._workers_per_mesh = workers_per_mesh
        self._build_data()
        self._build_model()
        return self._profile_key()

    def memory_limit(self, sharing: int) -> int | None:
        """Bytes that this worker may plan with, one of `sharing` on the same node (CPU) or GPU; None if unknown."""
        given = self._job.resources.memory_per_worker
        return given if isinstance(given, int) else memory_limit(self._device, sharing)

    def optimizer_state(self) -> OptimizerState:
        """What the job's optimizer keeps of the parameters that it trains."""
        return measure_optimizer_state(functools.partial(make_optimizer, self._job.optimizer), self._device)

    @attributed_to(Reason.START_TIMEOUT)
    def measure_links(
        self,
        *,
        probes: Sequence[Probe],
        topology: Topology,
        store: tuple[str, int],
        host: str,
        connect_s: float,
    ) -> list[Measured]:
        """What the probes found whose hub this mesh is; every worker 0 calls this at the same time."""
        transport = make_transport(
            self._device,
            topology,
            mesh=self._mesh,
            worker=0,
            store=store,
            host=host,
            connect_s=connect_s,
        )
        try:
            transport.connect(groups_of(topology), lanes_of(probes))
            return measure_links(transport, probes, self._device)
        finally:
            transport.close()

    @attributed_to(Reason.USER_CODE_RAISED)
    def profile(self) -> dict[str, Any]:
        """Measure every layer on this device; JSON of a LayerProfile."""
        profile = measure_layers(
            self._trace(), self._loss, self._sample[1], device=self._device, repeats=PROFILE_REPEATS
        )
        return profile.to_json()

    def load(
        self,
        *,
        begins: Sequence[str],
        mesh_of_stage: Sequence[str],
        program: Sequence[Mapping[str, Any]],
        planned_s: Sequence[float] | None,
        topology: Topology,
        store: tuple[str, int],
        host: str,
        connect_s: float,
        slot_limits: SlotLimits,
        planned_bytes: int | None = None,
        planned_starts_s: Sequence[float | None] | None = None,
    ) -> None:
        """Cut the model, keep this mesh's stages and connect to every peer.

        `planned_bytes` is the most that this mesh holds by the plan, for messages.
        """
        self._planned_bytes = planned_bytes
        with self._memory_told():
            training, schedule = self._job.training, self._job.optimizer.schedule
            here = [i for i, mesh in enumerate(mesh_of_stage) if mesh == self._mesh]
            graph = self._cut(begins, here)
            stages = {i: graph.stages[i].to(self._device) for i in here}
            self._needs_data = any(
                name.startswith("input:") for stage in stages.values() for name in stage.inputs
            ) or any("output" in stage.outputs for stage in stages.values())
            if self._needs_data:
                self._reader = read_steps(
                    self._microbatch,
                    training.microbatches,
                    device=self._device,
                    ahead=self._job.data.prefetch,
                    last=training.steps,
                    limit_s=slot_limits.limit_s(max(planned_s or (0.0,))),  # as others wait for this mesh
                )
            transport = make_transport(
                self._device,
                topology,
                mesh=self._mesh,
                worker=self._worker,
                store=store,
                host=host,
                connect_s=connect_s,
            )
            self._engine = Engine(
                mesh=self._mesh,
                worker=self._worker,
                program=program_from_json(program),
                stages=stages,
                edges=graph.edges,
                mesh_of_stage=tuple(mesh_of_stage),
                tied=graph.tied,
                microbatches=training.microbatches,
                loss=self._loss,
                optimizer=self._make_optimizer,
                lr_schedule=functools.partial(make_schedule, schedule) if schedule else None,
                transport=transport,
                options=RunOptions(
                    precision=training.precision,
                    clip_grad_norm=training.clip_grad_norm,
                    non_finite=training.non_finite,
                    seed=training.seed,
                    limits=slot_limits,
                    device=self._device,
                ),
                planned_s=planned_s,
                planned_starts_s=planned_starts_s,
            )
            self._traced = None
            self._memory.settle(
                t for stage in stages.values() for t in (*stage.parameters(), *stage.buffers())
            )
            try:
                self._engine.connect()
            except ConnectError as error:
                raise as_failure(error, Reason.START_TIMEOUT) from None

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def restore(self, uri: str) -> int:
        """Load this worker's part of a checkpoint; the number of the step that it was taken after."""
        own = self._engine.state()
        state, step = checkpoint.load(uri, names={*own["parameters"], *own["buffers"]})
        state["optimizer_groups"] = without_implementation(state.get("optimizer_groups") or [])
        self._engine.load_state(state)
        return step

    def warm_up(self, step: int) -> None:
        """On CUDA, load and try all kernels on the samples of the first step, before anybody waits for this mesh."""
        if self._device != "cuda":
            return
        with self._memory_told():
            try:
                self._engine.warm_up(step, *self._batch(step))
            except EngineError as error:
                raise engine_failure(error) from None

    def run_step(self, step: int) -> dict[str, Any]:
        """Run one optimizer step; losses (sink only), measured slots on this worker's clock, gradient norm."""
        rate = None if self._optimizer is None else learning_rate(self._optimizer)
        self._memory.begin()
        with self._memory_told():
            inputs, targets = self._batch(step)
            try:
                result = self._engine.run_step(step, inputs, targets)
            except EngineError as error:
                raise engine_failure(error) from None
            except Exception as error:
                raise as_failure(error, Reason.INTERNAL) from None
        return {
            "losses": result.losses,
            "grad_norm": result.grad_norm,
            "learning_rate": rate,
            "skipped": result.skipped,
            "started_s": result.started_s,
            "ended_s": result.ended_s,
            "slots": result.slots,
            "peak_memory_bytes": self._memory.read(),
        }

    @attributed_to(Reason.CHECKPOINT_UNWRITABLE)
    def try_checkpoints(self, uri: str) -> None:
        """Write and remove a file where checkpoints will go, so that a wrong place is told before training."""
        checkpoint.try_writing(uri)

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def save(self, uri: str, step: int) -> None:
        """Write this mesh's shard of a checkpoint (worker 0 of a mesh only; the others hold the same)."""
        if self._worker == 0:
            checkpoint.save_shard(uri, step=step, shard=self._mesh, state=self._engine.state())

    def close(self) -> None:
        """End threads and connections; an actor that is killed needs no such call."""
        if self._reader is not None:
            self._reader.close()
        if self._engine is not None:
            self._engine.close()

    @attributed_to(Reason.DATA_FAILED)
    def _build_data(self) -> None:
        data, training = self._job.data, self._job.training
        self._dataset = call_factory(data.factory, data.args)
        for method, means in (
            ("__len__", "how many samples it has"),
            ("__getitem__", "a sample by its index"),
        ):
            if not hasattr(self._dataset, method):
                raise FactoryError(
                    f"data {data.factory!r} returned {type(self._dataset).__name__}, which cannot tell {means} "
                    f"({method}): return a map-style data set"
                )
        self._sampler = BatchSampler(
            len(self._dataset),
            training.global_batch,
            training.microbatches,
            seed=training.seed,
        )
        self._sample = self._microbatch(0, 0)

    @attributed_to(Reason.MODEL_BUILD_FAILED)
    def _build_model(self) -> None:
        self._loss = make_loss(self._job.loss, self._device)
        for part in (self._job.optimizer, self._job.optimizer.schedule):
            if part:
                resolve(part.factory)  # a wrong name is told before anything is measured
        model = self._job.model
        self._model = build_model(model.factory, model.args, seed=self._job.training.seed)

    def _make_optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        self._optimizer = make_optimizer(self._job.optimizer, parameters)
        return self._optimizer

    @attributed_to(Reason.MODEL_BUILD_FAILED)
    def _trace(self) -> TracedModel:
        if self._traced is None:
            bf16 = self._job.training.precision == "bf16"
            self._traced = trace(self._model, self._sample[0], autocast=torch.bfloat16 if bf16 else None)
        return self._traced

    @attributed_to(Reason.CUT_IMPOSSIBLE)
    def _cut(self, begins: Sequence[str], keep: Sequence[int]) -> Any:
        graph = self._trace().cut(begins, keep=keep)
        del self._model
        return graph

    def _batch(self, step: int) -> tuple[list[tuple[torch.Tensor, ...]], list[torch.Tensor] | None]:
        if self._reader is None:
            return [()] * self._job.training.microbatches, None
        try:
            return self._reader.take(step)
        except ReadTooSlowError as error:
            raise as_failure(error, Reason.DATA_FAILED) from None

    @attributed_to(Reason.DATA_FAILED)
    def _microbatch(self, step: int, microbatch: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """This worker's share of a microbatch: its rows are dealt to the workers of a mesh in blocks."""
        indices = self._sampler.indices(step, microbatch)
        share = len(indices) // self._workers_per_mesh
        return collate([self._example(i) for i in indices[self._worker * share : (self._worker + 1) * share]])

    @contextlib.contextmanager
    def _memory_told(self) -> Iterator[None]:
        """When memory runs out in the body: say what was planned, and what was seen."""
        try:
            yield
        except Exception as error:
            failure = error if isinstance(error, AttemptFailure) else as_failure(error, Reason.INTERNAL)
            if failure.reason is not Reason.OUT_OF_MEMORY:
                raise
            peak, tried = self._memory.read(), tried_bytes(failure.message)
            planned = "an unknown number of" if self._planned_bytes is None else f"{self._planned_bytes:,}"
            way = "allocated by torch" if self._device == "cuda" else "resident in its process"
            raise OutOfMemoryFailure(
                f"{failure.message}; mesh {self._mesh} was planned with {planned} bytes and had come to "
                f"{peak:,} bytes ({way})",
                failure.details,
                self._mesh,
                peak + min(tried, peak),
            ) from None

    def _example(self, index: int) -> Any:
        try:
            with GENERATORS:  # this may be the reading thread: see worker/turns.py
                return self._dataset[index]
        except Exception as error:
            factory = self._job.data.factory
            raise RuntimeError(
                f"sample {index} of data {factory} raised {type(error).__name__}: {error}"
            ) from error

    def _profile_key(self) -> str:
        """Same key, same layer times: model, shapes, precision, loss, kind of device, torch, and on CPU the
        workers of the gang, which share the cores. Workers of two kinds thus have two keys."""
        inputs, target = self._sample
        parts = {
            "model": asdict(self._job.model),
            "code": asdict(self._job.code),
            "loss": asdict(self._job.loss),
            "shapes": [[list(t.shape), str(t.dtype)] for t in (*inputs, target)],
            "precision": self._job.training.precision,
            "device": self._device,
            "device_name": device_kind(self._device),
            "workers": self._job.meshes * self._workers_per_mesh if self._device == "cpu" else 1,
            "torch": torch.__version__,
            "format": PROFILE_FORMAT,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
