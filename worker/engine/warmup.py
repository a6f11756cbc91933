"""Dry run of a mesh's whole program before the first step: without its peers, leaving nothing changed.

CUDA loads kernels when they are first used, and loading waits for the device: behind a receive that spins for
its sender it would wait for ever. cuBLAS and cuDNN handles, their workspaces and the allocator's blocks belong
to a thread or a stream. So the program itself runs, on the threads and lanes of the step, REDUCE and STEP too:
only transfers are muted. What it changes is snapshotted in host memory and restored to the bit: RNG states, the
buffers that a stage updates, and parameters and optimizer state where the optimizer cannot be told to leave them as
they are. Must not know lanes.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from worker.model.opaque.call import opaque_calls
from worker.model.rng import RNG_LOCK


@dataclass(frozen=True)
class _TensorCopy:
    """A tensor and a copy of its values in host memory, as the device may have no room for them twice."""

    tensor: Tensor
    values: Tensor


class StateSnapshot:
    """A copy of what a dry run of stages changes, to be restored later: their tensors, and all RNG states.

    With `skips` the optimizer's step leaves parameters and state as they are, and there is no copy of either.
    """

    def __init__(
        self, modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None, *, skips: bool = False
    ):
        self._optimizer = optimizer
        changed = itertools.chain.from_iterable(map(_changed_by_forward, modules))
        stepped = (
            parameter
            for group in (optimizer.param_groups if optimizer is not None and not skips else ())
            for parameter in group["params"]
        )
        tensors = {id(tensor): tensor for tensor in (*changed, *stepped)}
        self._tensors = [_snapshot(tensor) for tensor in tensors.values()]
        if optimizer is not None:
            kept = copy.copy if skips else _snapshot
            self._state = {key: kept(entry) for key, entry in optimizer.state.items()}
            self._groups = [
                {key: _snapshot(value) for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
            self._names = {*vars(optimizer)}
            self._numbers = {
                key: value for key, value in vars(optimizer).items() if isinstance(value, bool | int | float)
            }
        with RNG_LOCK:
            cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
            self._random = (random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all of it, to the bit."""
        for saved in self._tensors:
            _restore(saved)
        if self._optimizer is not None:
            self._restore_optimizer(self._optimizer)
        of_python, of_numpy, of_torch, cuda = self._random
        with RNG_LOCK:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            torch.set_rng_state(of_torch)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)

    def _restore_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for name in {*vars(optimizer)} - self._names:
            delattr(optimizer, name)
        vars(optimizer).update(self._numbers)
        optimizer.state.clear()
        optimizer.state.update({key: _restore(entry) for key, entry in self._state.items()})
        for group, saved in zip(optimizer.param_groups, self._groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({"params": parameters, **{key: _restore(value) for key, value in saved.items()}})


def _changed_by_forward(module: nn.Module) -> Iterable[Tensor]:
    """The tensors of a stage that its forward may change: the buffers that a trace names, which has it change no parameter,
    and everything where there is no trace to ask or it calls a module as it is."""
    updated = getattr(module, "updated_buffers", None)
    if updated is None or opaque_calls(module):
        return (*module.parameters(), *module.buffers())
    return [module.get_buffer(name) for name in updated]


def _snapshot(value: Any) -> Any:
    """`value`, of dicts, lists and tuples, with its tensors as copies in host memory and all else copied."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _TensorCopy(leaf, leaf.detach().to("cpu", copy=True))
        return copy.deepcopy(leaf)

    return tree_map(copied, value)


def _restore(saved: Any) -> Any:
    """The snapshotted pytree, with the tensors that it had, and in them the values that they had."""

    def restored(leaf: Any) -> Any:
        if not isinstance(leaf, _TensorCopy):
            return leaf
        leaf.tensor.detach().copy_(leaf.values)
        return leaf.tensor

    return tree_map(restored, saved)


def batch_on_device(
    inputs: Sequence[tuple[Tensor, ...]], targets: Sequence[Tensor] | None, device: torch.device
) -> tuple[Sequence[tuple[Tensor, ...]], Sequence[Tensor] | None]:
    """`inputs` and `targets` on `device`; as they are where they lie there already."""
    if device.type == "cpu" or all(t.is_cuda for t in (*itertools.chain(*inputs), *(targets or ()))):
        return inputs, targets
    inputs = [tuple(t.to(device, non_blocking=True) for t in arguments) for arguments in inputs]
    if targets is not None:
        targets = [target.to(device, non_blocking=True) for target in targets]
    torch.cuda.synchronize(device)
    return inputs, targets
