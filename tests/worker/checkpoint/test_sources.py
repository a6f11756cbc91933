"""`model.weights`: a job starts from files, each stage reads its own, and training is that of a plain loop from there."""

from __future__ import annotations

import json
import pickle
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.tiers import some_by_day
from worker.checkpoint import sources
from worker.checkpoint.record import make_record
from worker.checkpoint.sources import check_weights, fill_model, fill_stages
from worker.contract.profile import ModelError
from worker.examples.gpt import build
from worker.model.export import trace
from worker.model.serialization import deserialize_model, serialize_model

FORMS = ["file", "folder", "index", "sharded folder", "torch", "torch in a checkpoint", "old torch"]


def gpt(seed, **changes):
    torch.manual_seed(seed)
    return build(3, 16, 2, vocab=16, length=8, **{"tied": True, **changes})


def written(folder, form, state):
    """Weights in one of the forms that are read; the path to give."""
    state = {name: t.clone() for name, t in state.items()}
    if form in ("file", "folder"):
        save_file(state, folder / "model.safetensors")
        return str(folder / "model.safetensors" if form == "file" else folder)
    if form in ("index", "sharded folder"):
        names = list(state)
        places = {name: f"part-{index % 3}.safetensors" for index, name in enumerate(names)}
        for place in set(places.values()):
            save_file({name: state[name] for name in names if places[name] == place}, folder / place)
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": places}))
        return str(index if form == "index" else folder)
    content = {"state_dict": state, "epoch": 3} if form == "torch in a checkpoint" else state
    torch.save(content, folder / "model.pt", _use_new_zipfile_serialization=form != "old torch")
    return str(folder / "model.pt")


@contextmanager
def names_read(monkeypatch):
    """The names of the tensors that are read in the body."""
    names = []

    def counted(read):
        return lambda self, name: names.append(name) or read(self, name)

    with monkeypatch.context() as patch:
        for kind in (sources._SafetensorsFiles, sources._TorchFile):
            patch.setattr(kind, "read", counted(kind.read))
        yield names


@some_by_day("form", FORMS, by_day=1)
def test_stages_of_another_worker_read_what_they_hold_and_nothing_else(form, tmp_path, monkeypatch):
    saved, model = gpt(1), gpt(2)
    path = written(tmp_path, form, saved.state_dict())
    check_weights(path, make_record(model))
    sample = (torch.randint(0, 16, (2, 8)),)
    begins = ["embed", "blocks.1", "blocks.2"]
    for stage in range(3):
        taken = deserialize_model(
            serialize_model(trace(model, sample))
        )  # its parameters have shapes only, as on a worker that did not build
        graph = taken.cut(begins, keep=[stage])
        with names_read(monkeypatch) as read:
            fill_stages(path, [graph.stages[stage]], taken.aliases)
        module = graph.stages[stage]
        own = {name: module.get_parameter(local) for local, name in module.original_names.items()}
        assert own and all(torch.equal(t, saved.state_dict()[name]) for name, t in own.items())
        both = {"embed.token.weight", "head.weight"}
        assert {*read} - both == own.keys() - both and len(read) < len(saved.state_dict())


def without(state, *names):
    return {name: value for name, value in state.items() if name not in names}


@pytest.mark.parametrize("left_out", ["embed.token.weight", "head.weight"])
def test_a_tied_weight_may_be_there_under_either_name_as_from_pretrained_has_it(left_out, tmp_path):
    saved, model = gpt(1), gpt(2)
    path = written(tmp_path, "file", without(saved.state_dict(), left_out))
    fill_model(path, model, make_record(model))
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in model.state_dict().items())


def test_two_values_for_a_tied_weight_are_refused(tmp_path):
    model = gpt(2)
    state = {**gpt(1).state_dict(), "head.weight": torch.zeros(16, 16)}
    with pytest.raises(
        ModelError, match=r"different values for 'embed\.token\.weight' and 'head\.weight', which are one"
    ):
        fill_model(written(tmp_path, "file", state), model, make_record(model))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda s: without(s, "norm.bias", "embed.position.weight"),
            r"missing: embed\.position\.weight, norm\.bias\.",
        ),
        (
            lambda s: without(s, "embed.token.weight", "head.weight"),
            r"missing: embed\.token\.weight or head\.weight",
        ),
        (
            lambda s: s | {"lm.bias": torch.zeros(2)},
            r"unexpected: lm\.bias\..*load_state_dict\(strict=False\)",
        ),
        (
            lambda s: s | {"norm.bias": torch.zeros(3)},
            r"of another shape: norm\.bias \[3\] \(the model's is \[16\]\)",
        ),
        (
            lambda s: s | {"norm.bias": torch.zeros(16).int()},
            r"of another kind of number: norm\.bias \(the model's is",
        ),
        (
            lambda s: {f"model.{n}": t for n, t in s.items()},
            "The names in the file begin with 'model.', the model's do not",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_its_names_and_the_way_out(change, told, tmp_path):
    path = written(tmp_path, "file", change(gpt(1).state_dict()))
    with pytest.raises(ModelError, match=told) as caught:
        check_weights(path, make_record(gpt(2)))
    assert path in str(caught.value) and "model.factory" in str(caught.value)


def test_halves_are_taken_into_a_whole_model_as_load_state_dict_does(tmp_path):
    half = {name: value.to(torch.bfloat16) for name, value in gpt(1).state_dict().items()}
    found, expected = gpt(2), gpt(3)
    fill_model(written(tmp_path, "file", half), found, make_record(found))
    expected.load_state_dict(half)
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in found.state_dict().items())


def test_buffers_are_read_too(tmp_path):
    def normed(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    saved, model = normed(1), normed(2)
    saved(torch.randn(8, 4))
    path = written(tmp_path, "file", saved.state_dict())
    sample = (torch.randn(8, 4),)
    traced = trace(model, sample)
    stage = traced.cut([traced.layers[0]]).stages[0]
    fill_stages(path, [stage], traced.aliases)
    found = {
        name: stage.get_buffer(local) for local, name in stage.original_names.items() if "running" in name
    }
    assert len(found) == 2 and all(torch.equal(t, saved.state_dict()[name]) for name, t in found.items())


class Harmful:
    def __reduce__(self):
        return print, ("this ran",)


def test_files_that_hold_no_weights_are_named_and_nothing_in_them_is_run(tmp_path, capsys):
    def refused(path, told):
        with pytest.raises(ModelError, match=told), sources.open_weights(str(path)):
            pass

    refused(tmp_path / "none.safetensors", r"none\.safetensors' is not there")
    refused(tmp_path, "holds no weights")
    (tmp_path / "notes.txt").write_text("hello")
    refused(tmp_path / "notes.txt", r"notes\.txt' has an ending that says nothing")
    (tmp_path / "bad.safetensors").write_bytes(b"not at all")
    refused(tmp_path / "bad.safetensors", r"bad\.safetensors cannot be read as safetensors")
    torch.save({"state_dict": Harmful()}, tmp_path / "harm.pt")
    refused(tmp_path / "harm.pt", r"harm\.pt holds more than tensors, which is not run")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps([1, 2]))
    refused(tmp_path / "plain.pt", r"plain\.pt")
    (tmp_path / "short.pt").write_bytes(b"PK\x03\x04 cut")
    refused(tmp_path / "short.pt", r"short\.pt cannot be read as a torch checkpoint")
    torch.save({"model": {"a": torch.ones(1)}, "state_dict": {"a": torch.ones(1)}}, tmp_path / "two.pt")
    refused(tmp_path / "two.pt", "has one in 'state_dict' and in 'model' of")
    assert "this ran" not in capsys.readouterr().out
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    refused(index, r"names files that are not beside it: gone\.safetensors")
    index.write_text("{}")
    refused(index, r"m\.safetensors\.index\.json is no index")
    more = tmp_path / "two"
    more.mkdir()
    for name in ("a", "b"):
        save_file({"a": torch.ones(1)}, more / f"{name}.safetensors")
    refused(more, r"holds 2 of a kind \(a\.safetensors, b\.safetensors\): name one")
    assert load_file(more / "a.safetensors")
