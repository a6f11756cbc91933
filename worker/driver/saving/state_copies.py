"""Decides when workers copy their state to keepers, makes copies complete, and finds those that an attempt may go on from.

A copy is taken behind a step that the next one follows in the workers' queues: training does not wait for the driver. One
is pending at a time; one that is due meanwhile is taken when that has ended. Where copies fail, training goes on without.
What keepers hold is in worker/checkpoint/copies.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.actor.saver import BackgroundTask, SnapshotMemory
from worker.actor.step_result import CopiedShard
from worker.checkpoint.copies import CALL_LIMIT_S, LEASE_S, CopyKeeper, CopyKey, copy_record, indexed_copy
from worker.checkpoint.format import is_whole_checkpoint
from worker.contract.checkpoint_files import CheckpointError
from worker.driver.gang.gang import Gang, PerWorker
from worker.driver.gang.phases import Phase
from worker.driver.reporter import Reporter
from worker.machine.keepers import end_keepers, find_keepers, keeper_results, start_keepers
from worker.machine.telemetry import MEMORY_MARGIN

log = logging.getLogger(__name__)

_MAX_FAILURES = 3
_GENERATIONS = 2
"""Copies that a keeper may hold: the newest complete one, and the one that is being written."""
_SNAPSHOTS = 1
"""Copies in a worker's own memory, from which keepers are given theirs."""
_RENEWALS_A_LEASE = 10
_ANSWER_S = 10.0
"""For keepers to say what they hold; one that does not is done without."""


@dataclass
class _PendingCopy:
    """A copy that is on its way: the results of workers by their number, and the task that makes it complete."""

    key: CopyKey
    notes: Callable[[], Mapping[str, Any]]
    began: float = field(default_factory=time.monotonic)
    results: dict[int, CopiedShard] = field(default_factory=dict)
    committing: BackgroundTask[None] | None = None


class StateCopies:
    """The copies that one attempt makes every `every_steps`, and those that it finds.

    `interpreter` runs keepers, see `start_keepers`. `timed` is as in Checkpoints.
    """

    def __init__(
        self,
        job_id: str,
        attempt: int,
        every_steps: int,
        *,
        gang: Gang,
        reporter: Reporter,
        interpreter: str | None = None,
        timed: Callable[[str, float], None] = lambda operation, seconds: None,
    ):
        self._job_id, self._attempt, self._every_steps = job_id, attempt, every_steps
        self._gang, self._reporter, self._timed = gang, reporter, timed
        self._interpreter = interpreter
        self._keepers: Mapping[str, Any] = {}
        self._earlier_keepers: Mapping[str, Any] = {}
        self._found: CopyKey | None = None
        self._enabled = False
        self._copying_workers = 0
        self._pending: _PendingCopy | None = None
        self._copied_step: int | None = None
        self._failures = 0
        self._closed = threading.Event()

    def open(self) -> None:
        """Fence off earlier attempts, find what they left, and have a keeper on each node of the gang."""
        self._earlier_keepers = earlier = find_keepers(self._job_id)
        records = self._calls(earlier, "begin_attempt", self._attempt)
        complete = {key: record for of_node in records.values() for key, record in of_node.items()}
        for key in sorted(complete, reverse=True):
            try:
                self._make_readable(key, complete[key])
                self._found = key
                break
            except CheckpointError as error:
                self._reporter.event("copies", f"the copy after step {key.step} is not whole: {error}")
        self._calls(earlier, "keep_only", self._attempt, self._found)
        self._start_keepers()
        threading.Thread(target=self._renew, name="slotline-copies", daemon=True).start()

    def newest(self) -> tuple[int, str] | None:
        """The step and the URI of the newest copy that earlier attempts left whole."""
        return None if self._found is None else (self._found.step, self._found.uri(self._job_id))

    def enable(
        self, rooms: Sequence[SnapshotMemory], planned_bytes: Mapping[str, int], *, device: str
    ) -> None:
        """Take copies from now on, where the nodes have memory for them beside the plan; an event says where not. Behind the
        restore of the state.

        `rooms` are the bytes of a copy of each worker's state, `planned_bytes` the most of each mesh's plan.
        """
        if shortfall := self._shortfall(rooms, planned_bytes if device == "cpu" else {}):
            self._reporter.event(
                "copies",
                f"no copies of the state are kept, and a lost process costs the steps since the last "
                f"checkpoint: {shortfall}; give the nodes more memory, or leave checkpoint.copy_every_steps out",
            )
            if self._found is None:
                self._end_keepers()
            return
        self._assign_keepers()
        self._enabled = True

    def begin_behind(self, step: int, notes: Callable[[], Mapping[str, Any]]) -> CopyKey | None:
        """The copy that the workers are to take of their state behind `step`, before they run the next; None where none is
        due. `notes` are those of a checkpoint there."""
        if self._copied_step is None:  # the state that the attempt begins with
            self._copied_step = step
            return None
        due = step - self._copied_step >= self._every_steps or step % self._every_steps == 0
        if not self._enabled or self._pending is not None or not due:
            return None
        self._pending, self._copied_step = _PendingCopy(CopyKey(step, self._attempt), notes), step
        return self._pending.key

    def take(self, copied: Sequence[CopiedShard | None]) -> None:
        """Take the results of workers whose copies have come to their end since the step before, in the workers' order."""
        pending = self._pending
        if pending is None:
            return
        pending.results |= {index: result for index, result in enumerate(copied) if result is not None}
        if pending.committing is None:
            if len(pending.results) < self._copying_workers:
                return
            if errors := [result.error for result in pending.results.values() if result.error]:
                self._fail("; ".join(dict.fromkeys(errors)))
                return
            shards = {result.shard: result.description for _, result in sorted(pending.results.items())}
            pending.committing = BackgroundTask(lambda: self._commit(pending, shards), "slotline-copy")
        if not pending.committing.done:
            return
        try:
            pending.committing.result(0.0)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
            return
        self._pending, self._failures = None, 0
        self._timed("copy", time.monotonic() - pending.began)

    def _fail(self, error: str) -> None:
        step, self._pending = self._pending.key.step, None
        self._failures += 1
        log.warning("the copy of the state after step %d failed: %s", step, error)
        if self._failures >= _MAX_FAILURES:
            self._enabled = False
            self._reporter.event(
                "copies",
                f"no more copies of the state are taken: the last {self._failures} failed, the one after step {step}: "
                f"{error}",
            )
            return
        self._reporter.event("copies", f"the copy of the state after step {step} failed: {error}")
        self._start_keepers()  # one may be gone
        self._assign_keepers()

    def forget(self) -> None:
        """Drop what earlier attempts left: it cannot be restored."""
        self._calls(self._earlier_keepers, "keep_only", self._attempt, None)
        self._found = None

    def close(self, *, job_goes_on: bool) -> None:
        """The attempt ends; where the job does not go on from its copies, end its keepers too."""
        self._closed.set()
        if not job_goes_on:
            self._end_keepers()

    def _make_readable(self, key: CopyKey, record: bytes) -> None:
        """Have keepers make files of a copy that earlier attempts left. CheckpointError where some of it is lost."""
        uri = key.uri(self._job_id)
        written = self._calls(self._earlier_keepers, "write_files", key, limit_s=CALL_LIMIT_S)
        blobs = {shard: found for of_node in written.values() for shard, found in of_node.items()}
        files = indexed_copy(uri, key, record, blobs)
        self._calls(self._earlier_keepers, "put", self._attempt, key, files)
        if not is_whole_checkpoint(uri):
            raise CheckpointError(f"{uri} is not held any more")

    def _commit(self, pending: _PendingCopy, shards: Mapping[str, Mapping[str, Any]]) -> None:
        """Make a copy complete at all keepers, which drop what is older. On any thread."""
        record = copy_record(shards, pending.notes())
        taken = self._calls(self._keepers, "complete", pending.key, record)
        if len(taken) < len(self._keepers):
            raise CheckpointError(
                f"{len(self._keepers) - len(taken)} of {len(self._keepers)} keepers did not take it"
            )
        if self._earlier_keepers.keys() - self._keepers.keys():  # of nodes that the job has left
            end_keepers([self._job_id], but_on=self._keepers)
        self._earlier_keepers = {}

    def _start_keepers(self) -> None:
        nodes = list(dict.fromkeys(address.node_id for address in self._gang.addresses))
        self._keepers = start_keepers(CopyKeeper, self._job_id, nodes, interpreter=self._interpreter)
        for keeper in self._keepers.values():
            keeper.begin_attempt.remote(self._attempt)

    def _assign_keepers(self) -> None:
        """Tell each worker its keepers: that of its node, and that of the next one where there are several."""
        nodes = list(self._keepers)
        following = dict(zip(nodes, [*nodes[1:], *nodes[:1]], strict=True))
        copying = self._gang.call(
            "copy_to",
            PerWorker(
                [self._keepers[node] for node in dict.fromkeys((address.node_id, following[address.node_id]))]
                for address in self._gang.addresses
            ),
            phase=Phase.SETUP,
            what="taking the keepers of copies",
        )
        self._copying_workers = sum(copying)

    def _shortfall(self, rooms: Sequence[SnapshotMemory], planned_bytes: Mapping[str, int]) -> str | None:
        """The node without memory for its copies, with the numbers; None where all have it."""
        own, planned = Counter[str](), Counter[str]()
        for address, room in zip(self._gang.addresses, rooms, strict=True):
            own[address.node_id] += room.bytes
            planned[address.node_id] += planned_bytes.get(address.mesh, 0)
        nodes = list(self._keepers)
        free = self._calls(self._keepers, "free_bytes", limit_s=CALL_LIMIT_S)
        for position, node in enumerate(nodes):
            if node not in free:
                return f"the keeper of node {node} does not answer"
            others = own[nodes[position - 1]] if len(nodes) > 1 else 0
            needed = (_GENERATIONS + _SNAPSHOTS) * own[node] + _GENERATIONS * others
            if free[node] is None:
                continue
            open_bytes = int(free[node] * (1 - MEMORY_MARGIN))
            if needed + planned[node] > open_bytes:
                beside = f" beside {planned[node]:,} of the plan" if planned[node] else ""
                return f"copies take {needed:,} bytes of node {node}{beside}, which offers {open_bytes:,}"
        return None

    def _calls(
        self, keepers: Mapping[str, Any], method: str, *arguments: Any, limit_s: float = _ANSWER_S
    ) -> dict[str, Any]:
        """The results of a call of all these keepers, of those that answer in time."""
        calls = {node: getattr(keeper, method).remote(*arguments) for node, keeper in keepers.items()}
        return keeper_results(calls, limit_s)

    def _renew(self) -> None:
        while not self._closed.wait(LEASE_S / _RENEWALS_A_LEASE):
            for keeper in {**self._earlier_keepers, **self._keepers}.values():
                try:
                    keeper.renew.remote()
                except Exception as error:  # Ray's head is away
                    log.debug("a keeper of copies was not renewed: %s", error)

    def _end_keepers(self) -> None:
        try:
            end_keepers([self._job_id])
        except Exception as error:  # they end by themselves when no driver is heard
            log.warning("the keepers of copies could not be ended: %s", error)
        self._keepers = {}
