"""Worker: the Ray actor of one accelerator, which answers the calls of the state that it is in.

The driver places it, has it prepared, traces and measures, plans, and has it load its part of the plan.
Must not know Ray (the driver wraps the class), the driver or the control plane.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from worker.actor.prepared import PreparedWorker
from worker.actor.state import KnownGraph, WorkerPlace, WorkerState
from worker.contract import failures
from worker.contract.failures import AttemptFailure
from worker.contract.job import Job
from worker.contract.reasons import Reason
from worker.machine.device import choose_device, use_tf32
from worker.machine.health import check_accelerator
from worker.machine.node import WorkerAddress, own_node_address
from worker.machine.telemetry import PeakMemory
from worker.model.factory import resolve
from worker.model.rng import RngStates

_THREADS_END_S = 3.0


class NewWorker(WorkerState):
    """A worker that has its accelerator, and nothing of the job yet."""

    def __init__(self, *, job: Job, mesh: str, worker: int, device: str, known: KnownGraph | None = None):
        self._known = known
        torch.set_num_threads(1)
        use_tf32(job.training.tf32)
        super().__init__(WorkerPlace(job, mesh, worker, device, PeakMemory(device)))

    def address(self) -> WorkerAddress:
        """Take this worker's GPU, and return its address. RuntimeError when there is no GPU."""
        import ray

        failures.start_breadcrumbs()
        choose_device(self.device, ray.get_gpu_ids, self.job.meshes)

        context = ray.get_runtime_context()
        return WorkerAddress(
            mesh=self.mesh,
            worker=self.index,
            node=own_node_address(),
            node_id=context.get_node_id(),
            process_id=os.getpid(),
            device=self.device,
        )

    def set_environment(self, values: Mapping[str, str]) -> None:
        """Set environment variables of this process, before any code of the user runs."""
        os.environ.update(values)

    def import_code(self) -> None:
        """Import the modules of the job's factories, which a spare has then when it takes the place of a worker."""
        job = self.job
        for part in (job.model, job.data, job.loss, job.optimizer):
            if part is not None:
                resolve(part.factory)

    def check_accelerator(self) -> list[str]:
        """Notes on this worker's GPU. Raises AttemptFailure (ACCELERATOR_FAILED) where no job can trust it."""
        with self.raising_attempt_failures():
            return check_accelerator(self.device)

    def prepare(self) -> PreparedWorker:
        """The worker with the data and the loss of its job."""
        return PreparedWorker(self.place, self._known)

    def known_graph(self) -> KnownGraph | None:
        return self._known


def _check_nothing_runs(earlier: Sequence[BaseProcess]) -> None:
    """Raise AttemptFailure INTERNAL where a thread of ours, which may write a checkpoint, or a process that reads data has
    not ended in _THREADS_END_S; not for processes that ran `earlier` than the attempt."""
    deadline = time.monotonic() + _THREADS_END_S
    for thread in threading.enumerate():
        if thread.name.startswith("slotline-"):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise AttemptFailure(Reason.INTERNAL, f"thread {thread.name} has not ended")
    if children := [child for child in multiprocessing.active_children() if child not in earlier]:
        raise AttemptFailure(Reason.INTERNAL, f"process {children[0].name} has not ended")


def _forget_own_modules(job: Job) -> None:
    """Have the modules of the job's working_dir imported anew: what they keep in globals is the earlier attempt's."""
    if job.code.working_dir is None:
        return
    folder = os.path.join(os.path.realpath(os.getcwd()), "")
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__dict__", {}).get("__file__")
        if (
            file and os.path.isabs(file) and os.path.realpath(file).startswith(folder)
        ):  # torch.ops has a name only
            del sys.modules[name]
    importlib.invalidate_caches()


class Worker:
    """One accelerator of one mesh: a NewWorker (placed), then a PreparedWorker, then a LoadedWorker."""

    def __init__(self, *, job: Job, mesh: str, worker: int, device: str):
        self._arguments = {"job": job, "mesh": mesh, "worker": worker, "device": device}
        self._rng = RngStates.read()
        self._processes = multiprocessing.active_children()
        self._state: WorkerState = NewWorker(**self._arguments)

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """The answer of the present state to a call of its public `method`; None of one that leads to the next state.

        Raises AttemptFailure: INTERNAL where the state has no such method."""
        state = self._state
        answer = None if method.startswith("_") else getattr(state, method, None)
        if answer is None:
            raise AttemptFailure(
                Reason.INTERNAL,
                f"worker {state.mesh}/{state.index} was asked for {method!r}, which is no call of a {type(state).__name__}",
            )
        result = answer(*arguments, **named)
        if isinstance(result, WorkerState):
            self._state, result = result, None
        return result

    def take_place(self, mesh: str, worker: int) -> None:
        """Be that worker, as if started for it; a spare has been none before."""
        self._arguments |= {"mesh": mesh, "worker": worker}
        self._state = NewWorker(**self._arguments)

    def start_over(self) -> None:
        """Be a NewWorker again, as in a new process, behind an attempt that lost other workers: only what depends on no
        attempt stays, the process with its modules and its accelerator, and the graph of the job's model.

        Raises AttemptFailure INTERNAL where something of the attempt is left; the worker is then of no use any more.
        """
        known = self._state.known_graph()
        parts = [weakref.ref(part) for part in self._state.parts()]
        self._state.abandon()
        self._state = WorkerState(self._state.place)
        gc.unfreeze()
        gc.enable()
        gc.collect()
        if left := {type(part).__name__ for ref in parts if (part := ref()) is not None}:
            raise AttemptFailure(Reason.INTERNAL, f"the process still holds {', '.join(sorted(left))}")
        _check_nothing_runs(self._processes)
        if self._arguments["job"].training.compile:
            torch._dynamo.reset()  # it takes so many graphs of one function, and then none
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self._rng.restore()
        _forget_own_modules(self._arguments["job"])
        self._state = NewWorker(**self._arguments, known=known)

    def close(self) -> None:
        """End threads and connections; an actor that is killed needs no such call."""
        self._state.close()
