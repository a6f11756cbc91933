"""What `trace` refuses, with a reason that a user can act on, and what it finds."""

import importlib

import pytest
import torch
from torch import nn

from tests.worker.model.odd_models import make
from worker.benchmark.layer_costs import measure_layers
from worker.contract.profile import TraceError
from worker.model.export import trace


class Outer(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def refused(forward, *inputs):
    with pytest.raises(TraceError) as caught:
        trace(Outer(forward), inputs or (torch.randn(3, 4),))
    return str(caught.value)


def test_control_flow_by_data_is_refused_with_torchs_reason():
    def forward(model, x):
        return model.b(model.a(x)) if x.sum() > 0 else model.a(x)

    message = refused(forward)
    assert "torch.export cannot trace Outer" in message
    assert "data-dependent" in message.lower()


class Inner(nn.Module):
    """Between two layers, something whose result depends on values."""

    def __init__(self, between):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.between = between

    def forward(self, x):
        return self.between(self.layer(x))


class Encoder(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)
        self.how = how

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.encoder(x, mask=mask, **self.how)


@pytest.mark.parametrize(
    "between",
    [
        lambda x: 2 * x if x.sum() > 0 else x,
        lambda x: x[x.sum(-1) > 0],
        lambda x: x * x.sum().item(),
    ],
)
def test_what_depends_on_values_is_told_by_module_and_line_in_a_few_words(between):
    with pytest.raises(TraceError) as caught:
        trace(nn.Sequential(nn.Linear(4, 4), Inner(between)), (torch.randn(3, 4),))
    message = str(caught.value)
    # of what only the run for shapes comes upon, torch knows the line in forward
    lines = between.__code__.co_firstlineno, Inner.forward.__code__.co_firstlineno + 1
    assert any(f"test_trace.py:{line}:" in message for line in lines), message
    assert "data-dependent" in message and "torch.where" in message
    assert "\n" not in message and len(message) < 800


def test_what_depends_on_values_in_an_installed_library_is_told_with_what_a_user_can_do(
    tmp_path, monkeypatch
):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "somebodys.py").write_text("def between(x):\n    return 2 * x if x.sum() > 0 else x\n")
    monkeypatch.syspath_prepend(str(folder))
    between = importlib.import_module("somebodys").between
    with pytest.raises(TraceError, match=r"somebodys.py:2: .*of somebodys: .*model.factory name a function"):
        trace(nn.Sequential(nn.Linear(4, 4), Inner(between)), (torch.randn(3, 4),))


def test_a_module_of_torch_that_looks_at_its_mask_is_told_with_the_argument_that_spares_it():
    with pytest.raises(TraceError, match=r"in module 'encoder' .*test_trace.py:\d+: .*is_causal"):
        trace(Encoder(), (torch.randn(2, 3, 4),))
    assert len(trace(Encoder(is_causal=True), (torch.randn(2, 3, 4),)).layers) >= 2


def test_a_models_own_error_is_told_as_its_own():
    def forward(model, x):
        raise ValueError("the user's message")

    message = refused(forward)
    assert "Outer.forward raised ValueError: the user's message" in message
    assert "(3, 4)" in message
    shapes = refused(lambda model, x: model.b(model.a(x)), torch.randn(3, 5))
    assert "Outer.forward raised RuntimeError" in shapes


def test_a_model_of_results_that_are_no_tuple_of_tensors_is_refused():
    assert "returns a tuple of 2" in refused(lambda model, x: (model.a(x), (model.b(x),)))
    assert "returns a tuple of 2" in refused(lambda model, x: (model.a(x), None))
    assert "returns a dict of 1" in refused(lambda model, x: {"logits": model.b(model.a(x))})


def test_a_model_without_modules_is_refused():
    assert "calls no submodule" in refused(lambda model, x: x * model.scale)


def test_inputs_that_are_no_tensors_are_refused():
    assert "must be tensors, got int" in refused(lambda model, x: model.a(x), 3)


def test_a_parameter_changed_in_forward_is_refused_by_name():
    def forward(model, x):
        with torch.no_grad():
            model.scale.mul_(0.9)
        return model.b(model.a(x) * model.scale)

    assert "changes parameter 'scale' in its forward" in refused(forward)


def test_a_change_in_place_under_no_grad_of_another_modules_result_is_refused_by_name():
    def forward(model, x):
        x = model.a(x)
        with torch.no_grad():
            x[:, 0] = 0.0
        return model.b(x)

    assert "changes 'linear' in place" in refused(forward)


def test_modules_that_nothing_uses_are_no_layers():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.a(x)
            self.b(x)
            return self.c(x)

    assert trace(Unused(), (torch.randn(3, 4),)).layers == ["a", "c"]


def test_a_model_that_is_one_sequence_is_cut_at_its_elements():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 2))
    assert trace(model, (torch.randn(3, 4),)).layers == ["0", "1.0", "1.1", "2"]


def test_blocks_inside_wrappers_are_found():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x):
            return x + self.mlp(x)

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(4, 4)
            self.h = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            x = self.embed(x)
            for block in self.h:
                x = block(x)
            return x

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.transformer, self.head = Body(), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.transformer(x))

    layers = trace(Wrapped(), (torch.randn(3, 4),)).layers
    assert layers == ["transformer.embed", "transformer.h.0", "transformer.h.1", "head"]


def test_torchs_own_transformer_is_cut_at_its_layers():
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, enable_nested_tensor=False
    )
    assert trace(model, (torch.randn(2, 5, 8),)).layers == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize(
    ("autocast", "transfers", "dtype", "wire"),
    [
        (None, "auto", torch.float32, torch.float32),
        (None, "bf16", torch.float32, torch.bfloat16),
        (torch.bfloat16, "auto", torch.bfloat16, torch.bfloat16),
    ],
)
def test_an_edge_has_the_type_that_the_stages_see_and_the_one_that_travels(autocast, transfers, dtype, wire):
    model, inputs = make("two inputs")
    model = model.float()
    traced = trace(model, (inputs[0], inputs[1].float()), autocast=autocast, transfers=transfers)
    graph = traced.cut(traced.layers)
    kinds = {(edge.differentiable, edge.dtype, edge.transfer_dtype) for edge in graph.edges}
    assert (True, dtype, wire) in kinds and kinds <= {
        (True, dtype, wire),
        (True, torch.float32, torch.bfloat16 if transfers == "bf16" else torch.float32),
        (False, torch.bool, torch.bool),
    }
    target = torch.randn(4, 5, 3)
    profile = measure_layers(traced, nn.functional.mse_loss, target, repeats=1)
    assert [edge.bytes for edge in profile.edges] == [
        torch.Size(edge.shape).numel() * edge.transfer_dtype.itemsize for edge in graph.edges
    ]
    in_full = trace(model, (inputs[0], inputs[1].float())).cut(traced.layers)
    assert {edge.dtype for edge in in_full.edges if edge.differentiable} == {torch.float32}


def test_random_operations_have_names_of_their_own_that_no_cut_changes():
    model, inputs = make("noise and dropout")
    traced = trace(model, inputs)
    found = []
    for begins in (traced.layers[:1], traced.layers):
        graphs = [
            part.graph
            for stage in traced.cut(begins).stages
            for part in stage.modules()
            if hasattr(part, "graph")
        ]
        names = sorted(
            node.name
            for graph in graphs
            for node in graph.nodes
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        )
        assert len(names) == len(set(names)) == 4
        found.append(names)
    assert found[0] == found[1]
