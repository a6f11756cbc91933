"""LocalGang: all workers of a planned job in one process over gloo, a thread each, called as a driver does.

They are the actors' own states with their own engines, programs and transports; only the calls are made here.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from worker.actor.actor import NewWorker
from worker.actor.assignment import LoadLimits, make_assignments
from worker.actor.loaded import LoadedWorker
from worker.actor.prepared import PreparedWorker
from worker.actor.step_result import WorkerStep
from worker.contract.failures import AttemptFailure, first_cause
from worker.contract.job import Job
from worker.contract.planned import MeshProgram, PlannedJob
from worker.engine.results import SlotLimits
from worker.model.eval_mode import EvaluationEdge
from worker.model.export import TracedModel
from worker.transport.rendezvous import host_store

CALL_LIMIT_S = 3600.0
"""So long a call of all workers may take: slots, connections and data have limits of their own, which come before."""
_CONNECT_S = 60.0
_SLOT_LIMITS = SlotLimits(factor=20.0, floor_s=60.0)


def _describe_stuck_workers(
    threads: Sequence[threading.Thread], late: Sequence[int], errors: Sequence[BaseException]
) -> str:
    """The workers that are not done, where each stands, and the errors of others."""
    frames = sys._current_frames()
    places = []
    for index in late:
        frame = frames.get(threads[index].ident or 0)
        last = traceback.extract_stack(frame)[-1] if frame is not None else None
        where = f"{last.filename}:{last.lineno}, in {last.name}" if last else "nowhere"
        places.append(f"worker {index} ({where})")
    raised = "".join(f"; another raised {type(error).__name__}: {error}" for error in errors[:1])
    return f"not done after {CALL_LIMIT_S:g} s: {', '.join(places)}{raised}"


def prepare_workers(job: Job, device: str = "cpu") -> list[PreparedWorker]:
    """The workers of `job`, mesh by mesh, prepared one after the other, as torch seeds for a whole process."""
    return [
        NewWorker(job=job, mesh=f"m{mesh}", worker=index, device=device).prepare()
        for mesh, size in enumerate(job.mesh_sizes)
        for index in range(size)
    ]


def _at_once(function: Callable[[Any], Any], workers: Sequence[Any]) -> list[Any]:
    """The results of `function` of all workers, called at once; raises the first error, the cause of others."""
    results: list[Any] = [None] * len(workers)
    errors: list[BaseException] = []

    def run(index: int, worker: Any) -> None:
        try:
            results[index] = function(worker)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=item, daemon=True, name=f"slotline-worker-{item[0]}")
        for item in enumerate(workers)
    ]
    ends = time.monotonic() + CALL_LIMIT_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(ends - time.monotonic(), 0.0))
    if late := [index for index, thread in enumerate(threads) if thread.is_alive()]:
        raise TimeoutError(_describe_stuck_workers(threads, late, errors))
    if errors:
        known = [error for error in errors if isinstance(error, AttemptFailure)]
        raise first_cause(known) if len(known) == len(errors) else errors[0]
    return results


class LocalGang:
    """The workers of a job, loaded with a plan; a context that closes them. Of `prepared` ones the first traces for all;
    `notes` is what its check has to tell, `look` is given what it traced, before it is cut, also for meshes of other sizes
    and for other lengths in their order, and `evaluation` makes the programs of evaluations by mesh."""

    def __init__(
        self,
        prepared: Sequence[PreparedWorker],
        planned: PlannedJob,
        *,
        planned_bytes: int | None = None,
        look: Callable[[TracedModel], None] = lambda _: None,
        evaluation: Callable[[Sequence[EvaluationEdge]], Mapping[str, MeshProgram]] | None = None,
    ):
        first, *others = prepared
        self.notes = first.trace(planned.microbatches)
        look(first.traced)
        job = first.job
        sizes = {f"m{mesh}": size for mesh, size in enumerate(job.dp_sizes)}
        for worker in others:
            worker.take_graph(first.graph(sizes[worker.mesh]), planned.microbatches)
            worker.trace(planned.microbatches)  # nothing to do, unless the graph could not be sent
        for traced in first.model.traced_for_other_sizes:
            look(traced)
        for traced in first.model.traced_for_other_buckets:
            look(traced)
        first.check_batch_sharding(planned.stage_starts, [sizes[mesh] for mesh in planned.mesh_of_stage])
        edges = first.evaluation_edges(planned.stage_starts) if evaluation else ()
        self.workers = self._load(prepared, planned, planned_bytes, evaluation(edges) if evaluation else {})

    def step(self, number: int, programs: Mapping[str, MeshProgram] | None = None) -> list[WorkerStep]:
        """Run one step, by these programs of its own if it has any; the results of `run_step` of every worker."""
        return self.call(lambda worker: worker.run_step(number, programs and programs[worker.mesh]))

    def call(self, function: Callable[[LoadedWorker], Any]) -> list[Any]:
        """Call `function` for all workers at once; raises the first error, the cause of others."""
        return _at_once(function, self.workers)

    def __enter__(self) -> LocalGang:
        return self

    def __exit__(self, *_: object) -> None:
        self.call(lambda worker: worker.close())

    def _load(
        self,
        prepared: Sequence[PreparedWorker],
        planned: PlannedJob,
        planned_bytes: int | None,
        evaluation: Mapping[str, MeshProgram],
    ) -> list[LoadedWorker]:
        first = prepared[0]
        self._store = store = host_store("127.0.0.1")  # lives as long as the connections
        meshes = dict.fromkeys(worker.mesh for worker in prepared)
        assignments = make_assignments(
            planned,
            [(worker.mesh, "127.0.0.1") for worker in prepared],
            tensors=first.job.tensors,
            store=("127.0.0.1", store.port),
            limits=LoadLimits(_CONNECT_S, _CONNECT_S, _SLOT_LIMITS),
            planned_bytes=dict.fromkeys(meshes, planned_bytes),
            evaluation=evaluation,
        )
        for worker in prepared[1:]:
            worker.take_weights(first.weights(planned.stage_starts, planned.stages_of(worker.mesh)))
        assignment_of = dict(zip(prepared, assignments, strict=True))
        loaded = _at_once(lambda worker: worker.load(assignment_of[worker]), prepared)
        self.notes += dict.fromkeys(note for worker in loaded for note in worker.loading_notes())
        return loaded
