"""The samples that a mesh's stages take, read ahead; nothing where they take none. Knows batches and what stages are called
with, no engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from worker.batches import Batches
from worker.data.ahead import ReadTooSlowError
from worker.data.staging import read_steps
from worker.failure import as_failure
from worker.model import StageModule
from worker.reasons import Reason

Samples = tuple[list[tuple[torch.Tensor, ...]], list[torch.Tensor] | None]


class StageReader:
    """`take(step)` has the inputs and targets of a step's microbatches for `stages`; see `read_steps`."""

    def __init__(
        self,
        stages: Mapping[int, StageModule],
        batches: Batches,
        *,
        device: str,
        ahead: int,
        last: int,
        limit_s: float,
    ):
        self._nothing = [()] * batches.microbatches
        self.has_output = any("output" in stage.outputs for stage in stages.values())
        inputs = any(name.startswith("input:") for stage in stages.values() for name in stage.inputs)
        self._reader = None
        if inputs or self.has_output:
            self._reader = read_steps(
                batches.microbatch,
                batches.microbatches,
                device=device,
                ahead=ahead,
                last=last,
                limit_s=limit_s,
            )

    def take(self, step: int) -> Samples:
        """Raises AttemptFailure DATA_FAILED."""
        if self._reader is None:
            return self._nothing, None
        try:
            return self._reader.take(step)
        except ReadTooSlowError as error:
            raise as_failure(error, Reason.DATA_FAILED) from None

    def close(self) -> None:
        """End the thread."""
        if self._reader is not None:
            self._reader.close()
