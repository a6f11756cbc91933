"""Requests and results of one-shot worker processes: the marked result line, and the request of an export.

A task reads its request from an environment variable and prints one JSON line behind a mark; other output of the
process and its libraries is skipped, and the last whole line counts. Light: no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.contract.codec import from_json, to_json


def task_result(output: str, mark: str) -> dict[str, Any] | None:
    """The JSON object behind `mark` in the last line that has one whole; None where it has not come to its end."""
    for line in reversed(output.splitlines()):
        _, found, text = line.partition(mark)
        if not found:
            continue
        try:
            return json.loads(text)
        except ValueError:
            continue
    return None


PROOF_RESULT_MARK = "SLOTLINE_PROOF "
"""`python -m worker.tasks verify` answers in a line of its output with this mark."""


REMOVAL_REQUEST_VARIABLE = "SLOTLINE_REMOVE"
REMOVAL_RESULT_MARK = "SLOTLINE_REMOVED "


@dataclass(frozen=True)
class RemovalRequest:
    """Folders of `job` below `uri`, by name; None: all that checkpoints and exports made. `in_use`: the job has not
    ended, and keeps the checkpoint that an attempt would go on from, and what is newer."""

    uri: str
    job: str
    folders: tuple[str, ...] | None = None
    in_use: bool = False


@dataclass(frozen=True)
class RemovalResult:
    """The outcome of a removal.

    `removed` are folders that were deleted, `refused` folders that stay, with the reason; `left` the steps of whole
    checkpoints that remain. `freed_bytes` were freed, and all checkpoints still hold `left_bytes`.
    """

    removed: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    left: tuple[int, ...] = ()
    freed_bytes: int = 0
    left_bytes: int = 0
    failed: str | None = None


def removal_requests_json(requests: Sequence[RemovalRequest]) -> str:
    """For the variable of the environment."""
    return json.dumps(to_json(requests))


def removal_requests_from_json(text: str) -> list[RemovalRequest]:
    """Inverse of `removal_requests_json`."""
    return [from_json(RemovalRequest, request, ignore_unknown=True) for request in json.loads(text)]


def read_removal_results(output: str) -> list[RemovalResult] | None:
    """The results of a removal, one for each request; None where the process has not come to its end."""
    answer = task_result(output, REMOVAL_RESULT_MARK)
    if answer is None:
        return None
    return [removal_result_from_json(one) for one in answer["jobs"]]


def removal_result_from_json(data: Mapping[str, Any]) -> RemovalResult:
    """A RemovalResult from its JSON object."""
    return from_json(RemovalResult, data)


EXPORT_REQUEST_VARIABLE = "SLOTLINE_EXPORT"
EXPORT_RESULT_MARK = "SLOTLINE_EXPORTED "
DCP_METADATA = ".metadata"  # what makes a folder one of torch.distributed.checkpoint
EXPORT_FORMATS = ("safetensors", "dcp")
"""Weights alone, for from_pretrained; all of a checkpoint, as torch.distributed.checkpoint writes one."""


class ExportFailedError(ValueError):
    """There are no weights; the message says why."""


@dataclass(frozen=True)
class ExportRequest:
    """`uri` is the job's checkpoint.uri, `step` None the newest, `target` None a folder beside the checkpoints; `format`
    is one of FORMATS. `merged`: of a model of peft not the adapters, but the model below with them in its weights."""

    uri: str
    job: str
    step: int | None = None
    target: str | None = None
    format: str = "safetensors"
    merged: bool = False

    def to_json(self) -> str:
        """For the variable of the environment; `from_json` is its inverse."""
        return json.dumps(to_json(self))

    @classmethod
    def from_json(cls, text: str) -> ExportRequest:
        """Inverse of `to_json`."""
        return from_json(cls, json.loads(text))


def read_export_result(output: str) -> Mapping[str, Any] | None:
    """The JSON of an ExportResult in the output of an export; None where the process has not come to its end.

    Raises ExportFailedError with the export's own message where it failed.
    """
    answer = task_result(output, EXPORT_RESULT_MARK)
    if answer is not None and "failed" in answer:
        raise ExportFailedError(answer["failed"])
    return answer
