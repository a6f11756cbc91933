"""Where a model itself drops activations (torch.utils.checkpoint): its regions are marked while it is traced.

A graph knows nothing of such a region: traced as it is, one that is not reentrant keeps everything, and of a
reentrant one no gradient comes back. So tracing runs what is inside as if it stood outside, and marks it; the
stages around it are then recomputed as a whole (service/scheduler/cut/recompute.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint
from torch import fx
from torch.fx.traceback import annotate, preserve_node_meta

from worker.model.layers import inner_graph

_MARK = "slotline_checkpointed"


@contextlib.contextmanager
def regions_marked() -> Iterator[None]:
    """In the body, what is called through torch.utils.checkpoint is traced as plain calls that are marked."""
    module = torch.utils.checkpoint
    before = module.CheckpointFunction, module._checkpoint_without_reentrant_generator
    module.CheckpointFunction, module._checkpoint_without_reentrant_generator = _Reentrant, _not_reentrant
    try:
        with preserve_node_meta():
            yield
    finally:
        module.CheckpointFunction, module._checkpoint_without_reentrant_generator = before


class _Reentrant:
    """Stands for the autograd function behind a reentrant checkpoint."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *arguments: Any) -> Any:
        with annotate({_MARK: True}):
            return function(*arguments)


def _not_reentrant(*_: Any, **__: Any) -> Iterator[None]:
    """Stands for what torch does before and after the call of a checkpoint that is not reentrant."""
    with annotate({_MARK: True}):
        yield


def is_checkpointed(node: fx.Node) -> bool:
    """Whether a node, or anything in a graph that it calls, was traced in such a region."""
    if _MARK in (node.meta.get("custom") or {}):
        return True
    inner = inner_graph(node)
    return inner is not None and any(is_checkpointed(part) for part in inner.graph.nodes)
