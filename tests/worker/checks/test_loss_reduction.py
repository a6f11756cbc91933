"""Losses whose parts are tried beside the whole: those that train as the batch does pass, all others are refused."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.actor.optimizer import ignored_target, make_loss, target_counter
from worker.checks import loss_reduction
from worker.checks.loss_reduction import LossReductionError, check_loss_reduction, check_own_loss
from worker.contract.job import Factory, Job
from worker.model.pytree import Targets

IGNORED = -100
DRAW = torch.Generator().manual_seed(3)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=DRAW)


def texts(rows: int = 4, length: int = 7, classes: int = 9) -> tuple[tuple[Tensor], Tensor]:
    draw = torch.Generator().manual_seed(length)  # the same in whatever order tests run
    target = torch.randint(classes, (rows, length), generator=draw)
    return (torch.randn(rows, length, classes, generator=draw),), target


def token_loss(logits: Tensor, target: Tensor, **options) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), **options)


# The losses of public repositories' kinds: of images and rows, of pairs and triplets, of sets and of sequences.


def focal(logits: Tensor, target: Tensor) -> Tensor:
    likely = functional.log_softmax(logits, -1).gather(-1, target[:, None])[:, 0]
    return (-((1 - likely.exp()) ** 2) * likely).mean()


def dice_of_the_batch(logits: Tensor, target: Tensor) -> Tensor:
    found = logits.sigmoid()
    return 1 - (2 * (found * target).sum() + 1) / (found.sum() + target.sum() + 1)


def dice_of_each_sample(logits: Tensor, target: Tensor) -> Tensor:
    found = logits.sigmoid()
    return (1 - (2 * (found * target).sum(1) + 1) / (found.sum(1) + target.sum(1) + 1)).mean()


def ctc(logits: Tensor, target: Tensor) -> Tensor:
    steps, rows = logits.shape[1], len(logits)
    spoken = logits.log_softmax(-1).transpose(0, 1)
    lengths = torch.full((rows,), steps), torch.full((rows,), target.shape[1])
    return functional.ctc_loss(spoken, target, *lengths)


def contrastive(left_and_right: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    left, right = (functional.normalize(one, dim=-1) for one in left_and_right)
    return functional.cross_entropy(left @ right.T / 0.1, torch.arange(len(left)))


def ranking(first_and_second: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    first, second = first_and_second
    return functional.margin_ranking_loss(first[:, 0], second[:, 0], target[:, 0].sign(), margin=0.3)


def cosine(first_and_second: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return functional.cosine_embedding_loss(*first_and_second, target[:, 0].sign(), margin=0.2)


def perplexity(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits, target).exp()


ROWS = (normal(8, 5),), torch.randint(5, (8,), generator=DRAW)
REAL = (normal(8, 5),), normal(8, 5)
BITS = (normal(8, 5),), (normal(8, 5) > 0).float()
PAIRS = (normal(8, 5), normal(8, 5)), normal(8, 1)
SPOKEN = (normal(6, 9, 5),), torch.randint(1, 5, (6, 3), generator=DRAW)
LOGS = (normal(8, 5).log_softmax(-1),), normal(8, 5).softmax(-1)
WEIGHTS = torch.tensor([1.0, 5.0, 0.5, 2.0, 3.0])
MEANS = {
    "focal": (focal, ROWS),
    "dice of each sample": (dice_of_each_sample, BITS),
    "ctc": (ctc, SPOKEN),
    "margin ranking": (ranking, PAIRS),
    "BCE with pos_weight": (
        functools.partial(functional.binary_cross_entropy_with_logits, pos_weight=WEIGHTS),
        BITS,
    ),
    "huber": (functional.huber_loss, REAL),
    "KL batchmean": (functools.partial(functional.kl_div, reduction="batchmean"), LOGS),
    "cosine embedding": (cosine, PAIRS),
    "cross entropy": (functional.cross_entropy, ROWS),
    "label smoothing": (functools.partial(functional.cross_entropy, label_smoothing=0.2), ROWS),
    "a row of several": (functional.mse_loss, ((normal(16, 5),), normal(8, 2, 5))),
}
OTHERS = {
    "dice of the batch": (dice_of_the_batch, BITS),
    "contrastive": (contrastive, PAIRS),
    "perplexity": (perplexity, ROWS),
    "class weights": (functools.partial(functional.cross_entropy, weight=WEIGHTS), ROWS),
    "an ignored class": (functools.partial(functional.cross_entropy, ignore_index=int(ROWS[1][0])), ROWS),
    "the root of a mean": (lambda output, target: functional.mse_loss(output, target).sqrt(), REAL),
}


def flattened(loss, output: Tensor, target: Tensor) -> Tensor:
    return (
        loss(output.view(target.shape), target)
        if output.shape[0] != target.shape[0]
        else loss(output, target)
    )


@pytest.mark.parametrize("name", MEANS)
def test_a_loss_that_is_the_mean_of_its_samples_passes(name: str):
    loss, rows = MEANS[name]
    called = functools.partial(flattened, loss) if name == "a row of several" else loss
    assert check_loss_reduction(called, [rows], count=None) == []


@pytest.mark.parametrize("name", OTHERS)
def test_a_loss_that_is_no_mean_of_its_samples_is_refused_with_both_values(name: str):
    loss, rows = OTHERS[name]
    with pytest.raises(LossReductionError, match=r"loss_reduction is mean.*tokens.*microbatches") as refused:
        check_loss_reduction(loss, [rows], count=None)
    output, target = rows
    whole = loss(output if len(output) > 1 else output[0], target)
    assert f"{float(whole):.6g}" in str(refused.value)


def test_a_sum_is_called_a_sum():
    with pytest.raises(LossReductionError, match="it adds up its samples; have it return their mean"):
        check_loss_reduction(functools.partial(functional.mse_loss, reduction="sum"), [REAL], count=None)


def test_microbatches_that_differ_are_tried_together():
    """Of one microbatch both halves have as many targets; of two they have not."""
    (output,), target = texts()
    halves = target.clone()
    halves[:, 3:] = IGNORED
    assert check_loss_reduction(token_loss, [((output,), target)], count=None) == []
    with pytest.raises(LossReductionError, match="mean"):
        check_loss_reduction(token_loss, [((output,), target), ((output + 1,), halves)], count=None)


def test_so_many_microbatches_are_tried_together_as_there_is_memory_for(monkeypatch):
    (output,), target = texts()
    halves = target.clone()
    halves[:, 3:] = IGNORED
    seen = [((output,), target), ((output + 1,), halves)]
    monkeypatch.setattr(loss_reduction, "MOST_BYTES", output.nbytes + target.nbytes - 1)
    assert check_loss_reduction(token_loss, seen, count=None) == [], "the second is left out"
    monkeypatch.setattr(loss_reduction, "MOST_BYTES", output.nbytes + target.nbytes)
    with pytest.raises(LossReductionError):
        check_loss_reduction(token_loss, seen, count=None)


# By targets: the weights are those of the job's loss


def of_tokens(loss, rows, count, ignored=IGNORED) -> list[str]:
    return check_loss_reduction(loss, [rows], count=count, ignored=ignored)


def counter(factory: str, **arguments):
    """The loss and the weights of a job."""
    spec = Factory(factory, arguments)
    training = {"loss_reduction": "tokens", "steps": 1, "global_batch": 8, "microbatches": 2}
    job = Job.from_json(JOB | {"loss": {"factory": factory, "args": arguments}, "training": training})
    loss = make_loss(spec)
    return loss, target_counter(job, loss), ignored_target(spec)


JOB = {
    "model": {"factory": "torch.nn:Linear"},
    "data": {"factory": "a:b"},
    "optimizer": {"factory": "torch.optim:SGD"},
    "pipeline": {},
    "resources": {},
}
CLASS_WEIGHTS = {"factory": "torch:tensor", "args": {"data": [1.0, 5.0, 0.5, 2.0, 3.0]}}


@pytest.mark.parametrize("factory", ["torch.nn:CrossEntropyLoss", "torch.nn.functional:cross_entropy"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"label_smoothing": 0.1},
        {"ignore_index": 2},
        {"weight": CLASS_WEIGHTS},
        {"weight": CLASS_WEIGHTS, "ignore_index": 2, "label_smoothing": 0.1},
    ],
    ids=str,
)
def test_cross_entropy_weighs_as_torch_divides(factory: str, arguments: dict):
    loss, count, ignored = counter(factory, **arguments)
    assert of_tokens(loss, ROWS, count, ignored) == []


def shifted(logits: Tensor, target: Tensor) -> Tensor:
    return token_loss(logits[:, :-1], target[:, 1:])


def counted_shifted(logits: Tensor, target: Tensor) -> Tensor:
    return shifted(logits, target)


counted_shifted.count_targets = lambda target: (target[:, 1:] != IGNORED).sum()


class Masked(nn.Module):
    """The mean over what is no padding, which says so."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        mask = target > 0
        losses = functional.cross_entropy(
            logits.flatten(0, 1), target.clamp(min=0).flatten(), reduction="none"
        )
        return (losses * mask.flatten()).sum() / mask.sum()

    def count_targets(self, target: Tensor) -> Tensor:
        return (target > 0).sum()


def test_labels_that_the_loss_shifts_are_counted_otherwise_and_refused():
    loss, count, ignored = counter(f"{__name__}:shifted")
    with pytest.raises(LossReductionError, match=r"tokens.*count_targets\(target\)"):
        of_tokens(loss, texts(length=512), count, ignored)


@pytest.mark.parametrize("factory", ["counted_shifted", "Masked"])
def test_a_loss_that_says_its_count_is_weighed_by_it(factory: str):
    loss, count, ignored = counter(f"{__name__}:{factory}")
    assert of_tokens(loss, texts(), count, ignored) == []


def test_a_mask_of_its_own_is_refused_without_a_count():
    def masked(logits: Tensor, target: Tensor) -> Tensor:
        return Masked()(logits, target)

    with pytest.raises(LossReductionError, match="counts otherwise"):
        of_tokens(masked, texts(), lambda target: (target != IGNORED).sum())


def test_an_ignored_value_of_its_own_is_refused():
    own = functools.partial(token_loss, ignore_index=int(texts()[1][0, 0]))
    with pytest.raises(LossReductionError, match="counts otherwise"):
        of_tokens(own, texts(), lambda target: (target != IGNORED).sum())


# What cannot be tried is said


def test_a_loss_that_draws_is_not_compared_and_that_is_said():
    def drawn(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(functional.dropout(output), target)

    (note,) = check_loss_reduction(drawn, [REAL], count=None)
    assert "draws random numbers" in note


def test_a_loss_that_is_not_finite_is_left_to_training_and_that_is_said():
    def nothing(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target) / (len(output) - 4)

    (note,) = check_loss_reduction(nothing, [REAL], count=None)
    assert "not finite" in note


@pytest.mark.parametrize("count", [None, torch.numel], ids=["mean", "tokens"])
def test_a_loss_that_is_no_number_draws_nothing(count):
    (note,) = check_loss_reduction(lambda output, target: output.mean() * math.nan, [REAL], count=count)
    assert "not finite" in note


def test_outputs_without_rows_are_not_tried_and_that_is_said():
    (note,) = check_loss_reduction(lambda output, target: output, [((torch.ones(()),), REAL[1])], count=None)
    assert "no rows of samples" in note


def test_several_targets_are_taken_in_parts_as_one():
    def both(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return functional.mse_loss(output, target["a"]) + functional.mse_loss(output, target["b"])

    target = Targets.of({"a": normal(8, 5), "b": normal(8, 5)})
    loss = lambda output, targets: both(output, targets.target)  # noqa: E731
    assert check_loss_reduction(loss, [(REAL[0], target)], count=None) == []


def test_half_precision_is_compared_in_float32():
    (output,), target = ROWS
    assert check_loss_reduction(functional.cross_entropy, [((output.bfloat16(),), target)], count=None) == []


def test_a_loss_that_halves_break_is_not_tried_and_that_is_said():
    (note,) = check_loss_reduction(lambda output, target: output[7].mean(), [REAL], count=None)
    assert note == (
        "the loss was not tried on parts of a batch: of them it raises IndexError: index 7 is out of bounds for dimension 0 "
        "with size 4"
    )


def test_one_row_is_not_tried_and_that_is_said():
    (note,) = check_loss_reduction(functional.mse_loss, [((normal(1, 5),), normal(1, 5))], count=None)
    assert note == "the loss was not tried on parts of a batch: there is one row only"


# A model that returns its own loss


class OwnLoss(nn.Module):
    """The mean over the targets that are not ignored, with dropout, a running statistic and a count of its calls."""

    def __init__(self, noise: float = 0.0, fails: bool = False) -> None:
        super().__init__()
        self.drop, self.norm, self.calls = nn.Dropout(0.5), nn.BatchNorm1d(5), 0
        self.noise, self.fails = noise, fails

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        if self.fails and not self.training:
            raise RuntimeError("trains only")
        logits = self.norm(self.drop(x)) + self.noise * torch.randn(len(x), 1).expand_as(x).cumsum(1)
        return functional.cross_entropy(logits, labels)


def own_rows(ignored: int = 0) -> list:
    labels = ROWS[1].clone()
    labels[:ignored] = IGNORED
    return [((ROWS[0][0], labels), torch.zeros(len(labels)))]


def test_a_models_own_mean_of_its_samples_passes_and_the_model_is_as_it_was():
    model = OwnLoss()
    assert check_own_loss(model, own_rows()) == []
    assert model.training and model.drop.training and model.calls == 0


def test_a_models_own_mean_of_unequal_targets_is_refused_with_both_ways_out():
    with pytest.raises(
        LossReductionError, match=r"is mean.*model\.output.*loss_reduction: tokens.*microbatches"
    ):
        check_own_loss(OwnLoss(), own_rows(ignored=3))


def test_a_model_whose_own_loss_cannot_be_compared_is_noted_with_the_reason():
    (drawn,) = check_own_loss(OwnLoss(noise=1.0), own_rows())
    assert "it draws random numbers (of the model in eval mode)" in drawn
    (failed,) = check_own_loss(OwnLoss(fails=True), own_rows())
    assert "of them it raises RuntimeError: trains only (of the model in eval mode)" in failed
    (endless,) = check_own_loss(OwnLoss(), own_rows(ignored=4))
    assert "not finite" in endless
