"""Measures the engine's own processor time per action, and the bytes of an accelerator that connections hold.

No layer profile contains these. All meshes run a pipeline of trivial stages over the job's transport. On CUDA it is the time
of the host, which enqueues.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from worker.contract.costs import EngineCosts
from worker.contract.planned import MeshProgram
from worker.contract.program import COMPUTE_LANE, Instruction, receive_lane, send_lane
from worker.engine.autograd import backward
from worker.engine.engine import Engine, engine_collectives
from worker.engine.forward import run_forward
from worker.engine.local_stages import LocalStages
from worker.engine.results import RunOptions, SlotLimits
from worker.machine.telemetry import bytes_open_to_torch
from worker.transport.base import Transport

MICROBATCHES = 16
_MEASURED_STEPS, _WARM_UP_STEPS = 7, 2
_SHAPE = (1, 16)
_SLOT_LIMIT_S = 90.0
"""Slots of microseconds that wait for a busy machine are no stall; a peer that hangs is named in the limit of the call."""


def measure_engine(transport: Transport, device: str = "cpu") -> EngineCosts:
    """Processor seconds for an F or B of this mesh with its transfers, beyond those of the operations: of all threads of
    this process, on CUDA of the one that enqueues; and the bytes of its device that its connections hold once they have
    carried tensors. Worker 0 of every mesh calls this at the same time, and `transport` is closed at the end.

    Raises an EngineError where a peer is missing or leaves.
    """
    meshes = transport.topology.meshes
    own = meshes.index(transport.mesh)
    program = MeshProgram(tuple(pipeline_program(own, meshes)), MICROBATCHES)
    stages = LocalStages(
        {own: _Stage(own, len(meshes)).to(device)},
        meshes,
        [_Edge(source) for source in range(len(meshes) - 1)],
    )
    options = RunOptions(seed=None, device=device, limits=SlotLimits(floor_s=_SLOT_LIMIT_S))
    engine = Engine(
        program,
        stages,
        engine_collectives(transport, program, meshes, {}, options),
        loss=lambda output, target: (output - target).sum(),
        options=options,
    )
    inputs = [(torch.zeros(_SHAPE),) for _ in range(MICROBATCHES)]
    targets = [torch.zeros(_SHAPE) for _ in range(MICROBATCHES)]
    taken = []
    open_bytes = bytes_open_to_torch(device)
    try:
        engine.connect()
        for step in range(_WARM_UP_STEPS + _MEASURED_STEPS):
            started = time.process_time()
            engine.run_step(step, inputs, targets)
            host_s = engine.host_s
            taken.append(time.process_time() - started if host_s is None else host_s)
        connection_bytes = open_bytes - bytes_open_to_torch(device)
    finally:
        engine.close()
    whole_s = statistics.median(taken[_WARM_UP_STEPS:]) / (2 * MICROBATCHES)
    return EngineCosts(max(0.0, whole_s - _operator_seconds(device) / 2), max(0, connection_bytes))


class _Edge:
    """From a stage to the next."""

    def __init__(self, source: int) -> None:
        self.source, self.target, self.tensor = source, source + 1, f"h{source}"
        self.shape, self.dtype, self.differentiable = _SHAPE, torch.float32, True


class _Stage(nn.Module):
    """Adds one parameter."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.inputs = ("input:0",) if index == 0 else (f"h{index - 1}",)
        self.outputs = ("output",) if index == count - 1 else (f"h{index}",)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


@dataclass(frozen=True)
class _Direction:
    """The instructions of forwards or of backwards, the edge and mesh that they receive from, and that they send to."""

    receive: str
    send: str
    source: tuple[int, str] | None
    target: tuple[int, str] | None


def pipeline_program(index: int, meshes: Sequence[str]) -> Iterator[Instruction]:
    """The program of stage `index`, one a mesh: all forwards, then all backwards, each with its transfers."""
    before = (index - 1, meshes[index - 1]) if index else None
    behind = (index, meshes[index + 1]) if index < len(meshes) - 1 else None
    events = iter(range(6 * MICROBATCHES))
    for op, moves in (
        ("F", _Direction("RECV_F", "SEND_F", before, behind)),
        ("B", _Direction("RECV_B", "SEND_B", behind, before)),
    ):
        for m in range(MICROBATCHES):
            place = {"stage": index, "microbatch": m}
            wait: tuple[int, ...] = ()
            if moves.source is not None:
                edge, peer = moves.source
                wait = (next(events),)
                lane = receive_lane(peer)
                yield Instruction(moves.receive, lane, **place, edge=edge, peer=peer, record=wait[0])
            done = next(events)
            yield Instruction(op, COMPUTE_LANE, **place, wait=wait, record=done)
            if moves.target is not None:
                edge, peer = moves.target
                lane = send_lane(peer)
                yield Instruction(moves.send, lane, **place, edge=edge, peer=peer, wait=(done,))


def _operator_seconds(device: str) -> float:
    """Thread seconds that a profile counts already: forward and backward of such a stage, alone."""
    stage, taken = _Stage(1, 2).to(device), []
    for _ in range(4 * MICROBATCHES):
        x = torch.zeros(_SHAPE, device=device, requires_grad=True)
        started = time.thread_time()
        roots = run_forward(
            stage, [x], device_type=torch.device(device).type, training=True, autocast_dtype=None
        ).roots(None)
        backward(roots, [torch.ones_like(root) for root in roots], [x])
        taken.append(time.thread_time() - started)
    return statistics.median(taken)
