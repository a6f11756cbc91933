"""The comparison of two revisions finds what differs and nothing else, and a walk counts files and returns."""

from __future__ import annotations

import importlib.util
import threading

import pytest

from tests.benchmarks.house import Comparison, Walk

BEFORE = {
    "paths": {"/jobs": {"get": {"summary": "List", "responses": {"$ref": "#/components/schemas/Jobs"}}}},
    "components": {
        "schemas": {
            "Jobs": {
                "required": ["a", "b"],
                "properties": {"a": {"type": "string"}, "title": {"type": "string"}},
            },
            "Unused": {"type": "null"},
        }
    },
}


def changed(schema_name="Jobs", **fields):
    schema = {**BEFORE["components"]["schemas"]["Jobs"], **fields}
    operation = {"summary": "Jobs", "responses": {"$ref": f"#/components/schemas/{schema_name}"}}
    return {"paths": {"/jobs": {"get": operation}}, "components": {"schemas": {schema_name: schema}}}


@pytest.mark.parametrize(
    ("after", "found"),
    [
        (changed(), []),
        (changed(required=["b", "a"], title="A list"), []),
        (changed("JobList"), ["`JobList` is the new name of the schema `Jobs`"]),
        (changed(required=["a"]), ["`Jobs/required` no longer has b"]),
        (changed(required=["a", "b", "c"]), ["`Jobs/required` also has c"]),
        (
            changed(properties={"a": {"type": "number"}}),
            [
                '`Jobs/properties/a/type`: "string" -> "number"',
                '`Jobs/properties/title` is gone: {"type": "string"}',
            ],
        ),
        (changed(maxItems=3), ["`Jobs/maxItems` is new: 3"]),
        ({**changed(), "paths": {}}, None),
    ],
)
def test_a_difference_is_named_once_at_its_shortest_path(after, found):
    differences = list(Comparison(BEFORE, after).differences())
    if found is None:
        (gone,) = differences
        assert gone.startswith("`/paths//jobs` is gone")
    else:
        assert differences == found


def test_a_walk_counts_stays_files_and_returns_thread_after_thread(tmp_path):
    """`first` of a calls b and is left, a second function of a is the return; what a thread calls again is read already."""
    modules = {}
    for name, text in {
        "service/a.py": "def first(b):\n    b.helper()\n    second()\n\ndef second():\n    pass\n",
        "worker/b.py": "def helper():\n    pass\n\ndef other():\n    helper()\n",
        "tests/c.py": "def elsewhere():\n    pass\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[path.stem])
    walk = Walk(tmp_path)
    with walk:
        modules["a"].first(modules["b"])
        modules["c"].elsewhere()
        thread = threading.Thread(target=modules["b"].other)
        thread.start()
        thread.join()
    # a first, b helper, a second, b other: four stays in two files
    assert walk.counts == (4, 2, 2)
