"""Seeds of random operations, and a fair lock for the process-wide RNGs (python, numpy, torch CPU).

Every random operation of a traced stage starts from a seed derived from (seed, worker, step, microbatch, name of
the operation in the traced model), so that dropout is the same under every schedule, placement and cut; a module
without a graph is seeded once a forward by stage. The RNGs belong to the process and two threads draw from them:
compute (dropout, loss, optimizer) and prefetch (augmenting data sets). Each holds RNG_LOCK while user code of its
own may seed and draw, as does every `seeded` body; python's own lock may starve a thread that waits for a loop, the
FairLock does not.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import fx, nn

from worker.model.opaque.call import opaque_call


class FairLock:
    """A lock that nobody gets twice while another waits: python's own may starve who waits for a loop. Its holder may
    enter it again."""

    def __init__(self) -> None:
        self._next = threading.Lock()
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if not self.held_by_this_thread:
            with self._next:  # who waits here is the next, whatever the holder does after its turn
                self._lock.acquire()
            self._holder = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._holder = None
            self._lock.release()

    @property
    def held_by_this_thread(self) -> bool:
        """True if this thread holds the lock."""
        return self._holder == threading.get_ident()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """In the body it is anybody's turn; where it was this thread's, it is again afterwards."""
        if not self.held_by_this_thread:
            yield
            return
        depth, self._depth = self._depth, 1
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
            self._depth = depth


RNG_LOCK = FairLock()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Have the body draw from random, numpy.random and torch (on CUDA too, once it is in use) by `seed` alone, whatever
    other threads draw; afterwards these generators stand where they stood."""
    with RNG_LOCK, _rng_state_preserved():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # not torch.manual_seed: before CUDA is in use that keeps every seed, with a stack trace, for later
        for generator in (torch.default_generator, *_cuda_generators()):
            generator.manual_seed(seed)
        yield


@contextlib.contextmanager
def release_rng_lock() -> Iterator[None]:
    """While the body waits for other workers: a turn of this thread with the generators is others', if it has it, and
    afterwards the generators stand where they stood."""
    if not RNG_LOCK.held_by_this_thread:
        yield
        return
    with _rng_state_preserved(), RNG_LOCK.released():
        yield


@contextlib.contextmanager
def _rng_state_preserved() -> Iterator[None]:
    cuda = _cuda_generators()
    python, numpy, torch_cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_cuda = [generator.get_state() for generator in cuda]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_cpu)
        for generator, state in zip(cuda, on_cuda, strict=True):
            generator.set_state(state)


def _cuda_generators() -> list[torch.Generator]:
    """The generator of the current device, if this process uses CUDA."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.default_generators[torch.cuda.current_device()]]


@dataclass(frozen=True)
class RngStates:
    """The states of the process-wide RNGs of the host."""

    python: Any
    numpy: Any
    torch_cpu: torch.Tensor

    @classmethod
    def read(cls) -> Self:
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())

    def restore(self) -> None:
        """Put the generators back; those of the accelerator to the seed with which torch begins."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch_cpu)
        for generator in _cuda_generators():
            generator.manual_seed(torch.Generator().initial_seed())


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed of some parts; equal parts give equal seeds on every machine."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def default_generator(device: torch.device) -> torch.Generator:
    """Torch's own generator of `device`, where operations draw that are given none."""
    if device.type != "cuda":
        return torch.default_generator
    index = device.index
    return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]


class RandomState:
    """The random state of one stage: seeded before each forward by step and microbatch. With `keeps` the process's
    generators are restored after each forward."""

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
        with RNG_LOCK:
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
        default_generator(self._device).manual_seed(self._seed_of(operation))

    def generator_state(self) -> torch.Tensor:
        """The state of torch's generator of the device. On CUDA this waits for nothing."""
        return default_generator(self._device).get_state()

    def go_on_from(self, state: torch.Tensor) -> None:
        """Draw what comes next as it was drawn behind `state`."""
        default_generator(self._device).set_state(state)

    def _seed_of(self, operation: str) -> int:
        return derive_seed(*self._fixed, *self._now, operation)


class ReseedBeforeOp(nn.Module):
    """A call in front of a random operation of a graph."""

    def __init__(self, state: RandomState, operation: str):
        super().__init__()
        self._state, self._operation = state, operation

    def forward(self) -> None:
        self._state.restart(self._operation)


def reseed_at_random_ops(stage: nn.Module, state: RandomState) -> int | None:
    """Put a restart in front of every random operation in the graphs of `stage`; how many there are, or
    None where there is no graph to tell."""
    graphs = [module for module in stage.modules() if isinstance(module, fx.GraphModule)]
    if not graphs:
        return None
    count = 0
    for module in graphs:
        found = [node for node in module.graph.nodes if is_random_op(node)]
        for node in found:
            name = f"restart_{node.name}"
            module.add_submodule(name, ReseedBeforeOp(state, node.name))
            with module.graph.inserting_before(node):
                module.graph.call_module(name)
        if found:
            module.recompile()
        count += len(found)
    return count


def is_random_op(node: fx.Node) -> bool:
    """True if an operation of a graph may draw, as a module that runs as it is may."""
    if opaque_call(node) is not None:
        return True
    tags = getattr(node.target, "tags", ()) if node.op == "call_function" else ()
    return torch.Tag.nondeterministic_seeded in tags
