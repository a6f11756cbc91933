"""Whether products of fp32 numbers may round to TF32 on CUDA, as `training.tf32` says: for the whole process."""

from __future__ import annotations

import warnings

import torch

from worker.job import Job


def use_tf32(allowed: bool | None) -> None:
    """Set it for matrix products and for cuDNN's convolutions and recurrent layers; None leaves torch's own choice.

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
    """What to tell where it does nothing."""
    if job.training.tf32 is None or device == "cuda":
        return []
    given = str(job.training.tf32).lower()
    return [f"training.tf32 is {given} and has no effect: the job runs on CPU, which has no TF32"]
