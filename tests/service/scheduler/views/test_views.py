"""What plans look like as text, and the command that prints them."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from service.cli.main import app
from service.scheduler.compare import compare_schedules, definition_order_timeline, lockstep_timeline
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import SpecError
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.programs.plan import Plan
from service.scheduler.schedules.csv import orders_from_csv
from service.scheduler.views.render import FORMATS, plan_orders, render
from service.scheduler.views.svg import timeline_svg
from tests.service.scheduler.specs import chain
from tests.service.scheduler.timelines import timeline_metrics

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def spec():
    return load_spec(chain(3, 5, backward=1.0, transfer=0.0, max_in_flight=3, split_backward=False))


def test_json_reads_back_as_the_same_plan(spec):
    plan = make_plan(spec)
    assert Plan.model_validate_json(render(spec, plan, "json")) == plan
    slot = json.loads(render(spec, plan, "json"))["slots"][0]
    assert set(slot) == {"mesh", "lane", "action", "stage", "microbatch", "start_s", "end_s"}


def test_the_event_table_equals_the_published_example(spec):
    table = json.loads(render(spec, make_plan(spec), "events"))
    assert table["1"]["forward"][1] == [1, 2, 2, 3, 5, 6]
    assert table["1"]["backward"][0] == [5, 6, 6, 7, 7, 8]


def test_the_slot_table_has_the_published_rows(spec):
    lines = render(spec, make_plan(spec), "table").splitlines()
    assert len(lines) == 3
    assert {len(line) for line in lines} == {8 * (4 * 3 + 4 * 5 - 5)}
    # what the first stage exchanges, in order: [S][S][S][R][R S][R S][R][R]
    cells = [lines[0][at : at + 8].strip() for at in range(8, len(lines[0]), 16)]
    assert [cell for cell in cells if cell] == [
        "FS00", "FS01", "FS02", "BR00", "BR01FS03", "BR02FS04", "BR03", "BR04",
    ]  # fmt: skip
    assert "BR00FS01" in lines[1]


def test_tables_of_anything_but_a_plain_chain_are_refused():
    for data in (chain(4, 4, skips=((0, 2),)), chain(4, 4, meshes=[0, 1, 1, 0], schedule="auto")):
        spec = load_spec(data)
        plan = make_plan(spec, budget_s=0)
        for form in ("table", "events"):
            with pytest.raises(SpecError, match="chains with one stage a mesh"):
                render(spec, plan, form)
    spec = load_spec(chain(3, 3, schedule="zb-h1"))
    with pytest.raises(SpecError, match="split_backward"):
        render(spec, make_plan(spec), "table")


def test_csv_reads_back_as_the_same_orders(spec):
    plan = make_plan(spec)
    text = render(spec, plan, "csv")
    assert text.splitlines()[2].startswith("2F0,2B0,2F1")
    assert orders_from_csv(spec, text) == plan_orders(spec, plan)


def test_a_chrome_trace_pairs_every_send_with_its_receive(spec):
    events = json.loads(render(spec, make_plan(spec), "chrome"))["traceEvents"]
    starts = {e["id"] for e in events if e["ph"] == "s"}
    ends = [e["id"] for e in events if e["ph"] == "f"]
    assert len(ends) == 2 * 2 * 5 and set(ends) == starts
    assert sum(e["dur"] for e in events if e["ph"] == "X" and e["cat"] == "compute") == pytest.approx(30e6)


def test_an_svg_shows_every_slot_and_names_every_mesh(spec):
    plan = make_plan(spec)
    root = ElementTree.fromstring(render(spec, plan, "svg"))
    titles = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(plan.slots)
    words = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"m0", "m1", "m2"} <= set(words)


def test_wide_computations_alone_bear_their_microbatch(spec):
    plan = make_plan(spec)
    slots = [
        replace(slot, end_s=slot.start_s + (slot.end_s - slot.start_s) * (0.0005 if number % 3 else 1.0))
        for number, slot in enumerate(plan.slots)
    ]
    root = ElementTree.fromstring(timeline_svg("job-1", {"planned": slots}))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    wide = [
        (round(float(box.get("x")) + float(box.get("width")) / 2, 1), str(slot.microbatch))
        for box, slot in zip(boxes, slots, strict=True)
        if slot.lane == "compute" and float(box.get("width")) >= 11
    ]
    labels = [
        (round(float(text.get("x")), 1), text.text)
        for text in root.iter(f"{SVG}text")
        if text.get("pointer-events") == "none"
    ]
    assert 0 < len(wide) < sum(slot.lane == "compute" for slot in slots)
    assert sorted(labels) == sorted(wide)


def test_a_timeline_stands_below_its_plan_on_one_scale(spec):
    plan = make_plan(spec)
    slower = [replace(slot, start_s=2 * slot.start_s, end_s=2 * slot.end_s) for slot in plan.slots]
    update = replace(plan.slots[0], action="STEP", stage=None, microbatch=None, start_s=12.0, end_s=13.0)
    root = ElementTree.fromstring(
        timeline_svg("job-1", {"planned": plan.slots, "measured": [*slower, update]})
    )
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    assert len(boxes) == 2 * len(plan.slots) + 1
    planned, measured = boxes[: len(plan.slots)], boxes[len(plan.slots) : -1]
    for one, other in zip(planned, measured, strict=True):
        thinnest = other.get("width") == one.get("width") == "0.50"
        assert thinnest or float(other.get("width")) == pytest.approx(2 * float(one.get("width")), abs=0.02)
        assert float(other.get("y")) > max(float(box.get("y")) for box in planned)
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert words.count("m0") == 2 and {"planned", "measured", "optimizer step"} <= set(words)
    for slots in ([], plan.slots * 700):
        with pytest.raises(ValueError, match=rf"1 to 20000 slots, this timeline has {len(slots)}"):
            timeline_svg("job-1", {"planned": slots})


def test_metrics_of_slots_equal_those_of_the_plan(spec):
    plan = make_plan(load_spec(chain(4, 8, skips=((0, 3),))))
    for slots in (plan.slots, [slot.to_json() for slot in plan.slots]):
        metrics = timeline_metrics(slots)
        assert metrics.makespan_s == plan.makespan_s
        assert metrics.span_s == plan.span_s
        assert metrics.bubble_ratio == pytest.approx(plan.bubble_ratio)
        assert metrics.overlap_ratio == pytest.approx(plan.overlap_ratio)
        for mesh in plan.meshes:
            assert metrics.meshes[mesh.name].exposed_transfer_s == pytest.approx(mesh.exposed_transfer_s)


def test_exposed_transfer_time_is_idle_compute_beside_a_running_transfer():
    slot = {"mesh": "m0", "stage": "s", "microbatch": 0}
    slots = [
        {**slot, "action": "F", "start_s": 0.0, "end_s": 1.0},
        {**slot, "action": "RECV_B", "start_s": 0.5, "end_s": 3.0},
        {**slot, "action": "B", "start_s": 4.0, "end_s": 5.0},
        {**slot, "action": "SEND_B", "start_s": 5.0, "end_s": 6.0},  # after the span
        {**slot, "action": "STEP", "start_s": 6.0, "end_s": 9.0},
    ]
    metrics = timeline_metrics(slots)
    assert metrics.meshes["m0"].exposed_transfer_s == 2.0
    assert (metrics.makespan_s, metrics.span_s) == (6.0, 5.0)
    assert metrics.bubble_ratio == pytest.approx(1 - 2 / 6)
    assert metrics.overlap_ratio == pytest.approx(1 - 2 / 3.5)


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(chain(3, 4, split_backward=False)))
    return lambda *words: CliRunner().invoke(app, ["plan", str(path), *words])


def test_the_command_prints_every_format(run):
    for form in FORMATS:
        result = run("--format", form)
        assert result.exit_code == 0, (form, result.output)
        assert result.output.strip()


def test_the_command_writes_a_file_and_takes_another_schedule(run, tmp_path):
    out = tmp_path / "plan.json"
    assert run("-o", str(out), "--schedule", "gpipe").exit_code == 0
    assert json.loads(out.read_text())["chosen"] == "gpipe"
    assert json.loads(run("--json").output)["chosen"] == "eager-1f1b"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--schedule", "zb-v"), "schedule 'zb-v' wants"),
        (("--schedule", "nothing"), "does not exist"),
        (("--format", "png"), "format 'png' does not exist"),
        (("--json", "--format", "csv"), "contradict"),
    ],
)
def test_the_command_fails_with_a_message(run, words, message):
    result = run(*words)
    assert result.exit_code == 1
    assert message in str(result.exception)


def test_the_command_reads_yaml_and_refuses_what_is_no_spec(tmp_path):
    import yaml

    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(chain(2, 2)))
    assert CliRunner().invoke(app, ["plan", str(path)]).exit_code == 0
    path.write_text("- just a list")
    assert CliRunner().invoke(app, ["plan", str(path)]).exit_code == 1
    assert CliRunner().invoke(app, ["plan", str(tmp_path / "missing.json")]).exit_code == 1


def test_the_comparison_lists_all_schedules_and_the_two_of_the_past(run):
    lines = run("--compare").output.splitlines()
    names = [line.split()[0] for line in lines[1:] if line]
    for name in ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "auto", "onnxruntime", "alpa"):
        assert name in names


def test_the_baselines_have_their_known_makespans():
    for stages, microbatches, hidden in ((4, 16, 63.0), (8, 32, 131.0)):  # independent links
        spec = load_spec(chain(stages, microbatches, contention="link"))
        assert definition_order_timeline(spec).makespan == hidden
        rows = 4 * stages + 4 * microbatches - 5
        # unit costs: every row of the table is one long
        unit = load_spec(chain(stages, microbatches, backward=1.0))
        assert lockstep_timeline(unit).makespan == rows


@pytest.mark.slow
def test_no_baseline_beats_auto():
    for contention in ("none", "link", "full-duplex", "half-duplex"):
        spec = load_spec(chain(4, 6, contention=contention, skips=((0, 3),), schedule="auto"))
        found = {row.schedule: row.makespan_s for row in compare_schedules(spec, budget_s=1)}
        assert all(makespan is None or makespan >= found["auto"] * (1 - 1e-9) for makespan in found.values())


def test_the_command_reads_torchs_csv(run, tmp_path):
    path = tmp_path / "orders.csv"
    path.write_text(
        "0F0,0SEND_F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3,0REDUCE_GRAD\n"
        ",1F0,1F1,(1F2;1B0)OVERLAP_F_B,1F3,1B1,1B2,1B3\n"
        ",,2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3\n"
    )
    result = run("--orders", str(path), "--format", "csv")
    assert result.exit_code == 0, result.stderr
    assert result.output.splitlines()[1] == "1F0,1F1,1F2,1B0,1F3,1B1,1B2,1B3"
    assert run("--orders", str(path), "--schedule", "1f1b").exit_code == 1
    path.write_text("0F0\n")
    assert "1 rows, the spec 3 meshes" in str(run("--orders", str(path)).exception)
