"""A checksum of tensors and samples of any kind: equal where types, shapes and bits are equal.

Compares replicas, transfers and first samples between ranks, and verifies on resume that a stream goes on with the
same sample; checkpoints keep that digest, so its bytes must not change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from worker.model.pytree import Targets


def checksum(value: Any) -> str:
    """BLAKE2b, 128 bits in hex, of a tensor, array, number, string, None, or a collection of them.

    Of any other object only the type counts.
    """
    digest = hashlib.blake2b(digest_size=16)
    _update_digest(digest, value)
    return digest.hexdigest()


def _update_digest(digest: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        digest.update(f"{{{len(value)}".encode())
        for name in sorted(value, key=str):
            _update_digest(digest, str(name))
            _update_digest(digest, value[name])
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}".encode())
        for part in value:
            _update_digest(digest, part)
    elif isinstance(value, Targets):
        _update_digest(digest, value.tensors)
    elif isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        digest.update(f"{type(value).__name__}{value!r};".encode())
    else:
        digest.update(type(value).__qualname__.encode())
