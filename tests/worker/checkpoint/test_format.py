"""Checkpoints: a run that goes on from one, with other stages, equals a run that never stopped."""

import copy
import hashlib
import json
import os
import uuid
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.reference import accumulate, dataset_batches
from tests.worker.cuts import cut_evenly
from worker.checkpoint import format as checkpoint_format
from worker.checkpoint.format import (
    finish_checkpoint,
    is_whole_checkpoint,
    load_checkpoint,
    load_shard,
    load_slices,
    rank_shard,
    save_shard,
)
from worker.contract.checkpoint_files import CheckpointError, complete_checkpoints, shard_path, step_uri
from worker.data.sampler import BatchSampler, collate
from worker.examples import gpt
from worker.model.export import trace
from worker.parallel.shard_spec import ShardSpec
from worker.parallel.tensor.placement import Split


def shard(name, value=1.0):
    return {
        "parameters": {name: torch.full((3,), float(value))},
        "buffers": {},
        "optimizer": {name: {"step": torch.tensor(2.0), "exp_avg": torch.full((3,), value / 2)}},
        "optimizer_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [name]}],
        "lr_schedule": None,
    }


def save(base, step, *, keep=2, meshes=("m0", "m1"), job="job"):
    uri = step_uri(base, job, step)
    for index, mesh in enumerate(meshes):
        save_shard(uri, step=step, shard=mesh, state=shard(f"p{index}", step + index))
    finish_checkpoint(uri, step=step, shards=meshes, keep=keep)
    return uri


@pytest.fixture(params=["file", "memory"])
def base(request, tmp_path):
    """A folder on disk, and one in a file system that is no disk."""
    return str(tmp_path / "checkpoints") if request.param == "file" else f"memory://{uuid.uuid4().hex}"


def test_what_all_meshes_saved_comes_back_as_one_state(base):
    uri = save(base, 7)
    state, step = load_checkpoint(uri)
    assert step == 7
    assert {name: value.tolist() for name, value in state["parameters"].items()} == {
        "p0": [7.0] * 3,
        "p1": [8.0] * 3,
    }
    assert state["optimizer"]["p1"]["exp_avg"].tolist() == [4.0] * 3
    assert state["optimizer_groups"] == [
        {"lr": 0.1, "betas": (0.9, 0.99), "params": [name]} for name in ("p0", "p1")
    ]


ROWS, COLUMNS = 12, 8
WHOLE = {
    name: torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(at))
    for at, name in enumerate("wm")
}
LAYOUTS = [None, (0, (12,), 2), (0, (8, 4), 2), (0, (12,), 4), (1, (8,), 2)]


def ranks_of(layout):
    """The spec of each rank, and its part of a tensor, taken as a stage's parameters are."""
    if layout is None:
        return [(ShardSpec("w"), lambda whole: whole)]
    dim, parts, count = layout
    split = Split(dim, parts)
    return [
        (ShardSpec("w", dim, parts, rank, count), lambda whole, rank=rank: split.pick(whole, rank, count))
        for rank in range(count)
    ]


def save_in(layout, uri):
    """A mesh that splits `w` so; `b` is whole."""
    ranks = ranks_of(layout)
    for rank, (spec, part) in enumerate(ranks):
        entry = {"step": torch.tensor(2.0), "exp_avg": part(WHOLE["m"]).clone()}
        state = {"parameters": {"w": part(WHOLE["w"]).clone()}, "optimizer": {"w": entry}}
        if rank == 0:
            state["parameters"]["b"] = torch.ones(3)
            state["optimizer_groups"] = [{"lr": 0.1, "params": ["w", "b"]}]
        save_shard(
            uri,
            step=4,
            shard=rank_shard("m0", rank),
            state=state,
            slices={"w": spec} if layout else {},
            beside=[rank_shard("m0", other) for other in range(1, len(ranks)) if rank == 0],
        )
    finish_checkpoint(uri, step=4, shards=["m0"], keep=1)


@pytest.mark.parametrize("saved", LAYOUTS)
def test_slices_are_read_in_any_layout_and_as_whole_tensors(saved, base):
    uri = step_uri(base, "job", 4)
    save_in(saved, uri)
    whole, step = load_checkpoint(uri)
    assert step == 4 and torch.equal(whole["parameters"]["w"], WHOLE["w"])
    assert (
        torch.equal(whole["optimizer"]["w"]["exp_avg"], WHOLE["m"]) and whole["optimizer"]["w"]["step"] == 2.0
    )
    for wanted in LAYOUTS:
        for spec, part in ranks_of(wanted):
            loaded = load_slices(uri, {"w": spec, "b": ShardSpec("b")})
            assert torch.equal(loaded.state["parameters"]["w"], part(WHOLE["w"])), spec
            assert torch.equal(loaded.state["optimizer"]["w"]["exp_avg"], part(WHOLE["m"])), spec
            assert loaded.state["optimizer"]["w"]["step"] == 2.0
            assert loaded.state["parameters"]["b"].tolist() == [1.0] * 3
            assert loaded.state["optimizer_groups"] == [{"lr": 0.1, "params": ["w", "b"]}]
            assert loaded.shapes == {"w": (ROWS, COLUMNS), "b": (3,)}


def test_only_what_has_slices_is_in_the_new_format(base):
    """A version that knows no slices goes on reading all others."""
    formats = {}
    for layout in LAYOUTS:
        uri = step_uri(base, f"job-{layout}", 4)
        save_in(layout, uri)
        files, folder = fsspec.core.url_to_fs(uri)
        formats[layout] = json.loads(files.cat_file(f"{folder}/manifest.json"))["format"]
    assert formats == {layout: 2 if layout is None else 3 for layout in LAYOUTS}


def test_a_rank_reads_its_own_shard_and_the_first_of_its_mesh(tmp_path, monkeypatch):
    uri = step_uri(str(tmp_path), "job", 4)
    save_in((0, (12,), 4), uri)
    read, whole = [], checkpoint_format._read_shard
    monkeypatch.setattr(
        checkpoint_format,
        "_read_shard",
        lambda files, path, *more: (read.append(Path(path).stem), whole(files, path, *more))[1],
    )
    load_slices(uri, {"w": ShardSpec("w", 0, (12,), 2, 4)})
    assert read == ["m0", "m0.tp2"]


def test_a_tensor_that_cannot_be_split_as_wanted_is_left_out_with_its_shape(tmp_path):
    uri = step_uri(str(tmp_path), "job", 4)
    save_in((0, (12,), 2), uri)
    loaded = load_slices(uri, {"w": ShardSpec("w", 0, (10,), 0, 2)})
    assert "w" not in loaded.state["parameters"] and loaded.shapes == {"w": (ROWS, COLUMNS)}


def test_a_checkpoint_lacks_what_one_rank_did_not_save(tmp_path):
    uri = step_uri(str(tmp_path), "job", 4)
    save_in((0, (12,), 2), uri)
    Path(uri, "m0.tp1.pt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks the shard of mesh 'm0\.tp1'"):
        finish_checkpoint(uri, step=4, shards=["m0"], keep=1)
    assert not is_whole_checkpoint(uri)


def test_a_checkpoint_of_format_1_is_still_read_with_the_groups_of_its_first_mesh(tmp_path):
    uri = save(str(tmp_path), 7)
    manifest = Path(uri, "manifest.json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 1}))
    state, _ = load_checkpoint(uri)
    assert len(state["optimizer_groups"]) == 1 and set(state["parameters"]) == {"p0", "p1"}
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 4}))
    with pytest.raises(CheckpointError, match="has format 4, this version reads 1, 2, 3"):
        load_checkpoint(uri)


def test_only_a_folder_with_all_its_files_is_a_whole_checkpoint(base):
    uri = save(base, 3)
    assert is_whole_checkpoint(uri) and not is_whole_checkpoint(step_uri(base, "job", 4))
    files, folder = fsspec.core.url_to_fs(uri)
    files.rm(shard_path(folder, "m1"))
    assert not is_whole_checkpoint(uri)


@pytest.mark.parametrize("other", [2, 4])
def test_shards_of_another_step_than_the_manifests_are_refused_by_name(base, other):
    uri = step_uri(base, "job", 3)
    save_shard(uri, step=3, shard="m0", state=shard("p0"))
    save_shard(uri, step=other, shard="m1", state=shard("p1"))
    finish_checkpoint(uri, step=3, shards=("m0", "m1"), keep=2)
    with pytest.raises(CheckpointError, match=f"shard 'm1' of .* is of step {other}, the manifest of step 3"):
        load_checkpoint(uri)


def test_only_the_names_asked_for_are_kept(base):
    state, _ = load_checkpoint(save(base, 7), names={"p1"})
    assert set(state["parameters"]) == set(state["optimizer"]) == {"p1"}


def test_only_the_shards_that_hold_a_name_asked_for_are_opened(base, monkeypatch):
    uri = save(base, 7, meshes=("m0", "m1", "m2"))
    opened = []
    read = checkpoint_format._read_shard
    monkeypatch.setattr(
        checkpoint_format,
        "_read_shard",
        lambda files, path, *sums: opened.append(path) or read(files, path, *sums),
    )

    def shards(names):
        opened.clear()
        state, step = load_checkpoint(uri, names=names)
        grouped = {name for group in state["optimizer_groups"] for name in group.pop("params")}
        assert step == 7 and all(g == {"lr": 0.1, "betas": (0.9, 0.99)} for g in state["optimizer_groups"])
        assert grouped >= set(names or ["p0", "p1", "p2"]) & {"p0", "p1", "p2"}
        assert set(state["parameters"]) == set(names or ["p0", "p1", "p2"]) & {"p0", "p1", "p2"}
        return [path.rsplit("/", 1)[1] for path in opened]

    assert shards({"p1"}) == ["m1.pt"]
    assert shards({"p2", "p0"}) == ["m0.pt", "m2.pt"]
    assert shards({"other"}) == ["m0.pt"], "what is the same in all shards is read from one"
    assert shards(None) == ["m0.pt", "m1.pt", "m2.pt"]
    files, folder = fsspec.core.url_to_fs(uri)
    manifest = json.loads(files.cat_file(f"{folder}/manifest.json"))
    del manifest["names"]  # as an older version wrote it
    files.pipe_file(f"{folder}/manifest.json", json.dumps(manifest).encode())
    assert shards({"p1"}) == ["m0.pt", "m1.pt", "m2.pt"]


def test_the_newest_complete_checkpoints_are_kept_and_incomplete_ones_ignored(base):
    assert complete_checkpoints(base, "job") == []
    for step in (10, 20, 30):
        save(base, step)
    save_shard(step_uri(base, "job", 40), step=40, shard="m0", state=shard("p0"))
    assert complete_checkpoints(base, "job") == [step_uri(base, "job", 30), step_uri(base, "job", 20)]
    files, folder = fsspec.core.url_to_fs(f"{base}/job")
    names = sorted(path.rsplit("/", 1)[-1] for path in files.ls(folder, detail=False))
    assert names == ["step-0000000020", "step-0000000030", "step-0000000040"]
    with pytest.raises(CheckpointError, match=r"no complete checkpoint: it has no manifest\.json"):
        load_checkpoint(step_uri(base, "job", 40))
    save(base, 50)
    names = sorted(path.rsplit("/", 1)[-1] for path in files.ls(folder, detail=False))
    assert names == ["step-0000000030", "step-0000000050"]


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True), keep=st.integers(1, 4))
def test_any_history_leaves_the_newest(steps, keep):
    base = f"memory://{uuid.uuid4().hex}"
    for step in sorted(steps):
        save(base, step, keep=keep, meshes=("m0",))
    left = [step for step in steps if fsspec.filesystem("memory").exists(step_uri(base, "job", step))]
    assert sorted(left) == sorted(steps)[-keep:]
    assert complete_checkpoints(base, "job") == [
        step_uri(base, "job", step) for step in sorted(left, reverse=True)
    ]


def test_those_of_every_so_many_steps_stay_where_they_are_whole(base):
    for step in (10, 15, 20, 25, 30):
        uri = step_uri(base, "job", step)
        save_shard(uri, step=step, shard="m0", state=shard("p0"))
        if step != 20:
            finish_checkpoint(uri, step=step, shards=["m0"], keep=1, keep_every=10)
    files, folder = fsspec.core.url_to_fs(f"{base}/job")
    names = sorted(path.rsplit("/", 1)[-1] for path in files.ls(folder, detail=False))
    assert names == ["step-0000000010", "step-0000000030"], "20 was never whole"


def test_jobs_do_not_touch_each_others_checkpoints(base):
    save(base, 1, keep=1, job="a")
    save(base, 2, keep=1, job="b")
    assert complete_checkpoints(base, "a") == [step_uri(base, "a", 1)]


def test_finish_refuses_a_missing_shard_and_names_its_mesh(base):
    uri = step_uri(base, "job", 1)
    save_shard(uri, step=1, shard="m0", state=shard("p0"))
    with pytest.raises(CheckpointError, match="lacks the shard of mesh 'm1'"):
        finish_checkpoint(uri, step=1, shards=["m0", "m1"], keep=1)
    assert complete_checkpoints(base, "job") == []


def test_saving_over_a_checkpoint_makes_it_incomplete_until_finished(base):
    uri = save(base, 5, meshes=("m0", "m1", "m2"))
    save_shard(uri, step=5, shard="m0", state=shard("p0"))
    assert complete_checkpoints(base, "job") == []
    save_shard(uri, step=5, shard="m1", state=shard("p1"))
    finish_checkpoint(uri, step=5, shards=["m0", "m1"], keep=1)
    assert set(load_checkpoint(uri)[0]["parameters"]) == {"p0", "p1"}


def test_a_damaged_shard_is_refused_by_name(tmp_path):
    uri = save(str(tmp_path), 5)
    path = os.path.join(uri, "m1.pt")
    content = Path(path).read_bytes()
    with open(path, "wb") as file:
        file.write(content[:-10])
    with pytest.raises(CheckpointError, match=r"m1\.pt has \d+ bytes, the manifest says \d+"):
        load_checkpoint(uri)
    with open(path, "wb") as file:
        file.write(b"x" * len(content))
    save_manifest_sizes(uri)
    with pytest.raises(CheckpointError, match=r"m1\.pt cannot be read"):
        load_checkpoint(uri)
    torch.save({"step": 5, "state": print}, path)  # what no state holds, and reading would run
    save_manifest_sizes(uri)
    with pytest.raises(CheckpointError, match=r"m1\.pt cannot be read"):
        load_checkpoint(uri)
    os.remove(path)
    with pytest.raises(CheckpointError, match=r"m1\.pt is missing"):
        load_checkpoint(uri)


def test_a_bit_that_flipped_in_a_tensor_is_found_wherever_the_checkpoint_lies(base):
    uri = save(base, 5)
    files, folder = fsspec.core.url_to_fs(uri)
    content = bytearray(files.cat_file(f"{folder}/m1.pt"))
    place = content.index(torch.full((3,), 6.0).numpy().tobytes())
    content[place + 2] ^= 1
    files.pipe_file(f"{folder}/m1.pt", bytes(content))
    with pytest.raises(CheckpointError, match=r"m1\.pt has the SHA-256 .* it is damaged"):
        load_checkpoint(uri)
    with pytest.raises(CheckpointError, match=r"m1\.pt has the SHA-256 .* it is damaged"):
        load_shard(uri, "m1")
    assert set(load_checkpoint(uri, names={"p0"})[0]["parameters"]) == {"p0"}, "the other shard is whole"
    assert set(load_shard(uri, "m0")["parameters"]) == {"p0"}
    with pytest.raises(CheckpointError, match="has no shard 'm9'"):
        load_shard(uri, "m9")
    manifest = json.loads(files.cat_file(f"{folder}/manifest.json"))
    del manifest["sha256"]  # as an older version wrote it
    files.pipe_file(f"{folder}/manifest.json", json.dumps(manifest).encode())
    assert set(load_checkpoint(uri)[0]["parameters"]) == {"p0", "p1"}


def save_manifest_sizes(uri):
    manifest = Path(uri, "manifest.json")
    content = json.loads(manifest.read_text())
    content["shards"] = {
        shard: os.path.getsize(os.path.join(uri, f"{shard}.pt")) for shard in content["shards"]
    }
    content["sha256"] = {
        shard: hashlib.sha256(Path(uri, f"{shard}.pt").read_bytes()).hexdigest()
        for shard in content["shards"]
    }
    manifest.write_text(json.dumps(content))


def test_a_manifest_that_was_cut_short_is_named(tmp_path):
    uri = save(str(tmp_path), 5)
    manifest = Path(uri, "manifest.json")
    manifest.write_text(manifest.read_text()[:20])
    with pytest.raises(CheckpointError, match=r"manifest\.json of .* cannot be read"):
        load_checkpoint(uri)


def test_a_new_checkpoint_counts_although_old_ones_cannot_be_removed(tmp_path, monkeypatch):
    save(str(tmp_path), 1)

    def refuse(self, *arguments, **keywords):
        raise PermissionError("read-only")

    monkeypatch.setattr(LocalFileSystem, "rm", refuse)
    uri = save(str(tmp_path), 2, keep=1)
    assert complete_checkpoints(str(tmp_path), "job")[0] == uri


class Crash(BaseException):
    """The process is gone: nothing after it runs, no handler of errors either."""


def crash_after(monkeypatch, files, count):
    """Let `count` changes of the file system happen, and end the process at the next one."""
    left = [count]
    for name in ("makedirs", "open", "mv", "rm", "rm_file"):

        def counted(self, *arguments, _change=getattr(files, name), _name=name, **keywords):
            reads = _name == "open" and "w" not in keywords.get("mode", arguments[1:2] or "r")
            if not reads and left[0] <= 0:
                raise Crash
            left[0] -= not reads
            return _change(self, *arguments, **keywords)

        monkeypatch.setattr(files, name, counted)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_crash_at_any_moment_of_a_save_leaves_a_checkpoint_to_go_on_from(base, keep, monkeypatch):
    files = type(fsspec.core.url_to_fs(base)[0])
    moments = 0
    while True:
        job = f"job{moments}"
        save(base, 1, keep=keep, job=job)
        with monkeypatch.context() as patch:
            crash_after(patch, files, moments)
            try:
                save(base, 2, keep=keep, job=job)
                break
            except Crash:
                pass
        newest = complete_checkpoints(base, job)[0]
        state, step = load_checkpoint(newest)
        assert newest == step_uri(base, job, step)
        assert state["parameters"]["p0"].tolist() == [float(step)] * 3
        assert save(base, 2, keep=keep, job=job) == complete_checkpoints(base, job)[0], (
            "the next attempt can save"
        )
        moments += 1
    assert moments >= 7, "two shards and the manifest are written and renamed, the old folder is removed"
    assert len(complete_checkpoints(base, job)) == keep


def test_a_manifest_that_cannot_be_written_costs_no_older_checkpoint(base, monkeypatch):
    old = save(base, 1, keep=1)
    write = checkpoint_format._write_atomically

    def refuse(files, path, content):
        if path.endswith("manifest.json"):
            raise OSError("quota exceeded")
        write(files, path, content)

    monkeypatch.setattr(checkpoint_format, "_write_atomically", refuse)
    with pytest.raises(OSError, match="quota exceeded"):
        save(base, 2, keep=1)
    assert complete_checkpoints(base, "job") == [old]
    assert load_checkpoint(old)[1] == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a file that is always full is Linux's")
def test_a_full_disk_is_named_with_the_ways_out(tmp_path, monkeypatch):
    """torch.save raises something else behind the error of the write, and hides it."""
    uri = step_uri(str(tmp_path), "job", 1)
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(LocalFileSystem, "open", lambda *_: os.fdopen(full, "wb", buffering=0))
    with pytest.raises(
        CheckpointError, match=r"no space is left for .*m0.*\(No space left.*checkpoint\.keep"
    ):
        save_shard(uri, step=1, shard="m0", state=shard("p0", 1.0))


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    uri = step_uri(str(tmp_path), "job", 1)
    save_shard(uri, step=1, shard="m0", state=shard("p0", 1.0))
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_shard(uri, step=1, shard="m0", state=shard("p0", 2.0))
    monkeypatch.undo()
    assert sorted(os.listdir(uri)) == ["m0.names.json", "m0.pt"]
    finish_checkpoint(uri, step=1, shards=["m0"], keep=1)
    assert load_checkpoint(uri)[0]["parameters"]["p0"].tolist() == [1.0] * 3


def test_a_part_of_a_large_tensor_is_saved_alone(tmp_path):
    uri = step_uri(str(tmp_path), "job", 1)
    large = torch.zeros(1_000_000)
    save_shard(uri, step=1, shard="m0", state={"parameters": {"p": large[:10]}})
    assert os.path.getsize(os.path.join(uri, "m0.pt")) < 10_000


def test_the_manifest_says_what_is_there_in_plain_json(tmp_path):
    uri = step_uri(str(tmp_path), "job", 3)
    save_shard(uri, step=3, shard="m0", state=shard("p0"))
    finish_checkpoint(uri, step=3, shards=["m0"], keep=1)
    manifest = json.loads(Path(uri, "manifest.json").read_text())
    assert manifest["step"] == 3
    assert manifest["shards"] == {"m0": os.path.getsize(os.path.join(uri, "m0.pt"))}


# A resume with another cut, with stages that are trained one after the other in this process


class Stages:
    """Trains a cut model without an engine: parameters by original name, one AdamW for each stage."""

    def __init__(self, graph):
        self.graph = graph
        self.named = [
            {stage.original_names[local]: p for local, p in stage.named_parameters()}
            for stage in graph.stages
        ]
        self.optimizers = [torch.optim.AdamW(named.values(), lr=1e-2) for named in self.named]

    def step(self, batch):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        accumulate(self, batch, nn.functional.cross_entropy)
        for optimizer in self.optimizers:
            optimizer.step()

    def __call__(self, *inputs):
        values = {f"input:{k}": value for k, value in enumerate(inputs)}
        for stage in self.graph.stages:
            values |= zip(stage.outputs, stage(*(values[name] for name in stage.inputs)), strict=True)
        return values["output"]

    def states(self):
        for named, optimizer in zip(self.named, self.optimizers, strict=True):
            saved = optimizer.state_dict()
            names = list(named)
            yield {
                "parameters": {name: p.detach() for name, p in named.items()},
                "optimizer": {names[index]: entry for index, entry in saved["state"].items()},
                "optimizer_groups": [
                    {k: v for k, v in g.items() if k != "params"} for g in saved["param_groups"]
                ],
            }

    def load(self, state):
        for named, optimizer in zip(self.named, self.optimizers, strict=True):
            for name, p in named.items():
                p.data.copy_(state["parameters"][name])
            groups = optimizer.state_dict()["param_groups"]
            entries = {index: state["optimizer"][name] for index, name in enumerate(named)}
            optimizer.load_state_dict({"state": entries, "param_groups": groups})


def test_a_resume_on_fewer_stages_goes_on_exactly(tmp_path):
    torch.manual_seed(0)
    model = gpt.build(3, 16, 2, vocab=16, length=8).double()
    data = [(torch.randint(0, 16, (8,)), torch.randint(0, 16, (8,))) for _ in range(40)]
    batch = dataset_batches(data, BatchSampler(len(data), 8, 2, seed=4), collate)
    traced = trace(model, batch(0)[0][0])

    unbroken = Stages(cut_evenly(traced, 4))
    for step in range(1, 7):
        unbroken.step(batch(step))

    first = Stages(cut_evenly(traced, 4))
    for step in range(1, 4):
        first.step(batch(step))
    uri = step_uri(str(tmp_path), "job", 3)
    for index, state in enumerate(first.states()):
        save_shard(uri, step=3, shard=f"m{index}", state=copy.deepcopy(state))
    finish_checkpoint(uri, step=3, shards=["m0", "m1", "m2", "m3"], keep=1)

    state, step = load_checkpoint(uri)
    second = Stages(cut_evenly(traced, 2))
    second.load(state)
    for later in range(step + 1, 7):
        second.step(batch(later))
    expected = {name: p for named in unbroken.named for name, p in named.items()}
    found = {name: p for named in second.named for name, p in named.items()}
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-14)


def test_a_place_is_tried_without_leaving_a_trace_and_a_closed_one_is_named(tmp_path):
    for _ in ("where it is made", "where it is there"):
        checkpoint_format.check_writable(str(tmp_path / "new" / "folder"))
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(checkpoint_format.CheckpointError, match="file/below"):
        checkpoint_format.check_writable(str(tmp_path / "file" / "below"))
