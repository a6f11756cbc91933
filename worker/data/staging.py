"""A step's samples on their way to the device, before the step asks for them. Knows no data set and no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from worker.data.ahead import ReadAhead
from worker.failure import attributed_to
from worker.reasons import Reason

Microbatch = tuple[tuple[torch.Tensor, ...], torch.Tensor]
Samples = tuple[list[tuple[torch.Tensor, ...]], list[torch.Tensor]]


def read_steps(
    microbatch: Callable[[int, int], Microbatch],
    microbatches: int,
    *,
    device: str,
    ahead: int,
    last: int,
    limit_s: float,
    reading: Callable[[], str] = lambda: "the data set",
    pinned: bool = True,
) -> ReadAhead[Samples]:
    """Reads whole steps, made of `microbatch(step, m)`, `ahead` of the one that is taken; see ReadAhead.

    What is read ahead is on the device when it is taken, over `pinned` memory. `reading` names who reads.
    Raises AttemptFailure DATA_FAILED.
    """
    staging = Staging(pins=pinned) if device == "cuda" and ahead else None

    @attributed_to(Reason.DATA_FAILED)
    def read(step: int) -> Samples:
        pairs = [microbatch(step, m) for m in range(microbatches)]
        inputs, targets = [inputs for inputs, _ in pairs], [target for _, target in pairs]
        return staging(inputs, targets) if staging else (inputs, targets)

    return ReadAhead(read, steps=ahead, last=last, limit_s=limit_s, reading=reading)


class Staging:
    """Copies samples to the current CUDA device, from pinned memory where it `pins`, on a stream beside those of the step.

    Made on the thread that chose the device, used on the one that reads. `cuda` is torch.cuda unless a test
    brings its own.
    """

    def __init__(self, cuda: Any = torch.cuda, *, pins: bool = True):
        self._cuda, self._pins = cuda, pins
        self._device = cuda.current_device()
        self._stream = cuda.Stream()

    def __call__(self, inputs: Sequence[Sequence[torch.Tensor]], targets: Sequence[torch.Tensor]) -> Samples:
        """The samples on the device, copied when this returns: whoever uses them needs to wait for nothing.

        Only this thread waits. The memory is the stream's, which takes it back when the samples are dropped:
        the engine does that between steps, when nothing runs that reads them.
        """
        pinned = [
            [t.pin_memory() if self._pins else t for t in (*each, target)]
            for each, target in zip(inputs, targets, strict=True)
        ]
        with self._cuda.device(self._device), self._cuda.stream(self._stream):
            moved = [[t.to(f"cuda:{self._device}", non_blocking=True) for t in each] for each in pinned]
            self._stream.synchronize()
        return [tuple(each[:-1]) for each in moved], [each[-1] for each in moved]
