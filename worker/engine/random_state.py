"""Random numbers that depend on what is computed, not on when or where.

Every random operation of a traced stage starts from a state derived from (seed, step, worker, microbatch,
name of the operation in the traced model), so dropout gives the same run under every schedule, placement
and cut. In a module without a graph it starts once a forward, by stage: the same run under every schedule
and placement of one cut.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch import fx, nn

from worker.seeding import seeded
from worker.turns import GENERATORS


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed of some parts; equal parts give equal seeds on every machine."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator_of(device: torch.device) -> torch.Generator:
    """Torch's own generator of `device`, where operations draw that are given none."""
    if device.type != "cuda":
        return torch.default_generator
    index = device.index
    return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]


class RandomState:
    """The random state of one stage: told before each forward what is computed. With `keeps` the process's generators
    stand after each forward where they stood."""

    def __init__(self, seed: int, worker: int, device: torch.device, *, keeps: bool = False):
        self._keeps = keeps
        self._fixed = (seed, worker)
        self._device = device
        self._now: tuple[int, int] = (0, 0)

    @contextlib.contextmanager
    def forward(self, step: int, microbatch: int, stage: int) -> Iterator[None]:
        """Random operations of the body belong to this step and microbatch.

        The process's generators are the body's alone: on CUDA it draws from the device's, but a loss may use them.
        """
        with GENERATORS:
            self.begin(step, microbatch)
            operation = f"stage {stage}"
            with seeded(self._seed_of(operation)) if self._keeps else contextlib.nullcontext():
                self.restart(operation)
                yield

    def begin(self, step: int, microbatch: int) -> None:
        """From now on random operations belong to this step and microbatch."""
        self._now = (step, microbatch)

    def restart(self, operation: str) -> None:
        """Start torch's generator of the device anew for `operation`. On CUDA this waits for nothing."""
        generator_of(self._device).manual_seed(self._seed_of(operation))

    def _seed_of(self, operation: str) -> int:
        return derive_seed(*self._fixed, *self._now, operation)


class Restart(nn.Module):
    """A call in front of a random operation of a graph."""

    def __init__(self, state: RandomState, operation: str):
        super().__init__()
        self._state, self._operation = state, operation

    def forward(self) -> None:
        self._state.restart(self._operation)


def restart_at_operations(stage: nn.Module, state: RandomState) -> int | None:
    """Put a restart in front of every random operation in the graphs of `stage`; how many there are, or
    None where there is no graph to tell."""
    graphs = [module for module in stage.modules() if isinstance(module, fx.GraphModule)]
    if not graphs:
        return None
    count = 0
    for module in graphs:
        found = [node for node in module.graph.nodes if is_random(node)]
        for node in found:
            name = f"restart_{node.name}"
            module.add_submodule(name, Restart(state, node.name))
            with module.graph.inserting_before(node):
                module.graph.call_module(name)
        if found:
            module.recompile()
        count += len(found)
    return count


def is_random(node: fx.Node) -> bool:
    """Whether an operation of a graph may draw."""
    tags = getattr(node.target, "tags", ()) if node.op == "call_function" else ()
    return torch.Tag.nondeterministic_seeded in tags
