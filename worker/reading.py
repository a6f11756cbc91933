"""The samples that a mesh's stages take, read ahead; nothing where they take none, and where they stand for checkpoints.
Knows batches and what stages are called with, no engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from worker.batches import Batches
from worker.data.ahead import ReadTooSlowError
from worker.data.staging import read_steps
from worker.data.stream import DataEndedError
from worker.failure import as_failure
from worker.model import StageModule
from worker.reasons import Reason

Samples = tuple[list[tuple[torch.Tensor, ...]], list[torch.Tensor] | None]

_START_S = 60.0
_PART = "data"  # of a checkpoint's state


class StageReader:
    """`take(step)` has the inputs and targets of a step's microbatches for `stages`; see `read_steps`."""

    def __init__(
        self,
        stages: Mapping[int, StageModule],
        batches: Batches,
        *,
        device: str,
        last: int,
        limit_s: float,
    ):
        self._batches, self._resumed_at = batches, None
        self._nothing = [()] * batches.microbatches
        self.has_output = any("output" in stage.outputs for stage in stages.values())
        inputs = any(name.startswith("input:") for stage in stages.values() for name in stage.inputs)
        self._reader = None
        if inputs or self.has_output:
            loader = batches.data.loader
            limit_s = min(limit_s, loader.timeout_s) if loader.workers else limit_s
            self._first_limit_s = limit_s + _START_S + batches.data.skip_limit_s
            self._reader = read_steps(
                batches.microbatch,
                batches.microbatches,
                device=device,
                ahead=batches.ahead,
                last=last,
                limit_s=limit_s,
                reading=batches.reading,
                pinned=loader.pin_memory,
            )

    def take(self, step: int, *, first: bool = False) -> Samples:
        """Raises AttemptFailure DATA_FAILED. With `first` the next call has the same again, and there is time to begin:
        to start processes, and to come to the place where a resume goes on."""
        if self._reader is None:
            return self._nothing, None
        self._begin(step)
        try:
            return self._reader.take(step, keep=first, limit_s=self._first_limit_s if first else None)
        except ReadTooSlowError as error:
            raise as_failure(error, Reason.DATA_FAILED) from None

    def has(self, step: int) -> bool | None:
        """Whether there are samples for this step; raises as `take`. None where none are read."""
        if self._reader is None:
            return None
        try:
            self.take(step, first=True)
        except DataEndedError:
            return False
        return True

    def ready(self, step: int) -> None:
        """Have the samples of `step`, where they are read ahead, before anybody waits for this mesh."""
        if self._reader is not None and self._batches.ahead:
            self.has(step)

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint after `step` keeps, as a part of its own; nothing where no samples are read."""
        position = None if self._reader is None else self._batches.position(step + 1)
        return {} if position is None else {_PART: dict(position)}

    def load_state(self, step: int, state: Mapping[str, Any]) -> None:
        """Go on after `step`, of whose checkpoint this is the state. Raises AttemptFailure DATA_FAILED where the data
        is another."""
        if self._reader is None:
            return
        position = state.get(_PART)
        if position is not None and "samples" in position:
            self._batches.go_to(step + 1, position)
        else:
            self._resumed_at = (step + 1, position)  # on the way to the first sample: it may take long

    def _begin(self, step: int) -> None:
        resumed_at, self._resumed_at = self._resumed_at, None
        if resumed_at is not None and resumed_at[0] == step and resumed_at[1] is not None:
            self._batches.go_to(*resumed_at)

    def close(self) -> None:
        """End the thread, and processes."""
        self._batches.close()
        if self._reader is not None:
            self._reader.close()
