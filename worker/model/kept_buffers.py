"""The buffers of a model as they are before a forward that should leave nothing behind."""

from __future__ import annotations

import torch
from torch import nn


class KeptBuffers:
    """The buffers of a model as they are now: `before`, by name."""

    def __init__(self, model: nn.Module):
        self._places = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    def put_back(self) -> None:
        with torch.no_grad():
            for module, name, buffer, before in self._places:
                module._buffers[name] = buffer
                buffer.copy_(before)
