"""`tensor` with `shard: optimizer` from the job to a step: what is measured is planned, and what is planned runs."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.worker.actor.test_actor import job, plain
from tests.worker.jobs.test_tensor_parallel_zero1 import BOTH, on
from tests.worker.planning_gang import planned_by_the_driver
from worker.contract import buckets
from worker.contract.buckets import REDUCE_LANE, is_bucket
from worker.contract.program import program_from_json
from worker.verify.local_gang import LocalGang

LIMIT_BYTES = 2_000
TOLERANCE_S = 1e-9


def port_bound(request):
    """Sums share ports with transfers, whatever was measured here."""
    request["network"] |= {"contention": "full-duplex", "latency_s": 1e-3, "bandwidth_bytes_per_s": 5e6}


def key(stage, slot):
    return slot["lane"], slot["action"], stage, slot["microbatch"], slot.get("edge")


@pytest.mark.slow
def test_sums_of_shared_matrices_and_states_are_planned_as_measured_and_run_as_planned(monkeypatch):
    """On 2 meshes of {data 2, tensor 2}, over gloo: reduce-scatters as slots of their own, several a stage."""
    monkeypatch.setattr(buckets.with_buckets, "__defaults__", (LIMIT_BYTES,))
    spec = job()
    spec["pipeline"] |= {"stages": 4, "schedule": "interleaved-1f1b"}
    spec["training"]["microbatches"] = 4
    expected, _ = plain(spec, range(1, 4))
    workers, planned, control = planned_by_the_driver(monkeypatch, on([BOTH, BOTH], spec), port_bound)

    asked, plan = control.request["update"], control.answer["plan"]
    assert asked["shared"] == asked["tensor"] == {"m0": 2, "m1": 2}
    of_profile = control.request["profile"]
    assert set(of_profile["split_parameters"]) < set(of_profile["parameter_sizes"])
    number = {name: index for index, name in enumerate(planned.stage_names)}
    reduces = [slot for slot in plan["slots"] if slot["lane"] == REDUCE_LANE]
    per_stage = Counter(slot["stage"] for slot in reduces)
    assert {slot["mesh"] for slot in reduces} == {"m0", "m1"} and max(per_stage.values()) > 1
    whole_s = sum(slot["end_s"] - slot["start_s"] for slot in reduces)
    tied = {
        name
        for layer in of_profile["layers"]
        for name in layer["parameters"]
        if sum(name in other["parameters"] for other in of_profile["layers"]) > 1
    }
    size = sum(of_profile["parameter_sizes"][n] for n in {*of_profile["parameter_sizes"]} - tied)
    scatter = asked["scatter"]
    assert whole_s == pytest.approx(scatter["fixed_s"] * len(reduces) + scatter["per_byte_s"] * size)
    for slot in reduces:
        here = [s for s in plan["slots"] if s["mesh"] == slot["mesh"]]
        made = [s["end_s"] for s in here if s["stage"] == slot["stage"] and s["action"] in ("B", "W")]
        assert slot["start_s"] >= max(made) - TOLERANCE_S
        for other in here:
            if other["lane"].startswith(("send:", "recv:")):  # the ports that both would take
                assert (
                    other["end_s"] <= slot["start_s"] + TOLERANCE_S
                    or other["start_s"] >= slot["end_s"] - TOLERANCE_S
                )
    for one in planned.update:
        assert one.reduce_s > asked["agree"]["fixed_s"] and one.step_s > asked["gather"]["fixed_s"]

    losses = []
    with LocalGang(workers, planned) as run:
        for step in range(1, 4):
            results = run.step(step)
            found = [loss for result in results for loss in result.losses]
            losses.append(sum(found) / len(found))
        for worker, result in zip(run.workers, results, strict=True):
            check_slots(worker, result.slots, plan, number)
    assert losses == pytest.approx(expected, rel=1e-5)


def check_slots(worker, slots, plan, number):
    """A worker's measured slots: those of its mesh's plan, with REDUCE and STEP behind them, each lane in the planned order,
    and none before what it waits for."""
    mesh = [slot for slot in plan["slots"] if slot["mesh"] == worker.mesh]
    measured = [
        (slot.lane, slot.action, slot.stage, slot.microbatch, slot.edge)
        for slot in sorted(slots, key=lambda slot: slot.start_s)
    ]
    tail = [("compute", "REDUCE", None, None, None), ("compute", "STEP", None, None, None)]
    assert Counter(measured) - Counter(tail) == Counter(key(number[slot["stage"]], slot) for slot in mesh)
    assert measured[-2:] == tail
    for lane in {slot["lane"] for slot in mesh}:
        in_order = [
            key(number[s["stage"]], s) for s in sorted(mesh, key=lambda s: s["start_s"]) if s["lane"] == lane
        ]
        assert [one for one in measured if one[0] == lane and one not in tail] == in_order, lane
    program = worker.engine._program
    assert [str(one) for one in program if is_bucket(one)] == [
        str(one) for one in program_from_json(plan["programs"][worker.mesh]) if is_bucket(one)
    ]
    recorder = {one.record: index for index, one in enumerate(program) if one.record is not None}
    waits = 0
    for index, one in enumerate(program):
        for event in one.wait:
            assert slots[index].start_s >= slots[recorder[event]].end_s - 1e-6, (
                str(one),
                str(program[recorder[event]]),
            )
            waits += is_bucket(one)
    assert waits >= len([one for one in program if is_bucket(one)])
    planned_waits = {len(one["wait"]) for one in plan["programs"][worker.mesh] if one["lane"] == REDUCE_LANE}
    assert max(planned_waits) > 1, "one waits for a transfer that was planned before it"
