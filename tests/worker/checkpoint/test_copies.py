"""Copies of a state at keepers: read as the checkpoint of the same state, on any layout; fenced, and not for ever."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.polling import until
from tests.worker.local_keepers import LocalKeepers
from worker.checkpoint import copies
from worker.checkpoint import format as checkpoint_format
from worker.checkpoint.chunked import HeldParts
from worker.checkpoint.copies import (
    CopyKeeper,
    CopyKey,
    PackedTensor,
    ShardUpload,
    StaleAttemptWriteError,
    copy_record,
    indexed_copy,
    pack_value,
    unpack_value,
)
from worker.contract.checkpoint_files import CheckpointError, DamagedCheckpointError
from worker.parallel.shard_spec import ShardSpec

KEY = CopyKey(7, 1)
URI = KEY.uri("job")


@pytest.fixture
def keepers(monkeypatch):
    found = LocalKeepers(monkeypatch)
    found.add("a", "b")
    return found


def state(rank=None):
    """Parameters of several types, of which `rank` of two has a half of the rows of one, and what is not by name."""
    draw = torch.Generator().manual_seed(3)
    whole = torch.randn(6, 4, generator=draw)
    rows = slice(None) if rank is None else slice(3 * rank, 3 * rank + 3)
    own = {"split": whole[rows]}
    optimizer = {"split": {"exp_avg": (whole * 2)[rows], "step": torch.tensor(7.0)}}
    if rank == 1:
        return {"parameters": own, "optimizer": {"split": {"exp_avg": (whole * 2)[rows]}}}
    own |= {"half": torch.randn(3, generator=draw).to(torch.bfloat16), "none": torch.empty(0, 2)}
    return {
        "parameters": own,
        "buffers": {"mask": torch.tensor([True, False]), "count": torch.tensor(5)},
        "optimizer": optimizer,
        "optimizer_groups": [{"params": ["split"], "lr": 0.1}],
        "generators": {"cpu": torch.arange(9, dtype=torch.uint8)},
    }


def held(rank):
    return HeldParts({"split": ShardSpec("split", 0, (6,), rank, 2)})


def copied(keepers, key=KEY, nodes=("a", "b"), notes=None, alone=False):
    """A complete copy of both ranks, each at the keepers of all nodes, or of one `alone`."""
    descriptions = {}
    for rank, node in enumerate(nodes):
        shard = checkpoint_format.rank_shard("m0", rank)
        handles = [keepers.handles[one] for one in ([node] if alone else nodes)]
        beside = ["m0.rank1"] if rank == 0 else []
        descriptions[shard] = ShardUpload(handles, key, shard).write(state(rank), held(rank), beside)
    for node in nodes:
        keepers.keepers[node].complete(key, copy_record(descriptions, notes or {}))


def make_readable(keepers, key=KEY):
    """Have files made of a copy, as the next attempt does."""
    records, blobs = [], {}
    for keeper in keepers.keepers.values():
        records.append(keeper.begin_attempt(key.attempt)[key])
        blobs |= keeper.write_files(key)
    for keeper in keepers.keepers.values():
        keeper.put(key.attempt, key, indexed_copy(key.uri("job"), key, records[0], blobs))


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


def test_a_copy_is_read_as_the_checkpoint_of_the_same_state_whatever_wrote_it(keepers, tmp_path):
    copied(keepers, notes={"undelivered": {"steps": [1]}})
    make_readable(keepers)
    on_disk = checkpoint_format.step_uri(str(tmp_path), "job", 7)
    checkpoint_format.save_shard(on_disk, step=7, shard="m0", state=state())
    checkpoint_format.finish_checkpoint(on_disk, step=7, shards=["m0"], keep=1)
    found, step = checkpoint_format.load_checkpoint(URI)
    assert step == 7 and same(found, checkpoint_format.load_checkpoint(on_disk)[0])
    assert same(found["parameters"], state()["parameters"]) and found["generators"]
    assert checkpoint_format.checkpoint_notes(URI) == {"undelivered": {"steps": [1]}}
    for rank in range(2):  # and by ranks that split it as it was split
        parts = checkpoint_format.load_parts(URI, {"split"}, held(rank)).state
        assert torch.equal(
            parts["optimizer"]["split"]["exp_avg"], state(rank)["optimizer"]["split"]["exp_avg"]
        )
    columns = HeldParts({"split": ShardSpec("split", 1, (4,), 1, 2)})  # and by ranks that split it otherwise
    parts = checkpoint_format.load_parts(URI, {"split"}, columns).state
    assert torch.equal(parts["parameters"]["split"], state()["parameters"]["split"][:, 2:])


def test_each_part_is_at_two_keepers_and_one_of_them_is_enough(keepers, monkeypatch):
    monkeypatch.setattr(copies, "BLOB_BYTES", 100)  # in many parts
    copied(keepers)
    assert keepers.called.count("add") > 4
    make_readable(keepers)
    whole = checkpoint_format.load_checkpoint(URI)[0]
    sizes = [keeper.sizes() for keeper in keepers.keepers.values()]
    assert sizes[0] == sizes[1] and {"m0.distcp", "m0.rank1.distcp"} < sizes[0][KEY].keys()
    for lost in ("a", "b"):
        kept, keepers.keepers = keepers.keepers, {n: k for n, k in keepers.keepers.items() if n != lost}
        assert checkpoint_format.is_whole_checkpoint(URI)
        assert same(checkpoint_format.load_checkpoint(URI)[0], whole)
        keepers.keepers = kept
    keepers.keepers = {}
    assert not checkpoint_format.is_whole_checkpoint(URI)


def test_without_a_second_keeper_a_lost_one_takes_a_part_along(keepers):
    copied(keepers, alone=True)
    del keepers.keepers["b"]
    with pytest.raises(
        CheckpointError, match=r"^m0\.rank1 of .*step-0000000007 is held by no keeper any more"
    ):
        make_readable(keepers)
    assert not checkpoint_format.is_whole_checkpoint(URI)


def test_a_keeper_that_is_lost_while_its_copy_is_read_is_a_damage(keepers):
    copied(keepers, alone=True)
    make_readable(keepers)
    assert checkpoint_format.is_whole_checkpoint(URI)
    del keepers.keepers["b"]
    with pytest.raises(DamagedCheckpointError, match=r"m0\.rank1.* is missing"):
        checkpoint_format.load_checkpoint(URI)


def test_one_bit_that_changed_in_memory_is_found_before_files_are_made_and_behind_that(keepers):
    copied(keepers)
    tensor = next(
        v for v in keepers.keepers["a"]._copies[KEY].shards["m0"].values if isinstance(v, PackedTensor)
    )
    tensor.content[3] ^= 1
    keepers.keepers["b"]._copies[KEY].shards.clear()
    with pytest.raises(CheckpointError, match=r"m0.* is damaged"):
        make_readable(keepers)
    copied(keepers)
    make_readable(keepers)
    for keeper in keepers.keepers.values():
        keeper._copies[KEY].files["m0.distcp"].getbuffer()[700] ^= 1
    with pytest.raises(DamagedCheckpointError, match=r"m0\.distcp"):
        checkpoint_format.load_checkpoint(URI)


def test_a_late_writer_of_an_earlier_attempt_changes_nothing(keepers):
    late = ShardUpload([keepers.handles["a"], keepers.handles["b"]], CopyKey(9, 1), "m0")
    newer = CopyKey(8, 2)
    for keeper in keepers.keepers.values():
        keeper.begin_attempt(2)
    copied(keepers, newer)
    before = [keeper.held() for keeper in keepers.keepers.values()]
    with pytest.raises(StaleAttemptWriteError, match=r"attempt 1 of job job writes a copy, and attempt 2"):
        late.write(state(0), held(0), [])
    for keeper in keepers.keepers.values():
        for call in (
            lambda keeper=keeper: keeper.complete(CopyKey(9, 1), b"{}"),
            lambda keeper=keeper: keeper.keep_only(1, None),
            lambda keeper=keeper: keeper.put(1, newer, {"manifest.json": b"{}"}),
            lambda keeper=keeper: keeper.begin_attempt(1),
        ):
            with pytest.raises(StaleAttemptWriteError):
                call()
    assert [keeper.held() for keeper in keepers.keepers.values()] == before and before[0].keys() == {newer}
    make_readable(keepers, newer)
    assert same(checkpoint_format.load_checkpoint(newer.uri("job"))[0]["parameters"], state()["parameters"])


def test_a_shard_that_lacks_values_is_refused(keepers):
    keeper = keepers.keepers["a"]
    keeper.add(KEY, "m0", 0, [1, 2])
    with pytest.raises(ValueError, match=r"'m0' has 2 values, and number 3 was to follow"):
        keeper.add(KEY, "m0", 3, [4])
    with pytest.raises(FileNotFoundError):
        keeper.read(KEY, "m0.distcp", 0, 1)


def test_a_keeper_ends_when_no_driver_is_heard_and_not_before():
    ended = threading.Event()
    keeper = CopyKeeper("job", 0.5, end=ended.set)
    for _ in range(10):
        assert not ended.wait(0.1)
        keeper.renew()
    until(ended.is_set, lambda: "it lives", every_s=0.05)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3.5),
        torch.randn(3, 4).T,
        torch.zeros(0, 3),
        torch.ones(5, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.tensor([True]),
        {"step": 3},
    ],
)
def test_values_arrive_at_a_keeper_as_they_are(value):
    assert same(unpack_value(pack_value(value)), value)
