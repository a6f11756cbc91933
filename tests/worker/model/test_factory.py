"""Factories by import path: the model of a seed, and messages that name what is wrong."""

import functools
import importlib.util
import subprocess
import sys

import pytest
import torch
from torch import nn

from worker.contract.profile import FactoryError
from worker.model.factory import (
    MOVED_FACTORIES,
    build_model,
    call_factory,
    check_arguments,
    moved_factory_notes,
    resolve,
)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_random_state():
    args = {"layers": 2, "width": 16, "heads": 2}
    torch.manual_seed(99)
    expected = torch.rand(3)
    torch.manual_seed(99)
    first = build_model("worker.examples.gpt:build", args, seed=3)
    assert torch.equal(torch.rand(3), expected)
    second = build_model("worker.examples.gpt:build", args, seed=3)
    other = build_model("worker.examples.gpt:build", args, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)


def test_functions_and_classes_of_other_packages_resolve():
    assert resolve("torch.nn.functional:cross_entropy") is nn.functional.cross_entropy
    assert resolve("torch:optim.AdamW") is torch.optim.AdamW
    assert isinstance(call_factory("torch.nn:Linear", {"in_features": 2, "out_features": 3}), nn.Linear)


# Paths that job files and checkpoints of earlier versions may hold.
RELEASED = ("worker.model.gpt:build", "worker.model.unet:build", "worker.data.text:ByteWindows")
IMPORTS_SKLEARN = "worker.data.digits:NoisyDigits"


@pytest.mark.parametrize("old", [*RELEASED, pytest.param(IMPORTS_SKLEARN, marks=pytest.mark.slow)])
def test_a_factory_that_moved_is_found_at_its_old_path_and_the_user_reads_the_new_one(old):
    new = MOVED_FACTORIES[old]
    module, name = new.split(":")
    assert resolve(old) is getattr(importlib.import_module(module), name)
    assert importlib.util.find_spec(old.partition(":")[0]) is None, "nothing else stands at the old path"
    (note,) = moved_factory_notes([old, new, old])
    assert note == f"factory {old!r} has moved and is read as {new!r}: write that in the job"


def test_only_factories_that_moved_have_a_note():
    assert set(MOVED_FACTORIES) == {*RELEASED, IMPORTS_SKLEARN}
    assert moved_factory_notes(["torch.nn:Linear", *MOVED_FACTORIES.values()]) == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("worker.examples.gpt", "is no import path: write it as 'package.module:attribute'"),
        ("worker.nothing:build", r"no module 'worker\.nothing'.*code\.working_dir"),
        ("surely_missing_package.models:build", "no module 'surely_missing_package'"),
        ("worker.examples.gpt:biuld", r"module worker\.examples\.gpt has no 'biuld'; it has .*build"),
        ("worker.examples.gpt:biuld", r"did you mean build\?"),
        ("worker.exemples.gpt:build", r"no module 'worker\.exemples' \(did you mean examples\?\)"),
        ("torch:float32", "is a dtype, which cannot be called"),
        ("builtins:dict", "returned dict, not a torch.nn.Module"),
    ],
)
def test_a_bad_path_is_refused_with_its_reason(path, message):
    with pytest.raises(FactoryError, match=message):
        build_model(path, {})


def test_what_a_factory_or_its_module_raises_is_named(tmp_path, monkeypatch):
    (tmp_path / "users_code.py").write_text("def build(width):\n    raise KeyError('no such width')\n")
    (tmp_path / "users_other_code.py").write_text("import surely_missing_dependency\n")
    (tmp_path / "users_broken_code.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(FactoryError, match=r"users_code:build'\(width=3\) raised KeyError: 'no such width'"):
        build_model("users_code:build", {"width": 3})
    with pytest.raises(FactoryError, match=r"raised TypeError: .*unexpected keyword argument 'depth'"):
        build_model("users_code:build", {"depth": 3})
    with pytest.raises(FactoryError, match=r"importing users_other_code failed: .*surely_missing_dependency"):
        build_model("users_other_code:build")
    with pytest.raises(FactoryError, match="importing users_broken_code failed: ZeroDivisionError"):
        build_model("users_broken_code:build")


def test_the_light_modules_do_not_load_torch():
    code = (
        "import sys, worker.contract.profile, worker.model.factory, service.scheduler.job.partition\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def positional(output, target, *, weight=None):
    pass


def needs(width, depth=1):
    pass


@functools.wraps(needs)
def gives_the_width(*args, **settings):
    return needs(3, **settings)


class Takes:
    def __init__(self, side, classes=2):
        pass


@pytest.mark.parametrize(
    ("target", "args", "first", "message"),
    [
        (
            needs,
            {"widht": 3},
            (),
            r"f has no argument 'widht' \(did you mean width\?\) and needs width, which is not given",
        ),
        (needs, {"width": 3, "zzz": 1}, (), r"has no argument 'zzz'; it takes width, depth"),
        (Takes, {"classes": 3}, (), "needs side, which is not given; it takes side, classes"),
        (
            positional,
            {"wieght": 1},
            ("output", "target"),
            r"'wieght' \(did you mean weight\?\); it takes output, target",
        ),
        (needs, {}, ("a", "b", "c"), "cannot be called with a, b, c"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_without_a_call(target, args, first, message):
    with pytest.raises(FactoryError, match=message):
        check_arguments("f", target, args, first)


@pytest.mark.parametrize(
    ("target", "args", "first"),
    [
        (needs, {"width": 1}, ()),
        (Takes, {"side": 1}, ()),
        (positional, {"weight": None}, ("output", "target")),
        (torch.optim.AdamW, {"lr": 1.0}, ("parameters",)),
        (gives_the_width, {"depth": 2}, ()),  # shows the signature of needs, and gives the width itself
        (dict, {"anything": 1}, ()),  # has no signature
    ],
)
def test_arguments_that_fit_or_cannot_be_told_pass(target, args, first):
    check_arguments("f", target, args, first)


@pytest.mark.slow
def test_a_model_of_transformers_is_built_from_its_configuration_alone(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    for place in (tmp_path, tmp_path / "config.json"):
        model = build_model("worker.model.factory:transformers_model", {"config": str(place)})
        assert isinstance(model, transformers.GPT2LMHeadModel) and model.config.n_embd == 8
    config.architectures = None
    config.save_pretrained(tmp_path)
    with pytest.raises(FactoryError, match=r"names no architecture: name the class, as model: \{hf: \{class"):
        build_model("worker.model.factory:transformers_model", {"config": str(tmp_path)})
    nested = {
        "factory": "transformers:GPT2LMHeadModel.config_class",
        "args": {"n_layer": 2, "n_embd": 8, "n_head": 2},
    }
    assert len(build_model("transformers:GPT2LMHeadModel", {"config": nested}).transformer.h) == 2
