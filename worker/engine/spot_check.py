"""Compares one forward of a training step with the same forward computed again, once in a run: `ForwardCheck`.

The comparison of the traced model with the model itself ends before the first step. Later, in a random step, what a random
stage makes of a random microbatch is kept; when its backward begins the stage runs again on the same arguments, plainly: as
traced, without compiled code and gradients. So it shows where an argument was used before it had come or was
overwritten before its backward, where compiled code goes wrong later, and where a module that runs as it is computes by
something that is neither argument nor buffer.
The run stays what it is: buffers and random generators come back, modules that run as they are run as copies, no other
worker is asked, the loss is not called. Tensors are compared when the step has ended, for which a CUDA device would have
to wait. Must not know programs, lanes or transports.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from worker.engine.forward import StageArguments, is_compiled, uncompiled
from worker.engine.recomputation.inputs import RecomputeInputs, UpdatedBuffers, save_recompute_inputs
from worker.model.opaque.call import OpaqueCall, copied_modules, opaque_calls, using_modules
from worker.model.parity import compare, tolerance_for
from worker.model.rng import derive_seed

log = logging.getLogger(__name__)

LATEST_STEPS = 1000
"""The check is at most so many steps behind the first one of a run."""


@dataclass(frozen=True)
class Spot:
    """The forward that is computed again."""

    step: int
    stage: int
    microbatch: int


def choose_spot(seed: int, first_step: int, last_step: int, stages: int, microbatches: int) -> Spot | None:
    """A random forward of the steps behind `first_step`, the same for the same arguments; None where no step follows."""
    steps = min(last_step - first_step, LATEST_STEPS)
    if steps < 1:
        return None
    draw = random.Random(derive_seed(seed, "spot check", first_step))
    return Spot(first_step + draw.randint(1, steps), draw.randrange(stages), draw.randrange(microbatches))


class ForwardCheck:
    """The forward of `spot`: call `begin` before it, `keep` behind it, `run_again` when its backward begins, and
    `difference` when the step has ended. `names` are those of the outputs."""

    def __init__(
        self,
        spot: Spot,
        module: nn.Module,
        names: Sequence[str],
        *,
        autocast: torch.dtype | None,
        device: torch.device,
    ):
        self.microbatch = spot.microbatch
        self._spot, self._module, self._names = spot, module, names
        self._allowed = tolerance_for(module, autocast, device.type).values
        self._inputs: RecomputeInputs | None = None
        self._modules: list[nn.Module] = []
        self._made: list[torch.Tensor] = []
        self._again: list[torch.Tensor] = []
        self._overwritten = ""

    def begin(self, arguments: StageArguments, buffers: UpdatedBuffers) -> None:
        """Keep what the forward is about to see."""
        try:
            self._modules = copied_modules(self._calls)
        except Exception as error:  # such as a tensor with a graph behind it in an attribute
            log.info("%s is not computed again: a module cannot be copied: %s", self, error)
            return
        self._inputs = save_recompute_inputs(arguments, buffers)

    def keep(self, outputs: Sequence[torch.Tensor]) -> None:
        """Keep what the forward made."""
        if self._inputs is not None:
            self._made = [output.detach() for output in outputs]

    def run_again(
        self, buffers: UpdatedBuffers, run: Callable[[StageArguments], Sequence[torch.Tensor]]
    ) -> None:
        """Have `run` compute the outputs of the kept arguments once more."""
        if self._inputs is None:
            return
        inputs, self._inputs = self._inputs, None
        try:
            inputs.check_unchanged()
        except RuntimeError:
            self._overwritten = "an argument of it was overwritten before its backward"
            return
        modules = using_modules(self._calls, self._modules)
        with buffers.restored_to(inputs), uncompiled(self._module), modules:
            self._again = list(run(inputs.arguments))

    def difference(self) -> str | None:
        """A message on the first output that differs, with a likely reason; None where all are equal."""
        if self._overwritten:
            return f"{self}: {self._overwritten}"
        if not self._again:
            return None
        for name, made, again in zip(self._names, self._made, self._again, strict=True):
            distance = compare(again, made, self._allowed)
            if not distance.is_rounding:
                return f"{self}: output {name!r} differs by {distance}; {self._likely_reason()}"
        log.info("%s: computed again, and equal", self)
        return None

    @property
    def _calls(self) -> list[OpaqueCall]:
        return opaque_calls(self._module)

    def _likely_reason(self) -> str:
        if is_compiled(self._module):
            return "it runs compiled, and as traced it computes something else; training.compile: false avoids it"
        if calls := self._calls:
            return (
                f"it has {calls[0]}: let that compute by its arguments and by buffers (register_buffer) alone"
            )
        return (
            "the same operations on the same tensors gave other numbers: look at the memory and the accelerator of that "
            "worker; `slotline verify` compares every action of a job"
        )

    def __str__(self) -> str:
        return f"the forward of stage s{self._spot.stage}, microbatch {self._spot.microbatch}, of step {self._spot.step}"
