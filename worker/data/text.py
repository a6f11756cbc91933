"""Windows of bytes for a language model. Knows nothing of batches or steps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from worker.data.corpus import read_corpus, standard_library_corpus


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
