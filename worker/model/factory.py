"""Factories named by import path (`package.module:attribute`), as job files give them.

Serves models, data sets, losses and optimizers alike; knows nothing of stages or jobs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from worker.model.errors import FactoryError

if TYPE_CHECKING:
    from torch import nn


def resolve(path: str) -> Any:
    """The object that `path` ("package.module:attribute") names; raises FactoryError."""
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
        raise FactoryError(f"factory {path!r}: importing {module_name} failed: {_reason(error)}") from error
    except Exception as error:
        raise FactoryError(f"factory {path!r}: importing {module_name} failed: {_reason(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name in vars(sys.modules[module_name]) if not name.startswith("_")]
            raise FactoryError(
                f"factory {path!r}: module {module_name} has no {attribute!r}; it has {_shorten(names)}"
            )
        found = getattr(found, part)
    return found


def call_factory(path: str, args: Mapping[str, Any] | None = None) -> Any:
    """What the factory at `path` returns for `args`; raises FactoryError, naming what it raised.

    An argument {factory: path, args: …} is what that factory returns: a configuration object, say.
    """
    factory = resolve(path)
    if not isinstance(factory, Callable):
        raise FactoryError(f"factory {path!r} is a {type(factory).__name__}, which cannot be called")
    args = {name: _made(value) for name, value in (args or {}).items()}
    try:
        return factory(**args)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in args.items())
        raise FactoryError(f"factory {path!r}({given}) raised {_reason(error)}") from error


def build_model(path: str, args: Mapping[str, Any] | None = None, *, seed: int = 0) -> nn.Module:
    """The model of a job, with the initial weights that `seed` gives on every worker.

    Python's, numpy's and torch's generators are seeded for it and stand afterwards where they stood. Raises
    FactoryError for a factory that does not exist, raises, or returns no nn.Module.
    """
    import torch

    from worker.seeding import seeded

    with seeded(seed):
        if not torch.cuda.is_initialized():
            torch.manual_seed(seed)  # for a factory that is the first here to use CUDA
        model = call_factory(path, args)
    if not isinstance(model, torch.nn.Module):
        raise FactoryError(
            f"factory {path!r} returned {type(model).__name__}, not a torch.nn.Module: return the model itself"
        )
    return model


def _made(value: Any) -> Any:
    if isinstance(value, Mapping):
        if isinstance(value.get("factory"), str) and value.keys() <= {"factory", "args"}:
            return call_factory(value["factory"], value.get("args"))
        return {key: _made(part) for key, part in value.items()}
    return [_made(part) for part in value] if isinstance(value, list) else value


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _shorten(names: list[str], limit: int = 12) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
