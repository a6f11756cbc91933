"""Runs forwards of a model eagerly, and puts back what they leave on it: buffers, Python state, tensors that they made.

Knows nothing of graphs or stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from worker.contract.profile import TraceError
from worker.model.autocast import AutocastSpec
from worker.model.side_effects.python_state import PythonState


class BufferSnapshot:
    """The buffers of a model as they are now: `before`, by name. Those that are None are so again when restored."""

    def __init__(self, model: nn.Module):
        self._places = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._empty = _EmptyBuffers(model)
        self.before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    def restore(self) -> None:
        with torch.no_grad():
            for module, name, buffer, before in self._places:
                module._buffers[name] = buffer
                buffer.copy_(before)
        self._empty.restore()


class _EmptyBuffers:
    """The buffers of a model that are None, which forward may fill (a bias that it keeps for later calls)."""

    def __init__(self, model: nn.Module):
        self._places = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is None
        ]

    def restore(self) -> None:
        for module, name in self._places:
            if name in module._buffers:
                module._buffers[name] = None


@contextlib.contextmanager
def python_state_kept(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[PythonState]:
    """In the body forward may keep fake tensors on the model; afterwards none is left there, if it has still `modules`."""
    state, empty = PythonState(model), _EmptyBuffers(model)
    registered = {
        id(module): {*module._parameters, *module._buffers}
        for module in modules
        if not isinstance(module, torch.jit.ScriptModule)  # none can be made there
    }
    made: list[str] = []
    try:
        yield state
    finally:
        if list(model.modules()) == list(modules):
            state.restore()
            empty.restore()
            made = _drop_made_tensors(model, registered)
    if made:
        raise TraceError(
            f"forward makes {made[0]!r}, a parameter or buffer that the model has not when it is built: neither stages nor "
            "an optimizer know of it; make it in __init__, or have model.factory call the model once"
        )


def _drop_made_tensors(model: nn.Module, registered: Mapping[int, Collection[str]]) -> list[str]:
    """Take away the parameters and buffers that are not `registered`, by the id of their module; their names."""
    made = []
    for path, module in model.named_modules():
        for kept in (module._parameters, module._buffers) if id(module) in registered else ():
            for name in [name for name in kept if name not in registered[id(module)]]:
                del kept[name]
                made.append(f"{path}.{name}" if path else name)
    return made


def run_once(model: nn.Module, example_inputs: tuple[Tensor, ...], cast: AutocastSpec) -> None:
    """Run once a model whose first forward exchanges modules of its own, as BigBird's does for short texts.

    A graph of that forward names modules that are gone, and export puts back the attributes by which the model knows
    that they are."""
    buffers = BufferSnapshot(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), cast.entered():
        model(*example_inputs)
    buffers.restore()


def run_eagerly(model: nn.Module, inputs: tuple[Tensor, ...], cast: AutocastSpec) -> None:
    """One forward on real values, within which nothing of ours answers for them."""
    buffers = BufferSnapshot(model)
    given = [value.clone() for value in inputs]
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            cast.entered(),
            torch._C.DisableTorchFunction(),
        ):
            model(*given)
    finally:
        buffers.restore()
