"""The driver's loop over real workers, each behind a queue as an actor is, without Ray: what runs before what."""

from __future__ import annotations

import itertools
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch

from tests.polling import until
from tests.tiers import some_by_day
from tests.worker.actor.test_actor import job
from tests.worker.driver.fake_gang import FakeGang
from tests.worker.unequal_texts import unequal_job
from tests.worker.workers import Workers
from worker.actor.step_result import StepLengths
from worker.checkpoint import format as checkpoint_format
from worker.contract.failures import AttemptFailure, first_cause
from worker.contract.job import Bucket, CheckpointPolicy, Job
from worker.contract.reasons import Reason
from worker.data.sampler import BatchSampler
from worker.driver import step_loop
from worker.driver.checkpoints import Checkpoints
from worker.driver.evaluation import Evaluations
from worker.driver.gang.gang import Mesh
from worker.driver.limits import Limits
from worker.driver.metrics import ModelFlops
from worker.driver.reporter import LaunchPhases
from worker.driver.step_loop import DataEnd, ProfiledSteps, StepLog, StepLoop, StepPublisher
from worker.driver.step_measurement import StepMeasurement, StepScaling, StepUsage
from worker.driver.stopping import GracefulStop, Interruption
from worker.engine import engine
from worker.engine.spot_check import ForwardCheck, Spot
from worker.examples.text import ByteWindows

LIMIT_S = 60.0
HERE = "127.0.0.1"


@pytest.fixture(autouse=True)
def one_node(monkeypatch):
    """Nobody asks Ray where this is."""
    monkeypatch.setattr(step_loop, "own_node_address", lambda: HERE)


class Actor:
    """A worker whose calls run one after the other, in the order in which they came."""

    def __init__(self, worker, log):
        self._worker, self._log = worker, log
        self._queue = ThreadPoolExecutor(1)
        self.call = SimpleNamespace(remote=self._call)

    def _call(self, name, *arguments):
        last = arguments[-1] if arguments else None
        self._log.append((f"ask {name}", last))

        def run():
            result = getattr(self._worker, name)(*arguments)
            self._log.append((f"end {name}", last))
            return result

        return self._queue.submit(run)


class Gang(FakeGang):
    """As worker/driver/gang/gang.py, of workers in this process."""

    def __init__(self, workers, log, interrupted=lambda: None):
        self.interrupted = interrupted
        actors = [Actor(worker, log if i == 0 else []) for i, worker in enumerate(workers)]
        self.meshes = tuple(Mesh(f"m{i}", (actor,)) for i, actor in enumerate(actors))
        self.addresses = [SimpleNamespace(node=HERE) for _ in actors]
        self.workers = actors

    def wait(self, refs, *, phase, what, extra_s=0.0):
        failures, deadline = [], time.monotonic() + LIMIT_S
        for ref in refs:
            while True:
                assert time.monotonic() < deadline, what
                self.raise_if_interrupted(phase)
                try:
                    ref.result(0.01)
                    break
                except TimeoutError:
                    continue
                except AttemptFailure as failure:
                    failures.append(failure)
                    break
        if failures:
            raise first_cause(failures)
        return [ref.result() for ref in refs]


@dataclass
class Heard:
    """Reporter and metrics: what was said, into the log."""

    log: list
    steps: list = field(default_factory=list)
    timelines: list = field(default_factory=list)
    events: list = field(default_factory=list)

    def step(self, report):
        self.log.append(("report", report["step"]))
        self.steps.append(report)

    def timeline(self, timeline):
        self.timelines.append(timeline)

    def checkpoint(self, step, uri, stored_bytes=None):
        self.log.append(("saved", step))

    def undelivered(self, step):
        return {}

    def deliver_again(self, records, recorded):
        pass

    def event(self, kind, message):
        self.events.append((kind, message))

    def observe_step(self, *_):
        pass

    observe_usage = observe_scaling = set_timeline = observe_step


def train(
    spec,
    steps,
    *,
    policy=None,
    interrupted=lambda: None,
    stopping=lambda: False,
    log=None,
    profile_every_s=Limits().profile_every_s,
    beside=False,
    launch=None,
):
    """Run the loop over all steps; what was heard. `beside`: checkpoints are written while training goes on."""
    log = [] if log is None else log
    with Workers(spec) as run:
        gang, heard = Gang(run.workers, log, interrupted), Heard(log)
        planned = SimpleNamespace(plan={"makespan_s": 0.01}, step_s=0.01, stage_names=["s0", "s1"])
        checkpoints = Checkpoints(policy, "job", gang=gang, reporter=heard, limit_s=LIMIT_S)
        if beside:
            checkpoints.write_asynchronously()
        try:
            StepLoop(
                planned,
                samples=spec["training"]["global_batch"],
                gang=gang,
                checkpoints=checkpoints,
                evaluations=Evaluations(None, gang=gang, reporter=heard, metrics=heard),
                data_end=DataEnd(Job.from_json(spec), gang=gang),
                publisher=StepPublisher(
                    heard, heard, profile_every_s=profile_every_s, step_log=StepLog(5), launch=launch
                ),
                interruption=Interruption(stop_requested=stopping),
            ).run(1, steps)
        except BaseException:
            for (
                worker
            ) in run.workers:  # as when a gang is ended: nobody waits for a step that others never began
                worker.engine.abort("the loop has ended")
            raise
        finally:
            for actor in gang.workers:
                actor._queue.shutdown(wait=True, cancel_futures=True)
    return heard


def places(log, steps):
    """For each step, where in the log it was asked for, ended on worker 0 and was reported."""
    return {s: [log.index((what, s)) for what in ("ask run_step", "end run_step", "report")] for s in steps}


class PaddedLate(ByteWindows):
    """Of one sample the half is no target: the last of the first step, behind all that is tried before training."""

    def __init__(self):
        super().__init__(8)

    def __len__(self):
        return 16

    def __getitem__(self, index):
        tokens, target = super().__getitem__(index)
        if index == BatchSampler(len(self), 8, 8, seed=job()["training"]["seed"]).indices(1, 7)[0]:
            target = torch.where(torch.arange(len(target)) < len(target) // 2, target, -100)
        return tokens, target


@some_by_day(("reduction", "told"), [("mean", 1), ("microbatches", 0)], by_day=1)
def test_targets_that_are_unequal_behind_what_was_tried_are_told_once_where_microbatches_weigh_alike(
    reduction, told
):
    spec = job()
    spec["data"] = {"factory": f"{__name__}:PaddedLate"}
    spec["training"] |= {"microbatches": 8, "loss_reduction": reduction}
    heard = train(spec, 4)  # two epochs
    events = [message for kind, message in heard.events if kind == "unequal_targets"]
    assert len(events) == told
    assert all(said.startswith("step 1: 0 to 4 of a worker's targets of a microbatch are") for said in events)


@pytest.mark.slow
def test_a_launch_is_over_with_the_first_step():
    log = []
    train(job(), 2, log=log, launch=LaunchPhases(lambda phase, _: log.append((phase, 0))))
    (_, ended, reported) = places(log, [1])[1]
    (over,) = [place for place, (what, _) in enumerate(log) if what == "first step"]
    assert ended < over < reported


def test_the_next_step_is_asked_for_before_one_is_reported_and_never_more_than_one():
    heard = train(job(), 6)
    found = places(heard.log, range(1, 7))
    for step in range(1, 6):
        assert found[step + 1][0] < found[step][2], f"step {step + 1} waits for the report of {step}"
    for step in range(1, 5):
        assert found[step][2] < found[step + 2][0], f"step {step + 2} is asked for before {step} is reported"
    assert max(step for what, step in heard.log if what == "ask run_step") == 6


@pytest.mark.slow
def test_a_step_that_overflows_in_fp16_is_told_as_that_with_its_loss_scale(monkeypatch):
    monkeypatch.setattr("worker.engine.optim.grad_scaler.BACKOFF_FACTOR", 2.0**-30)
    spec = job()
    scaling = {"init_scale": 2.0**40}
    spec["training"] |= {"precision": "fp16", "loss_scaling": scaling}
    heard = train(spec, 3)
    told = "gradients overflowed in fp16 with loss scale"
    assert [(kind, f"{told} 1.09951e+12" in message) for kind, message in heard.events] == [
        ("loss_scale_lowered", True)
    ]


@pytest.mark.slow
def test_a_forward_that_came_out_otherwise_when_it_was_computed_again_is_an_event(monkeypatch):
    monkeypatch.setattr(ForwardCheck, "difference", lambda self: f"{self} differs")
    monkeypatch.setattr(engine, "choose_spot", lambda *_: Spot(2, stage=1, microbatch=0))
    heard = train(job(), 3)
    told = "mesh m1, worker 0: the forward of stage s1, microbatch 0, of step 2 differs"
    assert heard.events == [("forward_differs", told)]


def late(save_shard, log):
    """A disk so slow that the step behind has ended, and been reported, before it is written to."""

    def save(uri, *, step, **arguments):
        until(lambda: not (step < 6 and ("report", step + 1) not in log), limit_s=LIMIT_S)
        save_shard(uri, step=step, **arguments)

    return save


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True])
def test_a_checkpoint_holds_exactly_the_state_after_its_step(tmp_path, monkeypatch, beside):
    """Also where it is written while the next step changes the state: here not before that step has ended."""
    spec, log = job("cosine"), []
    if beside:
        monkeypatch.setattr(checkpoint_format, "save_shard", late(checkpoint_format.save_shard, log))
    train(
        spec,
        6,
        policy=CheckpointPolicy(str(tmp_path / "ahead"), every_steps=2, keep=9),
        log=log,
        beside=beside,
    )
    with Workers(spec) as run:
        for step in range(1, 7):
            run.step(step)
            if step % 2:
                continue
            names = set().union(*({*w.engine.state()["parameters"]} for w in run.workers))
            saved, number = checkpoint_format.load_checkpoint(
                checkpoint_format.step_uri(str(tmp_path / "ahead"), "job", step), names=names
            )
            assert number == step
            for worker in run.workers:
                state = worker.engine.state()
                for name, value in state["parameters"].items():
                    assert torch.equal(saved["parameters"][name], value), (step, name)
                for name, entry in state["optimizer"].items():
                    for key, value in entry.items():
                        assert torch.equal(saved["optimizer"][name][key], value), (step, name, key)
                assert saved["lr_schedule"] == state["lr_schedule"]
    for step in (2, 4):
        waits = log.index(("saved", step)) < log.index(("ask run_step", step + 1))
        assert waits == (not beside)
    assert log.index(("ask run_step", 4)) < log.index(("report", 3)), "others are asked for ahead"


def test_a_step_that_is_not_finite_stops_at_that_step_though_the_next_was_asked_for():
    loss = {"factory": "workers:NanInStep", "args": {"step": 3, "microbatches": 2}}
    log = []
    with pytest.raises(AttemptFailure, match="step 3: the loss or the gradient norm") as failed:
        train(job(loss=loss), 6, log=log)
    assert failed.value.reason is Reason.NAN_LOSS
    assert [step for what, step in log if what == "report"] == [1, 2]
    assert [step for what, step in log if what == "end run_step"] == [1, 2]
    assert max(step for what, step in log if what == "ask run_step") == 4


@pytest.mark.slow
def test_a_cancel_while_the_next_step_is_asked_for_ends_the_loop_there():
    log = []

    class Cancelled(Exception):
        pass

    def interrupted():
        if ("report", 2) in log and ("ask run_step", 4) in log:
            raise Cancelled

    with pytest.raises(Cancelled):
        train(job(), 1000, interrupted=interrupted, log=log)
    assert [step for what, step in log if what == "report"] == [1, 2]
    assert max(step for what, step in log if what == "ask run_step") == 4


@pytest.mark.slow
@pytest.mark.parametrize("asked_after", [1, 2, 3])
def test_an_attempt_that_is_asked_to_end_saves_its_last_step_and_runs_none_behind_it(tmp_path, asked_after):
    """Also where that step is saved anyhow (every second one): once."""
    log, policy = [], CheckpointPolicy(str(tmp_path), every_steps=2, keep=9)
    with pytest.raises(GracefulStop, match=r"stopped after step (\d), which is saved") as asked:
        train(job(), 1000, policy=policy, stopping=lambda: ("report", asked_after) in log, log=log)
    last = int(re.search(r"step (\d)", str(asked.value))[1])
    assert asked_after <= last <= asked_after + 2, "soon"
    assert [step for what, step in log if what == "ask run_step"] == list(range(1, last + 1))
    assert log.count(("saved", last)) == 1
    assert (
        checkpoint_format.load_checkpoint(checkpoint_format.step_uri(str(tmp_path), "job", last))[1] == last
    )


@pytest.mark.slow
def test_an_attempt_without_checkpoints_that_is_asked_to_end_says_what_is_lost():
    log = []
    with pytest.raises(GracefulStop, match="has no `checkpoint`, so it is lost"):
        train(job(), 1000, stopping=lambda: ("report", 1) in log, log=log)


@pytest.mark.slow
def test_an_attempt_that_is_asked_to_end_in_its_last_step_has_done_it():
    log = []
    train(job(), 3, stopping=lambda: ("report", 2) in log, log=log)
    assert [step for what, step in log if what == "report"] == [1, 2, 3]


@pytest.mark.slow
def test_the_clocks_are_measured_when_no_step_is_asked_for(monkeypatch):
    log = []
    measured = step_loop._ClockOffsets.refresh

    def refresh(clocks):
        log.append(("clock", None))
        measured(clocks)

    def due(clocks):
        return not clocks.offsets or [what for what, _ in log].count("report") == 2

    monkeypatch.setattr(step_loop._ClockOffsets, "refresh", refresh)
    monkeypatch.setattr(step_loop._ClockOffsets, "due", due)
    train(job(), 5, log=log)
    running = set()
    for what, step in log:
        if what == "ask run_step":
            running.add(step)
        elif what == "report":
            running.discard(step)
        elif what == "clock":
            assert not running
    assert [what for what, _ in log].count("clock") == 2


def test_times_and_slots_of_a_step_are_its_own():

    began = time.monotonic()
    heard = train(job(), 12)
    wall = time.monotonic() - began
    assert sum(step["step_s"] for step in heard.steps) < wall
    starts = [step["started_at"] for step in heard.steps]
    for step, (at, following) in enumerate(itertools.pairwise(starts), 1):
        assert following >= at + heard.steps[step - 1]["makespan_s"], "a step began within the one before"
    for timeline in heard.timelines:
        actions = [(s["mesh"], s["action"], s["stage"], s["microbatch"]) for s in timeline["slots"]]
        assert len(actions) == len(set(actions))


@pytest.mark.slow
def test_slots_are_reported_of_the_profiled_steps():
    heard = train(job(), 9, profile_every_s=0.0)
    assert [timeline["step"] for timeline in heard.timelines] == [*range(1, 10)]
    heard = train(job(), 3)
    assert [timeline["step"] for timeline in heard.timelines] == [1, 2, 3]


@pytest.mark.parametrize(
    ("every_s", "kept"),
    [
        (30.0, [*range(6), 8, 12, 20, 36, 68, 128, 188, 199]),  # after 1, 2, 4, 8, 16, 30, 30 s
        (1.5, [*range(6), 8, 11, 14, 17, 20, 22]),
        (0.0, [*range(23)]),
    ],
)
def test_the_first_steps_are_profiled_and_then_fewer_and_fewer_until_one_in_so_many_seconds(every_s, kept):
    """Steps of half a second."""
    step = 0
    steps = ProfiledSteps(every_s, now=lambda: 100 + 0.5 * step)
    found = []
    for step in range(kept[-1] + 1):
        if steps.includes_next(last=step == kept[-1]):
            found.append(step)
    assert found == kept


def test_the_step_that_was_running_when_one_was_due_is_not_profiled_for_being_long():
    ended_s = [*range(6), 5.5, 60.0, 60.5, 61.0, 61.5]
    step = 0
    steps = ProfiledSteps(30.0, now=lambda: ended_s[step])
    found = []
    for step in range(len(ended_s)):
        if steps.includes_next(last=False):
            found.append(step)
    assert found == [*range(6), 8], "not the seventh, which took 54.5 s"


def measured(step: int, seconds: float, *, tokens: int | None = 640) -> StepMeasurement:
    report = {"step": step, "loss": 2.5, "metrics": {"accuracy": 0.25}, "step_s": seconds}
    return StepMeasurement(
        report | {"grad_norm": 1.5, "learning_rate": 3e-4},
        {},
        StepUsage(seconds, {}, 16, tokens),
        StepScaling(None, False, False),
    )


def test_the_log_has_a_line_every_few_seconds_with_rates_of_the_steps_since_the_last(caplog):
    """Steps of 2 s: 16 samples and 640 tokens in each, 500 FLOPs of 1000 a second; 90 steps are left after the 10th."""
    clock = [0.0]
    log = StepLog(100, ModelFlops(500, 1000.0), every_s=5.0, now=lambda: clock[0])
    with caplog.at_level(logging.INFO, "worker.driver.step_loop"):
        for step in range(1, 11):
            clock[0] += 2.0
            log.observe(measured(step, 2.0), first=step == 1, last=step == 10)
    fields = "loss 2.5  accuracy 0.25  grad_norm 1.5  lr 0.0003"
    assert [record.message for record in caplog.records] == [
        f"step 1/100  {fields}  2 s",
        f"step 4/100  {fields}  8 samples/s  320 tokens/s  mfu 25.0 %  0:03:12 left",
        f"step 7/100  {fields}  8 samples/s  320 tokens/s  mfu 25.0 %  0:03:06 left",
        f"step 10/100  {fields}  8 samples/s  320 tokens/s  mfu 25.0 %  0:03:00 left",
    ]


def test_the_log_tells_the_share_of_padding_since_the_last_line():
    log, lengths = StepLog(4, every_s=0.0), StepLengths((Bucket(8, 4), Bucket(64, 4)), 640, 1000)
    log.observe(replace(measured(1, 2.0), lengths=lengths), first=True, last=False)
    log._padded_tokens, log._tokens, log._seconds, log._samples, log._steps = 1000, 640, 2.0, 16, 1
    line = log.line(replace(measured(2, 2.0), lengths=lengths))
    assert "padding 36.0%  8 samples/s  320 tokens/s" in line


@pytest.mark.slow
def test_the_padding_of_the_first_step_is_told_once_beside_that_of_the_longest():
    heard = train(unequal_job(), 3)
    events = [message for kind, message in heard.events if kind == "padding"]
    assert events == [
        "step 1: 36.3% of its tokens are padding, with microbatches of 15 x 7 (1), 6 x 11 (1), 5 x 19 (1), 3 x 37 (2); all "
        "of 37 long, 72.0% would be. Tokens per second are those of samples; said once"
    ]


def test_the_log_leaves_out_what_is_not_known():
    log = StepLog(3)
    log.observe(measured(1, 2.0, tokens=None), first=True, last=False)
    for value in ("grad_norm", "learning_rate", "loss"):
        step = measured(2, 4.0, tokens=None)
        step.report[value] = None
        assert "None" not in log.line(step)
    log.observe(measured(2, 4.0, tokens=None), first=False, last=False)
    assert "tokens" not in log.line(measured(2, 4.0, tokens=None)) and "mfu" not in log.line(measured(2, 4.0))
