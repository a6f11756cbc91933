"""Weights in files, read by name: safetensors (one file, several with an index, a folder), torch checkpoints and
folders of torch.distributed.checkpoint.

Opening reads names and shapes only; a tensor's values are read when it is asked for. Nothing in a file is run.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.model.errors import ModelError
from worker.weights.request import DCP_METADATA

_SAFETENSORS = ".safetensors"
_INDEX = ".safetensors.index.json"
_TORCH = (".pt", ".pth", ".bin", ".ckpt")
# Where training scripts put the state_dict in a checkpoint that holds other things too.
_NESTED = ("state_dict", "model_state_dict", "model", "module")


@dataclass(frozen=True)
class Shape:
    """What is known of a tensor before its values are read."""

    shape: tuple[int, ...]
    floating: bool


class WeightFiles(Protocol):
    """Open files: what they hold, and the values of one tensor."""

    shapes: Mapping[str, Shape]

    def read(self, name: str) -> Tensor: ...

    def close(self) -> None: ...


@contextmanager
def open_weights(path: str) -> Iterator[WeightFiles]:
    """The weights at `path`: a .safetensors file, its .index.json, a torch checkpoint, or a folder with one of these, or
    that torch.distributed.checkpoint wrote.

    Raises ModelError where there are none, and where a file cannot be read, with its name.
    """
    place = Path(path).expanduser()
    if (place / DCP_METADATA).is_file():
        opened: WeightFiles = _Dcp(place)
    else:
        files = _files_of(place)
        opened = _Torch(files[0]) if files[0].name.endswith(_TORCH) else _Safetensors(files)
    try:
        yield opened
    finally:
        opened.close()


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        return _files_of(_in_folder(path))
    if not path.is_file():
        raise ModelError(
            f"model.weights {str(path)!r} is not there (as seen from this worker): give a path that every worker sees"
        )
    if path.name.endswith(_INDEX):
        return _indexed(path)
    if not path.name.endswith((_SAFETENSORS, *_TORCH)):
        raise ModelError(
            f"model.weights {str(path)!r} has an ending that says nothing: name a file that ends in {_SAFETENSORS}, "
            f"{_INDEX}, {', '.join(_TORCH)}, or their folder"
        )
    return [path]


def _in_folder(folder: Path) -> Path:
    """The one thing in a folder that names all weights: an index, else a single file."""
    there = sorted(one for one in folder.iterdir() if one.is_file())
    for ending in ((_INDEX,), (_SAFETENSORS,), _TORCH):
        found = [one for one in there if one.name.endswith(ending)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(one.name for one in found[:6])
            raise ModelError(
                f"model.weights {str(folder)!r} holds {len(found)} of a kind ({names}): name one"
            )
    raise ModelError(f"model.weights {str(folder)!r} holds no weights ({_SAFETENSORS}, {', '.join(_TORCH)})")


def _indexed(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is no index of safetensors ({type(error).__name__}: {error})") from None
    files = [index.parent / name for name in names]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(f"{index} names files that are not beside it: {', '.join(missing)}")
    return files


class _Safetensors:
    def __init__(self, files: Sequence[Path]):
        self.shapes: dict[str, Shape] = {}
        self._file_of: dict[str, Any] = {}
        self._opened: list[Any] = []
        for file in files:
            try:
                opened = safe_open(file, framework="pt")
                self._opened.append(opened)
                for name in opened.keys():  # noqa: SIM118, it is no mapping
                    part = opened.get_slice(name)
                    floating = part.get_dtype().startswith(("F", "BF", "C"))
                    self.shapes[name] = Shape(tuple(part.get_shape()), floating)
                    self._file_of[name] = opened
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} cannot be read as safetensors: {error}") from None

    def read(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)

    def close(self) -> None:
        self._file_of.clear()
        self._opened.clear()


class _Torch:
    def __init__(self, file: Path):
        try:
            content = _loaded(file)
        except pickle.UnpicklingError as error:
            reason = str(error).strip().splitlines()[0]
            raise ModelError(
                f"{file} holds more than tensors, which is not run ({reason}): save model.state_dict() alone, or "
                "safetensors"
            ) from None
        except (RuntimeError, EOFError, OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read as a torch checkpoint: {error}") from None
        self._tensors = _state_dict(file, content)
        self.shapes = {
            name: Shape(tuple(t.shape), t.is_floating_point() or t.is_complex())
            for name, t in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def close(self) -> None:
        self._tensors = {}


class _Dcp:
    def __init__(self, folder: Path):
        from worker.weights.dcp_source import DcpFolder  # loads much that workers need for nothing else

        self._folder = DcpFolder(folder)
        nested = {path[0] for path in self._folder.path_of.values() if len(path) == 2}
        found = [key for key in _NESTED if key in nested]
        if len(found) > 1:
            raise ModelError(
                f"{folder} has weights in {' and in '.join(map(repr, found))}: save them in one of these"
            )
        of_model = {
            (path[1] if found else path[0]): name
            for name, path in self._folder.path_of.items()
            if (len(path) == 2 and path[0] in found if found else len(path) == 1)
        }
        if not of_model:
            held = ", ".join(map(repr, list(self._folder.path_of)[:8])) or "no tensors"
            raise ModelError(
                f"{folder} has the tensors of a model neither by their own names nor in one of "
                f"{', '.join(map(repr, _NESTED))} (it holds {held}): save model.state_dict() so"
            )
        self._name_of = of_model
        self.shapes = {
            own: Shape(self._folder.shape(name), dtype.is_floating_point or dtype.is_complex)
            for own, name in of_model.items()
            for dtype in (self._folder.dtype(name),)
        }

    def read(self, name: str) -> Tensor:
        return self._folder.read(self._name_of[name])

    def close(self) -> None:
        self._name_of = {}


def _loaded(file: Path) -> Any:
    """Mapped, so that only what is used is read; files of torch before 1.6 cannot be."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
    return torch.load(file, map_location="cpu", weights_only=True)


def _state_dict(file: Path, content: Any) -> dict[str, Tensor]:
    if _is_state_dict(content):
        return dict(content)
    inner = content if isinstance(content, Mapping) else {}
    found = [key for key in _NESTED if _is_state_dict(inner.get(key))]
    if len(found) == 1:
        return dict(inner[found[0]])
    held = ", ".join(map(repr, list(inner)[:8])) or f"a {type(content).__name__}"
    raise ModelError(
        f"{file} is no state_dict, and has one in {' and in '.join(map(repr, found)) or 'none'} of "
        f"{', '.join(map(repr, _NESTED))} (it holds {held}): save model.state_dict() alone"
    )


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(t, Tensor) for t in value.values())
