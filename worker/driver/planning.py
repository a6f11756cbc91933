"""Planner: has the control plane plan with the measured costs of a gang, and checks that the model fits the plan.
Replanner: has it look for a shorter order of the running plan, and swaps the programs of all workers between two steps.
StepPlans: has it plan single steps ahead by the buckets of their microbatches, where samples have unequal lengths.

Measuring is done by GangMeasurements (worker/driver/benchmarks.py), planning by the control plane. A question is asked
from a thread that ends with its answer: training does not wait for a search.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import httpx

from worker.actor.step_result import LENGTHS_AHEAD, PreparedProgram, StepLengths
from worker.benchmark.plan_request import plan_request
from worker.benchmark.slowdowns import LinkWatch, MeshWatch, SlotWatch
from worker.contract.failures import AttemptFailure, OutOfMemoryFailure
from worker.contract.job import Job, microbatch_counts
from worker.contract.planned import (
    MeshProgram,
    PlannedJob,
    corrected_activation_factor,
    parse_planned_job,
    planned_peak_bytes,
    static_bytes_by_mesh,
)
from worker.contract.profile import LayerProfile
from worker.contract.reasons import Reason
from worker.driver.benchmarks import GangMeasurements
from worker.driver.control_plane_client import ControlPlaneClient, Refused
from worker.driver.gang.gang import Gang, PerWorker
from worker.driver.gang.phases import Phase
from worker.driver.metrics import DriverMetrics
from worker.driver.reporter import LaunchPhases, Reporter

log = logging.getLogger(__name__)


class Planner:
    """Measures the costs of one attempt's job on its gang, and has the control plane plan with them."""

    def __init__(
        self,
        job: Job,
        measurements: GangMeasurements,
        *,
        control: ControlPlaneClient,
        reporter: Reporter,
        launch: LaunchPhases | None = None,
    ):
        self._job, self._measurements, self._launch = job, measurements, launch
        self._control, self._reporter = control, reporter
        self.profiles: list[LayerProfile | None] = []  # of each worker, once it is planned
        self._planned: PlannedJob | None = None
        self.answer: Mapping[str, Any] = {}
        """The plan as the control plane answered it."""

    def plan(self) -> PlannedJob:
        """Profile the layers, or take the cached profiles, and have the control plane plan.

        Raises AttemptFailure PLAN_INFEASIBLE when there is no plan, PLANNING_TIMEOUT when none was made in time,
        START_TIMEOUT when a worker is too slow.
        """
        measurements = self._measurements
        measurements.prepare()
        request = plan_request(self._job, measurements)
        if self._launch is not None:
            self._launch.end_phase("profile")
        self._planned = planned = self._ask_and_trace(request)
        self.profiles = [measurements.profiles.get(own[planned.microbatches]) for own in measurements.keys]
        self._check_model_signature(planned)
        self._check_batch_sharding(planned)
        self._reporter.event(
            "planned",
            f"{planned.plan['chosen']}{planned.provenance}: {planned.microbatches} microbatches, "
            f"{len(planned.stage_starts)} stages, "
            f"makespan {planned.plan['makespan_s']:.4g} s, step {planned.step_s:.4g} s, "
            f"bubble {planned.plan['bubble_ratio']:.1%}, stages begin at {', '.join(planned.stage_starts)}"
            + (
                f"; actions take {planned.slowdown:.2f} times as long as alone: workers share processor cores"
                if planned.slowdown > 1
                else ""
            )
            + "".join(f"; {note}" for note in planned.notes),
        )
        return planned

    def watches(self, planned: PlannedJob) -> list[SlotWatch]:
        """The watches over meshes, and over the links that were planned with: those of a saved plan may be another
        cluster's, and of unequal lengths the plan knows the longest only."""
        meshes = MeshWatch(self._measurements.report_pace)
        if planned.saved_plan is not None or self._job.data.lengths is not None:
            return [meshes]
        return [meshes, LinkWatch(planned.plan["slots"], self._measurements.link_is_stale)]

    def _check_model_signature(self, planned: PlannedJob) -> None:
        """Refuse a saved plan that was made for another model than was traced here: its measurements may be older than the
        model's code."""
        sizes, tensors = self._job.dp_sizes, self._job.tensors
        wanted = planned.model_signatures.get(sizes[0])
        if wanted is None:
            return
        whole = (sizes[0], 1) in zip(sizes, tensors, strict=True)  # layers were measured with all parameters
        signature = self._measurements.call_first(
            "model_signature", whole, what="comparing the model with that of its plan"
        )
        if (different := signature.difference(wanted)) is not None:
            raise AttemptFailure(
                Reason.PLAN_INFEASIBLE,
                f"the plan {planned.saved_plan!r} cannot be used: it was made for another model: {different}; make it anew "
                "(slotline plan job.yaml --name ...), or submit the job without one",
            )

    def _check_batch_sharding(self, planned: PlannedJob) -> None:
        """Check that parts of a batch-sharded tensor mean the same in heterogeneous meshes."""
        if not self._job.heterogeneous:
            return
        workers_of_stage = [self._job.dp_sizes[int(mesh[1:])] for mesh in planned.mesh_of_stage]
        self._measurements.call_first(
            "check_batch_sharding",
            planned.stage_starts,
            workers_of_stage,
            what="comparing the batch-sharded tensors of heterogeneous meshes",
        )

    def correct(self, failure: OutOfMemoryFailure) -> None:
        """Store a larger activation factor after an attempt that ran out of memory, so that the next one plans with it."""
        if self._planned is None:
            return
        planned = planned_peak_bytes(self._planned.spec, self._planned.plan)
        factor = corrected_activation_factor(
            max(profile.activation_factor for profile in self._measurements.profiles.values()),
            planned_bytes=planned.get(failure.mesh, 0),
            static_bytes=static_bytes_by_mesh(self._planned.spec).get(failure.mesh, 0),
            seen_bytes=failure.seen_bytes,
        )
        for key, profile in self._measurements.profiles.items():
            self._control.store_profile(key, replace(profile, activation_factor=factor).to_json())
        self._reporter.event(
            "memory_corrected", f"the next plan takes {factor:.3g} times the activations that were profiled"
        )

    def _ask_and_trace(self, request: Mapping[str, Any]) -> PlannedJob:
        """Have the control plane plan, and the model traced for the plan's number of microbatches: meanwhile, where the job
        has one number."""
        counts = microbatch_counts(self._job)
        if len(counts) > 1:
            planned = self._ask(request)
            self._measurements.trace(planned.microbatches)
            return planned
        answer: Future[PlannedJob] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._ask(request))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=ask, name="slotline-plan", daemon=True).start()
        self._measurements.trace(counts[0])
        return answer.result()

    def _ask(self, request: Mapping[str, Any]) -> PlannedJob:
        try:
            answer = self._control.plan(request)
        except Refused as refused:
            if refused.final:
                raise
            raise planning_failure(refused) from None
        self.answer = answer
        return parse_planned_job(answer)


def planning_failure(refused: Refused, what: str = "") -> AttemptFailure:
    """The failure of an attempt for which the control plane made no plan; `what` stands before its message."""
    timed_out = refused.code == Reason.PLANNING_TIMEOUT
    return AttemptFailure(
        Reason.PLANNING_TIMEOUT if timed_out else Reason.PLAN_INFEASIBLE, what + refused.detail
    )


PROFILED_STEPS = 9
"""Warm profiled steps of the running plan before a shorter one is asked for: those that calibrate it."""
STEPS_BETWEEN_SWAPS = 50
BACK_OFF = 4
"""Times as many steps lie between a swap that was undone, or could not be made, and the next question as before it."""
JUDGED_STEPS = 20
"""Steps before and after a swap, whose median makespans say what it brought."""
BROUGHT_SHARE = 0.5
"""Of its promise, below which a swap is undone."""


@dataclass(frozen=True)
class BroughtLess:
    """The seconds of a step's makespan that a swap promised, and those that it brought."""

    promised_s: float
    brought_s: float


class SwapHistory:
    """Says when to ask for a shorter plan, and whether the last one is worth keeping, from the makespans of steps.

    A plan is asked for after PROFILED_STEPS warm profiled steps by the running one, the first of which does not count, and
    STEPS_BETWEEN_SWAPS after the last swap. Each swap that was undone, as the measured costs foretold too little, or that
    could not be made multiplies this distance by BACK_OFF.
    """

    def __init__(self) -> None:
        self._makespans_s: deque[float] = deque(maxlen=JUDGED_STEPS)
        self._profiled, self._since_swap = -1, STEPS_BETWEEN_SWAPS
        self._distance = STEPS_BETWEEN_SWAPS
        self._promised: tuple[float, float] | None = None

    def observe(self, makespan_s: float, *, profiled: bool) -> None:
        """Take in a step."""
        self._makespans_s.append(makespan_s)
        self._since_swap += 1
        self._profiled += profiled

    @property
    def asks(self) -> bool:
        """True where a shorter plan may be asked for."""
        return (
            self._promised is None and self._profiled >= PROFILED_STEPS and self._since_swap >= self._distance
        )

    def asked(self) -> None:
        """A plan is being asked for: it is worth asking again when as many steps were profiled anew."""
        self._profiled = 0

    def back_off(self) -> None:
        """A swap came to nothing: the next plan is asked for later than after one that did its work."""
        self._distance *= BACK_OFF
        self._profiled, self._since_swap = -1, 0

    def swapped(self, promised_s: float) -> None:
        """Another plan runs from now on, which is to be shorter by `promised_s`."""
        self._promised = promised_s, median(self._makespans_s)
        self._makespans_s.clear()
        self._profiled, self._since_swap = -1, 0

    def judge(self) -> BroughtLess | None:
        """The verdict on the last swap, once, where it did not bring BROUGHT_SHARE of its promise; None where it did, or it
        is too early."""
        if self._promised is None or self._since_swap < JUDGED_STEPS:
            return None
        promised_s, before_s = self._promised
        self._promised = None
        brought_s = before_s - median(self._makespans_s)
        if brought_s >= BROUGHT_SHARE * promised_s:
            return None
        self.back_off()
        return BroughtLess(promised_s, brought_s)


def plan_obstacle(running: PlannedJob, found: PlannedJob) -> str | None:
    """Why the workers of `running` cannot go on with `found`; None where they can."""
    for name, now, then in (
        ("cut", running.stage_starts, found.stage_starts),
        ("placement", running.mesh_of_stage, found.mesh_of_stage),
        ("number of microbatches", running.microbatches, found.microbatches),
        ("recomputation", running.recomputed, found.recomputed),
    ):
        if now != then:
            return f"it has another {name}: {then}, and {now} runs"
    limits = {mesh["name"]: mesh.get("memory_bytes") for mesh in running.spec["meshes"]}
    for mesh, peak in planned_peak_bytes(found.spec, found.plan).items():
        if (limit := limits.get(mesh)) is not None and peak > limit:
            return f"mesh {mesh} would hold {peak:,} bytes, and may hold {limit:,}"
    return None


@dataclass(frozen=True)
class _Candidate:
    """A plan to be swapped in, as it was answered and read, with the makespans at measured costs of the plan that runs and
    of this one; `undone`: the verdict on the swap that it undoes."""

    answer: Mapping[str, Any]
    planned: PlannedJob
    running_s: float
    planned_s: float
    undone: BroughtLess | None = None


class Replanner:
    """Shortens the plan of a running attempt: asks, swaps, and undoes a swap that did not bring what it promised.

    `answer` is the plan that runs as the control plane answered it. `obstacle` says why a plan cannot be run beside what
    else the workers do.
    """

    def __init__(
        self,
        planned: PlannedJob,
        answer: Mapping[str, Any],
        *,
        gang: Gang,
        control: ControlPlaneClient,
        reporter: Reporter,
        metrics: DriverMetrics,
        obstacle: Callable[[PlannedJob], str | None] = lambda planned: None,
    ):
        self._planned, self._answer = planned, answer
        self._before = planned, answer
        self._gang, self._control, self._reporter, self._metrics = gang, control, reporter, metrics
        self._obstacle = obstacle
        self._history = SwapHistory()
        self._since_step: int | None = None
        self._asking: threading.Thread | None = None
        self._candidate: _Candidate | None = None

    @property
    def due(self) -> bool:
        """True where `before` would swap programs."""
        return self._candidate is not None

    def observe(self, step: Mapping[str, Any], *, profiled: bool, steps_left: int) -> None:
        """Take in the report of a step, and ask or undo where it is time."""
        self._history.observe(step["makespan_s"], profiled=profiled)
        if (verdict := self._history.judge()) is not None:
            planned, answer = self._before
            times = self._planned.plan["makespan_s"], planned.plan["makespan_s"]
            self._candidate = _Candidate(answer, planned, *times, undone=verdict)
        elif self._candidate is None and self._history.asks and not self._is_asking:
            self._history.asked()
            request = {"since_step": self._since_step, "seconds_left": steps_left * step["step_s"]}
            self._asking = threading.Thread(
                target=self._ask, args=(request,), name="slotline-replan", daemon=True
            )
            self._asking.start()

    def before(self, step: int) -> None:
        """Swap the programs where a plan is there; between two steps, `step` is the next one."""
        candidate, self._candidate = self._candidate, None
        if candidate is None:
            return
        refusal = plan_obstacle(self._planned, candidate.planned) or self._obstacle(candidate.planned)
        ready: Sequence[PreparedProgram] = ()
        if refusal is None:
            ready = self._prepare(candidate.planned)
            refused = [
                f"{self._gang.name(index)}: {one.refusal}"
                for index, one in enumerate(ready)
                if one.refusal is not None
            ]
            refusal = refused[0] if refused else None
        if refusal is not None:
            if ready:
                self._gang.call("drop_program", phase=Phase.SETUP, what="forgetting a program")
            self._history.back_off()
            which = "a shorter plan" if candidate.undone is None else "the plan before"
            self._reporter.event("plan_kept", f"step {step}: {which} could not be swapped in: {refusal}")
            return
        peaks = planned_peak_bytes(candidate.planned.spec, candidate.planned.plan)
        self._gang.call(
            "swap_program",
            PerWorker(peaks.get(address.mesh) for address in self._gang.addresses),
            phase=Phase.SETUP,
            what="swapping its program",
        )
        self._take(candidate, step, same_sums=all(one.same_sums for one in ready))

    def _prepare(self, planned: PlannedJob) -> Sequence[PreparedProgram]:
        programs = planned.programs()
        return self._gang.call(
            "prepare_program",
            PerWorker(programs[address.mesh] for address in self._gang.addresses),
            phase=Phase.SETUP,
            what="preparing a program",
        )

    def _take(self, candidate: _Candidate, step: int, *, same_sums: bool) -> None:
        """The workers run by this plan from `step` on."""
        sums = "to the bit" if same_sums else "to rounding: sums of gradients have another order"
        losses = f"losses are those of the plan before {sums}"
        if (undone := candidate.undone) is not None:
            self._reporter.event(
                "plan_undone",
                f"from step {step} on the plan before runs again: the swap was to shorten the makespan by "
                f"{undone.promised_s:.4g} s and brought {undone.brought_s:.4g} s; {losses}",
            )
        else:
            self._history.swapped(candidate.running_s - candidate.planned_s)
            self._reporter.event(
                "plan_swapped",
                f"from step {step} on: makespan {candidate.planned_s:.4g} s instead of {candidate.running_s:.4g} s at the "
                f"costs that were measured; {losses}",
            )
        self._before = self._planned, self._answer
        self._planned, self._answer, self._since_step = candidate.planned, candidate.answer, step
        self._gang.expect_steps(candidate.planned.step_s)
        self._metrics.set_plan(candidate.planned.plan, step_s=candidate.planned.step_s)
        self._metrics.set_planned_memory(planned_peak_bytes(candidate.planned.spec, candidate.planned.plan))
        self._reporter.running_plan(step, candidate.answer)

    @property
    def _is_asking(self) -> bool:
        return self._asking is not None and self._asking.is_alive()

    def _ask(self, request: Mapping[str, Any]) -> None:
        """Ask the control plane, and leave what it found for the next step that ends."""
        try:
            answer = self._control.replan(request)
            if (found := answer.get("found")) is None:
                log.info("the plan stays: %s", answer.get("why"))
                return
            planned = parse_planned_job(found)
            self._candidate = _Candidate(found, planned, answer["running_s"], answer["planned_s"])
        except (httpx.HTTPError, Refused) as error:  # it is asked again later
            log.info("no shorter plan was made: %s", error)
        except Exception:
            log.exception("the control plane's shorter plan cannot be read")


MOST_KEPT = 256
"""Plans of single steps that are kept, those last used: with few buckets like steps come again."""
MOST_ASKED = 4
"""Steps that are planned by one question, the last ones: where steps are shorter than planning, nearer ones would all be
late."""


@dataclass(frozen=True)
class StepPlan:
    """The plan of a single step as the control plane answered it, and the program of each mesh."""

    answer: Mapping[str, Any]
    planned: PlannedJob
    programs: Mapping[str, MeshProgram]


class StepPlans:
    """The plans of single steps by the buckets of their microbatches: asked for while earlier steps run, and kept.

    A step whose plan is not there when its turn comes runs by the job's own plan `planned`, as does one for which that is as
    short: it takes all microbatches for the largest, and its memory bounds that of any step. `answer` is that plan as the
    control plane answered it. `obstacle` says why a plan cannot be run beside what else the workers do.
    """

    def __init__(
        self,
        planned: PlannedJob,
        answer: Mapping[str, Any],
        *,
        control: ControlPlaneClient,
        reporter: Reporter,
        metrics: DriverMetrics,
        obstacle: Callable[[PlannedJob], str | None] = lambda planned: None,
    ):
        self._planned, self._answer = planned, answer
        self._control, self._reporter, self._metrics = control, reporter, metrics
        self._obstacle = obstacle
        self._buckets: dict[int, tuple[int, ...]] = {}  # of steps to come, by number
        self._known: dict[tuple[int, ...], StepPlan | None] = {}  # the last used at the end
        self._asking: threading.Thread | None = None
        self._ran: StepPlan | None = None
        self._reported: StepPlan | None = None
        self._stopped = self._used = False

    def take(self, step: int) -> StepPlan | None:
        """The plan by which all workers run this step; None: the job's own."""
        buckets = self._buckets.pop(step, None)
        if buckets is None or buckets not in self._known:
            return None
        plan = self._known[buckets] = self._known.pop(buckets)
        if plan is not None and not self._used:
            self._used = True
            self._reporter.event(
                "steps_planned",
                f"step {step} runs by a plan for the shapes of its microbatches: makespan "
                f"{plan.planned.plan['makespan_s']:.4g} s, and {self._planned.plan['makespan_s']:.4g} s where all are the "
                "largest; so do later steps whose plan is made in time and shorter. Losses are those of the job's plan to "
                "rounding: sums of gradients have another order; said once",
            )
        return plan

    def observe(self, step: int, lengths: StepLengths, *, steps_left: int) -> None:
        """Take in the lengths that a finished step tells, and ask for plans of steps to come."""
        if not lengths.later:
            self._stop(
                "the data set has no attribute `lengths`, by which steps are planned before they are read"
            )
        elif steps_left >= LENGTHS_AHEAD:
            self._buckets[step + LENGTHS_AHEAD] = lengths.later
        last_first = sorted(self._buckets.items(), reverse=True)
        wanted = dict.fromkeys(key for _, key in last_first if key not in self._known)
        if self._stopped or not wanted or (self._asking is not None and self._asking.is_alive()):
            return
        for key in list(self._known)[: max(0, len(self._known) - MOST_KEPT)]:
            del self._known[key]
        self._asking = threading.Thread(
            target=self._ask, args=(list(wanted)[:MOST_ASKED],), name="slotline-step-plans", daemon=True
        )
        self._asking.start()

    def ran(self, plan: StepPlan | None) -> None:
        """A step ran by this plan: metrics of steps are compared with it."""
        if plan is not self._ran:
            self._ran = plan
            planned = self._planned if plan is None else plan.planned
            self._metrics.set_plan(planned.plan, step_s=planned.step_s)

    def profiled(self, step: int) -> None:
        """The step that ran last is reported with its slots: its plan is the one to compare them with."""
        if self._ran is not self._reported:
            self._reported = self._ran
            self._reporter.running_plan(step, self._answer if self._ran is None else self._ran.answer)

    def _stop(self, why: str) -> None:
        if not self._stopped:
            self._stopped = True
            self._reporter.event(
                "plan_kept", f"steps go on by the plan for their largest microbatches: {why}"
            )

    def _ask(self, wanted: Sequence[tuple[int, ...]]) -> None:
        """Ask the control plane, and keep what it answered for the steps to come."""
        try:
            answers = self._control.plan_steps(wanted)
            for key, answer in zip(wanted, answers, strict=True):
                self._known[key] = None if answer is None else self._read(answer)
        except httpx.HTTPError as error:  # it is asked again behind the next step
            log.info("no plans of single steps were made: %s", error)
        except Refused as refused:
            self._stop(f"the control plane plans no single steps: {refused}")
        except Exception as error:
            log.exception("the control plane's plans of single steps cannot be read")
            self._stop(f"its plans of single steps cannot be read: {type(error).__name__}")

    def _read(self, answer: Mapping[str, Any]) -> StepPlan | None:
        whole = {**self._answer, **answer}
        planned = parse_planned_job(whole)
        if (why := plan_obstacle(self._planned, planned) or self._obstacle(planned)) is not None:
            log.info("a plan of a single step is not used: %s", why)
            return None
        return StepPlan(whole, planned, planned.programs())
