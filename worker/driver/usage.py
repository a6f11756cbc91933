"""What a step made of its accelerators' time, and what it trained on. Pure: slots in, seconds out.

Idle are accelerators whose compute lane runs nothing. Of a mesh: before its first action (fill), behind its last
until all meshes have ended (drain), within while a transfer of its own runs (exposed transfer) or none does (waits),
and behind the makespan what is neither REDUCE nor STEP (between steps: the host, the others' updates, reports).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from worker.driver.timeline import Interval, TimelineSummary, overlap, union
from worker.program import FINAL_OPS

IDLE_REASONS = ("fill", "drain", "exposed transfer", "waits", "between steps")


@dataclass(frozen=True)
class StepUsage:
    """Seconds of all accelerators together: the whole step, and what was idle by reason. `tokens` None: not known."""

    accelerator_s: float
    idle_s: Mapping[str, float]
    samples: int
    tokens: int | None = None


def step_usage(
    slots: Iterable[Mapping[str, Any]],
    summary: TimelineSummary,
    *,
    step_s: float,
    workers: Mapping[str, int],
    samples: int,
    tokens: int | None = None,
) -> StepUsage:
    """What a step of these slots used; a mesh's `workers` all count as the one that lends it its slots."""
    end_s = summary.start_s + summary.makespan_s
    behind = (end_s, max(end_s, summary.start_s + step_s))
    updates: dict[str, list[Interval]] = defaultdict(list)
    for slot in slots:
        if slot["action"] in FINAL_OPS:
            updates[slot["mesh"]].append((slot["start_s"], slot["end_s"]))
    idle_s = dict.fromkeys(IDLE_REASONS, 0.0)
    for name, mesh in summary.meshes.items():
        here = {
            "fill": mesh.first_s - summary.start_s,
            "drain": end_s - mesh.last_s,
            "exposed transfer": mesh.exposed_transfer_s,
            "waits": max(0.0, mesh.span_s - mesh.busy_s - mesh.exposed_transfer_s),
            "between steps": behind[1] - behind[0] - overlap([behind], union(updates[name])),
        }
        for reason, seconds in here.items():
            idle_s[reason] += seconds * workers[name]
    return StepUsage(
        accelerator_s=max(step_s, summary.makespan_s) * sum(workers[name] for name in summary.meshes),
        idle_s=idle_s,
        samples=samples,
        tokens=tokens,
    )
