"""Loads initial weights (`model.weights`) from safetensors, torch or DCP files into stages or a whole model.

Opening reads names and shapes only; a tensor's values are read when it is asked for, so each stage reads only what
it has. Names and shapes are compared with the model before anything is filled. Nothing in a file is executed.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from worker.checkpoint.adapters import StateDictEntry, base_model_name
from worker.checkpoint.record import ModelRecord
from worker.checkpoint.resumption import shown_names
from worker.contract.profile import ModelError
from worker.contract.tasks import DCP_METADATA
from worker.model.export import tensor_aliases

_SAFETENSORS_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# Where training scripts put the state_dict in a checkpoint that holds other things too.
_STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "module")


@dataclass(frozen=True)
class TensorShape:
    """The shape and type of a tensor, known before its values are read."""

    shape: tuple[int, ...]
    floating: bool


class WeightFiles(Protocol):
    """Open files: what they hold, and the values of one tensor."""

    shapes: Mapping[str, TensorShape]

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
        opened: WeightFiles = _DcpWeights(place)
    else:
        files = _weight_paths(place)
        opened = _TorchFile(files[0]) if files[0].name.endswith(_TORCH_SUFFIXES) else _SafetensorsFiles(files)
    try:
        yield opened
    finally:
        opened.close()


def _weight_paths(path: Path) -> list[Path]:
    if path.is_dir():
        return _weight_paths(_weights_in_folder(path))
    if not path.is_file():
        raise ModelError(
            f"model.weights {str(path)!r} is not there (as seen from this worker): give a path that every worker sees"
        )
    if path.name.endswith(_INDEX_SUFFIX):
        return _indexed_files(path)
    if not path.name.endswith((_SAFETENSORS_SUFFIX, *_TORCH_SUFFIXES)):
        raise ModelError(
            f"model.weights {str(path)!r} has an ending that says nothing: name a file that ends in {_SAFETENSORS_SUFFIX}, "
            f"{_INDEX_SUFFIX}, {', '.join(_TORCH_SUFFIXES)}, or their folder"
        )
    return [path]


def _weights_in_folder(folder: Path) -> Path:
    """The one thing in a folder that names all weights: an index, else a single file."""
    there = sorted(one for one in folder.iterdir() if one.is_file())
    for ending in ((_INDEX_SUFFIX,), (_SAFETENSORS_SUFFIX,), _TORCH_SUFFIXES):
        found = [one for one in there if one.name.endswith(ending)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(one.name for one in found[:6])
            raise ModelError(
                f"model.weights {str(folder)!r} holds {len(found)} of a kind ({names}): name one"
            )
    raise ModelError(
        f"model.weights {str(folder)!r} holds no weights ({_SAFETENSORS_SUFFIX}, {', '.join(_TORCH_SUFFIXES)})"
    )


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is no index of safetensors ({type(error).__name__}: {error})") from None
    files = [index.parent / name for name in names]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(f"{index} names files that are not beside it: {', '.join(missing)}")
    return files


class _SafetensorsFiles:
    def __init__(self, files: Sequence[Path]):
        self.shapes: dict[str, TensorShape] = {}
        self._file_of: dict[str, Any] = {}
        self._opened: list[Any] = []
        for file in files:
            try:
                opened = safe_open(file, framework="pt")
                self._opened.append(opened)
                for name in opened.keys():  # noqa: SIM118, it is no mapping
                    part = opened.get_slice(name)
                    floating = part.get_dtype().startswith(("F", "BF", "C"))
                    self.shapes[name] = TensorShape(tuple(part.get_shape()), floating)
                    self._file_of[name] = opened
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} cannot be read as safetensors: {error}") from None

    def read(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)

    def close(self) -> None:
        self._file_of.clear()
        self._opened.clear()


class _TorchFile:
    def __init__(self, file: Path):
        try:
            content = _load_torch_file(file)
        except pickle.UnpicklingError as error:
            reason = str(error).strip().splitlines()[0]
            raise ModelError(
                f"{file} holds more than tensors, which is not run ({reason}): save model.state_dict() alone, or "
                "safetensors"
            ) from None
        except (RuntimeError, EOFError, OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read as a torch checkpoint: {error}") from None
        self._tensors = _find_state_dict(file, content)
        self.shapes = {
            name: TensorShape(tuple(t.shape), t.is_floating_point() or t.is_complex())
            for name, t in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def close(self) -> None:
        self._tensors = {}


class _DcpWeights:
    def __init__(self, folder: Path):
        from worker.checkpoint.dcp import DcpFolder  # loads much that workers need for nothing else

        self._folder = DcpFolder(folder)
        nested = {path[0] for path in self._folder.path_of.values() if len(path) == 2}
        found = [key for key in _STATE_DICT_KEYS if key in nested]
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
                f"{', '.join(map(repr, _STATE_DICT_KEYS))} (it holds {held}): save model.state_dict() so"
            )
        self._name_of = of_model
        self.shapes = {
            own: TensorShape(self._folder.shape(name), dtype.is_floating_point or dtype.is_complex)
            for own, name in of_model.items()
            for dtype in (self._folder.dtype(name),)
        }

    def read(self, name: str) -> Tensor:
        return self._folder.read(self._name_of[name])

    def close(self) -> None:
        self._name_of = {}


def _load_torch_file(file: Path) -> Any:
    """Mapped, so that only what is used is read; files of torch before 1.6 cannot be."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
    return torch.load(file, map_location="cpu", weights_only=True)


def _find_state_dict(file: Path, content: Any) -> dict[str, Tensor]:
    if _is_state_dict(content):
        return dict(content)
    inner = content if isinstance(content, Mapping) else {}
    found = [key for key in _STATE_DICT_KEYS if _is_state_dict(inner.get(key))]
    if len(found) == 1:
        return dict(inner[found[0]])
    held = ", ".join(map(repr, list(inner)[:8])) or f"a {type(content).__name__}"
    raise ModelError(
        f"{file} is no state_dict, and has one in {' and in '.join(map(repr, found)) or 'none'} of "
        f"{', '.join(map(repr, _STATE_DICT_KEYS))} (it holds {held}): save model.state_dict() alone"
    )


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(t, Tensor) for t in value.values())


_REMEDY = (
    "give the weights of this very model (its arguments make its shapes), or have model.factory name a function of your "
    "own that loads what fits, with load_state_dict(strict=False)"
)


def check_weights(path: str, record: ModelRecord) -> None:
    """ModelError with the names that the weights lack, have beyond the model's, or have in another shape."""
    with open_weights(path) as files:
        _check_names_and_shapes(path, record, files)


def fill_stages(path: str, stages: Iterable[nn.Module], aliases: Mapping[str, Sequence[str]]) -> None:
    """Give the parameters and persistent buffers of some stages (cut for training) their values from the files.

    Only these are read. `aliases` are all names in the model of a tensor that has several.
    """
    with open_weights(path) as files:
        for stage in stages:
            for local, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
                if (name := stage.original_names.get(local)) is not None:
                    _fill_tensor(path, files, name, tensor, aliases)


def fill_tensors(path: str, tensors: Mapping[str, Tensor], aliases: Mapping[str, Sequence[str]]) -> None:
    """Give tensors by original name their values from the files."""
    with open_weights(path) as files:
        for name, tensor in tensors.items():
            _fill_tensor(path, files, name, tensor, aliases)


def fill_model(path: str, model: nn.Module, record: ModelRecord) -> None:
    """Give a whole model its values, as load_state_dict(strict=True) would; ModelError where that would fail."""
    check_weights(path, record)
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    fill_tensors(path, {entry.tensor: own[entry.tensor] for entry in record.entries}, tensor_aliases(model))


def _check_names_and_shapes(path: str, record: ModelRecord, files: WeightFiles) -> None:
    entries = _expected_entries(record, files)
    of_tensor: dict[str, list[StateDictEntry]] = {}
    for entry in entries:
        of_tensor.setdefault(entry.tensor, []).append(entry)
    missing = [
        " or ".join(entry.name for entry in entries)
        for entries in of_tensor.values()
        if not any(entry.name in files.shapes for entry in entries)
    ]
    known = {entry.name: entry for entry in entries}
    unexpected = [name for name in files.shapes if name not in known]
    shapes, kinds = [], []
    for name, found in files.shapes.items():
        if (entry := known.get(name)) is None:
            continue
        if found.shape != entry.shape:
            shapes.append(f"{name} {list(found.shape)} (the model's is {list(entry.shape)})")
        elif found.floating != (entry.dtype.is_floating_point or entry.dtype.is_complex):
            kinds.append(f"{name} (the model's is {entry.dtype})")
    mismatches = [
        f"{what}: {shown_names(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", shapes),
            ("of another kind of number", kinds),
        )
        if names
    ]
    if mismatches:
        way_out = _prefix_hint(missing, unexpected) + _REMEDY
        raise ModelError(f"model.weights {path!r} do not fit the model: {'; '.join(mismatches)}. {way_out}")


def _expected_entries(record: ModelRecord, files: WeightFiles) -> Sequence[StateDictEntry]:
    """The entries that the files are to have: the whole state_dict, or of a model of peft that of the model below, whose
    adapters begin as their factory makes them."""
    if record.adapters is None or any(entry.name in files.shapes for entry in record.entries):
        return record.entries
    return record.adapters.base


def _prefix_hint(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """A prefix that all names in the file have and those of the model have not, or the other way round."""
    for stored in unexpected:
        for expected in missing:
            if stored.endswith(f".{expected}"):
                return f"The names in the file begin with {stored.removesuffix(expected)!r}, the model's do not. "
            if expected.endswith(f".{stored}"):
                return f"The model's names begin with {expected.removesuffix(stored)!r}, those in the file do not. "
    return ""


@torch.no_grad()
def _fill_tensor(
    path: str, files: WeightFiles, name: str, tensor: Tensor, aliases: Mapping[str, Sequence[str]]
) -> None:
    names = aliases.get(name, (name,))
    there = [one for one in names if one in files.shapes]
    if not there and (below := base_model_name(name)) is not None:
        there = list(dict.fromkeys(base for one in names if (base := base_model_name(one)) in files.shapes))
        if not there and below not in files.shapes and not any(map(base_model_name, files.shapes)):
            return  # an adapter of its own: `check_weights` has seen that nothing else is missing
    if not there:
        raise ModelError(f"model.weights {path!r} lack {name!r}: have they changed since the job began?")
    value = files.read(there[0])
    for other in there[1:]:
        if not torch.equal(value, files.read(other)):
            raise ModelError(
                f"model.weights {path!r} have different values for {there[0]!r} and {other!r}, which are one parameter in "
                "the model: remove one from the file, or build the model without tying them"
            )
    if value.shape != tensor.shape:
        raise ModelError(
            f"model.weights {path!r}: {there[0]} has shape {list(value.shape)}, not {list(tensor.shape)}"
        )
    tensor.copy_(value)
