"""Whether checkpoints can be written beside training: whether a copy of each mesh's state fits beside its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from worker.driver.gang import Gang
from worker.driver.limits import Limits
from worker.driver.planning import PlannedJob
from worker.model.memory_plan import planned_peak_bytes
from worker.saving import SnapshotRoom


def why_no_copies(
    planned: PlannedJob, *, gang: Gang, limits: Limits, interrupted: Callable[[], None], device: str
) -> str | None:
    """Which mesh has no room for a copy of its state, with the numbers; None where all have.

    On CPU the copy is in the memory that is planned with, on CUDA in the host's.
    """
    on_node = [sum(other.node_id == one.node_id for other in gang.addresses) for one in gang.addresses]
    rooms: list[SnapshotRoom] = gang.call(
        [worker.snapshot_room.remote(sharing) for worker, sharing in zip(gang.workers, on_node, strict=True)],
        what="looking for room for copies of the state",
        limit_s=limits.prepare_s,
        interrupted=interrupted,
    )
    peaks = planned_peak_bytes(planned.spec, planned.plan)
    for address, room in zip(gang.addresses, rooms, strict=True):
        if room.bytes == 0:
            continue
        if device == "cuda":
            if room.host_bytes is not None and room.bytes > room.host_bytes:
                return (
                    f"a copy of mesh {address.mesh}'s state takes {room.bytes:,} bytes of its host, which offers "
                    f"{room.host_bytes:,}"
                )
            continue
        limit, peak = _limit_of(planned.spec, address.mesh), peaks.get(address.mesh, 0)
        if limit is not None and peak + room.bytes > limit:
            return (
                f"mesh {address.mesh} may hold {limit:,} bytes, its plan takes {peak:,}, and a copy of its state "
                f"{room.bytes:,}"
            )
    return None


def _limit_of(spec: Mapping[str, Any], mesh: str) -> int | None:
    return next(one.get("memory_bytes") for one in spec["meshes"] if one["name"] == mesh)
