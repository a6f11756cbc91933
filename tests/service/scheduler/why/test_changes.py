"""What would shorten a step: the gains that are told beside steps that really have that change."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from service.scheduler.job.cut import PipelineSetup
from service.scheduler.job.joint import JointSearchRequest, plan_jointly
from service.scheduler.job.partition import partition
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import MeshSpec, NetworkSpec
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.why.changes import CutSearch, JobLayers
from service.scheduler.why.explain import explain
from service.scheduler.why.measured import CauseKind, Change, ChangeKind
from service.scheduler.why.step_graph import make_step_graph
from tests.service.scheduler.job.test_joint import measured as measured_layers
from tests.service.scheduler.specs import chain, measured
from tests.service.scheduler.why.simulation import World, makespan, planned_step, run
from worker.contract.planned import recompute_method

LAYERS = 9
NETWORK = NetworkSpec(contention="link", bandwidth_bytes_per_s=1e7, latency_s=1e-4)


def cut_job(begins: tuple[int, ...], *, microbatches: int = 6, seed: int = 3):
    profile = measured_layers(LAYERS, seed)
    names = [f"l{index}" for index in begins]
    meshes = [MeshSpec(name=f"m{i}") for i in range(len(begins))]
    made = partition(
        profile, PipelineSetup(meshes, NETWORK), stages=len(begins), cut=names, microbatches=microbatches
    )
    return profile, made


def first(changes: tuple[Change, ...], kind: ChangeKind) -> Change:
    return next(change for change in changes if change.kind is kind)


def test_an_uneven_cut_is_named_and_a_better_one_told_with_what_it_brings():
    profile, made = cut_job((0, 1, 2))
    plan = make_plan(made.spec, budget_s=0.0)
    layers = JobLayers({6: profile}, stage_starts=made.stage_starts)
    found = explain(
        planned_step(made.spec, plan), run(made.spec, plan, World(noise=0.05, seed=2)), layers=layers
    )
    assert found.causes[0].kind is CauseKind.CUT
    change = first(found.changes, ChangeKind.CUT)
    every = {
        cut: make_plan(cut_job((0, *cut))[1].spec, budget_s=0.0).makespan_s
        for cut in itertools.combinations(range(1, LAYERS), 2)
    }
    told = tuple(int(name[1:]) for name in change.subject.split(", "))
    assert every[told[1:]] <= 1.05 * min(every.values())
    assert change.step_s == pytest.approx(every[told[1:]], rel=0.08)
    moved = first(found.changes, ChangeKind.LAYER)
    assert moved.subject == "l2" and "stage s1 instead of s2" in moved.message
    assert moved.step_s == pytest.approx(every[1, 3], rel=0.08)
    assert change.gain_s >= moved.gain_s > 0


def test_beside_a_straggler_layers_that_move_away_from_it_take_as_long_as_where_they_go():
    profile, made = cut_job((0, 3, 6))
    plan = make_plan(made.spec, budget_s=0.0)
    layers = JobLayers({6: profile}, stage_starts=made.stage_starts)
    found = explain(
        planned_step(made.spec, plan), run(made.spec, plan, World(meshes={"m1": 2.0})), layers=layers
    )
    assert [cause.kind for cause in found.causes] == [CauseKind.MESH]
    cut = first(found.changes, ChangeKind.CUT)
    begins = tuple(int(name[1:]) for name in cut.subject.split(", "))
    assert begins[2] - begins[1] < 3
    other = cut_job(begins)[1].spec
    planned = make_plan(other, budget_s=0.0)
    assert cut.step_s == pytest.approx(makespan(run(other, planned, World(meshes={"m1": 2.0}))), rel=0.08)


@pytest.mark.slow
def test_a_cut_that_is_as_good_as_any_is_left_alone():
    profile, made = cut_job((0, 3, 6))
    best = min(
        (make_plan(cut_job((0, *cut))[1].spec, budget_s=0.0).makespan_s, (0, *cut))
        for cut in itertools.combinations(range(1, LAYERS), 2)
    )[1]
    profile, made = cut_job(best)
    plan = make_plan(made.spec, budget_s=0.0)
    layers = JobLayers({6: profile}, stage_starts=made.stage_starts)
    found = explain(planned_step(made.spec, plan), run(made.spec, plan, World(noise=0.05)), layers=layers)
    assert found.causes == () and all(change.kind is not ChangeKind.CUT for change in found.changes)


@pytest.mark.parametrize("known", [True, False])
def test_more_microbatches_are_told_with_what_they_bring(known: bool):
    small = measured_layers(LAYERS, 3, microbatch=0.5)
    profile, made = cut_job((0, 3, 6), microbatches=4)
    plan = make_plan(made.spec, budget_s=0.0)
    layers = JobLayers(
        {4: profile, 8: small} if known else {4: profile}, counts=[2, 4, 8], stage_starts=made.stage_starts
    )
    found = explain(planned_step(made.spec, plan), run(made.spec, plan, World(noise=0.03)), layers=layers)
    change = first(found.changes, ChangeKind.MICROBATCHES)
    assert change.subject == "8"
    with_eight = partition(
        small, PipelineSetup(made.spec.meshes, NETWORK), stages=3, cut=made.stage_starts, microbatches=8
    )
    assert change.step_s == pytest.approx(make_plan(with_eight.spec, budget_s=0.0).makespan_s, rel=0.06)
    assert ("as its layers were measured" in change.message) == known
    assert all(change.subject != "2" for change in found.changes if change.kind is ChangeKind.MICROBATCHES)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("world", "kind"),
    [
        ({"meshes": {"m2": 1.8}}, ChangeKind.MESH),
        ({"links": {("m1", "m2"): 12.0}}, ChangeKind.LINK),
        ({"late_s": {"m1": 0.006}}, ChangeKind.HOST),
    ],
)
def test_a_step_without_what_was_planted_is_as_short_as_predicted(world: dict, kind: ChangeKind, seed: int):
    """Planned again without it: a search of its own must find the step that was promised, or a shorter one."""
    spec = load_spec(measured(4, 8, 1))
    plan = make_plan(spec, budget_s=0.0)
    found = explain(planned_step(spec, plan), run(spec, plan, World(**world, noise=0.03, seed=seed)))
    healthy_s = makespan(run(spec, plan, World(noise=0.03, seed=seed)))
    change = first(found.changes, kind)
    assert change.step_s == pytest.approx(healthy_s, rel=0.06)
    assert change.gain_s == pytest.approx(found.step_s - change.step_s)
    assert [c.gain_s for c in found.changes] == sorted((c.gain_s for c in found.changes), reverse=True)


def test_a_plan_that_fits_what_was_measured_better_is_a_change_of_its_own():
    spec = load_spec(measured(4, 8, 1))
    plan = make_plan(spec, budget_s=0.0)
    found = explain(planned_step(spec, plan), run(spec, plan, World(links={("m1", "m2"): 12.0})))
    anew = first(found.changes, ChangeKind.PLAN)
    links = [link.model_dump() for link in spec.network.links]
    for link in links:
        if (link["source"], link["target"]) == ("m1", "m2"):
            link["bandwidth_bytes_per_s"] /= 12
            link["latency_s"] *= 12
    slow = load_spec({**spec.model_dump(), "network": {**spec.network.model_dump(), "links": links}})
    assert anew.step_s == pytest.approx(make_plan(slow, budget_s=0.0).makespan_s, rel=0.01)
    link = first(found.changes, ChangeKind.LINK)
    assert link.alone_s == pytest.approx(link.gain_s - anew.gain_s)


def test_what_there_was_no_time_for_is_named():
    spec = load_spec(chain(3, 4))
    plan = make_plan(spec, budget_s=0.0)
    found = explain(planned_step(spec, plan), run(spec, plan, World()), expired=lambda: True)
    assert found.changes == () and ChangeKind.LINK.value in found.left_out


def test_slots_of_another_plan_are_refused_with_a_word_and_the_plan_is_explained():
    spec = load_spec(chain(3, 4))
    plan = make_plan(spec, budget_s=0.0)
    slots = run(spec, plan, World())
    found = explain(planned_step(spec, plan), slots[:-3])
    assert found.measured is None and "another plan" in found.notes[0]
    assert explain(planned_step(spec, plan), []).verdict.startswith("No step of this plan was measured yet")


@pytest.mark.parametrize(
    "data",
    [
        measured(4, 8, 1),
        measured(2, 6, 2, loops=2),
        chain(4, 6, skips=((0, 3),), schedule="zb-h1", contention="link"),
    ],
)
def test_a_step_played_again_takes_as_long_as_it_did_and_as_a_simulation_of_its_own_says(data: dict):
    spec = load_spec(data)
    plan = make_plan(spec, budget_s=0.0)
    of = planned_step(spec, plan)
    ran = run(spec, plan, World(noise=0.2, late_s={"m0": 0.001}))
    step = make_step_graph(spec, of.programs, plan.slots, ran)
    assert step.makespan_s == pytest.approx(makespan(ran), rel=1e-9)
    assert step.replay(step.planned_s) == pytest.approx(plan.makespan_s, rel=1e-9)
    slower = [
        seconds * (3.0 if task.mesh == "m1" and task.target is None else 1.0)
        for task, seconds in zip(step.tasks, step.planned_s, strict=True)
    ]
    assert step.replay(slower) == pytest.approx(
        makespan(run(spec, plan, World(meshes={"m1": 3.0}))), rel=1e-9
    )


def test_every_mesh_computes_or_is_idle_for_a_reason_through_the_whole_step():
    spec = load_spec(measured(4, 8, 1))
    plan = make_plan(spec, budget_s=0.0)
    found = explain(planned_step(spec, plan), run(spec, plan, World(links={("m1", "m2"): 12.0})))
    for side in (found.planned, found.measured):
        assert side is not None
        for mesh in side.meshes:
            assert mesh.compute_s + sum(mesh.idle_s.values()) == pytest.approx(side.makespan_s, rel=1e-6)
    slow = max(found.measured.links, key=lambda link: link.exposed_s)
    assert (slow.source, slow.target) == ("m1", "m2")
    of_plan = next(link for link in found.planned.links if (link.source, link.target) == ("m1", "m2"))
    assert slow.transfer_s == pytest.approx(12 * of_plan.transfer_s)
    assert slow.transfers == of_plan.transfers == 8


def recompute_kind(stage):
    """The method by which a stage may recompute, and the bytes that it keeps then."""
    option = stage.recompute
    return option and (recompute_method(dict(option)), option.activation_bytes, round(option.extra_s, 9))


@pytest.mark.parametrize(("limit", "method"), [(1500, "selective"), (500, "whole")])
def test_other_cuts_recompute_as_the_job_does_and_its_own_cut_costs_what_it_did(limit: int, method: str):
    from tests.service.scheduler.job.test_partition import selective_profile

    profile = selective_profile()
    profile = replace(profile, layers=tuple(replace(layer, selective_s=0.01) for layer in profile.layers))
    meshes = [MeshSpec(name="m0", memory_bytes=limit), MeshSpec(name="m1")]
    setup = PipelineSetup(meshes, NetworkSpec(), schedule="gpipe", recompute="auto")
    planned = plan_jointly(
        JointSearchRequest({8: profile}, setup, stages=[2], cut=["l0", "l2"]), budget_s=0.5
    )
    spec, plan = planned.partition.spec, planned.plan
    assert recompute_method(dict(plan.stages[0])) == method and plan.stages[0].recomputed
    slots = run(spec, plan, World())
    step = make_step_graph(spec, planned_step(spec, plan).programs, plan.slots, slots)
    layers = JobLayers({8: profile}, stage_starts=["l0", "l2"], recompute="auto")
    cuts = CutSearch.of(spec, step, layers, planned_step(spec, plan).recomputed)
    assert cuts is not None
    for mine, priced in zip(spec.stages, cuts.priced_now.stages, strict=True):
        assert priced.whole_backward_s == pytest.approx(mine.whole_backward_s)
        assert len(priced.recompute_options) <= 1
        assert recompute_kind(priced) == recompute_kind(mine)
    moved = next(cuts.moves())
    assert next(iter(moved.spec.stages[0].recompute_options.values())).selective == (method == "selective")
