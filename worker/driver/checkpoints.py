"""Decides when the workers save, tracks the checkpoint being written, and chooses the checkpoint to resume from.

PendingCheckpoint is polled between steps and waited for only where it must be; one is being written at a time. Its
manifest is written by a thread once every worker has written its shard. A write that fails is reported and the next
due one tried; after three failures in a row the attempt ends.
Asynchronous writes need room for a copy of each mesh's state beside its plan. The file format is
worker/checkpoint/format.py. Copies in host memory (saving/state_copies.py) are taken between checkpoints, and gone on
from where they are newer.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from worker.actor.saver import SnapshotMemory
from worker.actor.step_result import CopiedShard
from worker.checkpoint import format as checkpoint_format
from worker.checkpoint.copies import CopyKey
from worker.checkpoint.resumption import (
    ResumedWorker,
    ResumeSource,
    SavedTraining,
    Takeover,
    name_mismatch,
    plan_takeover,
    resumed_message,
    training_note,
)
from worker.contract.checkpoint_files import CheckpointError, SaveSeconds, step_of, stored_bytes
from worker.contract.failures import AttemptFailure, attributed_to
from worker.contract.job import CheckpointPolicy, Job
from worker.contract.planned import PlannedJob, planned_peak_bytes
from worker.contract.reasons import Reason
from worker.driver.evaluation import BestCheckpoint, EarlyStopping, Evaluations
from worker.driver.gang.gang import Gang, PerWorker
from worker.driver.gang.phases import Phase
from worker.driver.reporter import Reporter
from worker.driver.saving.pending import CheckpointOutcome, PendingCheckpoint
from worker.driver.saving.state_copies import StateCopies

log = logging.getLogger(__name__)

_EARLY_STOPPING_NOTE = "evaluation"  # their names in a manifest
_UNDELIVERED_NOTE = "undelivered"
# After this many failed writes in a row the attempt ends: the place cannot be written to at all.
_MAX_WRITE_FAILURES = 3


class Checkpoints:
    """The checkpoints of one job.

    `policy` is the job's, None for none; each has to be written within `limit_s`. With `keeps_best` the best one by the
    job's evaluations stays too. `timed` is called with the seconds of each save and restore, and of a save with the
    seconds for which training stood still ("block") and the slowest worker wrote ("write"). `spec` is the job's
    specification (JSON), which checkpoints describe; `wanted_steps` are those whose checkpoints other jobs wait for;
    `copies` are None where none are taken.
    After `write_asynchronously` the workers only copy their states while training waits. One checkpoint is pending at a
    time; one that cannot be written is reported, and the next one tried when it is due.
    """

    def __init__(
        self,
        policy: CheckpointPolicy | None,
        job_id: str,
        *,
        gang: Gang,
        reporter: Reporter,
        limit_s: float,
        timed: Callable[[str, float], None] = lambda operation, seconds: None,
        keeps_best: bool = False,
        spec: Mapping[str, Any] | None = None,
        wanted_steps: Callable[[], Collection[int]] = tuple,
        copies: StateCopies | None = None,
    ):
        self._copies = copies
        self._spec, self._wanted_steps = spec, wanted_steps
        self._job = None if spec is None else Job.from_json(spec)
        # a step, and the sample of the data's order with which it begins
        self._data_origin = (1, 0)
        self.first_step = 1
        """The first step of the job: behind another training's checkpoint where the job begins from one."""
        self._timed = timed
        self._policy = policy
        self._job_id = job_id
        self._gang = gang
        self._reporter = reporter
        self._limit_s = limit_s
        self._keeps_best = keeps_best
        self.early_stopping = EarlyStopping()
        """The state of the evaluations in the checkpoint that was restored."""
        self._asynchronous = False
        self._pending: PendingCheckpoint | None = None
        # the request of the pending checkpoint, its begin, and the seconds for which training stood still
        self._pending_save: tuple[_SaveRequest, float, float] | None = None
        self._saved_step: int | None = None
        self._failures = 0
        self._stored_bytes: int | None = None

    def write_asynchronously(self) -> None:
        """From now on training goes on while checkpoints are written, but for the last."""
        self._asynchronous = True

    def check_writable(self) -> None:
        """Have every worker write a file where checkpoints will go; AttemptFailure CHECKPOINT_UNWRITABLE."""
        if self._policy:
            uri = self._policy.uri
            self._call("try_checkpoints", uri, what=f"trying to write to {uri}")

    def restore(
        self,
        reported: str | None,
        source: ResumeSource | None = None,
        *,
        recorded: Mapping[str, int] | None = None,
    ) -> int:
        """Load the newest readable checkpoint, or a copy that is newer; the step after which it was taken, 0 without any.

        A job that has none begins from `source`, another training's. `reported` is the URI that the control plane knows:
        there may be a newer one, which an attempt finished but never reported. One that is damaged is passed over with an
        event. Records that the attempt before could not deliver are delivered, but those up to the steps `recorded`, by
        kind. Raises AttemptFailure: CHECKPOINT_DAMAGED where every one is damaged, CHECKPOINT_FAILED where `reported` or
        what is there cannot be read and nothing older can, RESUME_REFUSED where the source is not there or does not fit.
        """
        candidates = self._complete()
        if reported and reported not in candidates:
            candidates.append(reported)
        copy = self._newer_copy(candidates)
        if copy is not None:
            candidates.insert(0, copy)
        if not candidates and source is not None:
            return self._resume(source)
        failures: list[AttemptFailure] = []
        for position, uri in enumerate(candidates):
            began = time.monotonic()
            try:
                self._restore_data_origin(uri)
                step = self._call("restore", uri, what=f"restoring {uri}")[0]
                notes = self._notes_of(uri)
            except AttemptFailure as failure:
                if failure.reason not in (Reason.CHECKPOINT_FAILED, Reason.CHECKPOINT_DAMAGED):
                    raise
                if uri == copy:
                    self._copies.forget()
                failures.append(failure)
                log.warning("%s cannot be restored: %s", uri, failure.message)
                if older := candidates[position + 1 :]:
                    self._reporter.event("checkpoint", f"{failure.message}; trying {older[0]}")
                continue
            self.early_stopping = self._early_stopping_of(uri, notes)
            self._timed("restore", time.monotonic() - began)
            self._reporter.deliver_again(notes.get(_UNDELIVERED_NOTE) or {}, recorded or {})
            where = f"the copies in host memory ({uri})" if uri == copy else f"checkpoint {uri}"
            self._reporter.event("resumed", f"resumed after step {step} from {where}")
            return step
        if candidates == [copy]:  # workers may have loaded some of it
            raise AttemptFailure(
                Reason.CHECKPOINT_FAILED,
                f"{failures[0].message}; it was dropped, and the next attempt begins without it",
                failures[0].details,
            )
        if failures:
            raise _restore_failure(failures)
        return 0

    def _newer_copy(self, checkpoints: Sequence[str]) -> str | None:
        """The URI of the newest copy, where it is of a later step than these checkpoints."""
        found = None if self._copies is None else self._copies.newest()
        if found is None:
            return None
        step, uri = found
        return uri if all(step > step_of(checkpoint) for checkpoint in checkpoints) else None

    def copy_behind(self, step: int, evaluations: Evaluations) -> CopyKey | None:
        """The copy that the workers are to take of their state behind `step`, before the next; None where none is due."""
        if self._copies is None:
            return None
        save = self._save_request(step, evaluations)
        return self._copies.begin_behind(step, lambda: self._notes(save))

    def take_copies(self, copied: Sequence[CopiedShard | None]) -> None:
        """Take the results of copies that have come to their end on workers, in the workers' order."""
        if self._copies is not None:
            self._copies.take(copied)

    def _restore_data_origin(self, uri: str) -> None:
        """Have data begin where the job's own checkpoint says; restoring it reports one that cannot be read."""
        if self._job is None:
            return
        with suppress(CheckpointError):
            saved = checkpoint_format.describe_checkpoint(uri)
            training = SavedTraining.of_notes(saved.notes)
            batches = saved.step * self._job.training.global_batch
            self._begin_data_at(saved.step + 1, batches if training is None else training.samples)

    def _begin_data_at(self, step: int, sample: int) -> None:
        if self._sample_of(step) != sample:
            self._call("begin_data_at", step, sample, what=f"going to sample {sample} of the data")
            self._data_origin = (step, sample)

    def _sample_of(self, step: int) -> int:
        """The sample of the data's order with which `step` begins."""
        at, sample = self._data_origin
        return sample + (step - at) * self._job.training.global_batch

    def _resume(self, source: ResumeSource) -> int:
        """Begin from another training's checkpoint; its step."""
        began, job = time.monotonic(), self._job
        saved = self._describe_source(source)
        if saved.step >= job.training.steps:
            raise AttemptFailure(
                Reason.RESUME_REFUSED,
                f"checkpoint.resume_from {source.uri} was taken after step {saved.step}, and training.steps is "
                f"{job.training.steps}, counted from step 1: nothing is left to train; raise training.steps",
            )
        names = self._call("tensor_names", what="naming its tensors")
        mismatch = saved.names and name_mismatch(saved.names, {name for held in names for name in held})
        if mismatch:
            raise AttemptFailure(Reason.RESUME_REFUSED, f"checkpoint.resume_from {source.uri}: {mismatch}")
        takeover = plan_takeover(SavedTraining.of_notes(saved.notes), job, saved.step)
        try:
            workers = self._load_source(source, saved.step, takeover)
        except AttemptFailure as failure:
            if failure.reason is not Reason.DATA_FAILED or not takeover.data:
                raise
            takeover = takeover.with_new_data(failure.message.partition(";")[0])
            workers = self._load_source(source, saved.step, takeover)
        self.first_step = saved.step + 1
        self._timed("restore", time.monotonic() - began)
        self._reporter.event(
            "resumed", resumed_message(source, takeover, workers, precision=job.training.precision)
        )
        return saved.step

    def _load_source(self, source: ResumeSource, step: int, takeover: Takeover) -> list[ResumedWorker]:
        self._begin_data_at(step + 1, takeover.sample)
        return self._call("resume", source.uri, takeover, what=f"resuming from {source.uri}")

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def _describe_source(self, source: ResumeSource) -> checkpoint_format.CheckpointDescription:
        try:
            return checkpoint_format.describe_checkpoint(source.uri)
        except CheckpointError as error:
            place, _, job = source.uri.rstrip("/").rpartition("/")[0].rpartition("/")
            there = ", ".join(reversed(checkpoint_format.complete_checkpoints(place, job))) or "none"
            raise AttemptFailure(
                Reason.RESUME_REFUSED,
                f"checkpoint.resume_from: {error}; whole checkpoints beside it: {there}. Submit the job anew with one of "
                "them",
            ) from None

    def poll_behind(self, step: int) -> None:
        """The workers were asked for `step`: ask them behind it how far a pending checkpoint is."""
        if self._pending is not None:
            self._pending.poll_behind(step)

    def after(self, step: int, *, last: bool, evaluations: Evaluations | None = None) -> None:
        """Save when it is due, or when the evaluation after this step is the best so far; the workers run nothing
        meanwhile. After the last step all is saved when this returns."""
        if self._pending is not None and (outcome := self._pending.outcome_after(step)) is not None:
            self._handle_outcome(outcome)
        if not self._saves(step, last, evaluations):
            return
        save = self._save_request(step, evaluations)
        if self._asynchronous and not last:
            self._begin(save)
        else:
            self._finish_pending()
            self._save(save)

    def save(self, step: int, evaluations: Evaluations | None = None) -> bool:
        """Save the state after this step before this returns; False where the job saves nothing."""
        if self._policy is None:
            return False
        self._finish_pending()
        if self._saved_step != step:  # it was not due, or could not be written
            self._save(self._save_request(step, evaluations))
        return True

    def _saves(self, step: int, last: bool, evaluations: Evaluations | None) -> bool:
        best = None if evaluations is None else evaluations.best
        return self.due(step, last=last) or (
            self._policy is not None and best is not None and best.step == step
        )

    def due(self, step: int, *, last: bool) -> bool:
        """True where `after` of this step saves."""
        return self._policy is not None and (step % self._policy.every_steps == 0 or last)

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def _complete(self) -> list[str]:
        return checkpoint_format.complete_checkpoints(self._policy.uri, self._job_id) if self._policy else []

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def _notes_of(self, uri: str) -> dict[str, Any]:
        return checkpoint_format.checkpoint_notes(uri)

    def _early_stopping_of(self, uri: str, notes: Mapping[str, Any]) -> EarlyStopping:
        """The stored state of evaluations; reset where the best checkpoint is gone, so that the next one is the best."""
        note = notes.get(_EARLY_STOPPING_NOTE)
        stopping = EarlyStopping.from_json(note) if note else EarlyStopping()
        if stopping.best_step is None or not self._keeps_best or uri == self._uri(stopping.best_step):
            return stopping
        return stopping if self._uri(stopping.best_step) in self._complete() else EarlyStopping()

    def _uri(self, step: int) -> str:
        return checkpoint_format.step_uri(self._policy.uri, self._job_id, step) if self._policy else ""

    def _save_request(self, step: int, evaluations: Evaluations | None) -> _SaveRequest:
        if evaluations is None:
            return _SaveRequest(step, self._uri(step), None, None)
        return _SaveRequest(step, self._uri(step), evaluations.best, evaluations.early_stopping)

    def _save(self, save: _SaveRequest) -> None:
        """Save while training waits. Raises AttemptFailure CHECKPOINT_FAILED."""
        began = time.monotonic()
        written = self._call("save", save.uri, save.step, what=f"checkpoint after step {save.step}")
        seconds = time.monotonic() - began
        with attributed_to(Reason.CHECKPOINT_FAILED):
            self._commit(
                save, [name for names in written for name in names or ()], SaveSeconds(seconds, seconds)
            )
        whole_s = time.monotonic() - began
        self._report_saved(save, whole_s, block_s=whole_s, write_s=seconds)

    def _begin(self, save: _SaveRequest) -> None:
        """Every worker copies its state, and writes the copy while training goes on."""
        began = time.monotonic()
        self._finish_pending()
        try:
            what = f"copying the state after step {save.step} for a checkpoint"
            self._call("begin_save", save.uri, save.step, what=what)
        except AttemptFailure as failure:
            if failure.reason is not Reason.CHECKPOINT_FAILED:
                raise
            self._asynchronous = False
            self._reporter.event(
                "checkpoint", f"{failure.message}; from now on training waits while checkpoints are written"
            )
            self._save(save)
            return
        block_s = time.monotonic() - began
        self._pending_save = save, began, block_s
        self._pending = PendingCheckpoint(
            save.step,
            gang=self._gang,
            commit=lambda results: self._commit(
                save,
                [name for result in results for name in result.shards],
                SaveSeconds(block_s, max(result.write_s for result in results)),
            ),
            limit_s=self._limit_s,
        )

    def _finish_pending(self) -> None:
        """Wait for the pending checkpoint, if there is one."""
        if self._pending is not None:
            self._handle_outcome(self._pending.wait_until_written())

    def _handle_outcome(self, outcome: CheckpointOutcome) -> None:
        """Report the pending checkpoint as saved, or as failed. Raises AttemptFailure after too many failures."""
        (save, began, block_s), self._pending_save, self._pending = self._pending_save, None, None
        if outcome.error is None:
            self._report_saved(save, time.monotonic() - began, block_s=block_s, write_s=outcome.write_s)
            return
        self._failures += 1
        message = f"the checkpoint after step {save.step} could not be written: {outcome.error}"
        if self._failures >= _MAX_WRITE_FAILURES:
            raise AttemptFailure(
                Reason.CHECKPOINT_FAILED, f"{message}; nor could the {self._failures - 1} before it"
            )
        log.warning("%s", message)
        self._reporter.event("checkpoint", f"{message}; training goes on, and the next one is tried")

    def _commit(self, save: _SaveRequest, others: Sequence[str], seconds: SaveSeconds) -> None:
        """Write the manifest, which makes the shards of all workers a checkpoint. On any thread."""
        checkpoint_format.finish_checkpoint(
            save.uri,
            step=save.step,
            shards=[*(mesh.name for mesh in self._gang.meshes), *others],
            keep=self._policy.keep,
            keep_also={*self._wanted_steps(), *([save.best.step] if save.best else [])},
            keep_every=self._policy.keep_every,
            notes=self._notes(save),
            seconds=seconds,
        )
        self._stored_bytes = stored_bytes(self._policy.uri, self._job_id)

    def _notes(self, save: _SaveRequest) -> dict[str, Any]:
        """The notes of a checkpoint on its training and on the evaluations so far; and the records that the control plane
        may not have: if this driver dies before they are delivered, the next attempt goes on behind their steps."""
        notes: dict[str, Any] = {_UNDELIVERED_NOTE: self._reporter.undelivered(save.step)}
        if save.early_stopping is not None:
            notes[_EARLY_STOPPING_NOTE] = save.early_stopping.to_json()
        if self._spec is not None:
            notes |= training_note(self._job_id, self._sample_of(save.step + 1), self._spec)
        return notes

    def _report_saved(self, save: _SaveRequest, seconds: float, *, block_s: float, write_s: float) -> None:
        self._failures, self._saved_step = 0, save.step
        for operation, took_s in (("save", seconds), ("block", block_s), ("write", write_s)):
            self._timed(operation, took_s)
        step, uri, best = save.step, save.uri, save.best
        self._reporter.checkpoint(step, uri, self._stored_bytes)
        if best is not None and best.step == step:
            self._reporter.best_checkpoint(
                {"step": step, "uri": uri, "metric": best.metric, "value": best.value}
            )
            self._reporter.event(
                "best_checkpoint", f"{best.metric} {best.value:.6g} after step {step}: {uri}"
            )
        self._reporter.event("checkpoint", f"after step {step}: {uri}")

    def _call(self, method: str, *arguments: Any, what: str) -> list[Any]:
        return self._gang.call(method, *arguments, phase=Phase.CHECKPOINT, what=what)


def _restore_failure(failures: Sequence[AttemptFailure]) -> AttemptFailure:
    """The failure of a job none of whose checkpoints can be restored; one that can only not be read now may be later."""
    unread = [failure for failure in failures if failure.reason is not Reason.CHECKPOINT_DAMAGED]
    if unread:
        return unread[0]
    newest = failures[0].message
    return AttemptFailure(
        Reason.CHECKPOINT_DAMAGED,
        f"every checkpoint is damaged ({len(failures)}), the newest: {newest}; put back a copy of one and `slotline retry`, "
        "or submit the job anew to start from step 1",
        failures[0].details,
    )


@dataclass(frozen=True)
class _SaveRequest:
    """A checkpoint to be written, and the state of evaluations after its step."""

    step: int
    uri: str
    best: BestCheckpoint | None
    early_stopping: EarlyStopping | None


def snapshot_rooms(gang: Gang) -> list[SnapshotMemory]:
    """The memory that a copy of each worker's state takes, before the first one is made."""
    workers_on = Counter(address.node_id for address in gang.addresses)
    return gang.call(
        "snapshot_memory",
        PerWorker(workers_on[address.node_id] for address in gang.addresses),
        phase=Phase.CHECK,
        what="looking for room for copies of the state",
    )


def snapshot_shortfall(
    planned: PlannedJob, rooms: Sequence[SnapshotMemory], *, gang: Gang, device: str
) -> str | None:
    """The mesh that has no room for a copy of its state, with the numbers; None where all have room.

    On CPU the copy is in the memory that is planned with, on CUDA in the host's.
    """
    peaks = planned_peak_bytes(planned.spec, planned.plan)
    for address, room in zip(gang.addresses, rooms, strict=True):
        if room.bytes == 0:
            continue
        if device == "cuda":
            if room.host_bytes is not None and room.bytes > room.host_bytes:
                return (
                    f"a copy of mesh {address.mesh}'s state takes {room.bytes:,} bytes of its host, which offers "
                    f"{room.host_bytes:,}"
                )
            continue
        limit, peak = _mesh_memory_limit(planned.spec, address.mesh), peaks.get(address.mesh, 0)
        if limit is not None and peak + room.bytes > limit:
            return (
                f"mesh {address.mesh} may hold {limit:,} bytes, its plan takes {peak:,}, and a copy of its state "
                f"{room.bytes:,}"
            )
    return None


def _mesh_memory_limit(spec: Mapping[str, Any], mesh: str) -> int | None:
    return next(entry.get("memory_bytes") for entry in spec["meshes"] if entry["name"] == mesh)
