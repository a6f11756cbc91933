"""What a test file must leave as it found it, since all files of a process share it: the product's own functions and
constants, the environment, the interpreter's and torch's switches.

A patch that is never undone is met by files that come long after: they then test the patch, or wait for its limits.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

ROOMS = ("service.", "worker.")
_PLAIN = (bool, int, float, str, bytes, tuple, frozenset)
_FIXED = (*_PLAIN, classmethod, staticmethod, property)
_OWN = "PYTEST_CURRENT_TEST"
"""Of the environment, what pytest changes itself."""
_NEW = "SLOTLINE_"
"""What is new in the environment and a leak: NCCL, CUDA and libraries are told theirs by the product, for good."""
_KEPT = {
    ("service.observability.tracing", "_exporter"),
    ("service.orchestrator.planning.pool", "_given_up"),
    ("worker.contract.failures", "_file"),
}
"""Variables of modules that work changes."""
_PLACE = {
    "the working directory": Path.cwd,
    "the level of the root logger": lambda: logging.getLogger().level,
}
_TORCH = {
    "torch's default type": "get_default_dtype",
    "torch's grad mode": "is_grad_enabled",
    "torch's deterministic algorithms": "are_deterministic_algorithms_enabled",
    "torch's precision of matmul": "get_float32_matmul_precision",
}
_ENVIRONMENT, _SWITCHES = "the environment", "this process"

State = dict[str, dict[str, Any]]


def state() -> State:
    """What is looked at, by the place where it is found."""
    found: State = {_ENVIRONMENT: dict(os.environ), _SWITCHES: {name: get() for name, get in _PLACE.items()}}
    found[_ENVIRONMENT].pop(_OWN, None)
    if hasattr(torch := sys.modules.get("torch"), _TORCH["torch's default type"]):
        found[_SWITCHES] |= {name: getattr(torch, get)() for name, get in _TORCH.items()}
    for name, module in [*sys.modules.items()]:
        if name.startswith(ROOMS) and module is not None:
            found[name] = dict(vars(module))
            for key, value in found[name].items():
                if isinstance(value, type) and value.__module__ == name:
                    found[f"{name}.{key}"] = dict(vars(value))
    return found


def leaked(before: State, after: State) -> list[str]:
    """What is no more as it was. A module that was imported since is no leak, nor is what work fills: lists, tables,
    and what was None."""
    told = []
    for place, names in before.items():
        now = after.get(place, names)  # a module that somebody unloads is loaded anew
        for name, value in names.items():
            if name not in now:
                told.append(f"{place}: {name} is gone")
            elif now[name] is not value and _matters(place, name, value) and not _same(value, now[name]):
                told.append(f"{place}: {name} was {value!r:.80}, is {now[name]!r:.80}")
    new = [name for name in after[_ENVIRONMENT] if name.startswith(_NEW) and name not in before[_ENVIRONMENT]]
    return told + [f"{_ENVIRONMENT}: {name} is new" for name in new]


def _matters(place: str, name: str, value: Any) -> bool:
    if place in (_ENVIRONMENT, _SWITCHES):
        return True
    return (place, name) not in _KEPT and (callable(value) or isinstance(value, _FIXED))


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, (*_PLAIN, Path)) and type(one) is type(other) and one == other
