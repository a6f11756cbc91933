"""Counts the floating point operations that a piece of the model needs, by torch's own counter.

A multiplication and an addition are two. Matrix products, convolutions and attention are counted, all else is nothing
beside them. Of attention it is the whole square, also where it is causal, and of its backward twice its forward: what
fused kernels compute again to save memory is no work of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

log = logging.getLogger(__name__)


def count_flops(run: Callable[[], None]) -> int | None:
    """The operations of what `run` calls; None where torch cannot count them. Never raises for that."""
    counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION)
    try:
        with counter:
            run()
    except Exception as error:  # an operator that knows no such mode: the same runs without it
        log.warning("the model's operations are not counted: %s", error)
        run()
        return None
    return int(counter.get_total_flops())


def _forward(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _backward(
    _gradient: Any, query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    return 2 * sdpa_flop_count(query, key, value)


_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,  # torch counts CUDA's only
    **dict.fromkeys(
        (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
            torch.ops.aten._scaled_dot_product_flash_attention_backward,
            torch.ops.aten._scaled_dot_product_efficient_attention_backward,
            torch.ops.aten._scaled_dot_product_cudnn_attention_backward,
        ),
        _backward,
    ),
}
