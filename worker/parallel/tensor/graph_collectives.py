"""Collectives of a tensor-parallel group in a stage's graph: copy, reduce, gather, scatter, with gradients.

Each is a module in the graph. The gradient of a value that every rank has whole is kept whole on every rank
(Shoeybi et al. 2019, "Megatron-LM": the conjugate operators f and g). All ranks enter them in the order of the
stage's graph. They give up the RNG lock while they wait: a forward may hold it, and so may its peers.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from worker.model.rng import release_rng_lock
from worker.parallel.tensor.placement import Split


class GroupCommunicator(Protocol):
    """Collectives of one group; each call returns when it is done, or on CUDA enqueued."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` in place."""

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Fill `out` with the `tensor` of every worker, in their order."""


class TensorGroup:
    """The tensor-parallel group of a stage, as rank `worker` of `workers` sees it.

    All ranks call `communicator` in one order, that of the stage's graph and of its program. None: the stage's graph is
    built or measured, and not run.
    """

    def __init__(self, worker: int, workers: int, communicator: GroupCommunicator | None = None):
        self.worker, self.workers = worker, workers
        self.communicator = communicator

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the group, in a new tensor."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj()
        with release_rng_lock():  # a forward may have the generators, and so may those that it waits for
            self._connected().all_reduce(torch.view_as_real(total) if total.is_complex() else total)
        return total

    def gather(self, local: torch.Tensor, split: Split) -> torch.Tensor:
        """The whole tensor of which every rank has `local` by `split`, bit for bit."""
        if local.is_complex():
            return torch.view_as_complex(
                self.gather(torch.view_as_real(local.detach().resolve_conj()), split)
            )
        own = local.detach().contiguous()
        parts = own.new_empty((self.workers, *own.shape))
        with release_rng_lock():
            self._connected().all_gather(parts, own)
        return split.joined(parts)

    def _connected(self) -> GroupCommunicator:
        if self.communicator is None:
            raise RuntimeError(
                "the tensor-parallel group has no communicator: a stage that was only built for measurement ran"
            )
        return self.communicator


class CopyToGroup(nn.Module):
    """Passes a whole value on to operations of which each rank computes a part, and sums the parts of its gradient."""

    def __init__(self, group: TensorGroup):
        super().__init__()
        self._group = group

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return _CopyToGroup.apply(value, self._group)


class ReduceFromGroup(nn.Module):
    """Sums the parts of a value over the group; its gradient is whole already."""

    def __init__(self, group: TensorGroup):
        super().__init__()
        self._group = group

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        return _ReduceFromGroup.apply(part, self._group)


class GatherFromGroup(nn.Module):
    """Gathers a split value; each rank takes its part of the gradient."""

    def __init__(self, group: TensorGroup, split: Split):
        super().__init__()
        self._group, self._split = group, split

    def forward(self, local: torch.Tensor) -> torch.Tensor:
        return _GatherFromGroup.apply(local, self._group, self._split)


class ScatterToGroup(nn.Module):
    """Takes this worker's part of a whole value; the gradient is gathered."""

    def __init__(self, group: TensorGroup, split: Split):
        super().__init__()
        self._group, self._split = group, split

    def forward(self, whole: torch.Tensor) -> torch.Tensor:
        return _ScatterToGroup.apply(whole, self._group, self._split)


class VocabParallelLookup(nn.Module):
    """An embedding lookup in this rank's rows of a table, with zeros for other words, to be summed over the group."""

    def __init__(self, group: TensorGroup, rows: int, padding: int):
        super().__init__()
        self._words = rows
        self._rows = rows // group.workers
        self._first = group.worker * self._rows
        inside = self._first <= padding < self._first + self._rows
        self._padding = padding - self._first if inside else -1

    def forward(self, table: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        if not words.is_cuda and words.numel():  # as of a whole table; here it would be a row of zeros
            least, most = (int(one) for one in words.aminmax())
            if least < 0 or most >= self._words:
                raise IndexError(f"word {least if least < 0 else most} is not in a table of {self._words}")
        own = words - self._first
        foreign = (own < 0) | (own >= self._rows)
        found = torch.ops.aten.embedding.default(table, own.masked_fill(foreign, 0), self._padding)
        return found.masked_fill(foreign.unsqueeze(-1), 0.0)


def add_bias(total: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`total` + `bias` in the dtype of `total`, as one operation of both has it under autocast."""
    return total + bias.to(total.dtype)


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.sum(gradient), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        return group.sum(part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _GatherFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: TensorGroup, split: Split) -> torch.Tensor:
        ctx.group, ctx.split = group, split
        return group.gather(local, split)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.split.pick(gradient, ctx.group.worker, ctx.group.workers).contiguous(), None, None


class _ScatterToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: TensorGroup, split: Split) -> torch.Tensor:
        ctx.group, ctx.split = group, split
        return split.pick(whole, group.worker, group.workers).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.group.gather(gradient, ctx.split), None, None
