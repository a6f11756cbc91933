"""Short forms of a job file, written out in the long form that everything behind the validation reads.

`model: hf:…` and `model: {hf: …}` for transformers, `parallelism` for uniform meshes, `optimizer.schedule: {warmup,
decay}`. The length of a training in epochs or tokens needs the data, which only `slotline` on the user's machine reads:
it is refused here. Values only; what is neither short form nor wrong passes as it is, for the fields' own checks.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

HF_PREFIX = "hf:"
LENGTHS = ("steps", "epochs", "tokens")
"""Fields of `training` that say how long it is: one of them."""
DECAYS = ("constant", "linear", "cosine")
PARALLELISM = ("pp", "dp", "tp")
HF_FIELDS = ("class", "config")
_SCHEDULE_FACTORY = "worker.actor.optimizer:warmup_decay"
_HF_FACTORY = "worker.model.factory:transformers_model"
STORED_MESH_FIELDS = ("workers_per_mesh", "workers", "tensor", "tensors")
"""Fields of `resources` in which stored jobs have their meshes; users write `parallelism`, or `resources.meshes`."""
MESH_RANGE_FIELD = "fewest_meshes"
"""Beside them in elastic jobs; users write `{min, max}` for a number of meshes."""
_DEFAULT_STEPS = 100


def long_form(job: Mapping[str, Any]) -> dict[str, Any]:
    """The job without short forms. ValueError, naming field, value and remedy, for a short form that is wrong."""
    job = dict(job)
    if "model" in job:
        job["model"] = _model(job["model"])
    if "parallelism" in job:
        job = _with_meshes(job)
    resources, pipeline = job.get("resources"), job.get("pipeline", {})
    elastic = isinstance(resources, Mapping) and isinstance(resources.get("meshes"), Mapping)
    if elastic and isinstance(pipeline, Mapping):  # each number of meshes has its own stages
        job["pipeline"] = {"stages": "auto", **pipeline}
    data, training = job.get("data"), job.get("training", {})
    if isinstance(data, Mapping) and data.get("lengths") is not None and isinstance(training, Mapping):
        # microbatches of unequal lengths have unequal numbers of targets
        training = job["training"] = {"loss_reduction": "tokens", **training}
    if isinstance(training, Mapping):
        check_length(training)
        for name in ("epochs", "tokens"):
            if training.get(name) is not None:
                raise ValueError(
                    f"training.{name} {training[name]} takes the length of the data, which the server cannot read: "
                    "submit with `slotline submit`, which reads it on your machine, or give training.steps"
                )
    optimizer = job.get("optimizer")
    schedule = optimizer.get("schedule") if isinstance(optimizer, Mapping) else None
    if isinstance(schedule, Mapping) and schedule.keys() & {"warmup", "decay"}:
        job["optimizer"] = {**optimizer, "schedule": _schedule(schedule, training)}
    return job


def check_no_stored_fields(job: Mapping[str, Any]) -> None:
    """ValueError for a job that gives its meshes in some fields of stored ones, with what to write in their place. One with
    all of them passes: it is what an answer of the server had."""
    resources, pipeline = job.get("resources"), job.get("pipeline")
    if not isinstance(resources, Mapping) or resources.keys() >= {*STORED_MESH_FIELDS}:
        return
    if resources.get(MESH_RANGE_FIELD) is not None:
        raise ValueError(
            f"resources.{MESH_RANGE_FIELD} is no field: write resources.meshes: {{min: 2, max: 4}}, or parallelism.pp so"
        )
    if given := [name for name in STORED_MESH_FIELDS if resources.get(name) is not None]:
        stages = pipeline.get("stages") if isinstance(pipeline, Mapping) else None
        sizes = {
            "pp": resources.get("meshes") or stages or 1,
            "dp": resources.get("workers_per_mesh") or resources.get("tensor") or 1,
            "tp": resources.get("tensor") or 1,
        }
        if all(isinstance(size, int) and size > 0 for size in sizes.values()) and "workers" not in given:
            sizes["dp"] = max(sizes["dp"] // sizes["tp"], 1)
        else:
            sizes = {"pp": 4, "dp": 2, "tp": 2}
        raise ValueError(
            f"resources.{given[0]} is no field any more: write parallelism: {_flow(sizes)} for pp meshes of dp x tp "
            "workers, or resources.meshes as a list where meshes differ, one entry {workers: N, parallel: "
            "{tensor: N}} a mesh"
        )


def file_form(job: Mapping[str, Any]) -> dict[str, Any]:
    """A job (JSON of a JobSpec, with or without its defaults) as users write it: its meshes by `parallelism`, or by the
    list or number `resources.meshes`. What is no stored job passes as it is."""
    resources = job.get("resources")
    if not isinstance(resources, Mapping):
        return dict(job)
    rest = {
        name: value
        for name, value in resources.items()
        if name not in (*STORED_MESH_FIELDS, MESH_RANGE_FIELD)
    }
    meshes: Any = resources.get("meshes") or 1
    if resources.get(MESH_RANGE_FIELD) is not None:
        meshes = rest["meshes"] = {"min": resources[MESH_RANGE_FIELD], "max": meshes}
    size, tensor = resources.get("workers_per_mesh") or 1, resources.get("tensor") or 1
    changed = {**job, "resources": rest}
    if resources.get("workers") or resources.get("tensors"):
        sizes = resources.get("workers") or [size] * meshes
        tensors = resources.get("tensors") or [tensor] * meshes
        rest["meshes"] = [
            {"workers": workers} | ({"parallel": {"tensor": tp}} if tp > 1 else {})
            for workers, tp in zip(sizes, tensors, strict=True)
        ]
    elif size > 1 or tensor > 1:
        rest.pop("meshes", None)
        changed["parallelism"] = {"pp": meshes, "dp": size // tensor, "tp": tensor}
    return {name: value for name, value in changed.items() if value != {} or name != "resources"}


def _flow(sizes: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name}: {size}" for name, size in sizes.items()) + "}"


def check_length(training: Mapping[str, Any]) -> None:
    """ValueError unless `training` says its length at most once, and by a positive number."""
    given = [name for name in LENGTHS if training.get(name) is not None]
    if len(given) > 1:
        raise ValueError(
            f"training.{' and training.'.join(given)} all say how long the training is: keep one of them"
        )
    for name in given:
        value = training[name]
        if name != "steps" and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18
        ):
            raise ValueError(f"training.{name} is {value!r}: write a number above 0")


def steps_of(
    training: Mapping[str, Any], *, global_batch: int, samples: int | None, tokens: int | None
) -> int:
    """The steps of a training whose length is in epochs or tokens, rounded up, for data of so many `samples` (None: a
    stream) of so many `tokens` each (None: not known). ValueError where the data does not say."""
    if training.get("epochs") is not None:
        if samples is None:
            raise ValueError(
                f"training.epochs is {training['epochs']}, and the data is a stream, whose length nobody knows: give "
                "training.steps"
            )
        return max(1, math.ceil(training["epochs"] * samples / global_batch))
    if tokens is None:
        raise ValueError(
            f"training.tokens is {training['tokens']}, and the data has no input of token ids with a length (integers, "
            "one row a sample): give training.steps"
        )
    return max(1, math.ceil(training["tokens"] / (global_batch * tokens)))


def _model(model: Any) -> Any:
    if isinstance(model, str) and model.startswith(HF_PREFIX):
        path = model.removeprefix(HF_PREFIX).strip()
        if not path:
            raise ValueError("model is 'hf:' without a path: write hf:path/config.json")
        return {"factory": _HF_FACTORY, "args": {"config": path}}
    if not isinstance(model, Mapping) or "hf" not in model:
        return model
    others = {name: value for name, value in model.items() if name != "hf"}
    if both := [name for name in ("factory", "args") if name in others]:
        raise ValueError(f"model.hf and model.{both[0]} both say what the model is: leave out one")
    hf = model["hf"]
    if isinstance(hf, str):
        return {**_model(f"{HF_PREFIX}{hf}"), **others}
    _check_fields("model.hf", hf, HF_FIELDS, "{class: LlamaForCausalLM, config: {num_hidden_layers: 4}}")
    name, config = hf.get("class"), hf.get("config")
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(
            f"model.hf.class is {name!r}: name a class of transformers, as LlamaForCausalLM or AutoModelForCausalLM"
        )
    auto = name.startswith("Auto")
    if isinstance(config, str):
        made = {
            "factory": "transformers:AutoConfig.from_pretrained",
            "args": {"pretrained_model_name_or_path": config},
        }
    elif not isinstance(config, Mapping):
        raise ValueError(
            f"model.hf.config is {config!r}: write the settings of the configuration, or the path of a config.json"
        )
    elif "model_type" in config:
        made = {"factory": "transformers:AutoConfig.for_model", "args": dict(config)}
    elif auto:
        raise ValueError(
            f"model.hf.class {name} takes models of any type, and model.hf.config names none: add model_type: llama, say"
        )
    else:
        made = {"factory": f"transformers:{name}.config_class", "args": dict(config)}
    factory = f"transformers:{name}.from_config" if auto else f"transformers:{name}"
    return {"factory": factory, "args": {"config": made}, **others}


def _with_meshes(job: Mapping[str, Any]) -> dict[str, Any]:
    """`parallelism` as the meshes of `resources`: pp meshes of dp x tp workers; one stage a mesh unless the job says."""
    sizes = job["parallelism"]
    _check_fields("parallelism", sizes, PARALLELISM, "{pp: 4, dp: 2, tp: 2}")
    for name, size in sizes.items():
        if name == "pp" and isinstance(size, Mapping):
            continue  # a range, which `resources` reads
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 1024:
            raise ValueError(f"parallelism.{name} is {size!r}: write a whole number from 1 to 1024")
    resources, pipeline = job.get("resources", {}), job.get("pipeline", {})
    if not isinstance(resources, Mapping) or not isinstance(pipeline, Mapping):
        return {name: value for name, value in job.items() if name != "parallelism"}
    if both := [
        name for name in ("meshes", MESH_RANGE_FIELD, *STORED_MESH_FIELDS) if resources.get(name) is not None
    ]:
        raise ValueError(
            f"parallelism and resources.{both[0]} both say how the workers are arranged: leave out one; meshes that differ "
            "in size are for resources.meshes"
        )
    pp, dp, tp = (sizes.get(name, 1) for name in PARALLELISM)
    return {
        **{name: value for name, value in job.items() if name != "parallelism"},
        "pipeline": {"stages": "auto" if isinstance(pp, Mapping) else pp, **pipeline},
        "resources": {**resources, "meshes": pp, "workers_per_mesh": dp * tp, "tensor": tp},
    }


def _schedule(schedule: Mapping[str, Any], training: Any) -> dict[str, Any]:
    _check_fields("optimizer.schedule", schedule, ("warmup", "decay"), "{warmup: 100, decay: cosine}")
    warmup, decay = schedule.get("warmup", 0), schedule.get("decay", "constant")
    steps = training.get("steps", _DEFAULT_STEPS) if isinstance(training, Mapping) else _DEFAULT_STEPS
    if decay not in DECAYS:
        raise ValueError(f"optimizer.schedule.decay is {decay!r}: write one of {', '.join(DECAYS)}")
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
        raise ValueError(f"optimizer.schedule.warmup is {warmup!r}: write a number of steps, 0 or more")
    if isinstance(steps, int) and warmup > steps:
        raise ValueError(
            f"optimizer.schedule.warmup {warmup} is longer than the training, training.steps {steps}: lower it"
        )
    return {"factory": _SCHEDULE_FACTORY, "args": {"steps": steps, "warmup": warmup, "decay": decay}}


def _check_fields(place: str, value: Any, known: Sequence[str], example: str) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{place} is {value!r}: write {example}")
    for name in value:
        if name not in known:
            name = str(name).encode("utf-8", "backslashreplace").decode()  # half a character has no text
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise ValueError(f"{place}.{name}: unknown field: {hint}")
