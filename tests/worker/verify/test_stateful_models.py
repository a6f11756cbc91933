"""Models that keep state which no graph holds differ from their plain model, where nothing refused them before."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.tiers import some_by_day
from tests.worker.actor.test_actor import job
from tests.worker.model import stateful_models
from tests.worker.model.lying_models import WIDTH
from tests.worker.verify import planted_models
from tests.worker.verify.proving import proof_of
from worker.actor import model_host
from worker.contract.failures import AttemptFailure
from worker.model.export import trace

LOSS_DIFFERS = r"step \d+: the loss of microbatch \d is .* in the pipeline and .* in the plain model"
PLAIN_DEVIATES = (
    "; made by the plain model itself, whose forward makes another output than its trace, while all stages "
)


class Points:
    """Numbers, and what is to be made of them."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=draw), torch.randn(WIDTH, generator=draw)


class Dropping(nn.Sequential):
    """In eval mode, as from_pretrained returns a model."""

    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
        self.eval()


def unchecked(factory: str, *, stages: int = 1):
    """A job of a model whose trace nobody compares before training, each stage on a mesh of its own."""
    spec = job(stages=stages, meshes=stages)
    spec["model"] = {"factory": factory}
    spec["data"] = {"factory": f"{__name__}:Points"}
    spec["loss"] = {"factory": "torch.nn:MSELoss"}
    spec["training"] |= {"microbatches": 4, "check_trace": False}
    return spec


MOVING = (
    *("IteratorCounts", "ObjectCounts", "NestedCounts", "ClosureCounts", "DequeCounts", "FirstMean"),
    *("ArrayCounts", "Memory", "MovingMean", "OwnNumpyRandom"),
)
MOVING_ELSEWHERE = (
    *("GlobalCounts", "ClassCounts", "HookCounts", "DefaultCounts", "FunctionCounts", "ListIterator"),
    "CodeGenerator",
)


@pytest.fixture(autouse=True)
def counts_from_zero(monkeypatch):
    """What models count outside of themselves begins anew."""
    monkeypatch.setattr(stateful_models, "CALLS", 0)
    monkeypatch.setattr(stateful_models.counted, "calls", 0)
    monkeypatch.setattr(stateful_models.ClassCounts, "calls", 0)
    monkeypatch.setattr(stateful_models.DefaultCounts.between, "__defaults__", ([0],))
    monkeypatch.setattr(stateful_models._LateBackward, "calls", 0)


@some_by_day("name", MOVING_ELSEWHERE, by_day=1)
def test_a_proof_finds_state_that_moves_elsewhere_than_on_the_model(name):
    found = proof_of(unchecked(f"{stateful_models.__name__}:{name}"), steps=4).difference
    assert found is not None and re.match(LOSS_DIFFERS + PLAIN_DEVIATES, found), found
    assert found.startswith("step 3:")  # of 4 microbatches each: the ninth call


def test_a_proof_finds_a_backward_that_changes_later():
    found = proof_of(unchecked(f"{stateful_models.__name__}:LateBackward"), steps=4).difference
    gradient = r"step 3: the gradient of 'first\.\w+' of stage 0 on m0 differs by .*; it is 0\.3333 times the plain model's"
    assert found is not None and re.match(gradient, found), found


@pytest.mark.slow
def test_a_proof_finds_numbers_of_an_own_generator_that_are_drawn_late():
    found = proof_of(unchecked(f"{planted_models.__name__}:DrawsLate"), steps=4).difference
    assert found is not None and re.match(LOSS_DIFFERS + PLAIN_DEVIATES, found), found
    assert found.startswith("step 3:")


@pytest.mark.slow
def test_a_tensor_that_forward_changes_in_place_is_equal_though_it_is_no_buffer():
    found = proof_of(unchecked(f"{stateful_models.__name__}:MovingMeanInPlace"), steps=4)
    assert found.difference is None


@some_by_day("name", MOVING, by_day=2)
def test_a_proof_finds_state_that_moves(name):
    found = proof_of(unchecked(f"{stateful_models.__name__}:{name}"), steps=4).difference
    assert found is not None and re.match(LOSS_DIFFERS + PLAIN_DEVIATES, found), found


@some_by_day(
    ("name", "seed", "step"), [("OwnRandom", 5, 2), ("RareRandom", 5, 2), ("RareRandom", 0, 31)], by_day=1
)
def test_a_proof_finds_random_numbers_outside_of_torch_that_are_drawn_rarely(name, seed, step):
    """Each forward has a chance of 1 in 50 to differ; the numbers follow from the job's seed, or are the model's own."""
    spec = unchecked(f"{stateful_models.__name__}:{name}")
    spec["training"]["seed"] = seed
    found = proof_of(spec, steps=40).difference
    assert found is not None and re.match(LOSS_DIFFERS + PLAIN_DEVIATES, found), found
    assert found.startswith(f"step {step}:")


def test_a_proof_finds_a_model_that_raises_later():
    found = proof_of(unchecked(f"{stateful_models.__name__}:RaisesLate"), steps=4).difference
    assert found == ("step 3: the plain model raises StopIteration, and the pipeline made this step")


def test_a_proof_finds_a_model_that_was_left_in_eval_mode(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(model_host, "set_modes", lambda model, train: [])
        found = proof_of(unchecked(f"{__name__}:Dropping"), steps=1).difference
    assert found is not None and re.match(LOSS_DIFFERS + PLAIN_DEVIATES, found), found
    assert proof_of(unchecked(f"{__name__}:Dropping"), steps=1).difference is None


def in_mode(model: str, train: str):
    spec = unchecked(f"{planted_models.__name__}:{model}")
    spec["model"]["train"] = train
    return spec


@pytest.mark.parametrize(
    ("model", "train", "message"),
    [
        ("FrozenNorm", "called", LOSS_DIFFERS),
        pytest.param(
            *(
                "PartInEvalMode",
                "as_built",
                "not comparable: the model made 0 of the 2 random calls .* in module '1'",
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_proof_finds_a_part_that_trains_although_it_is_kept_in_eval_mode(
    monkeypatch, model, train, message
):
    def trace_all_in_train_mode(built, *arguments, **options):
        for module in built.modules():
            module.training = True
        return trace(built, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(model_host, "trace", trace_all_in_train_mode)
        found = proof_of(in_mode(model, train), steps=1).difference
    assert found is not None and re.match(message, found), found


@pytest.mark.slow
@pytest.mark.parametrize("train", ["called", "as_built"])
@pytest.mark.parametrize("model", ["FrozenNorm", "PartInEvalMode"])
def test_a_part_in_another_mode_than_the_model_is_equal(model, train):
    assert proof_of(in_mode(model, train), steps=2).difference is None


@pytest.mark.slow
def test_a_derivative_by_torch_func_in_the_models_own_forward_is_equal_in_one_stage_and_refused_in_two():
    model = f"{planted_models.__name__}:Derivative"
    assert proof_of(unchecked(model), steps=2).difference is None
    with pytest.raises(
        AttemptFailure, match=r"cannot trace Derivative, at .*planted_models\.py:\d+.*torch\.func .*stages: 1"
    ):
        proof_of(unchecked(model, stages=2), steps=1)


@pytest.mark.slow
def test_a_norm_that_counts_its_calls_and_is_called_twice_is_equal():
    found = proof_of(unchecked(f"{planted_models.__name__}:SharedCumulativeNorm", stages=2), steps=3)
    assert found.difference is None


@pytest.mark.slow
def test_a_loss_with_parameters_of_its_own_is_refused_by_name():
    spec = unchecked(f"{stateful_models.__name__}:Plain")
    spec["loss"] = {"factory": f"{planted_models.__name__}:WeighedLoss"}
    with pytest.raises(AttemptFailure, match=r"WeighedLoss' has parameters of its own \(log_variance\)"):
        proof_of(spec, steps=1)


@pytest.mark.slow
def test_samples_of_which_every_eighth_is_longer_are_refused_by_name():
    spec = unchecked(f"{stateful_models.__name__}:Plain")
    spec["data"] = {"factory": f"{planted_models.__name__}:LongerByEight"}
    spec["training"] |= {"global_batch": 4}
    found = proof_of(spec, steps=3).difference
    assert found is not None
    assert re.search(r"'.*:LongerByEight' is \[1, 12, 6\] .* cut or pad all samples to one shape", found)
