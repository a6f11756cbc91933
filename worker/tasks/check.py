"""Checks a job in one process without accelerators: its factories exist, take their arguments, build and give a sample.

Reads {"job": ...} from SLOTLINE_CHECK, else from standard input. Ends with one task_result line, the JSON of a
JobCheck. Nothing is trained or traced. Imports happen here; then each step runs in a forked process with limits of time
and memory. The model is built on the meta device, and for real only where that fails. A step that reaches a limit, or
fails for want of an accelerator, leaves a note: workers may have what this machine has not.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo  # optimizers import it: here once, not in each forked step

from worker.actor.batch_feed import Batches
from worker.actor.evaluation import EvaluationBatches
from worker.actor.loss import takes_inputs
from worker.actor.model_host import build_job_model
from worker.actor.optimizer import (
    check_layout_of_optimizer,
    check_optimizer_of_model,
    make_loss,
    make_optimizer,
    make_schedule,
    try_schedule,
)
from worker.checkpoint.sources import check_weights
from worker.contract import failures
from worker.contract.codec import to_json
from worker.contract.failures import AttemptFailure, is_out_of_memory, leave_breadcrumb
from worker.contract.job import AUTO, Data, Factory, Job, Loader, microbatch_counts
from worker.contract.profile import FactoryError, ModelError
from worker.contract.reasons import Reason
from worker.contract.tasks import CHECK_REQUEST_VARIABLE, CHECK_RESULT_MARK, JobCheck, JobProblem
from worker.machine.telemetry import available_bytes
from worker.model.factory import check_arguments, did_you_mean, moved_factory_notes, resolve
from worker.model.pytree import target_tensors
from worker.model.untraceable import one_row_remedy

STEP_LIMIT_S = 60.0
STEP_MEMORY_BYTES = 4 << 30
"""Of a step, and at most half of what this machine has left: others train here."""
_FURTHER_MICROBATCHES = 4
_FURTHER_LIMIT_S = 10.0
"""Of so many microbatches of the first step the shapes are compared, as far as they are read in this time."""
_NICENESS = 10
_MAX_DETAILS = 8000  # characters
_PR_SET_PDEATHSIG = 1
_SECTIONS = ("model", "data", "loss", "optimizer", "training", "evaluation", "tracking")
_ERROR_CLASS = re.compile(r"^(FactoryError|ModelError|ValueError|RuntimeError): ")
_FIELD_PREFIX = re.compile(r"^((?:model|data|optimizer|evaluation)\.[\w.\[\]]+): ")
_ACCELERATOR_WORDS = re.compile(r"\b(cuda|nvidia|nccl|cupy|gpus?|hip|rocm)\b", re.IGNORECASE)


def main() -> int:
    """Check the job that the environment or standard input names; 0 when it was checked, whatever was found."""
    _end_with_parent()
    failures.start_breadcrumbs()
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    torch.set_num_threads(1)
    print(f"\n{CHECK_RESULT_MARK}{json.dumps(to_json(check_job(requested_job())))}", flush=True)
    failures.remove_crash_report(os.getpid())
    return 0


def requested_job() -> Job:
    """The job of the request in the environment, of which no other process hears, else of that on standard input."""
    request = os.environ.pop(CHECK_REQUEST_VARIABLE, None) or sys.stdin.read()
    return Job.from_json(json.loads(request)["job"])


def check_job(job: Job, *, limit_s: float = STEP_LIMIT_S, memory_bytes: int = STEP_MEMORY_BYTES) -> JobCheck:
    """All that is found wrong with `job`, in the order of its fields; each step may take `limit_s` and `memory_bytes`."""
    imported = Findings(certain_without_accelerator=job.resources.device == "cpu")
    for use in _factory_uses(job):
        _check_factory(use, imported)
    wrong = {problem.field.partition(".")[0] for problem in imported.problems}
    free = available_bytes()
    limits = StepLimits(limit_s, memory_bytes if free is None else min(memory_bytes, free // 2))

    def run(what: str, step: Callable[..., None], *arguments: Any) -> Findings:
        empty = Findings(imported.certain_without_accelerator)
        return _run_step(what, functools.partial(step, job, *arguments), limits, empty)

    found, data = [imported], Findings()
    if "data" not in wrong:
        found.append(run("the data", _check_data, "evaluation" not in wrong))
        data = found[-1]
    if "optimizer" not in wrong:
        found.append(run("the optimizer", _check_optimizer))
    if "model" not in wrong:
        with_optimizer = "optimizer" not in wrong and not found[-1].problems
        model = run("the model", _check_model, data.inputs, "meta", with_optimizer)
        if model.may_differ_for_real:
            model = run("the model", _check_model, data.inputs, "cpu", with_optimizer)
        found.append(model)
    if job.loss is not None and "loss" not in wrong:
        found.append(run("the loss", _check_loss))
    problems = dict.fromkeys(problem for findings in found for problem in findings.problems)
    return JobCheck(
        problems=tuple(sorted(problems, key=lambda one: _SECTIONS.index(one.field.partition(".")[0]))),
        notes=tuple(dict.fromkeys(note for findings in found for note in findings.notes)),
        checked=tuple(dict.fromkeys(text for findings in found for text in findings.checked)),
        samples=data.samples,
        tokens=data.tokens,
    )


@dataclass(frozen=True)
class SampleInputs:
    """The inputs of a worker's microbatch as the model takes them: their names (none: by position), shapes and dtypes."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, batches: Batches) -> SampleInputs:
        inputs = batches.sample[0]
        return cls(
            batches.keywords, tuple(tuple(one.shape) for one in inputs), tuple(one.dtype for one in inputs)
        )

    @property
    def count(self) -> int:
        return len(self.shapes)


@dataclass
class Findings:
    """The findings of one step, collected while it runs; `check_job` merges those of all steps.

    `certain_without_accelerator`: what fails here for want of one fails everywhere, since the job wants none.
    `may_differ_for_real`: a step on the meta device failed in a way that may be due to that device.
    """

    certain_without_accelerator: bool = False
    problems: list[JobProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    inputs: SampleInputs | None = None
    samples: int | None = None
    tokens: int | None = None
    may_differ_for_real: bool = False

    @contextlib.contextmanager
    def of(self, field_name: str, reason: Reason) -> Iterator[None]:
        """An exception of the body becomes a problem of this field, or a note where another machine may do better."""
        try:
            yield
        except (Exception, SystemExit) as error:
            chain = list(_causes(error))
            text = _ERROR_CLASS.sub("", error.message if isinstance(error, AttemptFailure) else _text(error))
            if any(is_out_of_memory(cause) or isinstance(cause, MemoryError) for cause in chain):
                self.notes.append(
                    f"{field_name} was not checked, it needs more memory than there is here: {text}"
                )
            elif not self.certain_without_accelerator and _ACCELERATOR_WORDS.search(text):
                self.notes.append(f"{field_name} was not checked, as there is no accelerator here: {text}")
            else:
                reason = error.reason if isinstance(error, AttemptFailure) else reason
                if prefix := _FIELD_PREFIX.match(text):
                    field_name, text = prefix[1], text.removeprefix(prefix[0])
                local = any(isinstance(cause, OSError) for cause in chain)
                self.problems.append(JobProblem(field_name, text, str(reason), local, _details(error)))
            self.may_differ_for_real |= type(error) is not ModelError


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and what led to it, also what a `raise ... from None` hides."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _details(error: BaseException) -> str:
    """The traceback of what `error` was raised from, unless all of it is in words of this package's own; the end of it."""
    for cause in _causes(error):
        if _is_first(cause):
            break
    if isinstance(cause, ModelError | AttemptFailure):
        return ""
    return "".join(traceback.format_exception(cause))[-_MAX_DETAILS:]


def _is_first(error: BaseException) -> bool:
    """True if what `error` came from was hidden on purpose; `as_failure` hides only what it repeats."""
    hides = error.__suppress_context__ and error.__cause__ is None
    return hides and not isinstance(error, AttemptFailure)


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class FactoryUse:
    """A factory of a job at `field`: called with `positional` arguments and the keywords `named` before its own.

    A class is only constructed with its own: its objects are called later (`instance_is_called`)."""

    field: str
    spec: Factory
    positional: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    instance_is_called: bool = False


def _factory_uses(job: Job) -> Iterator[FactoryUse]:
    yield FactoryUse("model", job.model)
    yield from _data_uses("data", job.data)
    if job.loss is not None:
        leave_breadcrumb(f"importing loss {job.loss.factory}")
        inputs = ("inputs",) if takes_inputs(job.loss) else ()
        yield FactoryUse("loss", job.loss, ("output", "target"), inputs, instance_is_called=True)
    yield FactoryUse("optimizer", job.optimizer, ("parameters",))
    if job.optimizer.schedule is not None:
        yield FactoryUse("optimizer.schedule", job.optimizer.schedule, ("optimizer",))
    if job.evaluation is not None:
        yield from _data_uses("evaluation.data", job.evaluation.data)
    for tracker in job.tracking:
        if tracker.factory is not None:
            yield FactoryUse("tracking", tracker)


def _data_uses(field_name: str, data: Data) -> Iterator[FactoryUse]:
    yield FactoryUse(field_name, data)
    if data.collate is not None:
        yield FactoryUse(f"{field_name}.collate", data.collate, ("samples",), instance_is_called=True)


def _check_factory(use: FactoryUse, findings: Findings) -> None:
    """Import the factory and those in its arguments, and compare their arguments with their signatures."""
    path, args = use.spec.factory, use.spec.args
    reason = Reason.DATA_FAILED if "data" in use.field.split(".") else Reason.MODEL_BUILD_FAILED
    leave_breadcrumb(f"importing {use.field} {path}")
    findings.notes += [f"{use.field}: {note}" for note in moved_factory_notes([path])]
    with findings.of(f"{use.field}.factory", reason):
        target = resolve(path)
        if not callable(target):
            raise FactoryError(f"factory {path!r} is a {type(target).__name__}, which cannot be called")
        with findings.of(f"{use.field}.args", reason):
            by_class = isinstance(target, type) and use.instance_is_called
            first, named = ((), ()) if by_class else (use.positional, use.named)
            check_arguments(f"factory {path!r}", target, {**dict.fromkeys(named), **args}, first)
        if hint := _unused_settings(target, args):
            findings.notes.append(f"{use.field}.args: {hint}")
    for place, nested in _nested_factories(f"{use.field}.args", args):
        _check_factory(FactoryUse(place, nested), findings)


def _nested_factories(place: str, value: Any) -> Iterator[tuple[str, Factory]]:
    """The factories that are called for an argument, as worker/model/factory.py does; without those inside their own."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            if (
                isinstance(part, Mapping)
                and isinstance(part.get("factory"), str)
                and part.keys() <= {"factory", "args"}
            ):
                yield f"{place}.{name}", Factory(part["factory"], part.get("args") or {})
            else:
                yield from _nested_factories(f"{place}.{name}", part)
    elif isinstance(value, list | tuple):
        yield from _nested_factories(place, dict(enumerate(value)))


def _unused_settings(target: Any, args: Mapping[str, Any]) -> str:
    """Arguments of a configuration of transformers that are nearly one of its settings: it keeps any name in silence."""
    if not isinstance(target, type) or "PretrainedConfig" not in {
        one.__name__.replace("PreTrained", "Pretrained") for one in target.__mro__
    }:
        return ""
    try:
        default = target()
    except Exception:
        return ""
    known = sorted({*vars(default), *getattr(default, "attribute_map", ())})
    hints = {name: did_you_mean(name, known, cutoff=0.8) for name in args if not hasattr(default, name)}
    return "; ".join(f"{target.__name__} has no {name!r}{hint}" for name, hint in hints.items() if hint)


def _check_data(job: Job, with_evaluation: bool, findings: Findings) -> None:
    """Read a microbatch of the data, and of the evaluation's, as the first worker does."""
    job = replace(job, data=replace(job.data, loader=Loader()))
    where = {
        "worker": 0,
        "workers_per_mesh": job.dp_sizes[0],
        "microbatches": microbatch_counts(job)[-1],
    }
    batches = None
    with findings.of("data", Reason.DATA_FAILED):
        batches = Batches(job, **where)
        findings.inputs = SampleInputs.of(batches)
        findings.samples, findings.tokens = batches.samples_in_all, batches.tokens_per_sample
        findings.checked.append(f"data: {_describe_sample(batches, job.loss is None)}")
        batches.check_first_step(_FURTHER_MICROBATCHES, limit_s=_FURTHER_LIMIT_S)
    if job.evaluation is None or not with_evaluation:
        return
    evaluation = replace(job.evaluation, data=replace(job.evaluation.data, loader=Loader()))
    with findings.of("evaluation.data", Reason.DATA_FAILED):
        evaluated = EvaluationBatches(replace(job, evaluation=evaluation), **where)
        if batches is not None:
            evaluated.check_matches_training(batches)
        findings.checked.append(f"evaluation.data: {_describe_sample(evaluated, job.loss is None)}")


def _describe_sample(batches: Batches, own_loss: bool) -> str:
    inputs, target = batches.sample
    names = batches.keywords or tuple(f"input {k}" for k in range(len(inputs)))
    tensors = [
        *zip(names, inputs, strict=True),
        *(("target", one) for one in ([] if own_loss else target_tensors(target))),
    ]
    count = batches.samples_in_all
    shown = ", ".join(
        f"{name} {list(one.shape)} {str(one.dtype).removeprefix('torch.')}" for name, one in tensors
    )
    return f"{'a stream' if count is None else f'{count:,} samples'}; a worker's microbatch has {shown}"


def _check_model(
    job: Job, inputs: SampleInputs | None, device: str, with_optimizer: bool, findings: Findings
) -> None:
    """Build the model on `device` (meta or cpu), compare its forward with a sample's inputs, and build its optimizer."""
    place = torch.device("meta") if device == "meta" else contextlib.nullcontext()
    model = None
    with findings.of("model", Reason.MODEL_BUILD_FAILED), place:
        built = build_job_model(replace(job, model=replace(job.model, weights=None)))
        model = built.model
    if model is None:
        return
    count = sum(parameter.numel() for parameter in model.parameters())
    how = " (on the meta device)" if device == "meta" else ""
    findings.checked.append(f"model: {type(model).__name__} with {count:,} parameters{how}")
    if job.model.weights:
        with findings.of("model.weights", Reason.MODEL_BUILD_FAILED):
            check_weights(job.model.weights, built.record)
    if inputs is not None:
        with findings.of("data", Reason.MODEL_BUILD_FAILED):
            by_name = dict.fromkeys(inputs.names)
            by_position = () if inputs.names else tuple(f"input {k}" for k in range(inputs.count))
            what = f"{type(model).__name__}.forward, called with the inputs of a sample,"
            check_arguments(what, model.forward, by_name, by_position)
        if device == "meta" and _rows_are_known(job):
            _check_rows(model, inputs, findings)
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    if with_optimizer and trained:
        names, parameters = zip(*trained, strict=True)
        _make_optimizer(job, parameters, names, findings)
        with findings.of("optimizer", Reason.MODEL_BUILD_FAILED):
            untried = check_layout_of_optimizer(job)
            findings.notes += check_optimizer_of_model(job, dict(trained), untried=untried)


def _rows_are_known(job: Job) -> bool:
    """True if every worker normalises by the rows that the first one has, whatever the plan."""
    training = job.training
    return training.microbatches != AUTO and not training.sync_batch_norm and len({*job.dp_sizes}) == 1


def _check_rows(model: torch.nn.Module, inputs: SampleInputs, findings: Findings) -> None:
    """Name a batch norm that a worker's microbatch has one row for. Of what else a forward on the meta device ends in that
    device may be the cause."""
    tensors = [
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in zip(inputs.shapes, inputs.dtypes, strict=True)
    ]
    by_name = dict(zip(inputs.names, tensors, strict=True)) if inputs.names else {}
    try:
        with torch.no_grad(), torch.device("meta"):
            model(*([] if by_name else tensors), **by_name)
    except Exception as error:
        if remedy := one_row_remedy(error):
            with findings.of("training.microbatches", Reason.MODEL_BUILD_FAILED):
                raise ModelError(f"{type(model).__name__}.forward raised {_text(error)}: {remedy}") from None


def _check_optimizer(job: Job, findings: Findings) -> None:
    """Build the optimizer for a matrix of its own, so that it is checked whatever the model is, and try the layout."""
    _make_optimizer(job, [torch.nn.Parameter(torch.zeros(8, 8))], ["weight"], findings)
    if not findings.problems:
        with findings.of("optimizer", Reason.MODEL_BUILD_FAILED):
            check_layout_of_optimizer(job)


def _make_optimizer(
    job: Job, parameters: Sequence[torch.nn.Parameter], names: Sequence[str], findings: Findings
) -> None:
    with findings.of("optimizer", Reason.MODEL_BUILD_FAILED):
        optimizer = make_optimizer(job.optimizer, parameters, names)
        findings.checked.append(f"optimizer: {job.optimizer.factory}")
        if job.optimizer.schedule is not None:
            with findings.of("optimizer.schedule", Reason.MODEL_BUILD_FAILED):
                schedule = make_schedule(job.optimizer.schedule, optimizer)
                try_schedule(job.optimizer.schedule, schedule, optimizer, steps=job.training.steps)
                findings.checked.append(f"optimizer.schedule: {job.optimizer.schedule.factory}")


def _check_loss(job: Job, findings: Findings) -> None:
    with findings.of("loss", Reason.MODEL_BUILD_FAILED):
        make_loss(job.loss)
        findings.checked.append(f"loss: {job.loss.factory}")


@dataclass(frozen=True)
class StepLimits:
    """The seconds of a step, and the bytes that it may allocate beside what is there when it begins."""

    seconds: float
    memory_bytes: int


def _run_step(
    what: str, step: Callable[[Findings], None], limits: StepLimits, findings: Findings
) -> Findings:
    """The findings of `step` in a forked process, which sees what is imported here and changes nothing of it."""
    leave_breadcrumb(f"building {what}")
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_step_process, args=(step, findings, sender, limits.memory_bytes))
    process.start()
    sender.close()
    try:
        if receiver.poll(limits.seconds):
            return receiver.recv()
        reason = f"it took more than {limits.seconds:g} s here"
    except EOFError:
        process.join(limits.seconds)
        reason = f"its process {_exit_text(process.exitcode)}"
    finally:
        process.kill()
        process.join()
    return replace(findings, notes=[f"{what} could not be checked: {reason}"], may_differ_for_real=True)


def _step_process(
    step: Callable[[Findings], None], findings: Findings, sender: Connection, memory_bytes: int
) -> None:
    _end_with_parent()
    _limit_memory(memory_bytes)
    step(findings)
    sender.send(findings)


def _end_with_parent() -> None:
    """Have Linux kill this process when the one that started it is gone, also while it hangs in a user's code."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit_memory(memory_bytes: int) -> None:
    """Let this process allocate so much more than it has: an allocation beyond that fails, and no other process dies."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        with open("/proc/self/status") as status:
            used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + memory_bytes, hard))


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
