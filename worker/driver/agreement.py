"""Before the first step: all workers start from the same values and read the same data, or the attempt ends.

What a checksum is stands in worker/agreement.py; how the workers are called in gang.py.
"""

from __future__ import annotations

from collections.abc import Callable

from worker.agreement import different_samples, different_splits, different_tensors, held_by_several
from worker.driver.gang import Gang
from worker.failure import AttemptFailure
from worker.reasons import Reason


def check_agreement(gang: Gang, *, limit_s: float, interrupted: Callable[[], None]) -> None:
    """Raise AttemptFailure MODEL_BUILD_FAILED, DATA_FAILED or PLAN_INFEASIBLE with the names of what differs, and on whom.

    `interrupted` is that of `Gang.call`. Only what several workers hold is looked at.
    """
    what = "comparing what the workers start from"
    names = gang.call(
        [worker.tensor_names.remote() for worker in gang.workers],
        what=what,
        limit_s=limit_s,
        interrupted=interrupted,
    )
    workers = [f"{address.mesh}/{address.worker}" for address in gang.addresses]
    if told := different_splits(workers, names):
        raise AttemptFailure(Reason.PLAN_INFEASIBLE, told)
    several = held_by_several(names)
    found = gang.call(
        [worker.fingerprint.remote(several) for worker in gang.workers],
        what=what,
        limit_s=limit_s,
        interrupted=interrupted,
    )
    if told := different_samples(workers, found):
        raise AttemptFailure(Reason.DATA_FAILED, told)
    if told := different_tensors(workers, found):
        raise AttemptFailure(Reason.MODEL_BUILD_FAILED, told)
