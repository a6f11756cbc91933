"""The end of a log that is read piece by piece: its last lines with their numbers. Values only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice


class LogWindow:
    """The last `limit_bytes` of a log, in whole lines; what is longer is cut off at its beginning."""

    def __init__(self, limit_bytes: int) -> None:
        self.read_bytes = 0
        self.first_line = 1
        self._limit_bytes = limit_bytes
        self._lines: deque[bytes] = deque()
        self._kept_bytes = 0
        self._rest = b""

    @property
    def next_line(self) -> int:
        """The number of the line that is not complete yet."""
        return self.first_line + len(self._lines)

    def add(self, piece: bytes) -> None:
        """What comes next in the log."""
        self.read_bytes += len(piece)
        *whole, rest = (self._rest + piece).split(b"\n") if b"\n" in piece else (self._rest + piece,)
        self._rest = rest[-self._limit_bytes :]
        self._lines.extend(whole)
        self._kept_bytes += sum(map(len, whole)) + len(whole)
        while self._kept_bytes > self._limit_bytes and self._lines:
            self._kept_bytes -= len(self._lines.popleft()) + 1
            self.first_line += 1

    def lines(self, after: int, *, ended: bool) -> Iterator[tuple[int, str]]:
        """Number and text of the lines behind number `after`; the last one only when complete or `ended`."""
        skip = max(after + 1 - self.first_line, 0)
        for number, line in enumerate(islice(self._lines, skip, None), self.first_line + skip):
            yield number, _text(line)
        if ended and self._rest and after < self.next_line:
            yield self.next_line, _text(self._rest)

    def text(self) -> str:
        """All that is kept, from line `first_line` on."""
        return "".join(f"{_text(line)}\n" for line in self._lines) + _text(self._rest)


def _text(line: bytes) -> str:
    return line.replace(b"\x00", b"").decode("utf-8", "replace")
