"""The random numbers of a pipeline, drawn by the unsplit model: each of its random calls starts from the seed that the
same operation of the graph has (seed, worker, step, microbatch and the operation's name; DESIGN's promise)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from worker.engine.random_state import derive_seed, restart_at_operations
from worker.model import TracedModel
from worker.seeding import seeded


class OtherRandomCallsError(RuntimeError):
    """The model draws at other places than its graph."""


@dataclass(frozen=True)
class RandomCall:
    """One kernel that draws; `first` of those that one operation of the graph makes."""

    operation: str
    first: bool


def random_calls(traced: TracedModel, device: str = "cpu") -> list[RandomCall]:
    """The random calls of one forward of the graph, in order. Changes nothing of it."""
    stage = traced.builder([0]).stage(0).to(device)
    marks = _Marks()
    if not restart_at_operations(stage, marks):
        return []
    inputs = [traced.example_inputs[int(name.removeprefix("input:"))].to(device) for name in stage.inputs]
    with seeded(0), _Listener(marks):
        stage(*(value.clone() for value in inputs))
    return marks.found


@contextlib.contextmanager
def drawn_as(
    calls: Sequence[RandomCall], *, seed: int, worker: int, step: int, microbatch: int
) -> Iterator[None]:
    """The random calls of the body, one forward of the model, draw what the pipeline draws in theirs.

    Raises OtherRandomCallsError where there are more or fewer of them.
    """
    if not calls:
        yield
        return
    with _Restarts(calls, (seed, worker, step, microbatch)) as mode:
        yield
    if mode.count != len(calls):
        raise OtherRandomCallsError(
            f"the model made {mode.count} random calls, its graph {len(calls)}: they cannot be told to draw the same"
        )


def _may_draw(function: object) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())


def _call(function: Callable, args: tuple, kwargs: Mapping | None) -> tuple[object, bool]:
    """What a kernel returns, and whether it drew: attention without dropout only might."""
    if not _may_draw(function):
        return function(*args, **(kwargs or {})), False
    before = torch.default_generator.get_state()
    result = function(*args, **(kwargs or {}))
    return result, not torch.equal(before, torch.default_generator.get_state())


class _Marks:
    """Takes the place of an engine's random state: told before each random operation of the graph."""

    def __init__(self) -> None:
        self.found: list[RandomCall] = []
        self._now, self._begun = "", False

    def restart(self, operation: str) -> None:
        self._now, self._begun = operation, True

    def drawn(self) -> None:
        self.found.append(RandomCall(self._now, self._begun))
        self._begun = False


class _Listener(TorchDispatchMode):
    def __init__(self, marks: _Marks) -> None:
        super().__init__()
        self._marks = marks

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result, drew = _call(function, args, kwargs)
        if drew:
            self._marks.drawn()
        return result


class _Restarts(TorchDispatchMode):
    def __init__(self, calls: Sequence[RandomCall], at: tuple[int, int, int, int]) -> None:
        super().__init__()
        self._calls, self._at = calls, at
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if _may_draw(function) and self.count < len(self._calls) and self._calls[self.count].first:
            torch.default_generator.manual_seed(derive_seed(*self._at, self._calls[self.count].operation))
        result, drew = _call(function, args, kwargs)
        self.count += drew
        return result
