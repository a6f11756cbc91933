"""New jobs, stored many at once: those that come while one transaction is committed share the next.

A commit costs as much for twenty jobs as for one, and so does the way to the database and back. Nobody waits
for others to come: the first one goes at once, and each caller goes on when its own job is committed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from service.store.database import AWAY, Database
from service.store.jobs import NewJob, create_jobs
from service.store.tables import Job

_AT_ONCE = 50


@dataclass(frozen=True)
class _Asked:
    new: NewJob
    stored: asyncio.Future[Job]


class Submissions:
    """Stores the jobs of this process, in the order in which they come."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._asked: list[_Asked] = []
        self._storing: asyncio.Task[None] | None = None

    async def store(self, new: NewJob) -> Job:
        """The job, committed. Raises what the database says of it: IntegrityError for a key that was used."""
        asked = _Asked(new, asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        if self._storing is None:
            self._storing = asyncio.create_task(self._store_all())
        return await asked.stored

    async def _store_all(self) -> None:
        try:
            while self._asked:
                together, self._asked = self._asked[:_AT_ONCE], self._asked[_AT_ONCE:]
                await self._store_together([one for one in together if not one.stored.done()])
        finally:
            self._storing = None
            for one in self._asked:  # only where this task was cancelled: the server ends
                one.stored.cancel()

    async def _store_together(self, together: list[_Asked]) -> None:
        """In one transaction; where that is refused for what is in it, each in its own, so that none fails for another."""
        if not together:
            return
        try:
            async with self._database.write() as session:
                jobs = await create_jobs(session, [one.new for one in together])
        except Exception as error:
            if len(together) == 1 or isinstance(error, AWAY):
                for one in together:
                    if not one.stored.done():
                        one.stored.set_exception(error)
                return
            for one in together:
                await self._store_together([one])
        else:
            for one, job in zip(together, jobs, strict=True):
                if not one.stored.done():
                    one.stored.set_result(job)
