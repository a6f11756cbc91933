"""A job's data set, made by its factory: which part of it, which fields, and how its samples are put together.

Knows the words of `data:` in a job; no steps and no stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from worker.job import Data
from worker.model import call_factory, resolve
from worker.model.errors import FactoryError
from worker.seeding import seeded

Collator = Callable[[list[Any]], Any]


def make_dataset(data: Data, *, seed: int) -> Any:
    """What the factory returns, or the part of it that `data.split` names. Raises FactoryError for what is neither a
    data set with indices nor a stream.

    Python's, numpy's and torch's generators are seeded for it and stand afterwards where they stood.
    """
    with seeded(seed):
        made = call_factory(data.factory, data.args)
    if isinstance(made, DataLoader):
        raise FactoryError(
            f"data {data.factory!r} returned a DataLoader: return its data set, and give its arguments as data.loader"
        )
    if data.split is not None or isinstance(made, Mapping):
        made = _part(made, data)
    if not _has_indices(made) and not is_stream(made):
        raise FactoryError(
            f"data {data.factory!r} returned {type(made).__name__}, which cannot tell {_lacks(made)}: return a map-style "
            "data set, or what can be iterated"
        )
    return _as_tensors(made, data)


def is_stream(dataset: Any) -> bool:
    """Whether its samples have no indices, but come one after the other."""
    if isinstance(dataset, IterableDataset):  # of a class that has __getitem__, which raises
        return True
    return not _has_indices(dataset) and (hasattr(dataset, "__iter__") or isinstance(dataset, Iterator))


def chosen(sample: Any, data: Data) -> Any:
    """Of a sample that is a dict the fields of `data.columns`, under the names that the model has for them."""
    if data.columns is None:
        return sample
    if not isinstance(sample, Mapping):
        raise ValueError(
            f"a sample of data {data.factory!r} is a {type(sample).__name__}, and data.columns takes fields of dicts: "
            "leave it out"
        )
    found = {}
    for name, field in _renamed(data.columns).items():
        if field not in sample:
            raise ValueError(
                f"a sample of data {data.factory!r} has no field {field!r}, which data.columns names; it has "
                f"{', '.join(map(str, sample)) or 'none'}"
            )
        found[name] = sample[field]
    return found


def make_collator(data: Data) -> Collator | None:
    """What makes a batch of a list of samples, where the job names it: an object of a class, or a function with its
    arguments bound."""
    if data.collate is None:
        return None
    target, arguments = resolve(data.collate.factory), data.collate.args
    if isinstance(target, type):
        target, arguments = call_factory(data.collate.factory, arguments), {}
    if not callable(target):
        raise FactoryError(f"data.collate {data.collate.factory!r} is a {type(target).__name__}, no function")
    return functools.partial(target, **arguments) if arguments else target


def _part(made: Any, data: Data) -> Any:
    if not isinstance(made, Mapping):
        raise FactoryError(
            f"data {data.factory!r} returned {type(made).__name__}, which has no parts by name: leave out data.split"
        )
    names = ", ".join(map(str, made)) or "nothing"
    if data.split is None:
        raise FactoryError(
            f"data {data.factory!r} returned {type(made).__name__} of {names}: name one with data.split"
        )
    if data.split not in made:
        raise FactoryError(f"data {data.factory!r} has no split {data.split!r}: it has {names}")
    return made[data.split]


def _has_indices(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def _lacks(made: Any) -> str:
    if not hasattr(made, "__len__"):
        return "how many samples it has (__len__)"
    return "a sample by its index (__getitem__)"


def _renamed(columns: Mapping[str, Any] | Sequence[str]) -> Mapping[str, Any]:
    return columns if isinstance(columns, Mapping) else {name: name for name in columns}


def _as_tensors(made: Any, data: Data) -> Any:
    """A data set of Hugging Face gives tensors, and reads no other columns from disk; a format of its own it keeps."""
    if not type(made).__module__.startswith("datasets."):
        return made
    wanted = sorted(set(_renamed(data.columns).values())) if data.columns is not None else None
    has = made.column_names  # None where a stream does not know them
    if wanted is not None and has is not None:
        if missing := [name for name in wanted if name not in has]:
            raise FactoryError(
                f"data {data.factory!r} has no column {', '.join(missing)}, which data.columns names; it has "
                f"{', '.join(has)}"
            )
        made = made.select_columns(wanted)
    kept = getattr(made, "format", None)
    return made.with_format("torch") if not kept or kept.get("type") is None else made
