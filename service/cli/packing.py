"""A folder as a zip with the same bytes for the same content, so that it is uploaded once."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from service.cli.output import CliError

_SKIPPED = {".git", ".venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", "node_modules"}
_EPOCH = (1980, 1, 1, 0, 0, 0)


def zip_folder(folder: Path) -> bytes:
    """Files of `folder` in a fixed order with a fixed time; caches, links and .git stay out."""
    if not folder.is_dir():
        raise CliError(f"code.working_dir {folder} is no folder: give the folder that holds your modules")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            path = file.relative_to(folder)
            if _SKIPPED.isdisjoint(path.parts) and file.is_file() and not file.is_symlink():
                entry = zipfile.ZipInfo(path.as_posix(), _EPOCH)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = (0o100755 if file.stat().st_mode & 0o100 else 0o100644) << 16
                archive.writestr(entry, file.read_bytes())
    return buffer.getvalue()
