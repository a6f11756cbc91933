"""Gaps of real plans: they tile each lane with its slots, and every one has a cause."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.programs.plan import Plan
from service.scheduler.why.gaps import IdleReason, find_gaps

COST = st.sampled_from([0.25, 0.5, 1.0, 2.0])


@st.composite
def specs(draw: st.DrawFn) -> PipelineSpec:
    """A chain with perhaps one skip, one stage a mesh."""
    stages = draw(st.integers(1, 4))
    pairs = [(i, i + 1) for i in range(stages - 1)]
    if stages > 2 and draw(st.booleans()):
        pairs.append((0, stages - 1))
    return PipelineSpec.model_validate(
        {
            "microbatches": draw(st.integers(1, 5)),
            "meshes": [{"name": f"m{i}"} for i in range(stages)],
            "stages": [
                {
                    "name": f"s{i}",
                    "mesh": f"m{i}",
                    "forward_s": draw(COST),
                    "backward_input_s": draw(COST),
                    "backward_weight_s": draw(COST),
                    "activation_bytes": 1,
                }
                for i in range(stages)
            ],
            "edges": [
                {"source": f"s{a}", "target": f"s{b}", "forward_s": draw(COST), "backward_s": draw(COST)}
                for a, b in pairs
            ],
            "network": {"contention": draw(st.sampled_from(["none", "link", "full-duplex", "half-duplex"]))},
            "overlap": draw(st.booleans()),
            "schedule": draw(st.sampled_from(["gpipe", "1f1b", "eager-1f1b", "zb-h1"])),
        }
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs())
def test_gaps_and_slots_together_cover_every_compute_lane(spec: PipelineSpec):
    plan = make_plan(spec)
    gaps = find_gaps(spec, plan.slots, end_s=plan.makespan_s)
    for mesh in spec.meshes:
        pieces = _lane(plan, mesh.name) + [(gap.start_s, gap.end_s) for gap in gaps if gap.mesh == mesh.name]
        pieces.sort()
        assert pieces[0][0] == pytest.approx(0, abs=1e-9)
        assert pieces[-1][1] == pytest.approx(plan.makespan_s)
        for (_, end_s), (start_s, _) in itertools.pairwise(pieces):
            assert end_s == pytest.approx(start_s, abs=1e-6)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs())
def test_a_plan_with_overlap_leaves_no_gap_without_a_cause(spec: PipelineSpec):
    """The simulator starts what it can: a lane that holds back a ready action would be its mistake."""
    spec = spec.model_copy(update={"overlap": True})
    plan = make_plan(spec)
    reasons = {gap.reason for gap in find_gaps(spec, plan.slots, end_s=plan.makespan_s)}
    assert reasons <= {IdleReason.UPSTREAM, IdleReason.DOWNSTREAM, IdleReason.TRANSFER, IdleReason.DONE}


def test_free_transfers_leave_nothing_exposed():
    """With transfers of no length, a 1F1B chain idles (stages - 1) x (F + B) a mesh, and all of it waits."""
    stages, cost = 4, {"forward_s": 1.0, "backward_input_s": 1.0, "backward_weight_s": 1.0}
    spec = PipelineSpec.model_validate(
        {
            "microbatches": 6,
            "meshes": [{"name": f"m{i}"} for i in range(stages)],
            "stages": [{"name": f"s{i}", "mesh": f"m{i}", **cost} for i in range(stages)],
            "edges": [
                {"source": f"s{i}", "target": f"s{i + 1}", "forward_s": 0, "backward_s": 0} for i in range(3)
            ],
            "schedule": "1f1b",
        }
    )
    plan = make_plan(spec)
    gaps = find_gaps(spec, plan.slots, end_s=plan.makespan_s)
    idle = sum(gap.end_s - gap.start_s for gap in gaps)
    assert idle == pytest.approx(stages * (stages - 1) * 3.0)
    assert not any(gap.reason is IdleReason.TRANSFER for gap in gaps)


def _lane(plan: Plan, mesh: str) -> list[tuple[float, float]]:
    return [(slot.start_s, slot.end_s) for slot in plan.slots if slot.mesh == mesh and slot.lane == "compute"]


def test_a_plan_of_an_older_version_is_drawn_without_its_gaps():
    from service.jobs.explain import explained_gaps

    slots = [
        {"mesh": mesh, "lane": "compute", "action": "F", "start_s": 0, "end_s": 1} for mesh in ("b", "a", "b")
    ]
    text = json.dumps({"spec": {"microbatches": 1, "gone": True}, "plan": {"slots": slots}})
    assert explained_gaps(text, []) == {"meshes": ["b", "a"], "planned": [], "measured": []}
