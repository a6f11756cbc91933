"""The control plane's side of an attempt's driver: its assignment, layer profiles, plans, and its reports.

Every call of an attempt that is over, or no longer its job's current one, is refused with StaleAttemptError. A driver
whose protocol is too old ends its attempt with VERSION_MISMATCH.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncSession

from service.jobs.explain import calibration_slots
from service.jobs.lifecycle import existing_job
from service.jobs.problems import ProblemCode, ProblemError
from service.jobs.saved_plans import planned_values, planning_timeout_problem, saved_plan_for_planner
from service.jobs.service import RunWork, Service, with_fields
from service.jobs.views import checkpoint_view
from service.observability.tracing import Span, attempt_context, exporting, record_span
from service.orchestrator.attempts import outcome
from service.orchestrator.attempts.outcome import check_current, end_attempt, hand_over
from service.orchestrator.planning.pool import PlanTimeoutError
from service.orchestrator.planning.work import RunningJob
from service.scheduler.node_placement import (
    MeshShape,
    Node,
    PlacementError,
    exchanged_bytes,
    place,
    without_noise,
)
from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.programs.plan import Plan
from service.schemas.drivers import (
    AttemptInput,
    NextAttempt,
    PlacementAnswer,
    PlacementRequest,
    ReplanRequest,
    ReportAnswer,
    ReportedSpan,
    ReportedStep,
    ReportIn,
    ResumeSourceView,
    RunningPlan,
    StepPlansRequest,
)
from service.spec.job import parse_job_checkpoint, spec_with_meshes, stored_field, stored_plan_name
from service.spec.states import AttemptState, CheckState, NodeMark, mark_in_force
from service.store.attempts import exchange_token as exchange_attempt_token
from service.store.attempts import lock_attempt, record_placement
from service.store.database import utc_now
from service.store.files import wanted_checkpoint_steps
from service.store.jobs import find_job
from service.store.measurements import (
    MEASURED_BY_GANG,
    EvaluationRecord,
    SlotRecord,
    StepRecord,
    find_all_costs,
    find_profile,
    last_recorded,
    measured_links,
    model_key,
    record_costs,
    record_driver_profile,
    record_planned,
    scoped_costs_digest,
    scoped_profile_key,
)
from service.store.node_states import node_marks, set_ray_drains
from service.store.plans import find_job_plan, record_job_plan, saved_plan_by_id
from service.store.secrets import (
    MissingSecretError,
    NoSecretsKeyError,
    SecretBox,
    open_secrets,
    spec_secret_names,
)
from service.store.tables import AttemptRow, JobRow, PlacedMeshRow
from worker.contract.checkpoint_files import step_uri
from worker.contract.costs import costs_digest
from worker.contract.reasons import Reason
from worker.contract.versions import RESUME_FROM_PROTOCOL, driver_too_old_message

PROFILE_SIZE_LIMIT_BYTES = 16 << 20
"""JSON of one profile that is stored at most."""
TIMELINES_KEPT = 100
"""Profiled steps of one job whose slots are stored, the last ones: each may be thousands of rows."""
_FEWEST_STEPS = 3  # whose slots say how far steps deviate
_SEARCH_SHARE = 0.1  # of the time that a job has left, for the search for a shorter plan
_LEAST_SEARCH_S = 0.2  # a shorter search finds what is found without one
_PLAN_QUEUE_MARGIN_S = 120.0
"""How long a driver's request for a plan may wait for a planning process, beside the planning itself."""


async def refuse_old_driver(service: Service, attempt: AttemptRow, protocol: str | None) -> None:
    """409 for a driver whose protocol is too old: its attempt ends, and the job's reason says why."""
    if (refusal := driver_too_old_message(protocol)) is not None:
        await _end_as_mismatch(service, attempt, refusal)


async def _end_as_mismatch(service: Service, attempt: AttemptRow, refusal: str) -> None:
    async with service.database.write() as session:
        fresh, job = await lock_attempt(session, attempt.id)
        check_current(job, fresh)
        await end_attempt(
            session,
            job,
            fresh,
            AttemptState.FAILED,
            reason=Reason.VERSION_MISMATCH,
            message=refusal,
            at=utc_now(),
            backoff=service.backoff,
        )
    service.wake()
    raise ProblemError(409, refusal, code=ProblemCode.VERSION_MISMATCH)


async def exchange_token(service: Service, attempt: AttemptRow, token: str) -> None:
    """The driver's own `token` opens the attempt from now on, and the one that Ray was given opens nothing."""
    async with service.database.write() as session:
        if not await exchange_attempt_token(session, attempt.id, attempt.token, token):
            raise ProblemError(409, "the attempt's token was exchanged by another call: use that one's")


async def read_assignment(service: Service, attempt: AttemptRow, protocol: str | None) -> AttemptInput:
    """The attempt's job, device, checkpoint to go on from, and its owner's secrets. 422 where a secret is missing, 409 for a
    driver whose protocol knows less than the job needs."""
    job = await _current_job(service, attempt)
    resume_from = await _resume_source(service, job)
    if resume_from is not None and (refusal := driver_too_old_message(protocol, RESUME_FROM_PROTOCOL)):
        await _end_as_mismatch(service, attempt, refusal)
    secrets = await _job_secrets(service, job)
    async with service.database.read() as session:
        recorded = await last_recorded(session, job.id)
        marks = await node_marks(session, attempt.cluster)
    return AttemptInput(
        attempt_id=attempt.id,
        job_id=job.id,
        number=attempt.number,
        job=spec_with_meshes(job.spec, attempt.accelerators),
        device=attempt.device,
        resume=checkpoint_view(job),
        resume_from=resume_from,
        recorded=recorded,
        secrets=secrets,
        checked=job.check_state == CheckState.PASSED,
        left_out_nodes=list(service.clusters.of(attempt.cluster).left_out(marks)),
        plan_timeout_s=service.planner.longest_answer_s + _PLAN_QUEUE_MARGIN_S,
    )


async def read_profile(service: Service, attempt: AttemptRow, key: str) -> dict[str, Any]:
    """The layer profile that an earlier attempt of the same model, code and cluster stored under `key`; else 404."""
    job = await _current_job(service, attempt)
    async with service.database.read() as session:
        profile = await find_profile(
            session, scoped_profile_key(job.spec, key, owner=job.owner, cluster=attempt.cluster)
        )
    if profile is None:
        raise ProblemError(404, f"no profile is stored under {key}: measure one and PUT it here")
    return profile


async def store_profile(service: Service, attempt: AttemptRow, key: str, profile: dict[str, Any]) -> None:
    """Store a profile for later attempts; 413 where its JSON is too long."""
    job = await _current_job(service, attempt)
    size = len(await asyncio.to_thread(json.dumps, profile))
    if size > PROFILE_SIZE_LIMIT_BYTES:
        raise ProblemError(
            413,
            f"the profile is JSON of {size} bytes, the limit is {PROFILE_SIZE_LIMIT_BYTES}: each attempt measures it anew",
        )
    async with service.database.write() as session:
        await record_driver_profile(
            session, job.spec, key, profile, at=utc_now(), owner=job.owner, cluster=attempt.cluster
        )


async def place_attempt(service: Service, attempt: AttemptRow, request: PlacementRequest) -> PlacementAnswer:
    """The placement of the attempt's workers on these nodes.

    The bytes between meshes are those of the job's plan: that of an earlier attempt or a saved one. Where there is none,
    each mesh counts as exchanging the same with the next. Links are as the attempts of any job measured them of late.
    """
    job = await _current_job(service, attempt)
    named = await _node_names(service, attempt.cluster, [node.name for node in request.nodes])
    names = {node_id: name for node_id, name in named.items() if name is not None}
    async with service.database.read() as session:
        plan = await find_job_plan(session, attempt.job_id)
        if plan is None and job.saved_plan_id is not None:
            plan = await saved_plan_by_id(session, job.saved_plan_id)
        marks = await node_marks(session, attempt.cluster)
        links = await measured_links(
            session, {*names}, attempt.device, cluster=attempt.cluster, now=utc_now()
        )
    left_out = {
        node_id: mark
        for node_id, name in names.items()
        if (mark := mark_in_force(marks, name, node_id, now=utc_now())) is not None
    }
    answer = await asyncio.to_thread(
        make_placement,
        request,
        None if plan is None else plan.body,
        accelerator_type=attempt.accelerator_type,
        left_out=left_out,
        unnamed=named.keys() - names.keys(),
        links=links,
    )
    placed = [
        PlacedMeshRow(
            attempt_id=attempt.id,
            job_id=attempt.job_id,
            cluster=attempt.cluster,
            mesh=f"m{mesh}",
            node_id=node_id,
            node=names[node_id],
            workers=workers,
        )
        for mesh, nodes in enumerate(answer.workers or ())
        for node_id, workers in Counter(nodes).items()
    ]
    async with service.database.write() as session:
        await _check_current(session, attempt)
        await record_placement(session, attempt.id, placed)
    return answer


async def _node_names(service: Service, cluster: str, node_ids: Sequence[str]) -> dict[str, str | None]:
    """The operators' names of these Ray nodes, by id; None of one that the cluster does not name, as it may be too new."""
    watcher = service.clusters.of(cluster).watcher
    if {*node_ids} - {node.id for node in watcher.snapshot.nodes}:
        await watcher.refresh()
    names = {node.id: node.name for node in watcher.snapshot.nodes}
    return {node_id: names.get(node_id) for node_id in node_ids}


def make_placement(
    request: PlacementRequest,
    plan: str | None,
    *,
    accelerator_type: str | None = None,
    left_out: Mapping[str, NodeMark] = MappingProxyType({}),
    unnamed: Collection[str] = (),
    links: Mapping[tuple[str, str], float] = MappingProxyType({}),
) -> PlacementAnswer:
    """The placement of a job with the JSON of its plan, None where it has none, on nodes of this type (None: on those that
    tell none, where there are any); nothing lands on nodes that are left out, nor on `unnamed` ones, of which nobody knows
    yet whether they are. `links` are seconds per byte, as measured."""
    exchanged = None if plan is None else _exchanged_in(plan, len(request.meshes))
    if exchanged is None:
        exchanged = {(mesh, mesh + 1): 1.0 for mesh in range(len(request.meshes) - 1)}
    takes_any = accelerator_type is None and all(node.accelerator_type for node in request.nodes)
    nodes = [
        Node(**node.model_dump() | ({"free": 0} if node.name in left_out or node.name in unnamed else {}))
        for node in request.nodes
        if node.accelerator_type == accelerator_type or takes_any
    ]
    try:
        placed = place(
            nodes,
            [MeshShape(mesh.workers, mesh.tensor) for mesh in request.meshes],
            exchanged,
            seconds_per_byte=without_noise(nodes, links),
        )
    except PlacementError as error:
        marks = ", ".join(dict.fromkeys(map(str, left_out.values())))
        refused = f"{error}; nodes that take no work: {marks}" if marks else str(error)
        if unnamed:
            refused += f"; Ray has not named {len(unnamed)} of the nodes yet"
        return PlacementAnswer(refused=refused, final=error.final)
    return PlacementAnswer(workers=[list(names) for names in placed.nodes])


def _exchanged_in(plan: str, meshes: int) -> dict[tuple[int, int], float] | None:
    """The bytes between meshes of a stored plan; None for one of another number of meshes or of another Slotline."""
    try:
        spec = PipelineSpec.model_validate(json.loads(plan)["spec"])
    except ValidationError:
        return None
    return exchanged_bytes(spec) if len(spec.meshes) == meshes else None


async def plan_attempt(service: Service, attempt: AttemptRow, costs: dict[str, Any], run: RunWork) -> str:
    """JSON of the JobPlanView for a job with these measured costs, which becomes the job's plan.

    A job that was submitted with a saved plan gets that plan, with what it was made for: the driver compares it with what
    it has traced. `run` awaits the planner.
    """
    job = await _current_job(service, attempt)
    spec = spec_with_meshes(job.spec, attempt.accelerators)
    async with service.database.read() as session:
        earlier = await find_job_plan(session, attempt.job_id)
    saved = None
    if job.saved_plan_id is not None:
        saved = await saved_plan_for_planner(service, job.saved_plan_id, stored_plan_name(job.spec))
    try:
        if saved is not None:
            planning = service.planner.plan_from_saved(spec, costs, saved, attempt=attempt.id)
        else:
            planning = service.planner.plan_job(
                spec,
                costs,
                earlier=None if earlier is None else earlier.body,
                budget_s=service.settings.plan_budget_s,
                attempt=attempt.id,
            )
        plan = await run(planning)
        if nodes := _mesh_nodes(costs):
            plan = await with_fields(plan, last={"nodes": nodes})
    except PlanTimeoutError as error:  # not 503: a driver that asked again would wait again
        raise planning_timeout_problem(error) from None
    planned_step_s, planned_peak_bytes = await asyncio.to_thread(planned_values, plan)
    async with service.database.write() as session:
        await _check_current(session, attempt)
        await record_job_plan(session, attempt, plan, at=utc_now())
        await record_planned(
            session,
            attempt.id,
            step_s=planned_step_s,
            peak_bytes=planned_peak_bytes,
            model=model_key(spec, job.owner, attempt.cluster),
        )
        digest = scoped_costs_digest(costs_digest(spec), job.owner, attempt.cluster)
        await record_costs(
            session,
            digest,
            costs,
            measured_by=MEASURED_BY_GANG,
            accelerator_type=attempt.accelerator_type,
            at=utc_now(),
        )
    return plan if saved is None else await with_fields(plan, last={"made_for": json.loads(saved.made_for)})


def _mesh_nodes(costs: Mapping[str, Any]) -> dict[str, list[str]]:
    """The nodes of each mesh, each once, as the driver sent them with the costs."""
    nodes: dict[str, dict[str, None]] = {}
    for worker in costs.get("workers") or ():
        if worker.get("node"):
            nodes.setdefault(worker["mesh"], {})[worker["node"]] = None
    return {mesh: list(names) for mesh, names in nodes.items()}


async def replan_attempt(service: Service, attempt: AttemptRow, request: ReplanRequest, run: RunWork) -> str:
    """JSON of a ReplanView: a clearly shorter order of the plan by which the attempt trains, at the costs of its last
    profiled steps, searched for at most a tenth of the time that is left."""
    job = await _current_job(service, attempt)
    spec = spec_with_meshes(job.spec, attempt.accelerators)
    async with service.database.read() as session:
        plan = await find_job_plan(session, attempt.job_id)
        steps = [] if plan is None else await calibration_slots(session, plan)
        digest = scoped_costs_digest(costs_digest(spec), job.owner, attempt.cluster)
        costs = await find_all_costs(session, digest, attempt.accelerator_type)
    if plan is None or (plan.attempt, plan.since_step) != (attempt.number, request.since_step):
        return _no_shorter_plan("the plan that runs is not the one that is stored")
    if len(steps) < _FEWEST_STEPS or costs is None:
        return _no_shorter_plan("too little was measured")
    budget_s = min(service.settings.plan_budget_s, _SEARCH_SHARE * request.seconds_left)
    if budget_s < _LEAST_SEARCH_S:
        return _no_shorter_plan("the steps that are left are not worth a search")
    running = RunningJob(spec, plan.body, costs, steps)
    try:
        return await run(service.planner.replan(running, budget_s=budget_s, attempt=attempt.id))
    except PlanTimeoutError as error:
        raise planning_timeout_problem(error) from None


async def plan_steps(service: Service, attempt: AttemptRow, request: StepPlansRequest, run: RunWork) -> str:
    """JSON of a StepPlansView: the plans of single steps of the attempt, by the buckets of their microbatches. 409 where the
    plan that is stored, or its costs, are not those of the attempt."""
    job = await _current_job(service, attempt)
    spec = spec_with_meshes(job.spec, attempt.accelerators)
    async with service.database.read() as session:
        plan = await find_job_plan(session, attempt.job_id)
        digest = scoped_costs_digest(costs_digest(spec), job.owner, attempt.cluster)
        costs = await find_all_costs(session, digest, attempt.accelerator_type)
    if plan is None or plan.attempt != attempt.number or costs is None:
        raise ProblemError(
            409, "the stored plan is not of this attempt: its steps run by the plan that it has"
        )
    running = RunningJob(spec, plan.body, costs)
    try:
        return await run(service.planner.plan_steps(running, request.buckets, attempt=attempt.id))
    except PlanTimeoutError as error:
        raise planning_timeout_problem(error) from None


def _no_shorter_plan(why: str) -> str:
    return json.dumps({"why": why})


def _running_plan_text(running: RunningPlan) -> str:
    """The plan as text; 422 where it is none."""
    try:
        PipelineSpec.model_validate(running.plan.get("spec"))
        Plan.model_validate(running.plan.get("plan"))
    except ValidationError as error:
        raise ProblemError(422, f"running_plan is no plan of this control plane's: {error}") from None
    return json.dumps(running.plan, allow_nan=False)


async def plan_forwards(service: Service, attempt: AttemptRow, spec: dict[str, Any], run: RunWork) -> str:
    """JSON of the plan of an evaluation: the forwards of a PipelineSpec."""
    await _current_job(service, attempt)
    planning = service.planner.plan_forwards(
        spec, budget_s=service.settings.plan_budget_s, attempt=attempt.id
    )
    try:
        return await run(planning)
    except PlanTimeoutError as error:
        raise planning_timeout_problem(error) from None


async def apply_report(service: Service, attempt: AttemptRow, body: ReportIn) -> ReportAnswer:
    """Store what happened since the driver's last report; the answer tells it to go on or to end."""
    names = await _node_names(service, attempt.cluster, [node.node for node in body.draining or ()])
    plan = None
    if (running := body.running_plan) is not None:
        plan = running.since_step, await asyncio.to_thread(_running_plan_text, running)
    async with service.database.write() as session:
        command = await outcome.apply_report(
            session,
            attempt.id,
            replace(_driver_report(body), running_plan=plan),
            at=utc_now(),
            backoff=service.backoff,
            keep=TIMELINES_KEPT,
        )
        if body.draining is not None:
            drains = {
                node.node: (
                    names[node.node] or node.node,
                    None if node.until is None else datetime.fromtimestamp(node.until, UTC),
                )
                for node in body.draining
            }
            await set_ray_drains(session, attempt.cluster, drains, at=utc_now())
        wanted = await wanted_checkpoint_steps(session, attempt.job_id)
        following = await _next_attempt(service, session, attempt) if body.takes_next else None
    if body.state is not None or body.draining:
        service.wake()
    if body.spans and exporting():
        await _record_spans(service, attempt, body.spans)
    return ReportAnswer(command=command, wanted_checkpoints=wanted, next=following)


async def _next_attempt(service: Service, session: AsyncSession, attempt: AttemptRow) -> NextAttempt | None:
    """The job's next attempt, where the driver of this one, which has ended, is to run it."""
    job = await find_job(session, attempt.job_id)
    assert job is not None, attempt.job_id
    marks = await node_marks(session, attempt.cluster)
    following = await hand_over(
        session,
        attempt.id,
        cluster=service.settings.cluster_of(job.queue),
        left_out=service.clusters.of(attempt.cluster).left_out(marks),
        at=utc_now(),
    )
    if following is None:
        return None
    context = attempt_context(job.traceparent, following.id)
    return NextAttempt(
        attempt_id=following.id, token=following.token, traceparent=None if context is None else str(context)
    )


async def _resume_source(service: Service, job: JobRow) -> ResumeSourceView | None:
    text = stored_field(job.spec, "checkpoint", "resume_from", "")
    if not text:
        return None
    if (reference := parse_job_checkpoint(text)) is None:
        return ResumeSourceView(uri=text)
    source_id, step = reference
    async with service.database.read() as session:
        source = await existing_job(session, source_id)
    uri = stored_field(source.spec, "checkpoint", "uri", "")
    return ResumeSourceView(uri=step_uri(uri, source_id, step or 0), job=source_id, step=step)


async def _job_secrets(service: Service, job: JobRow) -> dict[str, str]:
    if not (names := spec_secret_names(job.spec)):
        return {}
    try:
        async with service.database.read() as session:
            return await open_secrets(session, SecretBox.of(service.settings), job.owner, names)
    except (MissingSecretError, NoSecretsKeyError) as error:
        raise ProblemError(422, str(error)) from None


async def _current_job(service: Service, attempt: AttemptRow) -> JobRow:
    async with service.database.read() as session:
        return await _check_current(session, attempt)


async def _check_current(session: Any, attempt: AttemptRow) -> JobRow:
    job = await find_job(session, attempt.job_id)
    assert job is not None, attempt.job_id
    outcome.check_current(job, attempt)
    return job


async def _record_spans(service: Service, attempt: AttemptRow, spans: Sequence[ReportedSpan]) -> None:
    """Export what the driver says that it did; a report that comes twice has the same spans."""
    async with service.database.read() as session:
        job = await find_job(session, attempt.job_id)
    context = None if job is None else attempt_context(job.traceparent, attempt.id)
    if context is None:
        return
    for span in spans:
        record_span(
            Span(
                span.name,
                replace(context, span_id=span.span_id),
                span.started_at,
                span.ended_at,
                parent_id=span.parent_id or context.span_id,
                attributes={
                    **span.attributes,
                    "slotline.job": attempt.job_id,
                    "slotline.attempt": attempt.number,
                },
                of_driver=True,
            )
        )


def _driver_report(body: ReportIn) -> outcome.DriverReport:
    reason, message = Reason.read(body.reason, body.message)  # a driver may be newer than this control plane
    return outcome.DriverReport(
        sequence=body.sequence,
        state=None if body.state is None else AttemptState(body.state),
        reason=reason,
        message=message,
        steps=[StepRecord(**step.model_dump(exclude={"peak_memory_bytes"})) for step in body.steps],
        peak_memory_bytes=_peak_memory_bytes(body.steps),
        timelines=[
            outcome.TimelineRecord(
                step=timeline.step,
                started_at=timeline.started_at,
                uncertainty_s=timeline.uncertainty_s,
                slots=[SlotRecord(**slot.__dict__) for slot in timeline.slots],
            )
            for timeline in body.timelines
        ],
        events=[
            outcome.EventRecord(datetime.fromtimestamp(event.at, UTC), event.kind, event.message)
            for event in body.events
        ],
        metrics_endpoint=body.metrics_endpoint,
        evaluations=[EvaluationRecord(**evaluation.model_dump()) for evaluation in body.evaluations],
        best_checkpoint=None
        if body.best_checkpoint is None
        else body.best_checkpoint.model_dump(exclude={"stored_bytes"}),
        checkpoint=None if body.checkpoint is None else (body.checkpoint.step, body.checkpoint.uri),
        model_flops=None
        if body.model_flops is None
        else (body.model_flops.step, body.model_flops.peak_per_s),
        stored_bytes=None if body.checkpoint is None else body.checkpoint.stored_bytes,
        failed_nodes=body.failed_nodes,
    )


def _peak_memory_bytes(steps: Sequence[ReportedStep]) -> dict[str, int]:
    """The most of all steps, by mesh."""
    peaks: dict[str, int] = {}
    for step in steps:
        for mesh, size in step.peak_memory_bytes.items():
            peaks[mesh] = max(size, peaks.get(mesh, 0))
    return peaks
