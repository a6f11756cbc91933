"""Checks that all ranks start from equal replicas, by checksums of their tensors and of their first samples.

Replicas hold the same parameters, stages on different meshes hold the same tied ones, and every rank reads the
same data set: where one of them started otherwise, training would be wrong without a word. Knows tensors only: no
gang, no transport.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from worker.data.checksum import checksum
from worker.parallel.shard_spec import CutPoints, ShardSpec, common_pieces

_MAX_SHOWN = 8


@dataclass(frozen=True)
class Fingerprint:
    """Checksums of one worker's tensors by description, and of the first samples, which it reads twice."""

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


def checksums(
    own: Mapping[ShardSpec, torch.Tensor], names: Collection[str], cuts: Mapping[str, CutPoints]
) -> dict[str, str]:
    """Checksums of a worker's tensors that are described by one of `names`, and of the pieces of cut ones."""
    found = {}
    for held, tensor in own.items():
        if held.name in cuts:
            found |= {
                description: checksum(piece)
                for description, piece in common_pieces(held, tensor, cuts[held.name]).items()
            }
        elif held.description in names:
            found[held.description] = checksum(tensor)
    return found


def replicated_names(workers: Sequence[Collection[ShardSpec]]) -> list[str]:
    """The descriptions of tensors that several workers have."""
    seen: set[str] = set()
    several: set[str] = set()
    for held in workers:
        descriptions = {one.description for one in held}
        several |= seen & descriptions
        seen |= descriptions
    return sorted(several)


def shard_mismatch(workers: Sequence[str], found: Sequence[Collection[ShardSpec]]) -> str | None:
    """A sentence with the first parameter that some workers share otherwise than others, which would add up what is not the
    same; or None. `found[w]` is what worker w has."""
    layouts: dict[str, dict[str, str]] = {}
    for worker, held in zip(workers, found, strict=True):
        for one in held:
            layouts.setdefault(one.name, {}).setdefault(one.layout, worker)
    for name, places in sorted(layouts.items()):
        if len(places) > 1:
            has = (f"parts along {layout}" if layout else "the whole of it" for layout in places)
            holders = " and ".join(
                f"{what} on {worker}" for what, worker in zip(has, places.values(), strict=True)
            )
            return (
                f"parameter {name!r} has users on several meshes that share it otherwise: {holders}; give their modules one "
                "style in resources.tensor_plan, vocab or replicate"
            )
    return None


def tensor_mismatch(workers: Sequence[str], found: Sequence[Fingerprint]) -> str | None:
    """A sentence with the names of tensors that are not the same on all that hold them, and on whom; or None."""
    wrong = []
    for name in sorted({name for one in found for name in one.tensors}):
        holders = [
            (worker, one.tensors[name])
            for worker, one in zip(workers, found, strict=True)
            if name in one.tensors
        ]
        if len({value for _, value in holders}) > 1:
            wrong.append(f"{name!r} ({_group_by_value(holders)})")
    if not wrong:
        return None
    more = f" and {len(wrong) - _MAX_SHOWN} more" if len(wrong) > _MAX_SHOWN else ""
    return (
        f"workers start from different values of {', '.join(wrong[:_MAX_SHOWN])}{more}: draw initial values from random, "
        "numpy.random or torch, which are seeded alike on every worker, or load them from a file"
    )


def sample_mismatch(workers: Sequence[str], found: Sequence[Fingerprint]) -> str | None:
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
        return f"workers read different first samples of the data set ({_group_by_value(holders)}): {way}"
    return None


def _group_by_value(holders: Iterable[tuple[str, str]]) -> str:
    """ "m0/0, m0/1 | m1/0": who agrees with whom."""
    groups: dict[str, list[str]] = {}
    for worker, value in holders:
        groups.setdefault(value, []).append(worker)
    return " | ".join(", ".join(group) for group in groups.values())
