"""The numbers of a timeline against hand-computed ones and against a brute-force sampling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.scheduler.timelines import timeline_metrics
from worker.contract.timeline import launch_message, read_launch_message, summarise


def slot(mesh, lane, action, start, end):
    return {"mesh": mesh, "lane": lane, "action": action, "start_s": start, "end_s": end}


def test_two_meshes_with_one_exposed_transfer_add_up_by_hand():
    summary = summarise(
        [
            slot("m0", "compute", "F", 0, 2),
            slot("m0", "send:m1", "SEND_F", 2, 3),
            slot("m1", "recv:m0", "RECV_F", 2, 3),
            slot("m1", "compute", "F", 3, 4),
            slot("m1", "compute", "B", 4, 6),
            slot("m1", "send:m0", "SEND_B", 6, 7),
            slot("m0", "recv:m1", "RECV_B", 6, 7),
            slot("m0", "compute", "B", 7, 9),
            slot("m0", "compute", "STEP", 9, 12),
        ]
    )
    assert summary.makespan_s == 9
    assert summary.span_s == 9
    assert summary.bubble_ratio == pytest.approx(1 - 7 / 18)
    assert summary.meshes["m0"].exposed_transfer_s == 2
    assert summary.meshes["m1"].exposed_transfer_s == 0  # its transfers lie outside its span
    assert summary.overlap_ratio == pytest.approx(1 - 2 / 4)


def test_a_timeline_without_compute_is_refused():
    with pytest.raises(ValueError, match="without a compute slot"):
        summarise([slot("m0", "send:m1", "SEND_F", 0, 1)])


interval = st.tuples(st.integers(0, 40), st.integers(1, 6)).map(lambda p: (p[0], p[0] + p[1]))


@given(st.lists(interval, min_size=1, max_size=8), st.lists(interval, max_size=8))
def test_exposed_time_equals_a_count_of_unit_cells(compute, transfers):
    summary = summarise(
        [slot("m", "compute", "F", s, e) for s, e in compute]
        + [slot("m", "send:x", "SEND_F", s, e) for s, e in transfers]
    )
    first, last = min(s for s, _ in compute), max(e for _, e in compute)
    runs = lambda spans, t: any(s <= t < e for s, e in spans)  # noqa: E731
    cells = [t for t in range(first, last) if runs(transfers, t) and not runs(compute, t)]
    assert summary.meshes["m"].exposed_transfer_s == len(cells)
    assert summary.meshes["m"].transfer_s == sum(runs(transfers, t) for t in range(0, 60))


@given(
    st.lists(st.tuples(st.sampled_from(["m0", "m1"]), st.booleans(), interval), max_size=12),
    st.tuples(interval, interval),
)
def test_planned_and_measured_timelines_are_summed_by_the_same_formulas(rest, first):
    slots = [slot(mesh, "compute", "F", *span) for mesh, span in zip(("m0", "m1"), first, strict=True)]
    slots += [
        slot(mesh, "compute", "B", *span) if compute else slot(mesh, "recv:x", "RECV_F", *span)
        for mesh, compute, span in rest
    ]
    measured, planned = summarise(slots), timeline_metrics(slots)
    for field in ("makespan_s", "span_s", "bubble_ratio", "exposed_transfer_s", "overlap_ratio"):
        assert getattr(measured, field) == pytest.approx(getattr(planned, field))


def test_a_message_of_a_launch_is_read_as_its_phase_and_seconds():
    assert launch_message("first step", 1.5) == "first step took 1.500 s"
    assert read_launch_message("first step took 1.500 s") == ("first step", 1.5)
    assert read_launch_message("the first step took long") is None
