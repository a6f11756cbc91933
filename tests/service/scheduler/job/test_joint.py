"""The joint choice beside brute force on small models, and beside cuts that ignore the schedule on larger ones."""

import itertools
import random
from dataclasses import replace

import pytest

from service.scheduler.job import joint
from service.scheduler.job.cut import PipelineSetup, balanced_cut, equal_layers_cut
from service.scheduler.job.joint import JointSearchRequest, plan_jointly
from service.scheduler.job.partition import partition
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import MeshSpec, NetworkSpec, SpecError
from tests.tiers import some_by_day
from worker.contract.costs import LinearCost, UpdateCosts
from worker.contract.profile import LayerCost, LayerEdge, LayerProfile

# (stages, meshes) → in order; in rounds and as a V
PLACEMENTS = {(2, 2): [(0, 1)], (3, 3): [(0, 1, 2)], (4, 2): [(0, 1, 0, 1), (0, 1, 1, 0)]}


def measured(layers, seed, *, skips=(), microbatch=1.0, head=1.0):
    """A profile with costs as measured: log-normal, a heavy head if asked for, tensors of unequal size."""
    draw = random.Random(seed)
    cost = lambda scale: scale * microbatch * draw.lognormvariate(0.0, 0.4)  # noqa: E731
    made = tuple(
        LayerCost(
            f"l{i}",
            cost(0.01 * (head if i == layers - 1 else 1.0)),
            cost(0.01),
            cost(0.008),
            int(1000 * microbatch * draw.lognormvariate(0, 0.3)),
            0,
            0,
        )
        for i in range(layers)
    )
    pairs = [(i, i + 1) for i in range(layers - 1)] + list(skips)
    edges = tuple(
        LayerEdge(a, b, f"t{k}", int(1000 * microbatch * draw.lognormvariate(0, 0.5)), True, order=k)
        for k, (a, b) in enumerate(pairs)
    )
    return LayerProfile(layers=made, edges=edges, device_type="cpu", microbatch="[1]", parameter_sizes={})


def network(speed):
    return NetworkSpec(contention="link", bandwidth_bytes_per_s=speed, latency_s=1e-4)


def meshes(count, **limits):
    return [MeshSpec(name=f"m{i}", **limits) for i in range(count)]


def brute_force(profiles, stage_counts, mesh_list, net):
    """The shortest plan over every number of microbatches and stages, placement and cut."""
    best = float("inf")
    for count, profile in profiles.items():
        for stages in stage_counts:
            for placement in PLACEMENTS[stages, len(mesh_list)]:
                for borders in itertools.combinations(range(1, len(profile.layers)), stages - 1):
                    names = [f"l{i}" for i in (0, *borders)]
                    try:
                        result = partition(
                            profile,
                            PipelineSetup(mesh_list, net),
                            stages=stages,
                            cut=names,
                            microbatches=count,
                            placement=placement,
                        )
                        best = min(best, make_plan(result.spec, budget_s=0.4).makespan_s)
                    except SpecError:
                        continue
    return best


@some_by_day("seed", range(3), by_day=1)
@pytest.mark.parametrize("speed", [1e6, 1e5])
def test_on_a_small_model_nothing_is_shorter_than_what_is_chosen(seed, speed):
    profiles = {4: measured(5, seed), 2: measured(5, seed, microbatch=2.0)}
    found = plan_jointly(
        JointSearchRequest(profiles, PipelineSetup(meshes(2), network(speed)), stages=[2, 4]), budget_s=10.0
    )
    assert found.plan.makespan_s <= brute_force(profiles, [2, 4], meshes(2), network(speed)) * (1 + 1e-6)


def trained(profile, seed):
    """The same with parameters: two a layer, one of them huge in the last layer, the first layer's used there too."""
    draw = random.Random(seed)
    sizes = {f"p{i}": int(1e6 * draw.lognormvariate(0.0, 1.0)) for i in range(2 * len(profile.layers))}
    last = len(profile.layers) - 1
    sizes[f"p{2 * last}"] *= 20
    layers = tuple(
        replace(layer, parameters=(f"p{2 * i}", f"p{2 * i + 1}", *(("p0",) if i == last else ())))
        for i, layer in enumerate(profile.layers)
    )
    return replace(profile, layers=layers, parameter_sizes=sizes, frozen_parameters=("p3",))


def longest_update(profile, placement, borders, update, mesh_count, tied_s=lambda size: 0.0):
    """REDUCE and STEP of the mesh where they take longest, counted anew; `tied_s` is what it takes two meshes to sum the
    bytes of p0, which the first and the last layer have."""
    ends = [*borders, len(profile.layers)]
    found = []
    tied = tied_s(profile.parameter_sizes["p0"]) if placement[0] != placement[-1] else 0.0
    for mesh in range(mesh_count):
        names = set()
        for stage, (first, end) in enumerate(zip((0, *borders), ends, strict=True)):
            if placement[stage] == mesh:
                names |= {name for layer in profile.layers[first:end] for name in layer.parameters}
        names -= {"p3"}
        size = sum(profile.parameter_sizes[name] for name in names)
        found.append(
            sum(c.fixed_s + c.per_tensor_s * len(names) + c.per_byte_s * size for c in update)
            if names
            else 0.0
        )
        found[-1] += tied if "p0" in names else 0.0
    return max(found)


UPDATE = UpdateCosts(LinearCost(1e-4, 1e-5, 1e-9), LinearCost(2e-4, 2e-5, 3e-9))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_what_comes_behind_the_makespan_is_part_of_the_choice(seed):
    """Beside brute force over microbatches, stages, placement and cut; and where it matters the cut is another."""
    profiles = {n: trained(measured(5, seed, microbatch=4.0 / n), seed) for n in (4, 2)}
    best = float("inf")
    for count, profile in profiles.items():
        for stages in (2, 4):
            for placement in PLACEMENTS[stages, 2]:
                for borders in itertools.combinations(range(1, 5), stages - 1):
                    result = partition(
                        profile,
                        PipelineSetup(meshes(2), network(1e6)),
                        stages=stages,
                        cut=[f"l{i}" for i in (0, *borders)],
                        microbatches=count,
                        placement=placement,
                    )
                    behind = longest_update(profile, placement, borders, (UPDATE.reduce, UPDATE.step), 2)
                    best = min(best, make_plan(result.spec, budget_s=0.4).makespan_s + behind)
    request = JointSearchRequest(profiles, PipelineSetup(meshes(2), network(1e6)), stages=[2, 4])
    found = plan_jointly(replace(request, update=UPDATE), budget_s=10.0)
    assert found.step_s == pytest.approx(best, rel=1e-6)
    without = plan_jointly(request, budget_s=10.0)
    assert without.step_s == without.plan.makespan_s <= found.plan.makespan_s * (1 + 1e-9)


@pytest.mark.slow
def test_some_cut_is_another_because_of_what_comes_behind_the_makespan():
    differ = 0
    for seed in range(4):
        profiles = {4: trained(measured(5, seed), seed)}
        request = JointSearchRequest(profiles, PipelineSetup(meshes(2), network(1e6)), stages=[2, 4])
        with_update = plan_jointly(replace(request, update=UPDATE), budget_s=4.0).partition
        differ += with_update.spec != plan_jointly(request, budget_s=4.0).partition.spec
    assert differ > 0


@pytest.mark.slow
@pytest.mark.parametrize("limit", [4500, 7000])
def test_memory_limits_are_part_of_the_choice(limit):
    profiles = {4: measured(6, 7)}
    mesh_list = meshes(3, memory_bytes=limit)
    found = plan_jointly(
        JointSearchRequest(profiles, PipelineSetup(mesh_list, network(1e6)), stages=[3]), budget_s=10.0
    )
    assert max(mesh.peak_memory_bytes for mesh in found.plan.meshes) <= limit
    assert found.plan.makespan_s <= brute_force(profiles, [3], mesh_list, network(1e6)) * (1 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "profile",
    [measured(24, 1), measured(24, 2, head=6.0), measured(24, 3, skips=((2, 21), (5, 18), (8, 15)))],
    ids=["chain", "heavy head", "skips"],
)
@pytest.mark.parametrize("speed", [1e6, 1e5, 3e4])
def test_on_a_larger_model_the_choice_is_no_longer_than_even_balanced_or_formula_cuts(profile, speed):
    found = plan_jointly(
        JointSearchRequest({8: profile}, PipelineSetup(meshes(4), network(speed)), stages=[4]), budget_s=4.0
    )
    for begins in (equal_layers_cut(24, 4), balanced_cut(profile, 4), None):
        cut = "auto" if begins is None else [f"l{i}" for i in begins]
        other = partition(
            profile, PipelineSetup(meshes(4), network(speed)), stages=4, cut=cut, microbatches=8
        )
        assert found.plan.makespan_s <= make_plan(other.spec, budget_s=2.0).makespan_s * (1 + 1e-6)


def test_a_cut_by_hand_is_kept_and_its_placement_chosen():
    profile = measured(8, 5)
    found = plan_jointly(
        JointSearchRequest(
            {4: profile}, PipelineSetup(meshes(2), network(1e6)), stages=[4], cut=["l0", "l2", "l4", "l6"]
        ),
        budget_s=1.0,
    )
    assert found.partition.stage_starts == ["l0", "l2", "l4", "l6"]


def test_what_fits_nowhere_is_refused_with_the_way_out():
    with pytest.raises(SpecError, match="raise"):
        plan_jointly(
            JointSearchRequest(
                {4: measured(6, 1)}, PipelineSetup(meshes(2, memory_bytes=100), network(1e6)), stages=[2]
            ),
            budget_s=1.0,
        )
    with pytest.raises(SpecError, match="at least one stage a mesh"):
        plan_jointly(
            JointSearchRequest({4: measured(6, 1)}, PipelineSetup(meshes(3), network(1e6)), stages=[2]),
            budget_s=1.0,
        )


def test_a_search_past_its_deadline_estimates_no_more_cuts(monkeypatch):
    """All cuts of a small model are estimated one by one, for seconds: on a busy machine that was past every limit."""
    estimated = []
    whole = joint.estimated_makespan
    monkeypatch.setattr(joint, "estimated_makespan", lambda *spec: (estimated.append(spec), whole(*spec))[1])
    request = JointSearchRequest({4: measured(9, 3)}, PipelineSetup(meshes(4), network(1e6)), stages=[4])
    late = plan_jointly(request, budget_s=10.0, expired=lambda: True)
    assert len(estimated) <= 3 and late.plan.truncated
    in_time = plan_jointly(request, budget_s=10.0)
    assert len(estimated) > 50
    assert in_time.plan.makespan_s <= late.plan.makespan_s * (1 + 1e-9)
    assert late.plan.makespan_s <= 1.5 * in_time.plan.makespan_s, (
        "what is estimated first is a cut that makes sense"
    )
