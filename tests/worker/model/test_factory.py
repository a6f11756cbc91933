"""Factories by import path: the model of a seed, and messages that name what is wrong."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from worker.contract.profile import FactoryError
from worker.model.factory import build_model, call_factory, resolve


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


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("worker.examples.gpt", "is no import path: write it as 'package.module:attribute'"),
        ("worker.nothing:build", r"no module 'worker\.nothing'.*code\.working_dir"),
        ("surely_missing_package.models:build", "no module 'surely_missing_package'"),
        ("worker.examples.gpt:biuld", r"module worker\.examples\.gpt has no 'biuld'; it has .*build"),
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
