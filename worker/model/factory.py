"""Resolves factories by import path (`package.module:attribute`), and parameters by patterns of their names.

Serves models, data sets, losses and optimizers; an argument {factory, args} is built first. Patterns match as
file names do (a star takes dots too); `re:` begins a regular expression that is searched for. Knows nothing of
stages or jobs. Light: torch is imported only to build a model.
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from worker.contract.profile import FactoryError, ModelError

if TYPE_CHECKING:
    from torch import nn


MOVED_FACTORIES = {
    "worker.model.gpt:build": "worker.examples.gpt:build",
    "worker.model.unet:build": "worker.examples.unet:build",
    "worker.data.text:ByteWindows": "worker.examples.text:ByteWindows",
    "worker.data.digits:NoisyDigits": "worker.examples.digits:NoisyDigits",
}
"""Paths of built-in factories in jobs and checkpoints of earlier versions, and where they are now."""


def resolve(path: str) -> Any:
    """The object that `path` ("package.module:attribute") names; raises FactoryError."""
    path = MOVED_FACTORIES.get(path, path)
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise FactoryError(f"factory {path!r} is no import path: write it as 'package.module:attribute'")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise FactoryError(
                f"factory {path!r}: there is no module {error.name!r}; check the spelling, "
                "or ship it with code.working_dir or code.pip"
            ) from error
        raise FactoryError(
            f"factory {path!r}: importing {module_name} failed: {_error_text(error)}"
        ) from error
    except Exception as error:
        raise FactoryError(
            f"factory {path!r}: importing {module_name} failed: {_error_text(error)}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name in vars(sys.modules[module_name]) if not name.startswith("_")]
            raise FactoryError(
                f"factory {path!r}: module {module_name} has no {attribute!r}; it has {_shorten(names)}"
            )
        found = getattr(found, part)
    return found


def call_factory(path: str, args: Mapping[str, Any] | None = None) -> Any:
    """Call the factory at `path` with `args`; raises FactoryError, naming what it raised.

    An argument {factory: path, args: …} is what that factory returns: a configuration object, say.
    """
    factory = resolve(path)
    if not isinstance(factory, Callable):
        raise FactoryError(f"factory {path!r} is a {type(factory).__name__}, which cannot be called")
    args = {name: _resolve_nested_factories(value) for name, value in (args or {}).items()}
    try:
        return factory(**args)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in args.items())
        raise FactoryError(f"factory {path!r}({given}) raised {_error_text(error)}") from error


def build_model(path: str, args: Mapping[str, Any] | None = None, *, seed: int = 0) -> nn.Module:
    """The model of a job, with the initial weights that `seed` gives on every worker.

    Python's, numpy's and torch's generators are seeded for it and stand afterwards where they stood. Raises
    FactoryError for a factory that does not exist, raises, or returns no nn.Module.
    """
    import torch

    from worker.model.rng import seeded

    with seeded(seed):
        if not torch.cuda.is_initialized():
            torch.manual_seed(seed)  # for a factory that is the first here to use CUDA
        model = call_factory(path, args)
    if not isinstance(model, torch.nn.Module):
        raise FactoryError(
            f"factory {path!r} returned {type(model).__name__}, not a torch.nn.Module: return the model itself"
        )
    return model


def _resolve_nested_factories(value: Any) -> Any:
    if isinstance(value, Mapping):
        if isinstance(value.get("factory"), str) and value.keys() <= {"factory", "args"}:
            return call_factory(value["factory"], value.get("args"))
        return {key: _resolve_nested_factories(part) for key, part in value.items()}
    return [_resolve_nested_factories(part) for part in value] if isinstance(value, list) else value


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _shorten(names: list[str], limit: int = 12) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


_REGEX_PREFIX = "re:"
_MAX_NAMES_SHOWN = 6


def pattern_matches(pattern: str, name: str) -> bool:
    """True if `pattern` matches the parameter called `name`."""
    if pattern.startswith(_REGEX_PREFIX):
        return re.search(pattern.removeprefix(_REGEX_PREFIX), name) is not None
    return fnmatch.fnmatchcase(name, pattern)


def check_patterns_match(
    field: str, patterns: Sequence[str], names: Collection[str], aliases: Mapping[str, Sequence[str]]
) -> None:
    """ModelError for patterns that mean none of the parameters `names`; `aliases` are all names of those with several."""
    idle = [pattern for pattern in patterns if not any(pattern_matches(pattern, name) for name in names)]
    if not idle:
        return
    unmatched = [f"{pattern!r}{_pattern_hint(pattern, names, aliases)}" for pattern in idle]
    shown = ", ".join(list(names)[:_MAX_NAMES_SHOWN]) + (
        f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
    )
    raise ModelError(
        f"{field}: no parameter is called {', '.join(unmatched)}; a star stands for any characters, dots too, and "
        f"re: begins a regular expression. The names are {shown or 'none'}"
    )


def _pattern_hint(pattern: str, names: Collection[str], aliases: Mapping[str, Sequence[str]]) -> str:
    for name, every in aliases.items():
        for alias in every:
            if name in names and alias != name and pattern_matches(pattern, alias):
                return f" ({alias!r} is the same parameter as {name!r}: write that)"
    near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.8)
    return f" (is {near[0]!r} meant?)" if near else ""
