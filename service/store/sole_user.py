"""A SQLite file belongs to one control plane: a lock on a file beside it, which goes with the process."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

from service.store.database import Database

logger = logging.getLogger(__name__)
_TAKE_OVER_S = 10.0


class DatabaseInUseError(RuntimeError):
    """Another control plane serves this SQLite file."""


@contextlib.asynccontextmanager
async def sole_user(database: Database) -> AsyncIterator[None]:
    """Hold a SQLite database alone, waiting a little for one that is just ending. Raises DatabaseInUseError.

    Two orchestrators on one file would each take the other's drivers for lost: each has a Ray of its own.
    """
    path = database.url.database
    if not database.is_sqlite or path in (None, "", ":memory:"):
        yield
        return
    file = Path(f"{path}.lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as handle:
        deadline = time.monotonic() + _TAKE_OVER_S
        while not _locked(handle.fileno()):
            if time.monotonic() >= deadline:
                raise DatabaseInUseError(
                    f"another Slotline serves {path}: end it, or give this one its own SLOTLINE_DATA_DIR"
                )
            await asyncio.sleep(0.1)
        yield


def _locked(descriptor: int) -> bool:
    """Whether the lock is ours now; it goes with the process, however that ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("no lock on the database (%s): start only one Slotline on it", error)
    return True
