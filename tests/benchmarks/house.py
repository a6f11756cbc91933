"""Compares the house of another revision with this one's: formats, plans, structure, and the walk of a plan.

`python -m tests.benchmarks.house REVISION [--to REVISION] [--cases FILE]`, in a clone that has them, prints Markdown: every
difference of the OpenAPI document (routes, parameters, schemas), of metrics (names, types, labels), of the job's JSON
schema and of plans, and then numbers of the structure. Each tree is a temporary worktree of git, its code runs in a
process of its own, and what is called of it is found by the name of its definition, as files have moved. FILE has
planning problems beside four chains with named schedules: {"cases": [{"name": ..., "spec": ...}]}. Nothing is timed.
`python -m tests.benchmarks.house REVISION --walks` prints only the walk of a plan on both trees, and those of a
step and of a job on the later one, whose tests have both in one process.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import inspect
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[2]
CHAIN_SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "zb-h1")
_MARK = "RESULT "
_BUDGET_S = 10.0
_MISSING = object()
_SCHEMAS = ("components", "$defs")
_TEXTS = ("description", "summary", "title", "examples", "example", "operationId")
_ENVIRONMENT = ("PATH", "HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS")


def main() -> None:
    """Print the comparison; for `--probe`, which the comparison starts in a tree, that tree's part of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.house", description=__doc__)
    parser.add_argument("revision")
    parser.add_argument("--to", default="HEAD", help="the other revision (HEAD)")
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--walks", action="store_true")
    parser.add_argument("--probe", choices=sorted(_PROBES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.probe:
        print(_MARK + json.dumps(_PROBES[arguments.probe](Path(arguments.revision), arguments.cases)))
        return
    with worktree(arguments.revision) as before, worktree(arguments.to) as after:
        if arguments.walks:
            print_walks(before, after)
        else:
            print_comparison(before, after, arguments.cases)


@contextlib.contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """A tree of this revision, for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="slotline-house-") as folder:
        tree = Path(folder) / "tree"
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run((*git, "add", "--quiet", "--detach", str(tree), revision), check=True)
        try:
            yield tree
        finally:
            subprocess.run((*git, "remove", "--force", str(tree)), check=True)


def print_comparison(before: Path, after: Path, cases: Path | None) -> None:
    for title, name in (
        ("OpenAPI", "openapi"),
        ("Metrics", "metrics"),
        ("Job schema", "job_schema"),
        ("Plans", "plans"),
    ):
        old, new = (probe(tree, name, cases) for tree in (before, after))
        found = list(Comparison(old, new).differences())
        print(f"\n## {title}\n\n{_sizes(name, old, new)}; {len(found)} differences.\n", flush=True)
        for difference in found:
            print(f"* {difference}")
    print("\n## Structure\n\n| of service and worker | before | after |\n|---|---|---|")
    structures = [probe(tree, "structure", None, code=ROOT) for tree in (before, after)]
    for name in structures[0]:
        print(f"| {name} | {structures[0][name]} | {structures[1][name]} |")


def _sizes(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    counted = {"openapi": ("paths", "routes"), "job_schema": ("$defs", "parts of a job")}
    key, what = counted.get(name, ("", "metric families" if name == "metrics" else "plans"))
    before, after = (len(side[key] if key else side) for side in (old, new))
    return f"{before} {what} before, {after} after"


def print_walks(before: Path, after: Path) -> None:
    print("| walk | tree | stays | files | returns |\n|---|---|---|---|---|")
    for walk, trees in (("plan", (before, after)), ("step", (after,)), ("job", (after,))):
        for tree in trees:
            stays, files, returns = probe(tree, f"walk_{walk}", None)
            print(
                f"| one {walk} | {'before' if tree == before else 'after'} | {stays} | {files} | {returns} |",
                flush=True,
            )


def probe(tree: Path, name: str, cases: Path | None, code: Path | None = None) -> Any:
    """The part `name` of a tree, in a process that imports from `code`, or else from the tree itself."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), str(tree), "--probe", name]
    if cases is not None:
        command += ["--cases", str(cases.resolve())]
    environment = {key: os.environ[key] for key in _ENVIRONMENT if key in os.environ}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**environment, "PYTHONPATH": str(code or tree), "PYTHONWARNINGS": "ignore"},
            stdout=subprocess.PIPE,
            text=True,
        )
    results = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not results:
        raise RuntimeError(f"{name} of {tree} ended with exit code {done.returncode}: its errors stand above")
    return json.loads(results[-1].removeprefix(_MARK))


class Comparison:
    """The differences of two JSON documents, each at the shortest path that has it.

    Schemas are compared where something refers to them, each pair once, so that one that is only called otherwise
    differs by its name alone. Texts for readers and operation ids, which nothing on the wire carries, are left out;
    lists of names are sets.
    """

    def __init__(self, before: Mapping[str, Any], after: Mapping[str, Any]):
        self._documents = before, after
        self._pairs: dict[tuple[str, str], None] = {}

    def differences(self) -> Iterator[str]:
        without_schemas = (
            {key: side[key] for key in side if key not in _SCHEMAS} for side in self._documents
        )
        yield from self._compare("", *without_schemas)
        compared = 0
        while compared < len(self._pairs):
            names = list(self._pairs)[compared]
            compared += 1
            was, now = (name.rpartition("/")[2] for name in names)
            if was != now:
                yield f"`{now}` is the new name of the schema `{was}`"
            parts = (_referred(side, name) for side, name in zip(self._documents, names, strict=True))
            yield from self._compare(now, *parts)

    def _compare(self, path: str, before: Any, after: Any) -> Iterator[str]:
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            if "$ref" in before and "$ref" in after:
                self._pairs[before["$ref"], after["$ref"]] = None
                return
            for key in sorted({*before, *after}):
                was, now = before.get(key, _MISSING), after.get(key, _MISSING)
                if key in _TEXTS and not (isinstance(was, Mapping) or isinstance(now, Mapping)):
                    continue
                if was is _MISSING or now is _MISSING:
                    change, value = ("is new", now) if was is _MISSING else ("is gone", was)
                    yield f"`{path}/{key}` {change}: {_shown(value)}"
                else:
                    yield from self._compare(f"{path}/{key}", was, now)
        elif isinstance(before, list) and isinstance(after, list):
            if all(isinstance(part, str) for part in before + after):
                more, less = sorted({*after} - {*before}), sorted({*before} - {*after})
                for names, verb in ((more, "also has"), (less, "no longer has")):
                    if names:
                        yield f"`{path}` {verb} {', '.join(names)}"
            elif len(before) == len(after):
                for number, pair in enumerate(zip(before, after, strict=True)):
                    yield from self._compare(f"{path}/{number}", *pair)
            else:
                yield f"`{path}`: {_shown(before)} -> {_shown(after)}"
        elif before != after:
            yield f"`{path}`: {_shown(before)} -> {_shown(after)}"


def _referred(document: Mapping[str, Any], reference: str) -> Any:
    for key in reference.removeprefix("#/").split("/"):
        document = document[key]
    return document


def defined(tree: Path, room: str, names: tuple[str, ...]) -> Any:
    """The class or function with the first of these names that a module of `room` defines at its top."""
    for name in names:
        for path in sorted((tree / room).rglob("*.py")):
            if any(getattr(node, "name", None) == name for node in ast.parse(path.read_text()).body):
                module = importlib.import_module(".".join(path.relative_to(tree).with_suffix("").parts))
                assert Path(module.__file__).is_relative_to(tree), f"{module.__file__} is of another tree"
                return getattr(module, name)
    raise LookupError(f"nothing in {tree / room} is called {' or '.join(names)}")


def openapi(tree: Path, cases: Path | None) -> dict[str, Any]:
    """The OpenAPI document, with parameters by name."""
    settings = defined(tree, "service", ("Settings",))
    document = defined(tree, "service", ("control_plane_app",))(settings()).openapi()
    for operations in document["paths"].values():
        for operation in operations.values():
            if "parameters" in operation:
                operation["parameters"] = {
                    f"{one['in']} {one['name']}": one for one in operation["parameters"]
                }
    return document


def metrics(tree: Path, cases: Path | None) -> dict[str, Any]:
    """Type and labels of each metric family, of the control plane and of a driver."""
    exposition = defined(tree, "service", ("exposition",))
    module = sys.modules[exposition.__module__]
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__
    ]
    families = list(module.instruments.REGISTRY.collect())
    for collector in own:
        if hasattr(collector, "collect"):
            arguments = inspect.signature(collector).parameters
            families += collector(*(MagicMock() for _ in arguments)).collect()
    found = {
        f"control plane {family.name}": [family.type, *getattr(family, "_labelnames", ())]
        for family in families
    }
    driver = defined(tree, "worker", ("DriverMetrics", "JobMetrics"))("job")
    for registry in (driver.registry, driver.profiled_registry):
        for collector in registry._collector_to_names:
            (family,) = collector.describe()
            found[f"driver {family.name}"] = [family.type, *collector._labelnames]
    page = defined(tree, "worker", ("SlotPage",))("job")
    slot = SimpleNamespace(labels={"mesh": "m0"}, start_s=0.0, duration_s=1.0)
    for step in (1, None):
        for family in page._families(SimpleNamespace(step=step, started_at=0.0, slots=(slot,))):
            found[f"driver {family.name}"] = [family.type, *family.samples[0].labels]
    return found


def job_schema(tree: Path, cases: Path | None) -> dict[str, Any]:
    """The JSON schema of a job."""
    return defined(tree, "service", ("JobSpec",)).model_json_schema()


def plans(tree: Path, cases: Path | None) -> dict[str, Any]:
    """The fields of the plan of each planning problem, long ones by their digests."""
    load_spec, make_plan = defined(tree, "service", ("load_spec",)), defined(tree, "service", ("make_plan",))
    specs = {f"chain {name}": chain(name) for name in CHAIN_SCHEDULES}
    if cases is not None:
        specs |= {case["name"]: case["spec"] for case in json.loads(cases.read_text())["cases"]}
    found = {}
    for name, spec in specs.items():
        plan = json.loads(make_plan(load_spec(spec), budget_s=_BUDGET_S).model_dump_json())
        for field, value in plan.items():
            text = json.dumps(value, sort_keys=True)
            digest = hashlib.sha256(text.encode()).hexdigest()
            found.setdefault(name, {})[field] = value if len(text) < 200 else digest
    return found


def chain(schedule: str) -> dict[str, Any]:
    """Four stages on four meshes, eight microbatches, backwards twice as long as forwards."""
    names = [f"s{i}" for i in range(4)]
    times = {"forward_s": 1.0, "backward_input_s": 1.0, "backward_weight_s": 1.0}
    return {
        "microbatches": 8,
        "meshes": [{"name": f"m{i}"} for i in range(4)],
        "stages": [
            {"name": name, "mesh": f"m{i}", **times, "activation_bytes": 2, "weight_stash_bytes": 1}
            for i, name in enumerate(names)
        ],
        "edges": [
            {"source": a, "target": b, "forward_s": 0.5, "backward_s": 0.5}
            for a, b in itertools.pairwise(names)
        ],
        "network": {"contention": "full-duplex"},
        "schedule": schedule,
    }


def structure(tree: Path, cases: Path | None) -> dict[str, str]:
    """Numbers of the rules of tests/test_arrows.py; migrations and packages' own files are no modules."""
    arrows = importlib.import_module("tests.test_arrows")
    arrows.ROOT = tree
    constructors = arrows.largest_constructors(10)
    return {
        "modules": f"{len(arrows._sources()):,}",
        "lines of them": f"{arrows.lines_of_sources():,}",
        f"packages of more than {arrows.MODULES_OF_A_PACKAGE} modules": str(len(arrows.crowded_packages())),
        f"modules below {arrows.SPLINTER_LINES} lines with one importer": str(len(arrows.splinters())),
        "circles of modules": str(len(arrows.module_circles())),
        "circles of packages (packages in them)": _circles_text(arrows.package_circles()),
        "base names of several modules": str(len(arrows.repeated_base_names())),
        "parameters of the ten largest constructors": ", ".join(
            f"{count} ({name.rpartition(':')[2]})" for count, name in constructors
        ),
    }


def _circles_text(circles: list[list[str]]) -> str:
    return f"{len(circles)} ({sum(map(len, circles))})"


class Walk:
    """The stays, files and returns of a reader who follows a run through service/ and worker/ from function to function.

    Functions are read in the order of their first calls, each once, thread after thread: the longest first, as threads
    of workers run beside each other. A stay is a row of functions of one file; a return is a stay in a file that was left
    before, so that stays are files and returns. What runs at import is not read. The hook sees the threads that start
    after this walk was made, and follows them inside `with` only.
    """

    def __init__(self, tree: Path):
        self._rooms = (str(tree / "service"), str(tree / "worker"))
        self._calls: dict[int, dict[CodeType, None]] = {}
        self._follows = False
        threading.setprofile(self._visit)
        sys.setprofile(self._visit)

    def __enter__(self) -> None:
        self._follows = True

    def __exit__(self, *error: object) -> None:
        self._follows = False
        sys.setprofile(None)
        threading.setprofile(None)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Stays, files, returns."""
        rows = [
            [
                (code.co_filename, code.co_firstlineno)
                for code in calls
                if code.co_filename.startswith(self._rooms)
            ]
            for calls in self._calls.values()
        ]
        read = dict.fromkeys(place for row in sorted(rows, key=lambda row: (-len(row), row)) for place in row)
        stays = [file for file, _ in itertools.groupby(file for file, _ in read)]
        return len(stays), len({*stays}), len(stays) - len({*stays})

    def _visit(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._follows and event == "call" and frame.f_code.co_name != "<module>":
            self._calls.setdefault(threading.get_ident(), {}).setdefault(frame.f_code)


def walk_plan(tree: Path, cases: Path | None) -> tuple[int, int, int]:
    """The walk of one `auto` plan of a chain, from its spec to its JSON."""
    load_spec, make_plan = defined(tree, "service", ("load_spec",)), defined(tree, "service", ("make_plan",))
    make_plan(load_spec(chain("auto")))  # kernels are compiled by the first plan
    walk = Walk(tree)
    with walk:
        make_plan(load_spec(chain("auto"))).model_dump_json()
    return walk.counts


def walk_job(tree: Path, cases: Path | None) -> tuple[int, int, int]:
    """The walk of one attempt of a job of two meshes: its driver, its plan, its workers in threads, without REST and Ray."""
    local_attempt = importlib.import_module("tests.worker.driver.local_attempt")
    spec = importlib.import_module("tests.worker.actor.test_actor").job()
    spec["training"]["steps"] = 2
    defined(tree, "service", ("compile_kernels",))()
    walk = Walk(tree)
    with walk:
        plane, code = local_attempt.run_attempt(spec)
    assert code == 0, plane.reports[-1]
    return walk.counts


def walk_step(tree: Path, cases: Path | None) -> tuple[int, int, int]:
    """The walk of the second training step of two workers of two meshes."""
    spec = importlib.import_module("tests.worker.actor.test_actor").job()
    workers = importlib.import_module("tests.worker.workers").Workers
    walk = Walk(tree)
    with workers(spec) as gang:
        gang.step(1)
        with walk:
            gang.step(2)
    return walk.counts


def _shown(value: Any) -> str:
    """A short text of a JSON value: of an object with properties their names."""
    if isinstance(value, Mapping) and "properties" in value:
        return f"an object of {', '.join(value['properties'])}"
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


_PROBES: dict[str, Callable[[Path, Path | None], Any]] = {
    "openapi": openapi,
    "metrics": metrics,
    "job_schema": job_schema,
    "plans": plans,
    "structure": structure,
    "walk_plan": walk_plan,
    "walk_job": walk_job,
    "walk_step": walk_step,
}

if __name__ == "__main__":
    main()
