"""Programs played by a simulation of their own, event by event, with any durations: what workers would measure."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.programs.plan import Plan
from service.scheduler.why.explain import PlannedStep


@dataclass(frozen=True)
class RanSlot:
    """A measured slot."""

    mesh: str
    lane: str
    action: str
    stage: str | None
    microbatch: int | None
    edge: int | None
    start_s: float
    end_s: float


@dataclass(frozen=True)
class World:
    """How much longer than planned things take in it; `late_s` by mesh is what its host takes before each action."""

    meshes: Mapping[str, float] = field(default_factory=dict)
    stages: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[tuple[str, str], float] = field(default_factory=dict)
    late_s: Mapping[str, float] = field(default_factory=dict)
    noise: float = 0.0
    seed: int = 0


def run(spec: PipelineSpec, plan: Plan, world: World) -> list[RanSlot]:
    """The slots of one step of the plan's programs in that world. Noise is log-normal, of every slot by itself."""
    draw = random.Random(world.seed)
    length = {
        (slot.mesh, slot.action, slot.stage, slot.microbatch, slot.edge): slot.end_s - slot.start_s
        for slot in plan.slots
    }
    names = [stage.name for stage in spec.stages]
    lanes: dict[tuple[str, str], list[int]] = {}
    for mesh, program in plan.programs.items():
        for index, instruction in enumerate(program):
            if instruction["op"] not in ("REDUCE", "STEP"):
                lanes.setdefault((mesh, instruction["lane"]), []).append(index)
    done: dict[tuple[str, int], float] = {}
    free = dict.fromkeys(lanes, 0.0)
    found: list[RanSlot] = []

    def ready(mesh: str, lane: str) -> tuple[float, int] | None:
        """When the head of a lane may begin, and its index; None where that is not known yet."""
        if not lanes[mesh, lane]:
            return None
        index = lanes[mesh, lane][0]
        waits = [(mesh, event) for event in plan.programs[mesh][index]["wait"]]
        if any(event not in done for event in waits):
            return None
        return max([free[mesh, lane], *(done[event] for event in waits)]), index

    def finish(mesh: str, lane: str, index: int, start_s: float, end_s: float) -> None:
        instruction = plan.programs[mesh][index]
        lanes[mesh, lane].pop(0)
        free[mesh, lane] = end_s
        if instruction["record"] is not None:
            done[mesh, instruction["record"]] = end_s
        stage = None if instruction["stage"] is None else names[instruction["stage"]]
        found.append(
            RanSlot(
                mesh,
                lane,
                instruction["op"],
                stage,
                instruction["microbatch"],
                instruction["edge"],
                start_s,
                end_s,
            )
        )

    moved = True
    while moved:
        moved = False
        for mesh, lane in list(lanes):
            if (head := ready(mesh, lane)) is None:
                continue
            at_s, index = head
            instruction = plan.programs[mesh][index]
            stage = names[instruction["stage"]]
            planned_s = length[mesh, instruction["op"], stage, instruction["microbatch"], instruction["edge"]]
            shaken = draw.lognormvariate(0.0, world.noise) if world.noise else 1.0
            if lane == "compute":
                start_s = at_s + world.late_s.get(mesh, 0.0)
                by = world.meshes.get(mesh, 1.0) * world.stages.get(stage, 1.0)
                finish(mesh, lane, index, start_s, start_s + planned_s * by * shaken)
                moved = True
            elif lane.startswith("send:"):
                peer = instruction["peer"]
                other = ready(peer, f"recv:{mesh}")
                if other is None:
                    continue
                start_s = max(at_s, other[0])
                end_s = start_s + planned_s * world.links.get((mesh, peer), 1.0) * shaken
                finish(mesh, lane, index, start_s, end_s)
                finish(peer, f"recv:{mesh}", other[1], start_s, end_s)
                moved = True
    assert not any(lanes.values()), "the programs block each other"
    origin = min(slot.start_s for slot in found)
    return [replace(slot, start_s=slot.start_s - origin, end_s=slot.end_s - origin) for slot in found]


def makespan(slots: Sequence[Any]) -> float:
    return max(slot.end_s for slot in slots) - min(slot.start_s for slot in slots)


def planned_step(spec: PipelineSpec, plan: Plan, *, update_s: float = 0.0) -> PlannedStep:
    """A plan as it comes back from the store."""
    return PlannedStep(
        spec,
        plan.slots,
        json.loads(plan.model_dump_json())["programs"],
        plan.makespan_s,
        plan.lower_bound_s,
        update_s,
        [stage.name for stage in plan.stages if stage.recomputed],
    )
