"""How an export is asked for and what it answers, between whoever starts `python -m worker.weights` and that process.

Light: no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from worker.marked import marked_answer

REQUEST_VARIABLE = "SLOTLINE_EXPORT"
ANSWER_MARK = "SLOTLINE_EXPORTED "
DCP_METADATA = ".metadata"  # what makes a folder one of torch.distributed.checkpoint
FORMATS = ("safetensors", "dcp")
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
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ExportRequest:
        """Inverse of `to_json`."""
        return cls(**json.loads(text))


def read_answer(output: str) -> Mapping[str, Any] | None:
    """What an export found, in its output: JSON of an Exported; None where it has not come to its end.

    Raises ExportFailedError with what it says of its failure.
    """
    answer = marked_answer(output, ANSWER_MARK)
    if answer is not None and "failed" in answer:
        raise ExportFailedError(answer["failed"])
    return answer
