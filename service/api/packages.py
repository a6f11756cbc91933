"""The user's code as a zip, stored once under its SHA-256; a job names it in code.working_dir."""

from __future__ import annotations

import asyncio
import hashlib
import io
import stat
import zipfile
from pathlib import PurePosixPath
from typing import Annotated

from fastapi import APIRouter, Body, Response
from sqlalchemy.exc import IntegrityError

from service.api.auth import Caller
from service.api.context import Current
from service.api.errors import ProblemError, responses
from service.api.guarded import UserRoute
from service.api.schemas import PackageView
from service.jobspec import PACKAGE_PREFIX
from service.store.database import utc_now
from service.store.packages import find_package, renew_package, store_package

router = APIRouter(prefix="/api/v1/packages", tags=["packages"], route_class=UserRoute)
_FILE_LIMIT = 20_000


@router.post("", status_code=201, responses={200: {"model": PackageView}, **responses(413, 422)})
async def upload(
    content: Annotated[bytes, Body(media_type="application/zip")],
    caller: Caller,
    service: Current,
    response: Response,
) -> PackageView:
    """Store a zip; 200 when the caller has done so before. `uri` goes into code.working_dir."""
    settings = service.settings
    if len(content) > settings.package_limit_bytes:
        raise ProblemError(
            413, f"the zip is longer than {settings.package_limit_bytes} bytes: leave data out"
        )
    digest = await asyncio.to_thread(_checked_digest, content, settings.package_unpacked_limit_bytes)
    who = caller.name
    async with service.database.write() as session:
        theirs = await find_package(session, digest, owner=who)
        known = await renew_package(session, digest, at=utc_now(), owner=who)
    if not known:
        try:
            async with service.database.write() as session:
                await store_package(session, digest, content, at=utc_now(), owner=who)
        except IntegrityError:  # somebody stored the same one a moment ago
            async with service.database.write() as session:
                theirs = await find_package(session, digest, owner=who)
                await renew_package(session, digest, at=utc_now(), owner=who)
    if theirs:
        response.status_code = 200
    return PackageView(uri=f"{PACKAGE_PREFIX}{digest}", digest=digest, size_bytes=len(content))


def _checked_digest(content: bytes, unpacked_limit_bytes: int) -> str:
    """The SHA-256 of a zip that is safe to unpack; 422 or 413 for any other."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError) as error:
        raise ProblemError(422, f"the body is no zip ({error}): send one as application/zip") from None
    if len(entries) > _FILE_LIMIT:
        raise ProblemError(413, f"the zip holds {len(entries)} files, the limit is {_FILE_LIMIT}")
    size = sum(entry.file_size for entry in entries)
    if size > unpacked_limit_bytes:
        raise ProblemError(413, f"the zip unpacks to {size} bytes, the limit is {unpacked_limit_bytes}")
    for entry in entries:
        _check_entry(entry)
    return hashlib.sha256(content).hexdigest()


def _check_entry(entry: zipfile.ZipInfo) -> None:
    path = PurePosixPath(entry.filename.replace("\\", "/"))
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if path.is_absolute() or ".." in path.parts or ":" in entry.filename[:3]:
        raise ProblemError(
            422, f"{entry.filename!r} would be unpacked outside its folder: use relative paths"
        )
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise ProblemError(422, f"{entry.filename!r} is a link or a device: send plain files")
    if entry.flag_bits & 0x1:
        raise ProblemError(422, f"{entry.filename!r} is encrypted: send a plain zip")
