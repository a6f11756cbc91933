"""A loss may return metrics by name: means over microbatches and workers, weighed as the loss is; else refused by name."""

from __future__ import annotations

import pytest
import torch

from tests.tiers import some_by_day
from tests.worker.actor.test_actor import job
from tests.worker.jobs.test_loss_reduction import IGNORED, Texts, spec_of
from tests.worker.workers import Workers
from worker.actor.loss import JobLoss
from worker.actor.optimizer import make_loss
from worker.actor.step_result import WorkerStep
from worker.contract.failures import AttemptFailure
from worker.contract.job import Factory
from worker.contract.reasons import Reason
from worker.data.sampler import BatchSampler, collate
from worker.driver.step_measurement import mean_metrics
from worker.model.factory import build_model, call_factory


def with_metrics(output, target, ignore_index=-100):
    """Cross entropy, how often the largest is right (as a tensor) and the largest output (as a number)."""
    counted = target != ignore_index
    right = (output.argmax(1) == target)[counted].float().mean()
    loss = torch.nn.functional.cross_entropy(output, target, ignore_index=ignore_index)
    return loss, {"accuracy": right, "nested.largest-1": output.detach().max().item()}


def first_step(spec, data, microbatches):
    """Loss and metrics of the first step of the whole model: the means of its microbatches."""
    training = spec["training"]
    model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=training["seed"])
    sampler = BatchSampler(len(data), training["global_batch"], microbatches, seed=training["seed"])
    found = []
    for m in range(microbatches):
        (tokens,), target = collate([data[index] for index in sampler.indices(1, m)])
        loss, metrics = with_metrics(model(tokens), target, **spec["loss"].get("args", {}))
        found.append({"loss": float(loss.detach()), **{k: float(v) for k, v in metrics.items()}})
    return {name: sum(one[name] for one in found) / microbatches for name in found[0]}


@some_by_day("layout", [{}, {"workers_per_mesh": 2}, {"stages": 1, "meshes": 1}], ids=str, by_day=1)
@some_by_day("recompute", ["all", "none"], by_day=1)
def test_metrics_are_the_means_over_microbatches_and_workers(layout, recompute):
    spec = job(**layout, loss={"factory": f"{__name__}:with_metrics"})
    spec["pipeline"]["recompute"] = recompute
    data = call_factory(spec["data"]["factory"], spec["data"]["args"])
    expected = first_step(spec, data, 2 * layout.get("workers_per_mesh", 1))
    with Workers(spec) as run:
        results = run.step(1)
        metrics = mean_metrics(results)
        assert {len(values) for r in results for values in r.metrics.values()} == {2}
        losses = [loss for result in results for loss in result.losses]
        assert {"loss": sum(losses) / len(losses), **metrics} == pytest.approx(expected, rel=1e-5)
        assert mean_metrics(run.step(2)) != metrics


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"workers_per_mesh": 2}], ids=str)
def test_metrics_are_weighed_by_tokens_as_the_loss_is(layout):
    spec = spec_of(**layout)
    spec["loss"] = {"factory": f"{__name__}:with_metrics", "args": {"ignore_index": IGNORED}}
    expected = first_step(spec, Texts(), 1)
    with Workers(spec) as run:
        metrics = mean_metrics(run.step(1))
    assert metrics["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-5)


@pytest.mark.slow
def test_a_loss_without_metrics_has_none():
    with Workers(job()) as run:
        assert mean_metrics(run.step(1)) == {}


OUTPUT, TARGET = torch.ones(2, 3), torch.zeros(2, 3)


def returns(metrics):
    return JobLoss("mine:loss", lambda output, target: (output.mean(), metrics))


@pytest.mark.parametrize("name", ["", "a b", "1st", "ä", "a\n", "x" * 65, "loss", "a/b", 7, 'a"b'])
def test_a_name_that_no_series_could_have_is_refused_by_name(name):
    with pytest.raises(ValueError, match=r"loss 'mine:loss' returned a metric named .*: a name has up to 64"):
        returns({name: 1.0})(OUTPUT, TARGET)


def test_more_metrics_than_are_kept_are_refused():
    names = {f"m{i}": 1.0 for i in range(33)}
    with pytest.raises(ValueError, match="returned 33 metrics, the limit is 32"):
        returns(names)(OUTPUT, TARGET)
    names.popitem()
    assert returns(names).with_metrics(OUTPUT, TARGET)[1] == names


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (OUTPUT, r"metric 'a' has shape \(2, 3\)"),
        ("x", "metric 'a' is a str"),
        (None, "metric 'a' is a NoneType"),
        (torch.tensor(1j), "complex64"),
    ],
)
def test_a_metric_that_is_no_single_number_is_refused_by_name(value, found):
    with pytest.raises(TypeError, match=found):
        returns({"a": value})(OUTPUT, TARGET)


def test_a_loss_with_metrics_is_still_to_be_one_number():
    loss = JobLoss("mine:loss", lambda output, target: (output, {"a": 1.0}))
    with pytest.raises(TypeError, match=r"returned shape \(2, 3\), not one number"):
        loss(OUTPUT, TARGET)


def test_names_that_change_between_microbatches_are_refused():
    calls = iter([{"a": 1.0}, {"b": 1.0}])
    loss = JobLoss("mine:loss", lambda output, target: (output.mean(), next(calls)))
    loss(OUTPUT, TARGET)
    with pytest.raises(ValueError, match="returned the metrics b, and before a: return the same names"):
        loss(OUTPUT, TARGET)


def test_names_that_differ_between_workers_are_refused():
    results = [
        WorkerStep([], losses=[1.0], metrics={"a": [1.0]}),
        WorkerStep([]),
        WorkerStep([], losses=[1.0]),
    ]
    with pytest.raises(AttemptFailure, match="metrics a on one worker and none on another") as failed:
        mean_metrics(results)
    assert failed.value.reason is Reason.USER_CODE_RAISED


def test_a_class_of_losses_may_return_metrics_too(monkeypatch):
    class Loss(torch.nn.Module):
        def forward(self, output, target):
            return output.mean(), {"a": output.sum()}

    monkeypatch.setattr("worker.actor.optimizer.resolve", lambda path: Loss)
    monkeypatch.setattr("worker.actor.optimizer.call_factory", lambda path, arguments: Loss())
    assert make_loss(Factory("mine:Loss")).with_metrics(OUTPUT, TARGET)[1] == {"a": 6.0}
