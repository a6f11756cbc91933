"""Compares a job with the training that saved a checkpoint, and decides what the job takes over from it.

`checkpoint.resume_from` begins a job with another training's state. The job's own settings win over those that were saved:
the optimizer has its arguments, and its schedule stands where it would stand after as many steps. Where nothing of the
optimizer changed, groups and schedule continue as they were saved, to the bit. The order of samples continues where data,
split, columns, shuffling and seed are the same, counted in samples, so that another global batch continues it too.
Checkpoints of older versions do not describe their training: their settings count as changed, their data as the same.
Pure values: reads no file and knows no gang.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from worker.contract.job import FP16, Factory, Job, Optimizer

TRAINING_NOTE = "training"
"""The name of a SavedTraining in a manifest's notes."""
_DESCRIBED_SECTIONS = ("model", "data", "loss", "optimizer", "training")
_ABSENT = object()
_MAX_NAMES_SHOWN = 8


@dataclass(frozen=True)
class ResumeSource:
    """The checkpoint that a job begins from; `job` and `step` are those of a job's checkpoint, None for another place."""

    uri: str
    job: str | None = None
    step: int | None = None

    @property
    def name(self) -> str:
        """The checkpoint for people."""
        return self.uri if self.job is None else f"job {self.job}"


@dataclass(frozen=True)
class SavedTraining:
    """The training that saved a checkpoint: its job's id, the samples of its data's order that it had taken, and what its
    job said of model, data, loss, optimizer and training."""

    job_id: str
    samples: int
    job: Job

    @classmethod
    def of_notes(cls, notes: Mapping[str, Any]) -> SavedTraining | None:
        """The training in a manifest's notes; None where an older or a newer version described it otherwise."""
        note = notes.get(TRAINING_NOTE)
        try:
            return cls(note["job"], int(note["samples"]), Job.from_json(note["spec"]))
        except (TypeError, KeyError, ValueError):
            return None


def training_note(job_id: str, samples: int, spec: Mapping[str, Any]) -> dict[str, Any]:
    """The note from which `SavedTraining.of_notes` reads the training of the job with this specification (JSON)."""
    described = {name: spec[name] for name in _DESCRIBED_SECTIONS if spec.get(name) is not None}
    return {TRAINING_NOTE: {"job": job_id, "samples": samples, "spec": described}}


@dataclass(frozen=True)
class Takeover:
    """The training state that a job takes over beside parameters and buffers.

    `settings`: the optimizer's groups and schedule as they were saved, else the job's own. `data`: the data's own state,
    with which training goes on at `sample` of its order. `omitted` says what is not taken over and why, `changes` what
    else is not as it was.
    """

    settings: bool
    data: bool
    sample: int
    omitted: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    def with_new_data(self, why: str) -> Takeover:
        """The same with the data from its begin."""
        omitted = (*self.omitted, f"position in data, which begins anew ({why})")
        return Takeover(self.settings, False, 0, omitted, self.changes)


@dataclass(frozen=True)
class ResumedWorker:
    """The training state that one worker took over. `optimizer` is True where it took the optimizer's, False where it did
    not (`omitted` says why), None where it trains nothing; `new_state` are trained parameters of which the checkpoint has
    no state. Learning rates are those of the first group: None where there is none."""

    step: int
    optimizer: bool | None = None
    omitted: tuple[str, ...] = ()
    new_state: tuple[str, ...] = ()
    loss_scale: float | None = None
    saved_rate: float | None = None
    rate: float | None = None


def plan_takeover(saved: SavedTraining | None, job: Job, step: int) -> Takeover:
    """The state that `job` takes over of a checkpoint after `step`, left by the training `saved` (None: it is not known)."""
    if saved is None:
        changes = (
            "optimizer settings are this job's own, as the checkpoint does not describe those it was saved with",
        )
        return Takeover(False, True, step * job.training.global_batch, changes=changes)
    takeover = Takeover(
        settings=saved.job.optimizer == job.optimizer,
        data=True,
        sample=saved.samples,
        changes=(
            *_optimizer_changes(saved.job.optimizer, job.optimizer, step),
            *_training_changes(saved.job, job),
        ),
    )
    if differences := list(_data_differences(saved.job, job)):
        return takeover.with_new_data(", ".join(differences))
    return takeover


def name_mismatch(saved: Mapping[str, Sequence[str]], own: Collection[str]) -> str | None:
    """A sentence with the names that the shards `saved` lack of the model's `own`, and that the model does not have; None
    where they are the same."""
    names = {name for held in saved.values() for name in held}
    return mismatch_text(missing=sorted({*own} - names), unexpected=sorted(names - {*own}))


def mismatch_text(
    missing: Sequence[str] = (), unexpected: Sequence[str] = (), shapes: Sequence[str] = ()
) -> str | None:
    """A sentence with what does not fit, and the way out; None where nothing is given."""
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
    found = [f"{kind}: {shown_names(names)}" for kind, names in kinds if names]
    if not found:
        return None
    return (
        f"the checkpoint does not fit the model: {'; '.join(found)}. Give `model` as it was when the checkpoint was "
        "saved, or leave checkpoint.resume_from out and have model.factory load what fits of exported weights "
        "(slotline export)"
    )


def shown_names(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + more


def resumed_message(
    source: ResumeSource, takeover: Takeover, workers: Sequence[ResumedWorker], *, precision: str
) -> str:
    """The event of a resume: what was taken over, what was not and why, and what else is not as it was."""
    taken = ["parameters"]
    omitted = [*_each_once(note for worker in workers for note in worker.omitted)]
    states = [worker.optimizer for worker in workers if worker.optimizer is not None]
    if states and all(states):
        taken.append("optimizer state")
        if new := sorted({name for worker in workers for name in worker.new_state}):
            omitted.append(f"optimizer state of {shown_names(new)}, of which the checkpoint has none")
    scale = next((worker.loss_scale for worker in workers if worker.loss_scale is not None), None)
    if precision == FP16 and scale is not None:
        taken.append(f"loss scale {scale:g}")
    if takeover.data:
        taken.append(f"position in data (sample {takeover.sample})")
    omitted += takeover.omitted
    parts = [f"resumed from {source.name} step {workers[0].step}: {', '.join(taken)}"]
    if omitted:
        parts.append(f"not taken over: {'; not '.join(omitted)}")
    rates = [(worker.saved_rate, worker.rate) for worker in workers if worker.rate is not None]
    before, rate = next(((b, r) for b, r in rates if b is not None and b != r), (None, None))
    if rate is not None:
        parts.append(f"learning rate {rate:g} (was {before:g})")
    return "; ".join([*parts, *takeover.changes])


def _each_once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _optimizer_changes(saved: Optimizer, own: Optimizer, step: int) -> Iterator[str]:
    if saved.factory != own.factory:
        yield f"optimizer {own.factory} (was {saved.factory})"
    yield from _argument_changes("optimizer.args", saved.args, own.args)
    if saved.groups != own.groups:
        yield "optimizer.groups are others"
    if saved.schedule != own.schedule:
        place = "" if own.schedule is None else f", at its step {step}"
        yield f"optimizer.schedule {_factory_text(own.schedule)}{place} (was {_factory_text(saved.schedule)})"


def _training_changes(saved: Job, own: Job) -> Iterator[str]:
    for field in fields(own.training):
        before, now = getattr(saved.training, field.name), getattr(own.training, field.name)
        if before != now and field.name != "seed":
            yield f"training.{field.name} {_value_text(now)} (was {_value_text(before)})"
    if saved.loss != own.loss:
        yield f"loss {_factory_text(own.loss)} (was {_factory_text(saved.loss)})"


def _data_differences(saved: Job, own: Job) -> Iterator[str]:
    """The differences of two jobs that change the order of samples, or the samples."""
    if saved.data.factory != own.data.factory:
        yield f"data {own.data.factory}, was {saved.data.factory}"
        return
    yield from _argument_changes("data.args", saved.data.args, own.data.args)
    for name in ("split", "columns", "shuffle"):
        before, now = getattr(saved.data, name), getattr(own.data, name)
        if _plain(before) != _plain(now):
            yield f"data.{name} {_value_text(now)}, was {_value_text(before)}"
    if saved.training.seed != own.training.seed:
        yield f"training.seed {own.training.seed}, was {saved.training.seed}"


def _plain(columns: Any) -> Any:
    return list(columns) if isinstance(columns, tuple) else columns


def _argument_changes(field: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*saved, *own}):
        before, now = saved.get(name, _ABSENT), own.get(name, _ABSENT)
        if before is _ABSENT or now is _ABSENT or before != now:
            yield f"{field}.{name} {_value_text(now)} (was {_value_text(before)})"


def _value_text(value: Any) -> str:
    if value is _ABSENT:
        return "its default"
    text = f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _factory_text(factory: Factory | None) -> str:
    if factory is None:
        return "none"
    arguments = ", ".join(f"{name}={_value_text(value)}" for name, value in factory.args.items())
    return f"{factory.factory}({arguments})"
