"""Keepers of copies in this process, in the place of actors of Ray: a test ends them, and holds back what they are asked."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest

from worker.checkpoint import copies
from worker.checkpoint.copies import CopyKeeper
from worker.driver.saving import state_copies


class LocalKeepers:
    """The keepers of one job, by node. Those that `started` come when they are asked for, as those of Ray."""

    def __init__(self, patch: pytest.MonkeyPatch, job: str = "job"):
        self.job = job
        self.keepers: dict[str, CopyKeeper] = {}
        self.called: list[str] = []
        for module in (copies, state_copies):
            patch.setattr(module, "find_keepers", lambda job: self.handles)
            patch.setattr(module, "keeper_results", self._results)
        patch.setattr(copies, "_result", lambda ref: ref())
        patch.setattr(copies, "_stored", lambda values: values)
        patch.setattr(state_copies, "start_keepers", self._start)
        patch.setattr(state_copies, "end_keepers", self._end)

    @property
    def handles(self) -> dict[str, _Handle]:
        return {node: _Handle(self, node) for node in self.keepers}

    def add(self, *nodes: str) -> None:
        for node in nodes:
            self.keepers.setdefault(node, CopyKeeper(self.job, math.inf, end=lambda: None))

    def _start(self, actor_class: type, job: str, node_ids: Collection[str], *, interpreter: Any) -> Any:
        assert (actor_class, job) == (CopyKeeper, self.job)
        self.add(*node_ids)
        return {node: _Handle(self, node) for node in node_ids}

    def _end(self, jobs: Collection[str], *, but_on: Collection[str] = ()) -> None:
        assert list(jobs) == [self.job]
        self.keepers = {node: keeper for node, keeper in self.keepers.items() if node in but_on}

    def _results(self, calls: Mapping[str, Callable[[], Any]], limit_s: float) -> dict[str, Any]:
        found = {}
        for node, call in calls.items():
            try:
                found[node] = call()
            except LostKeeperError:
                continue
        return found


class LostKeeperError(RuntimeError):
    """In the place of Ray's error about an actor that is gone."""


class _Handle:
    """Calls of the keeper of a node, with what Ray makes of their arguments."""

    def __init__(self, keepers: LocalKeepers, node: str):
        self._keepers, self._node = keepers, node

    def __getattr__(self, method: str) -> Any:
        return _Method(self._keepers, self._node, method)


class _Method:
    def __init__(self, keepers: LocalKeepers, node: str, name: str):
        self._keepers, self._node, self._name = keepers, node, name

    def remote(self, *arguments: Any) -> Callable[[], Any]:
        self._keepers.called.append(self._name)
        keeper = self._keepers.keepers.get(self._node)
        if keeper is None:
            return _raising(LostKeeperError(f"the keeper on {self._node} is gone"))
        try:
            result = getattr(keeper, self._name)(*pickle.loads(pickle.dumps(arguments)))
        except Exception as error:
            return _raising(error)
        return lambda: result


def _raising(error: Exception) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it
