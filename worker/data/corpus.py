"""Text that is on every machine with Python: the sources of its standard library.

Reads files; light: no torch at import, so that the command line can use it too.
"""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path

import numpy as np

# Installed packages and tests differ between distributions of the same Python.
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


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
        found = [file for file in place.rglob(pattern) if file.is_file()]
        files = sorted(
            (file for file in found if not _SKIPPED & set(file.relative_to(place).parts[:-1])),
            key=lambda file: file.relative_to(place).as_posix(),
        )
    corpus = np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)
    if not len(corpus):
        raise FileNotFoundError(
            f"no text in {path!r} (files {pattern}): give data.args.path a file or a folder"
        )
    return corpus


def unigram_entropy_bits(corpus: np.ndarray) -> float:
    """Bits per byte of a model that knows only how often each byte occurs."""
    counts = np.bincount(corpus, minlength=256)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


if __name__ == "__main__":
    print(unigram_entropy_bits(standard_library_corpus()))
