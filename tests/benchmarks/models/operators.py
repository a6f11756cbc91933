"""Lets torchvision be imported beside a torch without CUDA.

Its wheels on PyPI are built for torch with CUDA: elsewhere their compiled operators do not load, and importing the
package fails where it describes two of them. These are declared here, and nothing else: a model that calls one fails.
"""

from __future__ import annotations

import torch

_DECLARED: list[torch.library.Library] = []
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def declare() -> None:
    """Call before the first import of torchvision."""
    if torch.version.cuda is None and not _DECLARED:
        library = torch.library.Library("torchvision", "DEF")
        for schema in _OPERATORS:
            library.define(schema)
        _DECLARED.append(library)
