"""Final weights: what a job trained, with the model's own names, is taken by load_state_dict and by from_pretrained."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from worker.checkpoint import format as checkpoint_format
from worker.checkpoint import weights as exporting
from worker.checkpoint.record import (
    RECORD_SHARD,
    make_record,
    record_from_state,
    record_to_state,
    unused_tensors,
)
from worker.checkpoint.weights import ExportTargetError, export_job, export_safetensors
from worker.contract.checkpoint_files import CheckpointError
from worker.contract.tasks import ExportRequest


class Odd(nn.Module):
    """Tied weights, buffers that are saved and one that is not, a layer that forward leaves out, a transposed weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.left_out = nn.Linear(2, 3)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.short = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.register_buffer("kept", torch.arange(4))
        self.register_buffer("passing", torch.zeros(2), persistent=False)


UNUSED = {"left_out.weight", "left_out.bias", "kept"}


def saved(base, model, *, step=3, job="job", meshes=2, keep=5):
    """A checkpoint as workers make it: each tensor once, dealt to meshes, and the record with what nobody uses."""
    record = make_record(model)
    uri = checkpoint_format.step_uri(base, job, step)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    used = [name for name in dict.fromkeys(e.tensor for e in record.entries) if name not in UNUSED]
    for mesh in range(meshes):
        mine = used[mesh::meshes]
        state = {
            "parameters": {name: parameters[name].detach() for name in mine if name in parameters},
            "buffers": {name: buffers[name] for name in mine if name in buffers},
            "optimizer": {name: {"exp_avg": torch.zeros(2)} for name in mine if name in parameters},
        }
        checkpoint_format.save_shard(uri, step=step, shard=f"m{mesh}", state=state)
    rest = record_to_state(record, unused_tensors(model, record, set(used)))
    checkpoint_format.save_shard(uri, step=step, shard=RECORD_SHARD, state=rest)
    checkpoint_format.finish_checkpoint(
        uri, step=step, shards=[*(f"m{m}" for m in range(meshes)), RECORD_SHARD], keep=keep
    )
    return uri


def odd(seed=0):
    torch.manual_seed(seed)
    return Odd()


def test_the_whole_state_dict_is_there_under_every_name_and_strict_loading_takes_it(tmp_path):
    model, other = odd(), odd(1)
    found = export_safetensors(saved(str(tmp_path / "c"), model), str(tmp_path / "out"))
    assert found.step == 3 and found.tensors == len(model.state_dict())
    assert [one.name for one in found.files] == ["model.safetensors"]
    assert found.files[0].bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == model.state_dict().keys() and "head.weight" in loaded
    other.load_state_dict(loaded, strict=True)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value) and loaded[name].dtype == value.dtype, name
    assert other.head.weight is other.embed.weight
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_large_models_are_files_of_limited_size_with_an_index_and_never_more_than_one_is_held(
    tmp_path, monkeypatch
):
    model = odd()
    uri = saved(str(tmp_path / "c"), model)
    asked = []
    load = checkpoint_format.load_checkpoint

    def counted(uri, names=None, **more):
        asked.append(set(names))
        return load(uri, names, **more)

    monkeypatch.setattr(checkpoint_format, "load_checkpoint", counted)
    found = export_safetensors(uri, str(tmp_path / "out"), file_bytes=150)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict())
    sizes = {name: t.numel() * t.element_size() for name, t in model.state_dict().items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    whole = {}
    for file in files:
        part = load_file(tmp_path / "out" / file)
        assert {name for name, place in index["weight_map"].items() if place == file} == part.keys()
        assert len(part) == 1 or sum(sizes[name] for name in part) <= 150
        whole |= part
    odd(1).load_state_dict(whole, strict=True)
    assert {one.name for one in found.files} == {*files, "model.safetensors.index.json"}
    assert len(asked) == len(files)
    assert all(sum(sizes[name] for name in names) <= max(150, *sizes.values()) for names in asked)


def test_it_is_read_from_and_written_to_what_is_no_disk():
    base = f"memory://{uuid.uuid4().hex}"
    saved(base, odd())
    found = export_job(ExportRequest(base, "job"))
    assert found.uri == f"{base}/job/export-step-0000000003"
    files, folder = fsspec.core.url_to_fs(found.uri)
    assert [path.rsplit("/", 1)[1] for path in files.ls(folder, detail=False)] == ["model.safetensors"]
    assert checkpoint_format.complete_checkpoints(base, "job") == [
        checkpoint_format.step_uri(base, "job", 3)
    ], "exports are no checkpoints"


@pytest.mark.parametrize("damage", ["size", "bit", "missing"])
def test_a_damaged_checkpoint_is_passed_over_with_a_note_and_refused_where_it_is_asked_for(tmp_path, damage):
    base, older = str(tmp_path / "c"), odd(7)
    saved(base, older, step=2)
    newest = Path(saved(base, odd(8), step=4))
    shard = newest / "m1.distcp"
    if damage == "size":
        os.truncate(shard, shard.stat().st_size // 2)
    elif damage == "missing":
        shard.unlink()
    else:
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(bytes(content))
    found = export_job(ExportRequest(base, "job", target=str(tmp_path / "out")))
    assert found.step == 2 and len(found.notes) == 1 and "m1.distcp" in found.notes[0]
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["head.weight"], older.head.weight)
    with pytest.raises(CheckpointError, match=r"no whole checkpoint .*m1\.distcp"):
        export_job(ExportRequest(base, "job", step=4, target=str(tmp_path / "other")))


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    saved(str(tmp_path), odd(), step=2)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5 below .*: there are 2"):
        export_job(ExportRequest(str(tmp_path), "job", step=5))
    with pytest.raises(CheckpointError, match=r"there is no .*/nowhere/job to be seen from here"):
        export_job(ExportRequest(str(tmp_path / "nowhere"), "job"))


def test_a_folder_with_other_files_is_refused_and_what_a_killed_export_left_is_replaced(tmp_path):
    uri, out = saved(str(tmp_path / "c"), odd()), tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_text("half")
    (out / "model.safetensors.0123.partial").write_text("cut short")
    export_safetensors(uri, str(out))
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    load_file(out / "model.safetensors")
    (out / "model-00001-of-00002.safetensors").write_text("of another model")
    with pytest.raises(ExportTargetError, match=r"holds other files \(model-00001-of-00002\.safetensors\)"):
        export_safetensors(uri, str(out))
    with pytest.raises(ExportTargetError, match=r"model\.safetensors is a file: name a folder"):
        export_safetensors(uri, str(out / "model.safetensors"))


def test_a_write_that_fails_leaves_no_file(tmp_path, monkeypatch):
    uri = saved(str(tmp_path / "c"), odd())
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        export_safetensors(uri, str(tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []


def test_checkpoints_that_cannot_give_the_whole_model_are_refused(tmp_path):
    uri = checkpoint_format.step_uri(str(tmp_path), "job", 1)
    checkpoint_format.save_shard(uri, step=1, shard="m0", state={"parameters": {"p": torch.ones(2)}})
    checkpoint_format.finish_checkpoint(uri, step=1, shards=["m0"], keep=1)
    with pytest.raises(CheckpointError, match="saved by an older version"):
        export_safetensors(uri, str(tmp_path / "out"))

    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"scale": 1}

    with pytest.raises(CheckpointError, match="state_dict has _extra_state"):
        export_safetensors(saved(str(tmp_path / "extra"), Extra(2, 2)), str(tmp_path / "out"))
    model = odd()
    model_uri = saved(str(tmp_path / "lost"), model)
    record = make_record(model)
    lost = replace(record, entries=(*record.entries, replace(record.entries[0], name="x", tensor="nowhere")))
    checkpoint_format.save_shard(model_uri, step=3, shard=RECORD_SHARD, state=record_to_state(lost, {}))
    checkpoint_format.finish_checkpoint(model_uri, step=3, shards=["m0", "m1", RECORD_SHARD], keep=1)
    with pytest.raises(CheckpointError, match=r"lacks .*nowhere"):
        export_safetensors(model_uri, str(tmp_path / "out"))


def test_the_record_comes_back_as_it_was(tmp_path):
    record = make_record(odd())
    assert (
        record_from_state(checkpoint_format.load_shard_values(saved(str(tmp_path), odd()), RECORD_SHARD))
        == record
    )
    assert exporting.MAX_FILE_BYTES == 5_000_000_000


def test_a_configuration_that_cannot_be_written_costs_no_training_but_is_told(tmp_path):
    class Shy:
        def save_pretrained(self, folder):
            raise ValueError("not today")

    model = odd()
    model.config = Shy()
    found = export_safetensors(saved(str(tmp_path / "c"), model), str(tmp_path / "out"))
    assert found.notes == (
        "Odd could not write its configuration (ValueError: not today): write config.json yourself, if it is needed",
    )
