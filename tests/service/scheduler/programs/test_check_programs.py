"""check_programs accepts what the compiler makes and catches every planted fault."""

from dataclasses import replace

import pytest

from service.scheduler.planner import make_plan
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.programs.check_programs import check_programs
from service.scheduler.programs.decode import PlanError
from tests.service.scheduler.specs import chain
from tests.tiers import some_by_day
from worker.contract.program import Instruction, program_from_json

CONTENTIONS = ["none", "link", "full-duplex", "half-duplex"]


def planned(**fields):
    data = chain(4, 5, skips=((0, 2),), **fields)
    spec = load_spec(data)
    programs = {name: list(program_from_json(items)) for name, items in make_plan(spec).programs.items()}
    check_programs(spec, programs)
    return spec, programs


def find(program, op, microbatch=None, peer=None):
    for index, ins in enumerate(program):
        if ins.op == op and microbatch in (None, ins.microbatch) and peer in (None, ins.peer):
            return index
    raise AssertionError(f"no {op}")


def exchange(program, a, b):
    """Swap what two instructions do and keep the waits and records of their places."""
    first, second = program[a], program[b]
    program[a] = replace(second, wait=first.wait, record=first.record)
    program[b] = replace(first, wait=second.wait, record=second.record)


@some_by_day("overlap", [True, False], by_day=1)
@pytest.mark.parametrize("contention", CONTENTIONS)
@some_by_day("schedule", ["eager-1f1b", "1f1b", "zb-h1"], by_day=1)
def test_every_wait_is_needed(contention, overlap, schedule):
    spec, programs = planned(contention=contention, overlap=overlap, schedule=schedule)
    removed = 0
    for mesh, program in programs.items():
        for index, ins in enumerate(program):
            for event in ins.wait:
                changed = list(program)
                changed[index] = replace(ins, wait=tuple(e for e in ins.wait if e != event))
                with pytest.raises(PlanError):
                    check_programs(spec, {**programs, mesh: changed})
                removed += 1
    assert removed > 40


def test_a_dropped_receive_is_caught():
    spec, programs = planned()
    index = find(programs["m1"], "RECV_F", 2)
    dropped = programs["m1"].pop(index)
    for at, ins in enumerate(programs["m1"]):  # nobody waits for what is gone
        programs["m1"][at] = replace(ins, wait=tuple(e for e in ins.wait if e != dropped.record))
    with pytest.raises(PlanError, match=r"'m1' never runs 1RECV_F2@m0/e0"):
        check_programs(spec, programs)


def test_two_sends_of_one_pair_swapped_are_caught():
    spec, programs = planned()
    exchange(programs["m0"], find(programs["m0"], "SEND_F", 0, "m1"), find(programs["m0"], "SEND_F", 1, "m1"))
    with pytest.raises(PlanError):
        check_programs(spec, programs)


def test_messages_in_another_order_at_the_other_end_are_caught_even_with_all_inputs_there():
    # both tensors exist before either is sent: only the order of the messages is wrong
    data = chain(2, 1, schedule="gpipe", contention="link")
    data["edges"].append({"source": "s0", "target": "s1", "forward_s": 1.0, "backward_s": 1.0})
    spec = load_spec(data)
    programs = {name: list(program_from_json(items)) for name, items in make_plan(spec).programs.items()}
    sends = [i for i, ins in enumerate(programs["m0"]) if ins.op == "SEND_F"]
    exchange(programs["m0"], *sends)
    with pytest.raises(PlanError, match="both ends must use one order"):
        check_programs(spec, programs)


def test_a_cycle_of_waits_between_two_meshes_is_caught():
    # each mesh lets its send wait for what it receives from the other
    spec = load_spec(
        {
            "microbatches": 1,
            "meshes": [{"name": "a"}, {"name": "b"}],
            "stages": [
                {"name": "p", "mesh": "a", "forward_s": 1},
                {"name": "q", "mesh": "b", "forward_s": 1},
                {"name": "r", "mesh": "b", "forward_s": 1},
                {"name": "t", "mesh": "a", "forward_s": 1},
            ],
            "edges": [
                {"source": "p", "target": "q", "forward_s": 1, "backward_s": 1},
                {"source": "r", "target": "t", "forward_s": 1, "backward_s": 1},
            ],
            "schedule": "inference",
        }
    )
    f, s, r = "compute", "send", "recv"
    a = [
        Instruction("RECV_F", f"{r}:b", 3, 0, 1, "b", (), 0),
        Instruction("F", f, 3, 0, None, None, (0,), 1),
        Instruction("F", f, 0, 0, None, None, (), 2),
        Instruction("SEND_F", f"{s}:b", 0, 0, 0, "b", (2,), None),
    ]
    b = [
        Instruction("RECV_F", f"{r}:a", 1, 0, 0, "a", (), 0),
        Instruction("F", f, 1, 0, None, None, (0,), 1),
        Instruction("F", f, 2, 0, None, None, (), 2),
        Instruction("SEND_F", f"{s}:a", 2, 0, 1, "a", (2,), None),
    ]
    with pytest.raises(PlanError, match=r"deadlock: .*cycle"):
        check_programs(spec, {"a": a, "b": b})


def test_a_send_moved_before_its_producer_is_caught():
    spec, programs = planned()
    program = programs["m0"]
    program.insert(0, program.pop(find(program, "SEND_F", 0)))
    with pytest.raises(PlanError, match="nothing before it records"):
        check_programs(spec, programs)


def test_a_send_without_a_wait_for_its_producer_is_caught():
    spec, programs = planned(contention="none")
    program = programs["m0"]
    index = find(program, "SEND_F", 0, "m1")
    program[index] = replace(program[index], wait=())
    with pytest.raises(PlanError, match=r"may start before 0F0 has ended"):
        check_programs(spec, programs)


def test_a_last_stage_whose_forwards_are_out_of_order_is_caught():
    spec, programs = planned(schedule="gpipe")
    exchange(programs["m3"], find(programs["m3"], "F", 1), find(programs["m3"], "F", 2))
    with pytest.raises(PlanError, match="the last stage 3 runs forward 2 before 1"):
        check_programs(spec, programs)


def test_a_duplicated_action_is_caught():
    spec, programs = planned()
    index = find(programs["m2"], "B", 1)
    programs["m2"].insert(index + 1, replace(programs["m2"][index], wait=(), record=None))
    with pytest.raises(PlanError, match="more than once"):
        check_programs(spec, programs)


def test_a_memory_overrun_is_caught():
    data = chain(4, 8, schedule="1f1b")
    spec = load_spec(data)
    programs = {name: list(program_from_json(items)) for name, items in make_plan(spec).programs.items()}
    for mesh in data["meshes"]:
        mesh["activation_limit_bytes"] = 8
    check_programs(load_spec(data), programs)
    data["meshes"][0]["activation_limit_bytes"] = 7
    with pytest.raises(PlanError, match="holds 8 bytes of activations"):
        check_programs(load_spec(data), programs)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "zb-h1"])
def test_a_microbatch_too_many_in_flight_is_caught(schedule):
    data = chain(3, 6, schedule=schedule)
    programs = {name: program_from_json(items) for name, items in make_plan(load_spec(data)).programs.items()}
    most = in_flight_at_the_source(programs["m0"])
    check_programs(load_spec({**data, "max_in_flight": most}), programs)
    with pytest.raises(PlanError, match=rf"mesh 'm0': .*max_in_flight {most - 1}"):
        check_programs(load_spec({**data, "max_in_flight": most - 1}), programs)


def in_flight_at_the_source(program):
    """The most forwards of stage 0 that a program has begun and not yet answered by a backward."""
    now = most = 0
    for ins in program:
        if ins.stage == 0 and ins.op in ("F", "B", "I"):
            now += 1 if ins.op == "F" else -1
            most = max(most, now)
    return most


def test_a_stash_that_is_kept_from_i_to_w_counts_against_the_limit():
    data = chain(2, 4, schedule="gpipe", split_backward=True)
    for stage in data["stages"]:
        stage["activation_bytes"], stage["weight_stash_bytes"] = 2, 2
    spec = load_spec(data)
    programs = {name: list(program_from_json(items)) for name, items in make_plan(spec).programs.items()}
    program = programs["m1"]
    last = max(i for i, ins in enumerate(program) if ins.op in ("I", "W"))
    weights = [ins for ins in program if ins.op == "W"]
    rest = [ins for ins in program[: last + 1] if ins.op != "W"]
    late = [*rest, *weights, *program[last + 1 :]]
    data["meshes"][1]["activation_limit_bytes"] = 8
    check_programs(load_spec(data), {**programs, "m1": late})
    data["meshes"][1]["activation_limit_bytes"] = 7
    with pytest.raises(PlanError, match="mesh 'm1' holds 8 bytes of activations"):
        check_programs(load_spec(data), {**programs, "m1": late})


def test_a_forward_moved_ahead_of_the_backward_that_frees_its_memory_is_caught():
    data = chain(4, 8, schedule="1f1b")
    for mesh in data["meshes"]:
        mesh["activation_limit_bytes"] = 8
    spec = load_spec(data)
    programs = {name: list(program_from_json(items)) for name, items in make_plan(spec).programs.items()}
    program = programs["m0"]
    program.insert(find(program, "B", 0), program.pop(find(program, "F", 4)))
    with pytest.raises(PlanError):
        check_programs(spec, programs)


def test_a_buffer_freed_before_its_send_ends_is_caught():
    spec, programs = planned()
    step = programs["m1"][-1]
    assert step.op == "STEP" and step.wait
    programs["m1"][-1] = replace(step, wait=())
    with pytest.raises(
        PlanError, match=r"STEP .* frees the buffer of 1SEND_[FB]4.* before that send has ended"
    ):
        check_programs(spec, programs)


def test_receive_buffers_over_their_limit_are_caught():
    data = chain(4, 8, transfer=0.5)
    spec = load_spec(data)
    plan = make_plan(spec)
    peak = plan.meshes[1].peak_receive_buffers
    assert peak > 1
    data["meshes"][1]["receive_buffer_limit"] = peak - 1
    programs = {name: program_from_json(items) for name, items in plan.programs.items()}
    with pytest.raises(PlanError, match=f"may hold {peak} received tensors"):
        check_programs(load_spec(data), programs)


@pytest.mark.slow
def test_a_receive_buffer_limit_is_kept_by_the_simulator():
    data = chain(4, 8, transfer=0.5)
    for limit in (1, 2, 3):
        for mesh in data["meshes"]:
            mesh["receive_buffer_limit"] = limit
        for overlap in (True, False):
            for contention in CONTENTIONS:
                changed = {**data, "network": {"contention": contention}, "overlap": overlap}
                plan = make_plan(load_spec(changed))
                assert max(mesh.peak_receive_buffers for mesh in plan.meshes) <= limit


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.pop(),
        lambda p: p.append(p[-1]),
        lambda p: p.__setitem__(0, replace(p[0], lane="send:m9")),
        lambda p: p.__setitem__(0, replace(p[0], microbatch=99)),
        lambda p: p.__setitem__(0, replace(p[0], stage=2)),
        lambda p: p.__setitem__(0, replace(p[0], op="W")),
    ],
)
def test_a_malformed_program_is_caught(change):
    spec, programs = planned()
    change(programs["m0"])
    with pytest.raises(PlanError):
        check_programs(spec, programs)


def test_a_missing_or_unknown_mesh_is_caught():
    spec, programs = planned()
    with pytest.raises(PlanError, match="'m9', which does not exist"):
        check_programs(spec, {**programs, "m9": []})
    programs.pop("m0")
    with pytest.raises(PlanError, match="'m0' has no program"):
        check_programs(spec, programs)
