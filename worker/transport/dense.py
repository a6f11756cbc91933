"""Tensors as transports move them: memory from an address on, which knows no strides and no lazy conjugate."""

from __future__ import annotations

from collections.abc import Callable

import torch


def summable(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """What a sum in place of `tensor` works on: its numbers in order, complex ones as pairs; and what then writes them to
    the tensor, None where they are its own. A gradient may lie otherwise on another worker: what is summed are elements."""
    own = tensor.detach()
    dense = own.contiguous().resolve_conj().resolve_neg()
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    if dense.data_ptr() == own.data_ptr():
        return real, None

    @torch.no_grad()
    def write() -> None:
        tensor.copy_(dense)

    return real, write


def check_dense(what: str, *tensors: torch.Tensor) -> None:
    """ValueError for a tensor whose memory is not its values one after the other: others would get what it is not."""
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            lazily = "lazily conjugated or negated" if tensor.is_contiguous() else "not contiguous"
            raise ValueError(
                f"{what}: a tensor of shape {list(tensor.shape)} is {lazily}, and transports move memory: make it "
                "contiguous, and resolve it (torch.resolve_conj, torch.resolve_neg)"
            )
