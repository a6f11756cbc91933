"""Worker by worker: programs of meshes of unlike sizes come to an end, and what does not is told."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.programs.decode import PlanError
from service.scheduler.programs.messages import check_messages
from service.scheduler.resharding.layout import Links, Tensor, mesh_layout
from service.scheduler.resharding.resharding import plan_resharding
from worker.contract.program import Instruction


def _side(name, size, along):
    return mesh_layout(name, mesh=(size,), split=(along,), hosts=("here",) * size)


def _planned(sizes, *, along=0, skips=False, microbatches=3):
    """Programs of a chain with one stage a mesh, and the reshardings of its edges."""
    names = [f"m{k}" for k in range(len(sizes))]
    edges = [(k, k + 1) for k in range(len(sizes) - 1)] + ([(0, len(sizes) - 1)] if skips else [])
    spec = PipelineSpec.model_validate(
        {
            "microbatches": microbatches,
            "meshes": [{"name": name} for name in names],
            "stages": [
                {
                    "name": f"s{k}",
                    "mesh": name,
                    "forward_s": 1.0,
                    "backward_input_s": 1.0,
                    "backward_weight_s": 1.0,
                }
                for k, name in enumerate(names)
            ],
            "edges": [
                {
                    "source": f"s{a}",
                    "target": f"s{b}",
                    "forward_s": 0.5,
                    "backward_s": 0.5,
                    "tensor": f"t{a}.{b}",
                }
                for a, b in edges
            ],
            "network": {"contention": "link"},
            "schedule": "auto",
        }
    )
    plan = make_plan(spec, budget_s=0.1)
    plans = {}
    for index, (a, b) in enumerate(edges):
        for backward, (p, q) in ((False, (a, b)), (True, (b, a))):
            if sizes[p] != sizes[q]:
                sides = (_side(names[k], sizes[k], along) for k in (p, q))
                plans[index, backward] = plan_resharding(
                    Tensor((12, 2), 4), *sides, Links(1e9, 1e9), messages=16
                )
    return {name: plan.program(name) for name in names}, plans, dict(zip(names, sizes, strict=True))


@pytest.mark.parametrize("along", [0, None])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 3), (4, 2), (2, 2, 1), (1, 3, 2)], ids=str)
def test_programs_of_meshes_of_unlike_sizes_come_to_an_end(sizes, along):
    check_messages(*_planned(sizes, along=along, skips=len(sizes) > 2))


def _swapped(program: tuple[Instruction, ...], op: str) -> tuple[Instruction, ...]:
    """The same program with the first two instructions `op` of a lane in each other's places."""
    first, second = [i for i, one in enumerate(program) if one.op == op][:2]
    out = list(program)
    for here, there in ((first, second), (second, first)):
        out[here] = replace(out[here], microbatch=program[there].microbatch)
    return tuple(out)


def test_two_ends_with_their_messages_in_two_orders_are_refused_by_workers():
    programs, plans, sizes = _planned((2, 1))
    programs["m1"] = _swapped(programs["m1"], "RECV_F")
    with pytest.raises(
        PlanError, match="message 0 from worker m0/0 to worker m1/0 is sent as part 0 of the tensor of edge 0"
    ):
        check_messages(programs, plans, sizes)


def test_a_plan_whose_messages_wait_for_each_other_is_refused():
    """As no planner makes it: each of two targets hands on what it waits for from the other."""
    programs, plans, sizes = _planned((1, 2), along=None)
    plan = plans[0, False]
    one, other = plan.messages[:2]
    circle = (
        replace(one, sender="m1/0", receiver="m1/1", after=(1,)),
        replace(other, sender="m1/1", receiver="m1/0", after=(0,)),
    )
    with pytest.raises(PlanError, match="the workers wait for each other for ever"):
        check_messages(programs, {**plans, (0, False): replace(plan, messages=circle)}, sizes)


def test_workers_that_wait_in_a_circle_over_two_meshes_are_told():
    """m0 sends its second tensor before it takes the first gradient; m1 sends that only after the second tensor came, and
    m0's send in turn waits for the gradient."""
    programs, plans, sizes = _planned((2, 1), microbatches=2)
    own = list(programs["m0"])
    send = [i for i, one in enumerate(own) if one.op == "SEND_F"][1]
    back = next(i for i, one in enumerate(own) if one.op == "RECV_B")
    received = replace(own.pop(back), wait=())
    event = received.record
    own.insert(0, received)
    send += send < back
    own[send] = replace(own[send], wait=(*own[send].wait, event))
    programs["m0"] = tuple(own)
    late = list(programs["m1"])
    first = next(i for i, one in enumerate(late) if one.op == "SEND_B")
    second = [one for one in late if one.op == "RECV_F"][1]
    late[first] = replace(late[first], wait=(*late[first].wait, second.record))
    if late.index(second) > first:
        late.insert(first, late.pop(late.index(second)))
    programs["m1"] = tuple(late)
    with pytest.raises(PlanError, match="the workers wait for each other for ever"):
        check_messages(programs, plans, sizes)


def test_a_transfer_between_unlike_meshes_without_a_plan_is_refused():
    programs, plans, sizes = _planned((2, 1))
    del plans[0, True]
    with pytest.raises(PlanError, match=r"goes between meshes of .* workers, and has no resharding"):
        check_messages(programs, plans, sizes)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 3, 2)], ids=str)
def test_a_tensor_without_a_gradient_needs_no_way_back(sizes):
    """A mask, that is. Its way back has a slot in the programs; no worker sends anything in it."""
    programs, plans, sizes = _planned(sizes)
    del plans[0, True]
    check_messages(programs, plans, sizes, forward_only={0})


@pytest.mark.parametrize("seed", range(6))
def test_random_sizes_and_skips_come_to_an_end(seed):
    draw = random.Random(seed)
    sizes = tuple(draw.choice([1, 2, 3, 4]) for _ in range(draw.randint(2, 4)))
    check_messages(*_planned(sizes, skips=len(sizes) > 2, along=draw.choice([0, None])))
