"""Do the workers of a job start from the same values? Checksums of what several of them hold, and who differs.

Replicas hold the same parameters, and stages on different meshes the same tied ones; every worker reads the same
data set. Where one of them made another start, training would be wrong without a word. Knows tensors only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from worker.nests import Targets

_SHOWN = 8

# What stands behind the name of a matrix of which a worker has a part: which, and along which dimension.
PART, ALONG = " (part ", " along dimension "


@dataclass(frozen=True)
class Fingerprint:
    """Of one worker: checksums of tensors by original name, and of the first samples, read twice."""

    tensors: Mapping[str, str]
    sample: tuple[str, str]


def named_tensors(stages: Mapping[int, nn.Module]) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a worker's stages by original name; a constant by its stage and place there."""
    found: dict[str, torch.Tensor] = {}
    for index in sorted(stages):
        originals = getattr(stages[index], "original_names", {})
        for tensors in (stages[index].named_parameters(), stages[index].named_buffers()):
            for local, tensor in tensors:
                found.setdefault(originals.get(local, f"stage {index}: {local}"), tensor)
    return found


def checksum(value: Any) -> str:
    """Of a tensor, or of tuples and lists of tensors: equal for equal types, shapes and bits."""
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, value)
    return digest.hexdigest()


def held_by_several(names: Sequence[Collection[str]]) -> list[str]:
    """The names that more than one of the workers, which each hold `names[w]`, know."""
    seen: set[str] = set()
    several: set[str] = set()
    for mine in names:
        several |= seen & set(mine)
        seen |= set(mine)
    return sorted(several)


def different_splits(workers: Sequence[str], names: Sequence[Collection[str]]) -> str | None:
    """A sentence with the first parameter that some workers share otherwise than others, which would add up what is not the
    same; or None. `names[w]` are those that worker w holds, with its parts."""
    ways: dict[str, dict[str, str]] = {}
    for worker, held in zip(workers, names, strict=True):
        for told in held:
            name, _, part = told.partition(PART)
            ways.setdefault(name, {}).setdefault(part.rstrip(")").partition(ALONG)[2], worker)
    for name, found in sorted(ways.items()):
        if len(found) > 1:
            has = (f"parts along dimension {way}" if way else "the whole of it" for way in found)
            told = " and ".join(
                f"{what} on {worker}" for what, worker in zip(has, found.values(), strict=True)
            )
            return (
                f"parameter {name!r} has users on several meshes that share it otherwise: {told}; give their modules one "
                "style in resources.tensor_plan, vocab or replicate"
            )
    return None


def different_tensors(workers: Sequence[str], found: Sequence[Fingerprint]) -> str | None:
    """A sentence with the names of tensors that are not the same on all that hold them, and on whom; or None."""
    wrong = []
    for name in sorted({name for one in found for name in one.tensors}):
        holders = [
            (worker, one.tensors[name])
            for worker, one in zip(workers, found, strict=True)
            if name in one.tensors
        ]
        if len({value for _, value in holders}) > 1:
            wrong.append(f"{name!r} ({_grouped(holders)})")
    if not wrong:
        return None
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return (
        f"workers start from different values of {', '.join(wrong[:_SHOWN])}{more}: draw initial values from random, "
        "numpy.random or torch, which are seeded alike on every worker, or load them from a file"
    )


def different_samples(workers: Sequence[str], found: Sequence[Fingerprint]) -> str | None:
    """A sentence that says where the first samples are not the same, from worker to worker or from one reading to the
    next; or None."""
    way = (
        "draw random numbers from random, numpy.random or torch, which are seeded for every sample, not from a "
        "generator of the data set's own, and read the same files everywhere"
    )
    moody = [worker for worker, one in zip(workers, found, strict=True) if one.sample[0] != one.sample[1]]
    if moody:
        return f"the first samples of the data set are others each time that {', '.join(moody)} reads them: {way}"
    holders = [(worker, one.sample[0]) for worker, one in zip(workers, found, strict=True)]
    if len({value for _, value in holders}) > 1:
        return f"workers read different first samples of the data set ({_grouped(holders)}): {way}"
    return None


def _grouped(holders: Iterable[tuple[str, str]]) -> str:
    """ "m0/0, m0/1 | m1/0": who agrees with whom."""
    groups: dict[str, list[str]] = {}
    for worker, value in holders:
        groups.setdefault(value, []).append(worker)
    return " | ".join(", ".join(group) for group in groups.values())


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, list | tuple):
        digest.update(f"{len(value)}[".encode())
        for part in value:
            _feed(digest, part)
        return
    if isinstance(value, Targets):
        _feed(digest, value.tensors)
        return
    tensor = value.detach().cpu().contiguous()
    digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
