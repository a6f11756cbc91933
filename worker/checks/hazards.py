"""Finds model behaviour that no export keeps: gradient hooks, custom backwards, Python state, other RNGs.

Names each hazard and what it does to a job, and tries whether the output depends on it: numbers set ahead, tensors
replaced, other random numbers, repeated forwards. Comparing a model with its graph is checks/trace's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from worker.contract.profile import TraceError
from worker.model.side_effects.python_state import Kind, Leaf, MovedState, Movement, PythonState

# By how much a number that forward counts up is put ahead, to see whether anything comes to depend on it.
_COUNTER_OFFSETS = (1, 10, 1_000, 100_000)
# A tensor or array of at most so many entries may be a counter too.
_COUNTER_ENTRIES = 16
# How often Python's random numbers are drawn anew: of plain seeds, and of generators half of whose words are extreme,
# so that what happens rarely (random() < 0.02) happens.
_RNG_TRIALS = 8
_EXTREME_RNG_TRIALS = 16
# How often forward runs again where it changes what cannot be put ahead.
_RERUNS = 3
TRIALS_BUDGET_S = 10.0
_NAMED_AT_MOST = 3
SKIP_CHECK_HINT = "training.check_trace: false leaves out this check"


def check_trainable(model: nn.Module) -> None:
    """Refuse a model that cannot be trained in stages whatever its graph is; TraceError names what and the way out."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        count = sum(1 for _ in model.parameters())
        why = f"all of its {count} parameters are frozen" if count else "it has no parameters"
        raise TraceError(
            f"{type(model).__name__} has nothing to train: {why}; leave requires_grad on for what is to be trained"
        )
    for name, parameter in trained.items():
        if nn.parameter.is_lazy(parameter):
            raise TraceError(
                f"parameter {name!r} has no shape before the first forward: give its module the number of features, or "
                "have model.factory call the model once"
            )
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.sparse and module.weight.requires_grad:
            raise TraceError(
                f"module {name!r} ({type(module).__name__}) makes sparse gradients, which pipelines do not sum or "
                "clip: build it with sparse=False"
            )
        if module.max_norm is not None:
            raise TraceError(
                f"module {name!r} ({type(module).__name__}) has max_norm={module.max_norm}: its forward changes its "
                "weight, which no trace keeps; build it without max_norm, and scale its output in forward instead"
            )


def check_gradient_hooks(model: nn.Module) -> None:
    """Refuse hooks on gradients: a stage never calls them. TraceError names the first."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise TraceError(
                f"parameter {name!r} has a hook on its gradient, which no stage calls: scale or change gradients in "
                f"the optimizer (optimizer.factory may name one of your own), or remove the hook; {SKIP_CHECK_HINT}"
            )
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise TraceError(
                f"{_module_label(model, name)} has a backward hook, which no stage calls: put what it does "
                f"into forward (torch.library.custom_op takes a backward of its own), or remove it; {SKIP_CHECK_HINT}"
            )


def check_group_norms(graph: fx.GraphModule, values: Mapping[fx.Node, Any]) -> None:
    """Refuse, for CPU, a group norm that trains weights on an input which takes no gradient and lies in channels-last
    order: torch's kernel writes that gradient all the same, and the process dies. `values` are fake results."""
    for node in graph.graph.nodes:
        if node.target is not torch.ops.aten.group_norm.default:
            continue
        given, _, *weights = node.args
        value = values.get(given)
        trained = [one for one in weights if isinstance(one, fx.Node) and values[one].requires_grad]
        if not trained or value is None or value.requires_grad or value.dim() not in (4, 5):
            continue
        last = torch.channels_last if value.dim() == 4 else torch.channels_last_3d
        if value.is_contiguous(memory_format=last) and not value.is_contiguous():
            raise TraceError(
                f"the group norm of module {_module_of(node)!r} trains its weights on a tensor in channels-last order "
                "that nothing before it trains: torch's backward of that ends the process on CPU, without pipelines "
                "too; give it `x.contiguous()`, or freeze its weights as well"
            )


def _module_of(node: fx.Node) -> str:
    """The dotted name of the innermost module that a node was traced in."""
    stack = [name for name, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return stack[-1].removeprefix("L['self'].") if stack else ""


def custom_autograd_functions(loss: Tensor) -> list[str]:
    """Names of the autograd functions of a user's own that `loss` came through."""
    found: dict[str, None] = {}
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found[type(node).__name__.removesuffix("Backward")] = None
        waiting += [following for following, _ in node.next_functions]
    return list(found)


@dataclass(frozen=True)
class ForwardSideEffects:
    """The side effects of a forward: the fingerprints of Python state before and after it, whether it drew from
    Python's and numpy's generators (`draws`), and where (file:line) it put hooks on tensors."""

    before: PythonState
    after: PythonState
    draws: bool
    hooks: tuple[str, ...]
    movements: tuple[Movement, ...] = field(init=False)

    def __post_init__(self) -> None:
        found = [one for one in self.before.moved_until(self.after) if one.kind is not Kind.CACHE]
        object.__setattr__(self, "movements", tuple(found))


class SideEffectWatch:
    """Notices what a forward of `model`, its body, moves: `moved`, once that is over."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._hooks: list[str] = []
        self._register = Tensor.register_hook
        self.moved: ForwardSideEffects | None = None

    def __enter__(self) -> SideEffectWatch:
        self._before = PythonState(self._model)
        self._generators = _python_rng_state()

        def register_hook(tensor: Tensor, hook: Callable) -> Any:
            caller = sys._getframe(1)
            self._hooks.append(f"{caller.f_code.co_filename}:{caller.f_lineno}")
            return self._register(tensor, hook)

        Tensor.register_hook = register_hook
        return self

    def __exit__(self, *_: object) -> None:
        Tensor.register_hook = self._register
        draws = self._generators != _python_rng_state()
        self.moved = ForwardSideEffects(self._before, PythonState(self._model), draws, tuple(self._hooks))


class DependenceTrials:
    """Tries whether forward depends on what it moves; `dependence` is the first such state in words, or None.

    `differs(prepare)` runs the forward on the first microbatch, after `prepare` has set Python's generators, and says
    whether it made something else; `run_other` runs it on other data, and says nothing. Both begin with the Python state
    that they find. Stops when its seconds are used up (`unfinished`). What moves state is called `by` in words: with
    backward, `differs` and `run_other` are of gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        moved: ForwardSideEffects,
        differs: Callable[[Callable[[], None] | None], bool],
        run_other: Callable[[], object],
        by: str = "forward",
    ):
        self._model, self._moved, self._by = model, moved, by
        self._differs, self._run_other = differs, run_other
        self._end = time.thread_time() + TRIALS_BUDGET_S
        self.unfinished = False
        self.constant: frozenset[str] = frozenset()
        self.dependence = self._find() if moved.movements or moved.draws else None

    def _find(self) -> str | None:
        if self._moved.draws and self._depends_on_draws():
            return (
                "random numbers of Python or numpy, which are drawn once, while tracing: draw them with torch"
            )
        if not self._moved.movements:
            return None
        before, after = self._moved.before, self._moved.after
        after.restore()
        for rerun in range(_RERUNS):
            if self._differs(None):
                return _in_words(self._culprits(), self._by)
            if rerun == 0:
                again = {one.path for one in after.moved_until(PythonState(self._model))}
        before.restore()
        self._run_other()
        otherwise = PythonState(self._model).leaves
        movements = before.moved_until(after, inside=True)
        constant = {
            one.path
            for one in movements
            if one.path not in again
            and one.path in otherwise
            and one.after is not None
            and one.after.has_values_of(otherwise[one.path])
        }
        new = {one.path for one in movements}
        self.constant = frozenset(path for path in constant if (after.below(path) & new) <= constant)
        for movement in movements:
            if movement.path in constant:
                continue
            for put in self._other_values(movement):
                if time.thread_time() > self._end:
                    self.unfinished = True
                    return None
                after.restore()
                put()
                if self._differs(None):
                    return _in_words([movement], self._by)
        return None

    def _depends_on_draws(self) -> bool:
        def with_extremes(seed: int) -> None:
            _seed_with_extremes(random, seed)
            _seed_with_extremes(np.random, seed)

        seeds = [functools.partial(seed_python_rngs, seed) for seed in range(_RNG_TRIALS)]
        seeds += [functools.partial(with_extremes, seed) for seed in range(_EXTREME_RNG_TRIALS)]
        for seed in seeds:
            if time.thread_time() > self._end:
                self.unfinished = True
                return False
            self._moved.after.restore()
            if self._differs(seed):
                return True
        return False

    def _culprits(self) -> list[Movement]:
        """The movements of which one alone makes another output; all, where none does."""
        movements = list(self._moved.movements)
        if len(movements) == 1:
            return movements
        for movement in movements:
            if time.thread_time() > self._end:
                break
            self._moved.before.restore()
            if movement.after is not None:
                self._moved.after.restore_only(movement.path)
                if self._differs(None):
                    return [movement]
        return movements

    def _other_values(self, movement: Movement) -> Iterator[Callable[[], object]]:
        """Calls that each put another value at the leaf that moved."""
        leaf, thing = movement.after, (movement.after or movement.before).thing
        if leaf is None or (
            movement.before is None and leaf.kind is Kind.NUMBER
        ):  # an entry of a list that grows
            return
        slots = self._moved.after.slots_of(thing) if leaf.kind in (Kind.TENSOR, Kind.ARRAY) else [leaf.slot]
        if slots and slots[0] is not None:
            for other in _alternatives(leaf):
                yield lambda other=other: [slot.put(other) for slot in slots]
        if isinstance(thing, random.Random | np.random.RandomState):
            yield from (lambda seed=seed: thing.seed(seed) for seed in range(_RNG_TRIALS))
            yield from (
                lambda seed=seed: _seed_with_extremes(thing, seed) for seed in range(_EXTREME_RNG_TRIALS)
            )
        elif isinstance(thing, np.random.Generator):
            yield from (
                lambda draws=draws: thing.bit_generator.random_raw(draws) for draws in range(1, _RNG_TRIALS)
            )


def _alternatives(leaf: Leaf) -> Iterator[Any]:
    """Other values of the same type and shape."""
    value = leaf.thing
    if leaf.kind is Kind.NUMBER:
        yield from (value + ahead for ahead in _COUNTER_OFFSETS)
    elif leaf.kind is Kind.ITERATOR and type(value) is itertools.count:
        start, *step = leaf.copied.__reduce__()[1]
        yield from (itertools.count(start + ahead, *step) for ahead in _COUNTER_OFFSETS)
    elif leaf.kind is Kind.TENSOR:
        kept = value.detach() if leaf.copied is None else leaf.copied
        if value.dtype is torch.bool:
            yield ~kept
            return
        yield -2 * kept + 1 if value.dtype.is_floating_point or value.dtype.is_complex else kept + 1
        if value.numel() <= _COUNTER_ENTRIES:
            yield from (kept + ahead for ahead in _COUNTER_OFFSETS)
    elif leaf.kind is Kind.BYTES and leaf.copied is not None:
        for ahead in _COUNTER_OFFSETS if len(leaf.copied) <= _COUNTER_ENTRIES else (1,):
            other = leaf.copied[:]
            with contextlib.suppress(OverflowError, TypeError, ValueError):
                for at, entry in enumerate(other):
                    other[at] = (entry + ahead) % 256 if isinstance(other, bytearray) else entry + ahead
            yield other
    elif leaf.kind is Kind.ARRAY and leaf.copied is not None:
        kept = leaf.copied
        if kept.dtype == bool:
            yield ~kept
        elif np.issubdtype(kept.dtype, np.number):
            yield (-2 * kept + 1 if np.issubdtype(kept.dtype, np.inexact) else kept + 1).astype(kept.dtype)
            if kept.size <= _COUNTER_ENTRIES:
                yield from ((kept + ahead).astype(kept.dtype) for ahead in _COUNTER_OFFSETS)


def _in_words(movements: Sequence[Movement | MovedState], by: str = "forward") -> str:
    """The state that a result depends on, moved `by` forward or backward, and the way out."""
    first = movements[0]
    names = name_movements(movements)
    itself = f"which {by} itself changes and a trace keeps as it was"
    if all(one.kind is Kind.TENSOR for one in movements):
        tensor, it = ("the tensor", "it") if len(movements) == 1 else ("the tensors", "each")
        return (
            f"{tensor} {names}, {itself}: register {it} in __init__ with register_buffer, and assign to that buffer or copy "
            "into it"
        )
    if len(movements) > 1:
        return f"{names}, it seems, {itself}: keep it in a buffer (register_buffer) and compute with tensors"
    if first.kind is Kind.RANDOM:
        return f"the generator {names}, whose numbers are drawn once, while tracing: draw them with torch"
    kind = ""
    if first.path.startswith("'"):  # others say themselves what they are
        kinds = {
            Kind.NUMBER: "number ",
            Kind.ARRAY: "array ",
            Kind.BYTES: "array ",
            Kind.ITERATOR: "iterator ",
        }
        kind = kinds.get(first.kind, "attribute ")
    return f"the {kind}{names}, {itself}: keep it in a buffer (register_buffer) and compute with tensors"


def unchecked_state(model: str, moved: Sequence[MovedState]) -> tuple[str, str]:
    """Messages on the state that moved while `model` was traced where nothing was compared: on tensors, which results
    depend on as a rule, and on other values. Empty where none moved."""
    of_tensors = [one for one in moved if one.kind is Kind.TENSOR]
    others = [one for one in moved if one.kind is not Kind.TENSOR]
    tensors, values = (
        f"the result of {model}.forward may depend on {_in_words(some)}" if some else ""
        for some in (of_tensors, others)
    )
    return tensors, values


def name_movements(movements: Sequence[Movement | MovedState]) -> str:
    """The paths of some movements, of many the first few."""
    names = [one.path for one in movements[:_NAMED_AT_MOST]]
    more = len(movements) - len(names)
    last = [f"{more} more"] if more else []
    *most, final = names + last
    return f"{', '.join(most)} and {final}" if most else final


def hazard_notes(
    moved: ForwardSideEffects,
    trials: DependenceTrials,
    functions: Sequence[str] = (),
    by: str = "forward",
) -> list[str]:
    """Notes on a model whose result was not found to depend on what its forward moves, nor its gradients on the backwards
    of the autograd `functions` that it calls."""
    found = []
    result = "the output" if by == "forward" else "a gradient"
    tried = f"no change that was tried changed {result}"
    if trials.unfinished:
        tried += f" (some were left out, as trials took {TRIALS_BUDGET_S:g} s)"
    noted = [one for one in moved.movements if one.path not in trials.constant and not one.is_normed_weight]
    if noted:
        it = "it was" if len(noted) == 1 else "they were"
        found.append(f"{by} changes {name_movements(noted)}, which a trace keeps as {it}: {tried}")
    if moved.draws:
        found.append(
            f"{by} draws random numbers of Python or numpy, which are drawn once, while tracing: no other draw that "
            f"was tried changed {result}"
        )
    found += moved.before.bounds if by == "forward" else ()
    if functions:
        found.append(
            f"forward calls the autograd function {', '.join(functions)}, of whose own backward tracing keeps nothing: on "
            "the microbatches that were compared autograd's gradients were the same"
        )
    return found


def seed_python_rngs(seed: int) -> None:
    """Python's and numpy's generators stand at `seed` from now on."""
    random.seed(seed)
    np.random.seed(seed)


def _seed_with_extremes(generator: Any, seed: int) -> None:
    """Give a Mersenne twister a state of whose next words a quarter are all zeros and a quarter all ones."""
    draws = np.random.Generator(np.random.PCG64(seed))
    words, kind = draws.integers(0, 2**32, 624, dtype=np.uint32), draws.integers(0, 4, 624)
    words[kind == 0], words[kind == 1] = 0, _ALL_ONES
    if hasattr(generator, "setstate"):
        generator.setstate((3, (*map(int, words), 0), None))
    else:
        generator.set_state(("MT19937", words, 0))


# The word of a Mersenne twister's state that is tempered to 32 ones (Matsumoto and Nishimura 1998).
_ALL_ONES = 0x12DD9BB3


def _module_label(model: nn.Module, name: str) -> str:
    return f"module {name!r}" if name else type(model).__name__


def _python_rng_state() -> tuple:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, keys.tobytes(), *rest
