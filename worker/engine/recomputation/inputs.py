"""Keeps what a recomputed stage needs to run its forward again for its backward.

A recomputed stage keeps its arguments and the buffers that forward updates (running statistics) as they were
before F, and the results of its products where it recomputes selectively. The second run sees what the first one
saw and leaves no trace: buffers are restored when its backward has ended. Must not know step state, lanes or transports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from worker.engine.forward import StageArguments
from worker.engine.recomputation.blocks import KeptBlocks
from worker.engine.recomputation.products import KeptProducts

BufferValues = dict[str, torch.Tensor]


@dataclass
class RecomputeInputs:
    """The arguments of a forward, how often each had been written to, the buffers before it, and with selective
    recomputation its products, with one by block what the blocks read and the random generator's state behind it.

    From the second run to W, `buffers` are those that the second run left, and the arguments are autograd's.
    """

    arguments: StageArguments
    versions: tuple[int, ...]
    buffers: BufferValues
    products: KeptProducts | None = None
    blocks: KeptBlocks | None = None
    generator_state: torch.Tensor | None = None

    def take_arguments(self) -> StageArguments:
        """The arguments for the second run; from then on they are held no longer than that run holds them."""
        self.check_unchanged()
        taken, self.arguments, self.versions = self.arguments, StageArguments([], [], []), ()
        return taken

    def take_products(self) -> KeptProducts | None:
        """The products for the second run; from then on they are held no longer than that run holds them."""
        taken, self.products = self.products, None
        return taken

    def take_blocks(self) -> KeptBlocks:
        """Hand over what the blocks read, for their second run; it is held no longer than that."""
        taken, self.blocks = self.blocks, None
        assert taken is not None
        return taken

    def check_unchanged(self) -> None:
        """RuntimeError when something has written to an argument since: what is computed again would differ."""
        for position, (value, version) in enumerate(zip(self.arguments.values, self.versions, strict=True)):
            if value._version != version:
                raise RuntimeError(
                    f"argument {position} of the stage was changed in place after it was kept for recomputing: let "
                    "forward change a copy, or leave this stage out of pipeline.recompute"
                )


class UpdatedBuffers:
    """The buffers of a stage that its forward updates; all its buffers where the stage does not name them."""

    def __init__(self, module: nn.Module):
        named = dict(module.named_buffers())
        names = getattr(module, "updated_buffers", None)
        self._buffers = named if names is None else {name: named[name] for name in names}

    def copy(self) -> BufferValues:
        """Copies of the buffers' present values, by name."""
        return {name: buffer.detach().clone() for name, buffer in self._buffers.items()}

    @contextlib.contextmanager
    def restored_to(self, inputs: RecomputeInputs) -> Iterator[None]:
        """A context with the buffers of `inputs`; at its end their values go to `inputs`, and the present ones return."""
        now = self.copy()
        self._put(inputs.buffers)
        try:
            yield
        finally:
            inputs.buffers = self.copy()
            self._put(now)

    def _put(self, values: BufferValues) -> None:
        for name, value in values.items():
            # through `data`, which autograd does not count: a graph that saved a buffer finds its own values there
            self._buffers[name].data.copy_(value)


def save_recompute_inputs(
    arguments: StageArguments, buffers: UpdatedBuffers, *, selective: bool = False, by_block: bool = False
) -> RecomputeInputs:
    """Save before F what the second run will need; F is to add its products with `selective`, what its blocks read with
    `by_block`."""
    return RecomputeInputs(
        arguments,
        _versions(arguments.values),
        buffers.copy(),
        KeptProducts() if selective else None,
        KeptBlocks() if by_block else None,
    )


def _versions(values: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(value._version for value in values)
