"""Lanes on CPU by themselves: who starts a transfer, who sees it end, and that no wait is forgotten."""

import itertools
import random
import threading
import time
from types import SimpleNamespace

import pytest

from worker.contract.program import Instruction
from worker.engine.lanes.cpu import CpuLanes

LIMIT_S = 60.0


def compute(microbatch, wait=(), record=None):
    return Instruction(op="F", lane="compute", stage=0, microbatch=microbatch, wait=wait, record=record)


def transfer(op, peer, microbatch, wait=(), record=None):
    lane = f"{op[:4].lower()}:{peer}"
    return Instruction(
        op=op, lane=lane, stage=0, microbatch=microbatch, edge=0, peer=peer, wait=wait, record=record
    )


def run(program, actions):
    lanes = CpuLanes(program, actions)
    try:
        lanes.start()
        ended = lanes.wait(LIMIT_S)
        assert ended, lanes.statuses()
        return lanes.slot_times()
    finally:
        assert lanes.close(LIMIT_S) == []


def test_the_end_of_a_receive_is_seen_while_the_mesh_computes():
    program = [transfer("RECV_F", "m1", 0, record=0), compute(0), compute(1, wait=(0,))]
    seen = threading.Event()

    def received():
        time.sleep(0.01)
        seen.set()

    measured = run(program, [lambda: received, lambda: seen.wait(LIMIT_S), lambda: None])
    assert seen.is_set()
    assert measured[0][1] <= measured[2][0]


def test_a_transfer_starts_when_the_last_thing_that_it_waits_for_ends_and_not_before():
    program = [
        compute(0, record=0),
        transfer("SEND_F", "m1", 0, wait=(0,), record=1),
        transfer("RECV_F", "m2", 0, wait=(1,), record=2),
        compute(1, wait=(2,)),
    ]
    order = []

    def action(name, finish=True):
        def start():
            order.append(name)
            return (lambda: order.append(f"{name} ended")) if finish else None

        return start

    run(program, [action("F0", False), action("send"), action("receive"), action("F1", False)])
    assert order == ["F0", "send", "send ended", "receive", "receive ended", "F1"]


def test_few_sends_wake_nobody_until_the_step_ends_or_somebody_looks():
    program = [compute(0, record=0), transfer("SEND_F", "m1", 0, wait=(0,)), compute(1)]
    sent, looked = threading.Event(), threading.Event()
    lanes = CpuLanes(
        program, [lambda: None, lambda: sent.set, lambda: looked.wait(LIMIT_S) and sent.wait(LIMIT_S)]
    )
    lanes.start()
    assert not lanes.wait(0.05) and not sent.is_set()
    lanes.statuses()  # has the lane watched: the second forward waits for that
    looked.set()
    assert lanes.wait(LIMIT_S)
    assert lanes.close(LIMIT_S) == []


def test_a_transfer_that_does_not_end_is_what_the_lane_says():
    program = [transfer("RECV_F", "m1", 0, record=0), compute(0, wait=(0,))]
    there = threading.Event()
    lanes = CpuLanes(program, [lambda: lambda: there.wait(LIMIT_S), lambda: None])
    lanes.start()
    assert not lanes.wait(0.05)
    statuses = {status.lane: status for status in lanes.statuses()}
    assert statuses["compute"].waits_for == 0
    assert (statuses["recv:m1"].current, statuses["recv:m1"].waits_for) == (0, None)
    there.set()
    assert lanes.wait(LIMIT_S)
    assert lanes.close(LIMIT_S) == []


def test_a_step_does_not_end_before_its_last_event_has_been_recorded():
    program = [transfer("RECV_F", "m1", 0, record=0), compute(0)]
    recording = threading.Event()
    lanes = CpuLanes(program, [lambda: lambda: None, lambda: recording.wait(LIMIT_S)])
    record = lanes._record

    def slow_record(event):
        recording.set()
        time.sleep(0.1)
        record(event)

    lanes._record = slow_record
    for _ in range(2):
        recording.clear()
        lanes.start()
        assert lanes.wait(LIMIT_S)
        assert lanes._done[0]
    assert lanes.close(LIMIT_S) == []


def test_the_end_of_a_receive_that_a_send_let_start_is_seen_while_the_mesh_computes():
    program = [
        transfer("SEND_F", "m1", 0, record=0),
        transfer("RECV_F", "m2", 0, wait=(0,)),
        compute(0),
    ]
    computing, received = threading.Event(), threading.Event()
    seen = []

    def busy():
        computing.set()
        seen.append(received.wait(LIMIT_S))

    run(program, [lambda: lambda: computing.wait(LIMIT_S), lambda: received.set, busy])
    assert seen == [True]


def test_the_end_of_a_receive_that_a_send_let_start_is_seen_while_the_mesh_waits_for_another():
    program = [
        transfer("SEND_F", "m1", 0, record=0),
        transfer("RECV_F", "m2", 0, wait=(0,)),
        transfer("RECV_F", "m3", 0, record=1),
        compute(0, wait=(1,)),
    ]
    waiting, received = threading.Event(), threading.Event()
    seen = []

    def other():
        waiting.set()
        seen.append(received.wait(LIMIT_S))

    run(program, [lambda: lambda: waiting.wait(LIMIT_S), lambda: received.set, lambda: other, lambda: None])
    assert seen == [True]


def test_the_ends_of_all_lanes_are_seen_together_when_nothing_is_left_to_compute():
    program = [transfer("SEND_F", "m1", 0), transfer("RECV_F", "m2", 0)]
    received = threading.Event()
    seen = []
    run(program, [lambda: lambda: seen.append(received.wait(LIMIT_S)), lambda: received.set])
    assert seen == [True]


def test_no_status_takes_the_time_of_a_wait_for_that_of_the_action_behind_it(monkeypatch):
    program = [
        compute(0),
        transfer("RECV_F", "m1", 0, record=0),
        compute(1, wait=(0,)),
        compute(2),
    ]
    ticks, found, began, looked_at = itertools.count(1), [], {}, []

    def clock():  # each of its calls is a moment at which the engine may look
        for lanes in looked_at:
            found.extend(lanes.statuses())
        return next(ticks)

    def action(index):
        return lambda: began.update({index: next(ticks)})

    monkeypatch.setattr("worker.engine.lanes.cpu.time", SimpleNamespace(monotonic=clock))
    lanes = CpuLanes(program, [action(0), lambda: action(1), action(2), action(3)])
    looked_at.append(lanes)
    for _ in range(2):
        found.clear()
        started = next(ticks)
        lanes.start()
        assert lanes.wait(LIMIT_S)
        running = [s for s in found if s.lane == "compute" and s.waits_for is None]
        before = {0: started, 2: began[1], 3: began[2]}
        assert running and all(s.since_s > before[s.current] for s in running)
    assert lanes.close(LIMIT_S) == []


@pytest.mark.parametrize("failing", ["start", "finish", "watched finish"])
def test_an_error_of_a_transfer_ends_the_step(failing):
    def broken():
        raise ConnectionError("the peer is gone")

    ended = threading.Event()
    program = [transfer("RECV_F", "m1", 0, record=0), compute(0), compute(1, wait=(0,))]
    start = broken if failing == "start" else lambda: broken
    busy = (lambda: ended.wait(LIMIT_S)) if failing == "watched finish" else (lambda: None)
    lanes = CpuLanes(program, [start, busy, lambda: None])
    lanes.start()
    with pytest.raises(ConnectionError, match="the peer is gone"):
        lanes.wait(LIMIT_S)
    ended.set()
    assert lanes.close(LIMIT_S) == []


def test_an_error_of_an_action_is_followed_by_the_end_of_the_lanes():
    def broken():
        raise ValueError("planted")

    lanes = CpuLanes([compute(0)], [broken])
    lanes.start()
    with pytest.raises(ValueError, match="planted"):
        lanes.wait(LIMIT_S)
    assert lanes.wait(LIMIT_S)
    assert lanes.close(LIMIT_S) == []


def test_nobody_waits_again_for_a_transfer_behind_which_another_fails_to_start():
    program = [transfer("RECV_F", "m1", 0, record=0), transfer("SEND_F", "m2", 0, wait=(0,))]
    calls, again = [], threading.Event()

    def received():  # with gloo, a second wait for the same transfer never returns
        calls.append(0)
        if len(calls) > 1:
            again.set()

    def broken():
        raise ConnectionError("the peer is gone")

    lanes = CpuLanes(program, [lambda: received, broken])
    lanes.start()
    with pytest.raises(ConnectionError, match="the peer is gone"):
        lanes.wait(LIMIT_S)
    assert lanes.wait(LIMIT_S)
    lanes.statuses()  # wakes the lane's thread
    assert not again.wait(0.2)
    assert lanes.close(LIMIT_S) == []


@pytest.mark.parametrize("seed", range(30))
def test_any_program_runs_in_an_order_that_its_events_allow(seed):
    rng = random.Random(seed)
    lanes = ["compute", "compute", "recv:m1", "recv:m2", "send:m1", "send:m2"]
    program, by_lane = [], {}
    for index in range(60):
        lane = rng.choice(lanes)
        known = [i for i in range(index) if program[i].lane != lane]
        wait = tuple(rng.sample(known, min(len(known), rng.choice([0, 0, 1, 1, 2]))))
        if lane == "compute":
            program.append(compute(index, wait, index))
        else:
            program.append(transfer(f"{lane[:4].upper()}_F", lane[5:], index, wait, index))
        by_lane.setdefault(lane, []).append(index)
    started, ended = {}, {}
    clock = iter(range(10**6))  # next() of it is atomic

    def action(index):
        delay = rng.choice([0, 0, 0, 1e-4, 1e-3])

        def finish():
            time.sleep(delay)
            ended[index] = next(clock)

        def start():
            started[index] = next(clock)
            if program[index].lane != "compute":
                return finish
            finish()
            return None

        return start

    actions = [action(i) for i in range(len(program))]
    measured = run(program, actions)
    for index, instruction in enumerate(program):
        assert all(ended[event] < started[index] for event in instruction.wait)
    for indices in by_lane.values():
        assert [i for i, _ in sorted(started.items(), key=lambda e: e[1]) if i in indices] == indices
        assert [i for i, _ in sorted(ended.items(), key=lambda e: e[1]) if i in indices] == indices
    assert all(start <= end for start, end in measured)
