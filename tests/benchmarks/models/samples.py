"""Data sets of random samples, as the models of the table take them: each a function of its index only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LENGTH, WORDS, CLASSES, SIDE = 16, 96, 4, 32


class _Samples:
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return self.sample(index, torch.Generator().manual_seed(index))


def _words(draw: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, WORDS, (length,), generator=draw)


class Text(_Samples):
    """Words and the words to say; `padded`: some samples end early, which a mask tells."""

    def __init__(self, padded: bool = True, mask: bool = True):
        self._padded, self._mask = padded, mask

    def sample(self, index: int, draw: torch.Generator) -> Any:
        ids = _words(draw)
        mask = (torch.arange(LENGTH) < LENGTH - (index % 4 if self._padded else 0)).long()
        found = {"input_ids": ids, "labels": torch.where(mask == 1, ids, -100)}
        return found | ({"attention_mask": mask} if self._mask else {})


class TextClasses(_Samples):
    """Words, padded, and a class."""

    def sample(self, index: int, draw: torch.Generator) -> Any:
        mask = (torch.arange(LENGTH) < LENGTH - index % 4).long()
        return {"input_ids": _words(draw), "attention_mask": mask, "labels": index % CLASSES}


class Images(_Samples):
    """Images and a class: as transformers takes them by name, or (image, class)."""

    def __init__(self, named: bool = True, side: int = SIDE):
        self._named, self._side = named, side

    def sample(self, index: int, draw: torch.Generator) -> Any:
        image = torch.randn(3, self._side, self._side, generator=draw)
        return {"pixel_values": image, "labels": index % CLASSES} if self._named else (image, index % CLASSES)


class Pictures(_Samples):
    """Images alone, for models that make their own targets of them."""

    def sample(self, index: int, draw: torch.Generator) -> Any:
        return {"pixel_values": torch.randn(3, SIDE, SIDE, generator=draw)}


class Maps(_Samples):
    """Images and a class of every pixel."""

    def __init__(self, named: bool = True, side: int = SIDE):
        self._named, self._side = named, side

    def sample(self, index: int, draw: torch.Generator) -> Any:
        image = torch.randn(3, self._side, self._side, generator=draw)
        classes = torch.randint(CLASSES, (self._side, self._side), generator=draw)
        return {"pixel_values": image, "labels": classes} if self._named else (image, classes)


class Detections(_Samples):
    """Images, and what a detector's queries should answer, in place of a matching of boxes."""

    def __init__(self, queries: int, classes: int):
        self._shape = (queries, classes)

    def sample(self, index: int, draw: torch.Generator) -> Any:
        image = torch.randn(3, 2 * SIDE, 2 * SIDE, generator=draw)
        return {"pixel_values": image}, torch.randn(self._shape, generator=draw)


class Noise(_Samples):
    """What a denoiser takes, by name (`image`: under which), and the noise that it should find.

    With `words` also the hidden states of a text, of that width; with `labelled` a class.
    """

    def __init__(
        self, channels: int = 3, side: int = 16, image: str = "sample", words: int = 0, labelled: bool = False
    ):
        self._shape, self._image, self._words, self._labelled = (channels, side, side), image, words, labelled

    def sample(self, index: int, draw: torch.Generator) -> Any:
        found: dict[str, Any] = {
            self._image: torch.randn(self._shape, generator=draw),
            "timestep": torch.tensor(37 * index % 1000),
        }
        if self._words:
            found["encoder_hidden_states"] = torch.randn(6, self._words, generator=draw)
        if self._labelled:
            found["class_labels"] = torch.tensor(index % CLASSES)
        return found, torch.randn(self._shape, generator=draw)


class Copies(_Samples):
    """Images that should come out as they went in."""

    def sample(self, index: int, draw: torch.Generator) -> Any:
        image = torch.randn(3, SIDE, SIDE, generator=draw)
        return {"sample": image}, image


class Speech(_Samples):
    """Features of sound and the words said (Whisper)."""

    def sample(self, index: int, draw: torch.Generator) -> Any:
        return {"input_features": torch.randn(16, 48, generator=draw), "labels": _words(draw, 8)}


class Sounds(_Samples):
    """Waves and a class (Wav2Vec2)."""

    def sample(self, index: int, draw: torch.Generator) -> Any:
        return {"input_values": torch.randn(1600, generator=draw), "labels": index % CLASSES}


class Captions(_Samples):
    """An image and a text each (CLIP), and which of the texts of a microbatch it is."""

    def sample(self, index: int, draw: torch.Generator) -> Any:
        image = torch.randn(3, SIDE, SIDE, generator=draw)
        words = {"input_ids": _words(draw), "attention_mask": torch.ones(LENGTH, dtype=torch.long)}
        return words | {"pixel_values": image}, index % 2


class Shaped(_Samples):
    """Inputs by name and what should come out (None: the model has a loss of its own), each by its shape: random numbers,
    or of {"shape": ..., "below": n} whole numbers below n, or of {"shape": ..., "ones": true} ones."""

    def __init__(self, inputs: Mapping[str, Any], target: Any = None):
        self._inputs, self._target = inputs, target

    def sample(self, index: int, draw: torch.Generator) -> Any:
        found = {name: _shaped(one, draw) for name, one in self._inputs.items()}
        return found if self._target is None else (found, _shaped(self._target, draw))


def _shaped(one: Any, draw: torch.Generator) -> Tensor:
    if not isinstance(one, Mapping):
        return torch.randn(tuple(one), generator=draw)
    if one.get("ones"):
        return torch.ones(tuple(one["shape"]), dtype=torch.long)
    return torch.randint(one["below"], tuple(one["shape"]), generator=draw)
