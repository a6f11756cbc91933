"""A job as a plain loop of torch trains it: the whole model in one process, one microbatch after the other.

What whole jobs are compared with. It reads samples and builds the model as the job names them, and has nothing of the
product's model, engine, optimizer or driver.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from worker.data.sampler import BatchSampler, SequentialSampler, collate, read_sample
from worker.engine.optim import grad_scaler
from worker.model.factory import build_model, call_factory, resolve

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class PlainRun:
    """What each step of a plain run was, and the model behind it."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)
    """The mean loss of each step."""
    rates: list[float] = field(default_factory=list)
    """The learning rate that each step was made with."""
    scales: list[tuple[float, bool]] = field(default_factory=list)
    """With fp16: the loss scale of each step, and whether it overflowed and was skipped."""


class PlainJob:
    """One job's plain loop. `shares` is the number of workers that share a microbatch where that shows: a loss that is a
    mean over what rows have unlike numbers of is then a mean of the workers' own."""

    def __init__(self, spec: Mapping[str, Any], *, shares: int = 1):
        self._spec, self._shares = spec, shares
        training = self._training = spec["training"]
        self._seed = training["seed"]
        self.model = build_model(spec["model"]["factory"], spec["model"].get("args", {}), seed=self._seed)
        if spec["model"].get("train") != "as_built":
            self.model.train()
        self._modes = {module: module.training for module in self.model.modules()}
        for name, parameter in self.model.named_parameters():
            if _matches(spec["model"].get("freeze", []), name):
                parameter.requires_grad_(False)
        self._data = _data_set(spec["data"])
        if streams := not hasattr(self._data, "__getitem__"):
            self._data = list(self._data)
        sampler = SequentialSampler if streams else BatchSampler
        self._sampler = sampler(
            len(self._data), training["global_batch"], training["microbatches"], seed=self._seed
        )
        self._loss = spec.get("loss") and _loss_function(spec["loss"])
        self._precision = AUTOCAST.get(training.get("precision", "fp32"))
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        of = spec["optimizer"]
        self._optimizer = resolve(of["factory"])(
            self._groups(of.get("groups") or []) or self._parameters, **of.get("args", {})
        )
        schedule = of.get("schedule")
        self._schedule = schedule and resolve(schedule["factory"])(
            self._optimizer, **schedule.get("args", {})
        )
        self._scaler = torch.amp.GradScaler(
            "cpu",
            **training.get("loss_scaling") or {},
            growth_interval=grad_scaler.GROWTH_INTERVAL,
            enabled=self._precision is torch.float16,
        )
        self.run = PlainRun(self.model)

    def train(self, steps: Sequence[int]) -> PlainRun:
        """Go on through the numbered steps."""
        for step in steps:
            self._step(step)
        return self.run

    def evaluate(self) -> float:
        """The mean loss of the job's evaluation, in eval mode, batch by batch as it is trained."""
        evaluation, training = self._spec["evaluation"], self._training
        data = _data_set(evaluation["data"])
        size = training["global_batch"] // training["microbatches"]
        count = evaluation.get("steps") or len(data) // training["global_batch"]
        losses = []
        self.model.eval()
        with torch.no_grad():
            for begin in range(0, count * training["global_batch"], size):
                samples = [read_sample(data, i, seed=self._seed, step=0) for i in range(begin, begin + size)]
                losses.append(self._loss_of(collate(samples))[0].item())
        for module, mode in self._modes.items():
            module.training = mode
        return sum(losses) / len(losses)

    def _groups(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The trained parameters by the first group that matches their name, behind those that none does."""
        if not groups:
            return []
        made: list[dict[str, Any]] = [
            {"params": []},
            *({"params": [], **{k: v for k, v in group.items() if k != "match"}} for group in groups),
        ]
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                number = next((k for k, g in enumerate(groups, 1) if _matches(g["match"], name)), 0)
                made[number]["params"].append(parameter)
        return made

    def _step(self, step: int) -> None:
        self._optimizer.zero_grad()
        counts, losses = [], []
        batches = [shared for m in range(self._sampler.microbatches) for shared in self._batches(step, m)]
        tokens = self._training.get("loss_reduction", "mean") == "tokens"
        weights = [self._counted(batch) if tokens else 1 for batch in batches]
        for batch, weight in zip(batches, weights, strict=True):
            loss, _ = self._loss_of(batch)
            if weight:
                self._scaler.scale(loss * (weight / sum(weights))).backward()
            counts.append(weight)
            losses.append(loss.item() if weight else 0.0)
        scale = self._scaler.get_scale()
        self._scaler.unscale_(self._optimizer)
        if (limit := self._training.get("clip_grad_norm")) is not None:
            nn.utils.clip_grad_norm_(self._parameters, limit)
        self.run.rates.append(self._optimizer.param_groups[0]["lr"])
        self._scaler.step(self._optimizer)
        self._scaler.update()
        skipped = self._scaler.get_scale() < scale
        if self._schedule and not skipped:
            self._schedule.step()
        self.run.losses.append(
            sum(loss * weight for loss, weight in zip(losses, counts, strict=True)) / sum(counts)
        )
        self.run.scales.append((scale, skipped))

    def _batches(self, step: int, microbatch: int) -> list[Any]:
        indices = self._sampler.indices(step, microbatch)
        samples = [read_sample(self._data, index, seed=self._seed, step=step) for index in indices]
        size = len(samples) // self._shares
        return [_collate(samples[begin : begin + size]) for begin in range(0, len(samples), size)]

    def _loss_of(self, batch: Any) -> tuple[Any, Any]:
        with torch.autocast("cpu", dtype=self._precision, enabled=self._precision is not None):
            if self._loss is None:
                output = self.model(**batch)
                return output.loss, output
            inputs, target = batch
            output = self.model(*inputs)
            return self._loss(output, target), output

    def _counted(self, batch: Any) -> int:
        """The targets that a loss does not leave out."""
        ignored = getattr(self._loss, "ignore_index", -100)
        return int((batch[1] != ignored).sum())


def plain_losses(spec: Mapping[str, Any], steps: Sequence[int], *, shares: int = 1) -> list[float]:
    """The mean loss of each step of a job's plain loop."""
    return PlainJob(spec, shares=shares).train(steps).losses


def _collate(samples: list[Any]) -> Any:
    if not isinstance(samples[0], Mapping):
        return collate(samples)
    return {key: torch.stack([torch.as_tensor(one[key]) for one in samples]) for key in samples[0]}


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(
        re.search(pattern[3:], name) if pattern.startswith("re:") else fnmatch.fnmatchcase(name, pattern)
        for pattern in patterns
    )


def _data_set(of: Mapping[str, Any]) -> Any:
    return call_factory(of["factory"], of.get("args", {}))


def _loss_function(of: Mapping[str, Any]) -> Any:
    found = resolve(of["factory"])
    return found(**of.get("args", {})) if isinstance(found, type) else found
