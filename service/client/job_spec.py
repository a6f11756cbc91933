"""A job as a script or notebook writes it: functions in place of import paths, and a folder of code as a zip.

The zip has the same bytes for the same content (fixed order, fixed times), so that the server stores it once.
"""

from __future__ import annotations

import functools
import io
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pathspec import GitIgnoreSpec

from service.spec.job import PACKAGE_PREFIX, REMOTE_CODE_PREFIXES

_SKIPPED_NAMES = {
    ".git",
    ".venv",
    "__pycache__",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    "node_modules",
}
_ZIP_TIMESTAMP = (1980, 1, 1, 0, 0, 0)


def with_import_paths(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The job with import paths in place of functions and classes: `model=build`, `data=partial(Tokens, length=64)`,
    `optimizer={"factory": AdamW, "args": {"lr": 1e-3}}`. ValueError for one that no other process can import."""
    return {
        name: _factory(name, value) if callable(value) else _values(name, value)
        for name, value in spec.items()
    }


def _values(place: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: import_path(part)
            if name == "factory" and callable(part)
            else _values(f"{place}.{name}", part)
            for name, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [_values(f"{place}.{index}", part) for index, part in enumerate(value)]
    if callable(value):
        raise ValueError(
            f"{place} is the function {value!r}: write what makes it as {{'factory': …, 'args': {{…}}}}"
        )
    return value


def _factory(place: str, value: Callable[..., Any]) -> dict[str, Any]:
    if not isinstance(value, functools.partial):
        return {"factory": import_path(value)}
    if value.args:
        raise ValueError(
            f"{place} is partial with the positional arguments {value.args!r}: give them by name"
        )
    return {"factory": import_path(value.func), "args": _values(f"{place}.args", value.keywords)}


def import_path(made_by: Callable[..., Any]) -> str:
    """`module:name` of a function or class; ValueError where another process cannot import it by that."""
    module, name = getattr(made_by, "__module__", None), getattr(made_by, "__qualname__", None)
    if module is None or name is None:
        raise ValueError(f"{made_by!r} has no name to import it by: write its import path, 'module:name'")
    if module == "__main__" or "<" in name:
        place = "a function" if "<" in name else "this notebook or script"
        raise ValueError(
            f"{name} is defined in {place}, where workers cannot import it: write it into a module, import it from there, "
            "and give code={'working_dir': the module's folder}"
        )
    found = functools.reduce(
        lambda owner, part: getattr(owner, part, None), name.split("."), sys.modules.get(module)
    )
    if found is not made_by:
        raise ValueError(f"{module}:{name} is not this {made_by!r}: write the import path of what makes it")
    return f"{module}:{name}"


def code_folder(spec: Mapping[str, Any], base: Path) -> Path | None:
    """The folder of this machine, from `base` on, that the job names as its code; None where it names none."""
    code = spec.get("code")
    place = code.get("working_dir") if isinstance(code, Mapping) else None
    if not isinstance(place, str) or place.startswith((PACKAGE_PREFIX, *REMOTE_CODE_PREFIXES)):
        return None
    return base / Path(place).expanduser()


def zip_folder(folder: Path) -> bytes:
    """Files of `folder` in a fixed order with a fixed time. What links lead to is in it under the link's name; caches,
    virtual environments, .git and what .gitignore names stay out.

    ValueError for no folder, and for a link that leads nowhere or round in a circle.
    """
    if not folder.is_dir():
        raise ValueError(f"code.working_dir {folder} is no folder: give the folder that holds your modules")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in _code_files(folder):
            entry = zipfile.ZipInfo(file.relative_to(folder).as_posix(), _ZIP_TIMESTAMP)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if file.stat().st_mode & 0o100 else 0o100644) << 16
            archive.writestr(entry, file.read_bytes())
    return buffer.getvalue()


def largest_files(folder: Path, count: int = 5) -> str:
    """The files that take most of a folder's zip, and their megabytes, for messages."""
    sizes = sorted(
        ((file.stat().st_size, file.relative_to(folder)) for file in _code_files(folder)), reverse=True
    )
    return ", ".join(f"{name} ({size / 1e6:.1f} MB)" for size, name in sizes[:count])


def _code_files(folder: Path) -> list[Path]:
    return sorted(_files_below(folder, folder, (), {folder.resolve()}))


_Ignored = tuple[tuple[Path, GitIgnoreSpec], ...]


def _files_below(top: Path, folder: Path, ignored: _Ignored, above: set[Path]) -> Iterator[Path]:
    """Files of `folder`, which is in `above` with the folders that it was reached by; `ignored` are the rules of these."""
    if (rules := folder / ".gitignore").is_file():
        lines = rules.read_text("utf-8", errors="replace").splitlines()
        ignored = (*ignored, (folder, GitIgnoreSpec.from_lines(lines)))
    for path in folder.iterdir():
        if path.name in _SKIPPED_NAMES or (path / "pyvenv.cfg").is_file() or _is_ignored(path, ignored):
            continue
        shown = path.relative_to(top)
        if path.is_symlink() and not path.exists():
            raise ValueError(
                f"code.working_dir: the link {shown} leads nowhere ({path.readlink()}): remove it"
            )
        if path.is_dir():
            if (place := path.resolve()) in above:
                raise ValueError(
                    f"code.working_dir: the link {shown} leads to a folder that it is in: remove it"
                )
            yield from _files_below(top, path, ignored, above | {place})
        elif path.is_file():
            yield path


def _is_ignored(path: Path, ignored: _Ignored) -> bool:
    """True if git ignores `path`: the last rule that says something of it counts, those of nearer folders before others."""
    for folder, spec in reversed(ignored):
        name = path.relative_to(folder).as_posix() + ("/" if path.is_dir() else "")
        if (found := spec.check_file(name).include) is not None:
            return found
    return False
