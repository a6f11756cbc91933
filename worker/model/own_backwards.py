"""Autograd functions of transformers whose own backward no trace keeps, written so that autograd derives the same one.

Each is what its forward gives, plus a term that is zero and has the gradient of its backward. The model itself is left as it
is: the comparison before the first step finds whether the library has changed what they do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def own_backwards_kept() -> Iterator[None]:
    """In the body the known functions, where their modules are loaded, are called as written here."""
    replaced = []
    for (module, name), function in _FUNCTIONS.items():
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None:
            kind.apply = function
            replaced.append(kind)
    try:
        yield
    finally:
        for kind in replaced:
            del kind.apply  # torch's own, inherited, is there again


def _with_gradient(value: Tensor, term: Tensor) -> Tensor:
    """`value`, with the gradient of `term`."""
    return value.detach() + (term - term.detach())


def _sparse_mixer(
    scores: Tensor, multiplier: Tensor, selected: Tensor, gates: Tensor, mask: Tensor
) -> Tensor:
    """Of PhiMoE: to the scores, multiplier * (one-hot of the selected - gates) of the gradient."""
    ones = torch.zeros_like(gates).scatter(-1, selected, 1.0)
    slopes = (multiplier * (ones - gates)).detach()
    return _with_gradient(multiplier * mask, (scores * slopes).sum(-1, keepdim=True))


_MOST = 1000.0


def _bounded_root(x: Tensor) -> Tensor:
    """Of RecurrentGemma: a square root whose slope is at most _MOST."""
    slopes = 1 / torch.sqrt(torch.clip(4.0 * x.detach(), min=1 / _MOST**2))
    return _with_gradient(torch.sqrt(x.detach()), x * slopes)


_FUNCTIONS: dict[tuple[str, str], Callable[..., Tensor]] = {
    ("transformers.models.phimoe.modeling_phimoe", "PhimoeMultiplier"): _sparse_mixer,
    ("transformers.models.recurrent_gemma.modeling_recurrent_gemma", "SqrtBoundDerivative"): _bounded_root,
}
KNOWN = frozenset(name for _, name in _FUNCTIONS)
