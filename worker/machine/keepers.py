"""The keepers of a job's copies as actors of Ray: one on each node with workers, found by name, detached from all attempts.

What a keeper does is in worker/checkpoint/copies.py. Needs no torch, so that a task that only ends keepers does not; Ray is
imported only when a function is called.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from worker.contract.job import job_of_keeper, keeper_name

log = logging.getLogger(__name__)

_NAMESPACE = "slotline"


def find_keepers(job: str) -> dict[str, Any]:
    """The living keepers of `job`, by Ray's ids of their nodes."""
    import ray

    found = {}
    for name in _names():
        if job_of_keeper(name) == job:
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                found[name.rpartition("-")[2]] = ray.get_actor(name, namespace=_NAMESPACE)
    return found


def start_keepers(
    actor_class: type, job: str, node_ids: Collection[str], *, interpreter: str | None
) -> dict[str, Any]:
    """The keepers of `job` on these nodes, by node: those that are there, and new ones, which come up by themselves.
    `interpreter` are the words of a shell that run them; None: those that Ray takes."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options: dict[str, Any] = {"runtime_env": {"py_executable": interpreter}} if interpreter else {}
    return {
        node_id: ray.remote(actor_class)
        .options(
            name=keeper_name(job, node_id),
            namespace=_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            **options,
        )
        .remote(job)
        for node_id in node_ids
    }


def end_keepers(jobs: Collection[str], *, but_on: Collection[str] = ()) -> list[str]:
    """End the keepers of these jobs, and what they hold, but those on some nodes (Ray's ids); their names."""
    import ray

    ended = []
    for name in _names():
        if job_of_keeper(name) in jobs and name.rpartition("-")[2] not in but_on:
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(name, namespace=_NAMESPACE), no_restart=True)
                ended.append(name)
    return ended


def keeper_results(calls: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """The results of calls of keepers by node, of those that answer within `limit_s` seconds."""
    import ray

    done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=limit_s) if calls else ([], [])
    found = {}
    for node_id, ref in calls.items():
        if ref in done:
            try:
                found[node_id] = ray.get(ref)
            except ray.exceptions.RayActorError as error:
                log.warning(
                    "the keeper of copies on node %s is gone: %s", node_id, " ".join(str(error).split())[:300]
                )
    return found


def _names() -> Sequence[str]:
    import ray

    listed = ray.util.list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in listed if entry["namespace"] == _NAMESPACE]
