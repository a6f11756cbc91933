"""Named schedules against closed forms, and the simulator against known makespans."""

import json

import numpy as np
import pytest

from service.scheduler.auto.fixed_schedule import named_timeline
from service.scheduler.planner import make_plan
from service.scheduler.problem.memory import peak_activation
from service.scheduler.problem.spec import SpecError
from service.scheduler.problem.spec_checks import load_spec
from tests.service.scheduler.checker import check_plan, run_programs
from tests.service.scheduler.specs import chain

SIZES = [(s, m) for s in range(1, 9) for m in range(1, 17)]


def unit_starts(stages, microbatches, schedule, **fields):
    """(F, B): int[stages, microbatches] clocks of a unit-cost chain without transfer times."""
    data = chain(
        stages,
        microbatches,
        backward=1.0,
        transfer=0.0,
        contention="none",
        schedule=schedule,
        split_backward=False,
        **fields,
    )
    timeline = named_timeline(load_spec(data), schedule)
    start = timeline.start.reshape(-1, microbatches)
    return start[: 3 * stages : 3], start[1 : 3 * stages : 3]


def expected(schedule, stages, microbatches):
    """Closed forms of SCHEDULING.md."""
    forward, backward = np.zeros((stages, microbatches)), np.zeros((stages, microbatches))
    for s in range(stages):
        for m in range(microbatches):
            if schedule == "gpipe":
                forward[s, m] = m + s
                backward[s, m] = (microbatches + stages - 1) + (stages - 1 - s) + m
                continue
            backward[s, m] = 2 * stages - 1 - s + 2 * m
            w = min(microbatches, 2 * (stages - s) - 1)
            if schedule == "1f1b":
                forward[s, m] = m + s if m < stages - s else 2 * m + s
            elif schedule == "eager":
                forward[s, m] = m + s if m < w else s + 2 * m - w + 1
            elif m >= stages:
                forward[s, m] = 2 * m + s
            elif m < 2 * (stages - s) - 1:
                forward[s, m] = s + m
            else:
                forward[s, m] = 2 * m - 2 * stages + 3 * s + 2
    return forward, backward


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager", "eager capped at S"])
def test_unit_tables_equal_the_closed_forms(schedule):
    for stages, microbatches in SIZES:
        name = "eager-1f1b" if schedule.startswith("eager") else schedule
        fields = {"max_in_flight": stages} if schedule.endswith("S") else {}
        for found, wanted in zip(
            unit_starts(stages, microbatches, name, **fields),
            expected(schedule, stages, microbatches),
            strict=True,
        ):
            np.testing.assert_array_equal(found, wanted, err_msg=f"{schedule} S={stages} M={microbatches}")


@pytest.mark.parametrize(
    ("schedule", "peak"),
    [
        ("gpipe", lambda s, S, M: M),
        ("1f1b", lambda s, S, M: min(M, S - s)),
        ("eager-1f1b", lambda s, S, M: min(M, 2 * (S - s) - 1)),
    ],
)
def test_the_peak_in_flight_is_the_warm_up(schedule, peak):
    for stages, microbatches in SIZES:
        spec = load_spec(chain(stages, microbatches, schedule=schedule, split_backward=False))
        timeline = named_timeline(spec, schedule)
        for stage, lane in enumerate(timeline.lanes):
            held, _ = peak_activation(timeline.problem, lane)
            assert held == 2 * peak(stage, stages, microbatches)


@pytest.mark.parametrize(("stages", "microbatches", "makespan"), [(4, 16, 63.0), (8, 32, 131.0)])
def test_eager_hides_transfers_on_a_full_duplex_chain(stages, microbatches, makespan):
    plan = make_plan(load_spec(chain(stages, microbatches)))
    assert plan.makespan_s == makespan
    assert plan.bubble_ratio == pytest.approx(1 - 3 * microbatches / makespan)


def test_eager_reaches_its_closed_form_wherever_transfers_are_no_longer_than_forwards():
    for stages in range(2, 9):
        for microbatches in range(2 * stages, 17):
            for transfer in (0.0, 0.5, 1.0):
                plan = make_plan(load_spec(chain(stages, microbatches, transfer=transfer)))
                wanted = (microbatches + stages - 1) * 3 + 2 * (stages - 1) * transfer
                assert plan.makespan_s == pytest.approx(wanted)


@pytest.mark.parametrize("contention", ["half-duplex", "full-duplex"])
@pytest.mark.parametrize(("stages", "skips", "makespan"), [(4, ((0, 3),), 72.0), (6, ((0, 5), (1, 4)), 88.0)])
def test_urgency_orders_the_transfers_of_skips(contention, stages, skips, makespan):
    data = chain(stages, 8, forward=2.0, backward=4.0, contention=contention, skips=skips)
    assert make_plan(load_spec(data)).makespan_s == makespan


def test_zb_h1_reaches_the_bound_of_the_first_backward_on_uniform_chains():
    for stages in range(1, 9):
        for microbatches in range(stages, 17):
            data = chain(
                stages, microbatches, backward=2.0, transfer=0.0, contention="none", schedule="zb-h1"
            )
            for stage in data["stages"]:
                stage["weight_stash_bytes"] = 2
            for mesh in data["meshes"]:
                mesh["activation_limit_bytes"] = 2 * stages
            plan = make_plan(load_spec(data))
            assert plan.makespan_s == 3 * microbatches + stages - 1
            assert plan.proven_optimal


def v_chain(meshes, microbatches, **fields):
    stages = 2 * meshes
    placed = [min(s, stages - 1 - s) for s in range(stages)]
    return chain(
        stages, microbatches, transfer=0.0, contention="none", schedule="zb-v", meshes=placed, **fields
    )


@pytest.mark.slow
def test_zb_v_needs_the_memory_of_1f1b_and_leaves_the_bubble_of_one_forward_a_mesh():
    for meshes in range(1, 9):
        for microbatches in range(1, 20):
            data = v_chain(meshes, microbatches)
            for mesh in data["meshes"]:
                mesh["activation_limit_bytes"] = 2 * 2 * meshes
            makespan = make_plan(load_spec(data)).makespan_s
            assert makespan >= 6 * microbatches + meshes - 1
            if microbatches >= 2 * meshes - 2:
                assert makespan == 6 * microbatches + meshes - 1


def test_interleaving_shortens_the_bubble_and_takes_any_number_of_microbatches():
    for meshes in (2, 3, 4):
        for rounds in (2, 3):
            placed = [s % meshes for s in range(meshes * rounds)]
            for microbatches in range(1, 14):
                data = chain(
                    meshes * rounds,
                    microbatches,
                    transfer=0.0,
                    contention="none",
                    schedule="interleaved-1f1b",
                    meshes=placed,
                    split_backward=False,
                )
                plan = make_plan(load_spec(data))
                check_plan(data, json.loads(plan.model_dump_json()))
                if microbatches % meshes == 0:
                    # the bubble of 1F1B, (P - 1)(f + b), divided by the rounds
                    assert plan.makespan_s == 3 * rounds * microbatches + 3 * (meshes - 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
def test_a_split_backward_runs_w_right_after_its_i(schedule):
    plan = make_plan(load_spec(chain(3, 4, schedule=schedule, split_backward=True)))
    for mesh in ("m0", "m1", "m2"):
        actions = [(s.action, s.microbatch) for s in plan.slots if s.mesh == mesh and s.lane == "compute"]
        for index, (action, microbatch) in enumerate(actions):
            if action == "I":
                assert actions[index + 1] == ("W", microbatch)


def test_inference_runs_forwards_only_on_any_placement():
    for placed in ([0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]):
        data = chain(4, 5, schedule="inference", meshes=placed, transfer=0.5)
        plan = json.loads(make_plan(load_spec(data)).model_dump_json())
        check_plan(data, plan)
        run_programs(data, plan["programs"], seed=0)
        assert {s["action"] for s in plan["slots"]} <= {"F", "SEND_F", "RECV_F"}
        assert {i["op"] for p in plan["programs"].values() for i in p} <= {"F", "SEND_F", "RECV_F"}


def test_a_schedule_on_the_wrong_placement_is_refused_with_the_names_that_fit():
    two_a_mesh = chain(4, 4, meshes=[0, 1, 0, 1])
    with pytest.raises(SpecError, match=r"one stage a mesh.*interleaved-1f1b, auto"):
        make_plan(load_spec({**two_a_mesh, "schedule": "1f1b"}))
    with pytest.raises(SpecError, match="gpipe, 1f1b, eager-1f1b, zb-h1, auto"):
        make_plan(load_spec(chain(4, 4, schedule="zb-v")))


def test_a_named_schedule_over_the_memory_limit_says_how_much_it_needs():
    data = chain(4, 8, schedule="gpipe")
    data["meshes"][1]["activation_limit_bytes"] = 9
    with pytest.raises(SpecError, match=r"16 bytes.*'m1'.*limit_bytes 9: raise the limit to 16"):
        make_plan(load_spec(data))


def test_a_cap_below_what_a_schedule_keeps_in_flight_is_refused():
    with pytest.raises(SpecError, match=r"'gpipe'.*max_in_flight 2"):
        make_plan(load_spec(chain(4, 8, schedule="gpipe", max_in_flight=2)))
    for schedule in ("1f1b", "eager-1f1b", "zb-h1"):
        for cap in (1, 2, 3):
            make_plan(load_spec(chain(4, 8, schedule=schedule, max_in_flight=cap)))
