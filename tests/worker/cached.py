"""What many jobs of a process have in common is traced, compared and measured once: a fixture for files of whole jobs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from worker.actor.model_host import JobModel
from worker.actor.prepared import PreparedWorker
from worker.checks import trace
from worker.contract.job import Job
from worker.model.serialization import deserialize_model, serialize_model


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of one model in one precision share its graphs, their comparison with it in the fewest rounds, and the costs of
    its layers. A graph goes from job to job as it goes from worker to worker."""
    monkeypatch.setattr(trace, "ROUNDS", trace.LEAST_ROUNDS)
    for owner, name, instead in (
        (JobModel, "_trace", _graph_once),
        (JobModel, "_trace_in_eval_mode", _graph_once),
        (JobModel, "_check_trace", _compared_once),
        (PreparedWorker, "profile", _profiled_once),
    ):
        known = functools.partial(instead, getattr(owner, name), _KNOWN.setdefault(name, {}))
        monkeypatch.setattr(owner, name, functools.partialmethod(_method, known))


_KNOWN: dict[str, dict[tuple, Any]] = {}
"""What jobs share, by what is replaced."""


def _method(self: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(self, *arguments)


def _key(job: Job, tensors: Iterable[torch.Tensor]) -> tuple:
    of = job.training
    shapes = tuple((tuple(x.shape), x.dtype) for x in tensors)
    return repr((job.model, job.loss, job.data, of.seed)), of.precision, of.transfers, shapes


def _graph_once(
    trace: Callable[..., Any], known: dict, host: JobModel, sample: tuple[torch.Tensor, ...]
) -> Any:
    key = _key(host._job, sample)
    if key not in known:
        found = trace(host, sample)
        known[key] = serialize_model(found), found.notes
        return found
    graph, notes = known[key]
    found = replace(deserialize_model(graph), notes=notes)
    tensors = found.placed.tensors
    for name in tensors:
        if tensors.shape(name).is_meta:
            tensors._known[name] = host._built.get_parameter(name)
    host._interface.tree_spec = found.tree_spec
    return found


def _compared_once(
    compare: Callable[..., Any], known: dict, host: JobModel, traced: Any, *others: Any
) -> Any:
    key = _key(host._job, traced.example_inputs)
    if key not in known:
        known[key] = compare(host, traced, *others)
    return known[key]


def _profiled_once(
    profile: Callable[..., Any],
    known: dict,
    worker: PreparedWorker,
    microbatches: int | None = None,
    length: int | None = None,
) -> Any:
    worker.set_microbatches(microbatches)
    job = worker.job
    key = (
        _key(job, worker.batches.sample[0]),
        job.tp_size(worker.mesh),
        repr(job.resources.tensor_plan),
        length,
    )
    if key not in known:
        known[key] = profile(worker, microbatches, length)
    return known[key]
