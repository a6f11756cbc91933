"""Deletes checkpoints and exports of jobs, as the requests in SLOTLINE_REMOVE or on stdin say.

Runs on the cluster, since workers see the storage that they write to. Deletes only folders that this product names,
inside the job's folder, and only files in them: `..`, links and patterns are never followed.
The file that makes a folder complete goes first, so that a deletion that was cut short never leaves a folder that is
taken for whole; deleting again removes the rest. Light: no torch.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from worker.contract.checkpoint_files import (
    MANIFEST,
    FoundCheckpoint,
    inspect_checkpoints,
    is_artifact,
    job_uri,
    step_folder_name,
)
from worker.contract.tasks import (
    REMOVAL_REQUEST_VARIABLE,
    REMOVAL_RESULT_MARK,
    RemovalRequest,
    RemovalResult,
    removal_requests_from_json,
)

_JOB_ID = re.compile(r"[A-Za-z0-9-]{1,40}")
_URI_SCHEMES = ("", "file", "s3", "gs", "gcs", "az", "abfs", "abfss", "memory")
_COMPLETENESS_FILES = (MANIFEST, ".metadata")  # without these a folder is no checkpoint


class RemovalError(ValueError):
    """Nothing was deleted; the message says why."""


def remove_artifacts(request: RemovalRequest) -> RemovalResult:
    """Delete the requested folders. Raises RemovalError for a place or a name that this product does not make."""
    place = _JobFolder.of(request)
    there = place.folders()
    wanted = sorted(there) if request.folders is None else list(request.folders)
    for name in wanted:
        if not is_artifact(name):
            raise RemovalError(f"{name!r} is no folder of a checkpoint or an export: nothing was deleted")
    kept = _protected_folders(_found_checkpoints(request, there)) if request.in_use else {}
    removed, refused, freed = [], {}, 0
    for name in wanted:
        if name in kept:
            refused[name] = kept[name]
        elif name in there:
            try:
                freed += place.remove(name)
                removed.append(name)
            except (OSError, RemovalError) as error:
                refused[name] = (
                    f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error)
                )
    left = _found_checkpoints(request, place.folders())
    return RemovalResult(
        tuple(removed),
        refused,
        tuple(checkpoint.step for checkpoint in left if checkpoint.damage is None),
        freed,
        sum(checkpoint.size_bytes for checkpoint in left),
    )


def _found_checkpoints(request: RemovalRequest, there: Sequence[str]) -> list[FoundCheckpoint]:
    return (
        inspect_checkpoints(request.uri, request.job)
        if any(name.startswith("step-") for name in there)
        else []
    )


def _protected_folders(found: Sequence[FoundCheckpoint]) -> dict[str, str]:
    """The folders of a running or waiting job that are kept, with the reason: the checkpoint of the next resume, and newer
    ones that may just be written."""
    newest = next((checkpoint.step for checkpoint in found if checkpoint.damage is None), 0)
    kept = {
        step_folder_name(checkpoint.step): "it is newer than the newest whole one, and may just be written"
        for checkpoint in found
        if checkpoint.step > newest
    }
    return kept | {step_folder_name(newest): "it is the one from which the job would go on"}


class _JobFolder:
    """A job's folder, and what is deleted in it."""

    @staticmethod
    def of(request: RemovalRequest) -> _JobFolder:
        scheme = request.uri.partition("://")[0] if "://" in request.uri else ""
        if "::" in request.uri or scheme not in _URI_SCHEMES:
            raise RemovalError(f"nothing is deleted below {request.uri}: only in paths, s3, gs and az")
        if not _JOB_ID.fullmatch(request.job):
            raise RemovalError(f"{request.job!r} is no job's id")
        files, folder = fsspec.core.url_to_fs(job_uri(request.uri, request.job))
        return (
            _LocalJobFolder(folder)
            if isinstance(files, LocalFileSystem)
            else _ObjectStoreJobFolder(files, folder)
        )

    def folders(self) -> list[str]:
        """The names of folders that may be deleted here."""
        raise NotImplementedError

    def remove(self, name: str) -> int:
        """Delete one of `folders`; its bytes."""
        raise NotImplementedError


class _LocalJobFolder(_JobFolder):
    """A local job folder, opened by descriptors that follow no links: a link that is put there meanwhile is refused."""

    def __init__(self, folder: str) -> None:
        self._base, self._job = os.path.split(folder)

    def folders(self) -> list[str]:
        try:
            with (
                _opened_folder(self._base, None, follow=True) as base,
                _opened_folder(self._job, base) as job,
            ):
                return sorted(name for name in os.listdir(job) if is_artifact(name))
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> int:
        with _opened_folder(self._base, None, follow=True) as base, _opened_folder(self._job, base) as job:
            with _opened_folder(name, job) as folder:
                names = sorted(os.listdir(folder), key=_deletion_order)
                infos = {file: os.stat(file, dir_fd=folder, follow_symlinks=False) for file in names}
                if inner := [file for file, info in infos.items() if stat.S_ISDIR(info.st_mode)]:
                    raise RemovalError(f"it holds the folder {inner[0]!r}, which is none of a checkpoint's")
                for file in names:
                    os.unlink(file, dir_fd=folder)
                    if file in _COMPLETENESS_FILES:
                        os.fsync(folder)
            os.rmdir(name, dir_fd=job)
            return sum(info.st_size for info in infos.values())


class _ObjectStoreJobFolder(_JobFolder):
    """A job folder in an object store: objects are deleted one after the other, by their whole names."""

    def __init__(self, files: AbstractFileSystem, folder: str) -> None:
        self._files, self._folder = files, folder.rstrip("/")

    def folders(self) -> list[str]:
        try:
            paths = self._files.ls(self._folder, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        names = {path.rstrip("/").rsplit("/", 1)[-1] for path in paths}
        return sorted(name for name in names if is_artifact(name))

    def remove(self, name: str) -> int:
        folder, freed = f"{self._folder}/{name}", 0
        files = [
            entry for entry in self._files.ls(folder, detail=True, refresh=True) if entry["type"] == "file"
        ]
        inner = {
            file["name"].rsplit("/", 1)[-1]: file for file in files if file["name"].rstrip("/") != folder
        }
        for key in sorted(inner, key=_deletion_order):
            if f"{folder}/{key}".lstrip("/") != inner[key]["name"].lstrip("/"):
                raise RemovalError(f"{inner[key]['name']} is not in {folder}")
            self._files.rm_file(inner[key]["name"])
            freed += inner[key]["size"] or 0
        with suppress(Exception):  # where folders are no things of their own there is none left
            self._files.rmdir(folder)
        return freed


def _deletion_order(name: str) -> tuple[bool, bool, str]:
    return name != MANIFEST, name not in _COMPLETENESS_FILES, name


@contextmanager
def _opened_folder(name: str, within: int | None, *, follow: bool = False) -> Iterator[int]:
    """The descriptor of a folder while the context lasts. A link is refused unless one may `follow` it."""
    flags = os.O_RDONLY | os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(name, flags, dir_fd=within)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise RemovalError(f"{name} is a link or a file, and no folder: it is not touched") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def main() -> int:
    """Delete; 0 when nothing failed."""
    results: list[dict[str, Any]] = []
    for request in removal_requests_from_json(os.environ.get(REMOVAL_REQUEST_VARIABLE) or sys.stdin.read()):
        try:
            results.append(asdict(remove_artifacts(request)))
        except Exception as error:  # of whatever storage: credentials, names, packages that are not installed
            cause = str(error) if isinstance(error, RemovalError) else f"{type(error).__name__}: {error}"
            results.append(asdict(RemovalResult(failed=f"{cause} (on {socket.gethostname()})")))
    print(f"\n{REMOVAL_RESULT_MARK}{json.dumps({'jobs': results})}", flush=True)
    return 1 if any(result["failed"] for result in results) else 0
