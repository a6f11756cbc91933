"""What a list of slots amounts to, by a small timeline that is added up by hand."""

import pytest

from tests.service.scheduler.timelines import timeline_metrics


def slot(mesh, action, start_s, end_s):
    return {"mesh": mesh, "action": action, "start_s": start_s, "end_s": end_s}


SLOTS = [
    slot("a", "F", 1.0, 3.0),
    slot("a", "B", 6.0, 8.0),
    slot("a", "SEND_F", 3.0, 4.0),
    slot("a", "SEND_F", 3.5, 4.5),  # beside the other: 1.5 s are covered, all of them idle
    slot("a", "RECV_B", 5.5, 7.0),  # half a second before B
    slot("a", "RECV_B", 8.0, 11.0),  # behind the last action: not in its span
    slot("a", "REDUCE", 11.0, 20.0),
    slot("b", "I", 4.0, 5.0),
    slot("b", "W", 5.0, 5.5),
    slot("b", "RECV_F", 0.0, 4.0),
    slot("b", "STEP", 11.0, 30.0),
]


def test_a_timeline_is_added_up_as_by_hand():
    found = timeline_metrics(SLOTS)
    a, b = found.meshes["a"], found.meshes["b"]
    assert (a.compute_s, a.span_s, a.transfer_s, a.exposed_transfer_s) == pytest.approx((4.0, 7.0, 6.0, 2.0))
    assert (b.compute_s, b.span_s, b.transfer_s, b.exposed_transfer_s) == pytest.approx((1.5, 1.5, 4.0, 0.0))
    assert found.makespan_s == 11.0, "from 0 to 11: without REDUCE and STEP"
    assert (found.span_s, found.exposed_transfer_s) == pytest.approx((7.0, 2.0))
    assert found.bubble_ratio == pytest.approx(1 - 5.5 / 22)
    assert found.overlap_ratio == pytest.approx(1 - 2.0 / 10.0)


def test_a_mesh_without_slots_counts_where_it_is_named():
    found = timeline_metrics(SLOTS, ["a", "b", "c"])
    assert found.bubble_ratio == pytest.approx(1 - 5.5 / 33)
    assert (found.meshes["c"].compute_s, found.meshes["c"].span_s) == (0.0, 0.0)


def test_what_only_moves_or_does_nothing_has_no_bubble_and_hides_nothing():
    nothing = timeline_metrics([])
    assert (nothing.makespan_s, nothing.bubble_ratio, nothing.overlap_ratio, nothing.span_s) == (0, 0, 1, 0)
    moves = timeline_metrics([slot("a", "SEND_F", 2.0, 5.0)])
    assert (moves.makespan_s, moves.bubble_ratio, moves.overlap_ratio) == (3.0, 1.0, 1.0)
    assert moves.meshes["a"].transfer_s == 3.0 and moves.meshes["a"].exposed_transfer_s == 0.0


def test_a_transfer_that_begins_as_rounding_ends_an_action_is_not_exposed():
    slots = [
        slot("a", "F", 0.0, 1.0),
        slot("a", "SEND_F", 0.5, 1.0 + 1e-12),
        slot("a", "B", 1.0 + 1e-12, 2.0),
    ]
    assert timeline_metrics(slots).exposed_transfer_s == 0.0
