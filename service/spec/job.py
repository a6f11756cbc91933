"""JobSpec: the job specification (job.yaml) as pydantic models, with defaults, limits and checks across fields.

Values only: no database, no HTTP, no Ray, no torch. Unknown fields are refused. Field names are the public format
of job.yaml and of the REST API. `stored_*` read fields of specifications in the store, which an older or newer
version may have written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from service.spec.lengths import LengthsSection, check_evaluated_lengths, check_padded
from service.spec.names import NAME_PATTERN
from service.spec.principals import DEFAULT_PROJECT
from service.spec.resources import (
    ResourcesSection,
    check_batch_divides,
    check_elementwise_by_name,
    check_optimizer_sharding,
    stored_mesh_sizes,
)
from service.spec.short_forms import check_no_stored_fields, long_form
from service.spec.values import (
    Duration,
    Environment,
    FiniteJson,
    Labels,
    Notifications,
    ParameterGroupSection,
    Patterns,
    SecretNames,
    SpecPart,
    Text,
    check_storable,
)

IDEMPOTENCY_KEY_PATTERN = r"^[\x21-\x7e]{1,255}$"
OWNER_PATTERN = r"^[\x20-\x7e]{1,200}$"
FACTORY_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
MAX_ARGUMENTS = 1000
PACKAGE_PREFIX = "package:"
REMOTE_CODE_PREFIXES = ("http://", "https://", "s3://", "gs://", "gcs://", "azure://", "abfss://")
TRAINING_SCHEDULES = ("auto", "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
METRIC_PATTERN = r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$"


def _check_argument_count(value: object) -> object:
    """Refuse too many arguments at once: checked one by one, thousands of them would give thousands of errors."""
    if isinstance(value, dict) and len(value) > MAX_ARGUMENTS:
        raise ValueError(f"holds {len(value)} values, the limit is {MAX_ARGUMENTS}: put them in a list")
    return value


def _check_argument_names(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    for key in value:
        check_storable(key)
    return value


Count = Annotated[int, Field(ge=1, le=1_000_000)]
Arguments = Annotated[dict[str, FiniteJson], AfterValidator(_check_argument_names)]
LimitedArguments = Annotated[Arguments, BeforeValidator(_check_argument_count)]
Texts = Annotated[list[Text], Field(fail_fast=True)]
Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=100)]
_TimeoutSeconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


def _auto_or_count(most: int) -> BeforeValidator:
    def check(value: object) -> object:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most):
            return value
        raise ValueError(f"is {value!r}: write auto, or a whole number from 1 to {most}")

    return BeforeValidator(check)


AutoCount = Annotated[Literal["auto"] | Count, _auto_or_count(1_000_000)]
AutoStages = Annotated[Literal["auto"] | Annotated[int, Field(ge=1, le=1024)], _auto_or_count(1024)]


def _in_lower_case(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class FactorySection(SpecPart):
    """An import path `module:attribute` and the arguments of its call."""

    example: ClassVar[str] = "torch.nn.functional:cross_entropy"
    """A factory of this kind, for messages."""
    factory: Annotated[str, Field(pattern=FACTORY_PATTERN, max_length=500)]
    args: LimitedArguments = {}  # noqa: RUF012 (pydantic copies it)

    @model_validator(mode="before")
    @classmethod
    def _is_a_mapping(cls, data: object) -> object:
        if isinstance(data, str):
            raise ValueError(
                f"is the text {data[:100]!r}: name what makes it by its import path, as "
                f'{{factory: "{data if ":" in data and len(data) < 100 else cls.example}", args: {{}}}}'
            )
        return data


class ModelSection(FactorySection):
    """A model, its initial weights, and the part of its result that the loss takes."""

    example: ClassVar[str] = "worker.examples.gpt:build"
    output: Annotated[str, Field(pattern=r"^(\*|\w+(\.\w+)*)$", max_length=500)] | None = Field(
        default=None,
        description="Part of the model's result that the loss takes, e.g. logits, or 0.hidden, or * for all of it; "
        "null: the only tensor, or all of several; without a loss the model's own",
    )
    weights: Text | None = Field(
        default=None,
        description="Weights to start from, at an absolute path that every worker sees: safetensors (a file, an index, a "
        "folder) or a torch checkpoint; null: as the factory makes them",
    )
    freeze: Patterns = Field(
        default=[],
        description="Parameters that are not trained, by name: *.bias as file names are matched, re: before a regular "
        "expression",
    )
    train: Literal["called", "as_built"] = Field(
        default="called",
        description="called: model.train() is called once when the model is built, as trainers do; as_built: each module "
        "stays in the mode in which the factory left it",
    )


class LoaderSection(BaseModel):
    """Processes of torch's DataLoader that read a worker's samples."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    workers: Annotated[int, Field(ge=0, le=64)] = Field(
        default=0, description="Processes; 0 reads on a thread of the worker. A stream is read by one at most"
    )
    prefetch: Annotated[int, Field(ge=1, le=64)] = Field(
        default=2, description="Microbatches that each process reads ahead"
    )
    pin_memory: bool = Field(
        default=True, description="On CUDA: copy samples to the device from pinned memory"
    )
    timeout_s: _TimeoutSeconds = Field(
        default=120.0,
        description="Silence of a process that ends the attempt",
    )


class DataOptions(BaseModel):
    """Options of reading a data set: split, columns, order, end, read-ahead, loader processes."""

    prefetch: Annotated[int, Field(ge=0, le=64)] = Field(
        default=2,
        description="Steps whose samples are read while an earlier one runs; 0 reads them when they are needed "
        "(streams and loader processes: 1)",
    )
    split: Text | None = Field(
        default=None, description="One of several data sets by name, where the factory's result has several"
    )
    columns: list[Text] | dict[Text, Text] | None = Field(
        default=None,
        description="Fields of samples that are dicts, as a list or {name in the model: field}; null: all",
    )
    shuffle: bool = Field(
        default=True,
        description="A new order every epoch; false: the data set's own. A stream has its own order in any case",
    )
    at_end: Literal["repeat", "stop"] = Field(
        default="repeat",
        description="At the end of the data: repeat begins again, stop ends the job with the last whole batch",
    )
    loader: LoaderSection = LoaderSection()
    lengths: LengthsSection | None = Field(
        default=None, description="For samples of unequal lengths; null: all samples have one shape"
    )

    @model_validator(mode="after")
    def _columns_name_something(self) -> Self:
        if self.columns is not None and not self.columns:
            raise ValueError("columns names no field: name the fields that the model takes, or leave it out")
        return self


class DataSection(FactorySection, DataOptions):
    """A data set or a stream, the options of reading it, and its collator (called with a list of samples)."""

    example: ClassVar[str] = "worker.examples.text:ByteWindows"

    collate: FactorySection | None = None

    @model_validator(mode="after")
    def _padded_once(self) -> Self:
        if self.lengths is not None and self.collate is not None:
            raise ValueError(
                "has lengths and collate, which both make microbatches of samples: leave out one of them"
            )
        return self


class OptimizerSection(FactorySection):
    """An optimizer, its parameter groups, and the schedule of its learning rate."""

    example: ClassVar[str] = "torch.optim:AdamW"

    schedule: FactorySection | None = Field(
        default=None,
        description="Called with the optimizer and `args`, e.g. torch.optim.lr_scheduler:CosineAnnealingLR",
    )
    groups: Annotated[list[ParameterGroupSection], Field(fail_fast=True)] = Field(
        default=[],
        description="Parameters with settings of their own, e.g. {match: [*.bias, *norm*], weight_decay: 0}; each is in "
        "the first group that matches it",
    )


class LossScalingSection(BaseModel):
    """Loss scaling of fp16, which grows and backs off as torch.amp.GradScaler's does by default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    init_scale: Annotated[float, Field(gt=0, le=2.0**100, allow_inf_nan=False)] = 2.0**16


class TrainingSection(SpecPart):
    """Steps, batches and numbers of the training loop."""

    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32",
        description="fp32: each module in its own type; bf16, fp16: by autocast, fp16 with loss scaling",
    )
    loss_scaling: LossScalingSection | None = Field(
        default=None, description="The first scale of precision fp16; null: 65536"
    )
    sync_batch_norm: bool = Field(
        default=False,
        description="BatchNorm normalises by the rows of all workers of a mesh, not by each worker's own",
    )
    tf32: bool | None = Field(
        default=None,
        description="fp32 products may round to TF32 on CUDA; null: torch's default (matrix products do not, cuDNN's "
        "convolutions do)",
    )
    compile: bool = Field(
        default=False,
        description="Every stage's forward and backward by torch.compile, before the first step; a stage that cannot be "
        "compiled, or not within 20 minutes of a worker for all of them, runs as traced, and an event says why",
    )
    steps: Annotated[int, Field(ge=1, le=1_000_000_000)] = 100
    global_batch: Count = 32
    microbatches: AutoCount = Field(
        default=8, description="auto: planning chooses a divisor of the batch, for the shortest planned step"
    )
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    transfers: Literal["auto", "bf16"] = Field(
        default="auto",
        description="Type of tensors on links between meshes: auto: their own; bf16 rounds fp32 tensors to half their bytes",
    )
    clip_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    non_finite: Literal["stop", "skip"] = Field(
        default="stop",
        description="Effect of a loss or gradient norm that is NaN or infinite: stop ends the job, skip skips the update",
    )
    loss_reduction: Literal["mean", "tokens", "microbatches"] = Field(
        default="mean",
        description="Weight of microbatches: mean: equal; tokens: by the number of targets that the loss does not ignore "
        "(ignore_index in loss.args, -100 where it is not there), or what count_targets(target) of the loss returns. Both "
        "are tried to make up the loss of the batch as one; microbatches: equal and not tried, each is a batch of its own",
    )
    check_trace: bool = Field(
        default=True,
        description="Before the first step, compare the traced model with the model itself on one microbatch: output, "
        "loss, buffers, every gradient",
    )

    @model_validator(mode="after")
    def _only_fp16_scales(self) -> Self:
        if self.loss_scaling is not None and self.precision != "fp16":
            raise ValueError(
                f"training.loss_scaling is given and training.precision is {self.precision}, which scales no loss: "
                "leave it out, or set precision to fp16"
            )
        return self

    @model_validator(mode="after")
    def _microbatches_divide_the_batch(self) -> Self:
        if self.microbatches != "auto" and self.global_batch % self.microbatches:
            near = next(n for n in range(self.microbatches, 0, -1) if self.global_batch % n == 0)
            raise ValueError(
                f"global_batch {self.global_batch} is not divisible by microbatches {self.microbatches}: "
                f"set microbatches to {near}, or global_batch to a multiple of {self.microbatches}"
            )
        return self


class PipelineSection(SpecPart):
    """Stages, cut, schedule and recomputation."""

    stages: AutoStages = Field(
        default=1,
        description="auto: planning chooses a multiple of resources.meshes, or as many as `cut` names",
    )
    cut: Literal["auto"] | Texts = "auto"
    schedule: Annotated[str, BeforeValidator(_in_lower_case)] = "auto"
    recompute: (
        Literal["auto", "none", "all", "selective", "by_block"] | Annotated[Texts, Field(min_length=1)]
    ) = Field(
        default="auto",
        description="Stages (s0, s1, …) or modules that keep their inputs only and compute their forward again in "
        "the backward; all; selective: all keep the results of matrix products, convolutions and attention, too; by_block: "
        "all keep the inputs of their layers, and compute one layer again at a time; none; auto: where memory asks for it, "
        "by any of these, and where the model itself checkpoints",
    )
    overlap: bool = True
    replan: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: a clearly shorter order that measured costs give is swapped in between two steps, with "
        "data.lengths for single steps by their lengths; off: the first plan stays",
    )

    @model_validator(mode="after")
    def _schedule_trains_and_cut_fits(self) -> Self:
        if self.schedule not in TRAINING_SCHEDULES:
            raise ValueError(
                f"schedule {self.schedule!r} cannot train a job: use one of {', '.join(TRAINING_SCHEDULES)}"
            )
        if self.cut == []:
            raise ValueError("cut names no module: name the module that begins each stage, or write auto")
        if self.cut != "auto" and self.stages != "auto" and len(self.cut) != self.stages:
            raise ValueError(
                f"cut names {len(self.cut)} modules for {self.stages} stages: "
                "name the module that begins each stage, the first one too, or write auto"
            )
        return self


_JOB_CHECKPOINT = re.compile(r"([A-Za-z0-9-]{1,40})(?:@(\d{1,10}))?")
ABSOLUTE_URI = re.compile(r"/|~/|[a-z][a-z0-9+.-]*:/")


def parse_job_checkpoint(text: str) -> tuple[str, int | None] | None:
    """The job and the step of JOB or JOB@STEP; None for the place of a checkpoint."""
    match = _JOB_CHECKPOINT.fullmatch(text)
    return None if match is None else (match[1], None if match[2] is None else int(match[2]))


def _check_resume_from(value: str) -> str:
    if parse_job_checkpoint(value) is None and not ABSOLUTE_URI.match(value):
        raise ValueError(
            f"is {value!r}: write JOB or JOB@STEP (`slotline checkpoints JOB` lists the steps), or the absolute path or URI "
            "of a checkpoint's folder, which every worker sees"
        )
    return value


class CheckpointSection(SpecPart):
    """Place, interval and number of checkpoints."""

    uri: Text
    every_steps: Annotated[int, Field(ge=1, le=1_000_000_000)] = 50
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    asynchronous: bool = Field(
        True,
        description="Training goes on while a checkpoint is written from a copy of the state, where the memory of each "
        "worker has room for that beside its plan; false: training waits",
    )
    keep_every: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = Field(
        default=None,
        description="Checkpoints whose step is a multiple of this stay, beside the newest `keep`; a multiple of every_steps",
    )

    resume_from: Annotated[Text, AfterValidator(_check_resume_from)] | None = Field(
        default=None,
        description="Begin from a checkpoint: JOB (its newest) or JOB@STEP of one of your own jobs, or the absolute path or "
        "URI of a checkpoint's folder. Parameters, optimizer state and the position in data are taken over; training goes "
        "on behind its step",
    )

    copy_every_steps: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = Field(
        default=None,
        description="Interval of copies of the state in the nodes' host memory, beside checkpoints: behind a lost worker or "
        "driver training goes on from the newest of both. Less than every_steps; null: none. A node holds two copies of its "
        "workers' state, and two of the next node's",
    )

    @model_validator(mode="after")
    def _copies_are_between_checkpoints(self) -> Self:
        if self.copy_every_steps is not None and self.copy_every_steps >= self.every_steps:
            raise ValueError(
                f"checkpoint.copy_every_steps {self.copy_every_steps} is not less than every_steps {self.every_steps}: "
                "no copy would be newer than a checkpoint; set it lower, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _kept_ones_are_saved(self) -> Self:
        if self.keep_every is not None and self.keep_every % self.every_steps:
            near = max(1, round(self.keep_every / self.every_steps)) * self.every_steps
            raise ValueError(
                f"checkpoint.keep_every {self.keep_every} is no multiple of every_steps {self.every_steps}, and other steps "
                f"have no checkpoint: set it to {near}"
            )
        return self


class EvaluationSection(SpecPart):
    """Evaluation between steps: its data, its interval, the best checkpoint, and early stopping."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000_000)] = Field(
        default=100, description="Interval of evaluations in steps; one more follows the last step"
    )
    steps: Count | None = Field(
        default=None, description="Batches of training.global_batch samples; null: all of the data"
    )
    at_start: bool = Field(default=False, description="Also before the first step")
    metric: Annotated[str, Field(pattern=METRIC_PATTERN)] = Field(
        default="loss",
        description="The metric of keep_best and patience: loss, or one that the loss returns",
    )
    mode: Literal["min", "max"] | None = Field(
        default=None, description="Direction in which the metric is better; null: min for the loss"
    )
    keep_best: bool = Field(
        default=False,
        description="Keep the best checkpoint beside the newest; it is taken when it is found, due or not",
    )
    patience: Count | None = Field(
        default=None, description="End the job after this number of evaluations in a row that are no better"
    )
    data: DataSection

    @model_validator(mode="after")
    def _better_is_known(self) -> Self:
        if self.metric != "loss" and self.mode is None and (self.keep_best or self.patience is not None):
            raise ValueError(
                f"evaluation.metric is {self.metric!r}, and nothing says whether less or more of it is better: "
                "set evaluation.mode to min or max"
            )
        return self


class TrackerSection(SpecPart):
    """A tracker of the run's values: TensorBoard, W&B, MLflow or Trackio, or an object that a factory makes."""

    needed: ClassVar[dict[str, str]] = {
        "tensorboard": "dir",
        "wandb": "project",
        "mlflow": "experiment",
        "trackio": "project",
    }
    """The field that each library needs."""
    optional: ClassVar[dict[str, str]] = {"wandb": "entity", "mlflow": "uri"}

    to: Annotated[str, Field(max_length=100)] | None = Field(
        default=None, description="tensorboard, wandb, mlflow or trackio; null: as `factory` makes it"
    )
    dir: Text | None = Field(
        default=None,
        description="TensorBoard: folder of event files, an absolute path that every node sees, or a URL; a job has its own "
        "folder there, NAME-ID",
    )
    project: Text | None = Field(
        default=None,
        description="W&B and Trackio: the project; the run's id is the job's, or its name ends with it",
    )
    entity: Text | None = Field(default=None, description="W&B: user or team; null: the key's own")
    experiment: Text | None = Field(
        default=None, description="MLflow: the experiment, made where it is missing"
    )
    uri: Text | None = Field(
        default=None, description="MLflow: the tracking server; null: MLFLOW_TRACKING_URI"
    )
    factory: Annotated[str, Field(pattern=FACTORY_PATTERN, max_length=500)] | None = Field(
        default=None, description="Import path of what makes an object with start, log and finish"
    )
    args: LimitedArguments = Field(default={}, description="Arguments of the factory")

    @model_validator(mode="after")
    def _names_one_place_and_its_fields(self) -> Self:
        given = {name for name in type(self).model_fields if getattr(self, name)} - {"to"}
        if self.to is None:
            if self.factory is None:
                raise ValueError(
                    "names no tracker: give `to` (tensorboard, wandb, mlflow or trackio), or the factory of your own"
                )
            allowed = {"factory", "args"}
        elif self.to in self.needed:
            needed = self.needed[self.to]
            if needed not in given:
                raise ValueError(f"{self.to} has no {needed}: write {{to: {self.to}, {needed}: …}}")
            allowed = {needed, self.optional.get(self.to)}
        else:
            raise ValueError(
                f"to is {self.to!r}: write tensorboard, wandb, mlflow or trackio, or give a factory of your own tracker"
            )
        if others := sorted(given - allowed):
            place = self.to or "a factory"
            raise ValueError(
                f"{', '.join(others)} with {place}, which takes none: leave out {' and '.join(others)}"
            )
        if self.dir is not None and not (self.dir.startswith("/") or "://" in self.dir):
            raise ValueError(
                f"dir {self.dir!r} is relative, and the driver's own folder goes with its attempt: "
                "give an absolute path that every node sees, or a URL"
            )
        return self


def _check_trackers_differ(trackers: list[TrackerSection]) -> list[TrackerSection]:
    names = [tracker.to for tracker in trackers if tracker.to is not None]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"names {', '.join(twice)} twice: a job has one run there, leave out the other")
    return trackers


class RetrySection(SpecPart):
    """Number of further attempts after failed ones, by cause; -1: without limit."""

    infrastructure: Annotated[int, Field(ge=-1, le=1_000_000)] = 3
    user: Annotated[int, Field(ge=-1, le=1_000_000)] = 0
    preemption: Annotated[int, Field(ge=-1, le=1_000_000)] = -1


class CodeSection(SpecPart):
    """The user's own modules: a folder or package of code, and packages that pip installs."""

    working_dir: Text | None = None
    pip: Texts = []  # noqa: RUF012 (pydantic copies it)

    @model_validator(mode="after")
    def _server_can_read_the_code(self) -> Self:
        place = self.working_dir
        if place is not None and not place.startswith((PACKAGE_PREFIX, *REMOTE_CODE_PREFIXES)):
            raise ValueError(
                f"working_dir {place!r} is a folder that the server cannot read: submit with "
                "`slotline submit`, which uploads it, or POST a zip to /api/v1/packages and give the uri it answers"
            )
        return self


class JobSpec(SpecPart):
    """A job as a user submits it (DESIGN section 11). Unknown fields are refused."""

    name: Name = "job"
    model: ModelSection
    data: DataSection
    loss: FactorySection | None = Field(default=None, description="null: the model returns its own")
    optimizer: OptimizerSection = OptimizerSection(factory="torch.optim:AdamW")
    training: TrainingSection = TrainingSection()
    pipeline: PipelineSection = PipelineSection()
    resources: ResourcesSection = ResourcesSection()
    checkpoint: CheckpointSection | None = None
    evaluation: EvaluationSection | None = None
    tracking: Annotated[
        list[TrackerSection], Field(max_length=5, fail_fast=True), AfterValidator(_check_trackers_differ)
    ] = Field(default=[], description="Where the run's values go beside Slotline's own pages and metrics")
    retry: RetrySection = RetrySection()
    code: CodeSection = CodeSection()
    env: Environment = Field(default={}, description="Environment variables of the driver and the workers")
    secrets: SecretNames = Field(
        default=[],
        description="Secrets of the job's owner, by name: environment variables whose values no answer shows",
    )
    queue: Name = "default"
    project: Name = Field(
        default=DEFAULT_PROJECT, description="Whose members see it; all do where it is the default one"
    )
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] = 0
    max_duration: Duration | None = Field(
        default=None,
        description="Seconds (or 90m, 12h, 2d) for which it may hold accelerators, all attempts together: it saves a "
        "checkpoint and ends then; a job with such a limit may overtake others that wait",
    )
    labels: Labels = {}  # noqa: RUF012 (pydantic copies it)
    notifications: Notifications = Field(
        default=[], description="Webhooks: URLs that are called when the job reaches a state"
    )
    plan: Name | None = Field(
        default=None, description="Train with exactly this saved plan of the submitter's"
    )

    @model_validator(mode="before")
    @classmethod
    def _in_the_long_form(cls, data: object) -> object:
        """Without short forms, and with one mesh a stage where nothing says how many there are."""
        if not isinstance(data, dict):
            return data
        data = long_form(data)
        resources, pipeline = data.get("resources", {}), data.get("pipeline", {})
        if (
            not isinstance(resources, dict)
            or not isinstance(pipeline, dict)
            or resources.get("meshes") is not None
        ):
            return data
        stages = pipeline.get("stages", 1)
        if not isinstance(stages, int) or stages < 1:
            return data  # refused where it stands, once
        return {**data, "resources": {**resources, "meshes": stages}}

    @model_validator(mode="after")
    def _every_database_stores_it(self) -> Self:
        """Beside the fields' own checks: PostgreSQL stores a NUL in JSON, and every query that reads it fails."""
        check_storable(self.model_dump())
        return self

    @model_validator(mode="after")
    def _each_variable_once(self) -> Self:
        if both := sorted(set(self.env) & set(self.secrets)):
            raise ValueError(f"{', '.join(both)} in env and in secrets: leave out one")
        return self

    @model_validator(mode="after")
    def _unequal_lengths_fit(self) -> Self:
        lengths, evaluation = self.data.lengths, self.evaluation
        if evaluation is not None and evaluation.data.lengths is not None:
            check_evaluated_lengths(lengths, evaluation.data.lengths)
        if lengths is not None:
            resources, training = self.resources, self.training
            check_padded(
                loss=None if self.loss is None else self.loss.factory,
                loss_reduction=training.loss_reduction,
                tensor=max(resources.mesh_tensors),
                heterogeneous=resources.heterogeneous,
                device=resources.device,
                options={"compile": training.compile, "sync_batch_norm": training.sync_batch_norm},
            )
        return self

    @model_validator(mode="after")
    def _tokens_can_be_counted(self) -> Self:
        if self.training.loss_reduction == "tokens":
            if self.loss is None:
                raise ValueError(
                    "training.loss_reduction is tokens, and the model's own loss tells no targets to count: give `loss`"
                )
            if self.loss.args.get("reduction", "mean") != "mean":
                raise ValueError(
                    f"training.loss_reduction is tokens, which weighs means of microbatches, and loss.args.reduction is "
                    f"{self.loss.args['reduction']!r}: leave it out"
                )
        return self

    @model_validator(mode="after")
    def _evaluation_runs_and_its_best_has_a_place(self) -> Self:
        if self.evaluation is not None and self.evaluation.keep_best and self.checkpoint is None:
            raise ValueError(
                "evaluation.keep_best keeps a checkpoint, and the job has none: give checkpoint.uri"
            )
        return self

    @model_validator(mode="after")
    def _meshes_and_workers_fit(self) -> Self:
        if self.resources.meshes is None and self.pipeline.stages == "auto":
            raise ValueError(
                "pipeline.stages is auto and resources.meshes is not given: say how many meshes the job may have, "
                "their stages are chosen"
            )
        meshes = self.resources.meshes or 1
        stages, what = self.pipeline.stages, "pipeline.stages"
        if stages == "auto" and self.pipeline.cut != "auto":
            stages, what = len(self.pipeline.cut), "the modules named in pipeline.cut,"
        if stages != "auto" and meshes > stages:
            raise ValueError(
                f"resources.meshes {meshes} is more than {what} {stages}: "
                f"a mesh would hold no stage; set resources.meshes to {stages} or raise pipeline.stages"
            )
        if self.training.sync_batch_norm and self.resources.tensor > 1:
            raise ValueError(
                f"training.sync_batch_norm sums over the workers of a mesh, of which parallelism.tp "
                f"{self.resources.tensor} have the same rows: set tp to 1, or leave sync_batch_norm out"
            )
        check_optimizer_sharding(self.resources.shard, self.resources.meshes, self.optimizer.factory)
        check_elementwise_by_name(self.resources.tensor, self.optimizer.factory)
        count = self.training.microbatches
        dp_sizes = [
            size // tensor for size, tensor in zip(self.mesh_sizes, self.resources.mesh_tensors, strict=True)
        ]
        check_batch_divides(self.training.global_batch, None if count == "auto" else count, dp_sizes)
        return self

    @model_validator(mode="after")
    def _elastic_meshes_are_planned_anew(self) -> Self:
        fewest = self.resources.fewest_meshes
        if fewest is None:
            return self
        if self.plan is not None:
            raise ValueError(
                f"plan {self.plan!r} is for one number of meshes, and resources.meshes is {{min: {fewest}, max: "
                f"{self.resources.meshes}}}: give one number, or leave plan out"
            )
        if not isinstance(self.resources.shard, str):
            raise ValueError(
                "resources.shard lists meshes, whose number changes: write none or optimizer for all"
            )
        if self.checkpoint is None:
            raise ValueError(
                "resources.meshes is a range, and the job has no checkpoint to go on from with another number: give "
                "checkpoint.uri"
            )
        return self

    @property
    def mesh_sizes(self) -> list[int]:
        """The number of workers of each mesh."""
        return self.resources.mesh_sizes

    @property
    def accelerators(self) -> int:
        """Number of accelerators of the whole gang with its spares; of an elastic job the most."""
        return sum(self.mesh_sizes) + self.resources.spares

    @property
    def fewest_accelerators(self) -> int:
        """Number of accelerators with which it trains at least: those of its fewest meshes, without spares."""
        fewest = self.resources.fewest_meshes
        return sum(self.mesh_sizes) if fewest is None else fewest * self.resources.workers_per_mesh


def spec_with_meshes(spec: Mapping[str, Any], accelerators: int) -> dict[str, Any]:
    """The stored specification as a job of just so many accelerators has it: that of an attempt, of an elastic job, one with
    spares or one whose meshes were changed since."""
    resources = spec.get("resources")
    if not isinstance(resources, Mapping) or "workers_per_mesh" not in resources:
        return dict(spec)  # stored by another version
    if resources.get("spares"):
        spares = min(max(accelerators - sum(stored_mesh_sizes(resources)), 0), resources["spares"])
        return {**spec, "resources": {**resources, "spares": spares}}
    if resources.get("workers") or resources.get("tensors"):
        return dict(spec)
    meshes = accelerators // resources["workers_per_mesh"]
    if resources.get("fewest_meshes") is None and resources.get("meshes") == meshes:
        return dict(spec)
    return {**spec, "resources": {**resources, "meshes": meshes, "fewest_meshes": None}}


class SubmittedJob(JobSpec):
    """A JobSpec as users send it: without some of the fields in which stored ones have their meshes. A stored one is taken
    whole."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_stored_fields(cls, data: object) -> object:
        if isinstance(data, dict):
            check_no_stored_fields(data)
        return data


def stored_field(spec: Mapping[str, Any], section: str, field: str, default: Any) -> Any:
    """A field of a stored specification, which an older or newer Slotline may have written.

    `default` where the field is missing or of another type than `default` is.
    """
    part = spec.get(section)
    value = part.get(field, default) if isinstance(part, Mapping) else default
    return value if isinstance(value, type(default)) else default


def stored_retry(spec: Mapping[str, Any]) -> RetrySection:
    """The `retry` of a stored job, with defaults for fields that are missing or wrong."""
    names = RetrySection.model_fields
    return RetrySection.model_construct(
        **{name: stored_field(spec, "retry", name, names[name].default) for name in names}
    )


def stored_plan_name(spec: Mapping[str, Any]) -> str:
    """Name of the saved plan that a stored job was submitted with; empty where it has none."""
    name = spec.get("plan")
    return name if isinstance(name, str) else ""


def relative_places(spec: JobSpec) -> list[tuple[str, str, str]]:
    """Field, value and message of each place that workers, who all have other current folders, would not find."""
    found = []
    if spec.checkpoint is not None and not ABSOLUTE_URI.match(spec.checkpoint.uri):
        message = (
            "is relative, and every worker has another current folder: "
            "give an absolute path that all of them see, or a URL such as s3://bucket/folder"
        )
        found.append(("checkpoint.uri", spec.checkpoint.uri, message))
    if (weights := spec.model.weights) is not None and not weights.startswith(("/", "~/")):
        message = "is no absolute path: every worker reads its part itself; give one that all of them see"
        found.append(("model.weights", weights, message))
    return found
