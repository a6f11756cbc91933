"""Backups of the database: one tar file with the tables, the key of secrets beside SQLite, and what they belong to.

SQLite is copied by its own online backup, in one read transaction, while a control plane serves; PostgreSQL by pg_dump and
pg_restore, which must be of the server's version or newer. A backup is restored where no control plane serves, by a Slotline
that knows its tables; jobs that run meanwhile go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import sqlite3
import subprocess
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy import URL, create_engine, text
from sqlalchemy.exc import OperationalError, ProgrammingError

from service.store.database import Database, exclusive_sqlite_lock, known_revisions, utc_now
from service.store.secrets import KEY_FILE

FORMAT = 1
_ABOUT = "backup.json"
_FILES = {"sqlite": "slotline.db", "postgresql": "slotline.dump"}
"""Name of the member with the tables, by the kind of database."""
_DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}
_BEFORE = ".before-restore"


class BackupError(RuntimeError):
    """A database cannot be backed up or restored; the message says why and the way out."""


def write_backup(url: URL, key_file: Path, target: BinaryIO, *, limit_s: float) -> dict[str, Any]:
    """Write a tar file of the database, and of `key_file` where SQLite has one, to `target`; returns what it is of.

    Raises BackupError, also where PostgreSQL's program takes longer than `limit_s`.
    """
    kind = url.get_backend_name()
    with tempfile.TemporaryDirectory() as folder:
        tables = Path(folder) / _FILES[kind]
        if kind == "sqlite":
            _copy_sqlite(_sqlite_file(url), tables)
            revision = _revision(URL.create("sqlite", database=str(tables)))
        else:
            revision = _revision(url)
            _run("pg_dump", url, ["--format=custom", "--lock-wait-timeout=30s", f"--file={tables}"], limit_s)
        if revision is None:
            raise BackupError(
                f"{_shown(url)} holds no tables of Slotline: check SLOTLINE_DATABASE_URL and SLOTLINE_DATA_DIR"
            )
        about = {
            "format": FORMAT,
            "kind": kind,
            "revision": revision,
            "slotline": version("slotline"),
            "made_at": utc_now().isoformat(),
        }
        with tarfile.open(fileobj=target, mode="w|") as archive:
            head = json.dumps(about).encode()
            entry = tarfile.TarInfo(_ABOUT)
            entry.size = len(head)
            archive.addfile(entry, io.BytesIO(head))
            archive.add(tables, arcname=tables.name)
            if kind == "sqlite" and key_file.is_file():
                archive.add(key_file, arcname=KEY_FILE)
    return about


def restore_backup(
    url: URL, key_file: Path, source: BinaryIO, *, replace: bool, limit_s: float
) -> dict[str, Any]:
    """Bring the database of `url`, and `key_file`, to what a backup holds; returns what that is of.

    A database that has tables is replaced only where `replace` says so; of SQLite and its key the earlier files stay,
    with `.before-restore` after their names. Raises BackupError, with nothing changed.
    """
    kind = url.get_backend_name()
    with tempfile.TemporaryDirectory() as folder:
        about = _unpacked(source, Path(folder))
        if about["kind"] != kind:
            raise BackupError(
                f"the backup is of {about['kind']} and the settings name {_shown(url)}: set SLOTLINE_DATABASE_URL to a "
                f"database of that kind (empty: SQLite in SLOTLINE_DATA_DIR)"
            )
        if about["revision"] not in known_revisions():
            raise BackupError(
                f"the backup has tables of revision {about['revision']}, of Slotline {about['slotline']}, which this "
                f"{version('slotline')} does not know: restore it with that version, then upgrade"
            )
        tables, key = Path(folder) / _FILES[kind], Path(folder) / KEY_FILE
        if kind == "sqlite":
            asyncio.run(_replace_sqlite(url, tables, key, key_file, replace=replace))
        else:
            _check_replaceable(url, about, replace=replace)
            options = ["--clean", "--if-exists", "--single-transaction", "--exit-on-error"]
            _run("pg_restore", url, [*options, str(tables)], limit_s)
    return about


def _unpacked(source: BinaryIO, folder: Path) -> dict[str, Any]:
    """Copy the known members of a backup into `folder`; returns what it is of."""
    try:
        with tarfile.open(fileobj=source, mode="r|*") as archive:
            for member in archive:
                content = archive.extractfile(member)
                if content is not None and member.name in (_ABOUT, KEY_FILE, *_FILES.values()):
                    with open(folder / member.name, "wb") as file:
                        shutil.copyfileobj(content, file)
        about = json.loads((folder / _ABOUT).read_text())
        if about["format"] != FORMAT:
            raise BackupError(
                f"the backup has the format {about['format']}, and this Slotline knows {FORMAT}: restore it with the "
                f"version that made it, {about['slotline']}"
            )
        if not (folder / _FILES[about["kind"]]).is_file():
            raise KeyError(_FILES[about["kind"]])
    except (tarfile.TarError, OSError, ValueError, KeyError) as error:
        raise BackupError(
            f"this is no whole backup of Slotline ({error}): give a file that `slotline backup` wrote"
        ) from None
    return about


async def _replace_sqlite(url: URL, tables: Path, key: Path, key_file: Path, *, replace: bool) -> None:
    file = _sqlite_file(url)
    if file.exists() and not replace:
        raise BackupError(
            f"{file} exists: give --replace to put the backup in its place (it stays as {file.name}{_BEFORE})"
        )
    try:
        with contextlib.closing(sqlite3.connect(tables)) as connection:
            (state,) = connection.execute("PRAGMA integrity_check").fetchone()
    except sqlite3.Error as error:
        state = str(error)
    if state != "ok":
        raise BackupError(f"the tables in the backup are damaged ({state}): take another backup")
    database = Database(url.render_as_string(hide_password=False))
    try:
        async with exclusive_sqlite_lock(database):
            if file.exists():
                _copy_sqlite(file, file.with_name(f"{file.name}{_BEFORE}"))
            for journal in ("-wal", "-shm"):  # now in that copy; SQLite would replay them over the new file
                file.with_name(f"{file.name}{journal}").unlink(missing_ok=True)
            _put(tables, file)
    finally:
        await database.close()
    if key.is_file():
        if key_file.is_file() and key_file.read_bytes() != key.read_bytes():
            _put(key_file, key_file.with_name(f"{key_file.name}{_BEFORE}"))
        _put(key, key_file)


def _put(source: Path, target: Path) -> None:
    """Copy a file to where only its owner reads it, all or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.new")
    new.unlink(missing_ok=True)
    with (
        open(source, "rb") as content,
        open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file,
    ):
        shutil.copyfileobj(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, target)


def _copy_sqlite(source: Path, target: Path) -> None:
    """SQLite's online backup in one step: one read transaction, beside which others write."""
    if not source.is_file():
        raise BackupError(f"there is no database {source}: check SLOTLINE_DATA_DIR and SLOTLINE_DATABASE_URL")
    target.unlink(missing_ok=True)
    try:
        with (
            contextlib.closing(sqlite3.connect(source, timeout=30)) as present,
            contextlib.closing(sqlite3.connect(target)) as copy,
        ):
            present.backup(copy)
    except sqlite3.Error as error:
        raise BackupError(f"{source} could not be read: {error}") from None


def _check_replaceable(url: URL, about: dict[str, Any], *, replace: bool) -> None:
    present = _revision(url)
    if present is None:
        return
    if not replace:
        raise BackupError(
            f"{_shown(url)} has tables of Slotline: give --replace to put the backup's in their place, or name an empty one"
        )
    if present != about["revision"]:
        raise BackupError(
            f"{_shown(url)} has tables of revision {present} and the backup of {about['revision']}: restore into an empty "
            f"database, then set SLOTLINE_DATABASE_URL to it"
        )
    held = "SELECT holder FROM leases WHERE expires_at > extract(epoch FROM clock_timestamp())"
    holder = _first_value(url, held)
    if holder is not None:
        raise BackupError(
            f"a control plane serves {_shown(url)} ({holder}): stop all of them first (kubectl scale deploy/slotline "
            f"--replicas=0); jobs go on meanwhile"
        )


def _run(program: str, url: URL, arguments: list[str], limit_s: float) -> None:
    """Run one of PostgreSQL's programs on the database; its password is in the environment, not among the arguments."""
    address = url.set(drivername="postgresql", password=None).render_as_string(hide_password=False)
    environment = {**os.environ, **({} if url.password is None else {"PGPASSWORD": str(url.password)})}
    command = [program, "--no-owner", "--no-privileges", "--no-password", f"--dbname={address}", *arguments]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except FileNotFoundError:
        raise BackupError(
            f"{program} is not installed here: install PostgreSQL's client programs, of the server's version or newer "
            f"(Debian: postgresql-client)"
        ) from None
    except subprocess.TimeoutExpired:
        raise BackupError(f"{program} took more than {limit_s:g} s and was ended: raise --limit-s") from None
    if done.returncode:
        raise BackupError(
            f"{program} failed: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}"
        )


def _revision(url: URL) -> str | None:
    """The revision of the tables, None where there are none of Slotline."""
    # no such table; of a database that is out of reach the next query says so
    with contextlib.suppress(ProgrammingError, OperationalError):
        return _first_value(url, "SELECT version_num FROM alembic_version")
    _first_value(url, "SELECT 1")
    return None


def _first_value(url: URL, query: str) -> Any:
    """The first column of the query's first row; BackupError where the database is out of reach."""
    kind = url.get_backend_name()
    limits = {"connect_timeout": 10, "options": "-c statement_timeout=30s"} if kind == "postgresql" else {}
    engine = create_engine(url.set(drivername=_DRIVERS[kind]), connect_args=limits)
    try:
        with engine.connect() as connection:
            return connection.execute(text(query)).scalar()
    except (ProgrammingError, OperationalError) as error:
        if query != "SELECT 1":
            raise
        raise BackupError(f"{_shown(url)} is out of reach: {str(error.orig).strip()}") from None
    finally:
        engine.dispose()


def _sqlite_file(url: URL) -> Path:
    return Path(str(url.database))


def _shown(url: URL) -> str:
    return url.render_as_string(hide_password=True)
