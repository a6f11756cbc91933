"""What follows jobs asks the database together: one query a look for all that is followed, however many follow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from service.store.database import Database
from service.store.events import Glance, events_of, glances
from service.store.tables import Event


class JobFeed:
    """Looks only while somebody waits for a look."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._asked: dict[str, asyncio.Future[Glance | None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._looks: set[asyncio.Task[None]] = set()  # the loop itself holds its tasks weakly
        self._reading: dict[tuple[str, int], asyncio.Task[Sequence[Event]]] = {}

    async def now(self, job_id: str) -> Glance | None:
        """The job at this moment; None: no such job."""
        async with self._database.read() as session:
            return (await glances(session, [job_id])).get(job_id)

    async def next(self, job_id: str, *, within_s: float) -> Glance | None:
        """The job at the next look, about `within_s` from now or from when somebody else asked for it."""
        if (asked := self._asked.get(job_id)) is None:
            asked = self._asked[job_id] = asyncio.get_running_loop().create_future()
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(within_s))
            self._looks.add(self._looking)
            self._looking.add_done_callback(self._looks.discard)
        return await asyncio.shield(asked)  # others wait for it too

    async def events(self, job_id: str, *, after: int) -> Sequence[Event]:
        """The job's events behind `after`; read once for all that ask for the same at the same time, as all do that
        have seen as much: each with a read of its own would take every connection at once."""
        key = (job_id, after)
        if (reading := self._reading.get(key)) is None:
            reading = self._reading[key] = asyncio.create_task(self._read(job_id, after))
            reading.add_done_callback(lambda _: self._reading.pop(key))
        return await asyncio.shield(reading)

    async def _read(self, job_id: str, after: int) -> Sequence[Event]:
        async with self._database.read() as session:
            return await events_of(session, job_id, after=after)

    async def _look(self, after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
        finally:
            asked, self._asked, self._looking = self._asked, {}, None
        try:
            async with self._database.read() as session:
                found = await glances(session, list(asked))
        except Exception as error:
            for one in asked.values():
                one.set_exception(error)
                one.exception()  # who waited may have gone: then nobody has to hear of it
        else:
            for job_id, one in asked.items():
                one.set_result(found.get(job_id))
