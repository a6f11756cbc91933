"""What a driver sends of meshes of unlike sizes: the slowest profile of each kind, as the control plane reads it."""

from __future__ import annotations

import json

from service.schemas.drivers import PlanRequest
from worker.contract.costs import mesh_profiles_json
from worker.contract.profile import LayerCost, LayerProfile


def _profile(seconds: float) -> LayerProfile:
    return LayerProfile((LayerCost("l0", seconds, seconds, seconds, 10, 0, 4),), (), "cpu", "", {})


def test_each_kind_of_mesh_has_the_profile_of_its_slowest_worker():
    """Kinds are workers of a mesh, and how many of them share matrices: as many workers may share otherwise."""
    by_key = {"a": _profile(1.0), "b": _profile(3.0), "c": _profile(2.0)}
    keys = [{4: "a"}, {4: "b"}, {4: "c"}, {4: "c"}]
    found = mesh_profiles_json(by_key, keys, [(2, 1), (2, 1), (2, 2), (2, 2)], [4])
    sent = json.dumps({"profile": _profile(1.0).to_json(), "microbatches": 4, **found})
    read = PlanRequest.model_validate_json(sent)
    assert [
        (one.microbatches, one.workers, one.tensor, one.profile["layers"][0]["forward_s"])
        for one in read.mesh_profiles
    ] == [(4, 2, 1, 3.0), (4, 2, 2, 2.0)]


def test_meshes_of_one_kind_need_no_profiles_of_their_own():
    assert mesh_profiles_json({"a": _profile(1.0)}, [{4: "a"}] * 2, [(2, 2)] * 2, [4]) == {}
