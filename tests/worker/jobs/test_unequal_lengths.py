"""Jobs whose samples have unequal lengths train as a loop over the samples one by one, and as one over the padded ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.tiers import some_by_day
from tests.worker.cached import traced_once  # noqa: F401 (used by every test)
from tests.worker.unequal_texts import LONGEST, Texts, text_length, unequal_job
from tests.worker.workers import Workers, mean_loss
from worker.checkpoint.format import finish_checkpoint
from worker.contract.failures import AttemptFailure
from worker.contract.job import Job
from worker.contract.planned import parse_planned_job
from worker.contract.reasons import Reason
from worker.data.sampler import BatchSampler
from worker.model.factory import build_model
from worker.verify.local_gang import prepare_workers

BUCKETS = (7, 11, 19, LONGEST)
STEPS = range(1, 5)
SGD = {"factory": "torch.optim:SGD", "args": {"lr": 1.0}}


class PlainLoop:
    """The model in one process, trained by torch alone; `losses` of its steps, weighed by tokens."""

    def __init__(self, spec: dict[str, Any]):
        training = self._training = spec["training"]
        of = spec["optimizer"]
        self.model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=training["seed"])
        kinds = {"torch.optim:SGD": torch.optim.SGD}
        self._optimizer = kinds[of["factory"]](self.model.parameters(), **of["args"])
        self.losses: list[float] = []

    def train(self, steps: range) -> PlainLoop:
        for step in steps:
            samples = self._samples(step)
            tokens = sum(len(target) for _, target in samples)
            self._optimizer.zero_grad()
            losses = [self._loss(part) / tokens for part in self._parts(samples)]
            sum(losses).backward()
            if (limit := self._training.get("clip_grad_norm")) is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
            self._optimizer.step()
            self.losses.append(sum(loss.item() for loss in losses))
        return self

    def _samples(self, step: int) -> list[Any]:
        data, training = Texts(), self._training
        sampler = BatchSampler(len(data), training["global_batch"], 1, seed=training["seed"])
        return [data[index] for index in sampler.indices(step, 0)]

    def _parts(self, samples: list[Any]) -> list[Any]:
        """Each sample alone, as long as it is."""
        return [(tokens[None], target[None]) for tokens, target in samples]

    def _loss(self, part: Any) -> torch.Tensor:
        tokens, target = part
        return functional.cross_entropy(self.model(tokens), target, reduction="sum", ignore_index=-100)


class PaddedLoop(PlainLoop):
    """The same of microbatches: of like length, each padded to its bucket."""

    def _parts(self, samples: list[Any]) -> list[Any]:
        samples = sorted(samples, key=lambda sample: len(sample[0]))
        size = len(samples) // self._training["microbatches"]
        parts = []
        for begin in range(0, len(samples), size):
            own = samples[begin : begin + size]
            bucket = min(one for one in BUCKETS if one >= max(len(tokens) for tokens, _ in own))
            rows = [
                (functional.pad(t, (0, bucket - len(t))), functional.pad(y, (0, bucket - len(y)), value=-100))
                for t, y in own
            ]
            parts.append(tuple(torch.stack(column) for column in zip(*rows, strict=True)))
        return parts


def parameters_of(run: Workers) -> dict[str, torch.Tensor]:
    """The parameters of all meshes by name; those of data-parallel workers are equal."""
    found: dict[str, torch.Tensor] = {}
    for worker in run.workers:
        for name, value in worker.engine.state()["parameters"].items():
            assert torch.equal(found.setdefault(name, value.clone()), value), name
    return found


def assert_equal_parameters(run: Workers, model: torch.nn.Module, tolerance: float) -> None:
    found = parameters_of(run)
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = value.detach().abs().max().item()
        assert (found[name] - value).abs().max().item() <= tolerance * scale, name


LAYOUTS = [
    {"stages": 2, "workers": 1},
    {"stages": 3, "workers": 1},
    {"stages": 2, "workers": 2},
    {"stages": 1, "workers": 2},
]


@some_by_day("layout", LAYOUTS, by_day=3, ids=str)
@pytest.mark.parametrize("plain", [PlainLoop, PaddedLoop])
def test_losses_and_parameters_are_those_of_a_plain_loop(layout, plain):
    spec = unequal_job(**layout)
    expected = plain(spec).train(STEPS)
    with Workers(spec) as run:
        assert run.losses(STEPS) == pytest.approx(expected.losses, rel=1e-5)
        assert_equal_parameters(run, expected.model, 1e-5)


@some_by_day("layout", LAYOUTS, by_day=3, ids=str)
def test_every_gradient_is_that_of_the_samples_one_by_one(layout):
    """A step of SGD with rate 1: what it takes away is the gradient."""
    spec = unequal_job(**layout, optimizer=SGD)
    del spec["training"]["clip_grad_norm"]
    before = {name: p.detach().clone() for name, p in PlainLoop(spec).model.named_parameters()}
    expected = {name: p.detach() for name, p in PlainLoop(spec).train(range(1, 2)).model.named_parameters()}
    with Workers(spec) as run:
        run.losses(range(1, 2))
        found = parameters_of(run)
    largest = max((before[name] - expected[name]).abs().max().item() for name in before)
    for name, value in before.items():
        gradient = value - expected[name]
        assert gradient.abs().max() > 0, name
        assert (value - found[name] - gradient).abs().max().item() <= 1e-5 * largest, name


@some_by_day("recompute", ["all", "selective", "by_block"], by_day=1)
@some_by_day("schedule", ["zb-h1", "gpipe"], by_day=1)
def test_stages_of_each_length_recompute_and_split_their_backward(recompute, schedule):
    spec = unequal_job(stages=3)
    spec["pipeline"] |= {"recompute": recompute, "schedule": schedule}
    expected = PlainLoop(spec).train(STEPS)
    with Workers(spec) as run:
        assert run.losses(STEPS) == pytest.approx(expected.losses, rel=1e-5)
        assert_equal_parameters(run, expected.model, 1e-5)


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v"])
def test_several_stages_of_a_mesh_hand_on_tensors_of_each_length(schedule):
    """With zb-v a mesh has the first and the last stage, which share a parameter."""
    spec = unequal_job(stages=4)
    spec["model"]["args"]["layers"] = 4
    spec["resources"]["meshes"] = 2
    spec["pipeline"]["schedule"] = schedule
    expected = PlainLoop(spec).train(STEPS)
    with Workers(spec) as run:
        assert run.losses(STEPS) == pytest.approx(expected.losses, rel=1e-5)
        assert_equal_parameters(run, expected.model, 1e-5)


def test_workers_that_share_the_optimizer_state_train_as_a_plain_loop():
    spec = unequal_job(stages=2, workers=2)
    spec["resources"]["shard"] = "optimizer"
    expected = PlainLoop(spec).train(STEPS)
    with Workers(spec) as run:
        assert run.losses(STEPS) == pytest.approx(expected.losses, rel=1e-5)


@some_by_day("workers", [1, 2], by_day=1)
def test_a_resume_in_the_middle_of_an_epoch_is_equal_to_the_bit(tmp_path, workers):
    spec = unequal_job(stages=3, workers=workers, buckets="auto")
    spec["model"]["args"]["dropout"] = 0.1
    uri = str(tmp_path)
    with Workers(spec) as run:
        losses = run.losses(range(1, 6))
        expected = parameters_of(run)
    with Workers(spec) as run:
        assert run.losses(range(1, 3)) == losses[:2]
        run.call(lambda worker: worker.save(uri, 2))
        finish_checkpoint(uri, step=2, shards=sorted({worker.mesh for worker in run.workers}), keep=1)
    assert 2 * spec["training"]["global_batch"] % len(Texts())
    with Workers(spec) as run:
        assert set(run.call(lambda worker: worker.restore(uri))) == {2}
        assert run.losses(range(3, 6)) == losses[2:]
        found = parameters_of(run)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_all_workers_tell_the_buckets_and_the_tokens_of_a_step():
    spec = unequal_job(stages=3, workers=2)
    with Workers(spec) as run:
        results = run.step(1)
    lengths = [text_length(index) for index in BatchSampler(45, 30, 1, seed=5).indices(1, 0)]
    (buckets,) = {result.lengths.buckets for result in results}
    assert (
        len({bucket.rows for bucket in buckets}) > 1 and max(bucket.length for bucket in buckets) == LONGEST
    )
    assert sum(bucket.rows for bucket in buckets) >= 30
    for mesh in range(3):
        own = [result.lengths for result in results[2 * mesh : 2 * mesh + 2]]
        assert sum(one.tokens for one in own) == sum(lengths)
        assert sum(one.padded_tokens for one in own) == sum(bucket.tokens for bucket in buckets)


@some_by_day("workers", [1, 2], by_day=1)
def test_an_evaluation_pads_to_the_longest_and_is_the_mean_over_its_tokens(workers):
    data = {
        "factory": "tests.worker.unequal_texts:Texts",
        "args": {"samples": 12},
        "lengths": {"buckets": [LONGEST]},
    }
    spec = unequal_job(stages=2, workers=workers, evaluation={"data": data})
    plain = PlainLoop(spec).train(STEPS)
    with torch.no_grad():
        parts = [(tokens[None], target[None]) for tokens, target in map(Texts().__getitem__, range(12))]
        expected = sum(plain._loss(part).item() for part in parts) / sum(
            target.numel() for _, target in parts
        )
    with Workers(spec) as run:
        losses = run.losses(STEPS)
        assert run.evaluate().loss == pytest.approx(expected, rel=1e-5)
    assert losses == pytest.approx(plain.losses, rel=1e-5)


class BranchesOnLength(torch.nn.Module):
    """Passes on another tensor for short inputs."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.embed = torch.nn.Embedding(60, width)
        self.first = torch.nn.Linear(width, width)
        self.last = torch.nn.Linear(width, 60)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        y = self.first(x)
        return (self.last(y) + (0 if tokens.shape[1] < 10 else x.sum(-1, keepdim=True))).transpose(1, 2)


class KeepsState(torch.nn.Module):
    """Runs as it is, since it looks at values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if float(x.detach().sum()) > 0 else x


def with_state(width: int = 8) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Embedding(60, width), KeepsState(), torch.nn.Linear(width, 60), Transposed()
    )


class Transposed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


class WrongWhenShort(torch.nn.Module):
    """Computes something else when it is traced with a short input."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.embed = torch.nn.Embedding(60, width)
        self.last = torch.nn.Linear(width, 60)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if tokens.shape[1] == 7 and torch.compiler.is_compiling():
            x = x * 2
        return self.last(x).transpose(1, 2)


class LooksEverywhere(torch.nn.Module):
    """Adds the mean over all places to each, padding too; `masked`: of those that are none."""

    def __init__(self, width: int = 8, masked: bool = False):
        super().__init__()
        self.masked = masked
        self.embed = torch.nn.Embedding(60, width)
        self.last = torch.nn.Linear(width, 60)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        mask = tokens >= (1 if self.masked else 0)
        mean = (x * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        return self.last(x + mean).transpose(1, 2)


class NormalisesByBatch(torch.nn.Module):
    """A batch norm over all places."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.embed = torch.nn.Embedding(60, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.last = torch.nn.Conv1d(width, 60, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.embed(tokens).transpose(1, 2)))


class HandsOnAMean(torch.nn.Module):
    """Adds the mean of a sample to each of its places in the last layer; tokens of padding are 0."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.embed = torch.nn.Embedding(60, width)
        self.pool = torch.nn.Linear(width, width)
        self.first = torch.nn.Linear(width, width)
        self.last = torch.nn.Linear(width, 60)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, held = self.embed(tokens), tokens > 0
        mean = self.pool((x * held[..., None]).sum(1) / held.sum(1, keepdim=True))
        return self.last(self.first(x) + mean[:, None]).transpose(1, 2)


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_a_tensor_without_a_length_that_has_more_rows_in_smaller_buckets_has_room(schedule):
    spec = unequal_job(model={"factory": f"{__name__}:HandsOnAMean", "args": {}})
    spec["data"]["factory"] = "tests.worker.unequal_texts:TextsWithLengths"
    spec["pipeline"] |= {"schedule": schedule, "cut": ["embed", "last"]}
    expected = PlainLoop(spec).train(STEPS)
    with Workers(spec) as run:
        most = max(bucket.rows for bucket in run.workers[0].batches.buckets)
        assert run.losses(STEPS) == pytest.approx(expected.losses, rel=1e-5)
        assert_equal_parameters(run, expected.model, 1e-5)
        sizes = {edge["tensor"]: edge["forward_bytes"] for edge in run.planned["spec"]["edges"]}
    assert most > 6 and min(sizes.values()) == most * 8 * 4


def test_a_batch_norm_whose_statistics_would_count_padding_is_refused_by_name():
    spec = unequal_job(stages=1, model={"factory": f"{__name__}:NormalisesByBatch", "args": {}})
    with pytest.raises(
        AttemptFailure, match=r"'.*norm' is a batch norm, whose statistics would count"
    ) as refused:
        Workers(spec)
    assert refused.value.reason is Reason.MODEL_BUILD_FAILED
    spec["training"]["check_trace"] = False
    with Workers(spec) as run:
        assert run.losses(range(1, 2))


@pytest.mark.parametrize("masked", [False, True])
def test_a_model_that_looks_behind_the_end_of_a_sample_is_refused(masked):
    spec = unequal_job(stages=1, model={"factory": f"{__name__}:LooksEverywhere", "args": {"masked": masked}})
    if masked:
        with Workers(spec) as run:
            assert run.losses(range(1, 2))
        return
    with pytest.raises(AttemptFailure, match=r"the model looks behind the end of a sample. Give") as refused:
        Workers(spec)
    assert refused.value.reason is Reason.MODEL_BUILD_FAILED
    spec["training"]["check_trace"] = False
    with Workers(spec) as run:
        assert run.losses(range(1, 2))


@pytest.mark.parametrize(
    ("model", "reason", "says"),
    [
        (
            "BranchesOnLength",
            Reason.CUT_IMPOSSIBLE,
            r"for microbatches of \d+ x 7 \(data.lengths\) .* tensors? ",
        ),
        (
            "with_state",
            Reason.MODEL_BUILD_FAILED,
            r"data.lengths has \d buckets, and the model has module '1'",
        ),
        ("WrongWhenShort", Reason.MODEL_BUILD_FAILED, r"for microbatches of 6 x 7 \(data.lengths\): "),
    ],
)
def test_a_model_whose_stages_differ_with_the_length_is_refused(model, reason, says):
    spec = unequal_job(model={"factory": f"{__name__}:{model}"})
    with pytest.raises(AttemptFailure, match=says) as refused, Workers(spec):
        pass
    assert refused.value.reason is reason


def test_a_job_whose_device_turns_out_to_be_cuda_is_refused_before_it_is_traced():
    with pytest.raises(
        AttemptFailure, match=r"data.lengths is given and the job runs on cuda, where"
    ) as refused:
        prepare_workers(Job.from_json(unequal_job()), device="cuda")
    assert refused.value.reason is Reason.PLAN_INFEASIBLE


@some_by_day("stages", [2, 1], by_day=1)
def test_loader_processes_read_the_same_microbatches(stages):
    spec = unequal_job(stages=stages)
    expected = PlainLoop(spec).train(range(1, 4))
    spec["data"]["loader"] = {"workers": 2}
    with Workers(spec) as run:
        assert run.losses(range(1, 4)) == pytest.approx(expected.losses, rel=1e-5)


PLANNED_LAYOUTS = [{"stages": 3, "workers": 1}, {"stages": 3, "workers": 2}]


@some_by_day("layout", PLANNED_LAYOUTS, by_day=1, ids=str)
def test_steps_that_run_by_plans_of_their_own_train_as_a_plain_loop(layout):
    """Every second step, so that the job's own program comes back in between."""
    spec = unequal_job(**layout)
    spec["pipeline"]["schedule"] = "auto"
    spec["data"]["factory"] = "tests.worker.unequal_texts:TextsWithLengths"
    expected = PlainLoop(spec).train(STEPS)
    with Workers(spec) as run:
        losses, planned = [], 0
        for step in STEPS:
            plan = run.plan_step(step) if step % 2 else None
            planned += plan is not None
            losses.append(mean_loss(run.step(step, plan and parse_planned_job(plan).programs())))
        assert planned, "no step was shorter by a plan of its own"
        assert losses == pytest.approx(expected.losses, rel=1e-5)
        assert_equal_parameters(run, expected.model, 1e-5)
        again = [worker.engine._bound.planned for worker in run.workers]
        own = parse_planned_job(run.planned).programs()
        assert again == [own[worker.mesh] for worker in run.workers]
