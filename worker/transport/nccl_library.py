"""cupy's door to NCCL, and whether it leads to the NCCL that torch has. Knows no communicators."""

from __future__ import annotations

from typing import Any

from worker.transport.base import ConnectError


def check_versions(of_torch: tuple[int, ...], of_cupy: int) -> None:
    """Refuse two different NCCLs in one process: whichever loads first serves both, and structures differ.

    ConnectError with the pair that fits. `of_cupy` is NCCL's own number, 22809 for 2.28.9.
    """
    theirs = (of_cupy // 10000, of_cupy // 100 % 100, of_cupy % 100)
    ours = tuple(of_torch[:3])
    if theirs != ours:
        want, have = (".".join(map(str, version)) for version in (ours, theirs))
        raise ConnectError(
            f"torch was built for NCCL {want}, but cupy loads NCCL {have}: install nvidia-nccl-cu12 or "
            f"nvidia-nccl-cu13 =={want} (the one of torch's CUDA) and let cupy find that library first"
        )


def load_nccl() -> Any:
    """cupy.cuda.nccl; ConnectError where it or its library is missing."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ConnectError(
            "cupy is not installed: install slotline[cuda12] or slotline[cuda13], as torch's CUDA has it"
        ) from error
    if not nccl.available:  # an import that failed inside cupy is only a warning there
        raise ConnectError(
            "cupy finds no NCCL library (libnccl.so.2): import torch first, which brings its own, or install "
            "nvidia-nccl-cu12 or nvidia-nccl-cu13, as torch's CUDA has it"
        )
    return nccl
