"""Marks what forward calls through torch.utils.checkpoint, which no graph keeps: the regions are traced as plain calls.

The stages around a marked node are recomputed as a whole. Knows nothing of stages or layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx
from torch.fx.traceback import annotate, preserve_node_meta

from worker.model.layers import inner_graph

_CHECKPOINT_MARK = "slotline_checkpointed"
_NON_REENTRANT = "_checkpoint_without_reentrant_generator"
"""What torch.utils.checkpoint calls around a region that is not reentrant; since torch 2.14 with `_impl` behind its name."""


@contextlib.contextmanager
def mark_checkpoint_regions() -> Iterator[None]:
    """In the body, what is called through torch.utils.checkpoint is traced as plain calls that are marked."""
    module = torch.utils.checkpoint
    around = f"{_NON_REENTRANT}_impl" if hasattr(module, f"{_NON_REENTRANT}_impl") else _NON_REENTRANT
    reentrant, generator = module.CheckpointFunction, getattr(module, around)
    module.CheckpointFunction = _InlinedReentrant
    setattr(module, around, _inlined_non_reentrant)
    try:
        with preserve_node_meta():
            yield
    finally:
        module.CheckpointFunction = reentrant
        setattr(module, around, generator)


class _InlinedReentrant:
    """Stands for the autograd function behind a reentrant checkpoint."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *arguments: Any) -> Any:
        with annotate({_CHECKPOINT_MARK: True}):
            return function(*arguments)


def _inlined_non_reentrant(*_: Any, **__: Any) -> Iterator[None]:
    """Stands for what torch does before and after the call of a checkpoint that is not reentrant."""
    with annotate({_CHECKPOINT_MARK: True}):
        yield


def is_checkpointed(node: fx.Node) -> bool:
    """True if a node, or a node in a graph that it calls, was traced in a checkpoint region."""
    if _CHECKPOINT_MARK in (node.meta.get("custom") or {}):
        return True
    inner = inner_graph(node)
    return inner is not None and any(is_checkpointed(part) for part in inner.graph.nodes)
