"""Free TCP ports for servers that must be told theirs and bind it only later."""

from __future__ import annotations

import contextlib
import random
import socket

# Below what Linux, macOS and Windows give to outgoing connections, beside Ray's workers (10002 to 19999)
# and Kubernetes' node ports (from 30000): a port that the system itself chose ("bind to 0") is soon given
# to somebody's outgoing connection, and the server that was to have it cannot start.
_RANGE = range(20000, 30000)
_TRIES = 1000


def free_ports(number: int) -> list[int]:
    """`number` different ports that nobody on this machine listens at, on any IPv4 address.

    Where the system's range for outgoing connections is the default one, none of those takes them later; but
    another server may: who starts one still has to be ready for that. Raises OSError when none can be found.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.SystemRandom().sample(_RANGE, _TRIES):
            if len(found) == number:
                break
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                found.append(port)
    if len(found) < number:
        raise OSError(f"no {number} free ports between {_RANGE.start} and {_RANGE.stop - 1} on this machine")
    return found
