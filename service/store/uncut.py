"""Work at the database that is finished also where its task is cancelled in the middle.

A query that is cut off leaves its connection behind, and on SQLite the lock that this holds: whoever writes next waits for
half a minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Found = TypeVar("Found")


async def uncut(work: Coroutine[Any, Any, Found]) -> Found:
    """What `work` returns; a cancellation is raised when it has ended."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # nobody else asks, and asyncio would say so
        raise
