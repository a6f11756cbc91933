"""What the actions of one mesh hand to each other within a step. Values only: no stages, lanes or transports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class Exchange:
    """What the actions of one mesh hand to each other within a step.

    Keys end with the microbatch. Every entry is made by one action and taken by one that the program
    orders after it, so no lock is needed. Tensors of `received*` lie in pooled buffers.
    """

    step: int = 0
    inputs: Sequence[tuple[torch.Tensor, ...]] = ()
    targets: Sequence[torch.Tensor] | None = None
    received: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    received_gradients: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    to_send: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    gradients_to_send: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    local: dict[tuple[int, str, int], torch.Tensor] = field(default_factory=dict)
    local_gradients: dict[tuple[int, str, int, int], torch.Tensor | None] = field(default_factory=dict)
    gradient_parts: dict[tuple[int, int], dict[int, torch.Tensor | None]] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    metrics: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    weights: torch.Tensor | None = None
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)

    def begin(
        self,
        step: int,
        inputs: Sequence[tuple[torch.Tensor, ...]],
        targets: Sequence[torch.Tensor] | None,
    ) -> None:
        """Forget the last step."""
        self.step, self.inputs, self.targets, self.weights = step, inputs, targets, None
        for left in (
            self.received,
            self.received_gradients,
            self.to_send,
            self.gradients_to_send,
            self.local,
            self.local_gradients,
            self.gradient_parts,
            self.losses,
            self.metrics,
            self.outputs,
        ):
            left.clear()

    def losses_in_order(self) -> list[float]:
        """One a microbatch; on CUDA the host waits, once for all."""
        return torch.stack([self.losses[m] for m in sorted(self.losses)]).tolist() if self.losses else []

    def outputs_in_order(self) -> list[torch.Tensor]:
        """One a microbatch."""
        return [self.outputs[m] for m in sorted(self.outputs)]

    def metrics_by_name(self) -> dict[str, list[float]]:
        """The metrics of the losses, one number a microbatch; on CUDA the host waits, once for all."""
        if not any(self.metrics.values()):
            return {}
        names = list(next(iter(self.metrics.values())))
        rows = torch.stack(
            [torch.stack([self.metrics[m][name] for name in names]) for m in sorted(self.metrics)]
        )
        return dict(zip(names, rows.T.tolist(), strict=True))
