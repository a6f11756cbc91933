"""What travels between two workers in one step, by checksums of both ends: of a pair a tensor, of
what is resharded its tiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from worker.agreement import checksum
from worker.engine.routes import Route
from worker.resharding_plan import Box, ReshardingPlan

Plans = Mapping[tuple[int, bool], ReshardingPlan]
"""By the first edge of a route, and whether it is the way back."""


@dataclass(frozen=True)
class Passage:
    """One transfer of one microbatch: of the tensor of one worker of each mesh, or of a tile (`box` of the whole)."""

    index: int
    source: int
    tensor: str
    meshes: tuple[str, str]
    backward: bool
    microbatch: int
    worker: int | None
    box: Box = ()

    def __str__(self) -> str:
        ops, ends = ("SEND_F", "RECV_F"), self.meshes
        if self.backward:
            ops, ends = ("SEND_B", "RECV_B"), ends[::-1]
        what = "gradient of " if self.backward else ""
        box = "".join(f"[{begin}:{end}]" for begin, end in self.box)
        return (
            f"{ops[0]} on {ends[0]} to {ops[1]} on {ends[1]} of microbatch {self.microbatch} "
            f"({what}{self.tensor!r} of stage {self.source}{f', its part {box}' if box else ''})"
        )


@dataclass(frozen=True)
class Passed:
    """A transfer to worker `taker`, and whether what was used is what was left to be sent."""

    transfer: Passage
    taker: str
    intact: bool

    def __str__(self) -> str:
        return str(self.transfer) + (f" as {self.taker} has it" if self.transfer.box else "")


def pieces(
    mesh: str, worker: int, plans: Plans, route: Route, backward: bool, microbatch: int, tensor: Tensor
) -> Iterator[tuple[Passage, str]]:
    """The transfers that `tensor` of a worker is an end of, with the checksums of what they move of it."""
    plan = plans.get((route.index, backward))
    ends = route.source_mesh, route.target_mesh
    what = (route.index, route.source, route.tensor, ends, backward, microbatch)
    if plan is None:
        yield Passage(*what, worker), checksum(tensor)
        return
    name = f"{mesh}/{worker}"
    own = plan.box(name)
    for tile, box in enumerate(plan.tiles):
        if plan.holds(name, tile) or plan.needs(name, tile):
            part = tensor[tuple(slice(b - at, e - at) for (b, e), (at, _) in zip(box, own, strict=True))]
            yield Passage(*what, None, box), checksum(part)
