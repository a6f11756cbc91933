"""Instruction set of the engine: the program of one mesh, its JSON, and the measured slot of an instruction.

A program lists instructions in the order in which the host enqueues them; an instruction starts after its
predecessor on its lane and after the events that it waits for. The scheduler compiles to this module, the engine
runs it and returns MeasuredSlots, the driver reads those. Light on purpose: no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from worker.contract.codec import from_json, to_json

COMPUTE_LANE = "compute"
COMPUTE_OPS = ("F", "B", "I", "W")
SEND_OPS = ("SEND_F", "SEND_B")
RECEIVE_OPS = ("RECV_F", "RECV_B")
TRANSFER_OPS = SEND_OPS + RECEIVE_OPS
FINAL_OPS = ("REDUCE", "STEP")
OPS = COMPUTE_OPS + TRANSFER_OPS + FINAL_OPS


def send_lane(peer: str) -> str:
    """Name of the lane on which a mesh sends to mesh `peer`."""
    return f"send:{peer}"


def receive_lane(peer: str) -> str:
    """Name of the lane on which a mesh receives from mesh `peer`."""
    return f"recv:{peer}"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation on one lane of one mesh.

    `stage` is the index of the local stage (for a transfer: the stage of this mesh that
    makes or uses the tensor), `edge` the index of the edge (of a merged tensor: its first
    edge), `peer` the other mesh. `wait` and `record` number events of this mesh; an
    instruction starts after all events in `wait` and after its predecessor on its lane.
    """

    op: str
    lane: str
    stage: int | None = None
    microbatch: int | None = None
    edge: int | None = None
    peer: str | None = None
    wait: tuple[int, ...] = ()
    record: int | None = None

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"unknown op {self.op!r}: use one of {', '.join(OPS)}")

    def __str__(self) -> str:
        """torch's notation of an action, `2F0`; a transfer adds its peer and edge."""
        name = f"{'' if self.stage is None else self.stage}{self.op}"
        name += "" if self.microbatch is None else str(self.microbatch)
        return name if self.peer is None else f"{name}@{self.peer}/e{self.edge}"

    def to_json(self) -> dict[str, Any]:
        """The JSON object of DESIGN section 6."""
        return to_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Instruction:
        """Inverse of `to_json`; raises ValueError naming an unknown or missing field."""
        return from_json(cls, data, label="instruction")


Program = tuple[Instruction, ...]


def program_from_json(data: Iterable[Mapping[str, Any]]) -> Program:
    """The program of one mesh from its JSON list."""
    return tuple(Instruction.from_json(item) for item in data)


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
        """The slot at other times (dataclasses.replace takes four times as long, and steps have thousands)."""
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
