"""Finds the modules whose forward calls an autograd function with a backward of its own, which a trace loses.

They run as they are. Knows nothing of graphs.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from worker.model.autocast import AutocastSpec
from worker.model.hf_patches import PATCHED_FUNCTION_NAMES
from worker.model.side_effects.eager import python_state_kept, run_eagerly
from worker.model.untraceable import innermost_module


def modules_with_own_backwards(
    model: nn.Module,
    example_inputs: tuple[Tensor, ...],
    *,
    autocast: torch.dtype | None = None,
    device: str = "cpu",
) -> dict[str, str]:
    """The modules in whose forward a custom autograd function is called, whose backward a trace loses, as `opaque` of
    `trace`; the model itself has an empty name."""
    found: dict[str, str] = {}

    def note(kind: type[torch.autograd.Function]) -> None:
        path = innermost_module(model, list(traceback.walk_stack(None))[::-1])
        found[path] = f"the autograd function {kind.__name__} has a backward of its own, which tracing loses"

    with _noted_autograd_functions(note), python_state_kept(model, list(model.modules())):
        run_eagerly(model, example_inputs, AutocastSpec(device, autocast))
    return found


@contextlib.contextmanager
def _noted_autograd_functions(note: Callable[[type[torch.autograd.Function]], None]) -> Iterator[None]:
    """In the body `note` is called with each autograd function that is called and neither torch's nor patched here: at its
    forward, as `apply` may have been taken from the class before, or at `apply` where the class is made in the body."""
    known = _autograd_functions()
    forwards = {kind: vars(kind)["forward"] for kind in known if "forward" in vars(kind)}
    applied = torch.autograd.Function.__dict__["apply"]

    def noted(kind: type[torch.autograd.Function]) -> staticmethod:
        forward = kind.forward

        @functools.wraps(forward)  # torch binds arguments by its signature
        def called(*args: Any, **kwargs: Any) -> Any:
            note(kind)
            return forward(*args, **kwargs)

        return staticmethod(called)

    def apply(kind: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if kind not in known and _is_own(kind):
            note(kind)
        return applied.__get__(None, kind)(*args, **kwargs)

    try:
        for kind in forwards:
            kind.forward = noted(kind)
        torch.autograd.Function.apply = classmethod(apply)
        yield
    finally:
        torch.autograd.Function.apply = applied
        for kind, forward in forwards.items():
            kind.forward = forward


def _autograd_functions() -> list[type[torch.autograd.Function]]:
    """The autograd functions that are defined by now and neither torch's nor patched here."""
    kinds = [torch.autograd.Function]
    for kind in kinds:  # which grows
        kinds += [one for one in kind.__subclasses__() if one not in kinds]
    return [kind for kind in kinds if _is_own(kind)]


def _is_own(kind: type[torch.autograd.Function]) -> bool:
    return not kind.__module__.startswith("torch.") and kind.__name__ not in PATCHED_FUNCTION_NAMES
