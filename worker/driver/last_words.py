"""Of a worker that is gone: what it was doing, read on its node, for the message that ends the attempt."""

from __future__ import annotations

import logging

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from worker.failure import AttemptFailure
from worker.last_action import LastWords, last_words
from worker.node import WorkerAddress

log = logging.getLogger(__name__)

_READ_LIMIT_S = 10.0


def with_last_words(failure: AttemptFailure, address: WorkerAddress) -> AttemptFailure:
    """`failure`, of the worker at `address`, with what its process left; as it is where nothing can be read."""
    try:
        strategy = NodeAffinitySchedulingStrategy(address.node_id, soft=False)
        ref = _read.options(num_cpus=0, scheduling_strategy=strategy).remote(address.process_id)
        found = ray.get(ref, timeout=_READ_LIMIT_S)
    except Exception as error:  # the node may be gone as well
        log.debug("no last words of %s: %s", address, error)
        return failure
    return failure if found is None else told(failure, found)


def told(failure: AttemptFailure, found: LastWords) -> AttemptFailure:
    """`failure` with the action and the native error of a process that left `found`."""
    where = f" in {found.action}" if found.action else ""
    if found.signal is None:
        message = f"{failure.message}; it was{where}" if where else failure.message
        return AttemptFailure(failure.reason, message, failure.details)
    return AttemptFailure(
        failure.reason,
        f"{failure.message}; its process died in native code ({found.signal}){where}: an operator of torch or of "
        "another library that the model calls crashed, which is no error that Python sees; the log has the Python "
        "stack, whose first lines are the call",
        f"{failure.details}\n{found.stack}".strip(),
    )


@ray.remote(max_retries=0)
def _read(process_id: int) -> LastWords | None:
    return last_words(process_id)
