"""Checkpoints: a run that goes on from one, with other stages, equals a run that never stopped."""

import copy
import hashlib
import json
import math
import os
import re
import uuid
from itertools import pairwise
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.reference import accumulate, dataset_batches
from tests.worker.checkpoint.older_formats import save_older
from tests.worker.cuts import cut_evenly
from worker.checkpoint import blobs, chunked, whole_shards
from worker.checkpoint import format as checkpoint_format
from worker.checkpoint.format import (
    HeldParts,
    finish_checkpoint,
    is_whole_checkpoint,
    load_checkpoint,
    load_parts,
    load_shard_values,
    rank_shard,
    save_shard,
)
from worker.contract.checkpoint_files import (
    CheckpointError,
    DamagedCheckpointError,
    complete_checkpoints,
    inspect_checkpoints,
    shard_path,
    step_uri,
)
from worker.data.sampler import BatchSampler, collate
from worker.examples import gpt
from worker.model.export import trace
from worker.parallel.chunks import FlatRun, chunks, pieces
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


def runs_of(elements, count, shape):
    """The runs of a tensor's elements that `count` data workers have, with places within its rows."""
    ends = [elements * k // count + k % 3 for k in range(count)] + [elements]
    return [FlatRun(begin, end, shape) for begin, end in pairwise(ends)]


def states_in(layout):
    """The state of each tensor-parallel rank of a mesh that splits `w` so; `b` is whole."""
    for rank, (spec, part) in enumerate(ranks_of(layout)):
        entry = {"step": torch.tensor(2.0), "exp_avg": part(WHOLE["m"]).clone()}
        state = {"parameters": {"w": part(WHOLE["w"]).clone()}, "optimizer": {"w": entry}}
        if rank == 0:
            state["parameters"]["b"] = torch.ones(3)
            state["optimizer_groups"] = [{"lr": 0.1, "params": ["w", "b"]}]
        yield spec, state


def save_in(layout, uri, data=1):
    """What a mesh saves that splits `w` so, over `data` workers that share the optimizer's state (ZeRO-1)."""
    states = list(states_in(layout))
    count = data * len(states)
    for worker in range(count):
        of, rank = divmod(worker, len(states))
        spec, state = copy.deepcopy(states[rank])
        held = HeldParts({"w": spec} if layout else {})
        if data > 1:
            moment = state["optimizer"]["w"]["exp_avg"]
            run = runs_of(moment.numel(), data, tuple(moment.shape))[of]
            state["optimizer"]["w"]["exp_avg"] = run.of(moment).clone()
            held = HeldParts(held.slices, {"w": run})
        save_shard(
            uri,
            step=4,
            shard=rank_shard("m0", worker),
            state=state if of == 0 else {"optimizer": state["optimizer"]},
            held=held,
            beside=[rank_shard("m0", other) for other in range(1, count) if worker == 0],
        )
    finish_checkpoint(uri, step=4, shards=["m0"], keep=1)


def check_read(uri):
    """The tensors of `save_in` come back whole, in every layout, and in runs of each."""
    whole, step = load_checkpoint(uri)
    assert step == 4 and torch.equal(whole["parameters"]["w"], WHOLE["w"])
    assert (
        torch.equal(whole["optimizer"]["w"]["exp_avg"], WHOLE["m"]) and whole["optimizer"]["w"]["step"] == 2.0
    )
    for wanted in LAYOUTS:
        for spec, part in ranks_of(wanted):
            moment = part(WHOLE["m"])
            for run in [None, *runs_of(moment.numel(), 3, tuple(moment.shape))]:
                held = HeldParts({"w": spec} if wanted else {}, {} if run is None else {"w": run})
                loaded = load_parts(uri, {"w", "b"}, held)
                assert torch.equal(loaded.state["parameters"]["w"], part(WHOLE["w"])), spec
                expected = moment if run is None else moment.reshape(-1)[run.begin : run.end]
                assert torch.equal(loaded.state["optimizer"]["w"]["exp_avg"], expected), (spec, run)
                assert loaded.state["optimizer"]["w"]["step"] == 2.0
                assert loaded.state["parameters"]["b"].tolist() == [1.0] * 3
                assert loaded.state["optimizer_groups"] == [{"lr": 0.1, "params": ["w", "b"]}]
                assert loaded.shapes == {"w": (ROWS, COLUMNS), "b": (3,)}


@pytest.mark.parametrize("data", [1, 3])
@pytest.mark.parametrize("saved", LAYOUTS)
def test_chunks_are_read_in_any_layout_and_as_whole_tensors(saved, data, base):
    uri = step_uri(base, "job", 4)
    save_in(saved, uri, data)
    check_read(uri)


@pytest.mark.parametrize("saved", LAYOUTS)
def test_checkpoints_of_formats_2_and_3_are_read_in_any_layout(saved, tmp_path):
    uri = step_uri(str(tmp_path), "job", 4)
    specs, states = zip(*states_in(saved), strict=True)
    shards = ["m0", *(f"m0.tp{rank}" for rank in range(1, len(states)))]
    slices = {shard: {"w": spec} for shard, spec in zip(shards, specs, strict=True)} if saved else None
    save_older(uri, dict(zip(shards, states, strict=True)), step=4, number=3 if saved else 2, slices=slices)
    check_read(uri)
    assert is_whole_checkpoint(uri)
    (found,) = inspect_checkpoints(str(tmp_path), "job", sums=True)
    assert found.damage is None and found.summed


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), max_size=4),
    ends=st.tuples(st.integers(0, 256), st.integers(0, 256)),
    limit=st.integers(4, 64),
)
def test_chunks_of_a_run_have_its_elements_each_once_at_their_places(shape, ends, limit):
    whole = torch.arange(float(math.prod(shape))).view(shape)
    begin, end = sorted(min(end, whole.numel()) for end in ends)
    run = FlatRun(begin, end, tuple(shape))
    found = torch.full_like(whole, -1.0)
    taken = 0
    for place, part in chunks(run.of(whole), ShardSpec("w"), run):
        for offsets, piece in pieces(place, part, limit):
            assert piece.nbytes <= limit
            at = tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))
            found[at] = piece
            taken += piece.numel()
    expected = torch.full_like(whole, -1.0).view(-1)
    expected[begin:end] = whole.view(-1)[begin:end]
    assert torch.equal(found.view(-1), expected) and taken == end - begin


def test_a_worker_reads_the_blobs_that_have_some_of_its_part_and_no_others(tmp_path, monkeypatch):
    uri = step_uri(str(tmp_path), "job", 4)
    monkeypatch.setattr(chunked, "BLOB_BYTES", 32)  # a row of `w`
    save_in((0, (12,), 4), uri)
    read, ranged = [], blobs._read_range
    monkeypatch.setattr(
        blobs,
        "_read_range",
        lambda files, path, begin, end: (
            read.append((Path(path).stem, end - begin)),
            ranged(files, path, begin, end),
        )[1],
    )
    load_parts(uri, {"w"}, HeldParts({"w": ShardSpec("w", 0, (12,), 2, 4)}))
    assert {shard for shard, _ in read} == {"m0", "m0.rank2"}, "its own, and what is the same for all"
    of_others = [size for shard, size in read if shard == "m0"]
    assert sum(of_others) < os.path.getsize(os.path.join(uri, "m0.distcp")) / 2
    read.clear()
    load_parts(
        uri, {"w"}, HeldParts({"w": ShardSpec("w", 0, (12,), 1, 12)})
    )  # a row in the first rank's slice
    assert {shard for shard, _ in read} == {"m0"}


def test_a_large_tensor_is_written_and_read_in_pieces(tmp_path, monkeypatch):
    """Nothing larger than a piece of it is held beside it."""
    monkeypatch.setattr(chunked, "BLOB_BYTES", 100)
    sizes, add = [], blobs.BlobWriter.add
    monkeypatch.setattr(
        blobs.BlobWriter,
        "add",
        lambda self, value: (
            sizes.append(value.nbytes if isinstance(value, torch.Tensor) else 0),
            add(self, value),
        )[1],
    )
    uri = step_uri(str(tmp_path), "job", 4)
    save_in((0, (12,), 2), uri)
    assert max(sizes) == 96 and len(sizes) > 8
    check_read(uri)


def test_a_tensor_that_cannot_be_split_as_wanted_is_left_out_with_its_shape(tmp_path):
    uri = step_uri(str(tmp_path), "job", 4)
    save_in((0, (12,), 2), uri)
    loaded = load_parts(uri, {"w"}, HeldParts({"w": ShardSpec("w", 0, (10,), 0, 2)}))
    assert "w" not in loaded.state["parameters"] and loaded.shapes == {"w": (ROWS, COLUMNS)}


def test_a_checkpoint_lacks_what_one_rank_did_not_save(tmp_path):
    uri = step_uri(str(tmp_path), "job", 4)
    save_in((0, (12,), 2), uri)
    Path(uri, "m0.rank1.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"lacks the shard of mesh 'm0\.rank1'"):
        finish_checkpoint(uri, step=4, shards=["m0"], keep=1)
    assert not is_whole_checkpoint(uri)


def test_a_tensor_of_which_shards_lack_some_makes_no_checkpoint(tmp_path):
    uri = step_uri(str(tmp_path), "job", 4)
    state = {"parameters": {"w": WHOLE["w"][:6]}}
    save_shard(uri, step=4, shard="m0", state=state, held=HeldParts({"w": ShardSpec("w", 0, (12,), 0, 2)}))
    with pytest.raises(
        CheckpointError, match=r"lack 48 of 96 elements of parameters w: did all workers save"
    ):
        finish_checkpoint(uri, step=4, shards=["m0"], keep=1)
    assert complete_checkpoints(str(tmp_path), "job") == []


def test_a_checkpoint_of_format_1_is_still_read_with_the_groups_of_its_first_mesh(tmp_path):
    uri = step_uri(str(tmp_path), "job", 7)
    save_older(uri, {f"m{k}": shard(f"p{k}", 7 + k) for k in range(2)}, step=7, number=1)
    state, _ = load_checkpoint(uri)
    assert len(state["optimizer_groups"]) == 1 and set(state["parameters"]) == {"p0", "p1"}
    manifest = Path(uri, "manifest.json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 5}))
    with pytest.raises(CheckpointError, match="has format 5, this version reads 1, 2, 3, 4"):
        load_checkpoint(uri)


def test_only_a_folder_with_all_its_files_is_a_whole_checkpoint(base):
    uri = save(base, 3)
    assert is_whole_checkpoint(uri) and not is_whole_checkpoint(step_uri(base, "job", 4))
    files, folder = fsspec.core.url_to_fs(uri)
    files.rm(shard_path(folder, "m1"))
    assert not is_whole_checkpoint(uri)


@pytest.mark.parametrize("other", [2, 4])
def test_shards_of_another_step_than_the_checkpoints_are_refused_by_name(base, other):
    uri = step_uri(base, "job", 3)
    save_shard(uri, step=3, shard="m0", state=shard("p0"))
    save_shard(uri, step=other, shard="m1", state=shard("p1"))
    with pytest.raises(
        CheckpointError, match=f"shard 'm1' of .* is of step {other}, the checkpoint of step 3"
    ):
        finish_checkpoint(uri, step=3, shards=("m0", "m1"), keep=2)


def test_only_the_names_asked_for_are_kept(base):
    state, _ = load_checkpoint(save(base, 7), names={"p1"})
    assert set(state["parameters"]) == set(state["optimizer"]) == {"p1"}


def shards_read(uri, names, opened):
    """The files of the shards that are read for these names."""
    opened.clear()
    state, step = load_checkpoint(uri, names=names)
    grouped = {name for group in state["optimizer_groups"] for name in group.pop("params")}
    assert step == 7 and all(g == {"lr": 0.1, "betas": (0.9, 0.99)} for g in state["optimizer_groups"])
    assert grouped >= set(names or ["p0", "p1", "p2"]) & {"p0", "p1", "p2"}
    assert set(state.get("parameters", {})) == set(names or ["p0", "p1", "p2"]) & {"p0", "p1", "p2"}
    return sorted(set(opened))


def test_only_the_shards_that_hold_a_name_asked_for_are_opened(base, monkeypatch):
    uri = save(base, 7, meshes=("m0", "m1", "m2"))
    opened, read = [], blobs._read_range
    monkeypatch.setattr(
        blobs,
        "_read_range",
        lambda files, path, *span: opened.append(path.rsplit("/", 1)[1]) or read(files, path, *span),
    )
    assert shards_read(uri, {"p1"}, opened) == ["m1.distcp"]
    assert shards_read(uri, {"p2", "p0"}, opened) == ["m0.distcp", "m2.distcp"]
    assert shards_read(uri, {"other"}, opened) == ["m0.distcp"], (
        "what is the same in all shards is read from one"
    )
    assert shards_read(uri, None, opened) == ["m0.distcp", "m1.distcp", "m2.distcp"]


def test_of_an_older_checkpoint_only_the_shards_that_hold_a_name_are_opened(tmp_path, monkeypatch):
    uri = step_uri(str(tmp_path), "job", 7)
    save_older(uri, {f"m{k}": shard(f"p{k}", 7 + k) for k in range(3)}, step=7)
    opened, read = [], whole_shards._read_shard
    monkeypatch.setattr(
        whole_shards, "_read_shard", lambda *given: opened.append(f"{given[-1]}.pt") or read(*given)
    )
    assert shards_read(uri, {"p1"}, opened) == ["m1.pt"]
    assert shards_read(uri, {"p2", "p0"}, opened) == ["m0.pt", "m2.pt"]
    assert shards_read(uri, {"other"}, opened) == ["m0.pt"]
    manifest = Path(uri, "manifest.json")
    content = json.loads(manifest.read_text())
    del content["names"]  # as a still older version wrote it
    manifest.write_text(json.dumps(content))
    assert shards_read(uri, {"p1"}, opened) == ["m0.pt", "m1.pt", "m2.pt"]


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
    path = Path(uri, "m1.distcp")
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(DamagedCheckpointError, match=r"m1\.distcp has \d+ bytes, the manifest says \d+"):
        load_checkpoint(uri)
    path.write_bytes(b"x" * len(content))
    with pytest.raises(DamagedCheckpointError, match=r"m1\.distcp has the SHA-256 .* it is damaged"):
        load_checkpoint(uri)
    path.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"m1\.distcp is missing"):
        load_checkpoint(uri)


@pytest.mark.parametrize("name", ["tensors.json", ".metadata", "groups.distcp"])
def test_a_damaged_file_beside_the_shards_is_named(name, tmp_path):
    uri = save(str(tmp_path), 5)
    path = Path(uri, name)
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    (found,) = inspect_checkpoints(str(tmp_path), "job", sums=True)
    assert f"{name} has the SHA-256" in found.damage
    if name == "tensors.json":
        with pytest.raises(DamagedCheckpointError, match=r"tensors\.json has the SHA-256"):
            load_checkpoint(uri)
    path.unlink()
    assert not is_whole_checkpoint(uri)
    with pytest.raises(DamagedCheckpointError, match=re.escape(f"{name} is missing")):
        load_checkpoint(uri)


def test_a_damaged_shard_of_an_older_format_is_refused_by_name(tmp_path):
    uri = step_uri(str(tmp_path), "job", 5)
    save_older(uri, {f"m{k}": shard(f"p{k}", k) for k in range(2)}, step=5)
    path = Path(uri, "m1.pt")
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(DamagedCheckpointError, match=r"m1\.pt has \d+ bytes, the manifest says \d+"):
        load_checkpoint(uri)
    flipped = bytearray(content)
    flipped[content.index(torch.full((3,), 1.0).numpy().tobytes()) + 2] ^= 1
    path.write_bytes(bytes(flipped))
    with pytest.raises(DamagedCheckpointError, match=r"m1\.pt has the SHA-256 .* it is damaged"):
        load_checkpoint(uri)
    assert set(load_checkpoint(uri, names={"p0"})[0]["parameters"]) == {"p0"}, "the other shard is whole"
    path.write_bytes(b"x" * len(content))
    save_manifest_sizes(uri)
    with pytest.raises(DamagedCheckpointError, match=r"m1\.pt cannot be read"):
        load_checkpoint(uri)
    torch.save({"step": 5, "state": print}, path)  # what no state holds, and reading would run
    save_manifest_sizes(uri)
    with pytest.raises(DamagedCheckpointError, match=r"m1\.pt cannot be read"):
        load_checkpoint(uri)
    torch.save({"step": 4, "state": shard("p1")}, path)
    save_manifest_sizes(uri)
    with pytest.raises(
        DamagedCheckpointError, match=r"shard 'm1' of .* is of step 4, the manifest of step 5"
    ):
        load_checkpoint(uri)
    path.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"m1\.pt is missing"):
        load_checkpoint(uri)


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


def test_what_a_blob_holds_is_not_run(tmp_path):
    """Nor where its checksum is right."""
    path = str(tmp_path / "m0.distcp")
    files = fsspec.filesystem("file")
    with open(path, "wb") as file:
        writer = blobs.BlobWriter(file)
        writer.add(torch.ones(2))
        writer.add({"state": print})
    assert dict(blobs.read_blobs(files, path, writer.blobs, [0]))[0].tolist() == [1.0, 1.0]
    with pytest.raises(DamagedCheckpointError, match=r"m0\.distcp cannot be read"):
        list(blobs.read_blobs(files, path, writer.blobs, [0, 1]))


def test_a_bit_that_flipped_in_a_tensor_is_found_wherever_the_checkpoint_lies(base):
    uri = save(base, 5)
    files, folder = fsspec.core.url_to_fs(uri)
    content = bytearray(files.cat_file(f"{folder}/m1.distcp"))
    place = content.index(torch.full((3,), 6.0).numpy().tobytes())
    content[place + 2] ^= 1
    files.pipe_file(f"{folder}/m1.distcp", bytes(content))
    with pytest.raises(DamagedCheckpointError, match=r"m1\.distcp has the SHA-256 .* it is damaged"):
        load_checkpoint(uri)
    (found,) = inspect_checkpoints(base, "job", sums=True)
    assert "m1.distcp has the SHA-256" in found.damage
    assert set(load_checkpoint(uri, names={"p0"})[0]["parameters"]) == {"p0"}, "the other shard is whole"
    assert load_shard_values(uri, "m0")["lr_schedule"] is None
    with pytest.raises(CheckpointError, match="has no shard 'm9'"):
        load_shard_values(uri, "m9")


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
    assert moments >= 10, (
        "two shards, their index, DCP's metadata and the manifest are written and renamed, the old folder is removed"
    )
    assert len(complete_checkpoints(base, job)) == keep


def test_a_manifest_that_cannot_be_written_costs_no_older_checkpoint(base, monkeypatch):
    old = save(base, 1, keep=1)
    write = checkpoint_format.write_atomically

    def refuse(files, path, content, **options):
        if path.endswith("manifest.json"):
            raise OSError("quota exceeded")
        return write(files, path, content, **options)

    monkeypatch.setattr(checkpoint_format, "write_atomically", refuse)
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
    assert sorted(os.listdir(uri)) == ["m0.distcp", "m0.index.json"]
    finish_checkpoint(uri, step=1, shards=["m0"], keep=1)
    assert load_checkpoint(uri)[0]["parameters"]["p0"].tolist() == [1.0] * 3


def test_a_part_of_a_large_tensor_is_saved_alone(tmp_path):
    uri = step_uri(str(tmp_path), "job", 1)
    large = torch.zeros(1_000_000)
    save_shard(uri, step=1, shard="m0", state={"parameters": {"p": large[:10]}, "rest": large[:10]})
    assert os.path.getsize(os.path.join(uri, "m0.distcp")) < 10_000


def test_the_manifest_says_what_is_there_in_plain_json(tmp_path):
    uri = step_uri(str(tmp_path), "job", 3)
    save_shard(uri, step=3, shard="m0", state=shard("p0"))
    finish_checkpoint(uri, step=3, shards=["m0"], keep=1)
    manifest = json.loads(Path(uri, "manifest.json").read_text())
    assert manifest["step"] == 3
    assert manifest["shards"] == {"m0": os.path.getsize(os.path.join(uri, "m0.distcp"))}


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
                "optimizer_groups": [{**group, "params": names} for group in saved["param_groups"]],
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
