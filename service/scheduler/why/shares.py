"""A timeline in sums: what every mesh and every link did, and what idle lanes waited for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from service.scheduler.model.spec import PipelineSpec
from service.scheduler.why.gaps import TimedSlot, find_gaps
from service.scheduler.why.step import Link
from service.scheduler.why.values import LinkShare, MeshShare, Side
from worker.program import COMPUTE_OPS, TRANSFER_OPS


def side_of(spec: PipelineSpec, slots: Sequence[TimedSlot]) -> Side:
    """The sums of one timeline; REDUCE and STEP, which come behind the makespan, are left out."""
    timed = [slot for slot in slots if slot.action in COMPUTE_OPS + TRANSFER_OPS]
    if not timed:
        return Side(0.0, (), ())
    start_s, end_s = min(slot.start_s for slot in timed), max(slot.end_s for slot in timed)
    computed: dict[str, float] = defaultdict(float)
    carried: dict[Link, float] = defaultdict(float)
    exposed: dict[Link, float] = defaultdict(float)
    counted: Counter[Link] = Counter()
    for slot in timed:
        if slot.action in COMPUTE_OPS:
            computed[slot.mesh] += slot.end_s - slot.start_s
        elif slot.action.startswith("RECV"):  # both halves of a transfer have the same times
            link = (slot.lane.partition(":")[2], slot.mesh)
            carried[link] += slot.end_s - slot.start_s
            counted[link] += 1
    idle: dict[str, dict[str, float]] = {mesh.name: {} for mesh in spec.meshes}
    for gap in find_gaps(spec, timed, start_s=start_s, end_s=end_s):
        reasons = idle[gap.mesh]
        reasons[gap.reason.value] = reasons.get(gap.reason.value, 0.0) + gap.end_s - gap.start_s
        if gap.link is not None:
            exposed[gap.link] += gap.end_s - gap.start_s
    return Side(
        makespan_s=end_s - start_s,
        meshes=tuple(MeshShare(mesh.name, computed[mesh.name], idle[mesh.name]) for mesh in spec.meshes),
        links=tuple(
            LinkShare(*link, counted[link], carried[link], exposed[link]) for link in sorted(counted)
        ),
    )
