"""NoisyDigits: pairs of noisy and clean handwritten digits (of scikit-learn, in the extra `demo`) for training a denoiser.

The noise depends on the seed and the pair's index only, so that every rank and every epoch reads the same pairs.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset


class NoisyDigits(Dataset[tuple[Tensor, Tensor]]):
    """1,797 pairs (noisy, clean) of images [1, 8, 8]; clean pixels lie in [-1, 1].

    The noise is Gaussian with deviation `noise` and the same whenever a pair is read again: it
    depends on `seed` and the pair's index only.
    """

    def __init__(self, noise: float = 0.5, *, seed: int = 0) -> None:
        self._clean = _clean_images()
        self._noise = noise
        self._seed = seed

    def __len__(self) -> int:
        return len(self._clean)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self._clean):
            raise IndexError(f"image {index} of {len(self._clean)}")
        clean = self._clean[index]
        drawn = np.random.default_rng([self._seed, index]).standard_normal(clean.shape, dtype=np.float32)
        return clean + self._noise * torch.from_numpy(drawn), clean


@functools.cache
def _clean_images() -> Tensor:
    """All images, [1797, 1, 8, 8]: scikit-learn parses them as text each time."""
    return torch.from_numpy(load_digits().images.astype(np.float32) / 8.0 - 1.0).unsqueeze(1)
