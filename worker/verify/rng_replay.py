"""Replays in the plain model the random numbers that heterogeneous meshes draw for rows of a microbatch.

Each rank of a mesh draws for its rows; the plain model runs other rows at once and takes its part of what all
ranks of that mesh draw together. Only kernels that draw by shape alone can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from worker.contract.costs import batch_dimension
from worker.contract.profile import CutError
from worker.model.rng import default_generator
from worker.model.rng_ops import RngKey, RngOp, RngOpMismatchError


@dataclass(frozen=True)
class MeshRngOp:
    """A random call in a stage whose mesh splits a microbatch over `workers`, each of which draws for `shape`."""

    call: RngOp
    workers: int
    shape: tuple[int, ...]


def mesh_rng_ops(
    by_workers: Mapping[int, Sequence[RngOp]], workers: int, workers_of: Mapping[str, int]
) -> list[MeshRngOp]:
    """The random calls of a plain model that runs the rows of one of `workers`, with those of the meshes: `by_workers` has
    the calls of the graphs by data-parallel size, `workers_of` that size where an operation runs."""
    found = []
    for index, call in enumerate(by_workers[workers]):
        there = workers_of.get(call.operation, workers)
        other = by_workers[there][index] if index < len(by_workers[there]) else None
        if other is None or other.operation != call.operation:
            raise RngOpMismatchError(
                f"with the rows of a mesh of {there} workers the model draws at other places than with those of {workers}: "
                f"{call.operation} in module {call.module!r}"
            )
        found.append(MeshRngOp(call, there, other.shape))
    return found


class HeterogeneousDraws:
    """The draws of one forward of the plain model with the rows of one of `workers`."""

    def __init__(self, calls: Sequence[MeshRngOp], key: RngKey, *, workers: int) -> None:
        self._calls, self._key, self._workers = calls, key, workers
        self._generator = default_generator(torch.device("cpu"))
        self._states: list[Tensor] = []

    def takes(self, call: int) -> bool:
        """True if another number of workers draws it."""
        return self._calls[call].workers != self._workers

    def draw(self, call: int, function: Callable, args: tuple, kwargs: Mapping) -> Any:
        """The result of a kernel that draws by shape only: this worker's part of what the ranks of the mesh draw."""
        operation = self._calls[call]
        along = self._along(operation)
        parts = []
        if operation.call.first:
            self._states = [self._begun(worker, operation) for worker in range(operation.workers)]
        for worker in range(operation.workers):
            self._generator.set_state(self._states[worker])
            parts.append(_draw_with_shape(function, args, kwargs, operation.shape))
            self._states[worker] = self._generator.get_state()
        length = operation.call.shape[along]
        own = torch.cat(parts, along).narrow(along, self._key.worker * length, length)
        if _is_in_place(function):
            return args[0].copy_(own)
        return own

    def _begun(self, worker: int, operation: MeshRngOp) -> Tensor:
        state = replace(self._key, worker=worker).state(torch.device("cpu"))
        state.restart(operation.call.operation)
        return self._generator.get_state()

    def _along(self, operation: MeshRngOp) -> int:
        what, shapes = f"drawn by {operation.call.operation}", (operation.call.shape, operation.shape)
        try:
            along = batch_dimension(what, shapes, (self._workers, operation.workers), differentiable=False)
        except CutError as error:
            raise RngOpMismatchError(str(error)) from None
        if along is None:
            raise RngOpMismatchError(
                f"{operation.call.operation} in module {operation.call.module!r} draws the same shape "
                f"{list(operation.shape)} however many rows a worker has: each of {operation.workers} "
                "workers draws its own, and no plain model does"
            )
        return along


def _is_in_place(function: Any) -> bool:
    return function.overloadpacket.__name__.endswith("_")


def _draw_with_shape(function: Any, args: tuple, kwargs: Mapping, shape: tuple[int, ...]) -> Tensor:
    """The kernel called for that shape instead; its draws must not depend on the values it is given."""
    place = next((k for k, value in enumerate(args) if isinstance(value, Tensor | list | tuple)), None)
    given = None if place is None else args[place]
    name = function.overloadpacket.__name__
    if isinstance(given, Tensor) and (_is_in_place(function) or name.endswith("_like")):
        other: Any = torch.empty(shape, dtype=given.dtype, device=given.device)
    elif isinstance(given, list | tuple):
        other = list(shape)
    else:
        raise RngOpMismatchError(
            f"{name} draws by the values that it is given, of other rows on heterogeneous meshes: it cannot be replayed in "
            "the plain model"
        )
    return function(*args[:place], other, *args[place + 1 :], **kwargs)
