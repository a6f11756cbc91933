"""What meshes may hold and hold always, by numbers that are added up by hand."""

import itertools

import pytest

from service.scheduler.planner import make_plan
from service.scheduler.problem.problem import build_problem
from service.scheduler.problem.spec_checks import load_spec
from tests.service.scheduler.specs import chain


def problem(**meshes):
    """Three stages on two meshes: s0 and s2 on m0, s1 on m1; `meshes` gives limits as m0=dict(…)."""
    data = chain(3, 2, meshes=[0, 1, 0], schedule="auto")
    for stage, (activation, stash, static) in zip(
        data["stages"], [(5, 2, 100), (7, 7, 10), (3, 0, 30)], strict=True
    ):
        stage.update(activation_bytes=activation, weight_stash_bytes=stash, static_bytes=static)
    for mesh in data["meshes"]:
        mesh.update(meshes.get(mesh["name"], {}))
    return build_problem(load_spec(data))


def test_what_stages_hold_is_theirs_and_what_is_static_adds_up_on_their_mesh():
    found = problem()
    assert found.activation.tolist() == [5, 7, 3]
    assert found.stash.tolist() == found.whole_stash.tolist() == [2, 7, 0]
    assert found.static_bytes.tolist() == [130, 10]
    assert found.rematerialised.tolist() == [0, 0, 0] and found.workspace.tolist() == [0, 0]
    assert found.activation_limit_is_exact


def test_without_limits_there_is_none():
    found = problem()
    for limits in (
        found.memory_limit,
        found.activation_limit,
        found.activation_capacity,
        found.relaxed_activation_limit,
    ):
        assert limits.tolist() == [-1, -1]
    assert found.receive_limit.tolist() == [-1, -1]


def test_memory_that_is_never_full_is_no_limit():
    """With two microbatches m0 holds at most 130 always and (5 + 3) twice, m1 10 and 7 twice."""
    most = problem().most_bytes.tolist()
    assert most == [130 + 2 * (5 + 3), 10 + 2 * 7]
    for room, limits in ((0, [-1, -1]), (-1, [145, 23])):
        found = problem(m0={"memory_bytes": most[0] + room}, m1={"memory_bytes": most[1] + room})
        assert found.memory_limit.tolist() == limits


def test_activations_may_fill_what_memory_leaves_and_no_more_than_their_own_limit():
    found = problem(
        m0={"memory_bytes": 140, "activation_limit_bytes": 40, "receive_buffer_limit": 3},
        m1={"memory_bytes": 20, "activation_limit_bytes": 20},
    )
    assert found.memory_limit.tolist() == [140, 20] and found.receive_limit.tolist() == [3, -1]
    assert found.activation_capacity.tolist() == [10, 10]
    assert found.activation_limit.tolist() == [10, 10]
    assert problem(m0={"memory_bytes": 140}).activation_capacity.tolist() == [10, -1]
    assert problem(m1={"activation_limit_bytes": 20}).activation_capacity.tolist() == [-1, 20]


def test_what_comes_back_to_be_computed_again_needs_its_room():
    """The most of one stage, as a mesh runs one backward at a time; for sure it is free only where it has one stage."""

    def made(m0: int):
        data = chain(3, 2, meshes=[0, 1, 0], schedule="auto")
        for stage, again in zip(data["stages"], (m0, 4, m0 // 2), strict=True):
            stage["rematerialised_bytes"] = again
        for mesh in data["meshes"]:
            mesh["activation_limit_bytes"] = 20
        return build_problem(load_spec(data))

    shared = made(6)
    assert shared.rematerialised.tolist() == [6, 4, 3] and shared.workspace.tolist() == [6, 4]
    assert shared.activation_capacity.tolist() == [20, 20] and shared.activation_limit.tolist() == [14, 16]
    assert shared.relaxed_activation_limit.tolist() == [20, 16] and not shared.activation_limit_is_exact
    alone = made(0)
    assert alone.workspace.tolist() == [0, 4] and alone.activation_limit_is_exact
    assert alone.activation_limit.tolist() == alone.relaxed_activation_limit.tolist() == [20, 16]


def planned(network):
    """Three meshes between which a microbatch takes longer than they compute on it."""
    return make_plan(load_spec(chain(3, 4, transfer=3.0, schedule="1f1b") | {"network": network}))


def links_of(word, *pairs):
    return [{"source": a, "target": b, "contention": word} for pair in pairs for a, b in (pair, pair[::-1])]


@pytest.mark.parametrize("word", ["link", "full-duplex", "half-duplex"])
@pytest.mark.parametrize("elsewhere", ["link", "full-duplex", "half-duplex"])
def test_links_that_all_have_one_contention_are_a_network_that_has_it(word, elsewhere):
    links = links_of(word, ("m0", "m1"), ("m1", "m2"))
    own, whole = planned({"contention": elsewhere, "links": links}), planned({"contention": word})
    assert (own.slots, own.programs) == (whole.slots, whole.programs)


def test_one_half_duplex_pair_takes_turns_and_leaves_the_others_what_they_can():
    pairs = {"near": ("m0", "m1"), "far": ("m1", "m2")}
    plan = planned({"contention": "link", "links": links_of("half-duplex", pairs["near"])})
    sends = {
        name: [
            slot
            for slot in plan.slots
            if slot.lane.startswith("send:") and {slot.mesh, slot.lane[5:]} == {*pair}
        ]
        for name, pair in pairs.items()
    }

    def overlaps(first, second):
        return any(
            a.start_s < b.end_s and b.start_s < a.end_s
            for a, b in itertools.product(first, second)
            if a is not b
        )

    assert not overlaps(sends["near"], sends["near"]), "both directions share the port"
    assert overlaps(sends["near"], sends["far"]), "m1 sends to m2 while it exchanges with m0"
