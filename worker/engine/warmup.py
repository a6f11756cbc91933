"""Dry run of a mesh's whole program before the first step: without its peers, leaving nothing changed.

CUDA loads kernels when they are first used, and loading waits for the device: behind a receive that spins for
its sender it would wait for ever. cuBLAS and cuDNN handles, their workspaces and the allocator's blocks belong
to a thread or a stream. So the program itself runs, on the threads and lanes of the step, REDUCE and STEP too:
only transfers are muted. Parameters, buffers, optimizer state and RNG states are snapshotted in host memory and
restored to the bit. Must not know lanes.
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

from worker.model.rng import RNG_LOCK


@dataclass(frozen=True)
class _TensorCopy:
    """A tensor and a copy of its values in host memory, as the device may have no room for them twice."""

    tensor: Tensor
    values: Tensor


class StateSnapshot:
    """A copy of parameters, buffers, optimizer state and all RNG states, to be restored later."""

    def __init__(self, modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None):
        self._optimizer = optimizer
        self._tensors = [
            _snapshot(t) for module in modules for t in (*module.parameters(), *module.buffers())
        ]
        if optimizer is not None:
            self._state = {key: _snapshot(entry) for key, entry in optimizer.state.items()}
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
