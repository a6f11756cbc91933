"""Arrows of traces, by the rules of Perfetto's importer: each end lies in the slot that it belongs to."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from service.jobs.timelines import timeline_trace
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.views.render import render
from service.schemas.activity import SlotView, TimelineSide, TimelineView
from tests.service.scheduler.specs import chain


def _arrows(events: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The (SEND, RECV) slots that arrows join, found as Perfetto finds them; every rule is checked on the way.

    Its importer pairs `s` and `f` of one category, name and id; binds each to the slice of its thread that is open
    at its time (`f` only with `bp: e`); and reads a string as an id only if it is hexadecimal. Times are cut to
    whole nanoseconds.
    """
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin, length = int(event["ts"] * 1e3), int(event["dur"] * 1e3)
            slices[event["pid"], event["tid"]].append((begin, begin + length, event))
    ends: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        if event["ph"] in ("s", "f"):
            assert isinstance(event["id"], int)
            pair = ends[event["cat"], event["name"], event["id"]]
            assert event["ph"] not in pair, "an id is used twice"
            pair[event["ph"]] = event
    found = []
    for pair in ends.values():
        assert set(pair) == {"s", "f"}
        assert pair["f"]["bp"] == "e" and pair["s"]["ts"] <= pair["f"]["ts"]
        bound = {}
        for phase, event in pair.items():
            at = int(event["ts"] * 1e3)
            around = [s for s in slices[event["pid"], event["tid"]] if s[0] <= at < s[1]]
            assert len(around) == 1, "an end of an arrow hangs in no slot, or in two"
            bound[phase] = around[0]
        send, receive = bound["s"], bound["f"]
        assert send[1] - int(pair["s"]["ts"] * 1e3) <= 4, "it begins where the SEND ends"
        found.append((send[2], receive[2]))
    return found


def _check_pairs(arrows: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for send, receive in arrows:
        assert (send["name"][:5], receive["name"][:5]) == ("SEND_", "RECV_")
        assert send["name"][5] == receive["name"][5]
        for key in ("edge", "microbatch"):
            assert send["args"][key] == receive["args"][key]
        assert send["args"]["stage"] == receive["args"]["peer_stage"]


@pytest.mark.parametrize("transfer", [0.37, 0.0])
def test_every_transfer_of_a_plan_has_one_arrow_from_its_send_to_its_receive(transfer: float):
    spec = load_spec(chain(3, 5, transfer=transfer, skips=((0, 2),)))
    events = json.loads(render(spec, make_plan(spec), "chrome"))["traceEvents"]
    arrows = _arrows(events)
    _check_pairs(arrows)
    assert len(arrows) == 3 * 2 * 5


def test_arrows_of_planned_and_measured_slots_do_not_mix():
    spec = load_spec(chain(3, 4, transfer=0.5, skips=((0, 2),)))
    planned = [SlotView(**_fields(slot)) for slot in make_plan(spec).slots]
    measured = [
        slot.model_copy(update={"end_s": slot.end_s * 1.3, "start_s": slot.start_s * 1.3}) for slot in planned
    ]
    view = TimelineView(
        job_id="job-1",
        step=3,
        started_at=0.0,
        uncertainty_s=0.0,
        planned=TimelineSide(makespan_s=1.0, slots=planned),
        measured=TimelineSide(makespan_s=1.3, slots=measured),
        profiled_steps=[3],
    )
    events = json.loads(timeline_trace(view))["traceEvents"]
    arrows = _arrows(events)
    _check_pairs(arrows)
    assert len(arrows) == 2 * (3 * 2 * 4)
    process = {e["pid"]: e["args"]["name"].split()[0] for e in events if e["name"] == "process_name"}
    assert all(process[send["pid"]] == process[receive["pid"]] for send, receive in arrows)


def test_a_transfer_whose_other_end_was_not_measured_has_no_arrow():
    half = SlotView(
        mesh="m0", lane="send:m1", action="SEND_F", stage="s0", peer_stage="s1", peer_mesh="m1", edge=0,
        microbatch=0, start_s=0.0, end_s=1.0,
    )  # fmt: skip
    side = TimelineSide(makespan_s=1.0, slots=[half])
    view = TimelineView(
        job_id="job-1",
        step=3,
        started_at=0.0,
        uncertainty_s=0.0,
        planned=None,
        measured=side,
        profiled_steps=[3],
    )
    assert _arrows(json.loads(timeline_trace(view))["traceEvents"]) == []


def _fields(slot: Any) -> dict[str, Any]:
    return {name: getattr(slot, name) for name in SlotView.model_fields}
