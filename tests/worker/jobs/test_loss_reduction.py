"""With `loss_reduction: tokens` a batch in unequal microbatches trains as the whole batch at once."""

from __future__ import annotations

import functools

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional

from service.spec.job import JobSpec
from tests.tiers import some_by_day
from tests.worker.actor.test_actor import job
from tests.worker.workers import Workers
from worker.contract.failures import AttemptFailure
from worker.contract.reasons import Reason
from worker.data.sampler import BatchSampler
from worker.model.factory import build_model, call_factory

LENGTH, IGNORED = 8, 7


class Texts:
    """Windows of which a different part is a target; of one in four nothing is."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        tokens = torch.randint(10, 200, (LENGTH,), generator=draw)
        length = 0 if index % 4 == 3 else 1 + index % LENGTH
        return tokens, torch.where(torch.arange(LENGTH) < length, tokens, IGNORED)


def spec_of(**layout):
    spec = job(**layout)
    spec["data"] = {"factory": f"{__name__}:Texts"}
    spec["loss"] = {"factory": "torch.nn:CrossEntropyLoss", "args": {"ignore_index": IGNORED}}
    spec["training"] |= {"microbatches": 4, "loss_reduction": "tokens"}
    return spec


WEIGHTS = [1.0 + token % 5 for token in range(256)]


def weighted(logits, target):
    return functional.cross_entropy(logits, target, weight=torch.tensor(WEIGHTS), ignore_index=IGNORED)


def shifted(logits, target):
    return functional.cross_entropy(logits[..., :-1], target[:, 1:], ignore_index=IGNORED)


def perplexity(logits, target):
    return functional.cross_entropy(logits, target).exp()


def masked_mean(logits, target):
    """Not a number where nothing is a target, and it says what it divides by."""
    losses = functional.cross_entropy(logits, target, reduction="none")
    return (losses * (target != IGNORED)).sum() / (target != IGNORED).sum()


masked_mean.count_targets = lambda target: (target != IGNORED).sum()


class NoTargets(Texts):
    """Nothing is a target."""

    def __getitem__(self, index):
        tokens, target = super().__getitem__(index)
        return tokens, torch.full_like(target, IGNORED)


def whole_batch_losses(
    spec, steps, loss_of=functools.partial(functional.cross_entropy, ignore_index=IGNORED)
):
    """Of a loop that runs each batch at once."""
    training = spec["training"]
    model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=training["seed"])
    data, optimizer = Texts(), torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = BatchSampler(len(data), training["global_batch"], 1, seed=training["seed"])
    found = []
    for step in steps:
        samples = [data[index] for index in sampler.indices(step, 0)]
        tokens, target = (torch.stack(column) for column in zip(*samples, strict=True))
        optimizer.zero_grad()
        loss = loss_of(model(tokens), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training["clip_grad_norm"])
        optimizer.step()
        found.append(loss.item())
    return found


@some_by_day("layout", [{}, {"workers_per_mesh": 2}, {"stages": 1, "meshes": 1}], by_day=1, ids=str)
@some_by_day("recompute", ["all", "none"], by_day=1)
def test_microbatches_of_unequal_tokens_train_as_the_whole_batch(layout, recompute):
    spec = spec_of(**layout)
    spec["pipeline"]["recompute"] = recompute
    expected = whole_batch_losses(spec, range(1, 5))
    with Workers(spec) as run:
        assert run.losses(range(1, 5)) == pytest.approx(expected, rel=1e-5)


CLASS_WEIGHTS = {"weight": {"factory": "torch:tensor", "args": {"data": WEIGHTS}}, "ignore_index": IGNORED}


@some_by_day(
    ("loss", "plain"),
    [
        ({"factory": "torch.nn:CrossEntropyLoss", "args": CLASS_WEIGHTS}, weighted),
        ({"factory": f"{__name__}:masked_mean"}, masked_mean),
    ],
    by_day=1,
    ids=["class weights", "a mean that says its count"],
)
def test_a_loss_that_divides_by_something_else_trains_as_the_whole_batch(loss, plain):
    """One of four microbatches may have no target: the mean of nothing is not called."""
    spec = spec_of() | {"loss": loss}
    expected = whole_batch_losses(spec, range(1, 4), plain)
    with Workers(spec) as run:
        assert run.losses(range(1, 4)) == pytest.approx(expected, rel=1e-5)


@some_by_day(
    ("reduction", "message"),
    [("tokens", "the loss counts otherwise"), ("mean", "loss_reduction is mean, and the loss of a batch")],
    by_day=1,
)
def test_a_loss_whose_parts_are_not_the_batch_is_refused_before_training(reduction, message):
    spec = spec_of() | {"loss": {"factory": f"{__name__}:shifted"}}
    spec["training"]["loss_reduction"] = reduction
    with pytest.raises(AttemptFailure, match=message) as refused, Workers(spec):
        pass
    assert refused.value.reason is Reason.MODEL_BUILD_FAILED


def test_microbatches_that_shall_be_batches_of_their_own_train_as_a_loop_that_accumulates():
    spec = job(loss={"factory": f"{__name__}:perplexity"})
    spec["training"]["loss_reduction"] = "microbatches"
    with Workers(spec) as run:
        (first,) = run.losses([1])
    data = call_factory(spec["data"]["factory"], spec["data"]["args"])
    sampler = BatchSampler(len(data), 8, 2, seed=spec["training"]["seed"])
    model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=spec["training"]["seed"])
    parts = []
    for microbatch in range(2):
        samples = [data[index] for index in sampler.indices(1, microbatch)]
        tokens, target = (torch.stack(column) for column in zip(*samples, strict=True))
        parts.append(perplexity(model(tokens), target).item())
    assert first == pytest.approx(sum(parts) / 2, rel=1e-5)


@pytest.mark.slow
def test_a_step_without_any_target_changes_nothing_and_says_so():
    spec = spec_of() | {"data": {"factory": f"{__name__}:NoTargets"}}
    spec["optimizer"] = {"factory": "torch.optim:SGD", "args": {"lr": 0.1}}
    with Workers(spec) as run:
        before = run.call(
            lambda worker: {n: p.clone() for n, p in worker.engine.state()["parameters"].items()}
        )
        told = run.step(1)
        after = run.call(lambda worker: worker.engine.state()["parameters"])
    assert [(step.without_targets, len(step.losses)) for step in told if step.losses] == [(4, 4)]
    assert all(
        torch.equal(old[name], new[name]) for old, new in zip(before, after, strict=True) for name in old
    )


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (None, "tells no targets to count: give `loss`"),
        ({"factory": "torch.nn:CrossEntropyLoss", "args": {"reduction": "sum"}}, "is 'sum': leave it out"),
    ],
)
def test_what_cannot_be_weighed_is_refused(loss, message):
    spec = spec_of() | {"loss": loss}
    with pytest.raises(ValidationError, match=message):
        JobSpec.model_validate(spec)
