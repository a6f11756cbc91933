"""Models are called as users call them, by position or keyword, and one tensor of what they return is used."""

from __future__ import annotations

import dataclasses
import pickle
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from worker.contract.profile import TraceError
from worker.model.export import trace
from worker.model.interface import adapt_model
from worker.model.pytree import flatten_tree, named_leaves

WIDTH = 6
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Output(OrderedDict):
    """As transformers' are: a dataclass that is a dict of what is not None."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: object | None = None

    def __post_init__(self):
        for one in dataclasses.fields(self):
            if (value := getattr(self, one.name)) is not None:
                self[one.name] = value


@dataclasses.dataclass
class Plain:
    hidden: Tensor
    deeper: dict


class Classifier(nn.Module):
    """Takes keywords in an order of its own, keeps a cache unless told not to, and computes its loss."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, values=None, mask=None, labels=None):
        hidden = torch.tanh(self.body(values))
        if mask is not None:
            hidden = hidden * mask
        logits = self.head(hidden)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return Output(loss, logits, (hidden,) if self.config.use_cache else None)


class Returns(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.shape = shape

    def forward(self, x):
        return self.shape(self.body(x))


class CallsItself(Returns):
    def forward(self, x, again=True):
        return (self.forward(2 * x, again=False),) if again else self.body(x)


def batch(rows=4):
    return {
        "values": torch.randn(rows, WIDTH),
        "mask": torch.ones(rows, WIDTH),
        "labels": torch.tensor([0, 1, 2, 0][:rows]),
    }


def by_name(model, given, **how):
    names = sorted(given)
    adapt_model(model, names, **how)
    return trace(model, tuple(given[name] for name in names)), tuple(given[name] for name in names)


def run(traced, inputs):
    (stage,) = traced.cut([]).stages
    order = [int(name.removeprefix("input:")) for name in stage.inputs]
    return stage(*(inputs[k] for k in order))[stage.outputs.index("output")]


def test_a_model_is_called_by_keyword_and_its_own_loss_is_the_output():
    torch.manual_seed(0)
    model, given = Classifier(), batch()
    expected = model(**given).loss
    names = [name for name, _ in model.named_parameters()]
    traced, inputs = by_name(model, given, own_loss=True)
    assert torch.equal(run(traced, inputs), expected)
    assert [name for name, _ in model.named_parameters()] == names
    assert traced.layers == ["body", "head"]


def test_without_labels_the_only_tensor_is_the_output_and_caches_are_off():
    torch.manual_seed(0)
    model, given = Classifier(), batch()
    del given["labels"]
    expected = model(**given).logits
    traced, inputs = by_name(model, given)
    assert torch.equal(run(traced, inputs), expected)


@pytest.mark.parametrize(
    ("shape", "output"),
    [
        (lambda x: {"out": x}, None),
        (lambda x: (x,), None),
        (lambda x: [None, (x, 3)], None),
        (lambda x: Pair(x.sin(), x), "second"),
        (lambda x: Plain(x.sin(), {"last": [x.cos(), x]}), "deeper.last.1"),
        (lambda x: (x.sin(), {"logits": x}), "1.logits"),
        (lambda x: Output(x.sum(), x), "logits"),
    ],
)
def test_one_tensor_of_a_nest_is_the_output(shape, output):
    torch.manual_seed(0)
    model, x = Returns(shape), torch.randn(4, WIDTH)
    expected = model.body(x)
    adapt_model(model, (), output=output)
    assert torch.equal(run(trace(model, (x,)), (x,)), expected)


@pytest.mark.parametrize(
    ("shape", "output"),
    [
        (lambda x: {"a": x.sin(), "b": [x, None, "text"]}, None),
        (lambda x: (x.sin(), (x.cos(), x)), None),
        (lambda x: {"out": x}, "*"),
        (lambda x: Pair(x.sin(), {"deeper": (x, x)}), "second"),
        (lambda x: Plain(x.sin(), {"last": [x.cos(), Pair(x, 3)]}), None),
        (lambda x: Output(x.sum(), x), None),
        (lambda x: Output(None, (x, x.cos())), None),
    ],
)
def test_all_tensors_of_a_nest_come_back_in_its_form(shape, output):
    torch.manual_seed(0)
    model, x = Returns(shape), torch.randn(4, WIDTH)
    expected = shape(model.body(x))
    if output == "second":
        expected = expected.second
    interface = adapt_model(model, (), output=output)
    traced = trace(model, (x,))
    (stage,) = traced.cut([]).stages
    made = stage(x)
    tree_spec = pickle.loads(pickle.dumps(interface.tree_spec))
    found = tree_spec.unflatten([made[at] for at in stage.model_outputs])
    assert type(found) is type(expected)
    names, tensors = zip(*named_leaves(expected), strict=True)
    assert interface.tree_spec.names == names
    found_names, found_tensors = zip(*named_leaves(found), strict=True)
    assert found_names == names and all(map(torch.equal, found_tensors, tensors))
    assert flatten_tree(found)[1] == tree_spec


def test_a_model_that_calls_itself_is_left_alone_inside():
    torch.manual_seed(0)
    model, x = CallsItself(None), torch.randn(4, WIDTH)
    expected = model.body(2 * x)
    adapt_model(model, ())
    assert torch.equal(run(trace(model, (x,)), (x,)), expected)


@pytest.mark.parametrize(
    ("shape", "how", "message"),
    [
        (lambda x: {"a": x, "b": x}, {"output": "b.c"}, r"a \[4, 6\], b \[4, 6\].*named 'b.c'"),
        (lambda x: {"a": x}, {"output": "c"}, "none of them named 'c'"),
        (lambda x: {"a": None}, {}, "dict of no tensors"),
        (lambda x: {"logits": x}, {"own_loss": True}, "has no loss.*give `loss`"),
        (lambda x: {"loss": x}, {"own_loss": True}, "loss is not one number"),
        (lambda x: (x.sum(), x.mean()), {"own_loss": True}, "has no loss.*model.output"),
    ],
)
def test_what_cannot_be_told_apart_is_refused_by_name(shape, how, message):
    model = Returns(shape)
    adapt_model(model, (), **how)
    with pytest.raises(TraceError, match=message):
        trace(model, (torch.randn(4, WIDTH),))


def test_the_only_number_of_a_tuple_is_the_loss():
    torch.manual_seed(0)
    model, x = Returns(lambda x: (x, x.square().mean())), torch.randn(4, WIDTH)
    expected = model(x)[1]
    adapt_model(model, (), own_loss=True)
    assert torch.equal(run(trace(model, (x,)), (x,)), expected)


def test_tensors_of_a_nest_have_dotted_names():
    nest = Plain(torch.ones(1), {"a": [torch.ones(2), None], "b": Pair(torch.ones(3), "text")})
    assert [(name, len(t)) for name, t in named_leaves(nest)] == [
        ("hidden", 1),
        ("deeper.a.0", 2),
        ("deeper.b.first", 3),
    ]
