"""Copies that the driver has its workers take, make complete and go on from; keepers and workers are plain objects here."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace

import pytest

from tests.worker.driver.fake_gang import FakeActor, FakeGang
from tests.worker.driver.test_checkpoints import Reports, Worker
from tests.worker.local_keepers import LocalKeepers
from worker.actor.saver import ShardCopier, SnapshotMemory
from worker.checkpoint.chunked import HeldParts
from worker.checkpoint.copies import CopyKeeper, CopyKey
from worker.contract.failures import AttemptFailure
from worker.contract.job import CheckpointPolicy
from worker.contract.reasons import Reason
from worker.driver.checkpoints import Checkpoints
from worker.driver.saving.state_copies import StateCopies

NODES = ("a", "b")
LIMIT_S = 60.0


class Copying(Worker):
    """A worker that also gives copies to keepers."""

    copier = None

    def copy_to(self, keepers):
        self.copier = ShardCopier(keepers, shard=self.mesh, state=lambda step: self.state(), held=HeldParts())
        return True

    def run_step(self, step, copy=None):
        """As a LoadedWorker does; the copy has arrived when this returns."""
        if copy is not None:
            self.step = copy.step
            self.copier.begin(copy)
            with suppress(Exception):
                self.copier._copying.result(LIMIT_S)
        return None if self.copier is None else self.copier.take_copied()


class Gang(FakeGang):
    """Two meshes on two nodes, whose workers answer at once."""

    def __init__(self, nodes=NODES):
        self.meshes = [SimpleNamespace(name=f"m{i}") for i in range(len(nodes))]
        self.addresses = [
            SimpleNamespace(mesh=mesh.name, node_id=node)
            for mesh, node in zip(self.meshes, nodes, strict=True)
        ]
        self.plain = [Copying(mesh.name) for mesh in self.meshes]
        names = ("save", "restore", "begin_save", "saved", "copy_to", "run_step")
        self.workers = [
            FakeActor(**{name: lambda *a, w=worker, n=name: getattr(w, n)(*a) for name in names})
            for worker in self.plain
        ]

    def name(self, index):
        return f"worker 0 of mesh m{index}"


class Run:
    """An attempt's loop over steps, with a checkpoint in `folder` every `every` and a copy every `copy_every`."""

    def __init__(self, keepers, folder, *, attempt=1, every=100, copy_every=2, nodes=NODES, enabled=True):
        self.keepers, self.gang, self.reports, self.timed = keepers, Gang(nodes), Reports(), []
        self.copies = StateCopies(
            "job",
            attempt,
            copy_every,
            gang=self.gang,
            reporter=self.reports,
            timed=lambda operation, seconds: self.timed.append(operation),
        )
        self.copies.open()
        self.kept = Checkpoints(
            CheckpointPolicy(str(folder), every, 9),
            "job",
            gang=self.gang,
            reporter=self.reports,
            limit_s=LIMIT_S,
            copies=self.copies,
        )
        self.done = None
        if enabled:
            self.done = self.kept.restore(None)
            self.copies.enable([SnapshotMemory(8, None)] * len(nodes), {}, device="cpu")

    def step(self, step):
        """As StepLoop does."""
        copy = self.kept.copy_behind(step - 1, SimpleNamespace(best=None, early_stopping=None))
        self.kept.take_copies(self.gang.call("run_step", step, copy, phase=None, what=""))
        self.kept.after(step, last=False)

    def steps(self, first, last):
        """Steps with time between them for the task that makes a copy complete."""
        for step in range(first, last + 1):
            self.step(step)
            pending = self.copies._pending
            if pending is not None and pending.committing is not None:
                with suppress(Exception):
                    pending.committing.result(LIMIT_S)

    @property
    def held(self):
        """The complete copies at the keepers."""
        attempt = self.copies._attempt
        return sorted(
            {key for keeper in self.keepers.keepers.values() for key in keeper.begin_attempt(attempt)}
        )


@pytest.fixture
def keepers(monkeypatch):
    return LocalKeepers(monkeypatch)


def test_a_copy_is_taken_when_it_is_due_and_only_the_newest_complete_one_stays(keepers, tmp_path):
    run = Run(keepers, tmp_path, copy_every=3)
    found = []
    for step in range(1, 11):
        run.steps(step, step)
        found.append([key.step for key in run.held])
    assert found == [[], [], [], [3], [3], [3], [6], [6], [6], [9]]
    assert all(len(keeper.held()) == 1 for keeper in keepers.keepers.values())
    assert {*run.timed} == {"copy"} and run.reports.events == []
    run.copies.close(job_goes_on=True)
    again = Run(keepers, tmp_path, attempt=2)
    assert again.done == 9 and [worker.restored for worker in again.gang.plain] == [[9], [9]]
    assert again.reports.events == [
        "resumed after step 9 from the copies in host memory (slotline-copies://job/attempt-1/step-0000000009)"
    ]
    again.steps(10, 12)
    assert again.held == [CopyKey(10, 2)], (
        "and its own takes its place; the state it began with is not copied"
    )
    again.copies.close(job_goes_on=False)
    assert keepers.keepers == {}


def test_one_copy_is_on_its_way_at_a_time_and_the_next_is_taken_when_it_has_ended(
    keepers, tmp_path, monkeypatch
):
    run = Run(keepers, tmp_path, copy_every=2)
    with monkeypatch.context() as slow:
        slow.setattr(Copying, "run_step", lambda worker, step, copy: None)
        for step in range(1, 8):
            run.step(step)  # training goes on
        assert run.copies._pending.key == CopyKey(2, 1) and run.held == []
        for worker in run.gang.plain:
            worker.step = 2
            worker.copier.begin(CopyKey(2, 1))
            worker.copier._copying.result(LIMIT_S)
    run.steps(8, 11)
    assert len(run.held) == 1 and run.held[0].step > 7


def test_a_worker_that_dies_while_it_copies_leaves_the_copy_before(keepers, tmp_path):
    run = Run(keepers, tmp_path, copy_every=2)
    run.steps(1, 3)
    assert run.held == [CopyKey(2, 1)]
    worker = run.gang.plain[0]
    worker.copy_to([keepers.handles["a"], keepers.handles["b"]])
    assert worker.run_step(5, CopyKey(4, 1)).error is None  # the other one never does
    assert all(len(keeper.held()) == 2 for keeper in keepers.keepers.values()), "two generations"
    again = Run(keepers, tmp_path, attempt=2)
    assert again.done == 2
    assert all([*keeper.held()] == [CopyKey(2, 1)] for keeper in keepers.keepers.values())


def test_a_lost_keeper_costs_nothing_where_its_neighbour_has_its_files_and_else_the_checkpoint_is_taken(
    keepers, tmp_path
):
    run = Run(keepers, tmp_path, every=3, copy_every=2)
    run.steps(1, 5)
    assert run.held == [CopyKey(4, 1)]
    del keepers.keepers["a"]
    second = Run(keepers, tmp_path, attempt=2, every=3)
    assert second.done == 4
    second.steps(5, 7)
    assert second.held == [CopyKey(6, 2)], "a keeper was started in its place"
    for keeper in keepers.keepers.values():
        del keeper._copies[CopyKey(6, 2)].shards["m1"]
    third = Run(keepers, tmp_path, attempt=3)
    assert third.done == 6 and "checkpoint" in third.reports.events[-1]
    assert third.reports.events[0].startswith("the copy after step 6 is not whole: m1 of ")
    assert third.reports.events[0].endswith("is held by no keeper any more, or is damaged")


def test_a_checkpoint_that_is_as_new_is_taken_before_a_copy(keepers, tmp_path):
    run = Run(keepers, tmp_path, every=4, copy_every=2)
    run.steps(1, 5)
    assert run.held == [CopyKey(4, 1)]
    again = Run(keepers, tmp_path, attempt=2)
    assert again.done == 4 and "from checkpoint" in again.reports.events[-1]


def damage(keepers, monkeypatch):
    """Files of copies are damaged once they are made."""

    def write_files(keeper, key, _write=CopyKeeper.write_files):
        blobs = _write(keeper, key)
        keeper._copies[key].files["m1.distcp"].getbuffer()[300] ^= 1
        return blobs

    monkeypatch.setattr(CopyKeeper, "write_files", write_files)


def test_a_damaged_copy_is_passed_over_for_the_checkpoint_before_it(keepers, tmp_path, monkeypatch):
    run = Run(keepers, tmp_path, every=4, copy_every=3)
    run.steps(1, 7)
    assert run.held == [CopyKey(6, 1)]
    damage(keepers, monkeypatch)
    again = Run(keepers, tmp_path, attempt=2)
    assert again.done == 4
    assert "m1.distcp" in again.reports.events[0] and "trying" in again.reports.events[0]
    assert again.held == []


def test_a_damaged_copy_without_a_checkpoint_ends_the_attempt_and_the_next_begins_anew(
    keepers, tmp_path, monkeypatch
):
    Run(keepers, tmp_path).steps(1, 3)
    damage(keepers, monkeypatch)
    again = Run(keepers, tmp_path, attempt=2, enabled=False)
    with pytest.raises(AttemptFailure, match=r"m1\.distcp.*the next attempt begins without it") as failed:
        again.kept.restore(None)
    assert failed.value.reason is Reason.CHECKPOINT_FAILED
    assert Run(keepers, tmp_path, attempt=3).done == 0


def test_training_goes_on_without_copies_where_they_fail_again_and_again(keepers, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    run = Run(keepers, tmp_path, copy_every=1)
    with monkeypatch.context() as full:
        full.setattr(CopyKeeper, "add", refuse)
        run.steps(1, 3)
    run.steps(4, 6)
    assert "the copy of the state after step 1 failed: OSError: [Errno 12]" in run.reports.events[0]
    newest, failures = run.held, len(run.reports.events)
    assert failures < 3 and len(newest) == 1, "one failure is not for ever"
    monkeypatch.setattr(CopyKeeper, "add", refuse)
    run.steps(7, 14)
    assert len(run.reports.events) == failures + 3 and run.held == newest
    assert run.reports.events[-1].startswith("no more copies of the state are taken: the last 3 failed")


def test_a_node_without_memory_for_copies_is_named_with_the_numbers(keepers, tmp_path):
    keepers.add(*NODES)
    for node, free in zip(NODES, (10_000, 1_000), strict=True):
        keepers.keepers[node].free_bytes = lambda free=free: free
    run = Run(keepers, tmp_path, enabled=False)
    run.kept.restore(None)
    run.copies.enable([SnapshotMemory(200, None), SnapshotMemory(90, None)], {"m0": 800}, device="cpu")
    assert run.reports.events == [], "1,000 bytes less a tenth hold 3 * 90 + 2 * 200"
    run.copies.enable([SnapshotMemory(200, None), SnapshotMemory(90, None)], {"m1": 300}, device="cpu")
    (event,) = run.reports.events
    assert "copies take 670 bytes of node b beside 300 of the plan, which offers 900" in event
    assert "leave checkpoint.copy_every_steps out" in event
    assert keepers.keepers == {}, "what is of no use goes"


def test_keepers_of_nodes_that_the_job_has_left_end_with_its_next_copy(keepers, tmp_path):
    Run(keepers, tmp_path).steps(1, 3)
    moved = Run(keepers, tmp_path, attempt=2, nodes=("b", "c"))
    assert moved.done == 2 and keepers.keepers.keys() == {"a", "b", "c"}
    moved.steps(3, 5)
    assert moved.held == [CopyKey(4, 2)] and keepers.keepers.keys() == {"b", "c"}
    assert Run(keepers, tmp_path, attempt=3, nodes=("b", "c")).done == 4


def test_records_that_were_not_delivered_come_with_the_copy(keepers, tmp_path):
    run = Run(keepers, tmp_path)
    run.reports.waiting = {"steps": [{"step": 2, "loss": 0.5}], "evaluations": []}
    run.steps(1, 3)
    again = Run(keepers, tmp_path, attempt=2)
    assert again.reports.delivered == run.reports.waiting
