"""Admission on one cluster: gang starts, quotas, preemption by priority, and conservative backfill.

A job that must wait gets a reservation: the first time at which all that holds its accelerators now must have ended
(`max_duration`). A later job overtakes it only where every reservation before it still holds (conservative backfill:
Mu'alem and Feitelson, 2001); where none can be made nothing overtakes. Preemption takes the lowest priority first,
then the last started, and only where that lets the job start within the grace. A gang has accelerators of one type:
each type is a pool of its own, and a job that asks for none takes of one for which no job asks where it can. A pure
function of a snapshot. Times are Unix seconds; an unknown end is infinite, and one in the past counts as unknown.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from service.orchestrator.decisions.attempt_lifecycle import (
    RAY_RESOURCES,
    Capacity,
    Device,
    Holder,
    Preempt,
    QueueRules,
    Start,
    Wait,
    WaitingJob,
    device_of,
    resource_text,
)
from service.orchestrator.decisions.fair_share import fair_order
from service.spec.principals import DEFAULT_PROJECT, ProjectQueue, QuotaScope
from worker.contract.reasons import Reason

RESERVATION_LIMIT = 500
"""Reservations of one device; behind the last one nobody overtakes."""
_MARKS_NAMED = 3
_PATIENT = " (as many as its last attempt had; within a minute of its end it goes on with fewer)"
_NEVER_STARTS = (Reason.CLUSTER_TOO_SMALL, Reason.WAITS_FOR_QUOTA)
"""Reasons of jobs that wait for no accelerator that becomes free."""
_NOTHING = Capacity({})
_PREEMPTION_TRIES = 20
"""Jobs of one round for which victims are searched."""


def admit(
    waiting: Sequence[WaitingJob],
    holders: Sequence[Holder],
    *,
    capacity: Capacity | None,
    quotas: Mapping[QuotaScope, int | None],
    now: float,
    rules: QueueRules = QueueRules(),
    cluster_name: str = "",
) -> list[Start | Wait | Preempt]:
    """One Start or Wait per waiting job, in the order of their turns, and a Preempt per holder that gives way to one, or
    that grows into what nobody waits for.

    Gangs start whole; an elastic job takes the largest of its gangs that fits. A job that backs off, or that is too large
    for its quota or for the cluster, holds nobody up; a job that waits for a quota holds up its own queue only, and where
    that is its project's quota there, its own project in it.
    `cluster_name` stands behind "cluster" in messages, where there are several.
    """
    asked_types = {job.accelerator_type for job in waiting} - {None}
    admission = _AdmissionRound(holders, capacity, quotas, now, rules, cluster_name, asked_types)
    unable = {job.id: wait for job in waiting if (wait := admission.unable(job)) is not None}
    jobs = fair_order(
        waiting,
        holders,
        device_of=admission.device_of,
        now=now,
        patience_s=rules.patience_s,
        out_of_line=unable.keys(),
    )
    smallest = _smallest_behind([job for job in jobs if job.id not in unable], admission.device_of)
    answers = list[Start | Wait | Preempt]()
    for job in jobs:
        if job.id in unable:
            answers.append(unable[job.id])
        else:
            answers += admission.answer(admission.fitted(job), smallest[job.id])
    waiting_ids = {
        answer.job_id for answer in answers if isinstance(answer, Wait) and answer.reason not in _NEVER_STARTS
    }
    return answers + admission.growths([job for job in jobs if job.id in waiting_ids])


def _smallest_behind(jobs: Sequence[WaitingJob], device_of: Callable[[WaitingJob], str]) -> dict[str, int]:
    """The smallest gang of the same device among each job and those behind it, by job id."""
    smallest, least = dict[str, int](), dict[str, int]()
    for job in reversed(jobs):
        device = device_of(job)
        least[device] = min(job.accelerators, least.get(device, job.accelerators))
        smallest[job.id] = least[device]
    return smallest


@dataclass(eq=False)
class _ResourcePool:
    """Accelerators of one device and type, or a quota: its holders, and the reservations of the rest."""

    profile: AvailabilityProfile
    users: list[Holder] = field(default_factory=list)
    device: str | None = None
    accelerator_type: str | None = None
    capacity: Capacity = _NOTHING
    """Of the nodes of the type; of a quota empty."""
    first: WaitingJob | None = None
    """The first job that waits for some."""
    reserved: int = 0
    closed: bool = False
    """No further job may start: it would come before one that could be promised no time."""
    used: int = 0
    _usage_texts: dict[str, str] = field(default_factory=dict)

    def fits(self, job: WaitingJob) -> bool:
        return not self.closed and self.profile.fits_now(job.accelerators, job.longest_s)

    def amount(self, holder: Holder) -> int:
        """The accelerators of this pool that the holder has; those that are left out are in no pool of a device."""
        return holder.accelerators if self.device is None else holder.accelerators - holder.left_out

    def use(self, holder: Holder, now: float) -> None:
        self.users.append(holder)
        self.used += self.amount(holder)
        self.profile.take(self.amount(holder), now, holder.until)
        self._usage_texts.clear()

    def used_by(self, project: str) -> str:
        """The holders, in a message to a job of this project."""
        if project not in self._usage_texts:
            self._usage_texts[project] = _usage_message(self.users, project)
        return self._usage_texts[project]

    @property
    def total(self) -> int:
        """Accelerators on nodes that take work, whoever holds them."""
        return self.capacity.total.get(self.device or "", 0)

    @property
    def unused(self) -> int:
        """Accelerators that nobody holds, though some may be reserved."""
        return self.total - self.capacity.others.get(self.device or "", 0) - self.used


class _AdmissionRound:
    """The resource pools of one round, while one job after the other is answered."""

    def __init__(
        self,
        holders: Sequence[Holder],
        capacity: Capacity | None,
        quotas: Mapping[QuotaScope, int | None],
        now: float,
        rules: QueueRules,
        cluster_name: str,
        asked_types: Collection[str | None],
    ) -> None:
        self._cluster_name = cluster_name
        self._capacity, self._quotas, self._now, self._rules = capacity, quotas, now, rules
        self._asked_types = asked_types
        parts = (capacity or _NOTHING).by_type
        self._devices = {
            device: [
                _make_device_pool(device, accelerator_type, parts, holders, now) for accelerator_type in parts
            ]
            for device in RAY_RESOURCES
        }
        """The pools of each device, one for each type."""
        users = defaultdict[QuotaScope, list[Holder]](list)
        for holder in holders:
            for scope in holder.quota_scopes:
                users[scope].append(holder)
        self._limits = {
            scope: _make_pool(quota, users[scope], now)
            for scope, quota in quotas.items()
            if quota is not None
        }
        """The pools of all quotas."""
        self._holders = holders
        self._preemptible = [holder for holder in holders if not holder.stopping] if rules.preempts else []
        self._preemptible.sort(key=lambda holder: (holder.priority, -holder.since, holder.job_id))
        self._preemptions_tried = 0
        self._unable = dict[tuple[object, ...], tuple[Reason, str] | None]()

    def device_of(self, job: WaitingJob) -> str:
        if self._capacity is None:
            return job.device
        return device_of(job.device, job.accelerators, self._capacity, accelerator_type=job.accelerator_type)

    def unable(self, job: WaitingJob) -> Wait | None:
        """The Wait of a job that cannot start whoever else ends; None where it can. To be asked before anything starts: of
        thousands of waiting jobs most are alike, and have one answer."""
        if job.not_before is not None and self._now < job.not_before:
            return Wait(job.id, Reason.BACKING_OFF, "waits a little before the next attempt")
        demand = (
            job.queue,
            job.project,
            job.accelerators,
            job.device,
            job.accelerator_type,
            job.patient,
            job.began,
        )
        if demand not in self._unable:
            self._unable[demand] = self._why_unable(job)
        why = self._unable[demand]
        return None if why is None else Wait(job.id, *why)

    def _why_unable(self, job: WaitingJob) -> tuple[Reason, str] | None:
        for scope in job.quota_scopes:
            quota = self._quotas.get(scope)
            if quota is not None and job.accelerators > quota:
                raised = (
                    f"by `{_quota_command(scope)}`"
                    if isinstance(scope, ProjectQueue)
                    else "in SLOTLINE_QUEUES"
                )
                message = (
                    f"needs {job.accelerators} accelerators; the quota of {_scope_text(scope)} is {quota}: "
                    f"raise it {raised}, or submit to another queue or with fewer resources.meshes"
                )
                return Reason.WAITS_FOR_QUOTA, message
        if self._capacity is None:
            if message := self._quota_is_short(job):
                return Reason.WAITS_FOR_QUOTA, message
            return (
                Reason.WAITS_FOR_CLUSTER,
                f"waits for the Ray cluster{self._cluster_name}, which does not answer",
            )
        device, pools = self.device_of(job), self._pools_for(job)
        if job.accelerators > (total := max((pool.total for pool in pools), default=0)):
            wanted = f"{job.accelerators} accelerators of {resource_text(device, job.accelerator_type)}"
            have = f"nodes of the cluster{self._cluster_name} that take work have {total}"
            if job.patient:
                return (
                    Reason.WAITS_FOR_ACCELERATORS,
                    f"waits for {wanted}; {have}{_PATIENT}{self._left_out(job)}",
                )
            if any(job.accelerators <= pool.capacity.in_all(device) for pool in pools):
                return Reason.WAITS_FOR_ACCELERATORS, f"needs {wanted}; {have}{self._left_out(job)}"
            types = Counter[str | None]()
            for pool in itertools.chain.from_iterable(self._devices.values()):
                if pool.device == device or (job.accelerator_type and pool.accelerator_type):
                    types[pool.accelerator_type] += pool.total
            message = _too_small_message(job, device, total, self._cluster_name, types)
            return Reason.CLUSTER_TOO_SMALL, message
        return None

    def fitted(self, job: WaitingJob) -> WaitingJob:
        """The job with the largest of its gangs that fits now, else with the least."""
        pools, limits = self._pools_for(job), self._limits_of(job)
        for size in job.sizes:
            sized = replace(job, accelerators=size)
            if any(pool.fits(sized) for pool in pools) and all(limit.fits(sized) for limit in limits):
                return sized
        return job

    def growths(self, waiting: Sequence[WaitingJob]) -> list[Preempt]:
        """The elastic holders that end their attempts to go on with larger gangs, first the one that started first: of
        accelerators that are free, of devices and types for which none of the jobs `waiting` waits."""
        elastic = [holder for holder in self._holders if holder.larger]
        if not elastic:
            return []
        waited_for = {id(pool) for job in waiting for pool in self._pools_for(job)}
        growing = []
        for holder in sorted(elastic, key=lambda holder: (holder.since, holder.job_id)):
            own = self._device_pools_of(holder)
            if len(own) != 1 or holder.stopping or id(own[0]) in waited_for:
                continue
            for size in holder.larger:
                more = size - holder.accelerators
                pools = self._pools_of(holder)
                if all(pool.profile.fits_now(more, math.inf) for pool in pools):
                    for pool in pools:
                        pool.profile.take(more, self._now, math.inf)
                    message = f"goes on with {size} accelerators, as {more} more than its {holder.accelerators} are free"
                    growing.append(Preempt(holder.job_id, holder.job_id, message))
                    break
        return growing

    def answer(self, job: WaitingJob, smallest: int) -> list[Start | Wait | Preempt]:
        """The answers to the next job; `smallest` is the smallest gang of its device from it on."""
        pools = [pool for pool in self._pools_for(job) if pool.total >= job.accelerators]
        limits = self._limits_of(job)
        fitting = next((pool for pool in pools if pool.fits(job)), None)
        if fitting is not None and all(limit.fits(job) for limit in limits):
            return [self._start(job, fitting)]
        wait = self._wait(job, pools, limits)
        device = self._soonest(job, pools)
        if fitting is None:
            device.first = device.first or job
        for limit in _held_up(job, limits):
            limit.first = limit.first or job
        others = [pool for pool in pools if pool is not device and not pool.closed]
        return [wait, *self._reserve(job, device, limits, smallest, others)]

    def _start(self, job: WaitingJob, pool: _ResourcePool) -> Start:
        device: Device = "cuda" if pool.device == "cuda" else "cpu"
        started = Holder(
            job_id=job.id,
            queue=job.queue,
            accelerators=job.accelerators,
            device=device,
            owner=job.owner,
            priority=job.priority,
            since=self._now,
            until=self._now + job.longest_s,
            accelerator_type=pool.accelerator_type,
            project=job.project,
        )
        for each in self._pools_of(started):
            each.use(started, self._now)
        return Start(job.id, device, job.accelerators, pool.accelerator_type)

    def _pools_for(self, job: WaitingJob) -> list[_ResourcePool]:
        """The pools of which the gang of a job may be, in the order in which it takes of them: those of types for which
        no job asks, then those with the least that is free."""
        pools = self._devices.get(self.device_of(job), [])
        if job.accelerator_type is not None:
            return [pool for pool in pools if pool.accelerator_type == job.accelerator_type]
        if len(pools) == 1:
            return pools
        return sorted(
            pools,
            key=lambda pool: (
                pool.accelerator_type in self._asked_types,
                pool.profile.free,
                pool.accelerator_type or "",
            ),
        )

    def _soonest(self, job: WaitingJob, pools: Sequence[_ResourcePool]) -> _ResourcePool:
        """The pool in which the gang is free first."""
        if len(pools) == 1:
            return pools[0]

        def begin(pool: _ResourcePool) -> tuple[bool, float]:
            at = pool.profile.first_fit(job.accelerators, job.longest_s)
            return pool.closed, math.inf if at is None else at

        return min(pools, key=begin)

    def _reserve(
        self,
        job: WaitingJob,
        device: _ResourcePool,
        limits: Sequence[_ResourcePool],
        smallest: int,
        others: Sequence[_ResourcePool],
    ) -> list[Preempt]:
        """Reserve accelerators of the pool `device` and quota for a job that must wait, by preemption where that helps,
        there or in one of the `others`."""
        if any(limit.closed for limit in limits):
            return []
        lower = []
        if not device.closed:
            lower = [holder for holder in self._preemptible if holder.priority < job.priority]
        if not lower and device.profile.free < smallest:
            device.closed = True  # no job behind could start anyhow: no reservation is needed against them
        preemptions = list[Preempt]()
        for pool in (device, *others) if lower else ():
            if preemptions := self._choose_preemptions(job, pool, limits, lower):
                device = pool
                break
        if not all(limit.fits(job) for limit in limits) and not preemptions:
            self._reserve_quota(job, _held_up(job, limits))
            return []
        pools = [device, *limits]
        begin = None if device.closed else self._first_fit(job, pools)
        if begin is None or device.reserved >= RESERVATION_LIMIT:
            device.closed = True
            for limit in limits:
                limit.profile.take(job.accelerators, self._now, math.inf)
            return preemptions
        device.reserved += 1
        for pool in pools:
            pool.profile.take(job.accelerators, begin, begin + job.longest_s)
        return preemptions

    def _reserve_quota(self, job: WaitingJob, limits: Sequence[_ResourcePool]) -> None:
        """Reserve quota for a job that waits for it; it stands in the way of nobody whom other quotas bound."""
        begin = self._first_fit(job, limits)
        for limit in limits:
            if begin is None or limit.reserved >= RESERVATION_LIMIT:
                limit.closed = True
            else:
                limit.reserved += 1
                limit.profile.take(job.accelerators, begin, begin + job.longest_s)

    def _first_fit(self, job: WaitingJob, pools: Sequence[_ResourcePool]) -> float | None:
        """The first time at which all of the pools have room for the whole job; None where none is known."""
        begin, agreed = self._now, 0
        for pool in itertools.cycle(pools):
            later = pool.profile.first_fit(job.accelerators, job.longest_s, begin)
            if later is None:
                return None
            begin, agreed = later, agreed + 1 if later == begin else 1
            if agreed >= len(pools):
                return begin
        return begin

    def _choose_preemptions(
        self,
        job: WaitingJob,
        device: _ResourcePool,
        limits: Sequence[_ResourcePool],
        lower: Sequence[Holder],
    ) -> list[Preempt]:
        """The holders of `lower` that must end for the job to start within the grace: the lowest priority first, then
        the last that started; none where that is not enough, or not needed."""
        short = [device, *(limit for limit in limits if limit.profile.free < job.accelerators)]
        helpful = [holder for holder in lower if any(pool in short for pool in self._pools_of(holder))]
        if not helpful or self._preemptions_tried >= _PREEMPTION_TRIES:
            return []
        within = self._now + self._rules.grace_s
        if self._starts_within(job, [device, *limits], (), within):
            return []
        self._preemptions_tried += 1
        chosen = list[Holder]()
        for holder in helpful:
            chosen.append(holder)
            if self._starts_within(job, [device, *limits], chosen, within):
                break
        else:
            return []
        for holder in reversed(chosen[:-1]):
            fewer = [other for other in chosen if other is not holder]
            if self._starts_within(job, [device, *limits], fewer, within):
                chosen = fewer
        for holder in chosen:
            self._preemptible.remove(holder)
            for pool in self._pools_of(holder):
                if within < holder.until:
                    pool.profile.take(-pool.amount(holder), within, holder.until)
        return [
            Preempt(
                holder.job_id,
                job.id,
                f"gives way to {_job_text(job.id, job.project, to=holder.project)}, whose priority {job.priority} is above "
                f"{holder.priority}",
            )
            for holder in chosen
        ]

    def _starts_within(
        self,
        job: WaitingJob,
        pools: Sequence[_ResourcePool],
        ending: Sequence[Holder],
        within: float,
    ) -> bool:
        """True where the job could start by `within` if `ending` end then."""
        profiles = []
        for pool in pools:
            profile = pool.profile.copy()
            for holder in ending:
                if pool in self._pools_of(holder) and within < holder.until:
                    profile.take(-pool.amount(holder), within, holder.until)
            profiles.append(profile)
        return all(
            (begin := profile.first_fit(job.accelerators, job.longest_s, within)) is not None
            and begin <= within
            for profile in profiles
        )

    def _pools_of(self, holder: Holder) -> list[_ResourcePool]:
        return [*self._device_pools_of(holder), *self._limits_of(holder)]

    def _limits_of(self, job: WaitingJob | Holder) -> list[_ResourcePool]:
        """The pools of the quotas that bound the job, that of its project first."""
        return [self._limits[scope] for scope in job.quota_scopes if scope in self._limits]

    def _device_pools_of(self, holder: Holder) -> list[_ResourcePool]:
        """The pool of the holder's accelerators; none where it holds those of another cluster, or of nodes that are gone."""
        pools = self._devices.get(holder.device, [])
        types = [pool.accelerator_type for pool in pools]
        return [pool for pool in pools if _may_be_of(holder, pool.accelerator_type, types)]

    def _wait(self, job: WaitingJob, pools: Sequence[_ResourcePool], limits: Sequence[_ResourcePool]) -> Wait:
        if message := self._quota_is_short(job):
            return Wait(job.id, Reason.WAITS_FOR_QUOTA, message)
        device = self.device_of(job)
        where = f" on cluster{self._cluster_name}" if self._cluster_name else ""
        wanted = f"waits for {job.accelerators} accelerators of {resource_text(device, job.accelerator_type)}"
        if job.accelerator_type is None and len(pools) > 1:
            wanted += " of one type"
        wanted += f"{where}; " + ", ".join(
            ("" if len(pools) == 1 else f"{pool.accelerator_type or 'no type'}: ")
            + f"{max(pool.unused, 0)} of {pool.total} free"
            for pool in pools
        )
        if job.patient:
            wanted += _PATIENT
        if all(pool.unused < job.accelerators for pool in pools):
            others = sum(pool.capacity.others.get(device, 0) for pool in pools)
            taken = f"; others than Slotline's running jobs hold {others}" if others else ""
            users = "".join(pool.used_by(job.project) for pool in pools)
            message = wanted + users + taken + self._left_out(job)
            return Wait(job.id, Reason.WAITS_FOR_ACCELERATORS, message)
        short = next((limit for limit in limits if not limit.fits(job)), None)
        first = next((pool.first for pool in pools if pool.first), None) if short is None else short.first
        named = "another" if first is None else _job_text(first.id, first.project, to=job.project)
        behind = f", kept for {named}, which is before it"
        if job.longest_s == math.inf:
            behind += "; with max_duration it could start where it ends in time"
        return Wait(job.id, Reason.WAITS_BEHIND, wanted + behind)

    def _left_out(self, job: WaitingJob) -> str:
        """Says which nodes are left out, where they have accelerators that the job could take."""
        capacity = self._capacity
        if capacity is not None and job.accelerator_type is not None:
            capacity = capacity.types.get(job.accelerator_type)
        if capacity is None or not (number := capacity.left_out.get(self.device_of(job), 0)):
            return ""
        more = f" and {len(capacity.marks) - _MARKS_NAMED} more" if len(capacity.marks) > _MARKS_NAMED else ""
        named = ", ".join(capacity.marks[:_MARKS_NAMED]) + more
        return f"; {number} more on nodes that take none: {named}; `slotline node include NAME` puts one back"

    def _quota_is_short(self, job: WaitingJob) -> str | None:
        for scope in job.quota_scopes:
            pool, quota = self._limits.get(scope), self._quotas.get(scope)
            if pool is not None and quota is not None and pool.used + job.accelerators > quota:
                return (
                    f"waits for {job.accelerators} accelerators of {_scope_text(scope)}; "
                    f"{quota - pool.used} of its quota of {quota} free{pool.used_by(job.project)}"
                )
        return None


def _held_up(job: WaitingJob, limits: Sequence[_ResourcePool]) -> Sequence[_ResourcePool]:
    """The quotas in which others wait behind the job: up to the first that is short, so of a project without quota left
    only its own; all where none is."""
    for number, limit in enumerate(limits, 1):
        if not limit.fits(job):
            return limits[:number]
    return limits


def _scope_text(scope: QuotaScope) -> str:
    return (
        f"project {scope.project} in queue {scope.queue}"
        if isinstance(scope, ProjectQueue)
        else f"queue {scope}"
    )


def _quota_command(scope: ProjectQueue) -> str:
    return f"slotline quota {scope.queue} NUMBER --project {scope.project}"


def _job_text(job_id: str, project: str, *, to: str) -> str:
    """The job in a message to one of the project `to`, whose members may not see it."""
    return f"job {job_id}" if project in (to, DEFAULT_PROJECT) else "a job of another project"


def _make_pool(total: int, users: list[Holder], now: float) -> _ResourcePool:
    profile = AvailabilityProfile(total, now, [(user.accelerators, user.until) for user in users])
    return _ResourcePool(profile, list(users), used=sum(user.accelerators for user in users))


def _make_device_pool(
    device: str,
    accelerator_type: str | None,
    parts: Mapping[str | None, Capacity],
    holders: Sequence[Holder],
    now: float,
) -> _ResourcePool:
    """The accelerators of a device and type; `parts` are the cluster's by type."""
    capacity = parts[accelerator_type]
    total = capacity.total.get(device, 0) - capacity.others.get(device, 0)
    users = [h for h in holders if h.device == device and _may_be_of(h, accelerator_type, parts)]
    amounts = [user.accelerators - user.left_out for user in users]
    usage = [(amount, user.until) for amount, user in zip(amounts, users, strict=True)]
    profile = AvailabilityProfile(total, now, usage)
    return _ResourcePool(profile, users, device, accelerator_type, capacity, used=sum(amounts))


def _may_be_of(holder: Holder, accelerator_type: str | None, types: Collection[str | None]) -> bool:
    """True where the holder's accelerators are of the type; and of each where all nodes tell theirs and the holder, which an
    older release started, does not."""
    known = holder.accelerator_type
    return known == accelerator_type or (known is None and None not in types)


def _too_small_message(
    job: WaitingJob, device: str, total: int, cluster: str, types: Mapping[str | None, int]
) -> str:
    """`types`: accelerators by type that the cluster has on nodes that take work."""
    resource = resource_text(device, job.accelerator_type)
    offered = {kind or "no type": number for kind, number in types.items() if number}
    if job.accelerator_type is not None or len(offered) > 1:
        listed = ", ".join(f"{number} of {kind}" for kind, number in sorted(offered.items())) or "none"
        way_out = "another resources.accelerator" if job.accelerator_type else "fewer resources.meshes"
        return (
            f"needs {job.accelerators} accelerators of {resource}, all of one type; the cluster{cluster} has {listed}: "
            f"add nodes, or submit with {way_out}"
        )
    if job.began:
        return (
            f"waits for {job.accelerators} accelerators of {resource}, the cluster{cluster} has {total}; it began on "
            f"{device} and goes on only there: add nodes, or submit it anew for another device"
        )
    return (
        f"needs {job.accelerators} accelerators of {resource}; the cluster{cluster} has {total}: add nodes, "
        f"or submit with {'fewer resources.meshes' if total else 'another resources.device'}"
    )


def _usage_message(users: Sequence[Holder], project: str) -> str:
    """The holders, of which those that members of the project see have names."""
    if not users:
        return ""
    seen = [user for user in users if user.project in (project, DEFAULT_PROJECT)]
    parts = [f"job {user.job_id} uses {user.accelerators}" for user in seen[:3]]
    if len(seen) > 3:
        parts.append(f"{len(seen) - 3} more jobs use {sum(user.accelerators for user in seen[3:])}")
    if len(seen) < len(users):
        hidden = sum(user.accelerators for user in users) - sum(user.accelerators for user in seen)
        parts.append(f"jobs of other projects use {hidden}")
    return f" ({', '.join(parts)})"


class AvailabilityProfile:
    """Accelerators, or quota, free from `now` on, as a step function of time over numpy arrays, for backfill.

    `usage` are the parts of `total` that are taken now, as (amount, end).
    """

    def __init__(self, total: int, now: float, usage: Iterable[tuple[int, float]] = ()) -> None:
        self.now = now
        taken, back = 0, dict[float, int]()
        for amount, until in usage:
            taken += amount
            if now < until < math.inf:  # an end in the past is unknown
                back[until] = back.get(until, 0) + amount
        ends = sorted(back)
        self._times = np.array([now, *ends])
        self._free = (total - taken) + np.cumsum([0, *(back[end] for end in ends)])

    @property
    def free(self) -> int:
        """Amount free now."""
        return int(self._free[0])

    def copy(self) -> AvailabilityProfile:
        other = AvailabilityProfile(0, self.now)
        other._times, other._free = self._times.copy(), self._free.copy()
        return other

    def fits_now(self, amount: int, length_s: float) -> bool:
        """True where `amount` stays free for `length_s` from now on."""
        if self._free[0] < amount:
            return False
        if length_s == math.inf:
            return bool(self._free.min() >= amount)
        last = np.searchsorted(self._times, self.now + length_s)
        return bool(self._free[:last].min() >= amount)

    def first_fit(self, amount: int, length_s: float, not_before: float | None = None) -> float | None:
        """The first time from which on `amount` is free for `length_s`; None where none is known."""
        begin = self.now if not_before is None else not_before
        short = np.flatnonzero(self._free < amount)
        if not short.size:
            return begin
        ends_of_short = np.append(self._times, math.inf)[short + 1]
        begins = np.maximum(np.append(self.now, ends_of_short), begin)
        ends = np.append(self._times[short], math.inf)
        fits = (begins < math.inf) & (begins + length_s <= ends)
        if not fits.any():
            return None
        return float(begins[np.argmax(fits)])

    def take(self, amount: int, begin: float, end: float) -> None:
        """Take `amount` from `begin` to `end`; a negative amount gives it back."""
        first = self._cut(begin)
        last = len(self._times) if end == math.inf else self._cut(end)
        self._free[first:last] -= amount

    def _cut(self, time: float) -> int:
        """The index of the step that begins at `time`, which is inserted where there is none."""
        index = int(np.searchsorted(self._times, time))
        if index == len(self._times) or self._times[index] != time:
            self._times = np.insert(self._times, index, time)
            self._free = np.insert(self._free, index, self._free[max(index - 1, 0)])
        return index
