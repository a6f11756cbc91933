"""Streams whose samples have unequal lengths train as a loop over the samples one by one, in the order of the stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.tiers import some_by_day
from tests.worker.cached import traced_once  # noqa: F401 (used by every test)
from tests.worker.jobs.test_unequal_lengths import PlainLoop, assert_equal_parameters, parameters_of
from tests.worker.unequal_texts import StatefulTextStream, TextStream, streamed_texts, unequal_job
from tests.worker.workers import Workers
from worker.checkpoint.format import finish_checkpoint

STEPS = range(1, 6)
"""Their samples are of four epochs, and no step but the third ends where one does."""
STREAMS = {kind.__name__: kind for kind in (TextStream, StatefulTextStream, streamed_texts)}


def epochs(kind: Any) -> Iterator[Any]:
    """The samples of one epoch after the other; a generator gives each the same."""
    for epoch in itertools.count():
        stream = kind()
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(epoch)
        yield from stream


class StreamLoop(PlainLoop):
    """The plain loop over a stream."""

    def __init__(self, spec: dict[str, Any]):
        super().__init__(spec)
        self._following = epochs(STREAMS[spec["data"]["factory"].partition(":")[2]])

    def _samples(self, step: int) -> list[Any]:
        return list(itertools.islice(self._following, self._training["global_batch"]))


def stream_job(kind: str, **layout: Any) -> dict[str, Any]:
    spec = unequal_job(**layout)
    spec["data"]["factory"] = f"tests.worker.unequal_texts:{kind}"
    return spec


LAYOUTS = [{"stages": 3, "workers": 2}, {"stages": 2, "workers": 1}, {"stages": 1, "workers": 2}]


@some_by_day("layout", LAYOUTS, by_day=1, ids=str)
@some_by_day("kind", list(STREAMS), by_day=2)
def test_losses_and_parameters_are_those_of_a_loop_over_single_samples_of_the_stream(kind, layout):
    spec = stream_job(kind, **layout)
    expected = StreamLoop(spec).train(STEPS)
    with Workers(spec) as run:
        assert run.losses(STEPS) == pytest.approx(expected.losses, rel=1e-5)
        assert_equal_parameters(run, expected.model, 1e-5)


@some_by_day("kind", list(STREAMS), by_day=2)
@some_by_day("layout", [{"stages": 3, "workers": 1}, {"stages": 2, "workers": 2}], by_day=1, ids=str)
def test_a_stream_that_is_interrupted_within_an_epoch_goes_on_to_the_bit(tmp_path, kind, layout):
    spec = stream_job(kind, **layout)
    spec["model"]["args"]["dropout"] = 0.1
    uri = str(tmp_path)
    with Workers(spec) as run:
        losses = run.losses(STEPS)
        expected = parameters_of(run)
    with Workers(spec) as run:
        assert run.losses(range(1, 3)) == losses[:2]
        run.call(lambda worker: worker.save(uri, 2))
        finish_checkpoint(uri, step=2, shards=sorted({worker.mesh for worker in run.workers}), keep=1)
    with Workers(spec) as run:
        assert set(run.call(lambda worker: worker.restore(uri))) == {2}
        assert run.losses(range(3, 6)) == losses[2:]
        found = parameters_of(run)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_stream_that_stops_ends_behind_its_last_whole_batch():
    """Of 45 samples, two batches of 20."""
    spec = stream_job("TextStream", stages=2)
    spec["training"]["global_batch"] = 20
    spec["data"]["at_end"] = "stop"
    expected = StreamLoop(spec).train(range(1, 3))
    with Workers(spec) as run:
        assert set(run.call(lambda worker: worker.has_data(1))) == {True}
        assert run.losses(range(1, 3)) == pytest.approx(expected.losses, rel=1e-5)
        assert set(run.call(lambda worker: worker.has_data(3))) == {False}


@pytest.mark.slow
def test_a_loader_process_reads_the_same_microbatches_of_a_stream():
    spec = stream_job("TextStream", stages=2)
    expected = StreamLoop(spec).train(range(1, 4))
    spec["data"]["loader"] = {"workers": 1}
    with Workers(spec) as run:
        assert run.losses(range(1, 4)) == pytest.approx(expected.losses, rel=1e-5)


def test_an_evaluation_of_a_stream_is_the_mean_over_the_tokens_of_its_first_batches():
    data = {
        "factory": "tests.worker.unequal_texts:TextStream",
        "lengths": {"buckets": [unequal_job()["data"]["lengths"]["buckets"][-1]]},
    }
    spec = stream_job("TextStream", stages=2, workers=2, evaluation={"data": data, "steps": 1})
    plain = StreamLoop(spec).train(range(1, 3))
    with torch.no_grad():
        samples = list(itertools.islice(epochs(TextStream), 30))
        parts = [(tokens[None], target[None]) for tokens, target in samples]
        expected = sum(plain._loss(part).item() for part in parts) / sum(len(target) for _, target in samples)
    with Workers(spec) as run:
        run.losses(range(1, 3))
        assert run.evaluate().loss == pytest.approx(expected, rel=1e-5)
