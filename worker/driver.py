"""One attempt of a job, from its placement group to its last report: the entry point of a Ray job.

`python -m worker.driver`, with SLOTLINE_CONTROL_URL, SLOTLINE_ATTEMPT_ID and
SLOTLINE_ATTEMPT_TOKEN in the environment. Owns the order of things; what a worker does stands
in actor.py, what the control plane hears goes through report.py.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import ray

from worker.actor import Worker
from worker.failure import (
    CANCELLED_BY_USER,
    INTERNAL,
    PLAN_INFEASIBLE,
    START_TIMEOUT,
    AttemptFailure,
    as_failure,
)
from worker.links import Link, slowest
from worker.mesh import Gang, failure_of, own_node_address
from worker.metrics import JobMetrics
from worker.model.profile import LayerProfile, mean_profile
from worker.report import ControlPlane, Refused, Reporter
from worker.saving import Checkpoints
from worker.steps import StepRecord, record_step
from worker.timing import ClockOffset, estimate_offset
from worker.transport import Topology
from worker.transport.gloo import host_store

log = logging.getLogger(__name__)

CLOCK_ROUNDS = 9
CLOCK_EVERY_S = 30.0
CLOCK_LIMIT_S = 30.0
TIMELINE_EVERY_S = 1.0
FINAL_REPORT_LIMIT_S = 3_600.0
TERMINATED_REPORT_LIMIT_S = 10.0


@dataclass(frozen=True)
class Limits:
    """Every wait of an attempt, in seconds (`slot_factor` multiplies a slot's planned time)."""

    start_s: float = 120.0
    prepare_s: float = 600.0
    connect_s: float = 60.0
    slot_factor: float = 20.0
    slot_floor_s: float = 30.0
    step_floor_s: float = 120.0
    checkpoint_s: float = 600.0
    linger_s: float = 60.0

    @classmethod
    def from_environment(cls) -> Limits:
        """SLOTLINE_METRICS_LINGER_S, and for the others SLOTLINE_LIMIT_<NAME>."""
        values = {}
        for name, default in asdict(cls()).items():
            variable = "SLOTLINE_METRICS_LINGER_S" if name == "linger_s" else f"SLOTLINE_LIMIT_{name.upper()}"
            text = os.environ.get(variable, default)
            try:
                values[name] = float(text)
            except ValueError:
                raise ValueError(f"{variable} is {text!r}: give a number of seconds") from None
        return cls(**values)


class Cancelled(Exception):
    """The control plane asked to stop, or wants no more of this attempt."""


class Termination:
    """SIGTERM: the first one ends the attempt in order, by KeyboardInterrupt; later ones change nothing."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, *_: object) -> None:
        if not self.asked:
            self.asked = True
            raise KeyboardInterrupt


@dataclass
class Attempt:
    """What the driver knows of its attempt."""

    job_id: str
    number: int
    job: Mapping[str, Any]
    device: str
    limits: Limits
    resume: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)


def main() -> int:
    """Run the attempt named by the environment; 0 when it succeeded or was cancelled."""
    logging.basicConfig(
        level=os.environ.get("SLOTLINE_LOG_LEVEL", "INFO"),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    termination = Termination()
    termination.listen()
    limits = Limits.from_environment()
    control = ControlPlane(
        os.environ["SLOTLINE_CONTROL_URL"],
        os.environ["SLOTLINE_ATTEMPT_ID"],
        os.environ["SLOTLINE_ATTEMPT_TOKEN"],
    )
    try:
        given = control.attempt()
    except Refused as refused:
        log.error("the control plane wants nothing of this attempt: %s", refused.detail)
        return 1
    attempt = Attempt(
        given["job_id"], given["number"], given["job"], given["device"], limits, resume=given.get("resume")
    )
    reporter = Reporter(control).start()
    metrics = JobMetrics(attempt.job_id)
    state, reason, message = _outcome(attempt, control, reporter, metrics, termination)
    if state == "FAILED":
        log.error("attempt %s of job %s failed: %s: %s", attempt.number, attempt.job_id, reason, message)
    reporter.state(state, reason=reason, message=message)
    try:
        delivered = reporter.flush(TERMINATED_REPORT_LIMIT_S if termination.asked else FINAL_REPORT_LIMIT_S)
        reporter.close()  # a finished attempt has no heartbeat
        linger_s = limits.linger_s if delivered and not termination.asked else 0.0
        log.info("%s; metrics stay for %.0f s", state, linger_s)
        metrics.close(linger_s)
    except KeyboardInterrupt:
        log.info("asked to end before the metrics' time was over")
    control.close()
    return 0 if state in ("SUCCEEDED", "CANCELLED") else 1


def _outcome(
    attempt: Attempt,
    control: ControlPlane,
    reporter: Reporter,
    metrics: JobMetrics,
    termination: Termination,
) -> tuple[str, str | None, str | None]:
    """Train; the final state with its reason and message. Leaves no actor and no placement group."""
    try:
        address = os.environ.get("SLOTLINE_DRIVER_RAY_ADDRESS")  # None: the cluster that Ray finds
        ray.init(address, log_to_driver=True, logging_level=logging.WARNING)
        termination.listen()  # ray.init puts a handler of its own in place
        try:
            reporter.metrics_endpoint(_serve_metrics(metrics))
            _train(attempt, control, reporter, metrics)
        finally:
            ray.shutdown()
        return "SUCCEEDED", None, None
    except Cancelled:
        return "CANCELLED", CANCELLED_BY_USER, "cancelled on request"
    except (KeyboardInterrupt, SystemExit):
        return "CANCELLED", CANCELLED_BY_USER, "the driver was told to end (SIGTERM)"
    except Refused as refused:
        if refused.final:
            return "CANCELLED", CANCELLED_BY_USER, f"the control plane wants no more: {refused.detail}"
        log.exception("the control plane refused what the driver asked")
        return "FAILED", INTERNAL, f"the control plane answered {refused.status}: {refused.detail}"
    except AttemptFailure as failure:
        if failure.details:
            log.error("%s", failure.details)
        return "FAILED", failure.reason, failure.message
    except Exception as error:
        log.exception("the driver itself failed")
        return "FAILED", INTERNAL, as_failure(error, INTERNAL).message


def _train(attempt: Attempt, control: ControlPlane, reporter: Reporter, metrics: JobMetrics) -> None:
    resources, limits = attempt.job["resources"], attempt.limits
    topology = Topology(
        meshes=tuple(f"m{i}" for i in range(resources["meshes"])),
        workers_per_mesh=resources["workers_per_mesh"],
    )

    def check() -> None:
        if reporter.cancelled.is_set() or reporter.fenced.is_set():
            raise Cancelled

    gang = Gang(
        meshes=resources["meshes"],
        workers_per_mesh=resources["workers_per_mesh"],
        device=attempt.device,
        start_timeout_s=limits.start_s,
        workers_per_gpu=int(os.environ.get("SLOTLINE_WORKERS_PER_GPU", "1")),
    )
    with gang:
        gang.start(
            ray.remote(Worker),
            lambda mesh, worker: {
                "job": attempt.job,
                "mesh": mesh,
                "worker": worker,
                "device": attempt.device,
            },
            check,
        )
        reporter.event(
            "placed", f"{len(gang.workers)} workers on {len({a.node for a in gang.addresses})} node(s)"
        )
        checkpoints = Checkpoints(
            attempt.job.get("checkpoint"),
            attempt.job_id,
            gang=gang,
            reporter=reporter,
            limit_s=limits.checkpoint_s,
            interrupted=check,
        )
        checkpoints.try_place()
        begins = _plan(attempt, control, reporter, gang, check)
        metrics.set_plan(attempt.plan)
        store = host_store("0.0.0.0")
        _load(attempt, gang, topology, begins, (own_node_address(), store.port), check)
        done = checkpoints.restore((attempt.resume or {}).get("uri"))
        reporter.state("RUNNING")
        _step_loop(attempt, gang, reporter, metrics, checkpoints, done + 1, check)


def _plan(attempt: Attempt, control: ControlPlane, reporter: Reporter, gang: Gang, check: Any) -> list[str]:
    """Profile the layers, or take the cached profile, and have the control plane plan."""
    limits, workers = attempt.limits, gang.workers
    keys = gang.call(
        [w.prepare.remote(attempt.job["resources"]["workers_per_mesh"]) for w in workers],
        what="building the model and the data",
        limit_s=limits.prepare_s,
        late=START_TIMEOUT,
        interrupted=check,
    )
    profile = control.cached_profile(keys[0])
    if profile is None:
        profile = _profile(attempt, gang, check)
        control.store_profile(keys[0], profile)
        reporter.event("profiled", f"{len(profile['layers'])} layers measured on {gang.addresses[0].node}")
    link = _measure_links(attempt, gang, check)
    request = {
        "profile": profile,
        "network": {
            "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s if link else None,
            "latency_s": link.latency_s if link else 0.0,
        },
        "workers": [
            {"mesh": a.mesh, "worker": a.worker, "node": a.node, "device": a.device} for a in gang.addresses
        ],
    }
    try:
        answer = control.plan(request)
    except Refused as refused:
        if refused.final:
            raise
        raise AttemptFailure(PLAN_INFEASIBLE, refused.detail) from None
    attempt.plan, attempt.spec = answer["plan"], answer["spec"]
    reporter.event(
        "planned",
        f"{attempt.plan['chosen']}: makespan {attempt.plan['makespan_s']:.4g} s, "
        f"bubble {attempt.plan['bubble_ratio']:.1%}, stages begin at {', '.join(answer['begins'])}",
    )
    return answer["begins"]


def _profile(attempt: Attempt, gang: Gang, check: Any) -> dict[str, Any]:
    """The layers' costs: on CPU from all workers at once, which share cores as they will in training."""
    workers = gang.workers if attempt.device == "cpu" else gang.workers[:1]
    profiles = gang.call(
        [w.profile.remote() for w in workers],
        what="profiling the layers",
        limit_s=attempt.limits.prepare_s,
        late=START_TIMEOUT,
        interrupted=check,
    )
    return mean_profile([LayerProfile.from_json(profile) for profile in profiles]).to_json()


def _measure_links(attempt: Attempt, gang: Gang, check: Any) -> Link | None:
    """The slowest link between neighbouring meshes, on a rendezvous of its own; None for one mesh."""
    if len(gang.meshes) < 2:
        return None
    store = host_store("0.0.0.0")
    topology = Topology(meshes=tuple(mesh.name for mesh in gang.meshes))
    nodes = {address.mesh: address.node for address in gang.addresses if address.worker == 0}
    links = gang.call(
        [
            mesh.workers[0].measure_links.remote(
                topology=topology,
                store=(own_node_address(), store.port),
                host=nodes[mesh.name],
                connect_s=attempt.limits.connect_s,
            )
            for mesh in gang.meshes
        ],
        what="measuring the links",
        limit_s=2 * attempt.limits.connect_s,
        late=START_TIMEOUT,
        interrupted=check,
    )
    return slowest([link for link in links if link is not None])


def _load(
    attempt: Attempt,
    gang: Gang,
    topology: Topology,
    begins: Sequence[str],
    store: tuple[str, int],
    check: Any,
) -> None:
    """Give every worker its stages and program."""
    mesh_of_stage = [stage["mesh"] for stage in attempt.spec["stages"]]
    planned = planned_seconds(attempt.plan, [stage["name"] for stage in attempt.spec["stages"]])
    limits = asdict(attempt.limits)
    gang.call(
        [
            w.load.remote(
                begins=begins,
                mesh_of_stage=mesh_of_stage,
                program=attempt.plan["programs"][address.mesh],
                planned_s=planned[address.mesh],
                topology=topology,
                store=store,
                host=address.node,
                limits=limits,
            )
            for w, address in zip(gang.workers, gang.addresses, strict=True)
        ],
        what="loading the stages",
        limit_s=attempt.limits.prepare_s,
        late=START_TIMEOUT,
        interrupted=check,
    )


def _step_loop(
    attempt: Attempt,
    gang: Gang,
    reporter: Reporter,
    metrics: JobMetrics,
    checkpoints: Checkpoints,
    first: int,
    check: Any,
) -> None:
    limits, last = attempt.limits, attempt.job["training"]["steps"]
    step_limit_s = max(
        limits.step_floor_s, limits.slot_floor_s + limits.slot_factor * attempt.plan["makespan_s"]
    )
    clocks = _Clocks(gang)
    next_timeline, skipped = 0.0, False
    for step in range(first, last + 1):
        check()
        clocks.refresh()
        started_at, started = time.time(), time.monotonic()
        results = gang.call(
            [w.run_step.remote(step) for w in gang.workers],
            what=f"step {step}",
            limit_s=step_limit_s,
            interrupted=check,
        )
        record = record_step(
            step=step,
            meshes=[mesh.name for mesh in gang.meshes],
            stage_names=[stage["name"] for stage in attempt.spec["stages"]],
            results=results,
            offsets=clocks.offsets,
            step_s=time.monotonic() - started,
            clock=(started_at, started),
        )
        keep_timeline = step in (first, last) or time.monotonic() >= next_timeline
        if keep_timeline:
            next_timeline = time.monotonic() + TIMELINE_EVERY_S
        _publish(record, reporter, metrics, keep_timeline)
        before, skipped = skipped, any(result["skipped"] for result in results)
        if skipped and not before:
            reporter.event(
                "step_skipped", f"step {step}: a loss or the gradient norm is not finite; no update"
            )
        checkpoints.after(step, last=step == last)


def _publish(record: StepRecord, reporter: Reporter, metrics: JobMetrics, keep_timeline: bool) -> None:
    reporter.step(record.report)
    metrics.observe_step(record.report)
    if keep_timeline:
        reporter.timeline(record.timeline)
        metrics.set_timeline(record.timeline)


class _Clocks:
    """Each worker's clock against the driver's, measured again now and then."""

    def __init__(self, gang: Gang):
        self._gang = gang
        self._due = 0.0
        self.offsets: list[ClockOffset] = []

    def refresh(self) -> None:
        if time.monotonic() < self._due:
            return
        own_node = own_node_address()
        self.offsets = [
            ClockOffset(0.0, 0.0)
            if address.node == own_node  # one host, one monotonic clock
            else estimate_offset(functools.partial(self._ask, index), rounds=CLOCK_ROUNDS)
            for index, address in enumerate(self._gang.addresses)
        ]
        self._due = time.monotonic() + CLOCK_EVERY_S

    def _ask(self, index: int) -> float:
        try:
            return ray.get(self._gang.workers[index].clock.remote(), timeout=CLOCK_LIMIT_S)
        except Exception as error:
            raise failure_of(error, self._gang.name(index), "reading the clock") from None


def planned_seconds(plan: Mapping[str, Any], stage_names: Sequence[str]) -> dict[str, list[float]]:
    """Planned seconds of every instruction of every mesh's program (0 for REDUCE and STEP).

    Slots name their stage, instructions count it: `stage_names` are in that order.
    """
    number = {name: i for i, name in enumerate(stage_names)}
    planned = {
        (s["mesh"], s["action"], number[s["stage"]], s["microbatch"], s.get("edge")): s["end_s"]
        - s["start_s"]
        for s in plan["slots"]
    }
    return {
        mesh: [
            planned.get((mesh, i["op"], i["stage"], i["microbatch"], i["edge"]), 0.0) for i in instructions
        ]
        for mesh, instructions in plan["programs"].items()
    }


def _serve_metrics(metrics: JobMetrics) -> str:
    """Serve on this node's address; the endpoint goes to the control plane for service discovery."""
    return metrics.serve(host=os.environ.get("SLOTLINE_METRICS_HOST") or own_node_address(), port=0)


if __name__ == "__main__":
    sys.exit(main())
