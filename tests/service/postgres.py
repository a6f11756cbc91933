"""A PostgreSQL of one's own, for tests and for what measures."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_installed() -> bool:
    """Whether this machine has PostgreSQL's server."""
    return _binaries() is not None


@contextmanager
def private_postgres(*, durable: bool) -> Iterator[str]:
    """A new cluster on a socket in a folder of its own; its URL with `{}` for a database (`postgres` is there).

    One that is not `durable` loses commits with the machine's power, and is faster.
    """
    binaries = _binaries()
    assert binaries is not None, "PostgreSQL is not installed"
    as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    folder = Path("/tmp") / f"slotline-postgres-{uuid.uuid4().hex[:8]}"  # a socket's path must be short
    folder.mkdir(mode=0o700)
    if as_user:
        shutil.chown(folder, "postgres", "postgres")
    data = folder / "data"
    run = {"check": True, "cwd": "/", "stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    new = [binaries / "initdb", "-D", data, "-U", "test", "-A", "trust", "-E", "UTF8", "--no-sync"]
    control = [*as_user, binaries / "pg_ctl", "-D", data]
    try:
        subprocess.run([*as_user, *new], **run)
        options = f"-c listen_addresses='' -k {folder}"
        if not durable:
            options += " -c fsync=off -c full_page_writes=off"
        subprocess.run([*control, "-l", folder / "log", "-o", options, "-w", "start"], **run)
        try:
            yield f"postgresql+psycopg://test@/{{}}?host={folder}"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], **run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: float(p.parts[-3]))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).parent if on_path else None
