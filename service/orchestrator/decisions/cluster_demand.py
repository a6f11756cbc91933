"""The demand of a Ray cluster: the accelerators that it must have in all for the gangs that wait.

Ray's autoscaler takes one request for the whole cluster and compares it with all nodes, whether or not they are in use.
So what running attempts and other programs hold is part of the demand, or their nodes would count for the gangs that
wait. It takes a request whole or not at all: one gang too many, and the cluster grows for none. Gangs therefore stand in
the order of their turns, for the longest part of them that fits; `ceilings` remember what did not. A pure function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from service.orchestrator.decisions.attempt_lifecycle import Capacity, Device, Holder, WaitingJob, device_of

GANGS_LIMIT = 500
"""Gangs of a demand at most: no cluster grows for more at once, and the autoscaler reads it every few seconds."""


@dataclass(frozen=True)
class WaitingGang:
    """The accelerators of a job that waits."""

    job_id: str
    device: Device
    accelerators: int


@dataclass(frozen=True)
class ClusterDemand:
    """Accelerators by device that are `held`, and `gangs` that want theirs besides, in the order of their turns. Empty
    where the cluster may shrink to what is in use."""

    held: Mapping[Device, int] = field(default_factory=dict)
    gangs: tuple[WaitingGang, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.held or self.gangs)

    def first(self, number: int) -> ClusterDemand:
        """The demand of the first `number` gangs alone."""
        return ClusterDemand(self.held, self.gangs[:number])

    @property
    def totals(self) -> dict[Device, int]:
        """Accelerators in all, by device, without zeros."""
        totals = Counter(self.held)
        for gang in self.gangs:
            totals[gang.device] += gang.accelerators
        return {device: number for device, number in totals.items() if number}

    def grown_for(self, total: Mapping[str, int]) -> list[WaitingGang]:
        """The gangs that do not fit into `total` accelerators beside what is held and the gangs before them."""
        taken, beyond = Counter(self.held), list[WaitingGang]()
        for gang in self.gangs:
            taken[gang.device] += gang.accelerators
            if taken[gang.device] > total.get(gang.device, 0):
                beyond.append(gang)
        return beyond


def cluster_demand(
    turns: Sequence[WaitingJob],
    holders: Sequence[Holder],
    *,
    cluster: str,
    capacity: Capacity,
    others: Mapping[str, int],
    quotas: Mapping[str, int | None],
    ceilings: Mapping[Device, int],
    starting: Collection[str] = (),
) -> ClusterDemand:
    """The demand of `cluster` for the jobs of all clusters that wait, in the order of their `turns`.

    A gang counts as far as the quota of its queue lets it start beside the queue's `holders` and the gangs before it; of a
    queue none overtakes. `others` are accelerators by device that the autoscaler counts and no gang gets: of other programs,
    and of nodes that take no work. No device has more in all than its ceiling, under which a smaller gang may come behind
    one that does not fit. Holders that are stopping leave theirs to the gangs. Attempts of the jobs `starting` keep what
    was asked for before, until their workers hold it.
    """
    here = [holder for holder in holders if holder.cluster == cluster and not holder.stopping]
    held = Counter({device: others.get(device, 0) for device in _DEVICES})
    for holder in here:
        held[holder.device] += holder.accelerators - holder.left_out
    quota_used = Counter[str]()
    for holder in holders:
        quota_used[holder.queue] += holder.accelerators
    total, gangs = Counter(held), list[WaitingGang]()
    full_queues = set[str]()
    for job in turns:
        quota = quotas.get(job.queue)
        if job.cluster != cluster or job.began_on not in (None, cluster) or job.queue in full_queues:
            continue
        if quota is not None and quota_used[job.queue] + job.accelerators > quota:
            if job.accelerators <= quota:
                full_queues.add(job.queue)
            continue
        device = _device_to_grow(job, capacity)
        if total[device] + job.accelerators > ceilings.get(device, total[device] + job.accelerators):
            continue
        quota_used[job.queue] += job.accelerators
        total[device] += job.accelerators
        gangs.append(WaitingGang(job.id, device, job.accelerators))
        if len(gangs) == GANGS_LIMIT:
            break
    devices = {gang.device for gang in gangs} | {
        holder.device for holder in here if holder.job_id in starting
    }
    return ClusterDemand({device: held[device] for device in _DEVICES if device in devices}, tuple(gangs))


_DEVICES: tuple[Device, ...] = ("cpu", "cuda")


def _device_to_grow(job: WaitingJob, capacity: Capacity) -> Device:
    """The device of a gang, as admission chooses it; but GPUs for `auto` on a cluster that has no CPU workers either."""
    device = device_of(job.device, job.accelerators, capacity)
    has_cpu = capacity.total.get("cpu", 0) + capacity.left_out.get("cpu", 0) > 0
    return "cuda" if job.device == "auto" and device == "cpu" and not has_cpu else device
