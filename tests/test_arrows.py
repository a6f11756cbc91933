"""The arrows of DESIGN's house: what may import what. Reads the sources; imports nothing of them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINE_LIMIT = 400
SCHEDULER = "service.scheduler"
MIDDLE = tuple(f"{SCHEDULER}.{room}" for room in ("schedules", "search", "programs", "views", "resharding"))
DOORS = tuple(f"{SCHEDULER}.{door}" for door in ("planner", "plan", "compare", "partition"))
OUTSIDE = (
    *("ray", "fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic", "httpx", "requests", "typer"),
    *("asyncio", "socket", "ssl", "http", "urllib", "subprocess", "multiprocessing"),
    *("os", "pathlib", "shutil", "tempfile", "logging", "sqlite3", "time", "datetime"),
)
"""What a pure function needs not: servers, databases, networks, files, processes, clocks."""


@dataclass(frozen=True)
class Import:
    """`name` is the module (ours) or the whole dotted name (others') that `module` imports at `line`."""

    module: str
    name: str
    line: int
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.name}"


def test_service_knows_worker_and_worker_never_service():
    assert _of("worker", "service") == []
    assert _of("service", "worker"), "the scheduler compiles to worker/program.py"
    others = ("tests", "dashboards", "deploy")
    assert _of("service", *others) + _of("worker", *others) == []


def test_the_control_plane_never_imports_torch():
    reached = _reached_by("service")  # also what it takes from worker/
    wrong = [found for found in _imports() if found.module in reached and _below(found.name, "torch", "cupy")]
    assert wrong == []


def test_the_scheduler_does_no_input_or_output():
    assert _of(SCHEDULER, *OUTSIDE) == []
    of_ours = {found.name for found in _ours() if _below(found.module, SCHEDULER)}
    assert [name for name in sorted(of_ours) if not _below(name, SCHEDULER, "worker")] == []


def test_the_rooms_of_the_scheduler_point_to_its_model_and_kernels_only():
    """kernels ◄ model ◄ {schedules, search, programs, views} ◄ doors."""
    kernels, model = f"{SCHEDULER}.kernels", f"{SCHEDULER}.model"
    for room in (kernels, model, *MIDDLE, *DOORS):
        assert any(_below(name, room) for name in _modules()), f"there is no {room}"
    allowed = {kernels: (), model: (kernels,), **{room: (kernels, model) for room in MIDDLE}}
    allowed[f"{SCHEDULER}.views"] = (kernels, model, f"{SCHEDULER}.plan")  # views read plans only
    wrong = [
        str(found)
        for room, below in allowed.items()
        for found in _of(room, SCHEDULER)
        if not found.typing_only and not _below(found.name, room, *below)
    ]
    assert wrong == []


def test_the_api_needs_no_orchestrator_in_its_process():
    rounds = ("service.orchestrator.loop", "service.orchestrator.watching", "service.control_plane")
    assert _reached_by("service.api").isdisjoint(rounds)
    assert _of("service.orchestrator", "service.api", "service.cli", "service.client") == []
    assert _of("service.store", "service.api", "service.orchestrator", "service.cli") == []


def test_the_client_and_the_values_that_it_shares_know_no_other_room():
    light = (
        "service.client",
        "service.client_plans",
        "service.client_weights",
        "service.cluster_settings",
        "service.jobspec",
        "service.job_data",
        "service.job_notifications",
        "service.job_environment",
        "service.job_evaluation",
        "service.job_precision",
        "service.job_meshes",
        "service.job_resources",
        "service.job_states",
        "service.job_values",
        "service.job_labels",
        "service.job_meshes",
        "service.job_resources",
        "service.job_states",
        "service.queue_client",
        "service.settings",
        "service.settings_keeping",
        "service.api.artifact_schemas",
        "service.api.plan_schemas",
        "service.api.schemas",
        "service.api.cluster_schemas",
        "service.api.people_schemas",
        "service.api.notification_schemas",
        "service.people_client",
        "service.principals",
        "service.api.why_schemas",
    )
    assert _reached_by(*light) == set(light)


def test_no_circle_of_imports_anywhere():
    graph: dict[str, set[str]] = defaultdict(set)
    for found in _ours():
        graph[found.module].add(found.name)
    ignored = [str(found) for found in _imports() if found.typing_only and found.name in _modules()]
    assert _circles(graph) == [], f"left out, since only type checkers import them: {ignored}"


def test_a_circle_is_found_wherever_it_hides():
    graph = {"a": {"b", "x"}, "b": {"c"}, "c": {"a"}, "x": {"y"}, "y": set(), "z": {"z"}}
    assert _circles(graph) == [["a", "b", "c"], ["z"]]


@pytest.mark.parametrize("room", ["service", "worker", "dashboards", "deploy"])
def test_a_long_file_is_two_ideas(room: str):
    lines = {
        path.relative_to(ROOT): path.read_text().count("\n") for path in sorted((ROOT / room).rglob("*.py"))
    }
    found = [f"{path}: {count} lines" for path, count in lines.items() if count > LINE_LIMIT]
    assert found == [], "find the second idea in each"


def _of(room: str, *names: str) -> list[Import]:
    """Imports in `room` of anything at or below one of `names`; also those for type checkers only."""
    return [found for found in _imports() if _below(found.module, room) and _below(found.name, *names)]


def _below(name: str, *rooms: str) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


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
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def _imports() -> tuple[Import, ...]:
    return tuple(found for module, path in _modules().items() for found in _imports_of(module, path))


def _imports_of(module: str, path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text())
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
