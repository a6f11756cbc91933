"""A job's model as its factory makes it, with the parts frozen that the job names, and the names of all groups checked.

For the worker that traces, and for the plain model that a pipeline is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from worker.job import Job
from worker.model.factory import build_model
from worker.model.patterns import check_matched, matches
from worker.model.suspects import check_trainable
from worker.model.tracing import aliases_of
from worker.parameter_groups import check_groups
from worker.weights.record import ModelRecord, record_of
from worker.weights.start import check_weights


@dataclass(frozen=True)
class BuiltModel:
    """A model, and its record from before anything was changed in it."""

    model: nn.Module
    record: ModelRecord


def build_job_model(job: Job) -> BuiltModel:
    """The model of `job` with its initial weights, those of model.weights not among them; ModelError for what is wrong.

    What is frozen takes no gradient. Weights, patterns of frozen parameters and of optimizer groups have been compared
    with the model's names.
    """
    spec = job.model
    model = build_model(spec.factory, spec.args, seed=job.training.seed)
    built = BuiltModel(model, record_of(model))
    names, aliases = [name for name, _ in model.named_parameters()], aliases_of(model)
    check_matched("model.freeze", spec.freeze, names, aliases)
    for name, parameter in model.named_parameters():
        if any(matches(pattern, name) for pattern in spec.freeze):
            parameter.requires_grad_(False)
    check_trainable(model)
    check_groups(
        job.optimizer.groups, [name for name, p in model.named_parameters() if p.requires_grad], aliases
    )
    if spec.weights:
        check_weights(spec.weights, built.record)
    return built
