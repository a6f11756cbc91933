"""Records how a model calls the modules that no trace takes, and puts those calls into its exported graph.

Eager forwards on real values, some of them on other ones, tell shapes, types, changed buffers and random draws of each
call. While the model is exported a placeholder operator with these shapes stands for the call; behind the export
`OpaqueCall` takes its place, with a copy of the module that holds no parameters. Must not know layers or stages.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from worker.model.opaque.call import CallRecord, OpaqueCall, OpaqueError, TensorMeta, flatten_values
from worker.model.pytree import TreeSpec

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_keys = itertools.count()
_results: dict[int, tuple[TensorMeta, ...]] = {}


@torch.library.custom_op("slotline::opaque", mutates_args=())
def _placeholder(tensors: list[Tensor], key: int) -> list[Tensor]:
    """Stands for the call `key` while a model is exported."""
    raise RuntimeError("a module that runs as it is was left out of its graph")


@_placeholder.register_fake
def _(tensors: list[Tensor], key: int) -> list[Tensor]:
    device = tensors[0].device if tensors else torch.device("cpu")
    return [meta.empty(device) for meta in _results[key]]


fx.node.has_side_effect(
    torch.ops.slotline.opaque.default
)  # it may change buffers, which the operator does not say


class OpaqueModuleError(Exception):
    """The module `path` cannot run as it is: the message says why."""

    def __init__(self, path: str, reason: str):
        super().__init__(reason)
        self.path = path


@dataclass(frozen=True)
class _Call:
    record: CallRecord
    arguments: TreeSpec


class OpaqueModules:
    """The modules `paths` of a model: records their calls, and stands in for them in an export."""

    def __init__(self, model: nn.Module, paths: Collection[str]):
        self._model = model
        self._modules = {path: model.get_submodule(path) for path in paths}
        self._records: list[CallRecord] = []
        self._calls: dict[int, _Call] = {}
        self._problem: OpaqueModuleError | None = None

    def __bool__(self) -> bool:
        return bool(self._modules)

    @property
    def called(self) -> list[str]:
        """The modules that the model calls, in the order of their first calls."""
        return list(dict.fromkeys(record.path for record in self._records))

    def record(self, run: Callable[[], None], run_others: Sequence[Callable[[], None]]) -> None:
        """Record the calls in `run`, a forward, and in `run_others`, on other values (they may raise).

        OpaqueModuleError for a module that cannot run as it is."""
        self._records = self._recorded(run)
        for run_other in run_others:
            try:
                others = self._recorded(run_other)
            except OpaqueModuleError:
                raise
            except (
                Exception
            ):  # values that the model does not take: its calls are compared before the first step
                continue
            if [one.path for one in others] != [one.path for one in self._records]:
                longer = max(self._records, others, key=len)
                raise OpaqueModuleError(longer[-1].path, "values decide how often it is called")
            self._records = [_merged(one, other) for one, other in zip(self._records, others, strict=True)]

    @contextlib.contextmanager
    def exporting(self) -> Iterator[None]:
        """In the body, an export, the placeholder operator stands for the calls. OpaqueModuleError for a call that differs
        from the recorded one."""
        waiting: dict[str, list[CallRecord]] = {path: [] for path in self._modules}
        for record in self._records:
            waiting[record.path].append(record)
        self._calls.clear()
        self._problem = None

        def stand_in(path: str, module: nn.Module) -> Callable[..., Any]:
            def forward(*arguments: Any, **keywords: Any) -> Any:
                with self._noted(path):
                    return self._place(module, waiting[path], (arguments, keywords))

            return forward

        try:
            with self._replaced(stand_in):
                yield
        except Exception as error:
            if self._problem is not None:
                raise self._problem from error
            raise
        finally:
            for key in self._calls:
                del _results[key]

    def insert(self, module: fx.GraphModule) -> list[OpaqueCall]:
        """Replace the placeholders in an exported graph by calls of copies of the modules."""
        memo: dict[int, Any] = {}
        for tensor in [*self._model.parameters(), *self._model.buffers()]:
            empty = torch.empty_like(tensor, device="meta")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = empty
        found: list[OpaqueCall] = []
        for part in module.modules():
            if isinstance(part, fx.GraphModule):
                for node in part.graph.find_nodes(
                    op="call_function", target=torch.ops.slotline.opaque.default
                ):
                    found.append(self._insert(part, node, len(found), memo))
                part.recompile()
        return found

    def _insert(self, part: fx.GraphModule, node: fx.Node, number: int, memo: dict[int, Any]) -> OpaqueCall:
        tensors, key = node.args
        call = self._calls[key]
        path = call.record.path
        original = self._modules[path]
        if isinstance(original, torch.jit.ScriptModule):  # its tensors cannot be put in for a call
            raise OpaqueModuleError(path, "it is a TorchScript module")
        try:
            module = copy.deepcopy(original, memo)
        except Exception as error:
            raise OpaqueModuleError(path, f"it cannot be copied: {type(error).__name__}: {error}") from error
        made = OpaqueCall(module, type(original).__name__, call.record, call.arguments)
        name = f"opaque_{number}"
        part.add_submodule(name, made)
        with part.graph.inserting_before(node):
            replacement = part.graph.call_module(name, tuple(tensors))
        replacement.meta = dict(node.meta)
        node.replace_all_uses_with(replacement)
        part.graph.erase_node(node)
        return made

    def _recorded(self, run: Callable[[], None]) -> list[CallRecord]:
        records: list[CallRecord] = []
        self._problem = None

        def recorder(path: str, module: nn.Module) -> Callable[..., Any]:
            def forward(*arguments: Any, **keywords: Any) -> Any:
                with self._noted(path), self._original():
                    number = sum(record.path == path for record in records)
                    record, result = _record_call(path, number, module, arguments, keywords)
                records.append(record)
                return result

            return forward

        with self._replaced(recorder):
            try:
                run()
            finally:
                if self._problem is not None:  # the model may have caught it
                    raise self._problem
        return records

    def _place(self, module: nn.Module, waiting: list[CallRecord], values: Any) -> Any:
        """Put the placeholder of the next recorded call into the graph; what it returns."""
        tensors, arguments = flatten_values(values)
        if not waiting:
            raise OpaqueError("values decide how often it is called")
        record = waiting.pop(0)
        if len(tensors) != len(record.inputs) or not all(
            meta.matches(value) for meta, value in zip(record.inputs, tensors, strict=True)
        ):
            raise OpaqueError("the shapes of its inputs depend on values")
        state = [operator.attrgetter(names[0])(module) for names in record.state]
        key = next(_keys)
        self._calls[key], _results[key] = _Call(record, arguments), record.outputs
        return record.results.unflatten(torch.ops.slotline.opaque([*tensors, *state], key))

    @contextlib.contextmanager
    def _noted(self, path: str) -> Iterator[None]:
        try:
            yield
        except OpaqueError as error:
            self._problem = self._problem or OpaqueModuleError(path, str(error))
            raise self._problem from None

    @contextlib.contextmanager
    def _replaced(self, make: Callable[[str, nn.Module], Callable[..., Any]]) -> Iterator[None]:
        """In the body each of the modules has another forward, and none of its hooks, which are a part of its call."""
        self._before = {path: dict(vars(module)) for path, module in self._modules.items()}
        for path, module in self._modules.items():
            vars(module).update({name: OrderedDict() for name in _HOOKS}, forward=make(path, module))
        self._now = {path: dict(vars(module)) for path, module in self._modules.items()}
        try:
            yield
        finally:
            self._put(self._before)

    @contextlib.contextmanager
    def _original(self) -> Iterator[None]:
        """In the body all modules are themselves again."""
        self._put(self._before)
        try:
            yield
        finally:
            self._put(self._now)

    def _put(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        for path, module in self._modules.items():
            for name in (*_HOOKS, "forward"):
                if name in values[path]:
                    vars(module)[name] = values[path][name]
                else:
                    vars(module).pop(name, None)


def _record_call(
    path: str, number: int, module: nn.Module, arguments: tuple, keywords: dict[str, Any]
) -> tuple[CallRecord, Any]:
    """Call a module, and what is to know of that call. OpaqueError where it cannot run as it is."""
    inputs, _ = flatten_values((arguments, keywords))
    metas = tuple(TensorMeta.of(value) for value in inputs)
    named = _state(module)
    state = tuple(named)
    before = [value.detach().clone() for value in named.values()]
    versions = [value._version for value in named.values()]
    given = [value._version for value in inputs]
    generator = torch.get_rng_state()
    result = module(*arguments, **keywords)
    if given != [value._version for value in inputs]:
        raise OpaqueError("it changes an input in place: let it change a copy")
    after = _state(module)
    if tuple(after) != state:
        raise OpaqueError("its forward makes or drops parameters or buffers")
    changed = set()
    for place, (names, value) in enumerate(after.items()):
        old = before[place]
        if value is named[names] and value._version == versions[place] and torch.equal(value, old):
            continue
        if isinstance(value, nn.Parameter):
            raise OpaqueError(
                f"it changes parameter {names[0]!r}, and only the optimizer may change parameters"
            )
        if value.shape != old.shape or value.dtype != old.dtype:
            raise OpaqueError(f"it gives buffer {names[0]!r} another shape or type")
        changed.add(place)
    outputs, results = flatten_values(result)
    if not outputs:
        raise OpaqueError("it returns no tensor")
    record = CallRecord(
        path=path,
        number=number,
        inputs=metas,
        outputs=tuple(TensorMeta.of(value) for value in outputs),
        results=results,
        state=state,
        changed=frozenset(changed),
        draws=not torch.equal(generator, torch.get_rng_state()),
    )
    return record, result


def _state(module: nn.Module) -> dict[tuple[str, ...], Tensor]:
    """The parameters and buffers of a module, each by all its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, value in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        found.setdefault(id(value), ([], value))[0].append(name)
    return {tuple(names): value for names, value in found.values()}


def _merged(one: CallRecord, other: CallRecord) -> CallRecord:
    """The common record of two calls on different values. OpaqueModuleError where shapes or numbers depend on values."""
    for what, first, second in (
        ("inputs", one.inputs, other.inputs),
        ("results", one.outputs, other.outputs),
    ):
        if [(meta.shape, meta.dtype) for meta in first] != [(meta.shape, meta.dtype) for meta in second]:
            raise OpaqueModuleError(one.path, f"the shapes of its {what} depend on values")
    if one.results != other.results:
        raise OpaqueModuleError(one.path, "numbers that it returns beside tensors depend on values")
    outputs = tuple(
        replace(meta, requires_grad=meta.requires_grad or again.requires_grad)
        for meta, again in zip(one.outputs, other.outputs, strict=True)
    )
    changed = one.changed | other.changed
    return replace(one, outputs=outputs, changed=changed, draws=one.draws or other.draws)
