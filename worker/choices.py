"""Which numbers of microbatches and of stages may be chosen where a job says auto.

Pure values, light: no torch. Which of them is best is found by planning (service/scheduler/joint.py).
"""

from __future__ import annotations

from worker.job import AUTO, Job
from worker.model.errors import CutError

# Numbers of microbatches that are profiled at most: each is a trace and a measurement of all layers.
MOST_COUNTS = 8
# Beyond so many microbatches a mesh, filling and draining a pipeline is less than 3 % of its step.
MOST_MICROBATCHES_A_MESH = 32
# Stages a mesh: with each more the transfers grow and the bubble shrinks less.
MOST_ROUNDS = 4
_ROUNDS = {
    AUTO: range(1, MOST_ROUNDS + 1),
    "interleaved-1f1b": range(2, MOST_ROUNDS + 1),
    "zb-v": range(2, 3),
}
_ONE_ROUND = range(1, 2)


def microbatch_counts(job: Job) -> tuple[int, ...]:
    """The numbers of microbatches that may be chosen, ascending: the job's own, or divisors of its batch that
    leave every worker of a mesh the same number of samples, at most MOST_COUNTS of them.

    Raises ValueError where no number fits.
    """
    training, workers = job.training, job.row_step
    if training.microbatches != AUTO:
        return (int(training.microbatches),)
    shares, rest = divmod(training.global_batch, workers)
    if rest:
        sizes = list(job.data_sizes)
        whom = f"meshes of {sizes} workers" if job.unlike else f"resources.workers_per_mesh {workers}"
        raise ValueError(
            f"training.global_batch {training.global_batch} cannot be shared by {whom}, "
            f"whatever training.microbatches is: set global_batch to a multiple of {workers}"
        )
    divisors = [count for count in range(1, shares + 1) if shares % count == 0]
    most = MOST_MICROBATCHES_A_MESH * job.meshes
    return _spread([count for count in divisors if count <= most])


def _spread(counts: list[int]) -> tuple[int, ...]:
    """The first, the last, and between them those nearest to even steps of a geometric row."""
    if len(counts) <= MOST_COUNTS:
        return tuple(counts)
    steps = (counts[-1] / counts[0]) ** (1 / (MOST_COUNTS - 1))
    wanted = [counts[0] * steps**k for k in range(MOST_COUNTS)]
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
    rounds = _ROUNDS.get(pipeline.schedule, _ONE_ROUND)
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


def may_loop(job: Job) -> bool:
    """Whether some mesh may hold several stages, so that the last mesh sends to the first."""
    return job.meshes < (stage_counts(job, MOST_ROUNDS * job.meshes)[-1])
