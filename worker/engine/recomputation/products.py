"""Selective recomputation: the first forward of a stage keeps the results of its products, the second one takes them.

Products are matrix products, convolutions and attention. They are most of a forward's time and, in a transformer,
about half of what it keeps; everything else (norms, activations, dropout) is computed again (Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models"). Keeping and taking are torch's own, of its selective
activation checkpointing; it runs around each product alone, as it makes every operation that it sees slow on the host.
Must not know buffers, the step or its state.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

aten = torch.ops.aten
# autocast's casts of weights are shared by the threads of a process, of whom one may drop them between two forwards of
# another: it is no other operation that casts again
SAC_IGNORED_OPS.add(aten._to_copy.default)


def _overloads(*names: str) -> frozenset[torch._ops.OpOverload]:
    known = [getattr(aten, name) for name in names if hasattr(aten, name)]
    return frozenset(
        getattr(operation, overload)
        for operation in known
        for overload in operation.overloads()
        if "out" not in overload
    )


_ATTENTION = _overloads("scaled_dot_product_attention")
_PRODUCTS = _ATTENTION | _overloads(
    *("linear", "matmul", "mm", "mv", "addmm", "addmv", "bmm", "baddbmm", "addbmm", "einsum", "bilinear"),
    *(f"conv{transpose}{n}d" for n in (1, 2, 3) for transpose in ("", "_transpose")),
    *("convolution", "_grouped_mm", "_scaled_mm"),
)
"""The operations of graphs that are products."""
_KERNELS = _overloads(
    *("mm", "mv", "addmm", "addmv", "bmm", "baddbmm", "addbmm", "convolution", "_grouped_mm", "_scaled_mm")
)
"""The operations that they consist of, as autograd calls them."""
_ATTENTION_KERNELS = _overloads(
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    "_scaled_dot_product_fused_attention_overrideable",
)
"""Those of attention; without such a kernel it is computed again, as a result would be kept for each pair of words."""


_Around = Callable[[str, torch._ops.OpOverload], AbstractContextManager]


class KeptProducts:
    """The results of the products of one forward. `observe` is called with each tensor that is kept.

    Each is let go where the second forward takes it, which raises RuntimeError where it was changed in place since, or
    where that forward calls other operations than the first.
    """

    def __init__(self, observe: Callable[[torch.Tensor], None] | None = None) -> None:
        self._observe = observe
        self._taking: dict[str, AbstractContextManager] = {}

    def keeping(self, product: str, operation: torch._ops.OpOverload) -> AbstractContextManager:
        """The context of a product in the first forward."""
        kernels = _ATTENTION_KERNELS if operation in _ATTENTION else _KERNELS
        policy = functools.partial(_policy, kernels, self._observe)
        keeping, self._taking[product] = create_selective_checkpoint_contexts(policy)
        return keeping

    def taking(self, product: str, _: torch._ops.OpOverload) -> AbstractContextManager:
        """The context of a product in the second forward."""
        return self._taking.pop(product)


def _policy(
    kernels: Collection[torch._ops.OpOverload],
    observe: Callable[[torch.Tensor], None] | None,
    context: SelectiveCheckpointContext,
    operation: torch._ops.OpOverload,
    *_: object,
    **__: object,
) -> CheckpointPolicy:
    if operation not in kernels:
        return CheckpointPolicy.PREFER_RECOMPUTE
    if observe is not None:
        made = context.op_output
        for value in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(value, torch.Tensor):
                observe(value)
    return CheckpointPolicy.MUST_SAVE


class StageProducts:
    """The products in the graphs of a stage.

    A forward within `keeping` keeps their results, one within `taking` takes them. Both must ask gradients of the same
    tensors, as kernels may choose by that.
    """

    def __init__(self) -> None:
        self._around: _Around | None = None

    def find(self, stage: nn.Module) -> None:
        """Replace the products in the graphs of `stage` by modules that keep and take results; no more of its operations
        may be replaced afterwards."""
        graphs = [(name, part) for name, part in stage.named_modules() if isinstance(part, fx.GraphModule)]
        for name, part in graphs:
            found = [
                node for node in part.graph.nodes if node.op == "call_function" and node.target in _PRODUCTS
            ]
            for node in found:
                product = _Product(self, f"{name}.{node.name}", node.target)
                part.add_submodule(f"product_{node.name}", product)
                node.op, node.target = "call_module", f"product_{node.name}"
            if found:
                part.recompile()

    def keeping(self, kept: KeptProducts) -> AbstractContextManager[None]:
        """A context in which forwards keep their products in `kept`."""
        return self._running(kept.keeping)

    def taking(self, kept: KeptProducts) -> AbstractContextManager[None]:
        """A context in which a forward takes its products from `kept`."""
        return self._running(kept.taking)

    @contextlib.contextmanager
    def _running(self, around: _Around) -> Iterator[None]:
        self._around = around
        try:
            yield
        finally:
            self._around = None

    def run(self, product: str, operation: torch._ops.OpOverload, arguments: Any, keywords: Any) -> Any:
        """The result of an operation, kept or taken where a forward does so."""
        if self._around is None:
            return operation(*arguments, **keywords)
        with self._around(product, operation):
            return operation(*arguments, **keywords)


class _Product(nn.Module):
    """A product in a graph."""

    def __init__(self, products: StageProducts, name: str, operation: torch._ops.OpOverload) -> None:
        super().__init__()
        self._products, self._name, self._operation = products, name, operation

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self._products.run(self._name, self._operation, arguments, keywords)
