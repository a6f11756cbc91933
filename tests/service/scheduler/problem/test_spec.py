"""Specs that no plan can satisfy are refused with the reason and the least change."""

import copy

import pytest

from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import SpecError
from service.scheduler.problem.spec_checks import load_spec
from tests.service.scheduler.specs import chain


def changed(**paths):
    data = copy.deepcopy(chain(3, 4, schedule="auto"))
    for path, value in paths.items():
        *heads, last = path.split("__")
        place = data
        for head in heads:
            place = place[int(head)] if head.isdigit() else place[head]
        place[last] = value
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed(microbatches=0), r"microbatches is 0: .*greater than or equal to 1"),
        (changed(stages__1__forward_s=-1.0), r"stages\.1\.forward_s is -1\.0"),
        (changed(stages__1__forward_s=1e308), r"add up to more than a number holds"),
        (changed(microbatches=2**70), r"microbatches is \d+: .*less than or equal to 1000000"),
        (changed(stages__1__forward_s=float("nan")), r"stages\.1\.forward_s is nan"),
        (changed(edges__0__forward_s=float("inf")), r"edges\.0\.forward_s is inf"),
        (changed(meshes__0__activation_limit_bytes=1), r"'m0' .* 1, less than the 2 .* at least 2"),
        (changed(edges__0__target="nowhere"), r"edge 0 has target 'nowhere', which is no stage"),
        (changed(stages__0__mesh="m9"), r"stage 's0' is on mesh 'm9', which does not exist"),
        (changed(stages__0__mesh="m1"), r"mesh 'm0' holds no stage"),
        (changed(colour="red"), r"colour is not a field"),
        (
            changed(
                network={
                    "contention": "none",
                    "links": [{"source": "m0", "target": "m1", "contention": "half-duplex"}],
                }
            ),
            r"network\.links\.0 has contention 'half-duplex', and network\.contention is 'none': set",
        ),
        (changed(schedule="fastest"), r"schedule 'fastest' does not exist: use one of gpipe"),
        (changed(edges__0__forward_bytes=8), r"both forward_s 1\.0 and forward_bytes 8"),
        (changed(edges__0__forward_s=None), r"edge 0 has no forward cost"),
        (changed(stages__1__weight_stash_bytes=3), r"stash_bytes 3, a part of its activation_bytes 2"),
        (changed(stages__1__name="s0"), r"stage name 's0' is used more than once"),
        (changed(edges__1__target="s1"), r"edge 1 leads from stage 's1' to itself"),
        (changed(schedule="csv"), r"'csv' needs orders"),
        (changed(orders={"m0": ["0F0"]}), r"orders are given, but schedule 'auto' .* set schedule to 'csv'"),
        (changed(microbatches=True), r"microbatches is True: write a number"),
        (changed(microbatches="3"), r"microbatches is '3': write a number, without quotes"),
        (changed(max_in_flight="2"), r"max_in_flight is '2': write a number"),
        (changed(stages__0__forward_s="1.5"), r"stages\.0\.forward_s is '1\.5': write a number"),
        (changed(overlap="no"), r"overlap is 'no': input should be a valid boolean"),
    ],
)
def test_a_bad_spec_is_refused_with_value_and_way_out(data, message):
    with pytest.raises(SpecError, match=message):
        make_plan(load_spec(data))


def test_a_cycle_of_stages_is_named_with_the_edge_to_remove():
    data = changed()
    data["edges"].append({"source": "s2", "target": "s0", "forward_s": 1.0, "backward_s": 1.0})
    with pytest.raises(
        SpecError, match=r"form a cycle: remove the edge 's. -> 's|form a cycle: remove the edge"
    ):
        load_spec(data)


def test_bytes_become_seconds_with_bandwidth_and_latency():
    data = changed(network={"contention": "none", "bandwidth_bytes_per_s": 10.0, "latency_s": 0.5})
    for edge in data["edges"]:
        edge.update(forward_s=None, backward_s=None, forward_bytes=20, backward_bytes=40)
    plan = make_plan(load_spec({**data, "schedule": "gpipe"}))
    lengths = {s.action: s.end_s - s.start_s for s in plan.slots if "_" in s.action}
    assert lengths == pytest.approx({"SEND_F": 2.5, "RECV_F": 2.5, "SEND_B": 4.5, "RECV_B": 4.5})


def test_edges_that_merge_must_cost_the_same():
    data = chain(3, 2, meshes=[0, 1, 1], skips=((0, 2),), schedule="auto")
    for edge in data["edges"]:
        edge["tensor"] = "x" if edge["source"] == "s0" else None
    plan = make_plan(load_spec(data))
    assert len([s for s in plan.slots if s.action == "SEND_F"]) == 2
    assert len([s for s in plan.slots if s.action == "SEND_B"]) == 2
    data["edges"][2]["forward_s"] = 3.0
    with pytest.raises(SpecError, match=r"edges 0 and 2 share tensor 'x'"):
        make_plan(load_spec(data))


def test_memory_for_several_stages_on_a_mesh_is_what_one_microbatch_needs_together():
    data = chain(4, 4, meshes=[0, 1, 1, 0], schedule="auto")
    data["meshes"][0]["activation_limit_bytes"] = 3
    with pytest.raises(SpecError, match="at least 4"):
        make_plan(load_spec(data))
    data["meshes"][0]["activation_limit_bytes"] = 4
    assert make_plan(load_spec(data), budget_s=0).meshes[0].peak_activation_bytes == 4


def test_orders_that_wait_for_each_other_are_refused_with_the_actions():
    orders = {"m0": ["0F0", "0B0", "0F1", "0B1"], "m1": ["1F0", "1F1", "1B0", "1B1"]}
    data = chain(2, 2, schedule="csv", orders=orders)
    with pytest.raises(SpecError, match=r"wait for each other for ever \(m0 at 0B0, m1 at 1F1\)"):
        make_plan(load_spec(data))


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["0F0", "0F1", "0B0"], "backward of stage 0, microbatch 1 as B x0, I x0, W x0"),
        (["0F0", "0F0", "0F1", "0B0", "0B1"], "list 0F0 2 times"),
        (["0F0", "0F1", "0X0"], "write actions like"),
        (["1F0"], "only stages 0 are there"),
        (["0F7"], "use 0 to 1"),
    ],
)
def test_bad_orders_are_refused(cells, message):
    data = chain(2, 2, schedule="csv", orders={"m0": cells, "m1": ["1F0", "1B0", "1F1", "1B1"]})
    with pytest.raises(SpecError, match=message):
        make_plan(load_spec(data))


@pytest.mark.parametrize("schedule", ["auto", "gpipe"])
@pytest.mark.parametrize(
    ("place", "field", "value"),
    [
        ("stages", "activation_bytes", 2**63),
        ("stages", "static_bytes", 2**64),
        ("meshes", "memory_bytes", 2**63),
        ("meshes", "receive_buffer_limit", 2**63),
        (None, "max_in_flight", 2**70),
    ],
)
def test_a_number_that_no_sum_could_hold_is_refused_by_name(schedule, place, field, value):
    data = chain(2, 2, schedule=schedule)
    (data[place][0] if place else data)[field] = value
    with pytest.raises(SpecError, match=field):
        load_spec(data)


@pytest.mark.parametrize("schedule", ["auto", "gpipe"])
def test_sizes_whose_sum_would_wrap_around_are_refused_and_never_counted_as_nothing(schedule):
    data = chain(2, 4096, schedule=schedule)
    for stage in data["stages"]:
        stage["activation_bytes"] = 2**52
    data["meshes"][0]["memory_bytes"] = 2**53
    with pytest.raises(SpecError, match="all microbatches together hold"):
        load_spec(data)
