"""When a plan's instructions run, as workers count them: by their place in the program of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from worker.model.update_costs import MeshUpdate


def planned_seconds(
    plan: Mapping[str, Any], stage_names: Sequence[str], update: Sequence[MeshUpdate] = ()
) -> dict[str, list[float]]:
    """Planned seconds of every instruction of every mesh's program; those of REDUCE (but for its
    buckets) and STEP are in `update`.

    Slots name their stage, instructions count it: `stage_names` are in that order.
    """
    behind = {
        (one.mesh, op): s for one in update for op, s in (("REDUCE", one.reduce_s), ("STEP", one.step_s))
    }
    slots = _slots_of_instructions(plan, stage_names)
    return {
        mesh: [
            behind.get((mesh, i["op"]), 0.0) if s is None else s["end_s"] - s["start_s"]
            for i, s in zip(plan["programs"][mesh], found, strict=True)
        ]
        for mesh, found in slots.items()
    }


def planned_starts(plan: Mapping[str, Any], stage_names: Sequence[str]) -> dict[str, list[float | None]]:
    """When every instruction of every mesh's program starts by the plan (None for REDUCE and STEP)."""
    slots = _slots_of_instructions(plan, stage_names)
    return {mesh: [None if s is None else s["start_s"] for s in found] for mesh, found in slots.items()}


def _slots_of_instructions(
    plan: Mapping[str, Any], stage_names: Sequence[str]
) -> dict[str, list[Mapping[str, Any] | None]]:
    number = {name: i for i, name in enumerate(stage_names)}
    planned: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for s in plan["slots"]:  # those of buckets have one key a stage: they come in the order of their lane
        key = (s["mesh"], s["action"], number[s["stage"]], s["microbatch"], s.get("edge"))
        planned.setdefault(key, []).append(s)
    for slots in planned.values():
        slots.reverse()
    return {
        mesh: [
            _next(planned.get((mesh, i["op"], i["stage"], i["microbatch"], i["edge"]))) for i in instructions
        ]
        for mesh, instructions in plan["programs"].items()
    }


def _next(slots: list[Mapping[str, Any]] | None) -> Mapping[str, Any] | None:
    return slots.pop() if slots else None
