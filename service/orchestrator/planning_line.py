"""Who plans next: the places of planning processes, one of which is kept for drivers. No processes here."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """Plans that are made and that wait now, and how many processes there are to make them."""

    running: int
    waiting: int
    processes: int


class Line:
    """`places` for anybody and one more for drivers, who go first; a place is a number from 0 on."""

    def __init__(self, places: int) -> None:
        self._places = places + 1
        self._free = list(range(self._places))
        self._drivers: deque[asyncio.Future[int]] = deque()
        self._others: deque[asyncio.Future[int]] = deque()

    async def take(self, *, driver: bool) -> int:
        """Wait for a place. A cancelled wait takes none."""
        turn = asyncio.get_running_loop().create_future()
        (self._drivers if driver else self._others).append(turn)
        self._give()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(turn.result())
            raise

    @property
    def load(self) -> Load:
        waiting = sum(not turn.done() for turn in (*self._drivers, *self._others))
        return Load(self._places - len(self._free), waiting, self._places)

    def leave(self, place: int) -> None:
        self._free.append(place)
        self._give()

    def _give(self) -> None:
        for waiting, kept in ((self._drivers, 0), (self._others, 1)):
            while waiting and len(self._free) > kept:
                turn = waiting.popleft()
                if not turn.done():
                    turn.set_result(self._free.pop())
