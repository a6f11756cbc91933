"""Which accelerator a worker uses, and the transport that goes with it: NCCL on CUDA, gloo on CPU.

Settings come from the environment: SLOTLINE_NCCL_MAX_P2P_CHANNELS and SLOTLINE_NCCL_MAX_CTAS limit
the width of NCCL's kernels (GPU.md: a waiting one takes multiprocessors from compute).
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from worker.transport import Topology, Transport
from worker.transport.gloo import GlooTransport

# Hardware queues of a process: with CUDA's own 8, lanes of several peers share one, and compute waits behind a
# receive that waits. (32 in each of four processes on one GPU ran out of memory under MPS.) CUDA has 32 at most.
_QUEUES, _MOST_QUEUES = 16, 32
_OWN_STREAMS = 4  # compute, reduce, that of samples, and CUDA's own
log = logging.getLogger(__name__)

_NO_REMAPPING = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


def gpu_index(environment: Mapping[str, str], assigned: Sequence[str | int]) -> int:
    """The index at which torch finds the GPU that Ray assigned.

    Ray narrows CUDA_VISIBLE_DEVICES to the assigned GPU, so that it is 0, unless the user turned
    that off (it slows NCCL on some hosts). Then torch counts what the node's own CUDA_VISIBLE_DEVICES
    names (indices or UUIDs), and Ray answers with one of these names; without it, with an index.
    """
    if environment.get(_NO_REMAPPING, "").lower() not in ("1", "true"):  # as Ray reads it
        return 0
    if not assigned:
        raise RuntimeError(
            f"{_NO_REMAPPING} is set, but Ray assigned no GPU to this worker: unset it, or start Ray nodes with GPUs"
        )
    name = str(assigned[0])
    visible = [
        part.strip() for part in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()
    ]
    if name in visible:
        return visible.index(name)
    if not visible and name.isdigit():
        return int(name)
    raise RuntimeError(
        f"Ray assigned GPU {name!r} to this worker, but CUDA_VISIBLE_DEVICES is {','.join(visible)!r}: "
        f"start the Ray node with the GPUs that it may use, or unset {_NO_REMAPPING}"
    )


def choose_device(device: str, assigned: Callable[[], Sequence[str | int]], meshes: int = 1) -> None:
    """Make this worker's GPU the current device of this thread, before anything else uses CUDA here, with a hardware queue
    for each lane of a job of so many `meshes`; nothing to do on CPU."""
    if device == "cuda":
        lanes = 2 * (meshes - 1) + _OWN_STREAMS
        queues = min(max(_QUEUES, lanes), _MOST_QUEUES)
        given = os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(queues))
        if not given.isdigit() or int(given) < lanes:
            log.warning(
                "CUDA_DEVICE_MAX_CONNECTIONS is %s, and a worker of %d meshes has up to %d streams: some share a hardware "
                "queue, in which compute waits behind transfers%s",
                given,
                meshes,
                lanes,
                "" if given == str(queues) else "; leave it unset",
            )
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"the job wants CUDA, but torch {torch.__version__} finds no GPU on {socket.gethostname()}: "
                "install a CUDA build of torch there, or set resources.device to cpu"
            )
        torch.cuda.set_device(gpu_index(os.environ, assigned()))


def device_kind(device: str) -> str:
    """What has the same speed: the name of this worker's GPU, or of the processor with how many cores we may use."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def make_transport(
    device: str,
    topology: Topology,
    *,
    mesh: str,
    worker: int,
    store: tuple[str, int],
    host: str,
    connect_s: float,
) -> Transport:
    """A transport that is not connected yet. `host` is the address on which gloo's peers reach this worker."""
    common: dict[str, Any] = {
        "mesh": mesh,
        "worker": worker,
        "store_host": store[0],
        "store_port": store[1],
        "connect_timeout_s": connect_s,
    }
    if device != "cuda":
        return GlooTransport(topology, host=host, **common)
    from worker.transport.nccl import NcclSettings, NcclTransport

    settings = NcclSettings(
        max_p2p_channels=_whole_number("SLOTLINE_NCCL_MAX_P2P_CHANNELS", 2),
        max_ctas=_whole_number("SLOTLINE_NCCL_MAX_CTAS", None),
    )
    return NcclTransport(topology, settings=settings, **common)


def _whole_number(name: str, default: int | None) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}: give a whole number") from None
