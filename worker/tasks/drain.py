"""Drains the Ray node of this machine before it ends, `python -m worker.tasks drain`: the preStop hook of Ray's pods.

Tells Ray that the node will be gone in SLOTLINE_DRAIN_S seconds, whatever ends it: a spot reclaim, an eviction, a rollout.
Nothing new is placed here then, and the attempts that are here save and go on elsewhere. Ends when none is left, or when
the time is over. Exit status 1 where Ray could not be told. Light: no torch.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection

from worker.machine.node import attempts_on_node, drain_node, own_node_id

DRAIN_LIMIT_VARIABLE = "SLOTLINE_DRAIN_S"
DRAIN_NODE_VARIABLE = "SLOTLINE_DRAIN_NODE"
"""Ray's id of the node; without it the one on which this process runs."""
DEFAULT_LIMIT_S = 120.0
_POLL_S = 0.5


def main() -> int:
    """Drain the node that the environment names, and wait until it is empty."""
    text = os.environ.get(DRAIN_LIMIT_VARIABLE, str(DEFAULT_LIMIT_S))
    try:
        limit_s = float(text)
        if not 0 < limit_s < math.inf:
            raise ValueError
    except ValueError:
        print(f"{DRAIN_LIMIT_VARIABLE} is {text!r}: give the seconds until the node ends", file=sys.stderr)
        return 1
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(drain(limit_s)), name="slotline-drain", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not ended:
        print(f"Ray did not answer within {limit_s:g} s", file=sys.stderr)
    return ended[0] if ended else 1


def drain(limit_s: float) -> int:
    """Drain the node and wait until it is empty, for `limit_s` seconds; the exit status. Where Ray's head is away the first
    question may never return."""
    ends_s = time.monotonic() + limit_s
    try:
        import ray

        ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
        node_id = os.environ.get(DRAIN_NODE_VARIABLE) or own_node_id()
        drain_node(node_id, limit_s, "the node is about to end")
    except Exception as error:
        print(f"the node was not drained: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"Ray drains node {node_id}, which ends within {limit_s:g} s", flush=True)
    if left := wait_until_empty(lambda: attempts_on_node(node_id), ends_s - _POLL_S):
        print(f"still here after {limit_s:g} s: {', '.join(sorted(left))}", flush=True)
    else:
        print("no attempt is here any more", flush=True)
    return 0


def wait_until_empty(
    attempts: Callable[[], Collection[str]],
    ends_s: float,
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Collection[str]:
    """The attempts that are left at `ends_s` of `now`; returns sooner when none is. Ray's head may be away meanwhile."""
    left: Collection[str] = ("attempts that Ray does not tell",)
    while now() < ends_s:
        try:
            if not (left := attempts()):
                break
        except Exception as error:
            print(f"Ray does not tell what is here: {type(error).__name__}: {error}", file=sys.stderr)
        sleep(_POLL_S)
    return left


if __name__ == "__main__":
    sys.exit(main())
