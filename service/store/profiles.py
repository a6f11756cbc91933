"""What was measured, in the store: profiles of layers by model, microbatch shape and device, for later attempts;
and all costs of a job by its digest, for plans without training.

What drivers store is kept apart by owner, model and code: the driver of one job, which runs its user's code, says
nothing of the layers of another, and nothing to another owner. Only what links cost is shared by all that use the
same nodes. Of each the newest are kept. What was measured on one cluster is of no other: their hardware differs, and
two may call their nodes the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.cluster_settings import DEFAULT
from service.principals import NOBODY
from service.store.tables import Profile
from service.store.upsert import upsert

_LINKS = "links of "
_LINKS_KEY = re.compile(r"links of (cpu|cuda) [0-9a-f]{64}")
_KEPT_OF_A_MODEL, _KEPT_LINKS = 64, 10_000


def scoped_key(spec: Mapping[str, Any], key: str, *, owner: str = NOBODY, cluster: str = DEFAULT) -> str:
    """Under which key the driver of an owner's job (JSON of a JobSpec) on a cluster finds and stores what it calls
    `key`."""
    if _LINKS_KEY.fullmatch(key):
        return _links_of(cluster) + key.removeprefix(_LINKS)
    return f"{_scope(spec, owner, cluster)}{key}"


def owned_digest(digest: str, owner: str, cluster: str = DEFAULT) -> str:
    """A digest of costs as the store has it: what one owner's drivers measured is not another's, nor another
    cluster's."""
    owned = f"{digest} of {hashlib.sha256(owner.encode()).hexdigest()}" if owner else digest
    return owned if cluster == DEFAULT else f"{owned} on {cluster}"


def _links_of(cluster: str) -> str:
    return _LINKS if cluster == DEFAULT else f"links in cluster {cluster} of "


def _scope(spec: Mapping[str, Any], owner: str, cluster: str) -> str:
    given = [spec.get("model"), spec.get("code"), *(spec[name] for name in ("env",) if spec.get(name))]
    given += [{"owner": owner}] if owner else []
    given += [] if cluster == DEFAULT else [{"cluster": cluster}]
    parts = json.dumps(given, sort_keys=True, default=str)
    return f"model {hashlib.sha256(parts.encode()).hexdigest()} "


async def record_drivers_profile(
    session: AsyncSession,
    spec: Mapping[str, Any],
    key: str,
    body: dict[str, Any],
    *,
    at: datetime,
    owner: str = NOBODY,
    cluster: str = DEFAULT,
) -> None:
    """Keep what the driver of a job measured; the oldest of its kind goes where there are too many."""
    found = scoped_key(spec, key, owner=owner, cluster=cluster)
    await record_profile(session, found, body, at=at)
    prefix, kept = _scope(spec, owner, cluster), _KEPT_OF_A_MODEL
    if _LINKS_KEY.fullmatch(key):
        prefix, kept = _links_of(cluster), _KEPT_LINKS
    same = Profile.key.startswith(prefix, autoescape=True)
    newest = select(Profile.key).where(same).order_by(Profile.created_at.desc(), Profile.key).limit(kept)
    await session.execute(delete(Profile).where(same, Profile.key.not_in(newest)))


async def record_profile(session: AsyncSession, key: str, body: dict[str, Any], *, at: datetime) -> None:
    await upsert(session, Profile, [{"key": key, "created_at": at, "body": body}])


async def find_profile(session: AsyncSession, key: str) -> dict[str, Any] | None:
    profile = await session.get(Profile, key)
    return None if profile is None else profile.body


GANG, ONE_WORKER = "gang", "one worker"
"""Who measured: the workers of an attempt, or one worker alone."""


async def record_costs(
    session: AsyncSession, digest: str, costs: dict[str, Any], *, measured_by: str, at: datetime
) -> None:
    """Keep what was measured of jobs with this digest (JSON of a driver's PlanRequest); profiles for numbers of
    microbatches that were measured before stay, with those of each mesh where meshes have unlike sizes."""
    profiles = {one["microbatches"]: one for one in costs.get("profiles") or ()}
    if costs.get("profile") is not None and costs.get("microbatches") is not None:
        profiles[costs["microbatches"]] = {name: costs[name] for name in ("microbatches", "profile")}
    key = _costs_key(digest, measured_by)
    before = await find_profile(session, key) or {"profiles": [], "tried": []}
    profiles = {one["microbatches"]: one for one in before["profiles"]} | profiles
    body = {name: value for name, value in costs.items() if name not in ("profile", "microbatches")} | {
        "profiles": list(profiles.values()),
        "tried": sorted({*before["tried"], *profiles, *(costs.get("tried") or ())}),
    }
    if of_meshes := _of_meshes(before) | _of_meshes(costs):
        body["mesh_profiles"] = list(of_meshes.values())
    await record_profile(session, key, body, at=at)


def _of_meshes(costs: Mapping[str, Any]) -> dict[tuple[int, int, int], Any]:
    """The profiles of meshes by numbers of microbatches, of workers, and of those that share matrices."""
    listed = costs.get("mesh_profiles") or ()
    return {(one["microbatches"], one["workers"], one.get("tensor", 1)): one for one in listed}


async def find_costs(
    session: AsyncSession, digest: str, counts: Sequence[int]
) -> tuple[dict[str, Any], str] | None:
    """What was measured for all these numbers of microbatches, and who measured; a gang rather than one worker."""
    for measured_by in (GANG, ONE_WORKER):
        found = await find_profile(session, _costs_key(digest, measured_by))
        if found is not None and set(counts) <= set(found["tried"]):
            wanted = [one for one in found["profiles"] if one["microbatches"] in counts]
            if wanted:
                return {**found, "profiles": wanted}, measured_by
    return None


async def known_costs(session: AsyncSession, digest: str) -> dict[str, Any] | None:
    """All that was measured of jobs with this digest, for whatever numbers of microbatches; a gang's rather."""
    for measured_by in (GANG, ONE_WORKER):
        if (found := await find_profile(session, _costs_key(digest, measured_by))) is not None:
            return found
    return None


def _costs_key(digest: str, measured_by: str) -> str:
    return f"costs of {digest} by {measured_by}"
