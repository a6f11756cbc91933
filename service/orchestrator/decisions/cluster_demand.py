"""The demand of a Ray cluster: the accelerators that it must have in all for the gangs that wait.

Ray's autoscaler takes one request for the whole cluster and compares it with all nodes, whether or not they are in use.
So what running attempts and other programs hold is part of the demand, or their nodes would count for the gangs that
wait. It takes a request whole or not at all: one gang too many, and the cluster grows for none. Gangs therefore stand in
the order of their turns, for the longest part of them that fits; `ceilings` remember what did not. A pure function.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from service.orchestrator.decisions.attempt_lifecycle import (
    AcceleratorKind,
    Capacity,
    Device,
    Holder,
    WaitingJob,
    device_of,
)
from service.spec.principals import QuotaScope

GANGS_LIMIT = 500
"""Gangs of a demand at most: no cluster grows for more at once, and the autoscaler reads it every few seconds."""


@dataclass(frozen=True)
class WaitingGang:
    """The accelerators of a job that waits."""

    job_id: str
    kind: AcceleratorKind
    """Of no type where the job asks for none."""
    accelerators: int


@dataclass(frozen=True)
class ClusterDemand:
    """Accelerators by device and type that are `held`, and `gangs` that want theirs besides, in the order of their turns.

    Empty where the cluster may shrink to what is in use.
    """

    held: Mapping[AcceleratorKind, int] = field(default_factory=dict)
    gangs: tuple[WaitingGang, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.held or self.gangs)

    def first(self, number: int) -> ClusterDemand:
        """The demand of the first `number` gangs alone."""
        return ClusterDemand(self.held, self.gangs[:number])

    @property
    def totals(self) -> dict[AcceleratorKind, int]:
        """Accelerators in all, by device and type, without zeros."""
        totals = Counter(self.held)
        for gang in self.gangs:
            totals[gang.kind] += gang.accelerators
        return {kind: number for kind, number in totals.items() if number}

    def grown_for(self, capacity: Capacity) -> list[WaitingGang]:
        """The gangs that do not fit into the cluster, or into its nodes of their type, beside what is held and the gangs
        before them."""
        beyond, taken, of_device = list[WaitingGang](), Counter(self.held), Counter[str]()
        for kind, number in self.held.items():
            of_device[kind.device] += number
        for gang in self.gangs:
            device, accelerator_type = gang.kind
            taken[gang.kind] += gang.accelerators
            of_device[device] += gang.accelerators
            own = capacity.types.get(accelerator_type, Capacity({})).in_all(device)
            if of_device[device] > capacity.in_all(device) or (accelerator_type and taken[gang.kind] > own):
                beyond.append(gang)
        return beyond


def cluster_demand(
    turns: Sequence[WaitingJob],
    holders: Sequence[Holder],
    *,
    cluster: str,
    capacity: Capacity,
    others: Mapping[AcceleratorKind, int],
    quotas: Mapping[QuotaScope, int | None],
    ceilings: Mapping[AcceleratorKind, int],
    starting: Collection[str] = (),
) -> ClusterDemand:
    """The demand of `cluster` for the jobs of all clusters that wait, in the order of their `turns`.

    A gang counts as far as the quotas of its queue, and of its project there, let it start beside the `holders` and the
    gangs before it; behind one that waits for a quota none of the same quota does. `others` are accelerators that the
    autoscaler counts and no gang gets: of other programs, and of nodes that take no work. What is held counts by type
    where a gang asks for the type. No kind has more in all than its ceiling, under which a smaller gang may come behind
    one that does not fit. Holders that are stopping leave theirs to the gangs. Attempts of the jobs `starting` keep what
    was asked for before, until their workers hold it.
    """
    here = [holder for holder in holders if holder.cluster == cluster and not holder.stopping]
    asked_types = {job.accelerator_type for job in turns if job.cluster == cluster}
    held = Counter[AcceleratorKind]()
    for (device, accelerator_type), number in [
        *others.items(),
        *(
            ((holder.device, holder.accelerator_type), holder.accelerators - holder.left_out)
            for holder in here
        ),
    ]:
        held[AcceleratorKind(device, accelerator_type if accelerator_type in asked_types else None)] += number
    quota_used = Counter[QuotaScope]()
    for holder in holders:
        for scope in holder.quota_scopes:
            quota_used[scope] += holder.accelerators
    total, gangs = Counter(held), list[WaitingGang]()
    exhausted = set[QuotaScope]()
    for job in turns:
        scopes = job.quota_scopes
        if job.cluster != cluster or job.began_on not in (None, cluster) or exhausted.intersection(scopes):
            continue
        short = [scope for scope in scopes if _quota_left(scope, quotas, quota_used) < job.accelerators]
        if short:
            if not any(_quota_left(scope, quotas, {}) < job.accelerators for scope in short):
                exhausted.add(short[0])
            continue
        kind = AcceleratorKind(_device_to_grow(job, capacity), job.accelerator_type)
        if total[kind] + job.accelerators > ceilings.get(kind, total[kind] + job.accelerators):
            continue
        quota_used.update(dict.fromkeys(scopes, job.accelerators))
        total[kind] += job.accelerators
        gangs.append(WaitingGang(job.id, kind, job.accelerators))
        if len(gangs) == GANGS_LIMIT:
            break
    devices = {gang.kind.device for gang in gangs} | {
        holder.device for holder in here if holder.job_id in starting
    }
    return ClusterDemand(
        {kind: number for kind, number in sorted(held.items(), key=str) if kind.device in devices},
        tuple(gangs),
    )


def _quota_left(
    scope: QuotaScope, quotas: Mapping[QuotaScope, int | None], used: Mapping[QuotaScope, int]
) -> float:
    quota = quotas.get(scope)
    return math.inf if quota is None else quota - used.get(scope, 0)


def _device_to_grow(job: WaitingJob, capacity: Capacity) -> Device:
    """The device of a gang, as admission chooses it; but GPUs for `auto` on a cluster that has no CPU workers either."""
    device = device_of(job.device, job.accelerators, capacity, accelerator_type=job.accelerator_type)
    return "cuda" if job.device == "auto" and device == "cpu" and not capacity.in_all("cpu") else device
