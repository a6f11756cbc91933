"""What a recomputed stage keeps from F until its forward is run again: its arguments, and the buffers that forward
updates (running statistics) as they were.

The second run must see what the first one saw and leave no trace: buffers are put back when its backward has
ended. Must not know lanes, programs or the random state (operations seed themselves by name).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from worker.engine.stage_run import Arguments

Values = dict[str, torch.Tensor]


@dataclass
class Kept:
    """The arguments of a forward, how often each had been written to, and the buffers before it.

    From the second run to W, `buffers` are those that the second run left, and the arguments are autograd's.
    """

    arguments: Arguments
    versions: tuple[int, ...]
    buffers: Values

    def take_arguments(self) -> Arguments:
        """The arguments for the second run; from then on they are held no longer than that run holds them."""
        self.check_unchanged()
        taken, self.arguments, self.versions = self.arguments, Arguments([], [], []), ()
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
    """The buffers of a stage that its forward updates; all of them where the stage does not say which."""

    def __init__(self, module: nn.Module):
        named = dict(module.named_buffers())
        names = getattr(module, "updated_buffers", None)
        self._buffers = named if names is None else {name: named[name] for name in names}

    def copy(self) -> Values:
        """Their values now."""
        return {name: buffer.detach().clone() for name, buffer in self._buffers.items()}

    @contextlib.contextmanager
    def as_of(self, kept: Kept) -> Iterator[None]:
        """The body sees the buffers of `kept`; what it leaves in them goes there, and they are as before."""
        now = self.copy()
        self._put(kept.buffers)
        try:
            yield
        finally:
            kept.buffers = self.copy()
            self._put(now)

    def _put(self, values: Values) -> None:
        for name, value in values.items():
            # through `data`, which autograd does not count: a graph that saved a buffer finds its own values there
            self._buffers[name].data.copy_(value)


def keep(arguments: Arguments, buffers: UpdatedBuffers) -> Kept:
    """Before F: what the second run will need."""
    return Kept(arguments, _versions(arguments.values), buffers.copy())


def _versions(values: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(value._version for value in values)
