"""Lists the checkpoints and exports of a job in storage, and verifies their manifests, sizes and checksums.

Light: no torch, so that the control plane can look too. Tensors are read and written by worker/checkpoint. A
step's folder without a manifest is not finished: it is being written, or its writer died. Formats 1 to 4 are
readable: 1 had optimizer groups without the names of their parameters, 3 has slices of tensors in several shards, 4 has
chunks of tensors in files that torch.distributed.checkpoint reads.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec import AbstractFileSystem

CHECKPOINT_FORMAT = 4
"""The format of checkpoints that are written. Up to 3 a shard is one pickled state in a `.pt` file; 4 has shards of blobs,
their index, and the metadata of torch.distributed.checkpoint."""
_READABLE_FORMATS = (1, 2, 3, 4)
MANIFEST, TENSOR_INDEX = "manifest.json", "tensors.json"
_STEP_FOLDER_PREFIX = "step-"
_READ_BLOCK_BYTES = 1 << 20


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message says which file and why."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are there and are not what was saved, or lack some: reading it again is of no use."""


@dataclass(frozen=True)
class SaveSeconds:
    """The seconds of a save: training stood still for `blocking`; `writing` is the slowest worker's.

    Asynchronous writing goes on beside training.
    """

    blocking: float
    writing: float


@dataclass(frozen=True)
class FoundCheckpoint:
    """A step's folder as it lies there. `damage` says what is wrong with it, None where it is whole; `summed`: its
    checksums were compared too, not only sizes; not `finished`: it has no manifest, as while it is being written.
    `saved_at` is the manifest's time, in Unix seconds, of one without that of its newest file; `seconds` None where an
    older version saved it."""

    step: int
    uri: str
    size_bytes: int
    saved_at: float | None
    damage: str | None = None
    summed: bool = False
    finished: bool = True
    seconds: SaveSeconds | None = None


def step_uri(uri: str, job: str, step: int) -> str:
    """The URI of the checkpoint of `job` after `step`, below `uri`."""
    return f"{job_uri(uri, job)}/{step_folder_name(step)}"


def job_uri(uri: str, job: str) -> str:
    """The URI of the folder with all checkpoints of `job`, below `uri`."""
    return f"{uri.rstrip('/')}/{job}"


def complete_checkpoints(uri: str, job: str) -> list[str]:
    """The complete checkpoints of `job` below `uri`, the newest first."""
    files, folder = fsspec.core.url_to_fs(job_uri(uri, job))
    steps = [
        step
        for step, _ in step_folders(files, folder)
        if files.exists(f"{folder}/{step_folder_name(step)}/{MANIFEST}")
    ]
    return [step_uri(uri, job, step) for step in reversed(steps)]


def inspect_checkpoints(
    uri: str, job: str, *, sums: bool = False, limit_s: float = 30.0
) -> list[FoundCheckpoint]:
    """All checkpoints of `job` below `uri`, the newest first, with what is wrong with each.

    With `sums` their content is read and compared, until `limit_s` have passed; of those that were not come to by
    then, or that an older version saved, only sizes are known. Raises CheckpointError where the folder itself cannot be
    read: then nothing is known of what it holds.
    """
    latest = time.monotonic() + limit_s
    place = job_uri(uri, job)
    try:
        files, folder = fsspec.core.url_to_fs(place)
        if not files.exists(folder):
            raise CheckpointError(f"there is no {place} to be seen from here")
        folders = step_folders(files, folder)
    except CheckpointError:
        raise
    except Exception as error:  # of whatever storage: credentials, names, packages that are not installed
        raise CheckpointError(f"{place} cannot be read: {type(error).__name__}: {error}") from error
    return [
        _inspect_folder(files, path, step_uri(uri, job, step), step, latest if sums else None)
        for step, path in reversed(folders)
    ]


def stored_bytes(uri: str, job: str) -> int | None:
    """Bytes of all checkpoints and exports of `job` below `uri`; None where the storage does not say."""
    with suppress(Exception):
        files, folder = fsspec.core.url_to_fs(job_uri(uri, job))
        return sum(one["size"] or 0 for one in files.find(folder, detail=True).values())
    return None


def step_folder_name(step: int) -> str:
    """The name of a step's folder."""
    return f"{_STEP_FOLDER_PREFIX}{step:010d}"


def step_of(uri: str) -> int:
    """The step of the checkpoint at `uri`, by the name of its folder; -1 for another name."""
    step = _parse_step(uri)
    return -1 if step is None else step


def shard_path(folder: str, shard: str, checkpoint_format: int = CHECKPOINT_FORMAT) -> str:
    """The file of one shard."""
    return f"{folder}/{shard}.{'distcp' if checkpoint_format >= 4 else 'pt'}"


def file_sizes(folder: str, manifest: dict[str, Any]) -> dict[str, int]:
    """The bytes of each file of a checkpoint but for the manifest, by path."""
    shards = {
        shard_path(folder, shard, manifest["format"]): size for shard, size in manifest["shards"].items()
    }
    return shards | {f"{folder}/{name}": size for name, (size, _) in manifest.get("files", {}).items()}


def file_content(files: AbstractFileSystem, folder: str, manifest: dict[str, Any], name: str) -> bytes:
    """The content of a file beside the shards. DamagedCheckpointError where it is not what was saved."""
    path, known = f"{folder}/{name}", manifest.get("files", {})
    if name not in known:
        raise DamagedCheckpointError(f"{MANIFEST} of {folder} has no {name}: it is damaged")
    size, sha256 = known[name]
    check_size(files, path, size)
    content = files.cat_file(path)
    check_sha256(path, sha256, lambda: hashlib.sha256(content).hexdigest())
    return content


def step_folders(files: AbstractFileSystem, job_folder: str) -> list[tuple[int, str]]:
    """(step, path) of all step folders of a job, complete or not."""
    try:
        paths = files.ls(job_folder, detail=False, refresh=True)
    except FileNotFoundError:
        return []
    found = []
    for path in paths:
        step = _parse_step(path)
        if step is not None and step_folder_name(step) == path.rstrip("/").rsplit("/", 1)[-1]:
            found.append((step, path))
    return sorted(found)


def _parse_step(folder: str) -> int | None:
    """The step that a folder's name says, None for other names."""
    name = folder.rstrip("/").rsplit("/", 1)[-1]
    number = name.removeprefix(_STEP_FOLDER_PREFIX)
    return int(number) if name.startswith(_STEP_FOLDER_PREFIX) and number.isdecimal() else None


def read_manifest(files: AbstractFileSystem, folder: str, uri: str) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises CheckpointError where there is none, where it cannot be read, or where it is of another step than its
    folder.
    """
    try:
        manifest = json.loads(files.cat_file(f"{folder}/{MANIFEST}"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{uri} is no complete checkpoint: it has no {MANIFEST}") from None
    except ValueError as error:
        raise DamagedCheckpointError(f"{MANIFEST} of {uri} cannot be read: {error}") from error
    if not isinstance(manifest, dict):
        raise DamagedCheckpointError(
            f"{MANIFEST} of {uri} is no manifest: it holds a {type(manifest).__name__}"
        )
    if manifest.get("format") not in _READABLE_FORMATS:
        known = ", ".join(map(str, _READABLE_FORMATS))
        raise CheckpointError(f"{uri} has format {manifest.get('format')}, this version reads {known}")
    shards, step = manifest.get("shards"), manifest.get("step")
    if not isinstance(step, int) or not isinstance(shards, dict) or not shards:
        raise DamagedCheckpointError(f"{MANIFEST} of {uri} says no step or no shards: it is damaged")
    if (said := _parse_step(folder)) not in (None, step):
        raise DamagedCheckpointError(f"{MANIFEST} of {uri} is of step {step}, its folder of step {said}")
    return manifest


def check_size(files: AbstractFileSystem, path: str, size: int) -> None:
    """DamagedCheckpointError where a file has not the size that the manifest says, or is not there."""
    try:
        found = files.size(path)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"shard {path} is missing") from None
    if found != size:
        raise DamagedCheckpointError(
            f"shard {path} has {found} bytes, the manifest says {size}: it is damaged"
        )


def check_sha256(path: str, expected: str | None, digest: Callable[[], str]) -> None:
    """DamagedCheckpointError where the digest is not the manifest's; None is what an older version saved."""
    if expected is not None and (found := digest()) != expected:
        raise DamagedCheckpointError(
            f"shard {path} has the SHA-256 {found[:16]}..., the manifest says {expected[:16]}...: it is damaged"
        )


class _InspectionTimeout(Exception):
    pass


def _inspect_folder(
    files: AbstractFileSystem, folder: str, uri: str, step: int, latest: float | None
) -> FoundCheckpoint:
    """`latest`: until when checksums may be computed, None for none."""
    size, saved_at, damage, summed, seconds = 0, None, None, False, None
    try:
        manifest = read_manifest(files, folder, uri)
        if (saved_seconds := manifest.get("seconds")) is not None:
            seconds = SaveSeconds(saved_seconds["blocking"], saved_seconds["writing"])
        saved_at = _modified_at(files, f"{folder}/{MANIFEST}")
        sizes = file_sizes(folder, manifest)
        size = sum(sizes.values())
        for path, expected in sizes.items():
            check_size(files, path, expected)
        if latest is not None:
            summed = check_content(files, folder, manifest, latest)
    except _InspectionTimeout:
        pass
    except CheckpointError as error:
        damage = str(error)
    except Exception as error:  # a manifest of another make, a file without rights
        damage = f"{uri} cannot be read: {type(error).__name__}: {error}"
    finished = True
    if damage is not None:
        with suppress(Exception):
            finished = files.exists(f"{folder}/{MANIFEST}")
            saved_at = saved_at or _newest_modified_at(files, folder)
            size = size or _folder_bytes(files, folder)
    return FoundCheckpoint(step, uri, size, saved_at, damage, summed, finished, seconds)


def check_content(files: AbstractFileSystem, folder: str, manifest: dict[str, Any], latest: float) -> bool:
    """DamagedCheckpointError where a checksum is not that of the content; False where there are none. After `latest` by the
    monotonic clock it ends."""
    if manifest["format"] < 4:
        for shard, sha256 in manifest.get("sha256", {}).items():
            path = shard_path(folder, shard, manifest["format"])
            check_sha256(path, sha256, lambda path=path: _sha256_of(files, path, latest))
        return bool(manifest.get("sha256"))
    for name in manifest["files"]:
        file_content(files, folder, manifest, name)
    for shard, blobs in json.loads(file_content(files, folder, manifest, TENSOR_INDEX))["blobs"].items():
        path, total = shard_path(folder, shard), 0
        with files.open(path, "rb") as file:
            for length, sha256 in blobs:
                check_sha256(path, sha256, lambda file=file, length=length: _sha256_in(file, length, latest))
                total += length
        if total != manifest["shards"][shard]:
            raise DamagedCheckpointError(
                f"{path} has bytes that {TENSOR_INDEX} does not tell of: it is damaged"
            )
    return True


def _sha256_of(files: AbstractFileSystem, path: str, latest: float) -> str:
    with files.open(path, "rb") as file:
        return _sha256_in(file, None, latest)


def _sha256_in(file: Any, length: int | None, latest: float) -> str:
    """The checksum of the next `length` bytes of a file, None for all."""
    digest = hashlib.sha256()
    while block := file.read(_READ_BLOCK_BYTES if length is None else min(_READ_BLOCK_BYTES, length)):
        digest.update(block)
        if length is not None:
            length -= len(block)
        if time.monotonic() > latest:
            raise _InspectionTimeout
    return digest.hexdigest()


def _modified_at(files: AbstractFileSystem, path: str) -> float | None:
    try:
        return files.modified(path).timestamp()
    except NotImplementedError:
        return None


def _newest_modified_at(files: AbstractFileSystem, folder: str) -> float | None:
    there = [one["name"] for one in files.ls(folder, detail=True) if one["type"] == "file"]
    return max((time for path in there if (time := _modified_at(files, path)) is not None), default=None)


def _folder_bytes(files: AbstractFileSystem, folder: str) -> int:
    return sum(one["size"] or 0 for one in files.ls(folder, detail=True) if one["type"] == "file")


ARTIFACT_NAME = re.compile(r"(step|export|export-dcp|merged)(?:-step)?-(\d{10})")


@dataclass(frozen=True)
class FoundExport:
    """A folder of exported weights, after which step; `made_at` in Unix seconds, None where the storage does not say."""

    name: str
    uri: str
    step: int
    files: int
    size_bytes: int
    made_at: float | None


def find_exports(uri: str, job: str) -> list[FoundExport]:
    """All exports beside the checkpoints of `job` below `uri`. Raises CheckpointError where the place cannot be read."""
    place = job_uri(uri, job)
    try:
        files, folder = fsspec.core.url_to_fs(place)
        if not files.exists(folder):
            raise CheckpointError(f"there is no {place} to be seen from here")
        found = []
        for path in files.ls(folder, detail=False, refresh=True):
            name = path.rstrip("/").rsplit("/", 1)[-1]
            if is_artifact(name) and not name.startswith("step-"):
                held = [one for one in files.ls(path, detail=True, refresh=True) if one["type"] == "file"]
                times = []
                for one in held:
                    with suppress(NotImplementedError):
                        times.append(files.modified(one["name"]).timestamp())
                step = int(ARTIFACT_NAME.fullmatch(name)[2])
                size = sum(one["size"] or 0 for one in held)
                found.append(
                    FoundExport(name, f"{place}/{name}", step, len(held), size, max(times, default=None))
                )
        return sorted(found, key=lambda one: (-one.step, one.name))
    except CheckpointError:
        raise
    except Exception as error:  # of whatever storage
        raise CheckpointError(f"{place} cannot be read: {type(error).__name__}: {error}") from error


def is_artifact(name: str) -> bool:
    """True for the name of a folder that checkpoints or exports make."""
    found = ARTIFACT_NAME.fullmatch(name)
    return found is not None and name in (
        step_folder_name(int(found[2])),
        *(f"{kind}-{step_folder_name(int(found[2]))}" for kind in ("export", "export-dcp", "merged")),
    )
