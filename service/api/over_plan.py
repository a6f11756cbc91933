"""How long meshes computed and links carried in a job's last profiled step, beside what its plan promised.

Pure: slots in, seconds out. A transfer lasts from when both ends are there to when the first is done: the slot of an
end that came early holds its waiting as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.store.timelines import SlotRecord

COMPUTE = frozenset("FBIW")
Link = tuple[str, str]
"""The mesh that sends, the mesh that receives."""


@dataclass(frozen=True)
class Seconds:
    """Of one step: computing of each mesh, carrying of each directed link."""

    meshes: dict[str, float]
    links: dict[Link, float]


def seconds_of(slots: Iterable[SlotRecord]) -> Seconds:
    """What these slots, planned or measured, come to."""
    meshes: dict[str, float] = defaultdict(float)
    ends: dict[tuple[Link, str, int | None, int | None], list[SlotRecord]] = defaultdict(list)
    for slot in slots:
        if slot.action in COMPUTE:
            meshes[slot.mesh] += slot.end_s - slot.start_s
        elif slot.action.startswith(("SEND_", "RECV_")):
            way, _, peer = slot.lane.partition(":")
            link = (slot.mesh, peer) if way == "send" else (peer, slot.mesh)
            ends[link, slot.action[-1], slot.edge, slot.microbatch].append(slot)
    links: dict[Link, float] = defaultdict(float)
    for (link, *_), both in ends.items():
        if len(both) > 1:
            start, end = max(slot.start_s for slot in both), min(slot.end_s for slot in both)
            links[link] += max(0.0, end - start)
    return Seconds(dict(meshes), dict(links))


def bytes_of(slots: Iterable[SlotRecord], edges: Sequence[Mapping[str, Any]]) -> dict[Link, int]:
    """What each link carries in a step of these planned slots; `edges` are those of the spec, as JSON.

    A link one of whose transfers was planned in seconds, without a size, is left out.
    """
    sizes: dict[Link, int | None] = {}
    for slot in slots:
        if not slot.action.startswith("RECV_"):
            continue
        link = (slot.lane.partition(":")[2], slot.mesh)
        edge = edges[slot.edge] if slot.edge is not None and slot.edge < len(edges) else {}
        size = edge.get("forward_bytes" if slot.action == "RECV_F" else "backward_bytes")
        before = sizes.get(link, 0)
        sizes[link] = None if size is None or before is None else before + size
    return {link: size for link, size in sizes.items() if size is not None}
