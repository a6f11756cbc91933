"""The rules of the house: arrows between rooms, sizes of packages and modules, and the words of their first lines.

Reads the sources; imports nothing of them. Each rule has its list of today's offenders, which only shrinks: a module that
no longer breaks a rule must leave the list.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES_OF_A_PACKAGE = 15
DEPTH = 3
SPLINTER_LINES = 100
FUNCTION_LINES, FUNCTION_PARAMETERS = 100, 8
SCHEDULER = "service.scheduler"
OUTSIDE = (
    *("ray", "fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic", "httpx", "requests", "typer"),
    *("asyncio", "socket", "ssl", "http", "urllib", "subprocess", "multiprocessing"),
    *("os", "pathlib", "shutil", "tempfile", "logging", "sqlite3", "time", "datetime"),
)
"""What a pure function needs not: servers, databases, networks, files, processes, clocks."""
WORKER_ROOMS = (
    *(("tasks",), ("verify",), ("driver",), ("actor",), ("benchmark", "checks"), ("examples",)),
    *(("engine", "checkpoint", "data"), ("parallel", "model", "machine"), ("transport",), ("contract",)),
)
"""From the top to the bottom of worker: a room imports its own floor's other rooms and lower ones, never a higher one."""
COLLECTIVES = (*("all_reduce", "start_all_reduce", "start_reduce_scatter", "start_all_gather", "exchange"),)
"""What sums or gathers over a group; the engine and actors call it on Collectives, which records it."""
BANNED_WORDS = re.compile(r"(?:^|_)(told|mine|theirs|ways|unlike|alike|fellows)(?:_|$)")
RIDDLE = re.compile(r"(What|Whose|Who|Whether|Which|Where|When|How|Of|Those|By|As|Do|Does)\b")
OTHERS_NAMES = frozenset({"whsec_", "flatten_optimizer_state_dict", "get_state_dict", "state_dict"})
"""Names of others that docstrings have and no code: the prefix of a webhook's secret, torch's."""
SHARED_BASE_NAMES: dict[str, str] = {
    # resources of the REST API, with one module in each layer that knows them
    "jobs": "training jobs: store, schemas, router, command line",
    "plans": "plans of pipelines: store, schemas, router, command line",
    "clusters": "Ray clusters: settings, schemas, router, state, access",
    "artifacts": "checkpoints, exports and packages of a job: schemas, router, rules, command line, tasks",
    "admin": "quotas, tokens, secrets: schemas, router, command line",
    "drivers": "reports of drivers: schemas, router, rules",
    "activity": "the activity of a job: events, logs, steps, timelines: schemas, router",
    "queues": "queues: quotas and waiting jobs: store, schemas",
    "system": "the server itself: version, health, errors: schemas, router",
    "metrics": "Prometheus metrics: their text, figures of jobs, of a driver",
    "plan": "the plan of one step: its values, the command",
    "profile": "the measured costs of a model's layers: values, the task, the run of the task",
    "verify": "a job's pipeline beside its plain model: the task, the command",
    "check": "a job without its accelerators: the task, the command",
    "job": "the job as a user writes it: whole for the control plane, what workers read of it",
    # one subject of several rooms
    "base": "the interface of a package whose other modules implement it",
    "resharding": "moving a tensor between the layouts of two meshes: planner, plan, execution",
    "timeline": "the slots of one step: planned, measured",
    "tabu": "tabu search, and its kernel",
    "explain": "the explanation of a slow step: analysis, what it reads of the store",
    "submit": "submission: of a job by its user, of an attempt to Ray",
    "evaluation": "evaluation between steps: what a worker runs, when the driver asks for it",
    "benchmarks": "measurements before a plan: what a worker measures, what the driver gathers",
}
"""Base names of several modules, with the one thing that each stands for."""

CROWDED_PACKAGES: set[str] = set()
SPLINTERS: set[str] = set()
REPEATED_BASE_NAMES: set[str] = set()
LONG_FUNCTIONS: set[str] = set()
MANY_PARAMETERS = {
    # numba's inlined functions take arrays, not objects
    "service/scheduler/kernels/dispatcher.py:_run_events",
    "service/scheduler/kernels/dispatcher.py:_choose_compute",
    "service/scheduler/kernels/tabu.py:_choose_move",
    # an autograd function's forward takes tensors one by one
    "worker/parallel/sync_batch_norm.py:forward",
    # a command's options are its function's parameters
    "service/cli/jobs.py:list_jobs",
    "service/cli/plan.py:plan",
    # the stations of a driver's training, and the callbacks of its checkpoints
    "worker/driver/step_loop.py:__init__",
    "worker/driver/checkpoints.py:__init__",
}
"""Functions of more than FUNCTION_PARAMETERS parameters, with the reason."""
WRONG_ARROWS: set[str] = set()
RIDDLES: set[str] = set()
BANNED: dict[str, int] = {}


@dataclass(frozen=True)
class Import:
    """`name` is the module (ours) or the whole dotted name (others') that `module` imports at `line`."""

    module: str
    name: str
    line: int
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.name}"


def test_service_imports_the_contract_of_worker_and_worker_nothing_of_service():
    assert _of("worker", "service") == []
    to_worker = _of("service", "worker")
    assert to_worker, "the scheduler compiles to worker.contract.program"
    assert [str(found) for found in to_worker if not _below(found.name, "worker.contract")] == []
    others = ("tests", "dashboards", "deploy")
    assert _of("service", *others) + _of("worker", *others) == []


def test_the_control_plane_never_imports_torch():
    reached = _reached_by("service")  # also what it takes from worker/
    wrong = [found for found in _imports() if found.module in reached and _below(found.name, "torch", "cupy")]
    assert wrong == []


def test_the_contract_needs_nothing_else_of_worker():
    assert [
        str(found) for found in _of("worker.contract", "worker") if not _below(found.name, "worker.contract")
    ] == []


def test_the_scheduler_does_no_input_or_output():
    assert _of(SCHEDULER, *OUTSIDE) == []
    of_ours = {found.name for found in _ours() if _below(found.module, SCHEDULER)}
    assert [name for name in sorted(of_ours) if not _below(name, SCHEDULER, "worker.contract")] == []


def test_the_kernels_and_the_problem_of_the_scheduler_know_no_higher_room():
    kernels, problem = f"{SCHEDULER}.kernels", f"{SCHEDULER}.problem"
    allowed = {kernels: (kernels,), problem: (problem, kernels)}
    for room in ("schedules", "search", "resharding"):
        allowed[f"{SCHEDULER}.{room}"] = (f"{SCHEDULER}.{room}", problem, kernels)
    for room in allowed:
        assert any(_below(name, room) for name in _modules()), f"there is no {room}"
    wrong = [
        str(found)
        for room, below in allowed.items()
        for found in _of(room, SCHEDULER)
        if not found.typing_only and not _below(found.name, *below)
    ]
    assert wrong == []


def test_only_collectives_and_measurements_sum_through_a_transport():
    rooms = ("worker.parallel", "worker.benchmark", "worker.transport")
    calls = {
        module: f"{module}:{node.lineno}"
        for module, path in _modules().items()
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES
        if ast.unparse(node.value).rpartition(".")[2].lstrip("_") == "transport"
    }
    assert any(_below(module, "worker.parallel.collectives") for module in calls)
    assert [call for module, call in calls.items() if not _below(module, *rooms)] == []


def test_the_rooms_of_worker_import_downwards():
    floor = {f"worker.{room}": number for number, rooms in enumerate(WORKER_ROOMS) for room in rooms}
    rooms = {name for name in _modules() if name.startswith("worker.") and name.count(".") == 1}
    assert rooms == set(floor), "every room of worker has its floor"
    upwards = {
        f"{found.module} -> {found.name}"
        for found in _ours()
        for above, below in [(_room(found.module), _room(found.name))]
        if above in floor and below in floor and above != below and floor[above] >= floor[below]
        if floor[above] != floor[below] or (above > below and _imports_room(below, above))
    }
    assert upwards == WRONG_ARROWS


def test_the_api_needs_no_orchestrator_in_its_process():
    rounds = ("service.orchestrator.loop", "service.orchestrator.attempts.watch", "service.control_plane")
    assert set(rounds) <= set(_modules())
    assert _reached_by("service.api").isdisjoint(rounds)
    assert _of("service.orchestrator", "service.api", "service.cli", "service.client") == []
    assert _of("service.store", "service.api", "service.orchestrator", "service.cli") == []


def test_the_rules_of_jobs_know_no_http():
    assert _of("service.jobs", "service.api", "service.cli", "service.client", "fastapi", "starlette") == []
    assert [
        str(found) for found in _of("service", "service.api.routers") if found.module != "service.api.routers"
    ] == [str(found) for found in _of("service.api.app", "service.api.routers")]


def test_the_client_and_the_values_that_it_shares_know_no_other_room():
    light = ("service.client", "service.schemas", "service.settings", "service.spec")
    allowed = ("service", "worker", "worker.contract", *light)
    reached = _reached_by(*light)
    assert [
        name
        for name in sorted(reached)
        if not _below(name, *light, "worker.contract") and name not in allowed
    ] == []


def test_no_circle_of_modules():
    assert module_circles() == []


def test_no_circle_of_packages():
    assert package_circles() == []


def test_a_circle_is_found_wherever_it_hides():
    graph = {"a": {"b", "x"}, "b": {"c"}, "c": {"a"}, "x": {"y"}, "y": set(), "z": {"z"}}
    assert _circles(graph) == [["a", "b", "c"], ["z"]]


def test_a_package_has_at_most_fifteen_modules_and_three_floors():
    assert crowded_packages() == CROWDED_PACKAGES
    assert [str(path) for path in _sources() if len(path.parent.parts) > DEPTH + 1] == [], (
        "these stand too deep"
    )


def test_a_short_module_with_one_importer_is_part_of_its_importer():
    assert splinters() == SPLINTERS


def test_one_base_name_stands_for_one_thing():
    repeated = repeated_base_names()
    assert set(SHARED_BASE_NAMES) <= repeated, "each is shared"
    assert repeated - set(SHARED_BASE_NAMES) == REPEATED_BASE_NAMES


def test_one_class_name_stands_for_one_thing():
    places: dict[str, list[str]] = defaultdict(list)
    for path in _sources():
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_names_in_backquotes_are_of_something_that_exists():
    assert dangling_names() == []


def test_a_dangling_name_is_found(tmp_path):
    (folder := tmp_path / "gone").mkdir()
    module = folder / "other.py"
    module.write_text(
        '"""Made by `maker` of gone/module.py, in `other.made` and `float[n]`."""\n\nmade = 1\n'
    )
    assert dangling_names([module]) == [f"{module}:1: maker", f"{module}:1: gone/module.py"]


def test_functions_are_short_and_take_few_parameters():
    long, many = set(), set()
    for path in _sources():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                parameters = [parameter for parameter in given if parameter.arg not in ("self", "cls")]
                if node.end_lineno - node.lineno + 1 > FUNCTION_LINES:
                    long.add(f"{path}:{node.name}")
                if len(parameters) > FUNCTION_PARAMETERS:
                    many.add(f"{path}:{node.name}")
    assert long == LONG_FUNCTIONS
    assert many == MANY_PARAMETERS, "which value objects do their parameters make?"


def test_the_first_line_of_a_module_is_a_statement():
    found = set()
    for path in _sources():
        first = (ast.get_docstring(_tree(path)) or "").split("\n")[0]
        if (
            not first.endswith((".", ":"))
            or RIDDLE.match(first)
            or "?" in first
            or "part of" in first.lower()
        ):
            found.add(str(path))
    assert found == RIDDLES


def test_the_docstring_of_a_class_or_a_function_begins_as_a_statement():
    found = [
        f"{path}:{node.lineno} {node.name}: {text.splitlines()[0]}"
        for path in _sources()
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if (text := ast.get_docstring(node)) and RIDDLE.match(text)
    ]
    assert found == [], "which noun of the field is it?"


def test_identifiers_use_the_words_of_the_field():
    counts: dict[str, int] = defaultdict(int)
    for path in _sources():
        for name in _names(_tree(path)):
            if BANNED_WORDS.search(name):
                counts[f"{path}:{name}"] += 1
    assert dict(sorted(counts.items())) == BANNED


@pytest.mark.parametrize(
    ("line", "is_riddle"),
    [
        ("Whose turn it is.", True),
        ("What a step takes.", True),
        ("By mesh, the seconds of its actions.", True),
        ("As `start`, but returns the run.", True),
        ("Assigns samples to steps.", False),
        ("The engine of one worker.", False),
        ("Doesn't wait.", False),
    ],
)
def test_a_riddle_is_told_from_a_statement(line: str, is_riddle: bool):
    assert bool(RIDDLE.match(line)) == is_riddle


def module_circles() -> list[list[str]]:
    graph: dict[str, set[str]] = defaultdict(set)
    for found in _ours():
        graph[found.module].add(found.name)
    return _circles(graph)


def package_circles() -> list[list[str]]:
    """A package and those inside it are one here; the modules of both have the rule of modules."""
    graph: dict[str, set[str]] = defaultdict(set)
    for found in _ours():
        above, below = _package(found.module), _package(found.name)
        if not _below(above, below) and not _below(below, above):
            graph[above].add(below)
    return _circles(graph)


def crowded_packages() -> set[str]:
    """Packages of more than MODULES_OF_A_PACKAGE modules."""
    counts: dict[str, int] = defaultdict(int)
    for path in _sources():
        counts[str(path.parent)] += 1
    return {package for package, count in counts.items() if count > MODULES_OF_A_PACKAGE}


def splinters() -> set[str]:
    """Modules below SPLINTER_LINES lines with one importer."""
    importers: dict[str, set[str]] = defaultdict(set)
    for found in _imports():
        if found.name in _modules() and found.module != found.name and not _is_door(found.module):
            importers[found.name].add(found.module)
    return {
        str(path)
        for path in _sources()
        if _text(path).count("\n") < SPLINTER_LINES and len(importers[_dotted(path)]) == 1
    }


def repeated_base_names() -> set[str]:
    """Names of several files, each without its ending."""
    places: dict[str, int] = defaultdict(int)
    for path in _sources():
        if path.stem != "__main__":
            places[path.stem] += 1
    return {name for name, count in places.items() if count > 1}


def dangling_names(sources: Sequence[Path] | None = None) -> list[str]:
    """Names in backquotes and paths of modules, in docstrings and comments, of which a part is found in no code."""
    sources = sources or _sources()
    known = {part for path in sources for part in path.with_suffix("").parts} | OTHERS_NAMES
    texts = []
    for path in sources:
        docstrings = {
            (node.value.lineno, node.value.col_offset)
            for node in ast.walk(_tree(path))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for token in tokenize.generate_tokens(io.StringIO(_text(path)).readline):
            if token.type == tokenize.COMMENT or token.start in docstrings:
                texts.append((path, token.start[0], token.string))
            elif token.type in (tokenize.NAME, tokenize.STRING):
                known.update(re.findall(r"\w+", token.string))
    found = []
    for path, line, text in texts:
        names = re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", text)
        missing = [name for name in names if not known.issuperset(filter(None, name.split(".")))]
        paths = [one for one in re.findall(r"\b[a-z_]+/[a-z_/]+\.py\b", text) if not _is_module(one, sources)]
        found += [f"{path}:{line}: {name}" for name in (*missing, *paths)]
    return found


def _is_module(path: str, sources: Sequence[Path]) -> bool:
    """True for what is there, and for what is in no folder of ours: a file of the user's."""
    if path.partition("/")[0] not in {part for source in sources for part in source.parts[:-1]}:
        return True
    return (ROOT / path).exists() or any(f"/{source}".endswith(f"/{path}") for source in sources)


def largest_constructors(number: int) -> list[tuple[int, str]]:
    """Parameters beside self of the `number` largest `__init__`, and their classes."""
    counts = [
        (
            len(init.args.posonlyargs) + len(init.args.args) + len(init.args.kwonlyargs) - 1,
            f"{path}:{node.name}",
        )
        for path in _sources()
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ClassDef)
        for init in node.body
        if isinstance(init, ast.FunctionDef) and init.name == "__init__"
    ]
    return sorted(counts, key=lambda count: (-count[0], count[1]))[:number]


def lines_of_sources() -> int:
    """Lines of all modules, without packages' own files and migrations."""
    return sum(_text(path).count("\n") for path in _sources())


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("name", "id", "arg", "attr"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


def _imports_room(importer: str, imported: str) -> bool:
    return any(_room(found.module) == importer and _room(found.name) == imported for found in _ours())


def _of(room: str, *names: str) -> list[Import]:
    """Imports in `room` of anything at or below one of `names`; also those for type checkers only."""
    return [found for found in _imports() if _below(found.module, room) and _below(found.name, *names)]


def _below(name: str, *rooms: str) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def _room(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _package(module: str) -> str:
    return module if _is_package(module) else module.rpartition(".")[0]


def _is_door(module: str) -> bool:
    """A package's own file hands names on, and its __main__ is the command's other name: neither uses a module."""
    return _is_package(module) or module.endswith(".__main__")


def _is_package(module: str) -> bool:
    return _modules()[module].name == "__init__.py"


def _ours() -> list[Import]:
    """Imports of our own modules, inside functions too, without those that only type checkers run."""
    return [found for found in _imports() if found.name in _modules() and not found.typing_only]


def _reached_by(*begin: str) -> set[str]:
    """Modules that are imported, directly or not, by those at or below `begin`; these too."""
    reached, new = set[str](), {name for name in _modules() if _below(name, *begin)}
    while new:
        reached |= new
        new = {found.name for found in _ours() if found.module in new} - reached
    return reached


@cache
def _modules() -> dict[str, Path]:
    """Every module of service and worker by its dotted name; a package by its folder's."""
    found = {}
    for room in ("service", "worker"):
        for path in sorted((ROOT / room).rglob("*.py")):
            found[_dotted(path.relative_to(ROOT))] = path
    return found


@cache
def _sources() -> Sequence[Path]:
    """Every module below service and worker, relative; neither packages' own files nor migrations."""
    paths = [path.relative_to(ROOT) for path in _modules().values()]
    return tuple(path for path in paths if path.name != "__init__.py" and "migrations" not in path.parts)


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _text(path: Path) -> str:
    return (ROOT / path).read_text()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_text(path))


@cache
def _imports() -> tuple[Import, ...]:
    return tuple(found for module, path in _modules().items() for found in _imports_of(module, path))


def _imports_of(module: str, path: Path) -> Iterator[Import]:
    tree = _tree(path)
    guarded = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the whole name, imports are absolute here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(module, _module_of(name), node.lineno, node in guarded)


def _module_of(name: str) -> str:
    """`package.module.thing` → the module that holds it, when it is ours."""
    holder = name
    while holder and holder not in _modules():
        holder = holder.rpartition(".")[0]
    return holder or name


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that all reach each other (Tarjan 1972), and modules that import themselves."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph.get(module, ())):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            members = sorted(stack[at:])
            del stack[at:]
            if len(members) > 1 or module in graph.get(module, ()):
                circles.append(members)

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return sorted(circles)
