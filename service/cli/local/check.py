"""`slotline init`, `slotline check`, `slotline schema`: job files are begun, checked and described on this machine.

None needs a server or an accelerator. The check of the factories runs in a process of its own, as every attempt
runs it before its workers are placed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.job_file import read_spec, with_changes
from service.cli.local.plan import python_path, validated_job
from service.cli.output import ChangesOption, CliError, JsonOption, print_json, print_message
from service.spec.job import TRAINING_SCHEDULES, JobSpec, relative_places
from service.spec.resources import MeshEntry, MeshRange
from service.spec.short_forms import DECAYS, HF_FIELDS, LENGTHS, PARALLELISM, check_length, steps_of
from service.spec.values import OWN_PACKAGES, shadowing_message
from worker.contract.codec import to_json
from worker.contract.tasks import JobCheck, JobProblem, check_job_process

app = typer.Typer()
_DURATION = r"^(?=\d)(\d+d)?(\d+h)?(\d+m)?(\d+s)?$"
_TEMPLATES = Path(__file__).parent / "templates"
_MAX_STEPS = 1_000_000_000
_MISSING_MODULE = re.compile(r"(?:there is no module|No module named) '([\w.]+)'")


class Template(StrEnum):
    """The kinds of jobs that `slotline init` begins."""

    LANGUAGE = "language"
    VISION = "vision"
    DIFFUSION = "diffusion"
    LORA = "lora"
    OWN = "own"


LIBRARIES = {
    Template.LANGUAGE: ("transformers",),
    Template.VISION: ("transformers",),
    Template.DIFFUSION: ("diffusers",),
    Template.LORA: ("transformers", "peft"),
    Template.OWN: (),
}
"""What the job of a template imports beside Slotline's own packages."""


@app.command()
def init(
    template: Annotated[Template, typer.Argument(help="A causal language model, an image classifier, ...")],
    folder: Annotated[
        Path | None, typer.Argument(help="Where; a new folder of the template's name if absent.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a commented job file and code that train as they are: job.yaml and src/training.py."""
    place = folder or Path(template.value)
    contents = {place / "job.yaml": ".yaml", place / "src" / "training.py": ".py.txt"}
    if existing := [str(file) for file in contents if file.exists()]:
        raise CliError(f"{' and '.join(existing)} exists, and is not overwritten: name another folder")
    try:
        for file, ending in contents.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text((_TEMPLATES / f"{template.value}{ending}").read_text("utf-8"), "utf-8")
    except OSError as error:
        raise CliError(f"cannot write {error.filename}: {error.strerror}") from None
    if as_json:
        print_json({"files": [str(file) for file in contents]})
    else:
        typer.echo("\n".join(str(file) for file in contents))
        missing = " ".join(library for library in LIBRARIES[template] if find_spec(library) is None)
        commands = [
            *([f"pip install {missing}"] if missing else []),
            f"slotline check {place / 'job.yaml'}",
            f"slotline submit {place / 'job.yaml'} --follow",
        ]
        print_message(f"next: {'; '.join(commands)}")


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The job, as YAML or JSON; - reads standard input.")],
    changes: ChangesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a job without training it: fields, factories and their arguments, model, optimizer, loss, a sample.

    Its modules are imported in a process of this machine; the model is built without memory where that works. Everything
    wrong is listed; exit code 0 only where nothing is.
    """
    try:
        result = check_job_file(with_changes(read_spec(file), changes or ()), file)
    except (ValueError, OSError) as error:
        raise CliError(str(error)) from None
    if not result.problems and not result.checked:
        raise CliError("; ".join(result.notes))
    for note in result.notes:
        print_message(f"note: {note}")
    if as_json:
        print_json(to_json(result))
    else:
        typer.echo(check_text(result))
    if result.problems:
        raise typer.Exit(1)


@app.command()
def schema() -> None:
    """Print the JSON schema of job.yaml, for editors: `slotline schema > job.schema.json`."""
    print_json(job_schema())


def check_job_file(spec: dict[str, Any], file: Path) -> JobCheck:
    """The check of the job `spec`, as in job.yaml, which lies at `file`. Raises ValueError for wrong fields, all at once,
    and where the length of the training cannot be told."""
    if _length_by_data(spec) is None:
        return _check_long_form(spec, file)
    steps, result = _steps_and_check(spec, file)
    return replace(result, checked=(*result.checked, f"training: {steps:,} steps"))


def with_steps(spec: dict[str, Any], file: Path) -> dict[str, Any]:
    """The job with training.steps in place of epochs or tokens, for which its data is read in a process of this machine."""
    if (training := _length_by_data(spec)) is None:
        return spec
    steps, _ = _steps_and_check(spec, file)
    print_message(f"training: {steps:,} steps")
    return {**spec, "training": {**training, "steps": steps}}


def _steps_and_check(spec: dict[str, Any], file: Path) -> tuple[int, JobCheck]:
    training = _length_by_data(spec)
    result = _check_long_form({**spec, "training": {**training, "steps": _MAX_STEPS}}, file)
    steps = _steps_by_data(spec["training"], result)
    validated_job({**spec, "training": {**training, "steps": steps}}, file)  # a warm-up may be too long
    return steps, result


def _length_by_data(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """`training` without its length, where that is in epochs or tokens; None where it is not."""
    training = spec.get("training")
    if not isinstance(training, Mapping) or not any(training.get(name) is not None for name in LENGTHS[1:]):
        return None
    check_length(training)
    return {name: value for name, value in training.items() if name not in LENGTHS}


def _steps_by_data(training: Mapping[str, Any], result: JobCheck) -> int:
    if result.samples is None and not any(text.startswith("data: ") for text in result.checked):
        reasons = [str(problem) for problem in result.problems if problem.field.startswith("data")]
        raise ValueError(
            "training.epochs and training.tokens take the length of the data, which cannot be read on this machine: "
            f"{'; '.join(reasons or result.notes)}; give training.steps where only the cluster has the data"
        )
    batch = training.get("global_batch", JobSpec.model_fields["training"].default.global_batch)
    return steps_of(training, global_batch=batch, samples=result.samples, tokens=result.tokens)


def _check_long_form(spec: dict[str, Any], file: Path) -> JobCheck:
    job, folder = validated_job(spec, file)
    _check_places(job, folder)
    environment = {**job["env"], "PYTHONPATH": python_path(folder)}
    result = check_job_process(job, folder=folder, environment=environment)
    wanted = {_package_name(requirement) for requirement in job["code"]["pip"]}
    problems = [problem for problem in result.problems if not _is_of_packages(problem, wanted)]
    others = [
        f"{problem.field} was not checked, as code.pip is not installed here: {problem.message}"
        for problem in result.problems
        if problem not in problems
    ]
    return replace(result, problems=tuple(problems), notes=(*result.notes, *others))


def _check_places(job: dict[str, Any], folder: Path | None) -> None:
    """Raises ValueError for places and modules of the job that a server refuses."""
    wrong = [f"{name} {value!r}: {why}" for name, value, why in relative_places(JobSpec.model_validate(job))]
    if folder is not None:
        own = (file for name in OWN_PACKAGES for file in (folder / name).rglob("*.py"))
        files = sorted((*folder.glob("*.py"), *folder.glob("*/__init__.py"), *own))
        messages = (shadowing_message(file.relative_to(folder)) for file in files)
        wrong += [f"code.working_dir: {message}" for message in itertools.islice(filter(None, messages), 1)]
    if wrong:
        raise ValueError("; ".join(wrong))


def check_text(result: JobCheck) -> str:
    """One line for each thing that is wrong, with the traceback of what the job's own code raised, or that was built or
    read."""
    lines = []
    for problem in result.problems:
        lines.append(f"wrong  {problem}{_LOCAL if problem.local else ''}")
        lines += [f"       {line}" for line in problem.details.splitlines()]
    return "\n".join([*lines, *(f"ok     {text}" for text in result.checked)])


_LOCAL = " (on this machine; where only the cluster has it, every attempt checks again before it takes accelerators)"


def _package_name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0].lower().replace("-", "_")


def _is_of_packages(problem: JobProblem, packages: set[str]) -> bool:
    """True where the problem is a module that is missing here, and which one of these packages may bring."""
    missing = _MISSING_MODULE.search(problem.message)
    return bool(missing and packages and missing[1].partition(".")[0].lower() in packages)


def job_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a job file: the fields of a JobSpec with what they may be in a file besides."""
    made = JobSpec.model_json_schema()
    mesh = MeshEntry.model_json_schema()
    definitions = {**made.pop("$defs"), **mesh.pop("$defs"), "MeshEntry": mesh}
    definitions["MeshRange"] = MeshRange.model_json_schema()
    meshes = definitions["ResourcesSection"]["properties"]["meshes"]["anyOf"]
    meshes.append({"type": "array", "items": {"$ref": "#/$defs/MeshEntry"}, "minItems": 1})
    meshes.append({"$ref": "#/$defs/MeshRange"})
    made["properties"]["max_duration"]["anyOf"].append({"type": "string", "pattern": _DURATION})
    definitions["PipelineSection"]["properties"]["schedule"]["enum"] = [
        name for schedule in TRAINING_SCHEDULES for name in dict.fromkeys((schedule, schedule.upper()))
    ]
    _add_short_forms(made, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_without_titles(made),
        "title": "job.yaml",
        "description": "A training job of Slotline",
        "$defs": {name: _without_titles(definition) for name, definition in definitions.items()},
    }


def _add_short_forms(job: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Add the short forms that service/spec/short_forms.py writes out to the schema of a job."""
    count = {"type": "integer", "minimum": 1, "maximum": 1024}
    above_0 = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]}
    job["properties"]["parallelism"] = {
        **_closed_object(
            {name: count for name in PARALLELISM} | {"pp": {"anyOf": [count, {"$ref": "#/$defs/MeshRange"}]}}
        ),
        "description": "Short form of uniform meshes: pp meshes of dp x tp workers, in place of resources.meshes",
    }
    training = definitions["TrainingSection"]["properties"]
    training["epochs"] = {
        **above_0,
        "description": "In place of steps: passes over the data; slotline submit counts them",
    }
    training["tokens"] = {
        **above_0,
        "description": "In place of steps: tokens of all samples; slotline submit counts them",
    }
    schedule = _closed_object({"warmup": {"type": "integer", "minimum": 0}, "decay": {"enum": list(DECAYS)}})
    definitions["OptimizerSection"]["properties"]["schedule"]["anyOf"].append(
        {**schedule, "minProperties": 1}
    )
    model = definitions["ModelSection"]
    path = {"type": "string", "minLength": 1}
    config = {"anyOf": [path, {"type": "object"}]}
    own = {name: field for name, field in model["properties"].items() if name not in ("factory", "args")}
    hf = _closed_object({"class": path, "config": config}) | {"required": list(HF_FIELDS)}
    definitions["HfModel"] = _closed_object({"hf": {"anyOf": [path, hf]}, **own})
    text = {"pattern": "^hf:.", "description": "hf:path/config.json of transformers"}
    hf_or_factory = {
        "if": {"required": ["hf"]},
        "then": {"$ref": "#/$defs/HfModel"},
        "else": {"$ref": "#/$defs/ModelSection"},
    }
    job["properties"]["model"] = {"if": {"type": "string"}, "then": text, "else": hf_or_factory}


def _closed_object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _without_titles(part: Any) -> Any:
    """A schema without the titles that pydantic makes of the names of fields: editors show the names themselves."""
    if isinstance(part, list):
        return [_without_titles(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    return {
        name: {field: _without_titles(inner) for field, inner in value.items()}
        if name == "properties"
        else _without_titles(value)
        for name, value in part.items()
        if name != "title"
    }
