"""`slotline reshard`: what it prints, and how it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from tests.service.cli.conftest import Run

ROOT = Path(__file__).parents[3]
CASE_6 = {
    "tensor": {"shape": [1024, 64], "dtype": "bfloat16"},
    "source": {"hosts": 2, "accelerators": 4, "placement": ["split(0)", "replicate"]},
    "target": {
        "hosts": 3,
        "accelerators": 4,
        "placement": [{"split": 0, "sizes": [340, 344, 340]}, "replicate"],
    },
}


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "layouts.yaml"
    path.write_text(yaml.safe_dump(CASE_6))
    return path


def test_the_text_has_plan_bound_naive_ways_and_a_line_for_each_card(run: Run, spec: Path):
    found = run("reshard", spec)
    assert found.code == 0
    assert "makespan      0.5 s (proven optimal; lower bound 0.5 s)" in found.out
    assert "send and receive      4 s, 8 times as long" in found.out
    rows = dict(re.findall(r"^(\S+ card \d+ \w+) +([.\w]{64})$", found.out, re.MULTILINE))
    assert len(rows) == 5 and "." not in rows["source:0 card 0 sends"] + rows["source:1 card 1 sends"]
    assert rows["target:0 card 2 receives"].count(".") == pytest.approx(64 * (1 - 340 / 512), abs=1)
    assert rows["target:1 card 3 receives"].count(".") == pytest.approx(64 * (1 - 344 / 512), abs=2)


def test_the_json_has_every_message(run: Run, spec: Path):
    plan = run("reshard", spec, "--json").json
    assert plan["makespan_s"] == plan["lower_bound_s"] == 0.5 and plan["proven_optimal"]
    carried = sum(m["end"] - m["begin"] for m in plan["messages"] if not m["local"])
    assert carried == 1024 * 64  # each element crosses into one host, once


def test_a_picture_draws_each_message_at_both_ends(run: Run, spec: Path, tmp_path: Path):
    path = tmp_path / "r.svg"
    assert run("reshard", spec, "-o", path).code == 0
    titles = [
        node.text for node in ElementTree.fromstring(path.read_text()).iter() if node.tag.endswith("title")
    ]
    assert len(titles) == 2 * len(run("reshard", spec, "--json").json["messages"])


@pytest.mark.parametrize(
    ("bytes_per_s", "last"),
    [(1024 * 64.0, "1 s"), (7.77e5, "84.34 ms"), (7.77e8, "84.34 µs"), (1e25, "6.554e-21 s")],
)
def test_the_axis_of_a_picture_ends_inside_it_in_a_unit_that_fits(
    run: Run, tmp_path: Path, bytes_per_s, last
):
    path, drawn = tmp_path / "layouts.json", tmp_path / "r.svg"
    path.write_text(json.dumps({**CASE_6, "links": {"card_bytes_per_s": bytes_per_s}}))
    assert run("reshard", path, "-o", drawn).code == 0
    root = ElementTree.fromstring(drawn.read_text())
    tick = root[-1]
    assert tick.text == last
    assert float(tick.get("x")) + 8 * len(last) / 2 <= float(root.get("width"))


def test_the_links_of_a_specification_count(run: Run, tmp_path: Path):
    path = tmp_path / "layouts.json"
    links = {"card_bytes_per_s": 1024 * 64.0, "latency_s": 0.25}
    path.write_text(json.dumps({**CASE_6, "links": links}))
    assert run("reshard", path, "--json").json["lower_bound_s"] == pytest.approx(0.5 * 2 + 2 * 0.25)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target": {"hosts": 2}}, "target.placement is missing"),
        ({"links": {"card_bytes_per_s": 0}}, "links.card_bytes_per_s is 0"),
        ({"links": {"bandwidth": 1}}, "links.bandwidth is not a field"),
        ({"source": {"hosts": 2, "placement": ["split(0)"]}}, "1 entries for a mesh of 2 dimensions (2 x 1)"),
        (
            {"source": {"hosts": 2, "placement": ["split(2)", "replicate"]}},
            "splits dimension 2, and the tensor has 2",
        ),
        (
            {"source": {"hosts": 2, "placement": ["shard", "replicate"]}},
            "source.placement.0 is 'shard': write replicate",
        ),
        (
            {"source": {"hosts": "a", "placement": ["replicate", "replicate"]}},
            "source.hosts is 'a': write the number",
        ),
        (
            {"source": {"hosts": 2, "mesh": [3], "placement": ["replicate"]}},
            "does not divide 3 workers: use one of 1, 3",
        ),
        (
            {"source": {"hosts": ["a"], "mesh": [3], "placement": ["replicate"]}},
            "names 1 hosts for 3 workers",
        ),
        ({"source": {"hosts": ["a"], "placement": ["replicate"]}}, "give mesh, its shape"),
        ({"source": {"mesh": [2], "accelerators": 2, "placement": ["replicate"]}}, "give one of them"),
        (
            {"source": {"mesh": [2], "placement": [{"split": 0, "sizes": [1000, 25]}]}},
            "source.placement.0.sizes is [1000, 25], 1025 together, and what it cuts of dimension 0 is 1024 long",
        ),
        (
            {"source": {"mesh": [2], "placement": [{"split": 0, "sizes": [1, 2, 1021]}]}},
            "has 3 lengths for 2 workers",
        ),
        ({"source": {"mesh": [4096], "placement": ["replicate"]}}, "4096 workers, at most 1024"),
        (
            {
                "source": {"mesh": [128], "placement": ["split(0)"]},
                "target": {"mesh": [64], "placement": ["split(1)"]},
            },
            "may make 8192 tiles, and at most 4096 are planned",
        ),
        (
            {"tensor": {"shape": [2**40, 2**20]}, "target": CASE_6["source"]},
            "elements: at most 9007199254740992 are planned for 16 workers",
        ),
        (
            {
                "source": {"mesh": [64], "placement": ["split(0)"]},
                "target": {"mesh": [512], "placement": ["replicate"]},
            },
            "64 pieces of the source for 512 workers of the target may make 32768 copies, and at most 8192 are planned",
        ),
        (
            {"source": {"hosts": ["a", "b\n0.1 s"], "mesh": [2], "placement": ["replicate"]}},
            "holds characters that cannot be printed",
        ),
        ({"tensor": {"shape": [4, 0]}}, "tensor.shape.1 is 0"),
        ({"tensor": {"shape": [4], "dtype": "float32", "element_bytes": 4}}, "give one of them"),
    ],
)
def test_what_no_plan_can_be_made_of_is_refused_by_name(run: Run, tmp_path: Path, change: dict, said: str):
    path = tmp_path / "layouts.yaml"
    path.write_text(yaml.safe_dump({**CASE_6, **change}))
    found = run("reshard", path)
    assert found.code == 1 and said in " ".join(found.err.split()) and found.out == ""


def test_a_value_that_is_wrong_is_told_in_a_few_lines(run: Run, tmp_path: Path):
    path, lists = tmp_path / "layouts.yaml", ["a: &a [x, x, x, x, x, x, x]"]
    for name, inner in zip("bcdef", "abcde", strict=True):
        lists.append(f"{name}: &{name} [{', '.join(['*' + inner] * 7)}]")
    path.write_text("\n".join([*lists, "tensor: *f"]))
    found = run("reshard", path)
    assert found.code == 1 and "tensor is [[[[...], " in found.err and len(found.err) < 10_000


def test_very_large_tensors_are_planned(run: Run, tmp_path: Path):
    path = tmp_path / "layouts.yaml"
    target = {**CASE_6["target"], "placement": ["split(0)", "replicate"]}
    path.write_text(yaml.safe_dump({**CASE_6, "tensor": {"shape": [3 * 2**30, 2**20]}, "target": target}))
    assert run("reshard", path, "--json").json["lower_bound_s"] == 0.5


def test_files_and_formats_that_are_none_are_refused(run: Run, spec: Path, tmp_path: Path):
    assert "format 'png' does not exist: use one of text" in run("reshard", spec, "--format", "png").err
    assert "contradict" in run("reshard", spec, "--json", "--format", "svg").err
    assert run("reshard", tmp_path / "none.yaml").code == 1
    (tmp_path / "list.yaml").write_text("[1]")
    assert "holds no resharding" in run("reshard", tmp_path / "list.yaml").err
    assert "cannot write" in run("reshard", spec, "-o", tmp_path / "none" / "r.svg").err


def test_the_layouts_of_the_readme_are_ones_that_the_command_takes(run: Run, tmp_path: Path):
    readme = (ROOT / "service" / "scheduler" / "README.md").read_text()
    text = readme[readme.index("`layouts.yaml` is") :]
    tensor, side, links = re.findall(r"`((?:tensor: |links: )?\{.*?\})`", text)[:3]
    path = tmp_path / "layouts.yaml"
    path.write_text(f"{tensor}\nsource: {side}\ntarget: {side}\n{links}\n")
    found = run("reshard", path)
    assert found.code == 0 and "lower bound" in found.out
