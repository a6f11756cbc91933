"""What a graph would compute, without numbers: shapes, types, aliases and who takes gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule):
        super().__init__(module, garbage_collect_values=False)
        self.found: dict[fx.Node, Any] = {}

    def fetch_attr(self, target: str) -> Any:
        # of buffers a copy: an operation on numbers alone is done, and would change a real one in place
        value = super().fetch_attr(target)
        return value.clone() if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) else value

    def run_node(self, node: fx.Node) -> Any:
        self.found[node] = super().run_node(node)
        return self.found[node]


def fake_values(
    module: fx.GraphModule,
    inputs: Sequence[Tensor],
    entered: contextlib.AbstractContextManager | None = None,
    *,
    with_real: bool = False,
) -> dict[fx.Node, Any]:
    """The results of all nodes for inputs of these shapes and types, with gradients and within `entered` (autocast, say);
    `with_real`: the module has tensors of its own, which are real. Inputs that are one object stay one."""
    mode, recorder = FakeTensorMode(allow_non_fake_inputs=with_real), _Recorder(module)
    known: dict[int, Tensor] = {}
    fakes = [known.setdefault(id(value), mode.from_tensor(value, static_shapes=True)) for value in inputs]
    with (
        torch.random.fork_rng(devices=[]),
        mode,
        torch.enable_grad(),
        entered or contextlib.nullcontext(),
    ):
        recorder.run(*fakes)
    return recorder.found
