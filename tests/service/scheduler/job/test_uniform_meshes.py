"""Plans of jobs whose meshes share matrices alike: over a slow link each byte goes once, and on one node in pairs."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from service.orchestrator.planning import work
from service.orchestrator.planning.work import StoredStep
from service.scheduler.auto.recomputation import _max_bytes_in_flight
from service.scheduler.job.forwards import plan_forwards
from service.scheduler.job.plan_job import JobCosts, job_plan_json, measured_profile, plan_job
from service.scheduler.job.saved_plan import PlanKey, saved_plan_answer
from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.resharding.layout import Links, Tensor, mesh_layout
from service.scheduler.resharding.resharding import plan_send_and_receive
from service.scheduler.why.changes import CutSearch
from tests.service.scheduler.job.test_forwards import _request
from tests.service.scheduler.job.test_heterogeneous_meshes import LAYERS, ROWS, WIDTH, _profile
from worker.contract.job import Job
from worker.contract.resharding import ReshardingPlan as WorkerPlan

SLOW, LATENCY_S = 1e6, 1e-5
APART = {"m0": "one", "m1": "two"}


def job_of(data, tensor, meshes=2):
    return {
        "model": {"factory": "m:m"},
        "data": {"factory": "d:d"},
        "loss": {"factory": "l:l"},
        "training": {"global_batch": 3 * ROWS, "microbatches": 3},
        "pipeline": {"stages": meshes, "cut": [f"l{k}" for k in range(meshes)]},
        "resources": {"meshes": meshes, "workers_per_mesh": data * tensor, "tensor": tensor},
    }


def costs_of(data, tensor, nodes, meshes=2, profile=_profile):
    """What a driver sends; `nodes` are those of a mesh, or of each of its workers."""

    def node(mesh, worker):
        of = nodes[f"m{mesh}"]
        return of if isinstance(of, str) else of[worker]

    return {
        "microbatches": 3,
        "profile": profile(data).to_json(),
        "network": {"contention": "link", "bandwidth_bytes_per_s": SLOW, "latency_s": LATENCY_S},
        "workers": [
            {"mesh": f"m{mesh}", "worker": worker, "node": node(mesh, worker)}
            for mesh in range(meshes)
            for worker in range(data * tensor)
        ],
    }


def answer_of(data, tensor, nodes, meshes=2, profile=_profile):
    job = Job.from_json(job_of(data, tensor, meshes))
    costs = JobCosts.from_json(costs_of(data, tensor, nodes, meshes, profile), job)
    return job_plan_json(plan_job(job, costs, budget_s=0.1))


def plans_of(answer):
    return {(one["edge"], one["backward"]): one["plan"] for one in answer.get("reshardings", ())}


def crossed(plan):
    """Bytes over slow links, by the hosts that send and receive."""
    host = {one["name"]: one["host"] for one in plan["workers"]}
    found: dict[tuple[str, str], int] = {}
    for one in plan["messages"]:
        link = host[one["sender"]], host[one["receiver"]]
        if link[0] != link[1]:
            found[link] = found.get(link, 0) + (one["end"] - one["begin"]) * plan["element_bytes"]
    return found


def check_values(plan):
    """Every worker ends with each element of its part, by messages of whoever has them at that time."""
    size = plan["shape"][0] * plan["shape"][1]
    held = {}
    for one in plan["workers"]:
        (begin, end), (_, width) = one["box"]
        held[one["name"]] = set(range(begin * width, end * width)) if one["source"] else set()
    wanted = {
        one["name"]: set(range(one["box"][0][0] * WIDTH, one["box"][0][1] * WIDTH)) for one in plan["workers"]
    }
    for one in plan["messages"]:
        first = plan["tiles"][one["tile"]][0][0] * WIDTH
        moved = set(range(first + one["begin"], first + one["end"]))
        assert moved <= held[one["sender"]] and moved <= set(range(size))
        held[one["receiver"]] |= moved
    assert held == wanted


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("tensor", [2, 4])
def test_over_a_slow_link_each_byte_goes_once_and_not_for_every_worker(data, tensor):
    """And a transfer lasts what that takes: pairs would take as many times as long as workers share matrices."""
    answer = answer_of(data, tensor, APART)
    found = plans_of(answer)
    assert set(found) == {(0, False), (0, True)}
    whole = 4 * ROWS * WIDTH
    for (_, backward), plan in found.items():
        link = ("two", "one") if backward else ("one", "two")
        assert crossed(plan) == {link: whole}
        check_values(plan)
        messages = sum(not one["local"] for one in plan["messages"])
        assert plan["makespan_s"] == pytest.approx(whole / SLOW + messages * LATENCY_S)
        assert messages <= data, "no byte is slower for a cut that nothing gains by"
        slots = [s for s in answer["plan"]["slots"] if s["action"] == ("SEND_B" if backward else "SEND_F")]
        assert len(slots) == 3
        for slot in slots:
            assert slot["end_s"] - slot["start_s"] == pytest.approx(plan["makespan_s"])
        sides = (
            mesh_layout(name, mesh=(data, tensor), split=(0, None), hosts=(node,) * data * tensor)
            for name, node in sorted(APART.items(), reverse=backward)
        )
        pairs = plan_send_and_receive(Tensor((ROWS, WIDTH), 4), *sides, Links(SLOW, latency_s=LATENCY_S))
        assert crossed(pairs.to_json()) == {link: tensor * whole}
        assert pairs.makespan_s == pytest.approx(tensor * whole / SLOW + tensor * data * LATENCY_S)


@pytest.mark.parametrize(
    ("data", "tensor", "nodes"),
    [
        (1, 2, {"m0": "one", "m1": "one"}),
        (2, 2, {"m0": "one", "m1": "one"}),
        (2, 1, APART),
        (2, 2, {"m0": ["one", "one", "two", "two"], "m1": ["one", "one", "two", "two"]}),
    ],
    ids=["one node", "one node, data 2", "data only", "counterparts on one node"],
)
def test_in_pairs_go_tensors_of_which_no_byte_would_cross_twice(data, tensor, nodes):
    answer = answer_of(data, tensor, nodes)
    assert "reshardings" not in answer
    assert answer["spec"]["edges"][0]["forward_bytes"] == 4 * ROWS // data * WIDTH


@pytest.mark.parametrize(
    ("nodes", "entered"),
    [
        # replicas stand where the other mesh is too: nothing needs to cross
        ({"m0": ["one", "two"], "m1": ["two", "one"]}, []),
        ({"m0": ["one", "two"], "m1": "three"}, ["three"]),
        ({"m0": ["one", "two"], "m1": ["two", "three"]}, ["three"]),
        ({"m0": "one", "m1": ["two", "three"]}, ["two", "three"]),
    ],
    ids=["crosswise", "from two nodes", "one of them common", "to two nodes"],
)
def test_of_meshes_on_several_nodes_each_byte_enters_a_node_once(nodes, entered):
    plan = plans_of(answer_of(1, 2, nodes))[0, False]
    came: dict[str, int] = {}
    for (_, host), size in crossed(plan).items():
        came[host] = came.get(host, 0) + size
    assert came == dict.fromkeys(entered, 4 * ROWS * WIDTH)
    check_values(plan)


@pytest.mark.parametrize("seed", range(30))
def test_wherever_workers_are_a_plan_brings_all_to_all_and_workers_can_run_it(seed):
    """No byte enters a node twice, and none that has it already."""
    draw = random.Random(seed)
    data, tensor = draw.choice([(1, 2), (2, 2), (1, 3), (3, 2), (1, 4)])
    nodes = {f"m{k}": [draw.choice(["a", "b", "c"]) for _ in range(data * tensor)] for k in range(2)}
    answer = answer_of(data, tensor, nodes)
    assert ("reshardings" in answer) == (nodes["m0"] != nodes["m1"])
    part = 4 * ROWS * WIDTH // data
    for (_, backward), plan in plans_of(answer).items():
        WorkerPlan.from_json(plan)
        check_values(plan)
        source, target = (nodes[f"m{k}"] for k in ((1, 0) if backward else (0, 1)))
        wanted: dict[str, int] = {}
        for k in range(0, data * tensor, tensor):
            for node in {*target[k : k + tensor]} - {*source[k : k + tensor]}:
                wanted[node] = wanted.get(node, 0) + part
        came: dict[str, int] = {}
        for (_, node), size in crossed(plan).items():
            came[node] = came.get(node, 0) + size
        assert came == wanted


def test_of_three_meshes_only_those_apart_reshard():
    answer = answer_of(1, 2, {"m0": "one", "m1": "one", "m2": "two"}, meshes=3)
    assert {edge for edge, _ in plans_of(answer)} == {1}
    first, second = answer["spec"]["edges"]
    assert (first["forward_bytes"], first["held_bytes"]) == (4 * ROWS * WIDTH, None)
    assert (second["forward_bytes"], second["held_bytes"]) == (None, 4 * ROWS * WIDTH)


@pytest.mark.parametrize(("shape", "size"), [((), 4), ((0, WIDTH), 0), (None, 16)], ids=str)
def test_what_cannot_be_dealt_goes_in_pairs_as_ever(shape, size):
    """A single number of each part of a microbatch, nothing, and what was measured before shapes were told."""

    def profile(workers):
        made = _profile(workers)
        return replace(made, edges=tuple(replace(edge, shape=shape, bytes=size) for edge in made.edges))

    answer = answer_of(2, 2, APART, profile=profile)
    assert "reshardings" not in answer and answer["spec"]["edges"][0]["forward_bytes"] == size


def test_a_single_number_of_the_whole_microbatch_crosses_once():
    def profile(workers):
        made = _profile(workers)
        return replace(made, edges=tuple(replace(edge, shape=(), bytes=4) for edge in made.edges))

    plan = plans_of(answer_of(1, 2, APART, profile=profile))[0, False]
    assert crossed(plan) == {("one", "two"): 4}


def test_layers_cost_and_hold_what_they_do_in_pairs():
    """Only how tensors travel is another question."""
    apart, together = (answer_of(2, 2, {"m0": "one", "m1": other})["spec"] for other in ("two", "one"))
    assert apart["stages"] == together["stages"]
    most = [_max_bytes_in_flight(PipelineSpec.model_validate(spec)) for spec in (apart, together)]
    assert most[0] == most[1]


@pytest.mark.parametrize("nodes", [APART, {"m0": "one", "m1": "one"}], ids=["apart", "together"])
def test_an_evaluation_crosses_as_training_does(nodes):
    meshes = [
        {"name": name, "data": 2, "tensor": 2, "nodes": [node] * 4} for name, node in sorted(nodes.items())
    ]
    found = plan_forwards(_request(2, 2, meshes=meshes), budget_s=0.1)
    if len({*nodes.values()}) == 1:
        assert not found.reshardings and found.spec.edges[0].forward_bytes == 4 * ROWS // 2 * WIDTH
        return
    plan = found.reshardings[0, False]
    assert crossed(plan.to_json()) == {("one", "two"): 4 * ROWS * WIDTH}
    assert plan.to_json() == plans_of(answer_of(2, 2, nodes))[0, False]
    assert found.spec.edges[0].forward_s == plan.makespan_s


def test_a_plan_made_before_for_pairs_is_used_as_it_is():
    """As is one that reshards, wherever the meshes came to be: what runs is what was planned."""
    job = job_of(1, 2)
    for planned, now in ((dict.fromkeys(APART, "one"), APART), (APART, dict.fromkeys(APART, "one"))):
        costs = costs_of(1, 2, planned)
        answer = answer_of(1, 2, planned)
        made_for = PlanKey.of(job, costs, 3)
        used = saved_plan_answer(
            "kept", json.dumps(answer), made_for, Job.from_json(job), costs_of(1, 2, now)
        )
        assert plans_of(used) == plans_of(answer)
        assert used["spec"]["edges"] == answer["spec"]["edges"]
        assert used["plan"]["programs"] == answer["plan"]["programs"]


def test_before_nodes_are_known_each_mesh_is_taken_to_have_its_own():
    from worker.tasks.profile import assumed_workers

    read = Job.from_json(job_of(1, 2))
    costs = {
        **costs_of(1, 2, APART),
        "workers": assumed_workers(read, "cpu"),
    }
    profile = measured_profile(read, JobCosts.from_json(costs, read), 3)
    assert [one.nodes for one in profile.parallelism] == [("m0", "m0"), ("m1", "m1")]
    assert {one["node"] for one in costs["workers"]} == {"here"}, "on CPU all share this machine's cores"


def test_other_cuts_are_explained_with_what_is_resharded():
    answer = answer_of(1, 2, APART)
    stored = StoredStep(job_of(1, 2), json.dumps(answer), (), None, costs_of(1, 2, APART))
    layers = work._known_layers(stored, answer["begins"])
    spec = PipelineSpec.model_validate(answer["spec"])
    cuts = CutSearch.of(spec, None, layers, ())
    assert cuts._unpriced(cuts.now).edges == spec.edges
    assert len(layers.profiles[3].mesh_profiles) == 2 and len(layers.profiles[3].layers) == LAYERS
