"""Under which key the profile of a job's layers is kept: the same key, the same times."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace

import torch

from worker.batches import Batches
from worker.compiled.compiler import missing_compiler
from worker.device import device_kind
from worker.job import Job
from worker.model.profile import PROFILE_FORMAT
from worker.nests import all_tensors


def profile_key(
    job: Job, device: str, batches: Batches, microbatches: int, workers: int, tensor: int = 1
) -> str:
    """Of model, shapes, precision, loss, whether compiled, kind of device, torch, how many share matrices (`tensor`), and
    on CPU the `workers` of the gang, which share the cores. Workers of two kinds thus have two keys."""
    inputs, target = batches.sample
    rows = batches.rows(microbatches)
    parts = {
        "model": asdict(replace(job.model, weights=None)),
        "code": asdict(job.code),
        "loss": job.loss and asdict(job.loss),
        "keywords": batches.keywords,
        "shapes": [[[rows, *t.shape[1:]], str(t.dtype)] for t in (*inputs, *all_tensors(target))],
        "precision": [job.training.precision, job.training.transfers, *_set(job.training.tf32)],
        "device": device,
        "device_name": device_kind(device),
        "workers": workers if device == "cpu" else 1,
        "torch": torch.__version__,
        "format": PROFILE_FORMAT,
    }
    if job.training.compile:  # what is measured without a compiler is not what runs once there is one
        parts["compiled"] = missing_compiler(device) is None
    if tensor > 1:
        parts["tensor"] = [tensor, job.resources.tensor_plan]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _set(value: bool | None) -> list[bool]:
    """Nothing where a setting is left alone: what was measured before there was one keeps its key."""
    return [] if value is None else [value]
