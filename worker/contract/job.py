"""The job specification as workers read it: JSON parsed once into frozen dataclasses, all defaults in one place.

Holds what driver and actors read (DESIGN section 11); retries, queue and priority belong to the control plane,
which has validated the whole specification before. Unknown fields are ignored, since a control plane may be newer
than the worker's image in a rolling upgrade. Also the candidate stage and microbatch counts for `auto`, and the
words of `training.precision`. Pure values, light: no torch.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

from worker.contract.profile import CutError

FP16 = "fp16"
# The type to which autocast casts, by its name in torch; fp32 leaves modules in their own.
AUTOCAST_DTYPES = {"fp32": None, "bf16": "bfloat16", FP16: "float16"}
COMPILE_LIMIT_S = 1200.0
"""Limit of compiling in one worker, once for the layers that it measures and once for its stages."""
SKIP_LIMIT_S = 1800.0
"""Limit of a resume that passes over samples of a stream which cannot seek: half a million at 300 a second."""
METRICS_LINGER_S = 60.0
"""Drivers still serve the metrics of a finished job for this time: some scrapes at the usual interval of 15 seconds."""


@dataclass(frozen=True)
class LossScaling:
    """The loss scale of fp16, which begins as torch.amp.GradScaler's does and goes on by its defaults."""

    init_scale: float = 2.0**16


Section = TypeVar("Part")
AUTO = "auto"


@dataclass(frozen=True)
class Factory:
    """An import path `module:attribute` and the arguments it is called with."""

    factory: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Model(Factory):
    """A model; `output` names the tensor of its result that the loss takes, where there are several. `weights` is a
    path of weights to start from, `freeze` are patterns (worker/model/factory.py) of parameters that stay as they are.
    `train` is called where model.train() is called once when the model is built, or as_built.
    """

    output: str | None = None
    weights: str | None = None
    freeze: tuple[str, ...] = ()
    train: str = "called"


@dataclass(frozen=True)
class Loader:
    """Processes of torch's DataLoader that read for one worker (0: a thread of the worker), how many microbatches each
    reads ahead, and how long it may be silent."""

    workers: int = 0
    prefetch: int = 2
    pin_memory: bool = True
    timeout_s: float = 120.0


class Bucket(NamedTuple):
    """The shape to which a microbatch of samples of unequal lengths is padded: `rows` over all workers of a mesh."""

    length: int
    rows: int

    @property
    def tokens(self) -> int:
        """With padding."""
        return self.length * self.rows

    def __str__(self) -> str:
        return f"{self.rows} x {self.length}"


@dataclass(frozen=True)
class Lengths:
    """Padding of samples of unequal lengths: the length of input `field` (None: the first one, or input_ids) is padded to a
    bucket. `buckets` is auto, or lengths in ascending order; `pad` the value behind the end of `field`."""

    field: str | None = None
    buckets: str | tuple[int, ...] = AUTO
    pad: int = 0


@dataclass(frozen=True)
class Data(Factory):
    """A data set or a stream, and how many steps' samples are read ahead of the one that runs (0: none).

    `split` is one of several data sets by name; `columns` are fields of samples that are dicts, or {name in the model:
    field}. `at_end` of a stream: repeat or stop. `collate` None: samples are stacked, with `lengths` padded before.
    """

    prefetch: int = 2
    split: str | None = None
    columns: tuple[str, ...] | Mapping[str, Any] | None = None
    shuffle: bool = True
    at_end: str = "repeat"
    loader: Loader = Loader()
    lengths: Lengths | None = None
    collate: Factory | None = None


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters by patterns of their names (worker/model/factory.py), and the optimizer's settings for them."""

    match: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, data: Any, where: str) -> ParameterGroup:
        """From JSON: what is not `match` is a setting."""
        if not isinstance(data, Mapping):
            raise ValueError(f"{where} is {data!r}: an object is wanted")
        settings = {name: value for name, value in data.items() if name != "match"}
        return cls(_parse_value(tuple[str, ...], data.get("match"), f"{where}.match"), settings)


@dataclass(frozen=True)
class Optimizer(Factory):
    """An optimizer, what changes its learning rate after every step, and groups of parameters with settings of their
    own: each parameter is in the first that matches it, or in none."""

    schedule: Factory | None = None
    groups: tuple[ParameterGroup, ...] = ()


@dataclass(frozen=True)
class Training:
    """`precision` is fp32, bf16 or fp16 (with `loss_scaling`; None is GradScaler's default), `transfers` auto (tensors
    travel as they are) or bf16 (rounded, half the bytes); `non_finite` stop or skip: what a step does whose loss is no
    number. `check_trace`: compare the traced model with the model itself before the first step. `loss_reduction` mean
    or microbatches (they count alike) or tokens. `sync_batch_norm`: BatchNorm normalises over all workers of a mesh.
    `tf32`: whether products may round so on CUDA; None is torch's choice.

    `microbatches` is a number, or auto: planning chooses it (worker/contract/job.py).
    """

    steps: int = 100
    global_batch: int = 32
    microbatches: str | int = 8
    seed: int = 0
    precision: str = "fp32"
    transfers: str = "auto"
    clip_grad_norm: float | None = None
    non_finite: str = "stop"
    check_trace: bool = True
    loss_reduction: str = "mean"
    loss_scaling: LossScaling | None = None
    sync_batch_norm: bool = False
    tf32: bool | None = None
    compile: bool = False

    @property
    def compiling_s(self) -> float:
        """Seconds that a worker may take to compile its layers, and again to compile its stages."""
        return COMPILE_LIMIT_S if self.compile else 0.0


@dataclass(frozen=True)
class Pipeline:
    """`stages` is a number, or auto; `cut` is auto, or the modules that begin a stage. `recompute` is the planner's:
    auto, none, all, selective, by_block, or names. `replan`: auto or off."""

    stages: str | int = 1
    cut: str | tuple[str, ...] = "auto"
    schedule: str = "auto"
    recompute: str | tuple[str, ...] = "auto"
    overlap: bool = True
    replan: str = "auto"


@dataclass(frozen=True)
class Resources:
    """The gang of a job: meshes, their sizes, tensor parallelism, ZeRO-1, device and memory.

    `meshes` None is one a stage; see `Job.meshes`. `memory_per_worker` is auto, or bytes. `workers` has the size of each
    mesh where meshes are heterogeneous; `workers_per_mesh` is then the largest. `shard` is none or optimizer (ZeRO-1),
    one for all meshes or one for each. `tensor` is the size of a tensor-parallel group, which splits matrices by
    `tensor_plan` (module-name patterns to styles, see worker/parallel/tensor/plans.py); `tensors` has that size for each
    mesh where it differs, and `tensor` is then the largest. `fewest_meshes` is of an elastic job that no attempt has taken
    up: an attempt's job has so many `meshes` as the attempt. The control plane places a gang on an `accelerator` type.
    `spares` are accelerators beside those of the meshes, for lost workers.
    """

    meshes: int | None = None
    fewest_meshes: int | None = None
    workers_per_mesh: int = 1
    tensor: int = 1
    tensor_plan: Mapping[str, Any] | None = None
    workers: tuple[int, ...] | None = None
    tensors: tuple[int, ...] | None = None
    shard: str | tuple[str, ...] = "none"
    device: str = "auto"
    memory_per_worker: str | int = "auto"
    accelerator: str | None = None
    spares: int = 0


@dataclass(frozen=True)
class CheckpointPolicy:
    """The place, frequency and retention of checkpoints.

    The newest `keep` stay, and those of every `keep_every`-th step (a multiple of `every_steps`). `asynchronous`: they
    are written beside training, where a copy of the state fits. `resume_from` names the checkpoint that the job begins
    from, as its user does: the control plane says where it lies. Every `copy_every_steps` the state is copied to host
    memory that outlives workers and drivers; None: never.
    """

    uri: str
    every_steps: int = 50
    keep: int = 2
    asynchronous: bool = True
    keep_every: int | None = None
    resume_from: str | None = None
    copy_every_steps: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """The data and frequency of evaluation: every `every_steps` steps, and before the first with `at_start`.

    `steps` batches of training.global_batch samples, null for all of the data; `keep_best` and `patience` go by
    `metric`, of which `mode` (min, max) says what is better: null is min, which only the loss may leave open.
    """

    data: Data
    every_steps: int = 100
    steps: int | None = None
    at_start: bool = False
    metric: str = "loss"
    mode: str | None = None
    keep_best: bool = False
    patience: int | None = None


@dataclass(frozen=True)
class TrackerSpec:
    """A tracker of the run: `to` tensorboard (with `dir`), wandb (`project`, `entity`), mlflow (`experiment`, `uri`) or
    trackio (`project`); or, where `to` is None, an object that `factory` makes of `args`."""

    to: str | None = None
    dir: str | None = None
    project: str | None = None
    entity: str | None = None
    experiment: str | None = None
    uri: str | None = None
    factory: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Code:
    """The user's own modules, as Ray brought them here."""

    working_dir: str | None = None
    pip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """One training run, as `POST /api/v1/jobs` takes it. `loss` None: the model returns its own."""

    model: Model
    data: Data
    loss: Factory | None = None
    optimizer: Optimizer = Optimizer("torch.optim:AdamW")
    training: Training = Training()
    pipeline: Pipeline = Pipeline()
    resources: Resources = Resources()
    checkpoint: CheckpointPolicy | None = None
    evaluation: Evaluation | None = None
    tracking: tuple[TrackerSpec, ...] = ()
    code: Code = Code()

    @property
    def meshes(self) -> int:
        """The number of meshes of the job's gang."""
        if self.resources.meshes is not None:
            return self.resources.meshes
        if self.pipeline.stages == AUTO:
            raise ValueError("job.pipeline.stages is auto: give resources.meshes, which it fills")
        return int(self.pipeline.stages)

    @property
    def mesh_sizes(self) -> tuple[int, ...]:
        """The number of workers of each mesh."""
        return self.resources.workers or (self.resources.workers_per_mesh,) * self.meshes

    @property
    def tensors(self) -> tuple[int, ...]:
        """The tensor-parallel size of each mesh."""
        return self.resources.tensors or (self.resources.tensor,) * self.meshes

    def tp_size(self, mesh: str) -> int:
        """The tensor-parallel size of `mesh`."""
        return self.tensors[int(mesh[1:])]

    @property
    def dp_sizes(self) -> tuple[int, ...]:
        """The data-parallel size of each mesh."""
        return tuple(size // tensor for size, tensor in zip(self.mesh_sizes, self.tensors, strict=True))

    @property
    def heterogeneous(self) -> bool:
        """True if rank w of one mesh may hold another shard than rank w of another mesh."""
        return self.resources.workers is not None or self.resources.tensors is not None

    @property
    def sharded(self) -> tuple[str, ...]:
        """The meshes whose data-parallel workers share the optimizer's state."""
        given = self.resources.shard
        shards = (given,) * self.meshes if isinstance(given, str) else given
        found = enumerate(zip(shards, self.dp_sizes, strict=True))
        return tuple(f"m{index}" for index, (shard, data) in found if shard == "optimizer" and data > 1)

    @property
    def batch_multiple(self) -> int:
        """A microbatch's samples are a multiple of this, so that the workers of every mesh have equally many."""
        return math.lcm(*self.dp_sizes)

    @property
    def max_dp_size(self) -> int:
        """The largest data-parallel size of a mesh; ranks of one tensor-parallel group have the same samples."""
        return max(self.dp_sizes)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Job:
        """The job of a JSON object; ValueError names a field that is missing or of another type."""
        return _parse_section(cls, data, "job")


def _parse_section(cls: type[Section], data: Any, where: str) -> Section:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} is {data!r}: an object is wanted")
    types_of_fields = typing.get_type_hints(cls)
    given = {}
    for one in fields(cls):
        if one.name in data:
            given[one.name] = _parse_value(types_of_fields[one.name], data[one.name], f"{where}.{one.name}")
        elif one.default is MISSING and one.default_factory is MISSING:
            raise ValueError(f"{where}.{one.name} is missing")
    return cls(**given)


def _parse_value(wanted: Any, value: Any, where: str) -> Any:
    """Parse `value` as the type `wanted`, one of the types of the fields above; ValueError names `where`."""
    choices = typing.get_args(wanted) if typing.get_origin(wanted) is types.UnionType else (wanted,)
    for choice in choices:
        if is_dataclass(choice) and isinstance(value, Mapping):
            return _parse_section(choice, value, where)
        if choice == tuple[ParameterGroup, ...] and isinstance(value, list | tuple):
            return tuple(ParameterGroup.read(entry, f"{where}[{i}]") for i, entry in enumerate(value))
        if choice == tuple[TrackerSpec, ...] and isinstance(value, list | tuple):
            return tuple(_parse_section(TrackerSpec, entry, f"{where}[{i}]") for i, entry in enumerate(value))
        if choice == tuple[str, ...] and isinstance(value, list | tuple):
            return tuple(_parse_value(str, entry, f"{where}[{i}]") for i, entry in enumerate(value))
        if choice == tuple[int, ...] and isinstance(value, list | tuple):
            return tuple(_parse_value(int, entry, f"{where}[{i}]") for i, entry in enumerate(value))
        if choice is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if choice == Mapping[str, Any] and isinstance(value, Mapping):
            return value
        if isinstance(choice, type) and type(value) is choice:
            return value
    names = " or ".join(getattr(choice, "__name__", str(choice)) for choice in choices)
    raise ValueError(f"{where} is {value!r}: {names.replace('NoneType', 'null')} is wanted")


# Numbers of microbatches that are profiled at most: each is a trace and a measurement of all layers.
MAX_PROFILED_COUNTS = 8
# Beyond so many microbatches a mesh, filling and draining a pipeline is less than 3 % of its step.
MAX_MICROBATCHES_PER_MESH = 32
# Stages a mesh: with each more the transfers grow and the bubble shrinks less.
MAX_STAGES_PER_MESH = 4
_STAGES_PER_MESH = {
    AUTO: range(1, MAX_STAGES_PER_MESH + 1),
    "interleaved-1f1b": range(2, MAX_STAGES_PER_MESH + 1),
    "zb-v": range(2, 3),
}
_ONE_STAGE_PER_MESH = range(1, 2)


def microbatch_counts(job: Job) -> tuple[int, ...]:
    """The numbers of microbatches that may be chosen, ascending: the job's own, or divisors of its batch that
    leave every worker of a mesh the same number of samples, at most MOST_COUNTS of them.

    Raises ValueError where no number fits.
    """
    training, workers = job.training, job.batch_multiple
    if training.microbatches != AUTO:
        return (int(training.microbatches),)
    shares, rest = divmod(training.global_batch, workers)
    if rest:
        sizes = list(job.dp_sizes)
        whom = (
            f"meshes of {sizes} workers"
            if job.heterogeneous
            else f"{workers} data-parallel workers of a mesh"
        )
        raise ValueError(
            f"training.global_batch {training.global_batch} cannot be shared by {whom}, "
            f"whatever training.microbatches is: set global_batch to a multiple of {workers}"
        )
    divisors = [count for count in range(1, shares + 1) if shares % count == 0]
    most = MAX_MICROBATCHES_PER_MESH * job.meshes
    return _geometric_subset([count for count in divisors if count <= most])


def _geometric_subset(counts: list[int]) -> tuple[int, ...]:
    """The first, the last, and between them those nearest to even steps of a geometric row."""
    if len(counts) <= MAX_PROFILED_COUNTS:
        return tuple(counts)
    steps = (counts[-1] / counts[0]) ** (1 / (MAX_PROFILED_COUNTS - 1))
    wanted = [counts[0] * steps**k for k in range(MAX_PROFILED_COUNTS)]
    return tuple(sorted({min(counts, key=lambda count: max(count / w, w / count)) for w in wanted}))


def stage_counts(job: Job, layers: int) -> tuple[int, ...]:
    """The numbers of stages that may be chosen, ascending: the job's own, or multiples of its meshes that its
    schedule can run. Raises CutError where the model has too few layers for the least of them.
    """
    pipeline = job.pipeline
    if pipeline.cut != AUTO:
        return (len(pipeline.cut),)
    if pipeline.stages != AUTO:
        return (int(pipeline.stages),)
    rounds = _STAGES_PER_MESH.get(pipeline.schedule, _ONE_STAGE_PER_MESH)
    if job.meshes == 1:
        rounds = rounds[:1]  # what lies on one mesh moves nothing: more stages only cost
    found = tuple(job.meshes * count for count in rounds if job.meshes * count <= layers)
    if not found:
        raise CutError(
            f"pipeline.stages auto wants at least {job.meshes * rounds[0]} stages for resources.meshes {job.meshes} "
            f"and schedule {pipeline.schedule}, but the model has only {layers} modules that may begin a stage: "
            f"set resources.meshes to {max(1, layers // rounds[0])} or less, or split the model into more modules"
        )
    return found


def may_interleave(job: Job) -> bool:
    """True if a mesh may hold several stages, so that the last mesh sends to the first."""
    return job.meshes < (stage_counts(job, MAX_STAGES_PER_MESH * job.meshes)[-1])


_PLACEMENT_GROUP_PREFIX = "slotline-"


def placement_group_name(attempt_id: str) -> str:
    """The name of an attempt's placement group, unique in the cluster."""
    return f"{_PLACEMENT_GROUP_PREFIX}{attempt_id}"


_KEEPER_PREFIX = "slotline-copies-"


def keeper_name(job: str, node_id: str) -> str:
    """The name of the actor that keeps copies of a job's state on a node of Ray (its id)."""
    return f"{_KEEPER_PREFIX}{job}-{node_id}"


def job_of_keeper(name: str) -> str | None:
    """The job of the keeper with this name; None for the name of another actor."""
    return name.removeprefix(_KEEPER_PREFIX).rpartition("-")[0] if name.startswith(_KEEPER_PREFIX) else None


def gpu_share(workers_per_gpu: int) -> float:
    """The part of a GPU that each of its workers holds, as fine as Ray counts."""
    return int(10_000 / workers_per_gpu) / 10_000


ACCELERATOR_TYPE_LABEL = "ray.io/accelerator-type"
"""A label of Ray's nodes: Ray sets it where it knows the accelerators, and whoever starts a node may."""
_TYPE_RESOURCE = "accelerator_type:"


def accelerator_type_of(
    resource: str, labels: Mapping[str, str], resources: Mapping[str, float]
) -> str | None:
    """The type of the accelerators that are `resource` on a Ray node: that of its label, else of the resource that Ray
    found; None where it has neither, and for CPU workers of a node with GPUs, whose type it tells."""
    if resource != "GPU" and resources.get("GPU"):
        return None
    if label := labels.get(ACCELERATOR_TYPE_LABEL):
        return label
    types = sorted(name for name in resources if name.startswith(_TYPE_RESOURCE))
    return types[0].removeprefix(_TYPE_RESOURCE) if types else None


def is_placement_group_name(name: str) -> bool:
    """True for the name of the placement group of any attempt."""
    return name.startswith(_PLACEMENT_GROUP_PREFIX)
