"""Measures one step from its workers' results: report, timeline, accelerator usage and loss-scale state.

Pure: values in, values out; no Ray, no transports, no torch. The lanes of the engine (worker/engine/lanes) time each
slot; here the slots of all workers are brought to the driver's clock by offsets with a stated uncertainty
(Cristian 1989).
Idle time of a mesh is: before its first action (fill), behind its last until all meshes have ended (drain), within it
while a transfer of its own runs (exposed transfer) or none does (waits), and behind the makespan what is neither
REDUCE nor STEP (between steps).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.actor.step_result import StepLengths, WorkerStep
from worker.contract.failures import AttemptFailure
from worker.contract.program import FINAL_OPS, SEND_OPS, MeasuredSlot
from worker.contract.reasons import Reason
from worker.contract.timeline import Interval, TimelineSummary, merge_intervals, overlap_s, summarise


def mean_metrics(results: Sequence[WorkerStep]) -> dict[str, float]:
    """The mean of each metric over microbatches and workers, as the loss is.

    Raises AttemptFailure USER_CODE_RAISED where workers have metrics of different names.
    """
    counted = [result for result in results if result.losses]
    names = metric_names([result.metrics for result in counted if not _is_left_out(result)])
    number = sum(len(result.losses) for result in counted)
    return {name: sum(sum(result.metrics.get(name, ())) for result in counted) / number for name in names}


def _is_left_out(result: WorkerStep) -> bool:
    """True if the loss was not called, since no microbatch of this worker has a target."""
    return result.without_targets == len(result.losses)


def metric_names(metrics_of: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the metrics of all workers; raises AttemptFailure USER_CODE_RAISED where they differ."""
    for metrics in metrics_of[1:]:
        if metrics.keys() != metrics_of[0].keys():
            names = [", ".join(sorted(entry)) or "none" for entry in (metrics_of[0], metrics)]
            raise AttemptFailure(
                Reason.USER_CODE_RAISED,
                f"the loss returned the metrics {names[0]} on one worker and {names[1]} on another: return the same "
                "names every time",
            )
    return list(metrics_of[0]) if metrics_of else []


@dataclass(frozen=True)
class StepScaling:
    """`loss_scale` of the step, None but in fp16; `overflowed`: gradients did so in fp16, and the scale is lowered;
    `not_finite`: the update was left out as training.non_finite says."""

    loss_scale: float | None
    overflowed: bool
    not_finite: bool

    def overflow_message(self, step: int) -> str:
        """The event of a step that overflowed."""
        return (
            f"step {step}: gradients overflowed in fp16 with loss scale {self.loss_scale:g}; no update, and the next "
            "step scales by less"
        )


def step_scaling(results: Sequence[WorkerStep]) -> StepScaling:
    """The scaling state on which all workers agree; a mesh without parameters has none."""
    overflowed = any(result.overflowed for result in results)
    scales = (result.loss_scale for result in results if result.loss_scale is not None)
    skipped = any(result.skipped for result in results)
    return StepScaling(next(scales, None), overflowed, skipped and not overflowed)


@dataclass(frozen=True)
class ClockOffset:
    """Remote clock minus local clock, in seconds; the truth lies within ± `uncertainty_s`."""

    offset_s: float
    uncertainty_s: float


def estimate_clock_offset(
    remote_now: Callable[[], float], rounds: int = 15, local_now: Callable[[], float] = time.monotonic
) -> ClockOffset:
    """Read the remote clock `rounds` times and take the fastest answer (Cristian 1989): the remote reading was taken
    within that round trip, so half of it bounds the error."""
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; ask the clock at least once")
    best: ClockOffset | None = None
    for _ in range(rounds):
        asked = local_now()
        remote = remote_now()
        answered = local_now()
        uncertainty = (answered - asked) / 2
        if best is None or uncertainty < best.uncertainty_s:
            best = ClockOffset(remote - (asked + answered) / 2, uncertainty)
    return best


def to_driver_clock(slots: Sequence[MeasuredSlot], offset: ClockOffset) -> list[MeasuredSlot]:
    """Slots of a worker on the clock of the process that estimated `offset` of that worker."""
    if offset.offset_s == 0.0:
        return list(slots)
    return [slot.at(slot.start_s - offset.offset_s, slot.end_s - offset.offset_s) for slot in slots]


def align_transfers(slots_of: Mapping[str, Sequence[MeasuredSlot]]) -> dict[str, list[MeasuredSlot]]:
    """Give both halves of each transfer the same times: from when both ends were ready to when the
    receiver had the tensor. `slots_of`: slots by mesh, on one clock. A half that waits for the other end
    is not a running transfer; a transfer with one half only keeps its times."""
    sent: dict[tuple, MeasuredSlot] = {}
    received: dict[tuple, MeasuredSlot] = {}
    for slots in slots_of.values():
        for slot in slots:
            if slot.edge is not None:
                halves = sent if slot.action in SEND_OPS else received
                halves[slot.edge, slot.microbatch, slot.action[-1]] = slot

    def aligned(slot: MeasuredSlot) -> MeasuredSlot:
        if slot.edge is None:
            return slot
        key = (slot.edge, slot.microbatch, slot.action[-1])
        if key not in sent or key not in received:
            return slot
        end = received[key].end_s
        return slot.at(min(max(sent[key].start_s, received[key].start_s), end), end)

    return {mesh: [aligned(slot) for slot in slots] for mesh, slots in slots_of.items()}


IDLE_REASONS = ("fill", "drain", "exposed transfer", "waits", "between steps")


@dataclass(frozen=True)
class StepUsage:
    """Seconds of all accelerators together: of the whole step, and idle ones by reason. `tokens` None: not known."""

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
    """The usage of a step by its slots; all `workers` of a mesh count as the one that lends it its slots."""
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
            "between steps": behind[1] - behind[0] - overlap_s([behind], merge_intervals(updates[name])),
        }
        for reason, seconds in here.items():
            idle_s[reason] += seconds * workers[name]
    return StepUsage(
        accelerator_s=max(step_s, summary.makespan_s) * sum(workers[name] for name in summary.meshes),
        idle_s=idle_s,
        samples=samples,
        tokens=tokens,
    )


@dataclass(frozen=True)
class StepMeasurement:
    """`report` is a `steps` item, `timeline` a `timelines` item of a report to the control plane; `usage`, `scaling` and
    `gpus`, by mesh and worker and only where they were read after this step, are for Prometheus. `differences`:
    forwards that came out otherwise when they were computed again. `without_targets`: nothing in the step was a target.
    `ignored_targets`: the fewest and the most ignored targets of a microbatch of a worker, where they weigh alike.
    `lengths`: the lengths of the step over the workers of a mesh, where samples have unequal ones."""

    report: dict[str, Any]
    timeline: dict[str, Any]
    usage: StepUsage
    scaling: StepScaling
    gpus: Mapping[tuple[str, int], Any] = field(default_factory=dict)
    differences: Sequence[str] = ()
    without_targets: bool = False
    ignored_targets: tuple[int, int] = (0, 0)
    lengths: StepLengths | None = None


def measure_step(
    *,
    step: int,
    workers: Mapping[str, int],
    stage_names: Sequence[str],
    results: Sequence[WorkerStep],
    offsets: Sequence[ClockOffset],
    step_s: float,
    clock: tuple[float, float],
    samples: int = 0,
) -> StepMeasurement:
    """The measurement of one step from the results of all workers.

    `workers` has the size of each mesh; `results` and `offsets` come mesh by mesh in the same order, the workers of a
    mesh beside each other; worker 0 of a mesh lends it its slots. `clock` is one instant in Unix and in the driver's
    monotonic seconds.
    The loss (and each metric) is the mean over microbatches and workers, the peak of a mesh's memory that of its worker with
    the most; times are relative to the first slot's start.
    """
    ranks, first = {}, 0
    for mesh, size in workers.items():
        ranks[mesh] = range(first, first + size)
        first += size
    measured = {mesh: to_driver_clock(results[own[0]].slots, offsets[own[0]]) for mesh, own in ranks.items()}
    slots = [
        _slot_json(mesh, slot, stage_names)
        for mesh, mesh_slots in align_transfers(measured).items()
        for slot in mesh_slots
    ]
    start = min(slot["start_s"] for slot in slots)
    for slot in slots:
        slot["start_s"] -= start
        slot["end_s"] -= start
    summary = summarise(slots)
    losses = [loss for result in results for loss in result.losses]
    length = _first_known(result.tokens_per_sample for result in results)
    lengths = _step_lengths([[results[rank].lengths for rank in own] for own in ranks.values()])
    tokens = None if length is None else samples * length
    ignored = [count for result in results for count in result.ignored_targets] or [0]
    unix, monotonic = clock
    started_at = unix + (start - monotonic)
    return StepMeasurement(
        report={
            "step": step,
            "loss": sum(losses) / len(losses) if losses else None,
            "metrics": mean_metrics(results),
            "step_s": step_s,
            "makespan_s": summary.makespan_s,
            "bubble_ratio": summary.bubble_ratio,
            "exposed_transfer_s": summary.exposed_transfer_s,
            "overlap_ratio": summary.overlap_ratio,
            "grad_norm": _first_known(result.grad_norm for result in results),
            "learning_rate": _first_known(result.learning_rate for result in results),
            "started_at": started_at,
            "peak_memory_bytes": {
                mesh: max(results[rank].peak_memory_bytes for rank in own) for mesh, own in ranks.items()
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
            workers=workers,
            samples=samples,
            tokens=tokens if lengths is None else lengths.tokens,
        ),
        scaling=step_scaling(results),
        gpus={
            (mesh, worker): results[rank].gpu
            for mesh, own in ranks.items()
            for worker, rank in enumerate(own)
            if results[rank].gpu is not None
        },
        differences=[
            f"mesh {mesh}, worker {worker}: {difference}"
            for mesh, own in ranks.items()
            for worker, rank in enumerate(own)
            if (difference := results[rank].difference) is not None
        ],
        without_targets=bool(losses) and sum(result.without_targets for result in results) == len(losses),
        ignored_targets=(min(ignored), max(ignored)),
        lengths=lengths,
    )


def _step_lengths(of_meshes: Sequence[Sequence[StepLengths | None]]) -> StepLengths | None:
    """The lengths of a step, whose samples every mesh reads: its buckets, and the tokens of all workers of a mesh. Raises
    AttemptFailure DATA_FAILED where workers saw other lengths than others."""
    known = [[lengths for lengths in of_mesh if lengths is not None] for of_mesh in of_meshes]
    if not known[0]:
        return None
    sums = {(sum(one.tokens for one in of_mesh), *(one.buckets for one in of_mesh)) for of_mesh in known}
    buckets = known[0][0].buckets
    if len(sums) > 1 or any(one.buckets != buckets for of_mesh in known for one in of_mesh):
        raise AttemptFailure(
            Reason.DATA_FAILED,
            "workers read samples of other lengths than others: return the same sample for an index and step everywhere",
        )
    return StepLengths(
        buckets,
        sum(one.tokens for one in known[0]),
        sum(one.padded_tokens for one in known[0]),
        known[0][0].later,
    )


def _first_known(values: Iterable[float | None]) -> float | None:
    """A value that all workers agree on; a mesh without trained parameters may have None."""
    return next((value for value in values if value is not None), None)


def _slot_json(mesh: str, slot: Any, stage_names: Sequence[str]) -> dict[str, Any]:
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
