"""A plan as a Chrome/Perfetto trace: a process a mesh, a thread a lane, an arrow for each transfer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from service.scheduler.views.flows import NANOSECOND, Arrows
from worker.buckets import REDUCE_LANE


def chrome_trace(slots: Iterable[Mapping[str, Any]]) -> str:
    """The trace of slots in their JSON form (planned or measured); times become microseconds."""
    events: list[dict[str, Any]] = []
    lanes: dict[tuple[str, str], tuple[int, int]] = {}
    meshes: dict[str, int] = {}
    arrows = Arrows()
    for slot in slots:
        mesh, lane, action = slot["mesh"], slot["lane"], slot["action"]
        if mesh not in meshes:
            meshes[mesh] = len(meshes)
            events.append(_metadata("process_name", meshes[mesh], 0, {"name": mesh}))
            events.append(_metadata("process_sort_index", meshes[mesh], 0, {"sort_index": meshes[mesh]}))
        process = meshes[mesh]
        if (mesh, lane) not in lanes:
            thread = sum(1 for other, _ in lanes if other == mesh)
            lanes[mesh, lane] = (process, thread)
            events.append(_metadata("thread_name", process, thread, {"name": lane}))
            events.append(_metadata("thread_sort_index", process, thread, {"sort_index": thread}))
        thread = lanes[mesh, lane][1]
        start = slot["start_s"] * 1e6
        length = max(NANOSECOND, slot["end_s"] * 1e6 - start)
        keys = ("stage", "microbatch", "peer_stage", "peer_mesh", "edge")
        stage, microbatch = slot.get("stage"), slot.get("microbatch")
        events.append(
            {
                "name": " ".join([action, *_whose(stage, microbatch)]),
                "cat": "transfer" if "_" in action else "reduce" if lane == REDUCE_LANE else "compute",
                "ph": "X",
                "pid": process,
                "tid": thread,
                "ts": start,
                "dur": length,
                "args": {key: slot[key] for key in keys if slot.get(key) is not None},
            }
        )
        arrows.add(
            "planned",
            mesh,
            action,
            slot.get("peer_mesh"),
            slot.get("edge"),
            microbatch,
            process=process,
            thread=thread,
            start=start,
            end=start + length,
        )
    events += arrows.events()
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n"


def _whose(stage: str | None, microbatch: int | None) -> list[str]:
    if stage is None:
        return []
    return [stage if microbatch is None else f"{stage}/{microbatch}"]


def _metadata(name: str, process: int, thread: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": dict(args)}
