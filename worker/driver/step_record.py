"""From what the workers measured in one step to what is reported: loss, times, one timeline.

Pure: values in, values out. Times of all workers are brought to the driver's clock here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.driver.metric_values import mean_metrics
from worker.driver.scaling import StepScaling, step_scaling
from worker.driver.timeline import summarise
from worker.driver.timing import ClockOffset, rendezvous_times, to_driver_clock
from worker.driver.usage import StepUsage, step_usage
from worker.step_values import WorkerStep


@dataclass(frozen=True)
class StepRecord:
    """`report` is a `steps` item, `timeline` a `timelines` item of a report to the control plane; `usage`, `scaling` and
    `gpus`, by mesh and worker and only where they were read after this step, are for Prometheus."""

    report: dict[str, Any]
    timeline: dict[str, Any]
    usage: StepUsage
    scaling: StepScaling
    gpus: Mapping[tuple[str, int], Any] = field(default_factory=dict)


def record_step(
    *,
    step: int,
    meshes: Sequence[str],
    stage_names: Sequence[str],
    results: Sequence[WorkerStep],
    sizes: Sequence[int],
    offsets: Sequence[ClockOffset],
    step_s: float,
    clock: tuple[float, float],
    samples: int = 0,
) -> StepRecord:
    """Put one step together.

    `results` and `offsets` come mesh by mesh, the workers of a mesh (`sizes`) beside each other; worker 0 of a
    mesh lends it its slots. `clock` is one instant in Unix and in the driver's monotonic seconds.
    The loss (and each metric) is the mean over microbatches and workers, the peak of a mesh's memory that of its worker with
    the most; times are relative to the first slot's start.
    """
    firsts = [sum(sizes[:i]) for i in range(len(meshes))]
    measured = {
        mesh: to_driver_clock(results[first].slots, offsets[first])
        for mesh, first in zip(meshes, firsts, strict=True)
    }
    slots = [
        _slot(mesh, slot, stage_names)
        for mesh, mesh_slots in rendezvous_times(measured).items()
        for slot in mesh_slots
    ]
    start = min(slot["start_s"] for slot in slots)
    for slot in slots:
        slot["start_s"] -= start
        slot["end_s"] -= start
    summary = summarise(slots)
    losses = [loss for result in results for loss in result.losses]
    length = _first(result.tokens_per_sample for result in results)
    unix, monotonic = clock
    started_at = unix + (start - monotonic)
    return StepRecord(
        report={
            "step": step,
            "loss": sum(losses) / len(losses) if losses else None,
            "metrics": mean_metrics(results),
            "step_s": step_s,
            "makespan_s": summary.makespan_s,
            "bubble_ratio": summary.bubble_ratio,
            "exposed_transfer_s": summary.exposed_transfer_s,
            "overlap_ratio": summary.overlap_ratio,
            "grad_norm": _first(result.grad_norm for result in results),
            "learning_rate": _first(result.learning_rate for result in results),
            "started_at": started_at,
            "peak_memory_bytes": {
                mesh: max(result.peak_memory_bytes for result in results[first : first + size])
                for mesh, first, size in zip(meshes, firsts, sizes, strict=True)
            },
        },
        timeline={
            "step": step,
            "started_at": started_at,
            "uncertainty_s": max(offset.uncertainty_s for offset in offsets),
            "slots": slots,
        },
        usage=step_usage(
            slots,
            summary,
            step_s=step_s,
            workers=dict(zip(meshes, sizes, strict=True)),
            samples=samples,
            tokens=None if length is None else samples * length,
        ),
        scaling=step_scaling(results),
        gpus={
            (mesh, worker): result.gpu
            for mesh, first, size in zip(meshes, firsts, sizes, strict=True)
            for worker, result in enumerate(results[first : first + size])
            if result.gpu is not None
        },
    )


def _first(told: Iterable[float | None]) -> float | None:
    """What all workers agree on; a mesh without trained parameters may have none of it."""
    return next((value for value in told if value is not None), None)


def _slot(mesh: str, slot: Any, stage_names: Sequence[str]) -> dict[str, Any]:
    """DESIGN section 4's JSON of a slot."""
    out: dict[str, Any] = {
        "mesh": mesh,
        "lane": slot.lane,
        "action": slot.action,
        "stage": None if slot.stage is None else stage_names[slot.stage],
        "microbatch": slot.microbatch,
        "start_s": slot.start_s,
        "end_s": slot.end_s,
    }
    if slot.edge is not None:
        out |= {
            "edge": slot.edge,
            "peer_mesh": slot.peer_mesh,
            "peer_stage": None if slot.peer_stage is None else stage_names[slot.peer_stage],
        }
    return out
