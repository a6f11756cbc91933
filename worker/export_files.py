"""The weights that were exported beside a job's checkpoints: which there are, and what they take. Light: no torch."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

import fsspec

from worker.checkpoint_files import CheckpointError, folder_name, job_uri

ARTIFACT = re.compile(r"(step|export|export-dcp|merged)(?:-step)?-(\d{10})")


@dataclass(frozen=True)
class FoundExport:
    """A folder of exported weights, after which step; `made_at` in Unix seconds, None where the storage does not say."""

    name: str
    uri: str
    step: int
    files: int
    size_bytes: int
    made_at: float | None


def exports_of(uri: str, job: str) -> list[FoundExport]:
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
                step = int(ARTIFACT.fullmatch(name)[2])
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
    """Whether a folder of this name is one that checkpoints or exports make."""
    found = ARTIFACT.fullmatch(name)
    return found is not None and name in (
        folder_name(int(found[2])),
        *(f"{kind}-{folder_name(int(found[2]))}" for kind in ("export", "export-dcp", "merged")),
    )
