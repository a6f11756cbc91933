"""The partition: optimal where brute force can tell, within limits, and in step with the worker's cut."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from service.scheduler.job.cut import PipelineSetup
from service.scheduler.job.joint import JointSearchRequest, plan_jointly
from service.scheduler.job.partition import partition, place_stages
from service.scheduler.job.plan_job import host_notes
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import MeshSpec, NetworkSpec, SpecError
from service.scheduler.problem.spec_checks import check_spec
from tests.tiers import some_by_day
from worker.benchmark.layer_costs import measure_layers
from worker.contract.profile import CutError, HostCost, LayerCost, LayerEdge, LayerProfile, OptimizerState
from worker.examples import gpt, unet
from worker.model.export import trace


def chain(costs, sizes=None, activations=None):
    """A profile of layers in a chain: (forward, backward input, backward weight) seconds, bytes between them."""
    sizes = sizes or [1] * (len(costs) - 1)
    activations = activations or [1] * len(costs)
    return LayerProfile(
        layers=tuple(
            LayerCost(f"l{i}", f, b, w, a, 0, 0)
            for i, ((f, b, w), a) in enumerate(zip(costs, activations, strict=True))
        ),
        edges=tuple(LayerEdge(i, i + 1, f"t{i}", size, True, order=i) for i, size in enumerate(sizes)),
        device_type="cpu",
        microbatch="[1]",
        parameter_sizes={},
    )


def meshes(count, limit=None):
    return [MeshSpec(name=f"m{i}", activation_limit_bytes=limit) for i in range(count)]


def test_stages_carry_the_bytes_that_they_always_hold():
    profile = chain([(1, 1, 1)] * 3)
    layers = [
        replace(layer, parameters=names, buffers=buffers)
        for layer, names, buffers in zip(
            profile.layers, [("a", "tied"), ("b", "frozen"), ("tied",)], [(), ("c",), ()], strict=True
        )
    ]
    profile = replace(
        profile,
        layers=tuple(layers),
        parameter_sizes={"a": 100, "b": 20, "tied": 3, "frozen": 1000},
        frozen_parameters=("frozen",),
        buffer_sizes={"c": 7},
    )
    state = OptimizerState(2.0, 4)

    def static_bytes(stages):
        found = partition(
            profile, PipelineSetup(meshes(stages), fast(), optimizer=state), stages=stages, microbatches=1
        )
        return [stage.static_bytes for stage in found.spec.stages]

    assert static_bytes(3) == [4 * 103 + 8, 4 * 20 + 4 + 1000 + 7, 4 * 3 + 4]
    assert static_bytes(1) == [4 * 123 + 12 + 1000 + 7]  # the tied one once
    found = partition(profile, PipelineSetup(meshes(1), fast()), stages=1, microbatches=1)
    assert found.spec.stages[0].static_bytes == 2 * 123 + 1000 + 7


def fast(**kwargs):
    return NetworkSpec(bandwidth_bytes_per_s=1.0, **kwargs)


def cuts(layers, stages):
    return ([0, *borders] for borders in itertools.combinations(range(1, layers), stages - 1))


def chain_estimate(profile, begins, microbatches, overlap, contention):
    """The documented objective, straight from its words, for a chain with one stage a mesh."""
    ends = [*begins[1:], len(profile.layers)]
    sizes = [edge.bytes for edge in profile.edges]
    busiest = 0.0
    for first, end in zip(begins, ends, strict=True):
        compute = sum(
            x.forward_s + x.backward_input_s + x.backward_weight_s for x in profile.layers[first:end]
        )
        before = sizes[first - 1] if first else 0
        after = sizes[end - 1] if end < len(profile.layers) else 0
        if not overlap:
            load = compute + 2 * (before + after)
        elif contention == "half-duplex":
            load = max(compute, 2 * (before + after))
        elif contention == "full-duplex":
            load = max(compute, before + after)
        else:
            load = max(compute, before, after)
        busiest = max(busiest, load)
    return (microbatches - 1) * busiest + sum(2 * sizes[begin - 1] for begin in begins[1:])


costs = st.integers(1, 20)


@settings(max_examples=150, deadline=None)
@given(
    layers=st.lists(st.tuples(costs, costs, costs), min_size=2, max_size=8),
    data=st.data(),
    microbatches=st.integers(1, 12),
    overlap=st.booleans(),
    contention=st.sampled_from(["none", "link", "full-duplex", "half-duplex"]),
)
def test_no_cut_of_a_chain_has_a_better_estimate(layers, data, microbatches, overlap, contention):
    sizes = data.draw(st.lists(st.integers(0, 60), min_size=len(layers) - 1, max_size=len(layers) - 1))
    stages = data.draw(st.integers(1, len(layers)))
    profile = chain(layers, sizes)
    result = partition(
        profile,
        PipelineSetup(meshes(stages), fast(contention=contention), overlap=overlap),
        stages=stages,
        microbatches=microbatches,
    )
    found = [int(name[1:]) for name in result.stage_starts]
    best = min(
        chain_estimate(profile, c, microbatches, overlap, contention) for c in cuts(len(layers), stages)
    )
    assert chain_estimate(profile, found, microbatches, overlap, contention) == pytest.approx(best)


def graph_estimate(profile, begins, microbatches):
    """The documented objective on full-duplex links with one stage a mesh, for tensors that several layers use:
    each goes once to every stage that needs it, and its gradient comes back once."""
    ends = [*begins[1:], len(profile.layers)]
    stage_of = [s for s, (a, b) in enumerate(zip(begins, ends, strict=True)) for _ in range(a, b)]
    crossings = {
        (edge.tensor, stage_of[edge.source], stage_of[edge.target]): edge.bytes
        for edge in profile.edges
        if stage_of[edge.source] != stage_of[edge.target]
    }
    busiest = 0.0
    for stage, (first, end) in enumerate(zip(begins, ends, strict=True)):
        compute = sum(
            x.forward_s + x.backward_input_s + x.backward_weight_s for x in profile.layers[first:end]
        )
        used = sum(size for (_, source, target), size in crossings.items() if stage in (source, target))
        busiest = max(busiest, compute, used)  # forward one way, as much gradient the other
    return (microbatches - 1) * busiest + 2 * sum(crossings.values())


@settings(max_examples=200, deadline=None)
@given(data=st.data(), layers=st.lists(costs, min_size=3, max_size=9), microbatches=st.integers(1, 8))
def test_no_cut_in_two_is_better_where_layers_share_tensors(data, layers, microbatches):
    profile = chain([(cost, 0, 0) for cost in layers])
    edges = []
    for source in range(len(layers) - 1):
        later = st.sets(st.integers(source + 1, len(layers) - 1), min_size=1)
        size = data.draw(st.integers(0, 30))
        for target in sorted({source + 1} | data.draw(later)):
            edges.append(LayerEdge(source, target, f"t{source}", size, True, order=source))
    profile = LayerProfile(profile.layers, tuple(edges), "cpu", "", {})
    result = partition(
        profile, PipelineSetup(meshes(2), fast(contention="full-duplex")), stages=2, microbatches=microbatches
    )
    found = graph_estimate(profile, [int(name[1:]) for name in result.stage_starts], microbatches)
    best = min(graph_estimate(profile, cut, microbatches) for cut in cuts(len(layers), 2))
    assert found == pytest.approx(best)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(data=st.data(), layers=st.lists(st.tuples(costs, costs, costs), min_size=4, max_size=7))
def test_the_planned_step_of_the_cut_is_near_the_best_of_all_cuts(data, layers):
    sizes = data.draw(st.lists(st.integers(0, 20), min_size=len(layers) - 1, max_size=len(layers) - 1))
    setup = PipelineSetup(meshes(3), fast(contention="full-duplex"), schedule="eager-1f1b")
    profile = chain(layers, sizes)

    def planned(cut):
        return make_plan(partition(profile, setup, stages=3, microbatches=6, cut=cut).spec).makespan_s

    best = min(planned([f"l{i}" for i in cut]) for cut in cuts(len(layers), 3))
    assert planned("auto") <= 1.25 * best


@settings(max_examples=100, deadline=None)
@given(data=st.data(), layers=st.lists(costs, min_size=3, max_size=8), limit=st.integers(1, 60))
def test_every_cut_keeps_the_limits_if_any_cut_can(data, layers, limit):
    stages = data.draw(st.integers(1, len(layers)))
    schedule = data.draw(st.sampled_from(["gpipe", "1f1b", "eager-1f1b", "zb-h1"]))
    microbatches = data.draw(st.integers(1, 6))
    profile = chain([(cost, cost, cost) for cost in layers], activations=layers)
    in_flight = {
        "gpipe": lambda s: microbatches,
        "1f1b": lambda s: min(microbatches, stages - s),
        "zb-h1": lambda s: min(microbatches, stages - s),
        "eager-1f1b": lambda s: min(microbatches, 2 * (stages - s) - 1),
    }[schedule]

    def fits(begins):
        ends = [*begins[1:], len(layers)]
        return all(
            sum(layers[a:b]) * in_flight(s) <= limit
            for s, (a, b) in enumerate(zip(begins, ends, strict=True))
        )

    possible = any(fits(cut) for cut in cuts(len(layers), stages))
    setup = PipelineSetup(meshes(stages, limit), fast(), schedule=schedule)
    if (
        not possible
        and min(
            max(sum(layers[a:b]) for a, b in itertools.pairwise([*cut, len(layers)]))
            for cut in cuts(len(layers), stages)
        )
        > limit
    ):
        with pytest.raises(SpecError, match="activation_limit_bytes"):
            partition(profile, setup, stages=stages, microbatches=microbatches)
        return
    result = partition(profile, setup, stages=stages, microbatches=microbatches)
    found = [int(name[1:]) for name in result.stage_starts]
    assert fits(found) == possible
    # a first stage that splits its backward keeps the gradient of its output, a byte, for W: no rule of cuts knows that
    kept = 1 if schedule == "zb-h1" and stages > 1 else 0
    if sum(layers[: [*found[1:], len(layers)][0]]) + kept <= limit:
        check_spec(result.spec)


def test_a_tensor_saved_by_two_layers_of_a_stage_is_counted_once():
    profile = chain([(1, 1, 1)] * 3, sizes=[10, 10], activations=[30, 20, 20])
    edges = tuple(
        LayerEdge(
            e.source, e.target, e.tensor, e.bytes, True, e.order, saved_by_source=True, saved_by_target=True
        )
        for e in profile.edges
    )
    profile = LayerProfile(profile.layers, edges, "cpu", "", {})
    whole = partition(profile, PipelineSetup(meshes(1), fast()), stages=1, microbatches=1)
    assert [stage.activation_bytes for stage in whole.spec.stages] == [30 + 20 + 20 - 10 - 10]
    setup = PipelineSetup(meshes(3), fast(), split_backward=False)
    parts = partition(profile, setup, stages=3, microbatches=1)
    assert [stage.activation_bytes for stage in parts.spec.stages] == [30, 20, 20]


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.left = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.wide = nn.Linear(8, 16)
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        mask = x > 0
        x = self.stem(x)
        a, b = self.wide(x).chunk(2, -1)
        left, right = b, a
        for layer in self.left:
            left = layer(left) + x
        for layer in self.right:
            right = torch.where(mask, layer(right), left)
        return self.head(left + right + a)


def _built():
    text = (torch.randint(0, 32, (2, 8)), torch.randint(0, 32, (2, 8)))
    image = torch.randn(2, 1, 8, 8)
    return {
        "gpt": (gpt.build(4, 16, 2, vocab=32, length=8), text, nn.functional.cross_entropy),
        "tied gpt": (gpt.build(4, 16, 2, vocab=32, length=8, tied=True), text, nn.functional.cross_entropy),
        "unet": (unet.build(width=4), (image, image), nn.functional.mse_loss),
        "branches": (Branches(), (torch.randn(4, 8), torch.randn(4, 8)), nn.functional.mse_loss),
    }


@pytest.fixture(scope="module")
def measured():
    models = {}
    for name, (model, (inputs, target), loss) in _built().items():
        traced = trace(model, (inputs,))
        profile = measure_layers(traced, loss, target, repeats=2)
        models[name] = traced, LayerProfile.from_json(json.loads(json.dumps(profile.to_json())))
    return models


@some_by_day("name", ["unet", "tied gpt", "gpt", "branches"], by_day=1)
def test_edges_agree_with_the_workers_cut_one_by_one(measured, name):
    traced, profile = measured[name]
    for stages, count in [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (6, 3), (5, 2), (len(traced.layers), 4)]:
        for cut in (
            "auto",
            traced.layers[:stages],
            traced.layers[:1] + traced.layers[len(traced.layers) - stages + 1 :],
        ):
            result = partition(
                profile,
                PipelineSetup(meshes(count), fast(latency_s=0.5)),
                stages=stages,
                cut=cut,
                microbatches=4,
            )
            graph = traced.cut(result.stage_starts)
            assert [stage.name for stage in result.spec.stages] == [f"s{i}" for i in range(len(graph.stages))]
            planned = [(e.source, e.target, e.tensor, e.forward_bytes) for e in result.spec.edges]
            assert planned == [(f"s{e.source}", f"s{e.target}", e.tensor, e.bytes) for e in graph.edges]
            returned = [e.backward_bytes for e in result.spec.edges]
            assert returned == [e.bytes if e.differentiable else None for e in graph.edges]
            check_spec(result.spec)


def test_a_measured_cut_can_be_planned_and_verified(measured):
    for name in ("gpt", "unet"):
        spec = partition(
            measured[name][1],
            PipelineSetup(
                meshes(4),
                NetworkSpec(bandwidth_bytes_per_s=1e9, latency_s=1e-5, contention="full-duplex"),
                schedule="eager-1f1b",
            ),
            stages=4,
            microbatches=8,
        ).spec
        assert make_plan(spec).makespan_s > 0


def test_two_stages_a_mesh_lie_in_a_v_for_zb_v_and_auto_and_in_rounds_otherwise():
    assert place_stages(6, 3, "zb-v") == [0, 1, 2, 2, 1, 0]
    assert place_stages(6, 3, "auto") == [0, 1, 2, 2, 1, 0]
    assert place_stages(6, 3, "interleaved-1f1b") == [0, 1, 2, 0, 1, 2]
    assert place_stages(9, 3, "auto") == [0, 1, 2] * 3
    assert place_stages(4, 4, "auto") == [0, 1, 2, 3]
    with pytest.raises(SpecError, match="2 stages cannot fill 4 meshes"):
        place_stages(2, 4, "auto")


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved-1f1b", "auto"])
def test_several_stages_a_mesh_are_balanced_by_mesh(schedule):
    profile = chain([(1, 1, 1)] * 12)
    spec = partition(
        profile,
        PipelineSetup(meshes(3), NetworkSpec(bandwidth_bytes_per_s=1e3), schedule=schedule),
        stages=6,
        microbatches=6,
    ).spec
    load = {
        mesh.name: sum(stage.forward_s for stage in spec.stages if stage.mesh == mesh.name)
        for mesh in spec.meshes
    }
    assert load == {"m0": 4, "m1": 4, "m2": 4}
    assert make_plan(spec, budget_s=0.5).makespan_s >= 6 * 4 * 3


def test_too_many_stages_and_bad_names_are_refused():
    profile = chain([(1, 1, 1)] * 3)
    with pytest.raises(CutError, match=r"4 stages asked for.*only 3 modules.*l0, l1, l2"):
        partition(profile, PipelineSetup(meshes(4), fast()), stages=4, microbatches=2)
    with pytest.raises(CutError, match="'l7' is no module"):
        partition(profile, PipelineSetup(meshes(2), fast()), stages=2, microbatches=2, cut=["l0", "l7"])
    with pytest.raises(SpecError, match=r"cut begins 2 stages .* but stages is 3"):
        partition(profile, PipelineSetup(meshes(3), fast()), stages=3, microbatches=2, cut=["l0", "l2"])


def test_a_stage_that_receives_nothing_to_differentiate_has_its_whole_backward_in_w():
    """The engine asks the first stage for no gradients of inputs: I has nothing to run, W everything."""
    costs = [(1, 0, 2), (1, 2, 3), (1, 4, 5)]
    profile = chain(costs)
    layers = [replace(layer, backward_s=s) for layer, s in zip(profile.layers, (2.0, 4.5, 8.0), strict=True)]
    found = partition(
        replace(profile, layers=tuple(layers)),
        PipelineSetup(meshes(2), fast()),
        stages=2,
        cut=["l0", "l2"],
        microbatches=2,
    )
    first, second = found.spec.stages
    assert (first.backward_input_s, first.backward_weight_s, first.backward_s) == (0.0, 6.5, 6.5)
    assert (second.backward_input_s, second.backward_weight_s, second.backward_s) == (4, 5, 8.0)
    assert first.weight_stash_bytes == first.activation_bytes  # and nothing is given back before


def test_every_action_of_every_stage_takes_what_the_engine_takes_besides_its_layers():
    profile = chain([(1, 2, 3), (1, 2, 3), (1, 4, 5)])
    plain, slower = (
        partition(
            profile, PipelineSetup(meshes(2), fast(), action_s=s), stages=2, cut=["l0", "l2"], microbatches=2
        ).spec.stages
        for s in (0.0, 0.25)
    )
    times = ("forward_s", "backward_input_s", "backward_weight_s", "backward_s")
    more = [[getattr(b, t) - getattr(a, t) for t in times] for a, b in zip(plain, slower, strict=True)]
    assert more == [[0.25, 0.0, 0.25, 0.25], [0.25] * 4]  # the first stage has no I


def with_hosts(profile, hosts):
    """The profile of a GPU, whose host takes these seconds for (forward, backward input, backward weight, backward)."""
    layers = [
        replace(layer, host=HostCost(*seconds)) for layer, seconds in zip(profile.layers, hosts, strict=True)
    ]
    return replace(profile, layers=tuple(layers), device_type="cuda")


def test_an_action_takes_as_long_as_the_device_or_the_host_whichever_is_slower():
    """The host is ahead within a stage: a layer that it feeds late is made up for by one that the device takes long for."""
    profile = with_hosts(
        chain([(1, 2, 3), (7, 2, 3), (1, 4, 5)]), [(3, 1, 1, 1.5), (2, 1, 1, 1.5), (4, 4.5, 2, 9.5)]
    )
    found = partition(
        profile,
        PipelineSetup(meshes(2), fast(), action_s=0.25),
        stages=2,
        cut=["l0", "l2"],
        microbatches=2,
    )
    first, second = found.spec.stages
    assert first.forward_s == 8, "of the device; the host takes 5.25"
    assert (first.backward_s, second.backward_weight_s) == (10, 5)
    assert (second.forward_s, second.backward_input_s, second.backward_s) == (4.25, 4.75, 9.75)
    (note,) = host_notes(profile, found, 0.25)
    assert "the limit of 1 of 2 stages, most of s1, " in note and " in 1.40 times the time" in note
    assert host_notes(with_hosts(chain([(1, 2, 3)]), [(1, 2, 3, 4)]), one_stage(), 0.0) == ()
    assert host_notes(chain([(1, 2, 3)]), one_stage(), 9.0) == (), "a processor does both"


def one_stage():
    return partition(
        chain([(1, 2, 3)]), PipelineSetup(meshes(1), fast()), stages=1, cut=["l0"], microbatches=2
    )


def test_a_cut_balances_what_the_host_enqueues_where_that_is_the_limit():
    """Of four layers alike on the device the first takes the host three times as long as the others."""
    profile = with_hosts(chain([(1, 1, 1)] * 4), [(9, 9, 9, 18), *[(3, 3, 3, 6)] * 3])
    found = partition(profile, PipelineSetup(meshes(2), fast()), stages=2, cut="auto", microbatches=4)
    assert found.stage_starts == ["l0", "l1"]


def test_what_is_kept_for_w_counts_the_gradients_beside_the_weights_inputs():
    """A layer's stash, and received tensors that are saved; of the first stage all, and what comes back to it."""
    profile = chain([(1, 1, 1)] * 3, sizes=[10, 20], activations=[30, 50, 40])
    layers = [
        replace(layer, weight_stash_bytes=x) for layer, x in zip(profile.layers, (7, 55, 8), strict=True)
    ]
    edges = [replace(edge, saved_by_target=True) for edge in profile.edges]
    profile = replace(profile, layers=tuple(layers), edges=tuple(edges))

    def stages(schedule):
        setup = PipelineSetup(meshes(3), fast(), schedule=schedule)
        spec = partition(profile, setup, stages=3, microbatches=1).spec
        return [(stage.activation_bytes, stage.weight_stash_bytes) for stage in spec.stages]

    assert stages("zb-h1") == [(40, 40), (65, 65), (40, 28)]
    assert stages("1f1b") == [(30, 30), (50, 50), (40, 28)]  # nothing is kept for W: as the forward leaves it


def test_a_side_input_that_is_differentiable_keeps_the_first_part():
    profile = chain([(1, 1, 2), (1, 2, 3)])
    edges = (replace(profile.edges[0], differentiable=False), replace(profile.edges[0], tensor="u", order=1))
    found = partition(
        replace(profile, edges=edges), PipelineSetup(meshes(2), fast()), stages=2, microbatches=1
    )
    assert found.spec.stages[1].backward_input_s == 2


def test_without_a_bandwidth_transfers_take_their_latency():
    profile = chain([(1, 1, 1)] * 2)
    spec = partition(
        profile,
        PipelineSetup(meshes(2), NetworkSpec(latency_s=0.25), schedule="gpipe"),
        stages=2,
        microbatches=2,
    ).spec
    assert [(edge.forward_s, edge.backward_s) for edge in spec.edges] == [(0.25, 0.25)]
    check_spec(spec)


def test_a_long_profile_is_cut():
    profile = chain([(1 + i % 3, 2, 1) for i in range(150)], sizes=[1 + i % 5 for i in range(149)])
    result = partition(profile, PipelineSetup(meshes(16), fast()), stages=16, microbatches=32)
    assert len(result.stage_starts) == 16


def recomputed_profile():
    """Four layers; l0's tensor is saved by l2 too, l1's by nobody, and l3 updates a buffer."""
    profile = chain([(1.0, 2.0, 3.0)] * 4, sizes=[10, 20, 30], activations=[100, 200, 300, 400])
    edges = (
        replace(profile.edges[0], saved_by_target=True),
        LayerEdge(0, 2, "t0", 10, True, order=0, saved_by_target=True),
        *profile.edges[1:],
    )
    layers = (*profile.layers[:3], replace(profile.layers[3], buffers=("mean", "mask")))
    return replace(
        profile,
        layers=layers,
        edges=edges,
        buffer_sizes={"mean": 4, "mask": 1000},
        updated_buffers=frozenset({"mean"}),
    )


def options(recompute, profile=None, **changes):
    found = partition(
        profile or recomputed_profile(),
        PipelineSetup(meshes(2), recompute=recompute, split_backward=False),
        stages=2,
        cut=["l0", "l2"],
        microbatches=2,
        **changes,
    )
    return [stage.recompute for stage in found.spec.stages]


def test_a_recomputed_stage_keeps_the_tensors_it_takes_and_the_buffers_it_updates():
    first, second = options("all")
    assert (first.activation_bytes, first.rematerialised_bytes, first.extra_s) == (0, 300, 2.0)
    # t0 and t1 come in; autograd keeps t0 of them, which is there already; the buffer is noted, and twice for B
    assert (second.activation_bytes, second.rematerialised_bytes) == (34, 690 + 8)
    assert first.required and second.required
    assert options("none") == [None, None]
    assert [option.required for option in options("auto")] == [False, False]


@pytest.mark.parametrize(("names", "asked"), [(["s1"], [1]), (["l0"], [0]), (["l1", "l3"], [0, 1])])
def test_names_of_stages_and_modules_say_what_recomputes(names, asked):
    assert [i for i, option in enumerate(options(names)) if option is not None] == asked
    assert all(option is None or option.required for option in options(names))


def test_an_unknown_name_is_refused_with_those_that_are_near():
    with pytest.raises(CutError, match=r"recompute name 'l9' is no stage \(s0 to s1\) and no module .*l3"):
        options(["s0", "l9"])


def test_layers_that_the_model_itself_checkpoints_recompute_unless_the_job_says_none():
    profile = replace(recomputed_profile(), checkpointed=frozenset({"l3"}))
    first, second = options("auto", profile)
    assert not first.required and second.required
    assert [option is not None for option in options(["s0"], profile)] == [True, True]
    assert options("none", profile) == [None, None]


def test_a_stage_that_would_keep_no_less_is_no_choice():
    profile = chain([(1.0, 2.0, 3.0)] * 4, sizes=[10, 700, 30], activations=[100, 200, 300, 400])
    assert [option is not None for option in options("auto", profile)] == [True, False]


def selective_profile():
    """The four layers, whose products are measured: l3 keeps nothing of its own."""
    profile = recomputed_profile()
    products = [(0.25, 40, 10), (0.5, 100, 0), (0.125, 50, 20), (0.0625, 0, 0)]
    layers = (
        replace(layer, selective_s=seconds, selective_bytes=size, selective_only_bytes=only)
        for layer, (seconds, size, only) in zip(profile.layers, products, strict=True)
    )
    return replace(profile, layers=tuple(layers))


def test_a_selective_stage_keeps_its_products_besides_and_brings_back_the_rest():
    first, second = options("selective", selective_profile())
    assert first.required and first.selective
    assert (first.activation_bytes, first.extra_s) == (140, 0.75)
    assert first.rematerialised_bytes == 300 - 130  # autograd keeps 130 of these products anyway
    assert (second.activation_bytes, second.extra_s) == (34 + 50, 0.1875)
    assert second.rematerialised_bytes == 690 - 30 + 8


def test_a_stage_that_recomputes_by_block_keeps_what_its_layers_give_each_other_and_brings_back_one_at_a_time():
    first, second = options("by_block")
    assert first.required and first.by_block
    # t0; l1 keeps it among its 200 bytes, and brings back the rest; behind it t0 is gone
    assert (first.activation_bytes, first.rematerialised_bytes, first.extra_s) == (10, 190, 2.0)
    # t0 and t1 come in, t2 is given on, the buffer is noted; l3 has all of its 400 bytes, l2 t0 already
    assert (second.activation_bytes, second.rematerialised_bytes) == (34 + 30, 400 + 8)


def test_by_block_w_waits_with_what_it_needs_of_the_layers_behind_where_backwards_are_split():
    profile = recomputed_profile()
    layers = tuple(replace(layer, weight_stash_bytes=80) for layer in profile.layers)
    found = partition(
        replace(profile, layers=layers),
        PipelineSetup(meshes(2), recompute="by_block", split_backward=True),
        stages=2,
        cut=["l0", "l2"],
        microbatches=2,
    )
    # l1 as above; behind it l0 has its 100 bytes, beside the 80 of l1 and without t0
    assert found.spec.stages[0].recompute.rematerialised_bytes == max(190, 100 + 80 - 10)
    assert found.spec.stages[1].recompute.rematerialised_bytes == max(400, 290 + 80 - 30) + 8


def test_auto_may_choose_any_method_and_all_and_names_say_the_whole_one():
    stages = partition(
        selective_profile(), PipelineSetup(meshes(2), recompute="auto"), stages=2, microbatches=2
    ).spec.stages
    for stage in stages:
        assert list(stage.recompute_options) == ["whole", "selective", "by_block"]
    for recompute in ("all", ["s0", "s1"]):
        for option in options(recompute, selective_profile()):
            assert not option.selective and not option.by_block


def test_by_block_is_no_choice_where_it_brings_back_as_much_or_a_layer_is_compiled():
    def offered(profile):
        setup = PipelineSetup(meshes(2), recompute="auto", split_backward=False)
        stages = partition(profile, setup, stages=2, cut=["l0", "l2"], microbatches=2).spec.stages
        return [stage.recompute_by_block is not None for stage in stages]

    profile = recomputed_profile()
    assert offered(profile) == [True, True]
    assert offered(replace(profile, compiled=frozenset({"l2"}))) == [True, False]
    # l1 makes nearly all that the stage keeps, without t0, which is more than the rest
    layers = (replace(profile.layers[0], activation_bytes=5), *profile.layers[1:])
    edges = (replace(profile.edges[0], saved_by_target=False), *profile.edges[1:])
    assert offered(replace(profile, layers=layers, edges=edges)) == [False, True]


def test_a_stage_with_a_layer_that_does_not_run_so_recomputes_wholly_and_one_that_would_keep_no_less_not_at_all():
    profile = selective_profile()
    layers = list(profile.layers)
    layers[1] = replace(layers[1], selective_s=None)
    layers[2] = replace(layers[2], selective_bytes=700)
    first, second = options("selective", replace(profile, layers=tuple(layers)))
    assert first.required and not first.selective and first.extra_s == 2.0
    assert second is None
    layers[2] = replace(layers[2], selective_bytes=50, selective_s=2.5)
    stages = partition(
        replace(profile, layers=tuple(layers)),
        PipelineSetup(meshes(2), recompute="auto"),
        stages=2,
        cut=["l0", "l2"],
        microbatches=2,
    ).spec.stages
    assert [stage.recompute_selectively for stage in stages] == [None, None]  # slower than the whole forward


def test_the_spec_of_a_plan_has_the_way_that_was_chosen():
    profile = replace(
        selective_profile(),
        layers=tuple(replace(layer, selective_s=0.01) for layer in selective_profile().layers),
    )
    for limit, selective in ((1500, True), (500, False)):
        planned = plan_jointly(
            JointSearchRequest(
                {8: profile},
                PipelineSetup(
                    [MeshSpec(name="m0", memory_bytes=limit), MeshSpec(name="m1")],
                    fast(),
                    schedule="gpipe",
                    recompute="auto",
                ),
                stages=[2],
                cut=["l0", "l2"],
            ),
            budget_s=0.5,
        )
        stages = planned.partition.spec.stages
        assert [stage.recompute_selectively for stage in stages] == [None, None]
        first = planned.plan.stages[0]
        assert first.recomputed and first.selective is stages[0].recompute.selective is selective


def test_a_job_recomputes_what_its_memory_asks_for_and_nothing_without_a_limit():
    profile = recomputed_profile()

    def plan(limits, schedule):
        return plan_jointly(
            JointSearchRequest(
                {8: profile},
                PipelineSetup(
                    [MeshSpec(name=f"m{i}", memory_bytes=limit) for i, limit in enumerate(limits)],
                    fast(),
                    schedule=schedule,
                    recompute="auto",
                ),
                stages=[2],
                cut=["l0", "l2"],
            ),
            budget_s=0.5,
        ).plan

    for schedule in ("auto", "gpipe"):
        assert not any(stage.recomputed for stage in plan((None, None), schedule).stages)
        assert any(stage.recomputed for stage in plan((500, 2300), schedule).stages)
