"""The answer of a process in its own output, among whatever else it and its libraries print there."""

from __future__ import annotations

import json
from typing import Any


def marked_answer(output: str, mark: str) -> dict[str, Any] | None:
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
