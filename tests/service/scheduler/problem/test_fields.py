"""What each field may hold at least and at most, and what it is where nobody says, written down again by hand."""

import math

import pytest
from pydantic import ValidationError

from service.scheduler.problem.spec import EdgeSpec, LinkSpec, MeshSpec, NetworkSpec, PipelineSpec, StageSpec

STAGE = {"name": "s0", "mesh": "m0", "forward_s": 1.0}
PIPELINE = {"microbatches": 1, "meshes": [{"name": "m0"}], "stages": [STAGE]}
SMALLEST = {
    MeshSpec: {"name": "m0"},
    StageSpec: STAGE,
    EdgeSpec: {"source": "a", "target": "b"},
    LinkSpec: {"source": "a", "target": "b"},
    NetworkSpec: {},
    PipelineSpec: PIPELINE,
}


@pytest.mark.parametrize(
    ("kind", "field", "legal", "illegal"),
    [
        (MeshSpec, "name", ["m", "m" * 256], ["", "m" * 257, None, 3]),
        (MeshSpec, "activation_limit_bytes", [0, None], [-1, 0.5, True, "1"]),
        (MeshSpec, "memory_bytes", [0, None], [-1]),
        (MeshSpec, "receive_buffer_limit", [0, None], [-1]),
        *((StageSpec, field, [0.0, 0], [-1e-9, math.inf, math.nan, None, "1"]) for field in ("forward_s",)),
        (StageSpec, "backward_s", [0.0, None], [-1e-9]),
        (StageSpec, "static_bytes", [0], [-1, None]),
        (EdgeSpec, "forward_s", [0.0, None], [-1e-9]),
        (EdgeSpec, "backward_bytes", [0, None], [-1]),
        (LinkSpec, "bandwidth_bytes_per_s", [1e-9, 0.5, None], [0, -1, math.inf]),
        (NetworkSpec, "bandwidth_bytes_per_s", [1e-9, 0.5, None], [0, -1, math.inf]),
        (NetworkSpec, "latency_s", [0.0], [-1e-9, None]),
        (NetworkSpec, "contention", ["none", "link", "full-duplex", "half-duplex"], ["duplex", None]),
        (PipelineSpec, "microbatches", [1, 1_000_000], [0, 1_000_001, 1.5, None]),
        (PipelineSpec, "meshes", [[{"name": "m0"}]], [[]]),
        (PipelineSpec, "stages", [[STAGE]], [[]]),
        (PipelineSpec, "max_in_flight", [1, None], [0]),
        (PipelineSpec, "overlap", [True, False], [1, None, "yes"]),
        (PipelineSpec, "split_backward", [True, False, None], [0]),
    ],
)
def test_a_field_holds_what_it_may_to_the_last_value_and_nothing_beyond(kind, field, legal, illegal):
    for value in legal:
        assert getattr(kind(**{**SMALLEST[kind], field: value}), field) is not Ellipsis
    for value in illegal:
        with pytest.raises(ValidationError):
            kind(**{**SMALLEST[kind], field: value})


def test_what_nobody_says_is_as_the_design_has_it():
    spec = PipelineSpec(**PIPELINE)
    assert (spec.overlap, spec.schedule, spec.orders, spec.split_backward) == (True, "auto", None, None)
    assert (spec.max_in_flight, spec.edges) == (None, [])
    network = spec.network
    assert (network.contention, network.bandwidth_bytes_per_s, network.latency_s, network.links) == (
        "none",
        None,
        0.0,
        [],
    )
    (stage,) = spec.stages
    assert (stage.backward_input_s, stage.backward_weight_s, stage.backward_s) == (0.0, 0.0, None)
    held = (stage.activation_bytes, stage.weight_stash_bytes, stage.rematerialised_bytes, stage.static_bytes)
    assert held == (0, 0, 0, 0) and stage.recompute is None


@pytest.mark.parametrize(
    ("whole", "split", "shortest"),
    [(None, (2.0, 1.0), (2.0, 1.0)), (1.5, (2.0, 1.0), (1.0, 0.5)), (9.0, (2.0, 1.0), (2.0, 1.0))],
)
def test_a_split_backward_is_never_longer_than_the_whole_one(whole, split, shortest):
    stage = StageSpec(**STAGE, backward_input_s=split[0], backward_weight_s=split[1], backward_s=whole)
    assert stage.whole_backward_s == (sum(split) if whole is None else whole)
    found = stage.shortest_split()
    assert (found.backward_input_s, found.backward_weight_s) == pytest.approx(shortest)
    assert found.backward_s is None


def test_a_stage_without_a_backward_has_none_however_it_is_split():
    found = StageSpec(**STAGE, backward_s=3.0).shortest_split()
    assert (found.backward_input_s, found.backward_weight_s) == (0.0, 0.0)
