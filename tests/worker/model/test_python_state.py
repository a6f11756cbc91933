"""The fingerprint of Python state: what it reaches, what it calls it, what moved, and what is put back."""

import collections
import importlib
import itertools
import random
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn

from tests.worker.model import stateful_models as stateful
from worker.model.side_effects import python_state
from worker.model.side_effects.python_state import PythonState


class Holder(nn.Module):
    """Holds `value` as `kept`."""

    def __init__(self, value):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.kept = value


def changed(value, change):
    """The paths that move with `change`, and those that still differ once the state is put back."""
    model = Holder(value)
    before = PythonState(model)
    change(model.inner.kept)
    paths = [one.path for one in before.moved_until(PythonState(model))]
    before.restore()
    return paths, [one.path for one in before.moved_until(PythonState(model))]


def advance(iterator):
    next(iterator)


def put(key, value):
    return lambda holder: holder.__setitem__(key, value)


CHANGES = {
    "list entry": ([1, 2], put(1, 3), "kept[1]"),
    "list of many": ([0] * 1000, put(999, 3), "kept"),
    "list that grows": ([1], lambda kept: kept.append(2), "kept"),
    "dict entry": ({"a": {"b": 1}}, lambda kept: kept["a"].update(b=2), "kept['a']['b']"),
    "dict key": ({}, put("a", 1), "kept"),
    "ordered dict": (collections.OrderedDict(a=1), lambda kept: kept.update(b=2), "kept"),
    "set": ({1}, lambda kept: kept.add(2), "kept"),
    "deque of a full length": (collections.deque([1, 2], maxlen=2), lambda kept: kept.append(3), "kept[0]"),
    "counter": (collections.Counter(), lambda kept: kept.update("a"), "kept"),
    "tensor in place": (torch.zeros(2), lambda kept: kept.add_(1), "kept"),
    "tensor through data": (torch.zeros(2), lambda kept: kept.data.add_(1), "kept"),
    "array": (np.zeros(2), put(0, 1.0), "kept"),
    "attribute": (stateful.Calls(), lambda kept: setattr(kept, "count", 1), "kept.count"),
    "new attribute": (stateful.Calls(), lambda kept: setattr(kept, "more", 1), "kept.more"),
    "slot": (stateful.SlottedCalls(), lambda kept: setattr(kept, "count", 1), "kept.count"),
    "python generator": (random.Random(1), lambda kept: kept.random(), "kept"),
    "numpy generator": (np.random.default_rng(1), lambda kept: kept.random(), "kept"),
    "torch generator": (torch.Generator(), lambda kept: torch.rand(1, generator=kept), "kept"),
    "count": (itertools.count(3, 2), advance, "kept"),
    "cycle": (itertools.cycle([1, 2, 3]), advance, "kept"),
    "list iterator": (iter([1, 2, 3]), advance, "kept"),
    "zip of iterators": (zip(iter([1, 2]), itertools.count(), strict=False), advance, "kept"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_put_back(name):
    value, change, where = CHANGES[name]
    paths, left = changed(value, change)
    assert f"'{where}' of module 'inner'" in paths
    if name == "tensor in place":  # writing it back is a change of its own
        assert torch.equal(value, torch.zeros(2))
    else:
        assert left == []


def test_an_iterator_that_is_put_back_gives_again_what_it_gave():
    for make in (
        lambda: itertools.cycle([1, 2, 3]),
        lambda: enumerate(iter("abc")),
        lambda: itertools.count(5),
    ):
        model = Holder(make())
        next(model.inner.kept)
        before = PythonState(model)
        values = [next(model.inner.kept), next(model.inner.kept)]
        before.restore()
        assert [next(model.inner.kept), next(model.inner.kept)] == values


def test_an_ordered_dict_that_is_put_back_is_still_whole():
    model = Holder(collections.OrderedDict(a=1))
    before = PythonState(model)
    model.inner.kept.update(b=2)
    before.restore()
    assert list(model.inner.kept.items()) == [("a", 1)]


class RegistersHook(stateful.Plain):
    """Hooks itself at its first call, as models of transformers do that capture what their layers make."""

    def between(self, x):
        if not hasattr(self, "hooked"):
            self.hooked = True
            self.second.register_forward_hook(lambda module, inputs, output: 2 * output)
        return x


def test_hooks_that_a_forward_registered_are_taken_away_with_what_says_so():
    model, x = RegistersHook(), torch.randn(2, 6)
    before = PythonState(model)
    once = model(x)
    before.restore()
    assert not model.second._forward_hooks and torch.equal(model(x), once)


def test_a_generator_of_python_code_moves_and_is_left_where_it_is():
    assert changed(stateful.factors(), advance) == (
        ["'kept' of module 'inner'"],
        ["'kept' of module 'inner'"],
    )


def test_parameters_and_registered_buffers_are_not_part_of_it():
    model = nn.BatchNorm1d(3)
    model.alias = model.weight
    before = PythonState(model)
    model(torch.randn(4, 3))
    with torch.no_grad():
        model.weight.add_(1)
    assert before.moved_until(PythonState(model)) == []


def test_a_replaced_object_with_equal_contents_has_not_moved():
    model = Holder([1, {"a": 2}])
    before = PythonState(model)
    model.inner.kept = [1, {"a": 2}]
    assert before.moved_until(PythonState(model)) == []


class Awkward:
    """Refers to itself, raises when compared or read, and holds a lock, a class, a module and itself in a list."""

    def __init__(self):
        self.me, self.lock, self.kind, self.library, self.many = (
            self,
            threading.Lock(),
            Awkward,
            random,
            [self],
        )

    def __eq__(self, other):
        raise RuntimeError("not to be compared")

    __hash__ = None

    @property
    def trouble(self):
        raise RuntimeError("not to be read")


def test_cycles_and_what_raises_do_no_harm():
    model = Holder(Awkward())
    before = PythonState(model)
    assert before.moved_until(PythonState(model)) == []
    before.restore()
    assert model.inner.kept.me is model.inner.kept


def test_bounds_that_were_hit_are_said(monkeypatch):
    deep = []
    for _ in range(python_state.MAX_DEPTH + 5):
        deep = [deep]
    (bound,) = PythonState(Holder(deep)).bounds
    assert f"more than {python_state.MAX_DEPTH} deep" in bound
    other = []
    for _ in range(python_state.MAX_DEPTH + 5):
        other = [other]
    (bound,) = PythonState(Holder([deep, other])).bounds
    assert " and 1 more, was not looked at" in bound
    (bound,) = PythonState(Holder([[number] for number in range(1000)])).bounds
    assert "of the 1,000 entries of 'kept' of module 'inner' only the first and last 128" in bound
    (bound,) = PythonState(Holder([[[number] for number in range(1000)], [[0]] * 300])).bounds
    assert "of the 1,000 entries of 'kept[0]' of module 'inner' and 1 more only the first and last" in bound
    monkeypatch.setattr(python_state, "MAX_COPIED_BYTES", 100)
    (bound,) = PythonState(Holder(torch.zeros(1000))).bounds
    assert (
        "'kept' of module 'inner' was looked at without its values, which are more than fit in 100 B" in bound
    )
    monkeypatch.setattr(python_state, "MAX_LEAVES", 10)
    assert any("only the first 10 values" in bound for bound in PythonState(Holder(list(range(50)))).bounds)


INSTALLED = """
from torch import nn

CALLS = 0


class Counts(nn.Linear):
    made = 0

    def forward(self, x):
        global CALLS
        CALLS += 1
        Counts.made += 1
        return super().forward(x)
"""


def test_globals_and_class_attributes_of_an_installed_package_are_seen_where_it_defines_a_module(
    tmp_path, monkeypatch
):
    package = tmp_path / "site-packages" / "counting_models"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from counting_models.layers import Counts\n")
    (package / "layers.py").write_text(INSTALLED)
    monkeypatch.syspath_prepend(package.parent)
    counting_models = importlib.import_module("counting_models")
    try:
        model = nn.Sequential(counting_models.Counts(6, 6))
        before = PythonState(model)
        model(torch.zeros(1, 6))
        moved = [one.path for one in before.moved_until(PythonState(model))]
        assert moved == ["attribute made of class Counts", "global CALLS of module counting_models.layers"]
        before.restore()
        assert (counting_models.layers.CALLS, counting_models.Counts.made) == (0, 0)
    finally:
        for name in ("counting_models", "counting_models.layers"):
            del sys.modules[name]
