"""Admission over several Ray clusters: one policy decision each, from its own capacity and queues.

Pure functions. A job starts only on the cluster of its queue, and only where its earlier attempts ran, since its
checkpoints are there; else it waits and is told so. Only a quota looks further: what a queue's jobs hold on a
cluster that it belonged to before counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from service.orchestrator.decisions.admission_and_preemption import admit
from service.orchestrator.decisions.attempt_lifecycle import (
    Capacity,
    Holder,
    Preempt,
    QueueRules,
    Start,
    Wait,
    WaitingJob,
    device_of,
)
from service.orchestrator.decisions.fair_share import fair_order
from service.spec.principals import QuotaScope
from worker.contract.reasons import Reason

_OTHER_CLUSTER_DEVICE = "elsewhere"
"""Device of a holder on another cluster: equal to no device of this one."""


def admit_all_clusters(
    waiting: Sequence[WaitingJob],
    holders: Sequence[Holder],
    *,
    capacities: Mapping[str, Capacity | None],
    quotas: Mapping[QuotaScope, int | None],
    now: float,
    rules: QueueRules = QueueRules(),
) -> list[Start | Wait | Preempt]:
    """`policy.admit` of each cluster for the jobs whose queue belongs to it; `capacities` are by cluster.

    A job starts on the cluster of its queue only. One that cannot, because it began on another, or because nobody
    knows its queue or the cluster, waits, and is told so.
    """
    misplaced = {
        job.id: wait for job in waiting if (wait := explain_misplaced(job, list(capacities))) is not None
    }
    answers: list[Start | Wait | Preempt] = list(misplaced.values())
    for cluster, capacity in capacities.items():
        here = [job for job in waiting if job.cluster == cluster and job.id not in misplaced]
        growing = [holder for holder in holders if holder.cluster == cluster and holder.larger]
        if here or growing:
            answers += admit(
                here,
                _holders_seen_from(cluster, holders, {entry.queue for entry in (*here, *growing)}),
                capacity=capacity,
                quotas=quotas,
                now=now,
                rules=rules,
                cluster_name=f" {cluster}" if len(capacities) > 1 else "",
            )
    return answers


def order_all_clusters(
    waiting: Sequence[WaitingJob],
    holders: Sequence[Holder],
    *,
    capacities: Mapping[str, Capacity | None],
    now: float,
    patience_s: float,
) -> list[WaitingJob]:
    """All waiting jobs; jobs of one cluster in the order of their turns."""
    ordered = list[WaitingJob]()
    for cluster in dict.fromkeys(job.cluster for job in waiting):
        ordered += fair_order(
            [job for job in waiting if job.cluster == cluster],
            [holder for holder in holders if holder.cluster == cluster],
            device_of=_device_on(capacities.get(cluster or "")),
            now=now,
            patience_s=patience_s,
        )
    return ordered


def _device_on(capacity: Capacity | None) -> Callable[[WaitingJob], str]:
    def device(job: WaitingJob) -> str:
        if capacity is None:
            return job.device
        return device_of(job.device, job.accelerators, capacity, accelerator_type=job.accelerator_type)

    return device


def explain_misplaced(job: WaitingJob, clusters: Sequence[str]) -> Wait | None:
    """The Wait of a job that can start on no cluster under the present settings; None where it may."""
    known = ", ".join(clusters)
    if job.began_on is not None and job.began_on not in clusters:
        message = (
            f"began on cluster {job.began_on}, where its checkpoints are, and there is no such cluster any more "
            f"(SLOTLINE_CLUSTERS; there are: {known}): name it there again, or cancel the job and submit it anew"
        )
    elif job.cluster is None:
        message = (
            f"its queue {job.queue} is not in SLOTLINE_QUEUES any more, so that nothing says on which cluster it may run: "
            "move it to another queue, or configure that one again"
        )
    elif job.began_on not in (None, job.cluster):
        message = (
            f"began on cluster {job.began_on}, where its checkpoints are, and its queue {job.queue} now belongs to cluster "
            f"{job.cluster}: move it to a queue of {job.began_on}, or cancel it and submit it anew"
        )
    elif job.cluster not in clusters:
        message = f"there is no cluster {job.cluster}, to which its queue belongs (there are: {known})"
    else:
        return None
    return Wait(job.id, Reason.WAITS_FOR_CLUSTER, message)


def _holders_seen_from(cluster: str, holders: Sequence[Holder], queues: set[str]) -> list[Holder]:
    """Holders on `cluster`; for the quotas of `queues` also their holders on other clusters."""
    return [
        holder if holder.cluster == cluster else replace(holder, device=_OTHER_CLUSTER_DEVICE, larger=())
        for holder in holders
        if holder.cluster == cluster or holder.queue in queues
    ]
