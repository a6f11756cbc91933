"""ByteWindows: a data set of fixed-length byte windows over text, by default Python's standard library.

`read_corpus` reads a file or a folder in order of path, without installed packages and tests, which differ
between distributions of the same Python. The command line uses the corpus too: torch must not load at import for
it.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

# Installed packages and tests differ between distributions of the same Python.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def standard_library_corpus() -> np.ndarray:
    """All Python sources of the running interpreter's standard library, as uint8 in order of path."""
    return read_corpus(sysconfig.get_paths()["stdlib"])


@lru_cache(maxsize=2)
def read_corpus(path: str, pattern: str = "*.py") -> np.ndarray:
    """The bytes of a file, or of all files below a folder that match `pattern`, in order of path.

    Raises FileNotFoundError when there is nothing to read.
    """
    place = Path(path)
    if place.is_file():
        files = [place]
    else:
        files = sorted(_files_below(place, pattern), key=lambda file: file.relative_to(place).as_posix())
    corpus = np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)
    if not len(corpus):
        raise FileNotFoundError(
            f"no text in {path!r} (files {pattern}): give data.args.path a file or a folder"
        )
    return corpus


def _files_below(place: Path, pattern: str) -> Iterator[Path]:
    """The files that match, without what is below skipped folders: site-packages alone may have tens of thousands."""
    for folder, subfolders, names in os.walk(place):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        for name in names:
            file = Path(folder, name)
            if file.match(pattern) and file.is_file():
                yield file


def unigram_entropy_bits(corpus: np.ndarray) -> float:
    """Bits per byte of a model that knows only how often each byte occurs."""
    counts = np.bincount(corpus, minlength=256)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text that do not overlap: (bytes [length], the byte after each of them [length]).

    `path` is a file or a folder (of which files matching `pattern` are read); without it the
    sources of Python's standard library on this machine. Raises ValueError for a text shorter
    than one window.
    """

    def __init__(self, length: int = 128, *, path: str | None = None, pattern: str = "*") -> None:
        self.length = length
        self.corpus = standard_library_corpus() if path is None else read_corpus(path, pattern)
        self._count = (len(self.corpus) - 1) // length if length > 0 else 0
        if self._count < 1:
            raise ValueError(
                f"a text of {len(self.corpus)} bytes has no window of length {length}: "
                "set length to at least 1 and less than the text's length"
            )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(f"window {index} of {self._count}")
        start = index * self.length
        window = torch.tensor(self.corpus[start : start + self.length + 1], dtype=torch.int64)
        return window[:-1], window[1:]


if __name__ == "__main__":
    print(unigram_entropy_bits(standard_library_corpus()))
