"""Resolves factories by import path (`package.module:attribute`), and parameters by patterns of their names.

Serves models, data sets, losses and optimizers, which it calls, or only compares with their arguments; an argument
{factory, args} is built first. Patterns match as file names do (a star takes dots too); `re:` begins a regular
expression that is searched for. Knows nothing of stages or jobs. Light: torch is imported only to build a model.
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


def moved_factory_notes(paths: Iterable[str]) -> list[str]:
    """A sentence for each distinct path of MOVED_FACTORIES among `paths`, with the new one; for the user of the job."""
    return [
        f"factory {path!r} has moved and is read as {MOVED_FACTORIES[path]!r}: write that in the job"
        for path in dict.fromkeys(paths)
        if path in MOVED_FACTORIES
    ]


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
                f"factory {path!r}: there is no module {error.name!r}{_near_module(error.name)}; check the spelling, "
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
            public = {
                n: value for n, value in vars(sys.modules[module_name]).items() if not n.startswith("_")
            }
            names = [n for n, value in public.items() if _is_made_in(value, module_name)] or list(public)
            near = difflib.get_close_matches(attribute, names, n=1)
            raise FactoryError(
                f"factory {path!r}: module {module_name} has no {attribute!r}; it has {_shorten(names)}"
                + (f": did you mean {near[0]}?" if near else "")
            )
        found = getattr(found, part)
    return found


def _is_made_in(value: Any, module_name: str) -> bool:
    """True for what the module or one below it defines, not for what it imports from elsewhere."""
    return str(getattr(value, "__module__", "")).startswith(module_name)


def call_factory(path: str, args: Mapping[str, Any] | None = None) -> Any:
    """Call the factory at `path` with `args`; raises FactoryError, naming what it raised.

    An argument {factory: path, args: …} is what that factory returns: a configuration object, say.
    """
    factory = resolve(path)
    if not isinstance(factory, Callable):
        raise FactoryError(f"factory {path!r} is a {type(factory).__name__}, which cannot be called")
    args = build_arguments(args)
    try:
        return factory(**args)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in args.items())
        raise FactoryError(f"factory {path!r}({given}) raised {_error_text(error)}") from error


def build_arguments(args: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of a factory, in which every {factory: path, args: …}, however deep, is what that factory returns.

    Raises FactoryError as `call_factory`.
    """
    return {name: _resolve_nested_factories(value) for name, value in (args or {}).items()}


def check_arguments(
    what: str, target: Callable[..., Any], args: Mapping[str, Any], first: Sequence[str] = ()
) -> None:
    """FactoryError where the signature of `target`, which messages call `what`, does not take the keyword arguments
    `args` behind positional ones called `first`. Nothing is called, and what has no signature passes."""
    try:
        signature = inspect.signature(target)
        # a decorator may show the signature of what it wraps, and itself take more, or give it more
        outside = inspect.signature(target, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    if _binds(signature, args, first) or _binds(outside, args, first):
        return
    named = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    positional = [p for p in named if p.kind is p.POSITIONAL_OR_KEYWORD][: len(first)]
    takes = [p for p in named if p not in positional]
    names = [p.name for p in takes]
    problems = [f"has no argument {name!r}{did_you_mean(name, names)}" for name in args if name not in names]
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        problems = [f"gets {p.name!r} already" for p in positional if p.name in args]
    if missing := [p.name for p in takes if p.default is p.empty and p.name not in args]:
        problems.append(f"needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not given")
    if not problems:  # it takes fewer positional ones
        problems.append(f"cannot be called with {', '.join([*first, *args]) or 'nothing'}")
    raise FactoryError(f"{what} {' and '.join(problems)}; it takes {_shorten([*first, *names]) or 'nothing'}")


def _binds(signature: inspect.Signature, args: Mapping[str, Any], first: Sequence[str]) -> bool:
    try:
        signature.bind(*first, **args)
    except TypeError:
        return False
    return True


def did_you_mean(name: str, known: Sequence[str], *, cutoff: float = 0.6) -> str:
    """The name in `known` that is nearest to `name`, for the end of a clause; empty where none is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f" (did you mean {near[0]}?)" if near else ""


def _near_module(name: str) -> str:
    """A module beside the missing one `name` with nearly its name, for messages."""
    parent, _, last = name.rpartition(".")
    places = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and places is None:
        return ""
    return did_you_mean(last, [module.name for module in pkgutil.iter_modules(places)])


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


def transformers_model(config: str) -> nn.Module:
    """The model of a config.json of transformers, or of a folder that holds one, by its first architecture; with random
    weights. Raises FactoryError where it names none, or one that transformers does not have."""
    import transformers

    settings = transformers.AutoConfig.from_pretrained(config)
    name = next(iter(getattr(settings, "architectures", None) or ()), "")
    if not name or not hasattr(transformers, name):
        raise FactoryError(
            f"{config} names {f'the architecture {name}, which transformers does not have' if name else 'no architecture'}:"
            " name the class, as model: {hf: {class: AutoModelForCausalLM, config: " + config + "}}"
        )
    return getattr(transformers, name)(settings)


def set_modes(model: nn.Module, train: str) -> list[str]:
    """Put a model that was built into the modes in which it trains; notes on what a user may not expect of them.

    `train` is "called" (model.train() is called, which a model may override to keep some of its norms in eval mode) or
    "as_built". FactoryError for a train() that raises.
    """
    notes, was_training = [], model.training
    if train == "called":
        try:
            model.train()
        except Exception as error:
            raise FactoryError(
                f"{type(model).__name__}.train() raised {_error_text(error)}: correct it, or keep the modes in which the "
                "factory left the model (model.train: as_built)"
            ) from error
        if not was_training and model.training:
            notes.append(
                "the factory returned the model in eval mode, as from_pretrained does; model.train() was called, so that "
                "dropout drops and batch norms use their batch (model.train: as_built leaves modes as they are)"
            )
    apart = [
        f"{name} ({type(module).__name__}, {'train' if module.training else 'eval'} mode)"
        for parent, of in model.named_modules()
        for name, module in ((f"{parent}.{key}".lstrip("."), one) for key, one in of.named_children())
        if module.training != of.training
    ]
    if not model.training:
        notes.append(
            f"{type(model).__name__} trains in eval mode (model.train: {train}): its dropout is off and its batch norms use "
            "and keep their running statistics"
        )
    if apart:
        notes.append(
            f"each module trains in its own mode, and these are in another than what contains them: {_shorten(apart, 6)}"
        )
    return notes


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
