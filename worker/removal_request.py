"""Requests to delete checkpoints and exports, and the result line that `python -m worker.removal` prints. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from worker.marked import marked_answer

REMOVAL_VARIABLE = "SLOTLINE_REMOVE"
REMOVAL_MARK = "SLOTLINE_REMOVED "


@dataclass(frozen=True)
class RemovalRequest:
    """Folders of `job` below `uri`, by name; None: all that checkpoints and exports made. `in_use`: the job has not
    ended, and keeps the checkpoint that an attempt would go on from, and what is newer."""

    uri: str
    job: str
    folders: tuple[str, ...] | None = None
    in_use: bool = False


@dataclass(frozen=True)
class Removed:
    """The folders that are gone now and were there before, those that stay and why, the steps of the whole checkpoints
    that are left, and bytes: how many were freed, and how many all checkpoints still hold."""

    removed: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    left: tuple[int, ...] = ()
    freed_bytes: int = 0
    left_bytes: int = 0
    failed: str | None = None


def removal_requests_json(requests: Sequence[RemovalRequest]) -> str:
    """For the variable of the environment."""
    return json.dumps([asdict(one) for one in requests])


def removal_requests_from(text: str) -> list[RemovalRequest]:
    """Inverse of `removal_requests_json`."""
    return [
        RemovalRequest(
            one["uri"], one["job"], None if one["folders"] is None else tuple(one["folders"]), one["in_use"]
        )
        for one in json.loads(text)
    ]


def read_removed(output: str) -> list[Removed] | None:
    """What was deleted, one for each request; None where the process has not come to its end."""
    answer = marked_answer(output, REMOVAL_MARK)
    if answer is None:
        return None
    return [removed_from(one) for one in answer["jobs"]]


def removed_from(data: Mapping[str, Any]) -> Removed:
    """A Removed from its JSON."""
    return Removed(**{**data, "removed": tuple(data["removed"]), "left": tuple(data["left"])})
