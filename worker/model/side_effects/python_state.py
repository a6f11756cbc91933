"""Fingerprints of the Python state that a model's forward can reach: leaves with a path in words, compared and put back.

Walks attributes of modules and of plain objects, collections, tensors that are neither parameters nor buffers, arrays,
byte arrays, queues, generators, iterators, closures' cells and defaults, class attributes, and the globals that code names:
user-written code, and that of the packages which define the model's class and those of its modules, installed or not.
Bounded in depth, leaves and bytes, and it raises nothing: what cannot be read is left out. Parameters, registered
buffers and the process-wide RNGs are not part of it. Knows nothing of traces.
"""

from __future__ import annotations

import array
import contextlib
import datetime
import enum
import functools
import itertools
import pickle
import queue
import random
import sys
import sysconfig
import types
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, auto
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

MAX_DEPTH = 12
MAX_LEAVES = 50_000
MAX_COPIED_BYTES = 64 * 2**20
# Longer collections are compared as a whole where their entries are plain values, else by entries at both ends.
_MAX_ENTRIES = 256
_MAX_ITERATOR_DEPTH = 4
_MAX_KEY_CHARS = 40


class Kind(Enum):
    """The kinds of leaves."""

    NUMBER = auto()
    VALUE = auto()
    TENSOR = auto()
    ARRAY = auto()
    BYTES = auto()
    QUEUE = auto()
    RANDOM = auto()
    ITERATOR = auto()
    CACHE = auto()
    COLLECTION = auto()
    OBJECT = auto()
    FUNCTION = auto()
    CLASS = auto()
    MODULE = auto()
    SEEN = auto()
    OPAQUE = auto()


_CODE = (Kind.FUNCTION, Kind.CLASS, Kind.MODULE)
"""The kinds whose own identity is no state."""


@dataclass(frozen=True, eq=False)
class ValueSlot:
    """A place that holds a value: an entry of a dict, list or deque, an attribute, or a closure's cell."""

    kind: str
    holder: Any
    key: Any

    def put(self, value: Any) -> None:
        """Make it hold `value`."""
        if self.kind == "entry":
            self.holder[self.key] = value
        elif self.kind == "attribute":
            setattr(self.holder, self.key, value)
        else:
            self.holder.cell_contents = value


class Leaf:
    """A value at a path: `value` is what is compared, `thing` the object itself, `copied` what puts it back."""

    __slots__ = ("copied", "kind", "parent", "slot", "thing", "value")

    def __init__(self, kind: Kind, value: Any, thing: Any, slot: ValueSlot | None, parent: str, copied: Any):
        self.kind, self.value, self.thing, self.slot = kind, value, thing, slot
        self.parent, self.copied = parent, copied

    def has_values_of(self, other: Leaf) -> bool:
        """True if both have the same values, though in other objects; False where their values are not known."""
        if self.kind is not Kind.TENSOR or other.kind is not Kind.TENSOR:
            return not _differs(self, other)
        return (
            self.copied is not None and other.copied is not None and _same_contents(self.copied, other.copied)
        )


@dataclass(frozen=True, eq=False)
class Movement:
    """A leaf that differs between two fingerprints; `before` is None where it is new, `after` where it is gone."""

    path: str
    before: Leaf | None
    after: Leaf | None

    @property
    def kind(self) -> Kind:
        return (self.after or self.before).kind

    @property
    def is_normed_weight(self) -> bool:
        """True of the weight that torch's own weight or spectral norm computes before each forward."""
        leaf = self.after
        return (
            self.kind is Kind.TENSOR
            and leaf is not None
            and leaf.slot is not None
            and isinstance(leaf.slot.holder, dict)
            and any(
                type(hook).__module__.startswith("torch.nn.utils.")
                and getattr(hook, "name", None) == leaf.slot.key
                for hook in (leaf.slot.holder.get("_forward_pre_hooks") or {}).values()
            )
        )


class MovedState(NamedTuple):
    """A movement in words, which keeps no object: its path, and its kind, a tensor's where it holds tensors that moved."""

    path: str
    kind: Kind


class _Path(NamedTuple):
    """A path in words: what it begins with, how to get there, and where that is."""

    head: str
    accessor: str
    tail: str

    def __str__(self) -> str:
        return f"{self.head}{self.accessor}{self.tail}"

    def then(self, accessor: str) -> _Path:
        return _Path(self.head, self.accessor + accessor, self.tail)


def _first_of(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


class PythonState:
    """The Python state that a forward of `model` can reach, as it is now.

    `bounds` says, in words, what was left out for the walk's bounds. Keeps the objects that it has seen.
    """

    def __init__(self, model: nn.Module):
        self.leaves: dict[str, Leaf] = {}
        self._bounds: dict[str, None] = {}
        self._too_deep: list[str] = []
        self._too_wide: list[str] = []
        self._restores: list[tuple[str, Callable[[], None]]] = []
        self._seen: dict[int, Any] = {}
        self._bytes = 0
        self._waiting: deque[tuple[Any, ValueSlot | None, str, _Path, int]] = deque()
        self._packages = _packages_of({type(module) for module in model.modules()})
        self._names = {id(module): name for name, module in model.named_modules()}
        self._registered = {id(one) for one in itertools.chain(model.parameters(), model.buffers())}
        for module in model.modules():
            name = self._names[id(module)]
            label = f"module {name!r}" if name else type(module).__name__
            self._seen[id(module)] = module
            self._visit_module(module, label)
        while self._waiting:
            if len(self.leaves) >= MAX_LEAVES:
                self._bounds[
                    f"only the first {MAX_LEAVES:,} values that forward can reach were looked at"
                ] = None
                break
            with contextlib.suppress(Exception):  # a user's property or __eq__ may raise anything
                self._visit(*self._waiting.popleft())

    @property
    def bounds(self) -> tuple[str, ...]:
        found = list(self._bounds)
        if self._too_wide:
            ends = _MAX_ENTRIES // 2
            found.append(f"of {_first_of(self._too_wide)} only the first and last {ends} were looked at")
        if self._too_deep:
            deep = _first_of(self._too_deep)
            found.append(f"what lies more than {MAX_DEPTH} deep, as {deep}, was not looked at")
        return tuple(found)

    def moved_until(self, later: PythonState, *, inside: bool = False) -> list[Movement]:
        """The leaves that differ in `later`; of what is new or gone only the uppermost, unless `inside` is asked for."""
        found: dict[str, Movement] = {}
        here, there = None, None
        for path, after in later.leaves.items():
            before = self.leaves.get(path)
            if before is None:
                here = _by_slot(self) if here is None else here
                before = here.get(_slot_key(after))
            if before is None and after.kind in _CODE:
                continue
            if before is None or _differs(before, after):
                found[path] = Movement(path, before, after)
        for path, before in self.leaves.items():
            if path not in later.leaves and before.kind not in _CODE:
                there = _by_slot(later) if there is None else there
                if _slot_key(before) not in there:
                    found[path] = Movement(path, before, None)
        return [
            one
            for one in found.values()
            if inside
            or (one.before is not None and one.after is not None)
            or (one.after or one.before).parent not in found
        ]

    def state_moved_until(self, later: PythonState) -> list[MovedState]:
        """The uppermost leaves that differ in `later`, other than caches and weights that torch's norms compute anew."""
        tensors = {one.path for one in self.moved_until(later, inside=True) if one.kind is Kind.TENSOR}
        return [
            MovedState(one.path, Kind.TENSOR if tensors & later.below(one.path) else one.kind)
            for one in self.moved_until(later)
            if one.kind is not Kind.CACHE and not one.is_normed_weight
        ]

    def below(self, path: str) -> set[str]:
        """The paths of the leaf at `path` and of all that it leads to."""
        found = {path}
        for name, one in self.leaves.items():  # parents come first
            if one.parent in found:
                found.add(name)
        return found

    def restore(self) -> None:
        """Put everything back that can be put back: generators of Python code, for example, cannot."""
        for _, put_back in self._restores:
            with contextlib.suppress(Exception):
                put_back()

    def restore_only(self, path: str) -> None:
        """Put back the leaf at `path`, and all that is below it."""
        leaf = self.leaves[path]
        if leaf.slot is not None:
            leaf.slot.put(leaf.thing)
        below = self.below(path)
        for name, put_back in self._restores:
            if name in below:
                with contextlib.suppress(Exception):
                    put_back()

    def slots_of(self, thing: Any) -> list[ValueSlot]:
        """All places found that hold this very object."""
        return [one.slot for one in self.leaves.values() if one.thing is thing and one.slot is not None]

    def paths_of_type(self, kind: type) -> list[str]:
        """The paths of the objects of this type."""
        return [path for path, one in self.leaves.items() if type(one.thing) is kind]

    def _wait(self, value: Any, slot: ValueSlot | None, parent: str, path: _Path, depth: int) -> None:
        self._waiting.append((value, slot, parent, path, depth))

    def _add(
        self, kind: Kind, value: Any, thing: Any, slot: ValueSlot | None, parent: str, path: _Path
    ) -> str:
        name = str(path)
        if name in self.leaves:  # functions of one name, for example
            name = next(
                one for number in itertools.count(2) if (one := f"{name} ({number})") not in self.leaves
            )
        self.leaves[name] = Leaf(kind, value, thing, slot, parent, None)
        return name

    def _visit(self, value: Any, slot: ValueSlot | None, parent: str, path: _Path, depth: int) -> None:
        kind = _kind_of(type(value))
        if kind is Kind.NUMBER or kind is Kind.VALUE:
            self._add(kind, value, value, slot, parent, path)
            return
        if kind is Kind.TENSOR and id(value) in self._registered:
            return
        if id(value) in self._seen:
            if kind is not Kind.FUNCTION and kind is not Kind.CLASS:
                self._add(Kind.SEEN, None, value, slot, parent, path)
            return
        self._seen[id(value)] = value
        name = self._add(kind, None, value, slot, parent, path)
        if depth >= MAX_DEPTH:
            self._too_deep.append(name)
            return
        _VISITS[kind](self, value, name, path, depth + 1)

    def _visit_module(self, module: nn.Module, label: str) -> None:
        attributes = vars(module)
        path = _Path("'", "", f"' of {label}")
        self._remember_dict(attributes, label)
        for key in _MODULE_HOOKS:
            if key in attributes:
                self._remember_dict(attributes[key], label)
                for hook in list(attributes[key].values()):
                    self._wait(hook, None, label, path.then(key), 1)
        for key, value in list(attributes.items()):
            if key not in _MODULE_INTERNALS:
                self._wait(value, ValueSlot("entry", attributes, key), label, path.then(str(key)), 1)
        self._visit_classes(type(module))

    def _visit_nothing(self, value: Any, name: str, path: _Path, depth: int) -> None:
        self.leaves[name].value = None if _kind_of(type(value)) is Kind.FUNCTION else id(value)

    def _visit_tensor(self, value: Tensor, name: str, path: _Path, depth: int) -> None:
        leaf = self.leaves[name]
        leaf.value = value._version
        if not self._has_room(name, value.numel() * value.element_size()):
            return
        leaf.copied = kept = value.detach().clone()

        def put_back() -> None:
            if value.shape != kept.shape:
                value.data = kept.clone()
            elif not _same_contents(value.detach(), kept):
                value.data.copy_(kept)

        self._restores.append((name, put_back))

    def _visit_array(self, value: np.ndarray, name: str, path: _Path, depth: int) -> None:
        leaf = self.leaves[name]
        leaf.value = value.shape
        if value.dtype.hasobject or not self._has_room(name, value.nbytes):
            return
        leaf.value, leaf.copied = (value.shape, value.dtype.str, value.tobytes()), value.copy()

        def put_back() -> None:
            if value.tobytes() != leaf.value[-1]:
                value[...] = leaf.copied

        self._restores.append((name, put_back))

    def _visit_bytes(self, value: bytearray | array.array, name: str, path: _Path, depth: int) -> None:
        leaf = self.leaves[name]
        leaf.value = len(value)
        if not self._has_room(name, len(value) * getattr(value, "itemsize", 1)):
            return
        leaf.copied = kept = value[:]
        leaf.value = bytes(value)

        def put_back() -> None:
            if bytes(value) != leaf.value:
                value[:] = kept

        self._restores.append((name, put_back))

    def _visit_queue(self, value: queue.SimpleQueue, name: str, path: _Path, depth: int) -> None:
        self.leaves[name].value = value.qsize()

    def _has_room(self, name: str, size: int) -> bool:
        if self._bytes + size > MAX_COPIED_BYTES:
            self._bounds[
                f"{name} was looked at without its values, which are more than fit in {MAX_COPIED_BYTES:,} B"
            ] = None
            return False
        self._bytes += size
        return True

    def _visit_random(self, value: Any, name: str, path: _Path, depth: int) -> None:
        get, put = _random_accessors(value)
        state = get()
        self.leaves[name].value = _state_bytes(state)
        self._restores.append((name, lambda: put(state)))

    def _visit_iterator(self, value: Any, name: str, path: _Path, depth: int) -> None:
        leaf = self.leaves[name]
        leaf.value = _iterator_key(value, 0)
        if leaf.slot is None or isinstance(value, types.GeneratorType):
            return
        leaf.copied = _copied_iterator(value, 0)

        def put_back() -> None:
            if _iterator_key(value, 0) != leaf.value:
                leaf.slot.put(_copied_iterator(leaf.copied, 0))

        self._restores.append((name, put_back))

    def _visit_cache(self, value: Any, name: str, path: _Path, depth: int) -> None:
        info = value.cache_info()
        self.leaves[name].value = (info.misses, info.currsize)

        def put_back() -> None:
            if value.cache_info()[1::2] != (info.misses, info.currsize):
                value.cache_clear()

        self._restores.append((name, put_back))
        self._wait(value.__wrapped__, None, name, path.then(".__wrapped__"), depth)

    def _visit_collection(self, value: Any, name: str, path: _Path, depth: int) -> None:
        leaf = self.leaves[name]
        if isinstance(value, dict):
            entries = list(dict.items(value))
            leaf.value = tuple(_entry_key(key) for key, _ in entries)
            self._remember_dict(value, name)
        elif isinstance(value, set | frozenset):
            entries = []
            leaf.value = frozenset(_entry_key(one) for one in value)
            self._remember_set(value, name)
            for at, one in enumerate(itertools.islice(value, _MAX_ENTRIES)):
                if _kind_of(type(one)) not in (Kind.NUMBER, Kind.VALUE):
                    self._wait(one, None, name, path.then(f"{{{at}}}"), depth)
        else:
            entries = list(enumerate(value))
            leaf.value = len(entries)
            if isinstance(value, list | deque):
                self._remember_sequence(value, name)
        if len(entries) > _MAX_ENTRIES:
            if all(_kind_of(type(one)) in (Kind.NUMBER, Kind.VALUE) for _, one in entries):
                leaf.value = entries
                entries = []
            else:
                self._too_wide.append(f"the {len(entries):,} entries of {name}")
                entries = entries[: _MAX_ENTRIES // 2] + entries[-_MAX_ENTRIES // 2 :]
        settable = not isinstance(value, tuple)
        for key, one in entries:
            slot = ValueSlot("entry", value, key) if settable else None
            self._wait(one, slot, name, path.then(f"[{_key_text(key)}]"), depth)
        if type(value).__module__ not in _CONTAINER_MODULES and hasattr(value, "__dict__"):
            self._visit_attributes(value, name, path, depth)

    def _visit_attributes(self, value: Any, name: str, path: _Path, depth: int) -> None:
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            self._remember_dict(attributes, name)
            for key, one in list(attributes.items()):
                self._wait(one, ValueSlot("entry", attributes, key), name, path.then(f".{key}"), depth)
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for key in (slots,) if isinstance(slots, str) else slots:
                if key in ("__dict__", "__weakref__"):
                    continue
                with contextlib.suppress(Exception):
                    one = getattr(value, key)
                    slot = ValueSlot("attribute", value, key)
                    self._remember_slot(slot, one, name)
                    self._wait(one, slot, name, path.then(f".{key}"), depth)
        self._visit_classes(type(value))

    def _visit_object(self, value: Any, name: str, path: _Path, depth: int) -> None:
        self.leaves[name].value = type(value)
        self._visit_attributes(value, name, path, depth)

    def _visit_function(self, value: Any, name: str, path: _Path, depth: int) -> None:
        if isinstance(value, types.MethodType):
            self._wait(value.__func__, None, name, path.then(".__func__"), depth)
            self._wait(value.__self__, None, name, path.then(".__self__"), depth)
        elif isinstance(value, functools.partial):
            self._wait(value.func, None, name, path.then(".func"), depth)
            self._wait(value.args, None, name, path.then(".args"), depth)
            self._wait(value.keywords, None, name, path.then(".keywords"), depth)
        elif isinstance(value, staticmethod | classmethod):
            self._wait(value.__func__, None, name, path, depth)
        elif isinstance(value, property):
            self._wait(value.fget, None, name, path, depth)
        elif isinstance(value, types.FunctionType):
            self._visit_code(value, name, depth)

    def _visit_code(self, function: types.FunctionType, name: str, depth: int) -> None:
        code, tail = function.__code__, f" of function {function.__qualname__}"
        ours = _is_ours(code.co_filename)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                contents = cell.cell_contents
            except ValueError:  # empty
                continue
            if variable == "__class__" or (ours and not callable(contents)):
                continue
            slot = ValueSlot("cell", cell, None)
            self._remember_slot(slot, contents, name)
            self._wait(contents, slot, name, _Path("closure cell ", variable, tail), depth)
        if ours:
            return
        defaults = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        for variable, value in [
            *zip(names, defaults, strict=True),
            *(function.__kwdefaults__ or {}).items(),
        ]:
            if _kind_of(type(value)) not in (Kind.NUMBER, Kind.VALUE):
                self._wait(value, None, name, _Path("default ", variable, tail), depth)
        if attributes := function.__dict__:
            self._remember_dict(attributes, name)
            for key, value in list(attributes.items()):
                slot = ValueSlot("entry", attributes, key)
                self._wait(value, slot, name, _Path("attribute ", str(key), tail), depth)
        if self._is_models(code.co_filename):
            self._visit_globals(function.__globals__, _names_in(code), name, depth)

    def _visit_globals(self, space: dict[str, Any], names: Iterable[str], parent: str, depth: int) -> None:
        """The globals of a module that code names; of user-written modules among them what it may name there."""
        for name in names:
            if name not in space or name.startswith("__"):
                continue
            value = space[name]
            if isinstance(value, types.ModuleType):
                if self._is_models(getattr(value, "__file__", None) or "<") and id(value) not in self._seen:
                    self._seen[id(value)] = value
                    self._visit_globals(vars(value), names, parent, depth)
                continue
            slot = ValueSlot("entry", space, name)
            if (key := (id(space), name)) in self._seen:
                continue
            self._seen[key] = space
            self._remember_slot(slot, value, parent)
            path = _Path("global ", name, f" of module {space.get('__name__', '?')}")
            self._wait(value, slot, parent, path, depth)

    def _is_models(self, file: str) -> bool:
        """True of files that a user wrote, and of those of the packages that define the model."""
        return _is_user_written(file) or file.startswith(self._packages)

    def _visit_class(self, value: type, name: str, path: _Path, depth: int) -> None:
        del self._seen[id(value)]
        self._visit_classes(value)
        self._seen.setdefault(id(value), value)

    def _visit_classes(self, kind: type) -> None:
        """The user-written classes that `kind` derives from: their attributes, and what their functions reach."""
        for one in kind.__mro__:
            file = getattr(sys.modules.get(one.__module__), "__file__", None) or ""
            if id(one) in self._seen or not (one.__module__ == "__main__" or self._is_models(file)):
                continue
            self._seen[id(one)] = one
            for key, value in list(vars(one).items()):
                is_code = _kind_of(type(value)) is Kind.FUNCTION
                if not is_code and key.startswith("__"):
                    continue
                slot = ValueSlot("attribute", one, key)
                path = _Path("attribute ", key, f" of class {one.__name__}")
                if not is_code:
                    self._remember_slot(slot, value, path.tail)
                self._wait(value, None if is_code else slot, path.tail, path, 1)

    def _remember_dict(self, value: dict, name: str) -> None:
        kept = dict(dict.items(value))
        base = OrderedDict if isinstance(value, OrderedDict) else dict  # not what a user's class makes of it

        def put_back() -> None:
            same = len(value) == len(kept) and all(
                dict.get(value, key, _MISSING) is one for key, one in kept.items()
            )
            if same:
                return
            for key in [key for key in dict.keys(value) if key not in kept]:
                base.__delitem__(value, key)
            for key, one in kept.items():
                base.__setitem__(value, key, one)

        self._restores.append((name, put_back))

    def _remember_set(self, value: set | frozenset, name: str) -> None:
        if isinstance(value, frozenset):
            return
        kept = set(value)

        def put_back() -> None:
            if value != kept:
                value.clear()
                value.update(kept)

        self._restores.append((name, put_back))

    def _remember_sequence(self, value: list | deque, name: str) -> None:
        kept = list(value)

        def put_back() -> None:
            if len(value) != len(kept) or any(
                now is not before for now, before in zip(value, kept, strict=True)
            ):
                value.clear()
                value.extend(kept)

        self._restores.append((name, put_back))

    def _remember_slot(self, slot: ValueSlot, value: Any, name: str) -> None:
        self._restores.append((name, lambda: slot.put(value)))


_MISSING = object()
_CONTAINER_MODULES = ("builtins", "collections")
_MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
_MODULE_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}
_VISITS: dict[Kind, Callable[[PythonState, Any, str, _Path, int], None]] = {
    Kind.TENSOR: PythonState._visit_tensor,
    Kind.ARRAY: PythonState._visit_array,
    Kind.BYTES: PythonState._visit_bytes,
    Kind.QUEUE: PythonState._visit_queue,
    Kind.RANDOM: PythonState._visit_random,
    Kind.ITERATOR: PythonState._visit_iterator,
    Kind.CACHE: PythonState._visit_cache,
    Kind.COLLECTION: PythonState._visit_collection,
    Kind.OBJECT: PythonState._visit_object,
    Kind.FUNCTION: PythonState._visit_function,
    Kind.CLASS: PythonState._visit_class,
    Kind.MODULE: PythonState._visit_object,  # one that the model does not know as its own, with its parameters
    Kind.OPAQUE: PythonState._visit_nothing,
}
_NUMBERS = (int, float, complex, np.number)
_VALUES = (
    bool,
    str,
    bytes,
    type(None),
    type(...),
    range,
    slice,
    enum.Enum,
    np.bool_,
    PurePath,
    Decimal,
    Fraction,
    datetime.date,
    datetime.timedelta,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_RANDOM = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
_COLLECTIONS = (list, tuple, dict, set, frozenset, deque)
_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    functools.partial,
    staticmethod,
    classmethod,
    property,
)
_PLAIN_OBJECTS = ("SimpleNamespace", "Namespace", UserDict.__name__, UserList.__name__)


@functools.cache
def _kind_of(kind: type) -> Kind:
    for bases, found in [
        (_VALUES, Kind.VALUE),
        (_NUMBERS, Kind.NUMBER),
        (Tensor, Kind.TENSOR),
        (np.ndarray, Kind.ARRAY),
        ((bytearray, array.array), Kind.BYTES),
        (queue.SimpleQueue, Kind.QUEUE),
        (queue.Queue, Kind.OBJECT),
        (_RANDOM, Kind.RANDOM),
        (_COLLECTIONS, Kind.COLLECTION),
        (_FUNCTIONS, Kind.FUNCTION),
        (functools._lru_cache_wrapper, Kind.CACHE),
        (nn.Module, Kind.MODULE),
        (type, Kind.CLASS),
    ]:
        if issubclass(kind, bases):
            return found
    package = kind.__module__.partition(".")[0]
    if package in ("builtins", "itertools"):
        return Kind.ITERATOR if hasattr(kind, "__next__") else Kind.OPAQUE
    if kind.__name__ in _PLAIN_OBJECTS:
        return Kind.OBJECT
    of_library = package in ("torch", "numpy") or package in sys.stdlib_module_names
    is_main = kind.__module__ == "__main__"
    ours = kind.__module__.startswith("worker.") and not kind.__module__.startswith("worker.examples")
    return Kind.OPAQUE if ours or (of_library and not is_main) else Kind.OBJECT


_LIBRARIES = tuple(
    {
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(torch.__file__).parents[1]),
    }
)
_OURS = Path(__file__).parents[1]


@functools.cache
def _is_user_written(file: str) -> bool:
    if file.startswith("<"):
        return file.startswith(("<stdin", "<string", "<ipython"))
    library = file.startswith(_LIBRARIES) or "site-packages" in file or "dist-packages" in file
    return not library and not _is_ours(file)


@functools.cache
def _is_ours(file: str) -> bool:
    path = Path(file)
    return path.is_relative_to(_OURS) and not path.is_relative_to(_OURS / "examples")


def _packages_of(classes: Iterable[type]) -> tuple[str, ...]:
    """Prefixes of the paths of the packages that define these classes, other than torch and our own."""
    found: dict[str, None] = {}
    for package in {kind.__module__.partition(".")[0] for kind in classes} - {"torch", "worker", "builtins"}:
        file = getattr(sys.modules.get(package), "__file__", None)
        if file is not None:
            found[f"{Path(file).parent}/" if Path(file).stem == "__init__" else file] = None
    return tuple(found)


@functools.cache
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in a code, and in the codes inside it."""
    inner = [name for one in code.co_consts if isinstance(one, types.CodeType) for name in _names_in(one)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


def _entry_key(key: Any) -> Any:
    return key if _kind_of(type(key)) in (Kind.NUMBER, Kind.VALUE) else id(key)


def _key_text(key: Any) -> str:
    text = repr(key) if _kind_of(type(key)) in (Kind.NUMBER, Kind.VALUE) else type(key).__name__
    return text if len(text) <= _MAX_KEY_CHARS else f"{text[:_MAX_KEY_CHARS]}..."


def _by_slot(state: PythonState) -> dict[tuple, Leaf]:
    return {_slot_key(leaf): leaf for leaf in state.leaves.values() if leaf.slot is not None}


def _slot_key(leaf: Leaf) -> tuple:
    if leaf.slot is None:
        return (None, id(leaf))
    return id(leaf.slot.holder), _entry_key(leaf.slot.key)


def _differs(before: Leaf, after: Leaf) -> bool:
    if Kind.SEEN in (before.kind, after.kind):
        return before.thing is not after.thing
    if before.kind is not after.kind:
        return True
    if before.kind is Kind.TENSOR:
        if before.thing is not after.thing or before.value != after.value:
            return True
        known = before.copied is not None and after.copied is not None
        return known and not _same_contents(before.copied, after.copied)
    if before.kind in _CODE:
        return False
    with contextlib.suppress(Exception):
        same = type(before.value) is type(after.value) and before.value == after.value
        return not same and not (before.value != before.value and after.value != after.value)
    return before.thing is not after.thing


def _same_contents(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _random_accessors(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, np.random.Generator):
        value = value.bit_generator
    if isinstance(value, np.random.BitGenerator):
        return lambda: value.state, lambda state: setattr(value, "state", state)
    return value.get_state, value.set_state


def _state_bytes(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state)


def _iterator_key(value: Any, depth: int) -> Any:
    """The position of an iterator, as far as it says."""
    kind = _kind_of(type(value))
    if kind in (Kind.NUMBER, Kind.VALUE):
        return value
    if depth > _MAX_ITERATOR_DEPTH:
        return id(value)
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        if frame is None:
            return "finished"
        names = sorted(frame.f_locals)
        return frame.f_lasti, *((name, _iterator_key(frame.f_locals[name], depth + 1)) for name in names)
    if kind is Kind.ITERATOR:
        return type(value).__name__, *(_iterator_key(one, depth + 1) for one in _reduced(value))
    if isinstance(value, tuple):
        return tuple(_iterator_key(one, depth + 1) for one in value)
    if isinstance(value, list):  # a cycle's, that grows
        return id(value) if depth == 1 else len(value)
    return 0 if kind is Kind.FUNCTION or callable(value) else id(value)


def _reduced(value: Iterator) -> tuple:
    _, *rest = value.__reduce__()
    return tuple(rest)


def _copied_iterator(value: Any, depth: int) -> Any:
    """An iterator that stands where `value` stands and moves by itself; TypeError where there is none."""
    if depth > _MAX_ITERATOR_DEPTH or isinstance(value, types.GeneratorType):
        raise TypeError(f"a {type(value).__name__} cannot be copied")

    def copied(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(copied(one) for one in part)
        return _copied_iterator(part, depth + 1) if _kind_of(type(part)) is Kind.ITERATOR else part

    make, arguments, *states = value.__reduce__()
    made = make(*copied(arguments))
    for state in states:
        if isinstance(state, tuple):  # a cycle goes on to fill the list that it keeps
            state = tuple(list(one) if isinstance(one, list) else one for one in state)
        if state is not None:
            made.__setstate__(copied(state))
    return made
