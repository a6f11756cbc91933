"""Every planted fault ends the step of every worker, in time, by name, with nothing left behind."""

import pytest

from tests.tiers import some_by_day
from tests.worker.engine.test_gloo import run_processes

LIMIT_S = 4.0
SOON_S = 60.0
"""So long a step may take to fail on a machine that others keep busy; the limit of what nobody waits for is far beyond."""


def run_with(kind, mesh="m1", stage=1, never_ends=(), limit_s=3 * SOON_S, **more):
    return run_processes(
        {
            "graph": "chain",
            "mesh_of_stage": ["m0", "m1", "m2", "m3"],
            "meshes": ["m0", "m1", "m2", "m3"],
            "workers": 1,
            "microbatches": 4,
            "steps": 2,
            "limit_s": limit_s,
            "fault": {"kind": kind, "mesh": mesh, "stage": stage},
            **more,
        },
        never_ends=never_ends,
        timeout_s=250,
    )


def check_all_ended(answers, without=()):
    for (mesh, _), answer in answers.items():
        if mesh in without:
            assert answer is None
            continue
        assert answer["error"] is not None, mesh
        assert answer["failed_after_s"] < SOON_S, answer
        assert answer["stuck"] == [] and answer["threads"] == [], answer


@pytest.mark.slow
def test_a_killed_worker_is_named_by_its_neighbours():
    answers = run_with("killed")
    check_all_ended(answers, without=["m1"])
    assert {a["error"] for a in answers.values() if a} <= {"PeerLostError", "AbortedError"}
    assert "m1" in answers["m0", 0]["message"]
    assert all("m1" in answer["message"] for answer in answers.values() if answer)


@pytest.mark.slow
@some_by_day(
    ("kind", "error", "words"),
    [
        ("raises", "StageError", ["1F2", "KeyError", "planted in forward"]),
        ("raises in backward", "StageError", ["1B2", "KeyError", "planted in backward"]),
        ("shape", "StageError", ["1F2", "(1, 6)", "(3, 6)"]),
    ],
    by_day=1,
)
def test_an_error_in_a_stage_reaches_every_worker_with_its_cause(kind, error, words):
    answers = run_with(kind)
    check_all_ended(answers)
    assert answers["m1", 0]["error"] == error
    for (mesh, _), answer in answers.items():
        assert all(word in answer["message"] for word in words), (mesh, answer["message"])
        assert mesh == "m1" or answer["error"] == "AbortedError"


@pytest.mark.slow
def test_a_nan_loss_stops_every_worker():
    answers = run_with("nan")
    check_all_ended(answers)
    assert "NonFiniteError" in {answer["error"] for answer in answers.values()}
    assert all("not finite" in answer["message"] for answer in answers.values())


@pytest.mark.slow
def test_a_peer_that_never_connects_is_named():
    answers = run_with("absent", connect_s=3.0)
    check_all_ended(answers, without=["m1"])
    assert all(a["error"] == "ConnectError" and "m1/0" in a["message"] for a in answers.values() if a)


@pytest.mark.slow
def test_a_stopped_worker_is_found_by_the_slots_that_wait_for_it():
    answers = run_with("stopped", never_ends=["m1"], limit_s=LIMIT_S)
    check_all_ended({key: answer for key, answer in answers.items() if key[0] != "m1"})
    stalled = [answer for answer in answers.values() if answer and answer["error"] == "StallError"]
    assert stalled
    for answer in stalled:
        assert "it waits for m1" in answer["message"]
        assert "m1 said" in answer["message"] and "last finished" in answer["message"]
        assert f"limit {LIMIT_S} s" in answer["message"]


@pytest.mark.slow
def test_a_stage_that_never_returns_is_named_by_its_own_worker():
    answers = run_with("sleeps", limit_s=LIMIT_S)
    error = answers["m1", 0]
    assert error["error"] == "StallError"
    assert all("1F2 on lane compute" in answer["message"] for answer in answers.values())
    assert all(answer["failed_after_s"] < SOON_S for answer in answers.values())
    assert error["stuck"] == ["compute"]
