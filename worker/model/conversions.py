"""Conversions in a model's forward that convert nothing: `self.router = self.router.to(torch.float32)`.

While a model is traced its parameters are stand-ins, which torch cannot exchange; here a module that has the type and
device asked for already is left as it is. Any other conversion is torch's to refuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def needless_left_out() -> Iterator[None]:
    """In the body `Module.to` does nothing where nothing would change."""
    original = nn.Module.to

    def to(self: nn.Module, *args: Any, **options: Any) -> nn.Module:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **options)
        tensors = [*self.parameters(), *self.buffers()]
        same = all(
            (device is None or one.device == device)
            and (dtype is None or one.dtype == dtype or not (one.is_floating_point() or one.is_complex()))
            for one in tensors
        )
        return self if same and memory_format is None else original(self, *args, **options)

    nn.Module.to = to
    try:
        yield
    finally:
        nn.Module.to = original
