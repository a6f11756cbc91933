"""Checkpoints that are written while training goes on: when they count, what is waited for, and what a failure does.

Real checkpoints and the workers' own writing threads; the workers are plain objects, held back where a test wants that.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.worker.driver.test_checkpoints import Gang, Reports
from worker.checkpoint import format as checkpoint_format
from worker.contract.failures import AttemptFailure
from worker.contract.job import CheckpointPolicy
from worker.contract.reasons import Reason
from worker.driver.checkpoints import Checkpoints

LIMIT_S = 60.0


class Run:
    """A driver's loop over steps that save into `folder`, every step unless it is said otherwise."""

    def __init__(self, folder, *, every=1, keep=9, limit_s=LIMIT_S):
        self.uri = str(folder)
        self.gang, self.reports, self.timed = Gang(), Reports(), []
        self.kept = Checkpoints(
            CheckpointPolicy(self.uri, every, keep),
            "job",
            gang=self.gang,
            reporter=self.reports,
            limit_s=limit_s,
            timed=lambda operation, seconds: self.timed.append((operation, seconds)),
        )
        self.kept.write_asynchronously()

    def step(self, step, *, last=False):
        self.kept.poll_behind(step)
        self.kept.after(step, last=last)

    def steps_until(self, first, holds):
        """Steps from `first` on until something holds, which a thread brings about; the number of the next."""
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < deadline
            self.step(first)
            first += 1
            time.sleep(0.01)
        return first

    @property
    def whole(self):
        return [int(uri[-10:]) for uri in reversed(checkpoint_format.complete_checkpoints(self.uri, "job"))]


def test_steps_go_on_while_a_mesh_writes_and_the_manifest_waits_for_it(tmp_path):
    run = Run(tmp_path, every=3)
    slow = run.gang.plain[1].writes
    slow.clear()
    for step in range(1, 6):
        run.step(step)  # would wait for ever where the writing is waited for
    assert run.whole == [] and run.reports.checkpoints == []
    slow.set()
    run.kept.after(7, last=True)
    assert run.whole == [3, 7]
    assert [step for step, _ in run.reports.checkpoints] == [3, 7]
    assert (
        checkpoint_format.load_checkpoint(checkpoint_format.step_uri(run.uri, "job", 3))[0]["parameters"][
            "m0.p"
        ].tolist()
        == [1.0] * 3
    )


def test_what_is_written_is_reported_between_steps_and_not_only_by_the_next_save(tmp_path):
    run = Run(tmp_path, every=2)
    run.step(1)
    run.step(2)
    run.kept._policy = CheckpointPolicy(run.uri, 10**6, 9)
    run.steps_until(3, lambda: run.reports.checkpoints)
    assert run.whole == [2]
    assert [what for what, _ in run.timed] == ["save", "block", "write"]
    whole, block, write = (seconds for _, seconds in run.timed)
    assert 0 < block < whole and 0 < write < whole


def test_the_next_one_waits_for_the_one_before(tmp_path):
    run = Run(tmp_path)
    run.step(1)
    assert run.kept._pending is not None
    run.step(2)
    run.step(3)
    assert run.whole[:2] == [1, 2], "one at a time, in order"
    run.kept.after(4, last=True)
    assert run.whole == [1, 2, 3, 4]


def test_one_that_is_never_written_ends_the_attempt_with_the_name_of_who_writes(tmp_path):
    run = Run(tmp_path, limit_s=0.3)
    run.gang.plain[1].writes.clear()
    run.step(1)
    with pytest.raises(
        AttemptFailure, match=r"step 1 is still being written after 0 s, by worker 0 of mesh m1:"
    ) as caught:
        run.step(2)
    assert caught.value.reason is Reason.CHECKPOINT_FAILED
    run.gang.plain[1].writes.set()


def test_an_attempt_that_is_asked_to_end_waits_for_what_is_on_its_way_and_saves_what_is_not(tmp_path):
    run = Run(tmp_path, every=2)
    run.step(2)
    assert run.kept.save(2) and run.whole == [2]
    run.step(3)
    assert run.kept.save(3) and run.whole == [2, 3]


def full(*_, **__):
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_told_and_the_next_checkpoint_is_tried(tmp_path, monkeypatch):
    run = Run(tmp_path, every=10)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_format, "save_shard", full)
        run.step(10)
        after = run.steps_until(11, lambda: run.reports.events)
    assert "the checkpoint after step 10 could not be written: mesh m0: OSError" in run.reports.events[0]
    assert "No space left" in run.reports.events[0] and "training goes on" in run.reports.events[0]
    assert not run.reports.events[0].startswith("after step"), (
        "by this the age of the last checkpoint is told"
    )
    assert after < 20, "told between two saves"
    run.step(20)
    run.kept.after(30, last=True)
    assert run.whole == [20, 30]


def test_a_manifest_that_cannot_be_written_is_told_too(tmp_path, monkeypatch):
    run = Run(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_format, "finish_checkpoint", full)
        run.step(1)
        run.kept._finish_pending()
    assert "its manifest: OSError" in run.reports.events[0] and run.whole == []
    run.kept.after(2, last=True)
    assert run.whole == [2]


def test_a_disk_that_can_never_be_written_ends_the_attempt(tmp_path, monkeypatch):
    run = Run(tmp_path)
    monkeypatch.setattr(checkpoint_format, "save_shard", full)
    run.step(1)
    run.step(2)
    run.step(3)
    with pytest.raises(AttemptFailure, match="No space left on device; nor could the 2 before it") as caught:
        run.step(4)
    assert caught.value.reason is Reason.CHECKPOINT_FAILED
    assert len(run.reports.events) == 2


def test_one_success_forgives_what_failed_before(tmp_path, monkeypatch):
    run = Run(tmp_path)
    for step in range(1, 10):
        with monkeypatch.context() as patched:
            if step % 3:
                patched.setattr(checkpoint_format, "save_shard", full)
            run.step(step)
            run.kept._finish_pending()
    assert run.whole == [3, 6, 9] and len([e for e in run.reports.events if "could not" in e]) == 6


def test_at_the_end_what_could_not_be_written_beside_training_is_tried_once_more(tmp_path, monkeypatch):
    run = Run(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_format, "save_shard", full)
        run.step(1)
        run.kept._finish_pending()
        assert run.whole == []
    assert run.kept.save(1) and run.whole == [1], "asked to end after this step"
    monkeypatch.setattr(checkpoint_format, "save_shard", full)
    with pytest.raises(AttemptFailure, match="No space left"):
        run.kept.after(2, last=True)


def test_where_there_is_no_memory_for_a_copy_training_waits_from_then_on(tmp_path):
    run = Run(tmp_path)

    def no_memory(uri, step):
        raise AttemptFailure(Reason.CHECKPOINT_FAILED, "DefaultCPUAllocator: can't allocate memory")

    run.gang.plain[1].begin_save = no_memory
    run.step(1)
    assert run.whole == [1] and "training waits while checkpoints are written" in run.reports.events[0]
    run.step(2)
    assert run.whole == [1, 2] and run.kept._pending is None


def test_the_listing_says_how_long_training_stood_still_and_how_long_was_written(tmp_path):
    run = Run(tmp_path)
    run.step(1)
    run.kept.after(2, last=True)
    last, first = checkpoint_format.inspect_checkpoints(run.uri, "job")
    assert last.seconds.blocking == last.seconds.writing > 0, "the last is written while all wait"
    assert first.seconds.writing > 0 and first.seconds.blocking > 0


def test_half_a_file_of_a_writer_that_was_killed_goes_with_the_next_save_of_its_step(tmp_path):
    run = Run(tmp_path)
    folder = Path(checkpoint_format.step_uri(run.uri, "job", 1))
    folder.mkdir(parents=True)
    (folder / "m1.distcp.0123.partial").write_bytes(b"half")
    run.step(1)
    run.kept._finish_pending()
    assert run.whole == [1] and not list(folder.glob("*.partial"))
