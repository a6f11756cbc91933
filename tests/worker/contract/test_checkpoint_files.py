"""What is said of checkpoints without reading their tensors: whole, damaged, unfinished."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from pathlib import Path

import fsspec
import pytest
import torch

from worker.checkpoint import format as checkpoint_format
from worker.contract.checkpoint_files import CheckpointError, inspect_checkpoints, step_uri


@pytest.fixture(params=["file", "memory"])
def base(request, tmp_path):
    return str(tmp_path / "checkpoints") if request.param == "file" else f"memory://{uuid.uuid4().hex}"


FILES = ("m0.distcp", "m1.distcp", "groups.distcp", "tensors.json", ".metadata")


def save(base, step, job="job"):
    uri = step_uri(base, job, step)
    for shard in ("m0", "m1"):
        checkpoint_format.save_shard(
            uri, step=step, shard=shard, state={"parameters": {shard: torch.full((99,), step)}}
        )
    checkpoint_format.finish_checkpoint(uri, step=step, shards=["m0", "m1"], keep=9)
    return fsspec.core.url_to_fs(uri)


def test_whole_checkpoints_are_listed_newest_first_with_size_and_time(base):
    before = time.time()
    files, folder = save(base, 10)
    save(base, 20)
    newest, older = inspect_checkpoints(base, "job")
    assert [newest.step, older.step] == [20, 10] and older.uri == step_uri(base, "job", 10)
    assert older.size_bytes == sum(files.size(f"{folder}/{name}") for name in FILES)
    assert before - 2 < older.saved_at < time.time() + 2
    assert all(one.damage is None and one.finished and not one.summed for one in (newest, older))
    assert all(one.summed for one in inspect_checkpoints(base, "job", sums=True))


@pytest.mark.parametrize(
    ("damage", "told", "needs_sums", "finished"),
    [
        ("cut", r"m1\.distcp has 50 bytes, the manifest says", False, True),
        ("gone", r"m1\.distcp is missing", False, True),
        ("bit", r"m1\.distcp has the SHA-256 .* it is damaged", True, True),
        ("manifest", r"manifest\.json of .* cannot be read", False, True),
        ("no manifest", r"is no complete checkpoint: it has no manifest\.json", False, False),
        ("odd manifest", r"says no step or no shards", False, True),
    ],
)
def test_what_is_wrong_with_one_is_said_and_others_stay_whole(base, damage, told, needs_sums, finished):
    save(base, 10)
    files, folder = save(base, 20)
    content = files.cat_file(f"{folder}/m1.distcp")
    match damage:
        case "cut":
            files.pipe_file(f"{folder}/m1.distcp", content[:50])
        case "gone":
            files.rm_file(f"{folder}/m1.distcp")
        case "bit":
            files.pipe_file(f"{folder}/m1.distcp", content[:400] + bytes([content[400] ^ 1]) + content[401:])
        case "manifest":
            files.pipe_file(f"{folder}/manifest.json", b'{"format": 2, ')
        case "no manifest":
            files.rm_file(f"{folder}/manifest.json")
        case "odd manifest":
            files.pipe_file(f"{folder}/manifest.json", json.dumps({"format": 2, "step": 20}).encode())
    assert (inspect_checkpoints(base, "job")[0].damage is None) == needs_sums, "by their sizes"
    newest, older = inspect_checkpoints(base, "job", sums=True)
    assert older.damage is None and older.summed
    with pytest.raises(CheckpointError, match=told):
        raise CheckpointError(newest.damage)
    assert newest.finished == finished and newest.size_bytes > 0 and not newest.summed


def test_checksums_that_there_was_no_time_for_are_not_said_to_be_right(base):
    save(base, 10)
    (found,) = inspect_checkpoints(base, "job", sums=True, limit_s=0.0)
    assert found.damage is None and not found.summed


def test_a_place_that_is_not_to_be_seen_is_no_empty_one(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no .*/other/job to be seen from here"):
        inspect_checkpoints(str(tmp_path / "other"), "job")
    Path(tmp_path / "job").mkdir()
    assert inspect_checkpoints(str(tmp_path), "job") == []
    with pytest.raises(CheckpointError, match=r"nowhere://x/job cannot be read: ValueError"):
        inspect_checkpoints("nowhere://x", "job")


def test_a_control_plane_can_look_without_torch():
    names = "worker.contract.checkpoint_files, worker.contract.tasks"
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
