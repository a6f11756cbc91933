"""Work that is given up when the one who asked for it has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from service.api.errors import ProblemError

T = TypeVar("T")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the connection ends before it has one."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            raise ProblemError(503, "the caller has gone")  # nobody reads it
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    await request.body()  # it was read already: what comes behind it is the end of the connection
    while (await request.receive())["type"] != "http.disconnect":
        pass
