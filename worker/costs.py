"""What is measured of a job, as the control plane reads it with a request for a plan.

Pure values, light: no torch. Who measures is the driver with a whole gang, or the profiler with one worker.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from worker.model.profile import PROFILE_FORMAT, LayerProfile, slowest_profile

# worker/profiler.py reads its request from this variable of the environment, and answers in a line with this mark.
REQUEST_VARIABLE = "SLOTLINE_PROFILE_JOB"
ANSWER_MARK = "SLOTLINE_COSTS "


def outgrows(found: Mapping[int, LayerProfile], count: int, least_bytes: int | None) -> bool:
    """Whether, by the profiles at hand, one layer would keep more than `least_bytes` with only `count` microbatches."""
    nearest = min(found)
    largest = max((layer.activation_bytes for layer in found[nearest].layers), default=0)
    return least_bytes is not None and largest * nearest / count > least_bytes


def least_memory_bytes(memory: Mapping[str, Any]) -> int | None:
    """What the mesh with the least memory may hold, of a request's `memory`; None where nothing tells."""
    return min((one["memory_bytes"] for one in memory["memory"]), default=None)


def profiles_json(profiles: Mapping[int, LayerProfile]) -> dict[str, Any]:
    """The part of a request with the profiles; a single one stands where control planes have always read it."""
    if len(profiles) == 1:
        ((count, profile),) = profiles.items()
        return {"microbatches": count, "profile": profile.to_json()}
    return {
        "profiles": [
            {"microbatches": count, "profile": profile.to_json()} for count, profile in profiles.items()
        ]
    }


def of_meshes_json(
    by_key: Mapping[str, LayerProfile],
    keys: Sequence[Mapping[int, str]],
    kinds: Sequence[tuple[int, int]],
    counts: Iterable[int],
) -> dict[str, Any]:
    """The part of a request with the profiles of meshes of unlike sizes, whose workers have unlike numbers of samples:
    of the slowest kind of accelerator of each. `keys` (by microbatches) and `kinds` (the workers of its mesh, and how many
    of them share matrices) are one a worker."""
    if len({*kinds}) <= 1:
        return {}
    found = []
    for count in counts:
        for kind in sorted({*kinds}):
            own = dict.fromkeys(key[count] for key, of in zip(keys, kinds, strict=True) if of == kind)
            found.append(of_mesh_json(count, kind, slowest_profile([by_key[key] for key in own])))
    return {"mesh_profiles": found}


def of_mesh_json(microbatches: int, kind: tuple[int, int], profile: LayerProfile) -> dict[str, Any]:
    """A profile of meshes of a kind: so many workers, so many of which share matrices."""
    workers, tensor = kind
    shares = {"tensor": tensor} if tensor > 1 else {}
    return {"microbatches": microbatches, "workers": workers, **shares, "profile": profile.to_json()}


def costs_digest(spec: Mapping[str, Any]) -> str:
    """The same for two jobs (JSON of JobSpecs) whose layers, links and memory cost the same where they run.

    What only planning and the steps read (stages, cut, schedule, microbatches, steps, seed) makes no difference.
    """
    training = spec["training"]
    parts = {name: spec[name] for name in ("model", "data", "loss", "optimizer", "code", "resources")}
    parts["model"] = {name: value for name, value in spec["model"].items() if name != "weights"}
    parts |= {name: spec[name] for name in ("env", "secrets") if spec.get(name)}
    parts["format"] = PROFILE_FORMAT
    parts["training"] = {
        name: training[name] for name in ("global_batch", "precision", "transfers", "clip_grad_norm")
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
