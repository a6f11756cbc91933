"""Reasons of gaps, against timelines small enough to work out by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.why.gaps import IdleReason, find_gaps


@dataclass
class Slot:
    mesh: str
    lane: str
    action: str
    stage: str | None
    microbatch: int | None
    start_s: float
    end_s: float
    edge: int | None = None


def compute(name: str, start_s: float, end_s: float, mesh: str | None = None) -> Slot:
    """`compute("0F1", 0, 1)`: stage s0 on mesh m0, forward of microbatch 1."""
    stage, action, microbatch = name[0], name[1], int(name[2:])
    return Slot(mesh or f"m{stage}", "compute", action, f"s{stage}", microbatch, start_s, end_s)


def transfer(name: str, start_s: float, end_s: float, edge: int) -> list[Slot]:
    """`transfer("0F1>1", ...)`: both halves of what stage 0 sends to stage 1."""
    source, target = name[0], name[-1]
    kind, microbatch = name[1], int(name[2:-2])
    return [
        Slot(f"m{source}", f"send:m{target}", f"SEND_{kind}", f"s{source}", microbatch, start_s, end_s, edge),
        Slot(f"m{target}", f"recv:m{source}", f"RECV_{kind}", f"s{target}", microbatch, start_s, end_s, edge),
    ]


def spec(
    stages: int = 2, *, edges: list[dict] | None = None, limits: dict | None = None, **fields
) -> PipelineSpec:
    cost = {"forward_s": 1, "backward_s": 1}
    chain = [{"source": f"s{i}", "target": f"s{i + 1}", **cost} for i in range(stages - 1)]
    return PipelineSpec.model_validate(
        {
            "microbatches": 2,
            "meshes": [{"name": f"m{i}", **(limits or {}).get(i, {})} for i in range(stages)],
            "stages": [
                {
                    "name": f"s{i}",
                    "mesh": f"m{i}",
                    "forward_s": 1,
                    "backward_input_s": 1,
                    "activation_bytes": 1,
                }
                for i in range(stages)
            ],
            "edges": chain if edges is None else [{**edge, **cost} for edge in edges],
            **fields,
        }
    )


def told(gaps, mesh: str) -> list[tuple[float, float, IdleReason]]:
    return [(gap.start_s, gap.end_s, gap.reason) for gap in gaps if gap.mesh == mesh]


ROUND_TRIP = [
    compute("0F0", 0, 1),
    *transfer("0F0>1", 1, 1.5, edge=0),
    compute("1F0", 1.5, 2.5),
    compute("1B0", 2.5, 4.5),
    *transfer("1B0>0", 4.5, 5, edge=0),
    compute("0B0", 5, 7),
]


def test_a_gap_is_split_into_waiting_for_the_maker_and_waiting_for_the_wire():
    gaps = find_gaps(spec(), ROUND_TRIP, end_s=7)
    assert told(gaps, "m0") == [(1, 4.5, IdleReason.DOWNSTREAM), (4.5, 5, IdleReason.TRANSFER)]
    assert told(gaps, "m1") == [
        (0, 1, IdleReason.UPSTREAM),
        (1, 1.5, IdleReason.TRANSFER),
        (4.5, 7, IdleReason.DONE),
    ]
    assert "s0 B0 needs s1 B0 of m1" in gaps[0].detail


def test_a_late_start_with_everything_at_hand_is_held():
    late = [
        slot if slot.action != "B" or slot.mesh != "m0" else compute("0B0", 5.25, 7.25) for slot in ROUND_TRIP
    ]
    gaps = find_gaps(spec(), late, end_s=7.25)
    assert told(gaps, "m0")[-1] == (5, 5.25, IdleReason.HELD)


def test_a_transfer_that_waits_for_its_port_is_exposed_too():
    slots = [
        compute("0F0", 0, 1),
        *transfer("0F0>1", 3, 4, edge=0),
        compute("1F0", 4, 5),
    ]
    gaps = find_gaps(spec(), slots, end_s=5)
    assert told(gaps, "m1") == [
        (0, 1, IdleReason.UPSTREAM),
        (1, 3, IdleReason.TRANSFER),
        (3, 4, IdleReason.TRANSFER),
    ]
    assert "waits for its turn" in next(gap.detail for gap in gaps if gap.end_s == 3)


TWO_MICROBATCHES = [
    *ROUND_TRIP,
    compute("0F1", 7, 8),
    *transfer("0F1>1", 8, 8.5, edge=0),
    compute("1F1", 8.5, 9.5),
    compute("1B1", 9.5, 11.5),
    *transfer("1B1>0", 11.5, 12, edge=0),
    compute("0B1", 12, 14),
]


@pytest.mark.parametrize(
    "limited",
    [spec(limits={0: {"activation_limit_bytes": 1}}), spec(max_in_flight=1)],
    ids=["activation limit", "max_in_flight"],
)
def test_a_forward_that_a_limit_kept_back_makes_the_gap_the_limits(limited):
    """Forward 1 could have run at 1; only the limit made the lane wait until backward 0 was over."""
    gaps = find_gaps(limited, TWO_MICROBATCHES, end_s=14)
    first = [(a, b, reason) for a, b, reason in told(gaps, "m0") if b <= 5]
    assert first == [(1, 4.5, IdleReason.MEMORY), (4.5, 5, IdleReason.MEMORY)]
    assert "s0 F1 is ready but" in gaps[0].detail


def test_without_a_limit_the_same_gap_waits_downstream():
    gaps = find_gaps(spec(), TWO_MICROBATCHES, end_s=14)
    assert told(gaps, "m0")[:2] == [(1, 4.5, IdleReason.DOWNSTREAM), (4.5, 5, IdleReason.TRANSFER)]


def test_a_forward_next_in_line_and_ready_but_over_the_limit_is_the_memory_limits():
    slots = [compute("0F0", 0, 1), compute("0B0", 1, 3), compute("0F1", 4, 5), compute("0B1", 5, 7)]
    slots.append(compute("0W0", 3, 4))
    stashed = spec(1, limits={0: {"activation_limit_bytes": 1}})
    assert find_gaps(stashed, slots, end_s=7) == []
    without_w = [slot for slot in slots if slot.action != "W"]
    held = find_gaps(stashed, without_w, end_s=7)
    assert told(held, "m0") == [(3, 4, IdleReason.HELD)], "backward 0 was over: the limit did not forbid it"


def test_a_receive_that_began_late_for_want_of_a_buffer_is_the_memory_limits():
    """Tensor 1 is made at 2 and could travel at once; m1 has one buffer, and forward 0 uses it until 5."""
    slots = [
        compute("0F0", 0, 1),
        compute("0F1", 1, 2),
        *transfer("0F0>1", 1, 2, edge=0),
        compute("1F0", 2, 5),
        *transfer("0F1>1", 5, 6, edge=0),
        compute("1F1", 6, 7),
    ]
    for buffers, reason in ((1, IdleReason.MEMORY), (2, IdleReason.TRANSFER), (None, IdleReason.TRANSFER)):
        gaps = find_gaps(spec(limits={1: {"receive_buffer_limit": buffers}}), slots, end_s=7)
        assert told(gaps, "m1") == [(0, 1, IdleReason.UPSTREAM), (1, 2, IdleReason.TRANSFER), (5, 6, reason)]


def test_with_overlap_off_a_transfer_that_holds_the_lane_is_exposed():
    slots = [
        compute("0F0", 0, 1),
        *transfer("0F0>1", 1, 2, edge=0),
        compute("0F1", 2, 3),
        *transfer("0F1>1", 3, 4, edge=0),
        compute("1F0", 4, 5),
        compute("1F1", 5, 6),
    ]
    gaps = find_gaps(spec(overlap=False), slots, end_s=6)
    assert told(gaps, "m0")[0] == (1, 2, IdleReason.TRANSFER)
    assert "overlap is off" in gaps[0].detail
    assert (3, 4, IdleReason.TRANSFER) in told(gaps, "m1")


def test_a_tensor_shared_by_two_stages_of_a_mesh_is_found_under_its_first_edge():
    """s0 feeds s1 and s2, both on m1, in one transfer; its gradient comes back once, after both."""
    merged = spec(3, edges=[{"source": "s0", "target": t, "tensor": "x"} for t in ("s1", "s2")])
    stages = [
        stage.model_copy(update={"mesh": "m1"}) if stage.name == "s2" else stage for stage in merged.stages
    ]
    merged = merged.model_copy(update={"stages": stages, "meshes": merged.meshes[:2]})
    slots = [
        compute("0F0", 0, 1),
        *transfer("0F0>1", 1, 2, edge=0),
        compute("2F0", 2, 3, mesh="m1"),
        compute("1F0", 3, 4),
        compute("1B0", 4, 5),
        compute("2B0", 5, 6, mesh="m1"),
        *transfer("1B0>0", 6, 7, edge=0),
        compute("0B0", 7, 8),
    ]
    gaps = find_gaps(merged, slots, end_s=8)
    assert told(gaps, "m1") == [
        (0, 1, IdleReason.UPSTREAM),
        (1, 2, IdleReason.TRANSFER),
        (6, 8, IdleReason.DONE),
    ]
    assert told(gaps, "m0") == [(1, 6, IdleReason.DOWNSTREAM), (6, 7, IdleReason.TRANSFER)]
    assert "s2 B0 of m1" in gaps[0].detail, "the last user of the tensor makes its gradient complete"


def test_measured_slots_without_their_transfers_or_makers_still_get_a_reason():
    gaps = find_gaps(spec(), [compute("1F0", 2, 3)], end_s=4)
    assert told(gaps, "m1") == [(0, 2, IdleReason.HELD), (3, 4, IdleReason.DONE)]
    assert told(gaps, "m0") == [(0, 4, IdleReason.DONE)]


def test_slots_of_an_earlier_plan_are_left_out():
    """A job that resumes on fewer meshes is planned anew; steps measured before name other stages and edges."""
    earlier = [
        compute("7F0", 0, 3, mesh="m0"),
        compute("1F0", 0, 3, mesh="m0"),
        *transfer("0F0>1", 0, 3, edge=9),
    ]
    assert find_gaps(spec(), [*ROUND_TRIP, *earlier], end_s=7) == find_gaps(spec(), ROUND_TRIP, end_s=7)
