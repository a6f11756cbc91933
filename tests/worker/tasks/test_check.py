"""Jobs are checked without accelerators: what is wrong, what is only not known, and what is right; one process for all."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from worker.contract.codec import from_json
from worker.contract.tasks import JobCheck, check_job_process

pytestmark = pytest.mark.slow

OWN = textwrap.dedent(
    """
    import os, time
    import torch
    from torch import nn


    class Points:
        def __init__(self, fields=None, slow_s=0.0):
            self.fields, self.slow_s = fields, slow_s

        def __len__(self):
            return 16

        def __getitem__(self, index):
            time.sleep(self.slow_s)
            x = torch.zeros(6)
            return (x if self.fields is None else {name: x for name in self.fields}), torch.ones(6)


    class Few(Points):
        def __len__(self):
            return 3


    class Texts(Points):
        def __getitem__(self, index):
            return torch.zeros(3 + index), torch.ones(6)


    def pad(samples):
        '''To the longest of a microbatch.'''
        inputs, targets = zip(*samples)
        return nn.utils.rnn.pad_sequence(inputs, batch_first=True), torch.stack(targets)


    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, noisy, time):
            return self.layer(noisy) + time


    def huge():
        return nn.Linear(1 << 20, 1 << 20)


    class Stack(nn.Sequential):
        '''Values of a tensor decide, which the meta device has not.'''
        def __init__(self, width=6):
            super().__init__(*(nn.Linear(width, width) for rate in torch.linspace(0, 1, 3).tolist()))


    def counts_calls():
        '''As what registers something: a second call in one process fails.'''
        if hasattr(torch, "_called_before"):
            raise RuntimeError("called twice")
        torch._called_before = True
        return Stack()


    def wants_an_accelerator():
        raise RuntimeError("Found no NVIDIA driver on your system")


    def dies():
        os.kill(os.getpid(), 11)


    def normed():
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))


    def no_model():
        return 3
    """
)


def job(model="Stack", *, data=None, **changes):
    return {
        "model": {"factory": f"own:{model}"},
        "data": {"factory": "own:Points", "args": data or {}},
        "loss": {"factory": "torch.nn:MSELoss"},
        "optimizer": {"factory": "torch.optim:AdamW", "args": {"lr": 1e-3}},
        "training": {"global_batch": 8, "microbatches": 2},
        "resources": {"meshes": 1},
        **changes,
    }


NO_FILE = {"factory": "worker.examples.text:ByteWindows", "args": {"length": 8, "path": "/nowhere/text"}}
EVERYTHING_WRONG = {
    "model": {"factory": "own:Stack", "args": {"widht": 3}},
    "data": NO_FILE,
    "loss": {"factory": "torch.nn:MSELos"},
    "optimizer": {
        "factory": "torch.optim:AdamW",
        "args": {"lr": 1e-3},
        "schedule": {"factory": "torch.optim.lr_scheduler:StepLR", "args": {"steps": 3}},
    },
    "evaluation": {"data": {"factory": "own:Pionts"}},
}
GPT = {"layers": 1, "width": 8, "heads": 2, "length": 8}
MOVED_DATA = {"factory": "worker.data.text:ByteWindows", "args": {"length": 8}}
GROUP = {"factory": "torch.optim:SGD", "groups": [{"match": ["*.bias"], "betas": [0, 0]}]}
JOBS = {
    "right": job(),
    "everything wrong": job() | EVERYTHING_WRONG,
    "no file": job() | {"data": NO_FILE},
    "huge": job("huge"),
    "too large for real": job() | {"model": {"factory": "own:Stack", "args": {"width": 1 << 18}}},
    "called once": job("counts_calls"),
    "no accelerator": job("wants_an_accelerator"),
    "no accelerator wanted": job("wants_an_accelerator", resources={"meshes": 1, "device": "cpu"}),
    "dies": job("dies"),
    "no model": job("no_model"),
    "slow data": job(data={"slow_s": 100}),
    "other names": job("Named", data={"fields": ["noisy", "tiem"]}),
    "same names": job("Named", data={"fields": ["noisy", "time"]}),
    "no parameter": job() | {"model": {"factory": "own:Stack", "freeze": ["haed.*"]}},
    "group": job(optimizer=GROUP),
    "other lengths": job() | {"data": {"factory": "own:Texts", "collate": {"factory": "own:pad"}}},
    "too few": job() | {"data": {"factory": "own:Few", "at_end": "stop"}},
    "one row": job("normed") | {"training": {"global_batch": 8, "microbatches": 8}},
    "two rows": job("normed") | {"training": {"global_batch": 8, "microbatches": 4}},
    "rows as planned": job("normed") | {"training": {"global_batch": 8, "microbatches": "auto"}},
    "moved": job() | {"model": {"factory": "worker.model.gpt:build", "args": GPT}, "data": MOVED_DATA},
}
MAIN = """
import json, sys
from worker.contract.codec import to_json
from worker.contract.job import Job
from worker.tasks.check import check_job

for name, one in json.load(sys.stdin).items():
    check = check_job(Job.from_json(one), limit_s=3 if name == "slow data" else 100, memory_bytes=1 << 30)
    print("\\nRESULT " + json.dumps([name, to_json(check)]), flush=True)
"""


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    """The check of each job, by its name; steps have 1 GiB, those of slow data 3 s."""
    folder = tmp_path_factory.mktemp("src")
    (folder / "own.py").write_text(OWN)
    path = [str(folder), *(entry for entry in sys.path if entry)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path[:0] = {path}\n{MAIN}"],
        input=json.dumps(JOBS),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=250,
    )
    results = [
        line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")
    ]
    return {name: from_json(JobCheck, answer) for name, answer in map(json.loads, results)}


@pytest.mark.parametrize("name", ["right", "called once", "same names", "two rows", "rows as planned"])
def test_a_right_job_has_no_problem_and_no_note(checks, name):
    check = checks[name]
    assert (check.problems, check.notes) == ((), ())
    assert [text.partition(":")[0] for text in check.checked] == ["data", "optimizer", "model", "loss"]


def test_factories_that_moved_are_noted_with_the_new_path(checks):
    model, data = checks["moved"].notes
    assert (
        model.startswith("model: factory 'worker.model.gpt:build'") and "'worker.examples.gpt:build'" in model
    )
    assert data.startswith("data: factory 'worker.data.text:ByteWindows'")
    assert "'worker.examples.text:ByteWindows'" in data


def test_all_that_is_wrong_is_told_at_once_with_field_value_and_way_out(checks):
    model, data, loss, schedule, evaluation = checks["everything wrong"].problems
    assert (model.field, data.field, loss.field) == ("model.args", "data", "loss.factory")
    assert (schedule.field, evaluation.field) == ("optimizer.schedule.args", "evaluation.data.factory")
    assert "has no argument 'widht' (did you mean width?)" in model.message
    assert "did you mean MSELoss?" in loss.message and "did you mean step_size?" in schedule.message
    assert "did you mean Points?" in evaluation.message
    assert {model.reason, loss.reason, schedule.reason} == {"MODEL_BUILD_FAILED"}
    assert evaluation.reason == "DATA_FAILED"
    assert data.details.startswith("Traceback") and "worker/examples/text.py" in data.details
    assert [one.details for one in (model, loss, schedule, evaluation)] == [""] * 4, "said in full"


def test_a_missing_file_is_a_problem_of_this_machine(checks):
    (problem,) = checks["no file"].problems
    assert "FileNotFoundError: no text in '/nowhere/text'" in problem.message
    assert "give data.args.path a file or a folder" in problem.message
    assert "in __init__" in problem.details and "FileNotFoundError: no text in" in problem.details
    assert (problem.field, problem.reason, problem.local) == ("data", "DATA_FAILED", True)
    assert not any(problem.local for problem in checks["no model"].problems)


def test_a_model_of_four_terabytes_is_built_without_memory(checks):
    check = checks["huge"]
    assert (check.problems, check.notes) == ((), ())
    assert "model: Linear with 1,099,512,676,352 parameters (on the meta device)" in check.checked


def test_a_model_that_only_exists_for_real_is_built_for_real_within_the_limit(checks):
    assert "model: Stack with 126 parameters" in checks["right"].checked
    check = checks["too large for real"]
    assert check.problems == ()
    (note,) = check.notes
    assert "model was not checked, it needs more memory than there is here" in note


def test_what_fails_for_want_of_an_accelerator_is_no_problem_unless_the_job_wants_none(checks):
    check = checks["no accelerator"]
    assert check.problems == () and "no accelerator here" in check.notes[0] and "NVIDIA" in check.notes[0]
    (problem,) = checks["no accelerator wanted"].problems
    assert "Found no NVIDIA driver" in problem.message


def test_a_step_that_dies_or_takes_too_long_leaves_a_note_and_the_others_go_on(checks):
    died, slow = checks["dies"], checks["slow data"]
    assert died.problems == slow.problems == ()
    assert died.notes == ("the model could not be checked: its process was ended by SIGSEGV",)
    assert "the data could not be checked: it took more than 3 s here" in slow.notes
    assert "loss: torch.nn:MSELoss" in died.checked and "optimizer: torch.optim:AdamW" in died.checked


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "no model",
            "model: factory 'own:no_model' returned int, not a torch.nn.Module: return the model itself",
        ),
        ("other names", "has no argument 'tiem' (did you mean time?)"),
        ("no parameter", "model.freeze: no parameter is called 'haed.*'"),
        (
            "other lengths",
            "is [4, 10] of torch.float32 in step 1, microbatch 1, and [4, 14] of torch.float32",
        ),
        ("other lengths", "cut or pad all samples to one shape"),
        ("one row", "more than 1 value per channel when training, got input size torch.Size([1, 6])"),
        ("one row", "give a worker more rows of a microbatch, by fewer training.microbatches"),
        ("too few", "its 3 samples have no 8 for 1 steps of 8; give more, or set data.at_end to repeat"),
        ("group", "optimizer.groups[0] sets betas, which SGD does not know"),
    ],
)
def test_what_is_built_is_compared_with_the_rest_of_the_job(checks, name, sentence):
    (problem,) = checks[name].problems
    assert sentence in str(problem)


def test_a_process_that_an_import_ends_is_told_with_what_it_did(tmp_path):
    (tmp_path / "own.py").write_text("import os\nos._exit(3)\n")
    paths = ":".join([str(tmp_path), *(entry for entry in sys.path if entry)])
    check = check_job_process(job(), folder=tmp_path, environment={"PYTHONPATH": paths})
    assert check.problems == () and check.checked == ()
    assert check.notes == (
        "not checked: its process ended without a result (exit code 3) while importing model own:Stack",
    )
