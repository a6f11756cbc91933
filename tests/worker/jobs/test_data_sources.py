"""Jobs on every kind of data train as a plain loop over torch's own DataLoader does, and go on at the exact sample."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import ChainDataset, DataLoader

from service.spec.job import JobSpec
from tests.reference import accumulate
from tests.worker import stream_data
from tests.worker.actor.test_actor import job
from tests.worker.workers import Workers
from worker.actor.batch_feed import Batches
from worker.checkpoint import format as checkpoint_format
from worker.contract.failures import AttemptFailure
from worker.contract.job import Job
from worker.contract.reasons import Reason
from worker.data.sampler import BatchSampler
from worker.model.factory import build_model

README = (Path(__file__).parents[3] / "worker" / "data" / "README.md").read_text()
LENGTH = 19
"""Samples of the streams: the batch of 8 divides neither one epoch nor two."""


def spec(data: dict[str, Any], stages: int = 1, workers: int = 1) -> dict[str, Any]:
    return job(stages=stages, meshes=stages, workers_per_mesh=workers, data=data)


def plain_losses(made: dict[str, Any], batches: Any) -> list[float]:
    """Losses of a plain loop over whole batches of (inputs, targets), in the job's microbatches."""
    training = made["training"]
    model = build_model(made["model"]["factory"], made["model"]["args"], seed=training["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), **made["optimizer"]["args"])
    found = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        parts = zip(*(one.chunk(training["microbatches"]) for one in (inputs, targets)), strict=True)
        losses = accumulate(model, [((x,), y) for x, y in parts], torch.nn.functional.cross_entropy)
        torch.nn.utils.clip_grad_norm_(model.parameters(), training["clip_grad_norm"])
        optimizer.step()
        found.append(sum(losses) / len(losses))
    return found


def in_two(first: dict[str, Any], last: dict[str, Any], uri: str) -> list[float]:
    """Losses of steps 1 to 3 of one job, and of 4 to 6 of another that goes on from its checkpoint."""
    with Workers(first) as run:
        found = run.losses(range(1, 4))
        run.call(lambda w: w.save(uri, 3))
        checkpoint_format.finish_checkpoint(uri, step=3, shards=sorted({w.mesh for w in run.workers}), keep=1)
    with Workers(last) as run:
        run.call(lambda w: w.restore(uri))
        run.call(lambda w: w.warm_up(4))
        return found + run.losses(range(4, 7))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "before", "after"),
    [("Tokens", (2, 1), (1, 2)), ("Stateful", (2, 2), (2, 1)), ("generated", (1, 1), (2, 2))],
)
def test_a_stream_trains_as_a_plain_loop_over_torchs_loader_and_goes_on_in_another_layout(
    factory, before, after, tmp_path
):
    """(stages, workers of each mesh); 48 samples are two epochs and a half."""
    data = {"factory": f"stream_data:{factory}", "args": {"length": LENGTH}}
    whole = DataLoader(ChainDataset([stream_data.Tokens(LENGTH) for _ in range(3)]), batch_size=8)
    expected = plain_losses(spec(data), [batch for _, batch in zip(range(6), whole, strict=False)])
    uri = checkpoint_format.step_uri(str(tmp_path), "job", 3)
    assert in_two(spec(data, *before), spec(data, *after), uri) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_stream_that_is_interrupted_goes_on_to_the_bit(tmp_path):
    data = {"factory": "stream_data:Masked", "args": {"length": LENGTH}}
    with Workers(spec(data, 2)) as run:
        whole = run.losses(range(1, 7))
    assert in_two(spec(data, 2), spec(data, 2), checkpoint_format.step_uri(str(tmp_path), "job", 3)) == whole


@pytest.mark.slow
def test_a_data_set_with_indices_trains_as_torchs_loader_deals_it_and_each_epoch_has_each_sample_once():
    """Five steps of 8 are two epochs of 20: independent of the sampler's code, each sample is there twice."""
    length, steps = 20, 5
    data = {"factory": "stream_data:HostileByIndex", "args": {"length": length, "at": -1, "what": "nothing"}}
    sampler = BatchSampler(length, 8, 1, seed=5)
    order = [sampler.indices(step, 0) for step in range(1, steps + 1)]
    dealt = [index for batch in order for index in batch]
    assert (
        sorted(dealt[:length]) == sorted(dealt[length:]) == list(range(length)) and dealt[:20] != dealt[20:]
    )
    batches = DataLoader(stream_data.HostileByIndex(length, -1, "nothing"), batch_sampler=order)
    with Workers(spec(data, 2, 2)) as run:
        assert run.losses(range(1, steps + 1)) == pytest.approx(plain_losses(spec(data), batches), rel=1e-5)


def test_without_shuffling_samples_come_in_their_order():
    data = {"factory": "stream_data:HostileByIndex", "args": {"length": 9, "at": -1, "what": "nothing"}}
    one = made_batches({**data, "shuffle": False})
    expected = [stream_data.tokens_of(n % 9)[0] for n in range(16)]
    assert torch.equal(torch.cat(read(one, 2)), torch.stack(expected))


def made_batches(data: dict[str, Any], worker: int = 0, workers: int = 1, **training: Any) -> Batches:
    made = spec(data)
    made["training"].update(training)
    stored = JobSpec.model_validate({**made, "pipeline": {}, "resources": {}}).model_dump(mode="json")
    return Batches(Job.from_json(stored), worker=worker, workers_per_mesh=workers, microbatches=2)


def read(batches: Batches, steps: int) -> list[torch.Tensor]:
    """The first inputs of all microbatches of the first steps."""
    return [batches.microbatch(step, m)[0][0] for step in range(1, steps + 1) for m in range(2)]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """What the README's examples name, in the folder that is the current one."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    rows = [stream_data.tokens_of(n) for n in range(30)]
    columns = {
        "ids": [x.tolist() for x, _ in rows],
        "label": [n % 2 for n in range(30)],
        "text": ["no tensor"] * 30,
    }
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(columns)}).save_to_disk("reviews")
    np.arange(2000, dtype=np.uint16).tofile("tokens.bin")
    return columns


def examples() -> dict[str, str]:
    """The rows of the README's table of data: what, and its `data:`."""
    found = re.findall(r"^\| ([^|]+?) \| `data: (\{.*\})` \|", README, re.MULTILINE)
    assert len(found) >= 5
    return dict(found)


@pytest.mark.parametrize("what", examples())
def test_each_example_of_the_readme_is_taken_and_read_as_torchs_own_loader_reads_it(what, files, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mine", stream_data)
    data = yaml.safe_load(examples()[what])
    loader = data.pop("loader", None)
    assert loader is None or JobSpec.model_validate({**spec({**data, "loader": loader}), "pipeline": {}})
    one = made_batches(data)
    if one._dataset is None:
        whole = DataLoader(stream_data.Tokens(**data["args"]), batch_size=4)
        expected = [inputs for (inputs, _), _ in zip(whole, range(4), strict=False)]
    else:
        order = BatchSampler(len(one._dataset), 8, 2, seed=5)
        keys = [order.indices(step, m) for step in (1, 2) for m in (0, 1)]
        if "datasets:" in data["factory"]:
            expected = [torch.tensor([files["ids"][i] for i in batch]) for batch in keys]
        else:
            whole = DataLoader(one._dataset, batch_sampler=keys)
            expected = [next(iter(b.values())) if isinstance(b, dict) else b[0] for b in whole]
    assert all(torch.equal(x, y) for x, y in zip(read(one, 2), expected, strict=True))


@pytest.mark.slow
def test_a_data_set_of_hugging_face_on_disk_trains_through_stages(files):
    data = {
        "factory": "datasets:load_from_disk",
        "args": {"dataset_path": "reviews"},
        "split": "train",
        "columns": {"tokens": "ids", "labels": "ids"},
    }
    order = BatchSampler(30, 8, 1, seed=5)
    rows = [torch.tensor([files["ids"][i] for i in order.indices(step, 0)]) for step in (1, 2)]
    expected = plain_losses(spec(data), [(x, x) for x in rows])
    with Workers(spec(data, 2)) as run:
        assert run.losses(range(1, 3)) == pytest.approx(expected, rel=1e-5)


HF = {"factory": "datasets:load_from_disk", "args": {"dataset_path": "reviews"}}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, "returned DatasetDict of train: name one with data.split"),
        ({"split": "test"}, "has no split 'test': it has train"),
        ({"split": "train"}, "input text of a sample is no tensor"),
        (
            {"split": "train", "columns": ["ids", "mask"]},
            "has no column mask, which data.columns names; it has ids",
        ),
    ],
)
def test_what_is_wrong_with_a_data_set_on_disk_is_told_with_what_there_is(files, more, says):
    with pytest.raises(AttemptFailure, match=says) as told:
        made_batches({**HF, **more})
    assert told.value.reason is Reason.DATA_FAILED


@pytest.mark.parametrize(
    "collate", [{"factory": "stream_data:masking", "args": {"share": 0.5}}, "stream_data:LastRow"]
)
def test_a_collator_sees_the_whole_microbatch_however_many_workers_share_it(collate):
    collate = collate if isinstance(collate, dict) else {"factory": collate}
    data = {"factory": "stream_data:Tokens", "args": {"length": LENGTH}, "collate": collate}
    whole = read(made_batches(data), 3)
    parts = [read(made_batches(data, worker, 2), 3) for worker in range(2)]
    assert all(torch.equal(x, torch.cat(y)) for x, y in zip(whole, zip(*parts, strict=True), strict=True))
    assert len({tuple(x.flatten().tolist()) for x in whole}) == 6


def test_a_collator_of_transformers_makes_the_batch(files):
    pytest.importorskip("transformers")
    collate = {"factory": "transformers:default_data_collator"}
    more = {"split": "train", "columns": {"input_ids": "ids", "label": "label"}, "collate": collate}
    one = made_batches({**HF, **more})
    (ids,), labels = one.microbatch(1, 0)
    chosen = BatchSampler(30, 8, 2, seed=5).indices(1, 0)
    assert one.keywords == ("input_ids",) and labels.tolist() == [n % 2 for n in chosen]
    assert ids.tolist() == [files["ids"][n] for n in chosen]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {"factory": "stream_data:loader", "args": {"length": 9}},
            "returned a DataLoader: return its data set",
        ),
        ({"factory": "stream_data:Tokens", "args": {"length": 0}}, "stream_data:Tokens is empty"),
        (
            {"factory": "stream_data:Tokens", "args": {"length": 9}, "columns": ["a"]},
            "columns takes fields of dicts",
        ),
        (
            {"factory": "stream_data:Pairs", "args": {"length": 9}, "columns": ["row", "label"]},
            "has no field 'label', which data.columns names; it has row, next, text",
        ),
        (
            {
                "factory": "stream_data:Tokens",
                "args": {"length": 9},
                "collate": {"factory": "stream_data:one_number"},
            },
            r"data.collate stream_data:one_number returned \[\] as 0 for 4 samples",
        ),
    ],
)
def test_data_that_cannot_be_read_is_refused_before_anything_is_measured(data, says):
    with pytest.raises(AttemptFailure, match=says) as told:
        made_batches(data)
    assert told.value.reason is Reason.DATA_FAILED


@pytest.mark.parametrize("kind", ["Hostile", "HostileByIndex"])
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("raises", r"sample 13 of data stream_data:\w+ .*raised OSError: the disk is gone"),
        ("longer", "samples of data 'stream_data:.*' cannot be stacked .*cut or pad all to one shape"),
        (
            "floats",
            r"is \[4, 8\] of torch.float32 in step 2, microbatch \d, and \[4, 8\] of torch.int64 in the first",
        ),
    ],
)
def test_what_goes_wrong_at_a_sample_is_told_with_it(kind, what, says):
    data = {
        "factory": f"stream_data:{kind}",
        "args": {"length": 16, "at": 13, "what": what},
        "shuffle": False,
    }
    one = made_batches(data)
    with pytest.raises(AttemptFailure, match=says) as told:
        read(one, 2)
    assert told.value.reason is Reason.DATA_FAILED


def test_a_shape_that_changes_for_a_whole_microbatch_is_refused_against_the_traced_one():
    data = {"factory": "stream_data:Hostile", "args": {"length": 16, "at": 5, "what": "longer"}}
    one = made_batches(data, global_batch=2)
    with pytest.raises(
        AttemptFailure, match=r"is \[1, 9\] of torch.int64 in step 3, microbatch 1, and \[1, 8\]"
    ):
        read(one, 3)


def test_a_data_set_of_another_length_than_the_checkpoints_is_refused():
    data = {"factory": "stream_data:HostileByIndex", "args": {"length": 20, "at": -1, "what": "nothing"}}
    position = made_batches(data).position(4)
    made_batches(data).go_to(4, position)
    data["args"]["length"] = 19
    with pytest.raises(
        AttemptFailure, match="has 19 samples, and had 20 when the checkpoint was saved"
    ) as told:
        made_batches(data).go_to(4, position)
    assert told.value.reason is Reason.DATA_FAILED


@pytest.mark.parametrize("kind", ["Tokens", "HostileByIndex"])
def test_data_that_stops_ends_behind_its_last_whole_batch(kind):
    more = {} if kind == "Tokens" else {"at": -1, "what": "nothing"}
    data = {"factory": f"stream_data:{kind}", "args": {"length": LENGTH, **more}, "at_end": "stop"}
    one = made_batches(data)
    assert len(read(one, 2)) == 4
    with pytest.raises(AttemptFailure, match="ended"):
        read(one, 3)
