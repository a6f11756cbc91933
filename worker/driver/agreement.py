"""Before the first step: all workers start from the same values and read the same data, or the attempt ends.

What a checksum is stands in worker/agreement.py; how the workers are called in gang.py.
"""

from __future__ import annotations

from collections.abc import Callable

from worker.agreement import different_samples, different_splits, different_tensors, held_by_several
from worker.driver.gang import Gang
from worker.failure import AttemptFailure
from worker.held import cut_apart
from worker.reasons import Reason


def check_agreement(
    gang: Gang, *, limit_s: float, interrupted: Callable[[], None], unlike: bool = False
) -> None:
    """Raise AttemptFailure MODEL_BUILD_FAILED, DATA_FAILED or PLAN_INFEASIBLE with the names of what differs, and on whom.

    `interrupted` is that of `Gang.call`. Only what several workers hold is looked at. Between `unlike` meshes a tied
    parameter, whose gradients are summed whole there, may be shared otherwise: it is compared in pieces.
    """
    what = "comparing what the workers start from"
    held = gang.call(
        [worker.held_tensors.remote() for worker in gang.workers],
        what=what,
        limit_s=limit_s,
        interrupted=interrupted,
    )
    workers = [f"{address.mesh}/{address.worker}" for address in gang.addresses]
    if not unlike and (told := different_splits(workers, held)):
        raise AttemptFailure(Reason.PLAN_INFEASIBLE, told)
    several, cuts = held_by_several(held), cut_apart(held)
    found = gang.call(
        [worker.fingerprint.remote(several, cuts) for worker in gang.workers],
        what=what,
        limit_s=limit_s,
        interrupted=interrupted,
    )
    if told := different_samples(workers, found):
        raise AttemptFailure(Reason.DATA_FAILED, told)
    if told := different_tensors(workers, found):
        raise AttemptFailure(Reason.MODEL_BUILD_FAILED, told)
