"""TokenFiles: a map-style data set of token windows for language models, memory-mapped from .bin and .npy files.

Maps are made once a process and never copied or pickled. Jobs name it as `worker.data.tokens:TokenFiles`, so module
and class are a public name. Knows nothing of batches or steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

TOKEN_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")
IGNORE_INDEX = -100
"""The target that losses pass over, as torch's cross entropy does by default."""


class TokenFiles(Dataset[Any]):
    """Windows of `length` tokens, one every `stride` tokens (null: `length`, so that they do not overlap).

    `path` is a file, a folder (its *.bin and *.npy, in order of name) or a list of files: raw tokens of `dtype`, or
    .npy, which tell their own. No window crosses the end of a file.

    With `targets` "next" a sample is (tokens [length], the token after each of them [length]), both int64. With "same"
    it is {"input_ids": tokens, "labels": the same}, for models that shift their labels themselves, as those of
    transformers do. After a token `document_end` no target counts: it belongs to another document.
    Raises ValueError and FileNotFoundError naming the file, its size and type.
    """

    def __init__(
        self,
        path: str | Sequence[str],
        length: int,
        *,
        dtype: str = "uint16",
        stride: int | None = None,
        targets: str = "next",
        document_end: int | None = None,
        vocabulary: int | None = None,
    ) -> None:
        stride = length if stride is None else stride
        for name, value in (("length", length), ("stride", stride)):
            if value < 1:
                raise ValueError(f"{name} is {value}: give at least 1 token")
        if dtype not in TOKEN_TYPES:
            raise ValueError(f"dtype {dtype!r} is none of tokens: use one of {', '.join(TOKEN_TYPES)}")
        if targets not in ("next", "same"):
            raise ValueError(f"targets is {targets!r}: write next or same")
        self.length, self.stride, self._dtype = length, stride, dtype
        self._same, self._document_end, self._vocabulary = targets == "same", document_end, vocabulary
        self._span = length if self._same else length + 1
        self.files = _token_files(path)
        sizes = [len(_memory_map(file, dtype)) for file in self.files]
        windows = [max(0, (size - self._span) // stride + 1) for size in sizes]
        self._begins = np.cumsum([0, *windows])
        if not self._begins[-1]:
            shown = ", ".join(
                f"{file} ({size} tokens)" for file, size in list(zip(self.files, sizes, strict=True))[:4]
            )
            raise ValueError(
                f"no file has the {self._span} tokens of a window of length {length}: {shown}; set length to less, or "
                "give longer files"
            )

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        number = int(np.searchsorted(self._begins, index, side="right")) - 1
        first = (index - int(self._begins[number])) * self.stride
        file = self.files[number]
        window = _memory_map(file, self._dtype)[first : first + self._span].astype(np.int64)
        if self._vocabulary is not None and not 0 <= window.min() <= window.max() < self._vocabulary:
            raise ValueError(
                f"{file} has the token {window.max() if window.min() >= 0 else window.min()} among those from {first} "
                f"on, the vocabulary {self._vocabulary}: is its type {_memory_map(file, self._dtype).dtype}, as it is read?"
            )
        tokens = torch.from_numpy(window)
        if self._same:
            return {"input_ids": tokens, "labels": self._of_one_document(tokens[:-1], tokens)}
        return tokens[:-1], self._of_one_document(tokens[:-1], tokens[1:])

    def _of_one_document(self, before: Tensor, targets: Tensor) -> Tensor:
        """`targets`, without those that stand behind the end of a document; `before` are the tokens before each of the
        last of them."""
        targets = targets.clone()
        if self._document_end is not None:
            targets[len(targets) - len(before) :][before == self._document_end] = IGNORE_INDEX
        return targets


def _token_files(path: str | Sequence[str]) -> tuple[Path, ...]:
    if not isinstance(path, str):
        files = tuple(Path(one) for one in path)
    elif Path(path).is_dir():
        files = tuple(sorted(one for one in Path(path).iterdir() if one.suffix in (".bin", ".npy")))
    else:
        files = (Path(path),)
    if not files:
        raise FileNotFoundError(
            f"no token files in {path!r} (*.bin, *.npy): give path a file, a folder or a list"
        )
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(
                f"there is no token file {str(file)!r}: every worker reads it at this path"
            )
    return files


@lru_cache(maxsize=256)
def _memory_map(file: Path, dtype: str) -> np.ndarray:
    """A file's tokens; the map of a file is made once in a process, and not sent to others."""
    size = file.stat().st_size
    if file.suffix == ".npy":
        try:
            tokens = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise ValueError(f"{file} of {size} bytes is no .npy file that can be mapped: {error}") from error
        if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
            raise ValueError(
                f"{file} of {size} bytes has the shape {list(tokens.shape)} of {tokens.dtype}: save one row of whole "
                "numbers"
            )
        return tokens
    item = np.dtype(dtype).itemsize
    if size == 0 or size % item:
        raise ValueError(
            f"{file} of {size} bytes is no row of {dtype} tokens, which have {item} bytes each: set dtype to what it was "
            "written with"
        )
    return np.memmap(file, dtype=dtype, mode="r")
