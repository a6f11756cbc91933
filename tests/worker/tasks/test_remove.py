"""Deleting checkpoints: what is asked for and nothing else, whatever paths and links say, and whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import fsspec
import pytest

from worker.checkpoint import format as checkpoint_format
from worker.contract.checkpoint_files import (
    complete_checkpoints,
    inspect_checkpoints,
    is_artifact,
    step_folder_name,
    step_uri,
)
from worker.contract.tasks import (
    REMOVAL_REQUEST_VARIABLE,
    RemovalRequest,
    read_removal_results,
    removal_requests_json,
)
from worker.tasks import remove as tasks_remove
from worker.tasks.remove import RemovalError, remove_artifacts

JOB = "job-abc"


@pytest.fixture(params=["path", "memory"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "runs") if request.param == "path" else f"memory://{uuid.uuid4().hex}/runs"


def save(base: str, *steps: int, job: str = JOB) -> None:
    for step in steps:
        uri = step_uri(base, job, step)
        for shard in ("m0", "m1"):
            checkpoint_format.save_shard(uri, step=step, shard=shard, state={"parameters": {}})
        checkpoint_format.finish_checkpoint(uri, step=step, shards=["m0", "m1"], keep=99)


def steps_of(base: str) -> list[int]:
    return [one.step for one in inspect_checkpoints(base, JOB)]


def test_a_checkpoint_is_deleted_whole_and_the_others_stay(base: str):
    save(base, 2, 4, 6)
    save(base, 4, job="job-other")
    held = inspect_checkpoints(base, JOB)[1].size_bytes
    found = remove_artifacts(RemovalRequest(base, JOB, (step_folder_name(4),)))
    assert found.removed == (step_folder_name(4),) and found.refused == {} and found.left == (6, 2)
    assert found.freed_bytes > held > 0 and found.left_bytes == 2 * held
    assert steps_of(base) == [6, 2] and len(complete_checkpoints(base, "job-other")) == 1
    files, folder = fsspec.core.url_to_fs(step_uri(base, JOB, 4))
    assert not files.exists(folder)
    again = remove_artifacts(RemovalRequest(base, JOB, (step_folder_name(4),)))
    assert (again.removed, again.refused, again.left) == ((), {}, (6, 2)), "twice is once"
    everything = remove_artifacts(RemovalRequest(base, JOB))
    assert len(everything.removed) == 2 and everything.left == () and everything.left_bytes == 0
    assert remove_artifacts(RemovalRequest(base, "job-none")).removed == ()


def test_a_job_that_goes_on_keeps_what_it_would_go_on_from_and_what_is_newer(base: str):
    save(base, 2, 4, 6)
    files, folder = fsspec.core.url_to_fs(step_uri(base, JOB, 6))
    files.rm_file(f"{folder}/m1.distcp")  # damaged: the one before it is the one
    names = tuple(map(step_folder_name, (2, 4, 6)))
    found = remove_artifacts(RemovalRequest(base, JOB, names, in_use=True))
    assert found.removed == (step_folder_name(2),)
    assert "from which the job would go on" in found.refused[step_folder_name(4)]
    assert "newer" in found.refused[step_folder_name(6)] and steps_of(base) == [6, 4]
    assert len(remove_artifacts(RemovalRequest(base, JOB, names)).removed) == 2, "it has ended"


def test_a_crash_at_any_moment_leaves_a_whole_checkpoint_or_none(tmp_path: Path, monkeypatch):
    base, unlink = str(tmp_path), os.unlink
    for moment in range(7):
        save(base, 2, 4)
        count = 0

        def crashing(*args, **kwargs):
            nonlocal count
            if count == moment:  # noqa: B023
                raise OSError(errno.EIO, "the machine ended")
            count += 1
            return unlink(*args, **kwargs)

        monkeypatch.setattr(tasks_remove.os, "unlink", crashing)
        found = remove_artifacts(RemovalRequest(base, JOB, (step_folder_name(4),)))
        monkeypatch.setattr(tasks_remove.os, "unlink", unlink)
        whole = [one.step for one in inspect_checkpoints(base, JOB) if one.damage is None]
        listed = [uri.endswith(step_folder_name(4)) for uri in complete_checkpoints(base, JOB)]
        assert whole == ([4, 2] if moment == 0 else [2]), "whole, or not listed as whole"
        assert any(listed) == (moment == 0)
        if moment < 5:
            assert "the machine ended" in found.refused[step_folder_name(4)]
        remove_artifacts(RemovalRequest(base, JOB, (step_folder_name(4),)))
        assert steps_of(base) == [2]


def outside(tmp_path: Path) -> Path:
    """Files that are not the job's, laid as a checkpoint's would be."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("manifest.json", "m0.distcp", "precious.txt"):
        (folder / name).write_text("precious")
    return folder


def untouched(folder: Path) -> bool:
    return {one.name for one in folder.iterdir()} == {"manifest.json", "m0.distcp", "precious.txt"}


@pytest.mark.parametrize("linked", ["step", "job", "file"])
def test_no_link_leads_out_of_the_jobs_folder(tmp_path: Path, linked: str):
    base, other = tmp_path / "runs", outside(tmp_path)
    save(str(base), 2)
    name = step_folder_name(4)
    if linked == "step":
        (base / JOB / name).symlink_to(other)
    elif linked == "job":
        (other / name).mkdir()
        (other / name / "m0.distcp").write_text("precious")
        (base / "job-linked").symlink_to(other)
    else:
        (base / JOB / name).mkdir()
        (base / JOB / name / "m0.distcp").symlink_to(other / "m0.distcp")
    job = "job-linked" if linked == "job" else JOB
    if linked == "job":
        with pytest.raises(RemovalError, match="is a link or a file"):
            remove_artifacts(RemovalRequest(str(base), job, (name,)))
        assert (other / name / "m0.distcp").read_text() == "precious"
        return
    found = remove_artifacts(RemovalRequest(str(base), job, (name,)))
    assert untouched(other)
    if linked == "step":
        assert "is a link or a file" in found.refused[name] and (base / JOB / name).is_symlink()
    else:
        assert found.removed == (name,) and not (base / JOB / name).exists()


def test_a_link_that_is_put_there_while_it_is_deleted_is_not_followed(tmp_path: Path, monkeypatch):
    base, other = tmp_path / "runs", outside(tmp_path)
    save(str(base), 2)
    step = base / JOB / step_folder_name(2)
    listdir = os.listdir

    def swapping(place):
        found = listdir(place)
        if "m0.distcp" in found and not step.is_symlink():  # the folder is open: now it becomes a link
            step.rename(tmp_path / "moved")
            step.symlink_to(other)
        return found

    monkeypatch.setattr(tasks_remove.os, "listdir", swapping)
    found = remove_artifacts(RemovalRequest(str(base), JOB, (step_folder_name(2),)))
    assert untouched(other) and step.is_symlink() and found.removed == ()


@pytest.mark.parametrize(
    "name",
    [
        "..",
        ".",
        "",
        "step-2",
        "step-0000000002/..",
        "../job-other/step-0000000002",
        "step-*",
        "/etc",
        "other",
    ],
)
def test_only_names_of_our_own_are_deleted(tmp_path: Path, name: str):
    save(str(tmp_path), 2)
    save(str(tmp_path), 2, job="job-other")
    assert not is_artifact(name)
    with pytest.raises(RemovalError, match="nothing was deleted"):
        remove_artifacts(RemovalRequest(str(tmp_path), JOB, (step_folder_name(2), name)))
    assert steps_of(str(tmp_path)) == [2] and len(complete_checkpoints(str(tmp_path), "job-other")) == 1


@pytest.mark.parametrize("job", ["..", "../job-abc", "", "job/abc", "*", "job-abc/.."])
def test_only_ids_of_jobs_name_a_jobs_folder(tmp_path: Path, job: str):
    save(str(tmp_path), 2)
    with pytest.raises(RemovalError, match="no job's id"):
        remove_artifacts(RemovalRequest(str(tmp_path), job, (step_folder_name(2),)))
    assert steps_of(str(tmp_path)) == [2]


@pytest.mark.parametrize(
    "uri", ["http://h/x", "simplecache::file:///x", "zip://x::file:///y", "ftp://h/x", "github://a:b@/x"]
)
def test_places_of_other_kinds_are_not_touched(uri: str):
    with pytest.raises(RemovalError, match="nothing is deleted below"):
        remove_artifacts(RemovalRequest(uri, JOB))


def test_what_else_lies_in_the_jobs_folder_stays(tmp_path: Path):
    save(str(tmp_path), 2)
    mine = tmp_path / JOB / "notes"
    mine.mkdir()
    (mine / "x").write_text("x")
    inner = tmp_path / JOB / step_folder_name(2) / "mine"
    inner.mkdir()
    found = remove_artifacts(RemovalRequest(str(tmp_path), JOB))
    assert "none of a checkpoint's" in found.refused[step_folder_name(2)] and found.left == (2,), (
        "nothing of it went"
    )
    inner.rmdir()
    export = tmp_path / JOB / f"export-{step_folder_name(2)}"
    export.mkdir()
    (export / "model.safetensors").write_text("x" * 7)
    assert remove_artifacts(RemovalRequest(str(tmp_path), JOB)).removed == (export.name, step_folder_name(2))
    assert (mine / "x").exists()


def test_a_pattern_in_a_uri_is_a_name(tmp_path: Path):
    for base in ("a", "*"):
        save(str(tmp_path / base), 2)
    assert remove_artifacts(RemovalRequest(str(tmp_path / "*"), JOB)).removed == (step_folder_name(2),)
    assert steps_of(str(tmp_path / "a")) == [2]


def test_a_process_answers_for_each_job_and_needs_no_torch(tmp_path: Path):
    save(str(tmp_path), 2)
    asked = [RemovalRequest(str(tmp_path), JOB), RemovalRequest("http://h/x", JOB)]
    done = subprocess.run(
        [sys.executable, "-m", "worker.tasks", "remove"],
        env={**os.environ, REMOVAL_REQUEST_VARIABLE: removal_requests_json(asked)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    first, second = read_removal_results(done.stdout)
    assert done.returncode == 1 and first.removed == (step_folder_name(2),) and first.failed is None
    assert "nothing is deleted below http://h/x" in second.failed
    code = "import sys, worker.tasks.remove; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert read_removal_results("nothing so far") is None and json.dumps(first.refused) == "{}"
