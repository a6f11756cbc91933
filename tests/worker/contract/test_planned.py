"""What a plan says of memory, and what running out of it teaches."""

from __future__ import annotations

import pytest

from worker.contract.planned import corrected_activation_factor, planned_peak_bytes, static_bytes_by_mesh

SPEC = {
    "meshes": [{"name": "m0"}, {"name": "m1"}],
    "stages": [
        {"mesh": "m0", "static_bytes": 10},
        {"mesh": "m1", "static_bytes": 20},
        {"mesh": "m0", "static_bytes": 3},
    ],
}


def test_the_planned_peak_is_the_plans_own_or_static_bytes_and_activations():
    assert static_bytes_by_mesh(SPEC) == {"m0": 13, "m1": 20}
    plan = {
        "meshes": [{"name": "m0", "peak_activation_bytes": 5}, {"name": "m1", "peak_activation_bytes": 1}]
    }
    assert planned_peak_bytes(SPEC, plan) == {"m0": 18, "m1": 21}
    plan["meshes"][0]["peak_memory_bytes"] = 40
    assert planned_peak_bytes(SPEC, plan) == {"m0": 40, "m1": 21}


@pytest.mark.parametrize(
    ("before", "seen", "factor"),
    [(1.0, 250, 2.0), (1.0, 0, 1.25), (1.0, 150, 1.25), (1.0, 10_000, 4.0), (1.5, 250, 3.0), (6.0, 250, 8.0)],
)
def test_activations_are_corrected_by_what_was_seen_above_the_static_bytes(before, seen, factor):
    assert corrected_activation_factor(before, planned_bytes=150, static_bytes=50, seen_bytes=seen) == factor


def test_a_mesh_without_activations_is_corrected_by_the_least():
    assert corrected_activation_factor(1.0, planned_bytes=50, static_bytes=50, seen_bytes=90) == 1.25
