"""A job's secrets in the driver: put into the environments of driver and workers, and kept out of all it says.

What goes through Python's standard output and error (also what Ray passes on of the workers' prints) and through
reports is blanked. What native code writes by itself, and what lies in Ray's own files on the nodes, is not.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

BLANK = "***"
_SHORTEST = 8
"""The control plane takes no shorter secret; of one with several lines, shorter lines are no secret."""


class Mask:
    """Blanks values out of texts; knows none in the beginning."""

    def __init__(self) -> None:
        self._pattern: re.Pattern[str] | None = None

    def hide(self, values: Iterable[str]) -> None:
        """From now on these are blanked, whole and line by line."""
        parts = {part for value in values for part in (value, value.strip(), *value.splitlines())}
        # the longest first: one may begin as another does
        hidden = sorted((part for part in parts if len(part) >= _SHORTEST), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, hidden))) if hidden else None

    def text(self, text: str) -> str:
        return text if self._pattern is None else self._pattern.sub(BLANK, text)

    def json(self, value: Any) -> Any:
        """The same JSON value with its texts blanked, names of fields too."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.json(entry) for key, entry in value.items()}
        return [self.json(entry) for entry in value] if isinstance(value, list | tuple) else value


class MaskedStream:
    """A text stream that blanks what is written to it."""

    def __init__(self, stream: TextIO, mask: Mask) -> None:
        self._stream, self._mask = stream, mask

    def write(self, text: str) -> int:
        self._stream.write(self._mask.text(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def mask_output() -> Mask:
    """Put a mask, with nothing to hide yet, before standard output and error of this process."""
    mask = Mask()
    sys.stdout, sys.stderr = MaskedStream(sys.stdout, mask), MaskedStream(sys.stderr, mask)
    return mask


def take_environment(_actor: object, values: Mapping[str, str]) -> None:
    """Called in a worker's process, before it runs anything of the user's."""
    os.environ.update(values)
