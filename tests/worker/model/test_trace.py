"""What `trace` refuses, with a reason that a user can act on, and what it finds."""

import copy
import importlib
import re

import pytest
import torch
from torch import nn

from tests.worker.model.odd_models import make
from worker.benchmark.layer_costs import measure_layers
from worker.checks.trace import check_trace
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
        trace(Inner(between), (torch.randn(3, 4),))
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
        trace(Inner(between), (torch.randn(3, 4),))


def as_it_is(model, *inputs):
    """The note on the one module of `model` that runs as it is; it equals the model."""
    traced = trace(model, inputs)
    target = torch.randn(model(*inputs).shape)
    (note,) = check_trace(model, traced, lambda: nn.functional.mse_loss, target)
    assert " runs as it is, eagerly: " in note
    return note


def test_a_module_of_torch_that_looks_at_its_mask_is_told_with_the_argument_that_spares_it():
    note = as_it_is(Encoder(), torch.randn(2, 3, 4))
    assert re.search(r"in module 'encoder' .*test_trace.py:\d+: .*is_causal", note)
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

    line = forward.__code__.co_firstlineno + 2
    assert f"changes parameter 'scale' in its forward (mul_, at {__file__}:{line})" in refused(forward)


class MeanTeacher(nn.Module):
    """A teacher that forward moves towards the student; as buffers, as the refusal says, or as it was copied."""

    def __init__(self, as_buffers: bool):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        for module in self.teacher.modules() if as_buffers else ():
            for name, tensor in list(module._parameters.items()):
                del module._parameters[name]
                module.register_buffer(name, tensor.detach().clone())

    def forward(self, x):
        with torch.no_grad():
            teacher = [*self.teacher.parameters(), *self.teacher.buffers()]
            for mean, weight in zip(teacher, self.student.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
            target = self.teacher(x)
        return self.student(x) - target


def test_a_teacher_that_forward_moves_is_refused_by_line_and_the_way_out_is_the_model_itself():
    inputs = torch.randn(3, 4)
    line = MeanTeacher.forward.__code__.co_firstlineno + 4
    with pytest.raises(TraceError, match=rf"'teacher.0.weight' .*test_trace.py:{line}\), .*register_buffer"):
        trace(MeanTeacher(as_buffers=False), (inputs,))
    model = MeanTeacher(as_buffers=True)
    with torch.no_grad():
        model.teacher[0].weight.zero_()
    check_trace(model, trace(model, (inputs,)), lambda: nn.functional.mse_loss, torch.randn(3, 4))


class Transforms(nn.Module):
    """A module that transforms a function, below a model."""

    def __init__(self, transform):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.transform = transform

    def forward(self, x):
        return self.transform(self.net, x)


@pytest.mark.parametrize(
    "transform",
    [
        lambda net, x: torch.vmap(net)(x),
        lambda net, x: torch.vmap(torch.func.grad(lambda row: net(row).sum()))(x),
        lambda net, x: torch.func.grad(lambda rows: net(rows).sum())(x),
        lambda net, x: torch.func.jvp(net, (x,), (torch.ones_like(x),))[1],
    ],
    ids=["vmap", "vmap of grad", "grad", "jvp"],
)
def test_a_transform_of_a_function_runs_as_it_is_and_is_told_by_module_and_line(transform):
    model = nn.Sequential(nn.Linear(4, 4), Transforms(transform))
    message = as_it_is(model, torch.randn(3, 4))
    # of what is traced in forward, torch knows the line in forward
    lines = transform.__code__.co_firstlineno, Transforms.forward.__code__.co_firstlineno + 1
    assert any(f"at {__file__}:{line}: " in message for line in lines) and "module '1'" in message, message
    assert "torch.einsum" in message and "torch.library.custom_op" in message
    assert "\n" not in message and len(message) < 1000
    assert torch.equal(model(torch.zeros(3, 4)), model(torch.zeros(3, 4))), "no transform stays open"


def test_a_batch_norm_that_counts_its_batches_runs_as_it_is_and_is_told_with_its_momentum():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4))
    note = as_it_is(model, torch.randn(3, 4))
    assert re.search(r"momentum=None module '1' counts .*: give it a momentum", note)
    assert "torch.where" not in note


class Alignment(nn.Module):
    """Keeps a sparse buffer beside its layers, as Whisper does for looking at words."""

    def __init__(self, used: bool):
        super().__init__()
        self.layers, self.used = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), used
        self.register_buffer("heads", torch.eye(4).to_sparse(), persistent=False)

    def forward(self, x):
        x = self.layers(x)
        return torch.sparse.mm(self.heads, x.T).T if self.used else x


class KeepsBias(nn.Module):
    """Fills an empty buffer in its first forward, and takes it from there in later ones, as ALiBi of x-transformers does."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x):
        if self.bias is None:
            self.register_buffer("bias", -torch.arange(4.0), persistent=False)
        return self.last(self.first(x) + self.bias)


def test_an_empty_buffer_that_forward_fills_is_empty_again_behind_the_trace():
    model, x = KeepsBias(), torch.randn(2, 4)
    wanted = model(x).detach()
    model.bias = None
    traced = trace(model, (x,))
    assert model.bias is None
    (stage,) = traced.cut([]).stages
    assert torch.equal(stage(x)[0], wanted)
    assert check_trace(model, traced, lambda: nn.functional.mse_loss, torch.randn(2, 4)) == []
    assert torch.equal(model(x), wanted) and type(model.bias) is torch.Tensor


def test_a_sparse_buffer_that_forward_leaves_alone_is_no_part_of_a_stage():
    model, x = Alignment(used=False), torch.randn(3, 4)
    traced = trace(model, (x,))
    assert check_trace(model, traced, lambda: nn.functional.mse_loss, torch.randn(3, 4)) == []
    (stage,) = traced.cut([]).stages
    assert torch.equal(stage(x)[0], model(x)) and list(stage.buffers()) == []


def test_a_sparse_buffer_that_forward_uses_is_refused_by_name():
    with pytest.raises(
        TraceError, match=r"forward uses 'heads', a tensor of layout torch.sparse_coo.*to_dense"
    ):
        trace(Alignment(used=True), (torch.randn(3, 4),))


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


class Blocks(nn.Module):
    """A backbone: blocks that hold a sequence themselves."""

    def __init__(self, depth: int):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(depth)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_backbone_in_a_sequence_is_cut_at_its_blocks_and_elements_that_repeat_are_whole():
    x = (torch.randn(2, 5, 8),)
    backbone = nn.Sequential(nn.Linear(8, 8), Blocks(2), nn.Linear(8, 4))
    assert trace(backbone, x).layers == ["0", "1.blocks.0", "1.blocks.1", "2"]
    assert trace(nn.Sequential(Blocks(2), Blocks(2), nn.Linear(8, 4)), x).layers == ["0", "1", "2"]
    assert trace(nn.Sequential(Blocks(1), nn.Linear(8, 4)), x).layers == ["0", "1"]


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


def test_a_batch_norm_of_one_row_is_refused_with_the_settings_that_give_more():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(TraceError, match=r"more than 1 value per channel .*fewer training\.microbatches"):
        trace(model, (torch.zeros(1, 4),))
