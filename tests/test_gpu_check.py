"""The first hour on a GPU, without one: order, the first failure, what is left out, the report, and how answers are read."""

from __future__ import annotations

import sys

import pytest

from tests.gpu_check import __main__ as gpu_check
from tests.gpu_check import connections, jobs
from tests.gpu_check.lanes import waiting_pairs
from tests.gpu_check.machine import driver_rows
from tests.gpu_check.runner import (
    Check,
    CommandResult,
    Figure,
    Finding,
    finding_in_last_line,
    module,
    report_text,
    run_checks,
)


def checks(*names, **changes):
    return [Check(name, f"{name} works", module(name), 10, **changes.get(name, {})) for name in names]


class Machine:
    """Answers commands by the name of their module, and remembers them; the first check counts two GPUs."""

    def __init__(self, gpus=2, **answers):
        self.ran, self._gpus, self._answers = [], gpus, answers

    def __call__(self, command, limit_s):
        self.ran.append(command[2])
        answer = self._answers.get(command[2], Finding())
        if not self.ran[1:]:
            answer = Finding(answer.figures, answer.failure, answer.not_shown, self._gpus)
        return CommandResult(0, f"a line before\n{answer.to_json()}\n", 2.0)


def run(machine, these):
    reports = []
    passed = run_checks(these, machine, lambda rows: reports.append(report_text(rows, {"host": "here"})))
    return passed, reports


def test_the_checks_are_those_of_the_first_hour_in_their_order():
    assert " ".join(check.name for check in gpu_check.CHECKS) == (
        "machine NCCL tests lanes communicators bandwidth losses faults checkpoint overlap"
    )
    for check in gpu_check.CHECKS:
        command = check.command(1)
        assert command[:2] == [sys.executable, "-m"] and check.limit_s > 0


def test_a_failure_is_the_last_thing_that_runs_and_the_report_has_its_output():
    machine = Machine(b=Finding((Figure("speed", "3 GB/s", "of a pair"),), "too slow"))
    passed, reports = run(machine, checks("a", "b", "c"))
    assert not passed and machine.ran == ["a", "b"]
    last = reports[-1]
    assert "| a | passed | 2 |" in last and "| b | failed | 2 |" in last and "| c | not run |  |" in last
    assert (
        "| speed | 3 GB/s | of a pair |" in last
        and "**Failed**: too slow" in last
        and "a line before" in last
    )
    assert "## c" not in last, "nothing is said of what did not run"


def test_the_report_is_there_after_each_check():
    _, reports = run(Machine(), checks("a", "b"))
    assert len(reports) == 2 and "| b | not run |  |" in reports[0] and "| b | passed | 2 |" in reports[1]


@pytest.mark.parametrize(("gpus", "ran"), [(1, ["a", "c"]), (2, ["a", "b", "c"])])
def test_what_one_gpu_cannot_show_is_left_out_and_named(gpus, ran):
    machine = Machine(gpus)
    passed, reports = run(machine, checks("a", "b", "c", b={"least_gpus": 2}))
    assert passed and machine.ran == ran
    assert ("* b works (needs 2 GPUs)" in reports[-1]) == (gpus == 1)
    assert ("| b | left out |  |" in reports[-1]) == (gpus == 1)


def test_without_any_gpu_only_the_first_check_runs():
    machine = Machine(0, a=Finding(failure="torch finds no GPU"))
    passed, reports = run(machine, checks("a", "b"))
    assert not passed and machine.ran == ["a"] and "**Failed**: torch finds no GPU" in reports[-1]


def test_a_command_that_hangs_is_ended_with_its_children_and_is_a_failure():
    script = "import subprocess; subprocess.run(['sleep', '300'])"
    these, reports = [Check("a", "it ends", lambda gpus: [sys.executable, "-c", script], 0.5)], []
    assert not run_checks(these, report=lambda rows: reports.append((rows[0].seconds, report_text(rows, {}))))
    ((seconds, text),) = reports
    assert "not done within its limit of 0.5 s" in text and seconds < 200, "nobody waits for the child"


def test_the_figures_of_a_command_come_back_and_anything_else_is_a_failure():
    finding = Finding((Figure("a", "1 ms", "b"),), None, ("c",), 4)
    assert finding_in_last_line(CommandResult(0, f"noise\n{finding.to_json()}\n", 1.0)) == finding
    for result in (
        CommandResult(1, finding.to_json(), 1.0),
        CommandResult(0, "no JSON", 1.0),
        CommandResult(0, '{"figures": 3}', 1.0),
        CommandResult(-11, "", 1.0),
    ):
        assert f"status {result.status} and printed no finding" in finding_in_last_line(result).failure


TABLE = """device H, 4 stages, 16 microbatches
F, I, W ms of each stage: [[5.9, 7.0, 6.9]]
transfer 3.60 ms

| row | step ms | planned ms | measured/planned |
|---|---|---|---|
| torch 1F1B | 590.0 | - | - |
| slotline auto (zb) | 500.5 | 490.0 | 1.021 |
"""


def test_rows_of_the_overlap_benchmark_are_figures_and_a_failed_row_or_none_at_all_fails():
    finding = gpu_check.read_overlap(CommandResult(0, TABLE, 1.0))
    assert finding.failure is None
    assert [(figure.name, figure.value) for figure in finding.figures[2:]] == [
        ("torch 1F1B", "590.0 ms a step"),
        ("slotline auto (zb)", "500.5 ms a step"),
    ]
    assert "planned 490.0 ms, 1.021 times as long" in finding.figures[-1].meaning
    failed = gpu_check.read_overlap(
        CommandResult(0, TABLE + "| slotline zb-h1 | failed: no memory | | |\n", 1.0)
    )
    assert failed.failure == "slotline zb-h1: no memory" and len(failed.figures) == 4
    assert (
        "measured no row"
        in gpu_check.read_overlap(CommandResult(0, "skipped: no CUDA device\n", 1.0)).failure
    )
    assert gpu_check.read_overlap(CommandResult(1, TABLE, 1.0)).failure is not None
    assert "--mps" in gpu_check.overlap_command(1) and "--mps" not in gpu_check.overlap_command(2)


@pytest.mark.parametrize(
    ("status", "counts", "failure"),
    [
        (0, 'tests="9" failures="0" errors="0" skipped="0"', None),
        (0, 'tests="9" failures="0" errors="0" skipped="2"', "2 of 9 tests were skipped: no CUDA device"),
        (0, 'tests="0" failures="0" errors="0" skipped="0"', "0 of 0 tests were skipped"),
        (1, 'tests="9" failures="1" errors="0" skipped="0"', "1 tests failed, 0 had errors"),
    ],
)
def test_a_test_that_is_skipped_on_a_machine_with_gpus_has_shown_nothing(
    status, counts, failure, tmp_path, monkeypatch
):
    path = tmp_path / "results.xml"
    path.write_text(f'<testsuites><testsuite {counts}><testcase><skipped message="no CUDA device"/>'
                    "</testcase></testsuite></testsuites>")  # fmt: skip
    monkeypatch.setattr(gpu_check, "_JUNIT", path)
    found = gpu_check.read_pytest(CommandResult(status, "", 1.0)).failure
    assert found is None if failure is None else found.startswith(failure)
    path.unlink()
    assert "wrote no results" in gpu_check.read_pytest(CommandResult(4, "", 1.0)).failure


ROWS = """0, NVIDIA H, GPU-aa, 580.65.06, 143771 MiB, 0
1, NVIDIA H, GPU-bb, 580.65.06, 143771 MiB, 3
"""


def test_a_gpu_with_uncorrected_errors_is_named():
    failure, figures = driver_rows(ROWS)
    assert failure == "GPU 1 (GPU-bb) has 3 uncorrected errors of its memory: reset or replace it"
    assert [figure.value for figure in figures[::2]] == ["NVIDIA H, 143771 MiB, driver 580.65.06"] * 2
    assert driver_rows(ROWS.replace(", 3\n", ", [N/A]\n"))[0] is None
    assert driver_rows(None)[0] is None


class Queues:
    """A device whose streams share hardware queues, which is asked in its own time."""

    def __init__(self, queue_of):
        self.now, self._queue_of, self._busy = 0.0, queue_of, {}

    def hold(self, stream):
        self._busy[self._queue_of[stream]] = self.now + 0.1

    def mark(self, stream):
        ends = max(self._busy.get(self._queue_of[stream], 0.0), self.now)
        device = self

        class Event:
            def query(self):
                device.now += 0.001
                return device.now >= ends

        return Event()

    def settle(self):
        self.now = max([self.now, *self._busy.values()])


@pytest.mark.parametrize(
    ("queue_of", "pairs"), [([0, 1, 2], []), ([0, 1, 0], [(0, 2), (2, 0)]), ([0, 1, 1], [(1, 2), (2, 1)])]
)
def test_streams_that_share_a_hardware_queue_are_found(queue_of, pairs):
    device = Queues(queue_of)
    assert waiting_pairs(range(3), device.hold, device.mark, device.settle, lambda: device.now) == pairs


def answer(error="StallError", seconds=3.2):
    return {"error": error, "failed_after_s": seconds, "closed_s": 0.1, "message": "it waits for m1"}


@pytest.mark.parametrize(
    ("kind", "others", "faulty", "failure"),
    [
        ("killed", answer(), None, None),
        ("illegal address", answer(), answer("PeerLostError"), None),
        ("stopped", answer(error=None), None, "stopped: worker m0 did not notice"),
        ("killed", answer(seconds=99.0), None, "killed: worker m0 ended after 99.0 s, above 30"),
        ("sleeps", None, None, "sleeps: worker m0 died without an answer"),
        ("illegal address", answer(), answer(error=None), "illegal address: worker m1 did not notice"),
    ],
)
def test_a_worker_that_does_not_notice_a_fault_or_does_so_late_fails(kind, others, faulty, failure):
    figures, found = jobs.fault_figures(kind, {"m0": others, "m1": faulty})
    assert found == failure
    if failure is None:
        assert "3.2 s" in figures[0].value and jobs.FAULTS[kind] in figures[0].meaning


def test_losses_after_a_resume_are_those_of_the_run_that_went_on_or_the_check_fails():
    saved = {
        "save_s": 0.5,
        "held_bytes": 100_000_000,
        "peak_bytes": 130_000_000,
        "host_peak_bytes": 2_000_000_000,
    }
    through = {("m1", 0): {"losses": [[4.0], [3.0], [2.0], [1.0]], "saved": saved}}
    same = {("m1", 0): {"losses": [[2.0], [1.0]]}}
    figures, failure = jobs.resume_figures("shard", through, same, 5_000_000)
    assert failure is None
    assert [figure.value for figure in figures] == [
        "equal to the bit",
        "5.00 MB",
        "0.50 s",
        "2.00 GB",
        "30.00 MB",
    ]
    other = {("m1", 0): {"losses": [[2.0], [1.1]]}}
    assert "losses after a resume are [2.0, 1.1]" in jobs.resume_figures("shard", through, other, 1)[1]


def ranks(what, count, environment):
    if "expandable_segments" in environment.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        raise connections.RanksError("rank 3 ended with status 1: NCCL refused")
    # two GPUs, each shared by four workers, which all see the whole device
    return [
        {
            "device": rank % 2,
            "seconds": 1.0 + rank,
            "gpu_bytes": 180_000_000,
            "shared_bytes": 80_000_000,
            "threads": 5,
        }
        for rank in range(count)
    ]


def test_memory_of_a_gpu_that_workers_share_is_counted_once_and_a_refused_variant_is_a_figure(monkeypatch):
    monkeypatch.setattr(connections, "run_ranks", ranks)
    finding = connections.communicators()
    value = {figure.name: figure.value for figure in finding.figures}
    assert finding.failure is None
    assert value["as shipped: GPU memory"] == "10 MB", "360 MB over 28 ends of pairs and 8 of a group"
    assert value["as shipped: shared memory"] == "10 MB" and value["as shipped: connecting"] == "8.0 s"
    assert value["expandable_segments"] == "failed"


@pytest.mark.slow
def test_a_rank_that_dies_is_told_with_its_last_line():
    with pytest.raises(connections.RanksError, match="rank 0 ended with status 1: KeyError: 'nothing'"):
        connections.run_ranks("nothing", 1, {"CUDA_VISIBLE_DEVICES": ""})
