"""Evaluation during training: as a plain loop in eval mode finds it, and training as if it had never been."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.tiers import some_by_day
from tests.worker.actor.test_actor import job
from tests.worker.jobs.test_loss_metrics import with_metrics
from tests.worker.jobs.test_loss_reduction import IGNORED, Texts
from tests.worker.jobs.test_loss_reduction import spec_of as tokens_spec
from tests.worker.workers import Workers
from worker.contract.failures import AttemptFailure
from worker.contract.reasons import Reason
from worker.data.sampler import collate
from worker.model.factory import build_model

ROWS = 8


class Numbers:
    """Rows of numbers, and which of three they are; `seed` and `length` tell sets apart."""

    def __init__(self, length=64, seed=0):
        draw = torch.Generator().manual_seed(seed)
        self.rows = torch.randn(length, ROWS, generator=draw)
        self.targets = (self.rows.sum(1).abs() * 2).long().clamp(max=2)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], self.targets[index]


class StochasticDepth(nn.Module):
    """Leaves out what it is given for some samples; in eval mode nothing of it is left."""

    def forward(self, x):
        if not self.training:
            return x
        return x * (torch.rand(x.shape[0], 1) > 0.3)


class Net(nn.Module):
    """Everything that eval mode changes: dropout, running statistics, a branch of its own, a buffer that it counts in."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(ROWS, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.4))
        self.depth = StochasticDepth()
        self.second = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=0.5), nn.Tanh())
        self.third = nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 16), nn.GELU())
        self.head = nn.Linear(16, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        h = self.first(x)
        h = h + self.depth(self.second(h))
        return self.head(self.third(h) + h) + 0 * self.calls


class DrawsAndCounts(nn.Module):
    """Cross entropy that draws from every generator, counts its calls, and keeps a mean in training."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output, target):
        self.count += 1
        loss, metrics = with_metrics(output, target)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        noise = torch.rand(()) + random.random()
        return loss + 0.01 * noise * self.count * self.training + 0.1 * self.mean, metrics


# Of four stages the third begins at a module that is not there in eval mode.
PIPELINES = {
    1: {},
    2: {"cut": ["first", "second"]},
    3: {"cut": ["first", "second", "third"]},
    4: {"cut": ["first", "second", "depth", "head"], "schedule": "interleaved-1f1b"},
}


def spec_of(length=24, *, loss="with_metrics", steps=None, **layout):
    spec = job(**layout)
    spec["model"] = {"factory": f"{__name__}:Net"}
    spec["pipeline"] |= PIPELINES[spec["pipeline"]["stages"]]
    spec["data"] = {"factory": f"{__name__}:Numbers"}
    spec["loss"] = {"factory": f"{__name__}:{loss}"}
    data = {"factory": f"{__name__}:Numbers", "args": {"length": length, "seed": 1}}
    return spec | {"evaluation": {"data": data, "steps": steps}}


def unlike(*sizes, stages=None):
    """Meshes of these sizes."""
    resources = {"meshes": len(sizes), "workers_per_mesh": max(sizes), "workers": list(sizes)}
    return {"stages": stages or len(sizes), "resources": resources}


def plain_evaluation(run, length):
    """Loss and metrics of the unsplit model in eval mode, with the parameters and buffers that the workers have now."""
    state = {}
    for worker in reversed(run.workers):  # of each mesh worker 0 is the last, as in a checkpoint
        own = worker.engine.state()
        state |= {**own["parameters"], **own["buffers"]}
    model = build_model(f"{__name__}:Net", {})
    model.load_state_dict(state)
    model.eval()
    data = Numbers(length, seed=1)
    found = []
    with torch.no_grad():
        size = 4 // (1 + run.workers[-1].index)  # the parts of which the last mesh has the losses
        for begin in range(0, length - length % 4, size):
            (rows,), target = collate([data[index] for index in range(begin, begin + size)])
            loss, metrics = with_metrics(model(rows), target)
            found.append({"loss": float(loss), **{k: float(v) for k, v in metrics.items()}})
    return {name: sum(one[name] for one in found) / len(found) for name in found[0]}


LAYOUTS = [
    {},
    {"stages": 4, "meshes": 2},
    {"stages": 3, "meshes": 3, "workers_per_mesh": 2},
    {"stages": 1, "meshes": 1},
]
UNLIKE = [unlike(2, 1), unlike(1, 2, stages=4)]


@some_by_day("layout", [*LAYOUTS, *UNLIKE], by_day=2, ids=str)
def test_an_evaluation_is_that_of_the_plain_model_in_eval_mode(layout):
    with Workers(spec_of(27, **layout)) as run:
        size = run.workers[0].evaluation_size()
        assert (size.batches, size.samples, size.left_out) == (3, 24, 3)
        for step in range(3):
            if step:
                run.step(step)
            found = run.evaluate()
            expected = plain_evaluation(run, 27)
            assert {"loss": found.loss, **found.metrics} == pytest.approx(expected, rel=1e-5), step


class ScaledInEval(nn.Module):
    """A buffer that only eval mode uses: no trained stage has it."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(ROWS, 16), nn.Linear(16, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        h = self.first(x)
        return self.head(h if self.training else h * self.scale)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_only_eval_mode_uses_comes_from_the_weights_that_the_job_starts_from(tmp_path, workers):
    model = build_model(f"{__name__}:ScaledInEval", {}, seed=5)
    model.scale.fill_(3.0)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    spec = spec_of(24, workers_per_mesh=workers)
    spec["model"] = {"factory": f"{__name__}:ScaledInEval", "weights": str(tmp_path / "model.safetensors")}
    spec["pipeline"] |= {"cut": ["first", "head"]}
    data = Numbers(24, seed=1)
    with torch.no_grad():
        (rows,), targets = collate([data[index] for index in range(24)])
        expected = float(with_metrics(model.eval()(rows), targets)[0])
    with Workers(spec) as run:
        assert run.evaluate().loss == pytest.approx(expected, rel=1e-5)


class CentredInEval(nn.Linear):
    """Centres its rows in eval mode only: a worker's part is not that of the whole there."""

    def forward(self, x):
        h = super().forward(x)
        return h.tanh() if self.training else (h - h.mean(0)).tanh()


def centred_in_eval():
    return nn.Sequential(CentredInEval(ROWS, 16), nn.Linear(16, 3))


@pytest.mark.slow
def test_what_only_eval_mode_makes_of_all_rows_cannot_go_between_meshes_of_unlike_sizes():
    spec = spec_of(24, **unlike(2, 1))
    spec["model"] = {"factory": f"{__name__}:centred_in_eval"}
    spec["pipeline"] |= {"cut": ["0", "1"]}
    with pytest.raises(AttemptFailure, match=r"tensor '\w+' is another in eval mode where 2 workers"):
        Workers(spec)


# A loss that draws shares the generators of this process with all its workers: it is tried where nobody else draws at
# the same time.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "layout"),
    [
        *(("with_metrics", layout) for layout in (*LAYOUTS[:3], UNLIKE[0])),
        *(("DrawsAndCounts", LAYOUTS[i]) for i in (0, 3)),
    ],
    ids=str,
)
def test_training_is_to_the_bit_what_it_is_without_evaluation(layout, loss):
    def curve(evaluated):
        spec = spec_of(loss=loss, **layout)
        if not evaluated:
            del spec["evaluation"]
        torch.manual_seed(1), random.seed(2)
        with Workers(spec) as run:
            torch.manual_seed(3), random.seed(4)
            found = []
            for step in range(1, 5):
                if evaluated and step != 2:
                    run.evaluate()
                found.append([result.losses for result in run.step(step)])
            states = [worker.engine.state() for worker in run.workers]
            tensors = [
                (name, tensor.clone())
                for state in states
                for part in ("parameters", "buffers")
                for name, tensor in sorted(state[part].items())
            ]
        return found, tensors

    (losses, tensors), (expected, others) = curve(True), curve(False)
    assert losses == expected
    for (name, one), (other_name, other) in zip(tensors, others, strict=True):
        assert name == other_name and torch.equal(one, other), name


def test_two_evaluations_of_the_same_weights_are_equal_to_the_bit():
    with Workers(spec_of(loss="DrawsAndCounts")) as run:
        run.step(1)
        assert run.evaluate() == run.evaluate()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"workers_per_mesh": 2}], ids=str)
def test_tokens_count_alike_over_the_whole_evaluation(layout):
    spec = tokens_spec(**layout)
    spec["evaluation"] = {"data": spec["data"]}
    model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=spec["training"]["seed"]).eval()
    (tokens,), target = collate([Texts()[index] for index in range(len(Texts()))])
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model(tokens), target, ignore_index=IGNORED)
    with Workers(spec) as run:
        assert run.evaluate().loss == pytest.approx(float(expected), rel=1e-5)


def test_so_many_batches_are_evaluated_as_the_job_says():
    with Workers(spec_of(27, steps=2)) as run:
        size = run.workers[0].evaluation_size()
        assert (size.batches, size.samples, size.left_out) == (2, 16, 0)
        assert run.evaluate().loss == pytest.approx(plain_evaluation(run, 16)["loss"], rel=1e-5)


@pytest.mark.slow
def test_an_evaluation_holds_no_more_than_the_plan_of_training():
    with Workers(spec_of(stages=4, meshes=2)) as run:
        training = {mesh["name"]: mesh for mesh in run.planned["plan"]["meshes"]}
        for mesh in run.evaluation_plan["meshes"]:
            assert mesh["peak_memory_bytes"] <= training[mesh["name"]]["peak_memory_bytes"]
            assert mesh["peak_receive_buffers"] <= training[mesh["name"]]["peak_receive_buffers"]
        assert {i["op"] for p in run.evaluation_plan["programs"].values() for i in p} <= {
            "F",
            "SEND_F",
            "RECV_F",
        }


def test_data_that_is_less_than_a_microbatch_is_refused_by_its_numbers():
    with pytest.raises(AttemptFailure, match="has 3 samples, a microbatch 4") as failed:
        Workers(spec_of(3))
    assert failed.value.reason is Reason.DATA_FAILED


class Wide(Numbers):
    """One number more a row than the model was traced for."""

    def __getitem__(self, index):
        row, target = super().__getitem__(index)
        return torch.cat([row, row[:1]]), target


def test_samples_of_another_shape_are_refused_before_anything_is_traced():
    spec = spec_of()
    spec["evaluation"]["data"] = {"factory": f"{__name__}:Wide"}
    with pytest.raises(AttemptFailure, match=r"Wide' has the shapes \[4, 9\].*training data \[4, 8\]"):
        Workers(spec)


class OnlyTrains(Net):
    """Refuses to be evaluated."""

    def forward(self, x):
        if not self.training:
            raise RuntimeError("no eval here")
        return super().forward(x)


def test_a_model_that_cannot_be_evaluated_is_told_before_training():
    spec = spec_of()
    spec["model"] = {"factory": f"{__name__}:OnlyTrains"}
    with pytest.raises(
        AttemptFailure, match=r"in eval mode, which `evaluation` needs: .*no eval here"
    ) as failed:
        Workers(spec)
    assert failed.value.reason is Reason.MODEL_BUILD_FAILED
