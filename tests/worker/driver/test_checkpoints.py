"""From which checkpoint an attempt goes on, with real checkpoints and workers that are plain objects."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import checkpoint as dcp

from tests.worker.driver.fake_gang import FakeActor, FakeGang
from worker.actor.saver import ShardSaver, reading_checkpoint
from worker.checkpoint import blobs
from worker.checkpoint import format as checkpoint_format
from worker.checkpoint.resumption import ResumeSource
from worker.contract.failures import AttemptFailure, attributed_to
from worker.contract.job import CheckpointPolicy
from worker.contract.reasons import Cause, Reason
from worker.driver.checkpoints import Checkpoints


class Worker:
    """Saves its mesh's name and the step; remembers what it restored. Copies are written when `writes` is set."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.restored = []
        self.step = None
        self.writes = threading.Event()
        self.writes.set()
        self.saver = ShardSaver(mesh, lambda step: self.state(), {})

    def state(self):
        return {"parameters": {f"{self.mesh}.p": torch.ones(self.step)}}

    def begin_save(self, uri, step):
        self.step = step
        write = self.saver._write

        def held_back(*arguments):
            assert self.writes.wait(60)
            write(*arguments)

        self.saver._write = held_back
        try:
            self.saver.begin(uri, step)
        finally:
            del self.saver._write

    def saved(self):
        return self.saver.saved()

    @attributed_to(Reason.CHECKPOINT_FAILED)
    def save(self, uri, step):
        checkpoint_format.save_shard(
            uri, step=step, shard=self.mesh, state={"parameters": {f"{self.mesh}.p": torch.ones(step)}}
        )

    @reading_checkpoint()
    def restore(self, uri):
        _, step = checkpoint_format.load_checkpoint(uri)
        self.restored.append(step)
        return step


class Gang(FakeGang):
    """Calls the workers one after the other, as they are asked to."""

    def __init__(self, meshes=2, interrupted=lambda: None):
        self.interrupted = interrupted
        self.meshes = [SimpleNamespace(name=f"m{i}") for i in range(meshes)]
        self.plain = [Worker(mesh.name) for mesh in self.meshes]
        self.workers = [
            FakeActor(
                **{
                    name: lambda *a, w=worker, n=name: lambda: getattr(w, n)(*a)
                    for name in ("save", "restore", "begin_save", "saved")
                }
            )
            for worker in self.plain
        ]

    def wait(self, refs, *, phase, **_):
        self.raise_if_interrupted(phase)
        return [ref() for ref in refs]

    def name(self, index):
        return f"worker 0 of mesh m{index}"


class Reports:
    def __init__(self):
        self.events, self.checkpoints = [], []
        self.waiting, self.delivered = {}, {}

    def undelivered(self, step):
        return self.waiting

    def deliver_again(self, records, recorded):
        self.delivered = records

    def event(self, kind, message):
        self.events.append(message)

    def checkpoint(self, step, uri, stored_bytes=None):
        self.checkpoints.append((step, uri))


@pytest.fixture
def make(tmp_path):
    def make(every=2, keep=3, interrupted=lambda: None, policy=True):
        given = CheckpointPolicy(str(tmp_path), every, keep) if policy else None
        gang, reports = Gang(interrupted=interrupted), Reports()
        kept = Checkpoints(given, "job", gang=gang, reporter=reports, limit_s=60)
        return kept, gang, reports

    return make


def train(kept, steps):
    for step in range(1, steps + 1):
        kept.after(step, last=step == steps)


def test_checkpoints_are_taken_when_they_are_due_and_after_the_last_step(make):
    kept, _, reports = make(every=2)
    train(kept, 5)
    assert [step for step, _ in reports.checkpoints] == [2, 4, 5]


def test_it_is_told_how_long_saving_and_restoring_took(tmp_path):
    told = []
    gang = Gang()
    kept = Checkpoints(
        CheckpointPolicy(str(tmp_path), 2, 3),
        "job",
        gang=gang,
        reporter=Reports(),
        limit_s=60,
        timed=lambda operation, seconds: told.append((operation, seconds)),
    )
    assert kept.restore(None) == 0
    train(kept, 5)
    assert kept.restore(None) == 5
    assert [operation for operation, _ in told] == [*["save", "block", "write"] * 3, "restore"]
    assert all(0 < seconds < 60 for _, seconds in told)


def test_what_a_worker_saves_beside_its_mesh_belongs_to_the_checkpoint_and_its_loss_is_noticed(
    make, monkeypatch
):
    def save(self, uri, step, _save=Worker.save):
        _save(self, uri, step)
        if self.mesh != "m0":
            return []
        checkpoint_format.save_shard(
            uri, step=step, shard="model", state={"parameters": {"unused": torch.ones(3)}}
        )
        return ["model"]

    monkeypatch.setattr(Worker, "save", save)
    train(make()[0], 4)
    kept, _, _ = make()
    newest = checkpoint_format.complete_checkpoints(kept._policy.uri, "job")[0]
    assert list(checkpoint_format.shard_names(newest)) == ["m0", "m1", "model"]
    Path(newest, "model.distcp").write_bytes(b"")
    assert kept.restore(newest) == 2


def test_without_checkpoints_nothing_is_saved_and_the_start_is_the_beginning(make):
    kept, gang, reports = make(policy=False)
    train(kept, 3)
    assert kept.restore(None) == 0
    assert reports.checkpoints == [] and gang.plain[0].restored == []


def source_of(folder, step):
    return ResumeSource(checkpoint_format.step_uri(str(folder), "job", step), "job", step)


def begun_elsewhere(folder, steps=100):
    """The checkpoints of a new job in the same place, whose workers have none of the checkpoint's tensors."""
    spec = {"model": {"factory": "m:f"}, "data": {"factory": "d:f"}, "training": {"steps": steps}}
    policy, reports = CheckpointPolicy(str(folder)), Reports()
    return Checkpoints(policy, "new", gang=Gang(), reporter=reports, limit_s=60, spec=spec)


def test_a_source_that_is_not_there_is_refused_with_the_checkpoints_that_are(make, tmp_path):
    train(make()[0], 6)
    with pytest.raises(AttemptFailure) as refused:
        begun_elsewhere(tmp_path).restore(None, source_of(tmp_path, 3))
    assert refused.value.reason is Reason.RESUME_REFUSED
    there = ", ".join(source_of(tmp_path, step).uri for step in (2, 4, 6))
    assert f"has no manifest.json; whole checkpoints beside it: {there}. Submit" in refused.value.message


def test_a_source_behind_the_last_step_is_refused(make, tmp_path):
    train(make()[0], 6)
    with pytest.raises(
        AttemptFailure, match=r"after step 6, and training.steps is 6.*raise training.steps"
    ) as refused:
        begun_elsewhere(tmp_path, steps=6).restore(None, source_of(tmp_path, 6))
    assert refused.value.reason is Reason.RESUME_REFUSED


def test_a_job_with_a_checkpoint_of_its_own_goes_on_from_that_one(make, tmp_path):
    kept, gang, _ = make()
    train(kept, 4)
    again, gang, reports = make()
    assert again.restore(None, ResumeSource("/not/there", "other", 9)) == 4 and again.first_step == 1
    assert [worker.restored for worker in gang.plain] == [[4], [4]]
    assert reports.events[0].startswith("resumed after step 4 from checkpoint")


def test_checkpoints_that_other_jobs_wait_for_stay_until_they_have_begun(tmp_path):
    wanted = [2]
    kept = Checkpoints(
        CheckpointPolicy(str(tmp_path), every_steps=2, keep=1),
        "job",
        gang=Gang(),
        reporter=Reports(),
        limit_s=60,
        wanted_steps=lambda: wanted,
    )
    train(kept, 6)
    assert [Path(uri).name[-1] for uri in checkpoint_format.complete_checkpoints(str(tmp_path), "job")] == [
        "6",
        "2",
    ]
    wanted.clear()
    kept.after(7, last=True)
    assert [Path(uri).name[-1] for uri in checkpoint_format.complete_checkpoints(str(tmp_path), "job")] == [
        "7"
    ]


def test_a_checkpoint_that_was_never_reported_is_found(make):
    train(make()[0], 6)
    kept, gang, reports = make()
    reported = checkpoint_format.complete_checkpoints(kept._policy.uri, "job")[-1]
    assert kept.restore(reported) == 6
    assert [worker.restored for worker in gang.plain] == [[6], [6]]
    newest = checkpoint_format.complete_checkpoints(kept._policy.uri, "job")[0]
    assert reports.events == [f"resumed after step 6 from checkpoint {newest}"]


@pytest.mark.parametrize("damage", ["cut short", "missing", "no manifest", "broken manifest", "one bit"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(make, damage):
    train(make()[0], 6)
    kept, gang, reports = make()
    newest = checkpoint_format.complete_checkpoints(kept._policy.uri, "job")[0]
    shard = Path(newest, "m1.distcp")
    match damage:
        case "cut short":
            os.truncate(shard, shard.stat().st_size // 2)
        case "missing":
            shard.unlink()
        case "one bit":
            flip_a_bit_of_a_tensor(shard)
        case "no manifest":
            Path(newest, "manifest.json").unlink()
        case "broken manifest":
            Path(newest, "manifest.json").write_text(json.dumps({"format": 1})[:-3])
    assert kept.restore(newest) == 4
    assert [worker.restored for worker in gang.plain] == [[4], [4]]
    *passed_over, resumed = reports.events
    assert resumed.startswith("resumed after step 4 from checkpoint ") and newest not in resumed
    assert len(passed_over) == (damage != "no manifest")
    assert all(newest in event for event in passed_over)


def flip_a_bit_of_a_tensor(shard):
    """The file can still be read as it could before: only a number in it is another."""
    content = bytearray(shard.read_bytes())
    numbers = torch.ones(6).numpy().tobytes()
    content[content.index(numbers) + 2] ^= 0x40
    shard.write_bytes(content)
    read = {"model": {"m1.p": torch.zeros(6)}}
    dcp.load(read, checkpoint_id=shard.parent, no_dist=True)
    assert not torch.equal(read["model"]["m1.p"], torch.ones(6))


def test_a_job_whose_checkpoints_are_all_damaged_fails_by_name_and_no_attempt_reads_them_again(make):
    train(make()[0], 4)
    kept, _, reports = make()
    found = checkpoint_format.complete_checkpoints(kept._policy.uri, "job")
    for uri in found:
        Path(uri, "m0.distcp").write_bytes(b"")
    with pytest.raises(
        AttemptFailure, match=rf"every checkpoint is damaged \(2\), the newest.* {found[0]}/m0.distcp has 0 b"
    ) as caught:
        kept.restore(found[0])
    assert caught.value.reason is Reason.CHECKPOINT_DAMAGED
    assert caught.value.reason.cause is Cause.USER, "retries of the infrastructure are not spent on it"
    assert len(reports.events) == 1 and f"trying {found[1]}" in reports.events[0]


def test_a_checkpoint_that_cannot_be_read_now_may_be_read_by_the_next_attempt(make, monkeypatch):
    train(make()[0], 4)
    kept, _, _ = make()
    newest, older = checkpoint_format.complete_checkpoints(kept._policy.uri, "job")
    Path(older, "m0.distcp").write_bytes(b"")

    def unreachable(path, *how):
        if newest in str(path):
            raise OSError("Stale file handle")
        return open(path, *how)

    monkeypatch.setattr(blobs, "open", unreachable, raising=False)
    with pytest.raises(AttemptFailure, match="cannot be read: Stale file handle") as caught:
        kept.restore(newest)
    assert caught.value.reason is Reason.CHECKPOINT_FAILED


def test_records_that_a_driver_could_not_deliver_are_delivered_by_the_attempt_that_goes_on_behind_them(make):
    """The driver dies when the checkpoint of step 4 is whole and the report of its step is not yet sent."""
    kept, _, reports = make(every=4)
    reports.waiting = {
        "steps": [{"step": 3, "loss": 0.5}, {"step": 4, "loss": float("nan")}],
        "evaluations": [],
    }
    train(kept, 4)
    again, _, heard = make()
    assert again.restore(None) == 4
    assert [step["step"] for step in heard.delivered["steps"]] == [3, 4]
    assert heard.delivered["steps"][0] == {"step": 3, "loss": 0.5}


def test_a_checkpoint_that_the_control_plane_knows_and_nobody_finds_does_not_start_the_job_anew(
    make, tmp_path
):
    kept, _, _ = make()
    with pytest.raises(AttemptFailure, match="no complete checkpoint"):
        kept.restore(str(tmp_path / "elsewhere"))


def test_a_lost_worker_is_no_damaged_checkpoint(make):
    train(make()[0], 4)
    kept, gang, _ = make()

    def wait(refs, **_):
        raise AttemptFailure(Reason.WORKER_LOST, "worker 0 of mesh m1 is gone")

    gang.wait = wait
    with pytest.raises(AttemptFailure, match="is gone"):
        kept.restore(None)


def test_a_cancel_while_saving_is_a_cancel_and_a_place_that_is_full_a_failed_checkpoint(make, monkeypatch):
    class Cancelled(Exception):
        pass

    def interrupted():
        raise Cancelled

    with pytest.raises(Cancelled):
        make(interrupted=interrupted)[0].after(2, last=False)

    def full(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint_format, "finish_checkpoint", full)
    with pytest.raises(AttemptFailure, match="disk full") as caught:
        make()[0].after(2, last=False)
    assert caught.value.reason == Reason.CHECKPOINT_FAILED
