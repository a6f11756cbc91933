"""A cut model computes what the unsplit model computes, on every cut."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from service.scheduler.job.cut import PipelineSetup
from service.scheduler.job.joint import JointSearchRequest, plan_jointly
from service.scheduler.job.partition import partition
from service.scheduler.problem.spec import MeshSpec
from tests.tiers import some_by_day
from tests.worker.cuts import cut_evenly
from tests.worker.model.odd_models import ODD_MODELS, make
from tests.worker.model.running import buffers, gradients, plain_step, step
from worker.benchmark.layer_costs import measure_layers
from worker.contract.profile import CutError, LayerProfile
from worker.examples import gpt, unet
from worker.model.export import trace

BUILT_IN = {
    "gpt": lambda: (gpt.build(3, 16, 2, vocab=32, length=8), (torch.randint(0, 32, (2, 8)),)),
    "tied gpt": lambda: (gpt.build(3, 16, 2, vocab=32, length=8, tied=True), (torch.randint(0, 32, (2, 8)),)),
    "gpt with dropout": lambda: (
        gpt.build(3, 16, 2, vocab=32, length=8, dropout=0.2),
        (torch.randint(0, 32, (2, 8)),),
    ),
    "unet": lambda: (unet.build(width=4), (torch.randn(2, 1, 8, 8, dtype=torch.float64),)),
}


def build(name):
    if name in ODD_MODELS:
        return make(name)
    torch.manual_seed(0)
    model, inputs = BUILT_IN[name]()
    return model.double(), inputs


def assert_same(name, begins, traced):
    """Stage by stage, with weights copied at the cut, equals one plain step of the unsplit model."""
    model, inputs = build(name)
    graph = traced.cut(begins)
    expected = plain_step(model, inputs, seed=5)
    torch.testing.assert_close(step(graph, inputs, seed=5), expected, rtol=1e-10, atol=1e-12)
    reference = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    found = gradients(graph)
    assert found.keys() == reference.keys()
    for key in reference:
        torch.testing.assert_close(
            found[key], reference[key], rtol=1e-9, atol=1e-11, msg=lambda m, k=key: f"{k}: {m}"
        )
    state = dict(model.named_buffers())
    for key, value in buffers(graph).items():
        torch.testing.assert_close(value, state[key], rtol=1e-10, atol=1e-12)


@some_by_day("name", [*ODD_MODELS, *BUILT_IN], by_day=8)
def test_every_cut_in_two_and_the_finest_cut_give_the_plain_results(name):
    model, inputs = build(name)
    traced = trace(model, inputs)
    for layer in traced.layers[1:]:
        assert_same(name, [traced.layers[0], layer], traced)
    assert_same(name, traced.layers, traced)
    assert_same(name, traced.layers[:1], traced)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_cut_gives_the_plain_results(data):
    name = data.draw(st.sampled_from([*ODD_MODELS, *BUILT_IN]))
    traced = _traced(name)
    begins = data.draw(st.lists(st.sampled_from(traced.layers), unique=True))
    assert_same(name, sorted(begins, key=traced.layers.index), traced)


class Drawn(nn.Module):
    """A drawn graph: module i takes the sum or the join of earlier values, some changed in place."""

    def __init__(self, plan):
        super().__init__()
        self.plan = plan
        self.layers = nn.ModuleList(
            nn.Linear(4 * len(sources) if how == "join" else 4, 4) for how, sources, _ in plan
        )

    def forward(self, x):
        values = [x]
        for layer, (how, sources, change) in zip(self.layers, self.plan, strict=True):
            taken = [values[source] for source in sources]
            value = layer(torch.cat(taken, dim=-1) if how == "join" else sum(taken))
            values.append(value)
            target = values[change % len(values)].view(-1) if change is not None else None
            if target is not None and target.grad_fn is not None:
                target[:3] += 1.0
        used = {source for _, sources, _ in self.plan for source in sources}
        return sum(value for i, value in enumerate(values) if i and i not in used) + values[-1]


@st.composite
def drawn_plans(draw):
    count = draw(st.integers(2, 6))
    plan = []
    for layer in range(count):
        sources = draw(st.lists(st.integers(0, layer), min_size=1, max_size=3, unique=True))
        plan.append((draw(st.sampled_from(["sum", "join"])), sources, draw(st.none() | st.integers(0, 10))))
    return plan


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(plan=drawn_plans(), data=st.data())
def test_any_drawn_graph_cut_anywhere_gives_the_plain_results(plan, data):
    torch.manual_seed(0)
    model, inputs = Drawn(plan).double(), (torch.randn(2, 4, dtype=torch.float64),)
    try:
        expected = plain_step(copy.deepcopy(model), inputs)
    except RuntimeError as error:  # autograd itself forbids the change: the plan is no model
        assert "modified by an inplace operation" in str(error)
        return
    traced = trace(model, inputs)
    begins = data.draw(st.lists(st.sampled_from(traced.layers), unique=True))
    graph = traced.cut(sorted(begins, key=traced.layers.index))
    torch.testing.assert_close(step(graph, inputs), expected)
    plain_step(model, inputs)
    reference = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    found = gradients(graph)
    for key, value in found.items():
        torch.testing.assert_close(value, reference[key])
    assert all(not reference[key].any() for key in reference.keys() - found.keys())


_known = {}


def _traced(name):
    if name not in _known:
        _known[name] = trace(*build(name))
    return _known[name]


def test_tracing_changes_neither_the_model_nor_the_random_state():
    model, inputs = build("batch norm and dropout")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(1)
    traced = trace(model, inputs)
    traced.cut(traced.layers)
    assert torch.initial_seed() == 1
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())


def test_stages_start_with_the_models_weights_and_share_no_memory_with_it():
    model, inputs = build("gpt")
    traced = trace(model, inputs)
    graph = traced.cut(["embed", "blocks.1", "head"])
    names = [name for stage in graph.stages for name in stage.original_names.values()]
    assert sorted(names) == sorted(model.state_dict())
    for stage in graph.stages:
        for local, name in stage.original_names.items():
            assert torch.equal(stage.state_dict()[local], model.state_dict()[name])
            assert stage.get_parameter(local).data_ptr() != model.get_parameter(name).data_ptr()


def test_layers_of_the_built_in_models_are_their_blocks():
    assert _traced("gpt").layers == ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    assert _traced("unet").layers == [
        *("stem", "down.0", "shrink.0", "down.1", "shrink.1", "middle"),
        *("grow.0", "up.0", "grow.1", "up.1", "head"),
    ]


def test_a_module_called_again_may_begin_a_stage_each_time():
    traced = _traced("called again")
    assert traced.layers == ["block", "act", "block@1", "act@1", "block@2", "act@2"]
    graph = traced.cut(["block", "block@1", "block@2"])
    assert graph.tied == {"block.weight": (0, 1, 2), "block.bias": (0, 1, 2)}


def test_the_unets_skips_go_straight_from_where_they_are_made_to_where_they_are_joined():
    graph = _traced("unet").cut(["stem", "down.1", "grow.0", "grow.1"])
    # stage 0: stem, down.0, shrink.0; 1: down.1, shrink.1, middle; 2: grow.0, up.0; 3: grow.1, up.1, head
    shapes = [(edge.source, edge.target, edge.shape[1:]) for edge in graph.edges]
    assert shapes == [
        (0, 1, (8, 4, 4)),  # shrink.0
        (0, 3, (4, 8, 8)),  # down.0 skips two stages
        (1, 2, (8, 4, 4)),  # down.1 skips
        (1, 2, (16, 2, 2)),  # middle
        (2, 3, (8, 4, 4)),  # up.0
    ]
    assert [stage.inputs[0] for stage in graph.stages if "input:0" in stage.inputs] == ["input:0", "input:0"]
    assert graph.stages[3].inputs[0] == "input:0"  # the noisy image is added at the end
    made = {name: i for i, stage in enumerate(graph.stages) for name in stage.outputs}
    assert all(made[edge.tensor] == edge.source for edge in graph.edges)
    assert len({name for stage in graph.stages for name in stage.outputs}) == sum(
        len(stage.outputs) for stage in graph.stages
    )


def test_a_join_runs_in_the_stage_of_its_consumer():
    graph = _traced("two branches").cut(["stem", "left.0", "right.0", "join"])
    pairs = [(edge.source, edge.target) for edge in graph.edges]
    # x + left runs with right.0, the concatenation with join: both get the parts, not the sum
    assert pairs == [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)]
    by_pair = {(edge.source, edge.target): edge.tensor for edge in graph.edges}
    assert by_pair[0, 1] == by_pair[0, 2]
    assert by_pair[1, 2] == by_pair[1, 3]


def test_a_tied_weight_is_one_parameter_by_name():
    graph = _traced("tied gpt").cut(["embed", "blocks.1", "head"])
    assert graph.tied == {"embed.token.weight": (0, 2)}
    direct = _traced("weight used directly")
    graph = direct.cut(direct.layers)
    assert graph.tied == {"embed.weight": (0, 3), "scale": (1, 2, 3)}
    assert cut_evenly(_traced("gpt"), 3).tied == {}


def test_constants_are_recomputed_and_never_travel():
    traced = _traced("constants")
    graph = traced.cut(traced.layers)
    # only activations: the scale is computed where it is first used, so the first module's output goes there
    activations = [(edge.source, edge.target) for edge in graph.edges if edge.shape == (4, 6)]
    assert activations == [(0, 1), (0, 2), (1, 2), (2, 3)]
    scales = [(edge.source, edge.target, edge.differentiable) for edge in graph.edges if edge.shape == ()]
    assert scales == [(2, 3, False)]
    assert len(graph.edges) == 5
    persistent = {name for stage in graph.stages for name in stage.original_names.values()}
    assert "offset" in persistent
    assert "table" not in persistent


def test_gradients_travel_only_where_a_parameter_needs_them():
    traced = _traced("partly frozen")
    graph = traced.cut(traced.layers)
    assert [edge.differentiable for edge in graph.edges] == [False, False, True]
    traced = _traced("two inputs")
    masks = [edge for edge in traced.cut(traced.layers).edges if edge.dtype == torch.bool]
    assert masks
    assert not any(edge.differentiable for edge in masks)


def test_edges_are_in_order_of_source_target_and_production():
    for name in ("chunks", "two branches", "changes in place", "unet"):
        traced = _traced(name)
        graph = traced.cut(traced.layers)
        production = {
            tensor: i for i, tensor in enumerate(traced.builder(range(len(traced.layers))).tensors())
        }
        keys = [(edge.source, edge.target, production[edge.tensor]) for edge in graph.edges]
        assert keys == sorted(keys)
        assert len(set(keys)) == len(keys)


def test_only_the_stages_asked_for_are_built():
    traced = _traced("tied gpt")
    whole, part = cut_evenly(traced, 3), traced.builder({0, 2, 4}).graph(keep=[1])
    assert [stage is None for stage in part.stages] == [True, False, True]
    assert part.edges == whole.edges
    assert part.tied == whole.tied


def test_a_microbatch_of_another_shape_is_refused_by_name():
    graph = cut_evenly(_traced("gpt"), 2)
    with pytest.raises(ValueError, match=r"stage 0 got 'input:0' of shape \(3, 8\).*traced with \(2, 8\)"):
        graph.stages[0](torch.zeros(3, 8, dtype=torch.int64))


@pytest.mark.parametrize("stages", [7, 100, 0])
def test_more_stages_than_layers_are_refused_with_the_number_and_the_names(stages):
    with pytest.raises(CutError, match=f"{stages} stages asked for") as caught:
        cut_evenly(_traced("gpt"), stages)
    if stages > 0:
        assert "only 6 modules" in str(caught.value)
        assert "blocks.0" in str(caught.value)
        assert "at most 6 stages" in str(caught.value)


def test_bad_names_of_a_cut_are_refused_with_what_would_fit():
    traced = _traced("gpt")
    with pytest.raises(CutError, match=r"'blocks.3' is no module that may begin a stage.*blocks.2"):
        traced.cut(["embed", "blocks.3"])
    with pytest.raises(CutError, match=r"'blocks\.0' comes after 'blocks\.1', but the model runs it earlier"):
        traced.cut(["embed", "blocks.1", "blocks.0"])
    with pytest.raises(CutError, match="begin the same stage"):
        traced.cut(["embed", "blocks.1", "blocks.1"])


def test_a_name_may_be_a_module_around_layers_and_the_first_layer_may_be_left_out():
    traced = _traced("two branches")
    by_name = traced.cut(["right"])
    assert by_name.edges == traced.cut(["stem", "right.0"]).edges
    assert len(by_name.stages) == 2


def test_modules_that_share_running_statistics_stay_in_one_stage():
    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (torch.nn.Linear(4, 4) for _ in range(4))
            self.norm = torch.nn.BatchNorm1d(4)

        def forward(self, x):
            return self.d(self.c(self.norm(self.b(self.norm(self.a(x))))))

    model = Shared()
    traced = trace(model, (torch.randn(3, 4),))
    assert traced.layers == ["a", "norm", "c", "d"]
    with pytest.raises(
        CutError, match=r"'b' cannot begin a stage: .* last use of buffer 'norm\.(num|running)"
    ):
        traced.cut(["a", "b"])


class WrittenLate(torch.nn.Module):
    """The first layer reads a buffer that is written behind the last."""

    def __init__(self):
        super().__init__()
        self.l = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("memory", torch.zeros(4))

    def forward(self, x):
        x = x + self.memory
        for layer in self.l:
            x = layer(x)
        self.memory.copy_(x.detach().mean(0))
        return x


def test_a_buffer_that_ties_all_modules_is_named_where_the_stages_are_too_many():
    inputs = torch.randn(3, 4)
    traced = trace(WrittenLate(), (inputs,))
    profile = measure_layers(traced, torch.nn.functional.mse_loss, inputs)
    assert LayerProfile.from_json(profile.to_json()).joined == dict.fromkeys(["l.1", "l.2", "l.3"], "memory")
    setup = PipelineSetup(meshes=[MeshSpec(name="m0")])
    request = JointSearchRequest({1: profile}, setup, stages=[4])
    with pytest.raises(CutError, match=r"only 1 .*\(l\.0\); l\.1, l\.2, l\.3 cannot, since buffer 'memory'"):
        plan_jointly(request, budget_s=0.0)
    with pytest.raises(CutError, match=r"'l\.2' cannot begin a stage: .*buffer 'memory'"):
        partition(profile, setup, stages=2, microbatches=1, cut=["l.0", "l.2"])


@pytest.mark.slow
def test_every_pair_of_cuts_of_a_model_has_the_same_tensors_by_name():
    """Tensor names do not depend on the cut: a plan of one worker fits the stages of another."""
    traced, again = _traced("unet"), trace(*build("unet"))
    for begins in itertools.combinations(traced.layers[1:], 2):
        assert traced.cut(begins).edges == again.cut(begins).edges


def test_the_state_of_the_stages_is_the_state_of_the_model():
    for name in ("constants", "batch norm and dropout", "a running mean"):
        model, _ = build(name)
        traced = _traced(name)
        state = {}
        for stage in traced.cut(traced.layers).stages:
            state |= {stage.original_names[local]: value for local, value in stage.state_dict().items()}
        assert state.keys() == model.state_dict().keys()


def test_the_constants_of_a_stage_follow_it_to_another_device():
    """The meta device stands for an accelerator: it refuses to meet a tensor of the CPU as one does."""
    for name in ("gpt", "constants", "changes inside"):
        traced = _traced(name)
        _, inputs = build(name)
        made = {f"input:{k}": value.to("meta") for k, value in enumerate(inputs)}
        for stage in traced.cut(traced.layers).stages:
            stage.to("meta").to(torch.float64)
            made |= zip(stage.outputs, stage(*(made[key] for key in stage.inputs)), strict=True)
        assert all(value.device.type == "meta" for value in made.values())
        back = traced.cut(traced.layers).stages[0].to("meta").to_empty(device="cpu")
        assert back(*inputs)[0].device.type == "cpu"
