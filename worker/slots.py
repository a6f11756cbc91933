"""A slot as it was measured: made by the engine, read by the driver. Light: no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MeasuredSlot:
    """One instruction as it ran; times are this process's time.monotonic() in seconds."""

    lane: str
    action: str
    stage: int | None
    microbatch: int | None
    edge: int | None
    peer_mesh: str | None
    peer_stage: int | None
    start_s: float
    end_s: float

    def at(self, start_s: float, end_s: float) -> MeasuredSlot:
        """The same at other times (dataclasses.replace takes four times as long, and steps have thousands)."""
        return MeasuredSlot(
            self.lane,
            self.action,
            self.stage,
            self.microbatch,
            self.edge,
            self.peer_mesh,
            self.peer_stage,
            start_s,
            end_s,
        )
