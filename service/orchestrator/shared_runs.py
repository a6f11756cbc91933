"""Short runs of all processes that share a database: each is begun by one of them, and any may be asked for its answer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable

from sqlalchemy.exc import SQLAlchemyError

from service.orchestrator.planning import PlannerBusyError
from service.store.database import Sessions
from service.store.leases import process_name
from service.store.short_runs import RunEnd, beat, end_run, run_goes_on, take_end, take_run
from service.store.uncut import uncut

logger = logging.getLogger(__name__)
BEAT_S = 5.0

Work = Callable[[], Awaitable[str | None]]


class SharedRuns:
    """Runs of one kind. Of those that this process begins in a place `at_once` go on, `in_line` more wait for their turn.

    What they do may be cut off anywhere, but for what is `uncut`. `busy` tells of a number of runs why no more are taken,
    `failed` makes the error of a run that ended without an answer, of the message of the one that it raised.
    """

    def __init__(
        self,
        database: Sessions,
        kind: str,
        *,
        at_once: int,
        in_line: int = 0,
        busy: Callable[[int], str],
        failed: Callable[[str], Exception],
    ) -> None:
        self._database, self._kind, self._busy, self._failed = database, kind, busy, failed
        self._most = at_once + in_line
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(at_once))
        self._here = Counter[str]()
        self._holder = process_name()
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._beating: asyncio.Task[None] | None = None

    async def answer(self, request: str, work: Work, *, place: str) -> str | None:
        """What came of the run for `request`, once; None while it goes on, which begins with the first call: ask again.

        It has its turn among those of its `place`. An answer of None is not told: the next call begins again. Raises
        the error of a run that failed, once, and PlannerBusyError.
        """
        key = f"{self._kind}-{hashlib.sha256(f'{place} {request}'.encode()).hexdigest()}"
        if key in self._runs or await run_goes_on(self._database, key):
            return None
        full = self._here[place] >= self._most
        async with self._database.write() as session:
            end = await take_end(session, key)
            mine = end is None and not full
            mine = mine and await take_run(session, key, self._holder)
        if end is not None:
            if end.failure is not None:
                raise self._failed(end.failure)
            return end.answer
        if full:
            raise PlannerBusyError(self._busy(self._here[place]))
        if mine:
            self._here[place] += 1
            self._runs[key] = asyncio.create_task(self._run(key, work, place))
            self._runs[key].add_done_callback(lambda _: self._over(key, place))
            if self._beating is None:
                self._beating = asyncio.create_task(self._beat())
        return None

    async def close(self) -> None:
        """End what goes on here: others may begin it at once."""
        tasks = [*self._runs.values(), *([self._beating] if self._beating else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _over(self, key: str, place: str) -> None:
        del self._runs[key]
        self._here[place] -= 1

    async def _run(self, key: str, work: Work, place: str) -> None:
        end = None
        try:
            async with self._turns[place]:
                answer = await work()
            end = None if answer is None else RunEnd(answer)
        except Exception as error:
            end = RunEnd(failure=str(error) or type(error).__name__)
        finally:
            await uncut(self._ended(key, end))

    async def _ended(self, key: str, end: RunEnd | None) -> None:
        try:
            async with self._database.write() as session:
                await end_run(session, key, self._holder, end)
        except (SQLAlchemyError, OSError) as error:
            logger.warning("what came of a run (%s) is lost, it begins again when asked for: %s", key, error)

    async def _beat(self) -> None:
        """For as long as this process lives; a run that another one has taken meanwhile ends here."""
        while True:
            await asyncio.sleep(BEAT_S)
            if not (keys := list(self._runs)):
                continue
            with contextlib.suppress(SQLAlchemyError, OSError):  # silent as long as the database is away
                kept = await uncut(self._said(keys))
                for key in set(keys) - kept:
                    if (task := self._runs.get(key)) is not None:
                        task.cancel()

    async def _said(self, keys: list[str]) -> set[str]:
        async with self._database.write() as session:
            return await beat(session, self._holder, keys)
