"""How tensors travel between the workers of a pipeline; one interface, several transports.

Knows ranks, tags and groups. Must not know stages, programs or schedules.
"""

from worker.transport.base import (
    AbortedError,
    ConnectError,
    EngineError,
    Failure,
    PeerLostError,
    Progress,
    Topology,
    Transport,
    finish,
    topology_of,
)

__all__ = [
    "AbortedError",
    "ConnectError",
    "EngineError",
    "Failure",
    "PeerLostError",
    "Progress",
    "Topology",
    "Transport",
    "finish",
    "topology_of",
]
