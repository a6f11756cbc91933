"""The check after every file that nothing was left behind."""

from __future__ import annotations

import os
import sys
import types

import pytest

from tests.leaks import leaked, state


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of the product that only this test has."""

    class Lanes:
        def make(self) -> str:
            return "real"

    Lanes.__module__ = "worker.of_a_test"
    module = types.ModuleType("worker.of_a_test")
    module.Lanes, module.LIMIT_S, module.make, module.found = Lanes, 60.0, lambda: None, {}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_what_is_put_back_is_no_leak(room: types.ModuleType):
    before = state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room.Lanes, "make", lambda self: "fake")
        patch.setattr(room, "LIMIT_S", 1.0)
        patch.setenv("SLOTLINE_OF_A_TEST", "1")
        assert len(leaked(before, state())) == 3
    room.found["cache"] = 1
    assert leaked(before, state()) == []


def test_a_patch_of_a_class_a_function_a_constant_and_the_environment_is_named(room, monkeypatch):
    before = state()
    room.Lanes.make = lambda self: "fake"
    room.make = lambda: 1
    room.LIMIT_S = 1.0
    monkeypatch.setenv("SLOTLINE_OF_A_TEST", "1")
    monkeypatch.delenv("PATH")
    told = leaked(before, state())
    for start in (
        "worker.of_a_test.Lanes: make was",
        "worker.of_a_test: make was",
        "worker.of_a_test: LIMIT_S was 60.0, is 1.0",
        "the environment: SLOTLINE_OF_A_TEST is new",
        "the environment: PATH is gone",
    ):
        assert any(line.startswith(start) for line in told), start
    assert len(told) == 5


def test_a_value_that_is_equal_is_the_same(monkeypatch):
    before = state()
    monkeypatch.setenv("PATH", "".join([*os.environ["PATH"]]))
    assert leaked(before, state()) == []
