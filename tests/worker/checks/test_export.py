"""A model and its trace are compared before training: what differs is refused, what is equal is not."""

import dataclasses
import functools
import operator

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.tiers import some_by_day
from tests.worker.model import lying_models as lying
from tests.worker.model import odd_models as odd
from tests.worker.model.odd_models import ODD_MODELS, make
from worker.checks.hazards import check_trainable
from worker.checks.trace import check_trace, trace_check_bytes
from worker.contract.profile import TraceError
from worker.examples import gpt, unet
from worker.model.export import trace
from worker.model.stages import StageBuilder


def _squares(output, target):
    return ((output - target) ** 2).mean()


def _rows(*shape):
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(3))


def _check(model, inputs, *, autocast=None):
    traced = trace(model, inputs, autocast=autocast)
    target = torch.full(tuple(traced.placed.values[traced.placed.outputs[0]].shape), 0.5)
    return check_trace(model, traced, lambda: _squares, target)


def _tokens(length=8, most=11):
    return torch.randint(most, (4, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lying.OwnBackward, "gradient of 'first.*_Reversed.*custom_op"),
        (lying.HookInForward, "lying_models.py:.*no stage calls"),
        (lying.hooked_parameter, "'second.weight' has a hook on its gradient"),
        (lying.hooked_after_accumulation, "'second.weight' has a hook on its gradient"),
        (lying.hooked_module, "'second' has a backward hook"),
        (lying.PythonRandom, "random numbers of Python or numpy.*with torch"),
        (lying.NumpyRandom, "random numbers of Python or numpy.*with torch"),
        (lying.Counter, "the number 'calls' of Counter.*buffer"),
        (lying.CountsInList, "the attribute 'calls' of CountsInList.*buffer"),
        (lying.CountsElsewhere, "the iterator 'calls' of CountsElsewhere.*buffer"),
        (lying.Detached, "depends on no parameter"),
    ],
)
def test_a_trace_that_computes_something_else_is_refused(model, message):
    torch.manual_seed(0)
    with pytest.raises(TraceError, match=message):
        _check(model(), (_rows(lying.WIDTH),))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lying.frozen, "nothing to train: all of its 6 parameters are frozen"),
        (nn.Identity, "nothing to train: it has no parameters"),
        (lambda: lying.Embedded(sparse=True), "'embed'.*sparse gradients.*sparse=False"),
        (lambda: lying.Embedded(max_norm=1.0), "'embed'.*max_norm=1.0"),
    ],
)
def test_a_model_that_stages_cannot_train_is_refused_by_name(model, message):
    with pytest.raises(TraceError, match=message):
        check_trainable(model())


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@some_by_day("name", ODD_MODELS, by_day=5)
def test_no_false_alarm(name, autocast):
    model, inputs = make(name)
    check_trainable(model)
    assert _check(model, inputs, autocast=autocast) == []


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@some_by_day(
    ("model", "inputs"),
    [
        (functools.partial(odd.Normalised, 0.3), _rows(2, odd.WIDTH)),
        (unet.build, _rows(1, 8, 8)),
    ],
    by_day=1,
)
def test_no_false_alarm_for_dropout_batch_norm_and_skips(model, inputs, autocast):
    torch.manual_seed(0)
    assert _check(model(), (inputs,), autocast=autocast) == []


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_no_false_alarm_for_a_language_model_with_dropout(autocast):
    torch.manual_seed(0)
    model = gpt.build(layers=3, width=32, length=16, dropout=0.2)
    tokens = _tokens(16, 256)
    traced = trace(model, (tokens,), autocast=autocast)
    assert check_trace(model, traced, lambda: functional.cross_entropy, tokens) == []


def test_the_model_is_left_as_it_was():
    torch.manual_seed(0)
    model = odd.Normalised(0.3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    _check(model, (_rows(2, odd.WIDTH),))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_that_the_model_had_are_kept_and_not_checked():
    torch.manual_seed(0)
    model = odd.Normalised(0.0)
    given = [torch.full_like(parameter, 1e3) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), given, strict=True):
        parameter.grad = gradient
    _check(model, (_rows(2, odd.WIDTH),))
    assert all(p.grad is one for p, one in zip(model.parameters(), given, strict=True))
    assert all(torch.equal(one, torch.full_like(one, 1e3)) for one in given)


@pytest.mark.parametrize("model", [lying.DrawsInVain, lying.CountsInVain])
def test_what_changes_no_result_is_told_and_not_refused(model):
    torch.manual_seed(0)
    (note,) = _check(model(), (_rows(lying.WIDTH),))
    assert "changed the output" in note


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_an_own_backward_that_says_what_autograd_does_is_told_and_not_refused(autocast):
    torch.manual_seed(0)
    (note,) = _check(lying.TrueBackward(), (_rows(lying.WIDTH),), autocast=autocast)
    assert "autograd function _Square" in note and "were the same" in note


@pytest.mark.parametrize(("old", "new"), [("tanh.default", "sigmoid.default"), ("add.Tensor", "sub.Tensor")])
def test_a_graph_with_another_operation_is_found(old, new):
    torch.manual_seed(0)
    model = odd.TwoBranches()
    traced = trace(model, (_rows(odd.WIDTH),))
    (node, *_) = [node for node in traced.placed.module.graph.nodes if str(node.target) == f"aten.{old}"]
    node.target = operator.attrgetter(new)(torch.ops.aten)
    with pytest.raises(TraceError, match="the output differs"):
        check_trace(model, traced, lambda: _squares, torch.zeros(4, odd.WIDTH))


def test_the_estimate_of_memory_counts_parameters_and_values():
    model = odd.TwoBranches()
    traced = trace(model, (_rows(odd.WIDTH),))
    parameters = sum(p.nbytes for p in model.parameters())
    assert trace_check_bytes(model, traced, "cpu") > 3 * parameters
    assert trace_check_bytes(model, traced, "cuda") - trace_check_bytes(model, traced, "cpu") == parameters


def test_a_gradient_that_does_not_cross_a_border_is_found(monkeypatch):
    torch.manual_seed(0)
    real = StageBuilder.edges

    def edges(builder):
        first, *others = real(builder)
        assert first.differentiable
        return (dataclasses.replace(first, differentiable=False), *others)

    monkeypatch.setattr(StageBuilder, "edges", edges)
    with pytest.raises(TraceError, match="the gradient of 'stem"):
        _check(odd.TwoBranches(), (_rows(odd.WIDTH),))


class NormOfAnImage(nn.Module):
    """A group norm behind what is not trained, of an image in channels-last order."""

    def __init__(self, *, contiguous: bool):
        super().__init__()
        self.frozen = nn.Conv2d(3, 4, 1).requires_grad_(False)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Conv2d(4, 4, 1)
        self._contiguous = contiguous

    def forward(self, x):
        x = self.frozen(x).contiguous(memory_format=torch.channels_last)
        return self.head(self.norm(x.contiguous() if self._contiguous else x))


def test_a_group_norm_whose_backward_would_end_the_process_is_refused_by_name():
    image = torch.randn(2, 3, 5, 5)

    def checked(model):
        traced = trace(model, (image,))
        return check_trace(model, traced, lambda: nn.functional.mse_loss, torch.zeros(2, 4, 5, 5))

    with pytest.raises(TraceError, match=r"group norm of module 'norm' .*x\.contiguous\(\)"):
        checked(NormOfAnImage(contiguous=False))
    assert checked(NormOfAnImage(contiguous=True)) == []
    frozen = NormOfAnImage(contiguous=False)
    frozen.norm.requires_grad_(False)
    assert checked(frozen) == []
