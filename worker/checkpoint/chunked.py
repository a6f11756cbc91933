"""The index of a checkpoint's tensors: which blobs of which shards hold which chunks of each, written and read.

Every worker describes the chunks in its shard; merged, and found to cover each tensor, they are the index, by which any
worker reads the blobs that have some of its own part. Values of an optimizer's state that are no tensors are blobs too,
and what a shard has besides is in one blob of its own. JSON but for the blobs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from fsspec import AbstractFileSystem

from worker.checkpoint.blobs import BLOB_BYTES, Blob, map_tensors, read_blobs
from worker.contract.checkpoint_files import CheckpointError, shard_path
from worker.parallel.chunks import STEP_KEY, FlatRun, chunks, copy_overlap, overlaps, pieces
from worker.parallel.shard_spec import ShardSpec

PARTS_BY_NAME = ("parameters", "buffers", "optimizer")
"""Parts of a state that are keyed by original name; of the optimizer's each entry has values by their keys."""

BlobPlace = tuple[str, int]
"""A shard, and the number of one of its blobs."""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor, and the blob that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: BlobPlace


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor, and its chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @property
    def missing(self) -> int:
        """The number of elements that no chunk has."""
        return math.prod(self.shape) - sum(math.prod(chunk.sizes) for chunk in self.chunks)


Entry = TensorEntry | BlobPlace
"""A tensor, or the blob of a value that is none."""
EntryKey = tuple[str, str, str | None]
"""The part of the state, the name, and of the optimizer's state the key."""


@dataclass(frozen=True)
class TensorIndex:
    """The entries of a checkpoint, the blobs of each shard's file, and of shards with other values their blob of these."""

    entries: Mapping[EntryKey, Entry]
    blobs: Mapping[str, Sequence[Blob]]
    rest: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        return {
            "entries": [[*key, *_entry_to_json(entry)] for key, entry in self.entries.items()],
            "blobs": {shard: [list(blob) for blob in blobs] for shard, blobs in self.blobs.items()},
            "rest": dict(self.rest),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TensorIndex:
        return cls(
            {(part, name, key): _entry_from_json(entry) for part, name, key, *entry in content["entries"]},
            {
                shard: [(length, sha256) for length, sha256 in blobs]
                for shard, blobs in content["blobs"].items()
            },
            content["rest"],
        )


def _entry_to_json(entry: Entry) -> list[Any]:
    if not isinstance(entry, TensorEntry):
        return list(entry)
    found = [[list(chunk.offsets), list(chunk.sizes), *chunk.place] for chunk in entry.chunks]
    return [list(entry.shape), str(entry.dtype).removeprefix("torch."), found]


def _entry_from_json(entry: Sequence[Any]) -> Entry:
    if len(entry) == 2:
        return entry[0], entry[1]
    shape, dtype, found = entry
    return TensorEntry(
        tuple(shape),
        getattr(torch, dtype),
        tuple(
            Chunk(tuple(offsets), tuple(sizes), (shard, number)) for offsets, sizes, shard, number in found
        ),
    )


@dataclass(frozen=True)
class HeldParts:
    """The parts of tensors that a worker has: its `slices` of them by name, and its `runs` of the optimizer's state of each
    (ZeRO-1). What is in neither is whole."""

    slices: Mapping[str, ShardSpec] = field(default_factory=dict)
    runs: Mapping[str, FlatRun] = field(default_factory=dict)

    def spec(self, name: str) -> ShardSpec:
        return self.slices.get(name, ShardSpec(name))


def add_state(
    shard: str, state: Mapping[str, Any], held: HeldParts, add: Callable[[Any], int]
) -> tuple[dict[EntryKey, Entry], int | None]:
    """Give all values of a worker's state to `add`, which returns the numbers of their blobs; the entries of those by name,
    and the blob of all others, if there are any."""
    entries: dict[EntryKey, Entry] = {}

    def add_tensor(tensor: torch.Tensor, spec: ShardSpec, run: FlatRun | None = None) -> TensorEntry:
        found = [
            Chunk(offsets, tuple(view.shape), (shard, add(_alone(view))))
            for place, part in chunks(tensor.detach(), spec, run)
            for offsets, view in pieces(place, part, BLOB_BYTES)
        ]
        shape = spec.whole_shape(tensor.shape if run is None else run.shape)
        return TensorEntry(shape, tensor.dtype, tuple(found))

    for part in ("parameters", "buffers"):
        for name, tensor in (state.get(part) or {}).items():
            entries[part, name, None] = add_tensor(tensor, held.spec(name))
    for name, values in (state.get("optimizer") or {}).items():
        parameter, run = (state.get("parameters") or {}).get(name), held.runs.get(name)
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                entries["optimizer", name, key] = shard, add(value)
            elif run is not None and key != STEP_KEY and value.shape == (run.end - run.begin,):
                entries["optimizer", name, key] = add_tensor(value, held.spec(name), run)
            elif parameter is not None and value.shape == parameter.shape:
                entries["optimizer", name, key] = add_tensor(value, held.spec(name))
            else:  # one for the whole parameter, as the number of its steps
                entries["optimizer", name, key] = add_tensor(value, ShardSpec(name))
    rest = {part: value for part, value in state.items() if part not in PARTS_BY_NAME}
    return entries, add(map_tensors(rest, lambda tensor: _alone(tensor.detach()))) if rest else None


def _alone(view: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU that shares no memory with a larger one, which would be written with all of it."""
    own = view.cpu()
    return own.clone() if own.untyped_storage().nbytes() != own.nbytes else own


def merge_entries(groups: Sequence[Sequence[Mapping[EntryKey, Entry]]]) -> dict[EntryKey, Entry]:
    """The entries of a checkpoint of those of each mesh's shards, the first mesh's of what several have. CheckpointError
    names tensors of which some elements are in no shard."""
    merged: dict[EntryKey, Entry] = {}
    for shards in groups:
        own = defaultdict[EntryKey, list[Entry]](list)
        for entries in shards:
            for key, entry in entries.items():
                own[key].append(entry)
        for key, found in own.items():
            merged.setdefault(key, _joined(key, found))
    lacking = [
        f"{entry.missing} of {math.prod(entry.shape)} elements of {' '.join(filter(None, key))}"
        for key, entry in merged.items()
        if isinstance(entry, TensorEntry) and entry.missing
    ]
    if lacking:
        raise CheckpointError(
            f"its shards lack {', '.join(lacking[:4])}{', …' * (len(lacking) > 4)}: did all workers save their parts?"
        )
    return merged


def _joined(key: EntryKey, found: Sequence[Entry]) -> Entry:
    """The entry of what the shards of one mesh have of a value; of a chunk that several have, the first."""
    first, tensors = found[0], [entry for entry in found if isinstance(entry, TensorEntry)]
    if not isinstance(first, TensorEntry):
        return first
    for other in tensors:
        if (first.shape, first.dtype) != (other.shape, other.dtype):
            raise CheckpointError(
                f"its shards have {' '.join(filter(None, key))} as {list(first.shape)} {first.dtype} and as "
                f"{list(other.shape)} {other.dtype}"
            )
    by_offsets: dict[tuple[int, ...], Chunk] = {}
    for entry in tensors:
        for chunk in entry.chunks:
            by_offsets.setdefault(chunk.offsets, chunk)
    return TensorEntry(first.shape, first.dtype, tuple(by_offsets.values()))


@dataclass(frozen=True)
class Wanted:
    """The part of a checkpoint that is read: these `names` and `parts` (None: all), and of tensors what is `held`."""

    names: Collection[str] | None = None
    parts: Collection[str] | None = None
    held: HeldParts = HeldParts()

    def has(self, part: str, name: str) -> bool:
        return (self.parts is None or part in self.parts) and (self.names is None or name in self.names)


class _Target:
    """The tensor that a reader wants, filled from chunks."""

    def __init__(self, entry: TensorEntry, shape: tuple[int, ...], spec: ShardSpec, run: FlatRun | None):
        self._entry, self._spec, self._run = entry, spec, run
        self._shape = shape if run is None else (run.end - run.begin,)
        self._places = [
            (offsets, tuple(view.shape))
            for offsets, view in chunks(torch.empty(self._shape, dtype=entry.dtype, device="meta"), spec, run)
        ]
        self.tensor: torch.Tensor | None = None

    def needed(self) -> Iterator[Chunk]:
        for chunk in self._entry.chunks:
            if any(overlaps(chunk.offsets, chunk.sizes, offsets, sizes) for offsets, sizes in self._places):
                yield chunk

    def take(self, chunk: Chunk, value: torch.Tensor) -> None:
        if self._run is None and self._places == [(chunk.offsets, chunk.sizes)]:
            self.tensor = value  # all of it
            return
        own = self.allocated()
        for offsets, view in chunks(own, self._spec, self._run):
            if overlaps(chunk.offsets, chunk.sizes, offsets, view.shape):
                copy_overlap(chunk.offsets, value, offsets, view)

    def allocated(self) -> torch.Tensor:
        if self.tensor is None:
            self.tensor = torch.empty(self._shape, dtype=self._entry.dtype)
        return self.tensor


def read_entries(
    files: AbstractFileSystem, folder: str, index: TensorIndex, wanted: Wanted
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The parts by name of a state, as they are wanted, and the shapes of the whole parameters and buffers. Only blobs that
    hold some of it are read; a tensor that cannot be split as it is wanted is left out. DamagedCheckpointError for a blob
    that is not what was saved."""
    state: dict[str, Any] = {
        part: {} for part in PARTS_BY_NAME if wanted.parts is None or part in wanted.parts
    }
    shapes: dict[str, tuple[int, ...]] = {}
    targets: dict[EntryKey, _Target] = {}
    takers: dict[BlobPlace, Callable[[Any], None]] = {}
    for entry_key, entry in index.entries.items():
        part, name, key = entry_key
        if not wanted.has(part, name):
            continue
        taken = state[part]
        if part == "optimizer":
            taken = taken.setdefault(name, {})
        if not isinstance(entry, TensorEntry):
            takers[entry] = lambda value, taken=taken, key=key: taken.__setitem__(key, value)
            continue
        if part != "optimizer":
            shapes[name] = entry.shape
        target = _target(index, entry_key, entry, wanted.held)
        if target is None:
            continue
        targets[entry_key] = target
        taken[key or name] = target  # in its place; replaced by its tensor below
        for chunk in target.needed():
            takers[chunk.place] = lambda value, target=target, chunk=chunk: target.take(chunk, value)
    for shard in dict.fromkeys(shard for shard, _ in takers):
        numbers = sorted(number for of, number in takers if of == shard)
        for number, value in read_blobs(files, shard_path(folder, shard), index.blobs[shard], numbers):
            takers[shard, number](value)
            del value  # before the next one is read
    for (part, name, key), target in targets.items():
        taken = state[part][name] if part == "optimizer" else state[part]
        taken[key or name] = target.allocated()
    return state, shapes


def _target(index: TensorIndex, key: EntryKey, entry: TensorEntry, held: HeldParts) -> _Target | None:
    part, name, value = key
    spec, run = held.spec(name), None
    if part == "optimizer":
        parameter = index.entries.get(("parameters", name, None))
        if not isinstance(parameter, TensorEntry) or parameter.shape != entry.shape:
            spec = ShardSpec(name)
        elif value != STEP_KEY:
            run = held.runs.get(name)
    shape = spec.local_shape(entry.shape)
    if shape is None or (run is not None and run.shape != shape):
        return None
    return _Target(entry, shape, spec, run)


def read_rest(files: AbstractFileSystem, folder: str, index: TensorIndex, shard: str) -> dict[str, Any]:
    """The values of a shard that are not by name; none where it has no such."""
    if shard not in index.rest:
        return {}
    number = index.rest[shard]
    ((_, value),) = read_blobs(files, shard_path(folder, shard), index.blobs[shard], [number])
    return value
