"""Who may import whom in the worker: no circles, nothing of service, and no driver behind an actor."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]


def imports() -> dict[str, set[str]]:
    """Modules of worker, each with the modules of ours that it names in any import, also a local one."""
    names = {}
    for path in (TREE / "worker").rglob("*.py"):
        parts = path.relative_to(TREE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        wanted = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = {f"{node.module}.{alias.name}" for alias in node.names} & names.keys()
                wanted |= modules or {node.module}
        wanted = {one for one in wanted if one.split(".")[0] in ("worker", "service")}
        wanted |= {package for one in wanted for package in packages_of(one)} & names.keys()
        found[name] = wanted - {name, *packages_of(name)}
    return found


def packages_of(name: str) -> list[str]:
    """The packages that are run before a module is."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def reached_from(name: str, graph: dict[str, set[str]]) -> set[str]:
    found, rest = set(), [name]
    while rest:
        for one in graph.get(rest.pop(), ()):
            if one not in found:
                found.add(one)
                rest.append(one)
    return found


def test_there_is_no_circle():
    list(TopologicalSorter(imports()).static_order())


def test_nothing_points_to_the_control_plane():
    assert not [one for modules in imports().values() for one in modules if one.startswith("service")]


def test_an_actor_and_what_it_uses_know_nothing_of_the_driver():
    graph = imports()
    for name in ("worker.actor.actor", "worker.engine", "worker.transport", "worker.benchmark.layer_costs"):
        assert not [one for one in reached_from(name, graph) if one.startswith("worker.driver")]


@pytest.mark.parametrize(
    "module",
    ["control_plane_client", "limits", "metrics", "reporter", "step_measurement", "stopping"],
)
def test_what_of_the_driver_needs_no_tensor_is_light(module):
    code = f"import sys, worker.driver.{module}; assert not {{'torch', 'ray'}} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_gang_of_the_driver_needs_no_torch():
    code = "import sys, worker.driver.gang.gang; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_actor_is_imported_without_the_compiler():
    """Each worker of a gang imports it, and one of them traces."""
    code = "import sys, worker.actor.actor; sys.exit(str({'torch._dynamo', 'sympy'} & {*sys.modules} or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""
