"""Traced attention: constant masks become flags or shared buffers, heads are not repeated, constants are folded."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.benchmarks.models.catalogue import ENTRIES
from tests.missing import needs_libraries
from tests.tiers import some_by_day
from tests.worker.model.running import gradients, plain_step, step
from worker.benchmark.layer_costs import measure_layers
from worker.checks.trace import check_trace
from worker.model.eval_mode import evaluation_stages, trace_in_eval_mode
from worker.model.export import trace
from worker.model.factory import call_factory
from worker.model.interface import adapt_model
from worker.model.parity import compare, gradient_floor, tolerance_for
from worker.model.passes import constants
from worker.model.passes.attention import ATTENTION, attention_arguments
from worker.model.serialization import deserialize_model, load_values, parameter_values, serialize_model

LENGTH, WIDTH, HEADS = 6, 16, 4


def rows(length=LENGTH, seed=1):
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(seed))


class Layer(nn.Module):
    """Attention with `groups` heads of keys and values, which `repeat` repeats."""

    def __init__(self, groups=HEADS, repeat=None, **options):
        super().__init__()
        self.groups, self.repeat, self.options = groups, repeat, options
        size = WIDTH // HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, n * size) for n in (HEADS, groups, groups))

    def forward(self, x, mask=None, keys=None):
        keys = x if keys is None else keys
        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = (
            f(keys).unflatten(-1, (self.groups, -1)).transpose(1, 2) for f in (self.key, self.value)
        )
        if self.repeat is not None:
            key, value = self.repeat(key), self.repeat(value)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **self.options)
        return mixed.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Two layers of attention; `make_mask(model, x, *more)` is called for each of them, or once where `once`."""

    def __init__(self, make_mask=lambda model, x: None, *, once=True, **layer):
        super().__init__()
        torch.manual_seed(0)
        self.make_mask, self.once = make_mask, once
        self.layers = nn.ModuleList(Layer(**layer) for _ in range(2))

    def forward(self, x, *more):
        mask = self.make_mask(self, x, *more) if self.once else None
        for layer in self.layers:
            x = x + layer(x, mask if self.once else self.make_mask(self, x, *more))
        return x


def attention_of(traced):
    """The arguments of every attention of a traced model."""
    return [attention_arguments(n) for n in traced.placed.module.graph.nodes if n.target is ATTENTION]


def operations(traced):
    return [node for node in traced.placed.module.graph.nodes if node.op == "call_function"]


def folded(traced):
    """The tensors of the constants that were folded, by name."""
    return {n: t for n, t in traced.placed.tensors.items() if n.startswith("folded_constant")}


def check_equal(model, *batches, cut=True):
    """Trace `model` with the first of `batches`; outputs and gradients of the stages are the model's for all of them."""
    traced = trace(model, batches[0])
    for batch in batches:
        model.zero_grad()
        expected = plain_step(model, batch)
        graph = traced.cut(traced.layers if cut else traced.layers[:1])
        torch.testing.assert_close(step(graph, batch), expected, rtol=1e-5, atol=1e-6)
        found = gradients(graph)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)
    return traced


def lower_triangle(length=LENGTH):
    return torch.ones(length, length, dtype=torch.bool).tril()


def window(model, x):
    """A sliding window of three, made of places as transformers makes it."""
    places = torch.arange(x.shape[1])
    distance = places[:, None] - places[None, :]
    return ((distance >= 0) & (distance < 3))[None, None].expand(x.shape[0], -1, -1, -1)


CAUSAL = {
    "bool": lambda model, x: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
    "of places, for each row": lambda model, x: (torch.arange(LENGTH)[:, None] >= torch.arange(LENGTH))[
        None, None
    ].expand(len(x), 1, -1, -1),
    "minus infinity": lambda model, x: torch.full((LENGTH, LENGTH), -math.inf).triu(1),
    "the least number": lambda model, x: torch.zeros(LENGTH, LENGTH).masked_fill(
        ~lower_triangle(), torch.finfo(torch.float32).min
    ),
    "written in place": lambda model, x: torch.zeros(LENGTH, LENGTH).fill_(-math.inf).triu_(1),
    "a window that is wider": lambda model, x: torch.ones(9, 9).tril().triu(-7)[:LENGTH, :LENGTH] == 1,
}


@pytest.mark.parametrize("kind", CAUSAL)
def test_a_constant_causal_mask_becomes_a_flag(kind):
    traced = check_equal(Model(CAUSAL[kind]), (rows(),), (rows(seed=2),))
    assert [(a["attn_mask"], a["is_causal"]) for a in attention_of(traced)] == [(None, True)] * 2
    assert folded(traced) == {} and traced.placed.replicated == frozenset()


@pytest.mark.parametrize(
    "make",
    [
        lambda model, x: torch.ones(len(x), 1, 1, LENGTH, dtype=torch.bool),
        lambda model, x: torch.zeros(LENGTH, LENGTH),
        lambda model, x: torch.arange(LENGTH)[None] < LENGTH,
    ],
)
def test_a_constant_mask_that_hides_nothing_is_dropped(make):
    traced = check_equal(Model(make), (rows(),))
    assert [(a["attn_mask"], a["is_causal"]) for a in attention_of(traced)] == [(None, False)] * 2
    assert folded(traced) == {}


@pytest.mark.parametrize("once", [True, False])
def test_a_sliding_window_is_one_buffer_of_all_layers_and_no_state_of_the_model(once):
    traced = check_equal(Model(window, once=once), (rows(),))
    assert len({a["attn_mask"] for a in attention_of(traced)}) == 1
    assert not any(a["is_causal"] for a in attention_of(traced))
    (mask,) = folded(traced).values()
    assert mask.shape == (1, 1, LENGTH, LENGTH)
    assert traced.placed.replicated == frozenset()
    assert not traced.state_names() & {*folded(traced)}
    for stage in traced.cut(traced.layers).stages:
        assert [b.shape for b in stage.buffers()] == [mask.shape]
        assert {*stage.tensor_names.values()} - {*stage.original_names.values()} == {*folded(traced)}
        assert not any("folded" in name for name in stage.state_dict())


def test_a_mask_like_a_triangle_that_does_not_hide_altogether_stays_a_bias():
    def slight(model, x):
        return torch.full((LENGTH, LENGTH), -3.0).triu(1)

    traced = check_equal(Model(slight), (rows(),))
    assert [a["is_causal"] for a in attention_of(traced)] == [False] * 2
    assert [t.dtype for t in folded(traced).values()] == [torch.float32]


def test_masks_of_each_head_keep_their_heads():
    def slopes(model, x):
        places = torch.arange(LENGTH)
        return (places[None, :] - places[:, None]) * torch.tensor([0.5, 0.25, 0.1, 0.0])[:, None, None]

    traced = check_equal(Model(slopes), (rows(),))
    assert [t.shape for t in folded(traced).values()] == [(HEADS, LENGTH, LENGTH)]


def test_a_mask_from_an_input_stays_and_what_is_constant_of_it_is_folded():
    def padded(model, x, seen):
        return lower_triangle_of_places() & seen[:, None, None, :]

    def lower_triangle_of_places():
        places = torch.arange(LENGTH)
        return places[:, None] >= places[None, :]

    whole = torch.ones(2, LENGTH, dtype=torch.bool)
    part = whole.clone()
    part[1, 4:] = False
    traced = check_equal(Model(padded), (rows(), whole), (rows(), part))
    assert all(a["attn_mask"].target is torch.ops.aten.__and__.Tensor for a in attention_of(traced))
    assert [t.shape for t in folded(traced).values()] == [(LENGTH, LENGTH)]


class Crossed(nn.Module):
    """Attention of some places to more of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = Layer(), Layer()

    def forward(self, x, keys):
        mask = torch.ones(x.shape[1], keys.shape[1], dtype=torch.bool).tril()
        return self.last(self.first(x, mask, keys), mask, keys)


def test_a_triangle_of_fewer_queries_than_keys_stays_a_mask():
    traced = check_equal(Crossed(), (rows(4), rows(6)))
    assert not any(a["is_causal"] or a["attn_mask"] is None for a in attention_of(traced))
    assert [t.shape for t in folded(traced).values()] == [(4, 6)]


class Biased(Model):
    """A mask from a parameter, or from a buffer."""

    def __init__(self, *, kind):
        super().__init__(lambda model, x: model.bias * 1.0)
        hidden = torch.full((LENGTH, LENGTH), -math.inf).triu(1)
        if kind in ("trained", "frozen"):
            self.bias = nn.Parameter(hidden, requires_grad=kind == "trained")
        else:
            self.register_buffer("bias", hidden, persistent=kind == "persistent")
        if kind == "changed":
            self.make_mask = self._changed

    def _changed(self, model, x):
        model.bias.add_(0.5)
        return model.bias


@pytest.mark.parametrize("kind", ["trained", "frozen", "persistent", "changed"])
def test_a_mask_that_may_change_stays(kind):
    model = Biased(kind=kind)
    traced = trace(model, (rows(),))
    assert not any(a["is_causal"] or a["attn_mask"] is None for a in attention_of(traced))
    assert folded(traced) == {}


def test_a_mask_of_a_buffer_that_no_checkpoint_holds_is_constant():
    traced = check_equal(Biased(kind="fixed"), (rows(),))
    assert [a["is_causal"] for a in attention_of(traced)] == [True] * 2


def test_a_random_mask_is_drawn_each_time():
    traced = trace(Model(lambda model, x: torch.rand(LENGTH, LENGTH) > 0.1), (rows(),))
    assert all(a["attn_mask"] is not None for a in attention_of(traced)) and folded(traced) == {}


def test_scale_and_dropout_are_kept_and_draw_the_same_numbers():
    model = Model(CAUSAL["bool"], dropout_p=0.4, scale=0.3)
    traced = check_equal(model, (rows(),), cut=False)
    assert [(a["dropout_p"], a["scale"], a["is_causal"]) for a in attention_of(traced)] == [
        (0.4, 0.3, True)
    ] * 2


def by_view(x):
    batch, groups, length, size = x.shape
    wide = x[:, :, None, :, :].expand(batch, groups, HEADS // groups, length, size)
    return wide.reshape(batch, HEADS, length, size)


REPEATS = {
    "as transformers does": (2, by_view),
    "copied": (2, lambda x: by_view(x.contiguous()).contiguous()),
    "repeat_interleave": (2, lambda x: x.repeat_interleave(2, 1)),
    "one head": (1, lambda x: x.expand(-1, HEADS, -1, -1)),
}


@pytest.mark.parametrize("kind", REPEATS)
def test_repeated_heads_are_left_to_the_kernel(kind):
    groups, repeat = REPEATS[kind]
    traced = check_equal(Model(CAUSAL["bool"], groups=groups, repeat=repeat), (rows(),))
    for arguments in attention_of(traced):
        assert arguments["enable_gqa"] and arguments["is_causal"]
        assert traced.placed.values[arguments["key"]].shape[1] == groups
        assert traced.placed.values[arguments["value"]].shape[1] == groups
    names = {node.target.__name__ for node in operations(traced)}
    assert names.isdisjoint({"expand.default", "reshape.default", "repeat_interleave.self_int"})


STAYING = {
    "in another order": (2, lambda x: torch.cat([x, x], 1), CAUSAL["bool"]),
    "repeated as a whole": (2, lambda x: x.repeat(1, 2, 1, 1), CAUSAL["bool"]),
    "unevenly": (2, lambda x: x.repeat_interleave(torch.tensor([1, 3]), 1, output_size=4), CAUSAL["bool"]),
    "changed afterwards": (2, lambda x: by_view(x).mul_(2.0), CAUSAL["bool"]),
    "under a mask": (2, by_view, window),
}


@pytest.mark.parametrize("kind", STAYING)
def test_heads_that_are_repeated_otherwise_or_under_a_mask_stay(kind):
    groups, repeat, mask = STAYING[kind]
    traced = check_equal(Model(mask, groups=groups, repeat=repeat), (rows(),))
    assert not any(a["enable_gqa"] for a in attention_of(traced))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@some_by_day("kind", ["bool", "the least number", "minus infinity"], by_day=1)
def test_under_autocast_the_results_are_those_of_the_model(dtype, kind):
    model = Model(CAUSAL[kind], groups=2, repeat=by_view)
    traced = trace(model, (rows(),), autocast=dtype)
    assert [(a["is_causal"], a["enable_gqa"]) for a in attention_of(traced)] == [(True, False)] * 2
    graph = traced.cut(traced.layers[:1])
    with torch.autocast("cpu", dtype=dtype):
        expected, found = plain_step(model, (rows(),)), step(graph, (rows(),))
    tolerance, of_model = tolerance_for(model, dtype, "cpu"), {n: p.grad for n, p in model.named_parameters()}
    assert compare(expected, found, tolerance.values).is_rounding
    floor = gradient_floor(of_model.values())
    for name, gradient in gradients(graph).items():
        assert compare(of_model[name], gradient, tolerance.gradients, floor).is_rounding, name


class Turn(nn.Module):
    """A layer that turns its rows by tables of angles."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cos, sin):
        x = self.project(x)
        return x * cos[None] + x.roll(WIDTH // 2, -1) * sin[None]


class Rotated(nn.Module):
    """Layers with rotary tables, which each forward computes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("frequencies", 1.0 / 10 ** torch.linspace(0, 1, WIDTH // 2), persistent=False)
        self.layers = nn.ModuleList(Turn() for _ in range(3))

    def forward(self, x):
        places = torch.arange(x.shape[1])
        with torch.no_grad():
            angles = places[:, None].float() * self.frequencies
            turned = torch.cat([angles, angles], -1)
            cos, sin = turned.cos(), turned.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def test_rotary_tables_are_computed_once_and_shared_by_the_layers():
    traced = check_equal(Rotated(), (rows(),), (rows(seed=3),))
    assert sorted(t.shape for t in folded(traced).values()) == [(LENGTH, WIDTH)] * 2
    names = {node.name for node in operations(traced)}
    assert names.isdisjoint({"arange", "cos", "sin", "cat", "wrap_with_set_grad_enabled"})
    for stage in traced.cut(traced.layers).stages:
        assert {*folded(traced)} < {*stage.tensor_names.values()}
        assert sum(b.nbytes for b in stage.buffers()) == 2 * LENGTH * WIDTH * 4


def test_large_tables_are_computed_where_they_are_used_and_masks_folded_all_the_same(monkeypatch):
    monkeypatch.setattr(constants, "MAX_FOLDED_BYTES", 16)
    assert folded(check_equal(Rotated(), (rows(),))) == {}
    assert len(folded(check_equal(Model(window), (rows(),)))) == 1


class Returning(nn.Module):
    """A model that also returns a constant."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        scale = torch.arange(WIDTH).float() + 1.0
        return self.last(self.first(x) * scale), scale


def test_a_constant_that_the_model_returns_is_a_tensor_of_its_own():
    traced = trace(Returning(), (rows(),))
    assert folded(traced) == {}
    (stage,) = traced.cut(traced.layers[:1]).stages
    first, second = (stage(rows())[1] for _ in range(2))
    assert torch.equal(first, torch.arange(WIDTH) + 1.0) and first.data_ptr() != second.data_ptr()


class Coarse(nn.Module):
    """A constant by an operation of 8-bit floats, which the CPU has no kernel for."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        scale = torch.ones(WIDTH).to(torch.float8_e4m3fn)
        return self.last(self.first(x) * scale.sin().float())


def test_what_cannot_be_computed_here_is_left_to_the_device():
    with pytest.raises(RuntimeError):
        Coarse()(rows())
    traced = trace(Coarse(), (rows(),))
    assert folded(traced) == {} and "sin" in {node.name for node in operations(traced)}


class Taken(nn.Module):
    """A model with a buffer of the name that folded constants have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("folded_constant_0", torch.full((WIDTH,), 3.0))

    def forward(self, x):
        scale = torch.arange(WIDTH).float() + 1.0
        return self.last(self.first(x) * scale) + self.folded_constant_0


def test_a_folded_constant_takes_no_name_of_the_models_own():
    traced = check_equal(Taken(), (rows(),))
    assert traced.state_names() >= {"folded_constant_0"}
    assert torch.equal(traced.placed.tensors["folded_constant_0"], torch.full((WIDTH,), 3.0))


def test_folded_constants_travel_with_the_graph():
    model = Model(window, once=False)
    traced = trace(model, (rows(),))
    arrived = deserialize_model(serialize_model(traced))
    load_values(arrived, parameter_values(traced, arrived.state_names()))
    expected = plain_step(model, (rows(),))
    torch.testing.assert_close(step(arrived.cut(arrived.layers), (rows(),)), expected)


def test_a_plan_counts_a_shared_mask_once_in_a_stage():
    measured = measure_layers(
        trace(Model(window, once=False), (rows(),)), functional.mse_loss, rows(seed=2), repeats=1
    )
    (size,) = measured.buffer_sizes.values()
    assert size == LENGTH * LENGTH
    assert [layer.buffers for layer in measured.layers] == [tuple(measured.buffer_sizes)] * 2


def test_an_evaluation_has_folded_constants_of_its_own():
    model = Model(window, once=False)
    trained = dict(enumerate(trace(model, (rows(),)).cut(["layers.0", "layers.1"]).stages))
    traced = trace_in_eval_mode(model, (rows(),), autocast=None, transfers="auto")
    found = evaluation_stages(traced, ["layers.0", "layers.1"], trained, device="cpu", own_statistics=False)
    assert found.own == [] and found.alone == {}
    for index, stage in found.stages.items():
        assert [b.shape for b in stage.buffers()] == [(1, 1, LENGTH, LENGTH)]
        assert {id(p) for p in stage.parameters()} == {id(p) for p in trained[index].parameters()}


# model of the table -> its attention calls, those without a mask, those of them that are causal, those with enable_gqa;
# decoders with grouped heads have four of queries and two of keys. T5 adds a trained bias; Gemma2 and GPT-J compute
# attention without the operator.
ATTENTION_CALLS = {
    "GPT-2": (4, 4, 4, 0),
    "Llama": (4, 4, 4, 4),
    "Qwen2": (4, 4, 4, 4),
    "Qwen3": (4, 4, 4, 4),
    "Gemma": (4, 4, 4, 4),
    "Gemma2": (0, 0, 0, 0),
    "Mistral": (4, 4, 4, 4),
    "Mixtral": (4, 4, 4, 4),
    "Phi": (4, 4, 4, 4),
    "Cohere": (4, 4, 4, 4),
    "GLM": (4, 4, 4, 4),
    "Gemma3 (text)": (4, 4, 4, 4),
    "Granite": (4, 4, 4, 4),
    "SmolLM3": (4, 4, 4, 4),
    "DeepSeek-V3": (4, 4, 4, 0),
    "Phi-3": (4, 4, 4, 4),
    "OPT": (4, 4, 4, 0),
    "GPT-NeoX": (4, 4, 4, 0),
    "GPT-J": (0, 0, 0, 0),
    "Falcon": (4, 4, 4, 0),
    "OLMo-2": (4, 4, 4, 4),
    "T5": (9, 3, 0, 0),
    "BART": (6, 6, 2, 0),
    "BERT": (4, 4, 0, 0),
    "RoBERTa": (4, 4, 0, 0),
    "DistilBERT": (4, 4, 0, 0),
    "ALBERT": (4, 4, 0, 0),
    "ModernBERT": (4, 4, 0, 0),
    "ViT": (4, 4, 0, 0),
}
TEXT = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(1))


def public_model(name, *, padding=None, **changed):
    """A model of the table, with four heads of queries and two of keys where it groups them, and inputs: without a mask,
    unless there is `padding`; `changed` are settings of its configuration."""
    entry = ENTRIES[name]
    given = copy.deepcopy({**entry.args})
    settings = given["config"]["args"]
    if "num_key_value_heads" in settings and "kv_lora_rank" not in settings:
        settings |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    settings |= changed
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32)} if entry.samples == "Images" else {"input_ids": TEXT}
    if "ForConditionalGeneration" in entry.factory:
        inputs["decoder_input_ids"] = TEXT.flip(0)
    if padding is not None:
        inputs["attention_mask"] = padding
    torch.manual_seed(0)
    model = call_factory(entry.factory, given).train()
    adapt_model(model, list(inputs), output="logits")
    return model, tuple(inputs.values())


def counts(traced):
    """Attention calls, those without a mask, those of them that are causal, those with enable_gqa."""
    calls = attention_of(traced)
    unmasked = sum(call["attn_mask"] is None for call in calls)
    causal, grouped = (sum(call[flag] for call in calls) for flag in ("is_causal", "enable_gqa"))
    return len(calls), unmasked, causal, grouped


@pytest.mark.slow
@needs_libraries("transformers")
@pytest.mark.parametrize("name", ATTENTION_CALLS)
def test_a_public_model_attends_without_a_mask_and_computes_what_it_did(name):
    model, inputs = public_model(name)
    traced = trace(model, inputs)
    assert counts(traced) == ATTENTION_CALLS[name]
    notes = check_trace(model, traced, lambda: lambda output, _: output.square().mean(), torch.zeros(2))
    assert notes == []


@pytest.mark.slow
@needs_libraries("transformers")
@pytest.mark.parametrize(
    ("device", "autocast", "grouped"),
    [("cuda", None, 0), ("cuda", torch.bfloat16, 4), ("cpu", torch.float16, 4)],
)
def test_cuda_gets_grouped_heads_only_in_half_precision_as_nothing_else_is_fused(device, autocast, grouped):
    model, inputs = public_model("Llama")
    assert counts(trace(model, inputs, device=device, autocast=autocast)) == (4, 4, 4, grouped)


@pytest.mark.slow
@needs_libraries("transformers")
def test_a_window_of_a_public_model_is_one_buffer():
    model, inputs = public_model("Mistral", sliding_window=4)
    traced = trace(model, inputs)
    assert counts(traced) == (4, 0, 0, 0) and len({a["attn_mask"] for a in attention_of(traced)}) == 1
    assert sorted(t.shape for t in folded(traced).values()) == [(1, 1, 16, 16), (1, 16, 8), (1, 16, 8)]


@needs_libraries("transformers")
def test_the_padding_of_a_public_model_stays_a_mask():
    padding = torch.ones(2, 16, dtype=torch.long)
    other = padding.clone()
    other[1, 9:] = 0
    model, inputs = public_model("BERT", padding=padding)
    traced = trace(model.eval(), inputs)
    assert counts(traced) == (4, 0, 0, 0)
    (stage,) = traced.cut(traced.layers[:1]).stages
    for mask in (padding, other):
        torch.testing.assert_close(stage(TEXT, mask)[0], model(TEXT, mask))
