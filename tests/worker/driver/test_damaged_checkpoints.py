"""Whatever is wrong with the newest checkpoint is found before anything of it is used, on a disk and on no disk."""

from __future__ import annotations

import json
import uuid

import fsspec
import pytest
import torch

from tests.worker.driver.test_checkpoints import Gang, Reports
from worker.actor.saver import reading_checkpoint
from worker.checkpoint import format as checkpoint_format
from worker.contract.checkpoint_files import inspect_checkpoints
from worker.contract.failures import AttemptFailure
from worker.contract.job import CheckpointPolicy
from worker.contract.reasons import Reason
from worker.driver.checkpoints import Checkpoints


class Worker:
    """Knows the parameter of its mesh only, and reads no shard that has none of it."""

    def __init__(self, mesh):
        self.mesh, self.value, self.restored = mesh, None, []

    @reading_checkpoint()
    def restore(self, uri):
        state, step = checkpoint_format.load_checkpoint(uri, names={f"{self.mesh}.p"})
        self.value = state["parameters"][f"{self.mesh}.p"].tolist()
        self.restored.append(step)
        return step


@pytest.fixture(params=["file", "memory"])
def base(request, tmp_path):
    """A folder on disk, and one in a file system that is no disk."""
    return str(tmp_path / "runs") if request.param == "file" else f"memory://{uuid.uuid4().hex}"


def saved(base, *steps):
    for step in steps:
        uri = checkpoint_format.step_uri(base, "job", step)
        for mesh in ("m0", "m1"):
            state = {"parameters": {f"{mesh}.p": torch.full((50,), float(step))}}
            checkpoint_format.save_shard(uri, step=step, shard=mesh, state=state)
        checkpoint_format.save_shard(
            uri, step=step, shard="model", state={"parameters": {"unused": torch.ones(3)}}
        )
        checkpoint_format.finish_checkpoint(uri, step=step, shards=["m0", "m1", "model"], keep=9)
    return fsspec.core.url_to_fs(uri)


def restored(base):
    gang, reports = Gang(), Reports()
    gang.plain = [Worker("m0"), Worker("m1")]
    for actor, worker in zip(gang.workers, gang.plain, strict=True):
        actor.answers["restore"] = lambda uri, w=worker: lambda: w.restore(uri)
    kept = Checkpoints(CheckpointPolicy(base), "job", gang=gang, reporter=reports, limit_s=60)
    return kept.restore(None), gang.plain, reports.events


def changed(files, path, change):
    files.pipe_file(path, json.dumps(change(json.loads(files.cat_file(path)))).encode())


def truncate(files, folder):
    files.pipe_file(f"{folder}/m1.distcp", files.cat_file(f"{folder}/m1.distcp")[:-1])


def empty(files, folder):
    files.pipe_file(f"{folder}/m1.distcp", b"")


def remove(files, folder):
    files.rm_file(f"{folder}/m1.distcp")


def remove_what_no_worker_reads(files, folder):
    files.rm_file(f"{folder}/model.distcp")


def swap_shards_of_steps(files, folder):
    """The shard of an older step: of the right size, readable, and wrong."""
    older = folder.replace("0000000006", "0000000004")
    files.pipe_file(f"{folder}/m1.distcp", files.cat_file(f"{older}/m1.distcp"))


def empty_manifest(files, folder):
    files.pipe_file(f"{folder}/manifest.json", b"")


def list_for_manifest(files, folder):
    files.pipe_file(f"{folder}/manifest.json", b"[]")


def manifest_of_another_step(files, folder):
    changed(files, f"{folder}/manifest.json", lambda told: told | {"step": 4})


def manifest_without_shards(files, folder):
    changed(files, f"{folder}/manifest.json", lambda told: told | {"shards": {}})


DAMAGES = {
    truncate: "m1.distcp has ",
    empty: "m1.distcp has 0 bytes",
    remove: "m1.distcp is missing",
    remove_what_no_worker_reads: "model.distcp is missing",
    swap_shards_of_steps: "m1.distcp has the SHA-256",
    empty_manifest: "manifest.json of .* cannot be read",
    list_for_manifest: "is no manifest: it holds a list",
    manifest_of_another_step: "is of step 4, its folder of step 6",
    manifest_without_shards: "says no step or no shards",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_it_is_told_and_all_workers_go_on_from_the_one_before(base, damage):
    damage(*saved(base, 4, 6))
    step, workers, events = restored(base)
    assert step == 4 and [worker.value for worker in workers] == [[4.0] * 50] * 2
    passed_over, resumed = events
    with pytest.raises(AssertionError, match=DAMAGES[damage]):
        raise AssertionError(passed_over)
    assert "trying" in passed_over and resumed.startswith("resumed after step 4")
    newest, older = inspect_checkpoints(base, "job", sums=True)
    assert newest.damage is not None and newest.finished and older.damage is None


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_where_there_is_none_before_it_the_job_fails_and_is_not_tried_again(base, damage):
    if damage is swap_shards_of_steps:
        files, folder = saved(base, 4, 6)
        damage(files, folder)
        files.rm(folder.replace("0000000006", "0000000004"), recursive=True)
    else:
        damage(*saved(base, 6))
    with pytest.raises(AttemptFailure, match=f"every checkpoint is damaged.*{DAMAGES[damage]}") as caught:
        restored(base)
    assert caught.value.reason is Reason.CHECKPOINT_DAMAGED


def test_files_that_are_no_part_of_it_harm_nobody_and_other_names_are_no_checkpoints(base):
    files, folder = saved(base, 4, 6)
    job = folder.rsplit("/", 1)[0]
    files.pipe_file(f"{folder}/m1.distcp.0123.partial", b"half")
    files.pipe_file(f"{folder}/notes.txt", b"mine")
    files.pipe_file(f"{job}/step-0000000009", b"a file")
    for name in ("step-9", "step-00000000x9", "export-step-0000000009", "step-"):
        files.makedirs(f"{job}/{name}", exist_ok=True)
        files.pipe_file(f"{job}/{name}/manifest.json", b"{}")
    assert restored(base)[0] == 6
    found = inspect_checkpoints(base, "job", sums=True)
    assert [one.step for one in found if one.damage is None] == [6, 4]
    assert {one.step for one in found} <= {4, 6, 9}
