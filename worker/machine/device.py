"""Chooses a worker's accelerator, TF32 mode and transport (NCCL on CUDA, gloo on CPU).

choose_device must run before anything else uses CUDA in this thread. TF32 is set for the whole process, by the names
that torch had before 2.9: what they set can be read under both names, while code that reads the old names after the
new were set gets an error. SLOTLINE_NCCL_MAX_P2P_CHANNELS and SLOTLINE_NCCL_MAX_CTAS limit the width of NCCL's
kernels (GPU.md: a waiting kernel takes multiprocessors from compute).
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from worker.contract.job import Job
from worker.transport.base import Topology, Transport
from worker.transport.gloo import GlooTransport

# Hardware queues of a process: with CUDA's own 8, lanes of several peers share one, and compute waits behind a
# receive that waits. (32 in each of four processes on one GPU ran out of memory under MPS.) CUDA has 32 at most.
_MIN_HARDWARE_QUEUES, _MAX_HARDWARE_QUEUES = 16, 32
_STREAMS_BESIDE_LANES = 4  # compute, reduce, that of samples, and CUDA's own
log = logging.getLogger(__name__)

EXPANDABLE_SEGMENTS = "expandable_segments:True"
_NOSET_VISIBLE_DEVICES = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


def gpu_index(environment: Mapping[str, str], assigned: Sequence[str | int]) -> int:
    """The index at which torch finds the GPU that Ray assigned.

    Ray narrows CUDA_VISIBLE_DEVICES to the assigned GPU, so that it is 0, unless the user turned
    that off (it slows NCCL on some hosts). Then torch counts what the node's own CUDA_VISIBLE_DEVICES
    names (indices or UUIDs), and Ray answers with one of these names; without it, with an index.
    """
    if environment.get(_NOSET_VISIBLE_DEVICES, "").lower() not in ("1", "true"):  # as Ray reads it
        return 0
    if not assigned:
        raise RuntimeError(
            f"{_NOSET_VISIBLE_DEVICES} is set, but Ray assigned no GPU to this worker: unset it, or start Ray nodes "
            "with GPUs"
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
        f"start the Ray node with the GPUs that it may use, or unset {_NOSET_VISIBLE_DEVICES}"
    )


def choose_device(device: str, assigned: Callable[[], Sequence[str | int]], meshes: int = 1) -> None:
    """Make this worker's GPU the current device of this thread, before anything else uses CUDA here, with a hardware queue
    for each lane of a job of `meshes`; nothing to do on CPU."""
    if device == "cuda":
        lanes = 2 * (meshes - 1) + _STREAMS_BESIDE_LANES
        queues = min(max(_MIN_HARDWARE_QUEUES, lanes), _MAX_HARDWARE_QUEUES)
        queue_count = os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(queues))
        if not queue_count.isdigit() or int(queue_count) < lanes:
            log.warning(
                "CUDA_DEVICE_MAX_CONNECTIONS is %s, and a worker of %d meshes has up to %d streams: some share a hardware "
                "queue, in which compute waits behind transfers%s",
                queue_count,
                meshes,
                lanes,
                "" if queue_count == str(queues) else "; leave it unset",
            )
        _use_expandable_segments()
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"the job wants CUDA, but torch {torch.__version__} finds no GPU on {socket.gethostname()} "
                f"({_cuda_error()}): {_cuda_remedy()}, or set resources.device to cpu"
            )
        torch.cuda.set_device(gpu_index(os.environ, assigned()))


_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def _use_expandable_segments() -> None:
    """Have torch's allocator grow its segments, as side streams and tensors of many sizes fragment fixed ones; unless the
    node or the job says how it allocates, or several workers share a GPU (MPS), where that was not tried."""
    shared = int(os.environ.get("SLOTLINE_WORKERS_PER_GPU", "1")) > 1
    if not shared and not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ[_ALLOCATOR_VARIABLES[0]] = EXPANDABLE_SEGMENTS


def _cuda_error() -> str:
    """CUDA's own words on why there is no GPU for this process."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0].rstrip(".")
    return "CUDA says no reason"


def _cuda_remedy() -> str:
    if torch.version.cuda is None:
        return "install a CUDA build of torch there"
    return (
        f"this torch wants a GPU and a driver for CUDA {torch.version.cuda}: see what nvidia-smi shows there, update the "
        "driver or install a build of torch for an older CUDA"
    )


def device_kind(device: str) -> str:
    """The kind of accelerator, of equal speed: the name of the GPU, or of the processor with its usable cores."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_cpu_model_name()}, {cores} cores"


def _cpu_model_name() -> str:
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
    join_s: float | None = None,
) -> Transport:
    """A transport that is not connected yet. `host` is the address on which gloo's peers reach this worker.

    Workers wait for each other for `join_s` seconds (None: `connect_s`), and then connect within `connect_s`."""
    common: dict[str, Any] = {
        "mesh": mesh,
        "worker": worker,
        "store": store,
        "connect_timeout_s": connect_s,
        "join_timeout_s": join_s,
    }
    if device != "cuda":
        return GlooTransport(topology, host=host, **common)
    from worker.transport.nccl import NcclSettings, NcclTransport

    NcclSettings(
        max_p2p_channels=_integer_variable("SLOTLINE_NCCL_MAX_P2P_CHANNELS", 2),
        max_ctas=_integer_variable("SLOTLINE_NCCL_MAX_CTAS", None),
    ).apply()
    return NcclTransport(topology, **common)


def _integer_variable(name: str, default: int | None) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}: give a whole number") from None


def use_tf32(allowed: bool | None) -> None:
    """Set TF32 for matrix products and for cuDNN's convolutions and recurrent layers; None leaves torch's own choice.

    By the names that torch had before 2.9: what they set reads alike under both, while code that asks by the old ones
    after the new were set gets an error.
    """
    if allowed is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there are new names
        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.backends.cudnn.allow_tf32 = allowed


def tf32_notes(job: Job, device: str) -> list[str]:
    """A note where training.tf32 has no effect."""
    if job.training.tf32 is None or device == "cuda":
        return []
    value = str(job.training.tf32).lower()
    return [f"training.tf32 is {value} and has no effect: the job runs on CPU, which has no TF32"]
