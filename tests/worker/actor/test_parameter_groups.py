"""Groups of the optimizer and frozen parameters by name: training is that of a plain loop with the same groups."""

from __future__ import annotations

import pytest
import torch

from tests.reference import accumulate
from tests.worker.actor.test_actor import job
from tests.worker.workers import Workers
from worker.actor.optimizer import check_parameter_groups, parameter_groups
from worker.checkpoint import format as checkpoint_format
from worker.contract.failures import AttemptFailure
from worker.contract.job import ParameterGroup
from worker.contract.profile import ModelError
from worker.data.sampler import BatchSampler, collate, read_sample
from worker.engine.optim.state_dict import load_groups, load_schedule, save_groups
from worker.model.factory import build_model, call_factory

GROUPS = [
    {"match": ["*.bias", "re:norm"], "weight_decay": 0.0},
    {"match": ["embed*"], "lr": 3e-3, "betas": [0.8, 0.99]},
]
FROZEN = ["blocks.0.*"]


def spec_of(*, stages, groups=GROUPS, freeze=FROZEN, schedule="one cycle"):
    spec = job(schedule, stages=stages, meshes=stages)
    spec["model"] |= {"freeze": freeze}
    spec["optimizer"] |= {"args": {"lr": 1e-2, "weight_decay": 0.3}, "groups": groups}
    if schedule == "one cycle":  # with a list that has an entry for each group
        spec["optimizer"]["schedule"]["args"] |= {"max_lr": [0.02, 0.01, 0.005]}
    return spec


def plain(spec, steps, own_groups):
    """Losses and parameters of a plain loop; `own_groups` makes groups of the model's trained parameters by hand."""
    training = spec["training"]
    model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=training["seed"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith("blocks.0."))
    data = call_factory(spec["data"]["factory"], spec["data"]["args"])
    count = training["microbatches"]
    sampler = BatchSampler(len(data), training["global_batch"], count, seed=training["seed"])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(own_groups(trained), **spec["optimizer"]["args"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, **spec["optimizer"]["schedule"]["args"])
    losses = []
    for step in steps:
        optimizer.zero_grad()
        samples = [
            [read_sample(data, i, seed=training["seed"], step=step) for i in sampler.indices(step, m)]
            for m in range(count)
        ]
        found = accumulate(model, [collate(one) for one in samples], torch.nn.functional.cross_entropy)
        torch.nn.utils.clip_grad_norm_(trained.values(), training["clip_grad_norm"])
        optimizer.step()
        schedule.step()
        losses.append(sum(found) / len(found))
    return losses, dict(model.named_parameters())


def by_hand(trained):
    """The groups of GROUPS, as somebody writes them in a script."""
    small = [p for name, p in trained.items() if name.endswith(".bias") or "norm" in name]
    embedded = [p for name, p in trained.items() if name.startswith("embed") and p not in set(small)]
    rest = [p for p in trained.values() if p not in {*small, *embedded}]
    return [
        {"params": rest},
        {"params": small, "weight_decay": 0.0},
        {"params": embedded, "lr": 3e-3, "betas": (0.8, 0.99)},
    ]


@pytest.mark.slow
def test_groups_and_frozen_parameters_train_as_in_a_plain_loop_also_after_a_resume_on_another_cut(tmp_path):
    spec = spec_of(stages=3)
    losses, expected = plain(spec, range(1, 9), by_hand)
    uri = checkpoint_format.step_uri(str(tmp_path), "job", 4)
    with Workers(spec) as run:
        first = run.losses(range(1, 5))
        frozen = [
            p for w in run.workers for s in w.stages.values() for p in s.parameters() if not p.requires_grad
        ]
        assert frozen and all(p.grad is None for p in frozen), "no gradient is made or kept for them"
        numbers = [[group["group"] for group in w.engine.optimizer.param_groups] for w in run.workers]
        assert numbers == [[0, 1, 2]] * 3, "also where a mesh holds none of a group's parameters"
        assert any(not group["params"] for w in run.workers for group in w.engine.optimizer.param_groups)
        shards = [
            *("m0", "m1", "m2"),
            *(name for names in run.call(lambda w: w.save(uri, 4)) for name in names),
        ]
        checkpoint_format.finish_checkpoint(uri, step=4, shards=shards, keep=1)
    with Workers(spec_of(stages=2)) as run:
        assert run.call(lambda w: w.restore(uri)) == [4, 4]
        second = run.losses(range(5, 9))
        rates = {tuple(group["lr"] for group in w.engine.optimizer.param_groups) for w in run.workers}
        assert len(rates) == 1, "a group without parameters here goes on with its schedule too"
        state = {name: p for w in run.workers for name, p in w.engine.state()["parameters"].items()}
    assert first + second == pytest.approx(losses, rel=1e-5)
    for name, parameter in expected.items():
        if not name.endswith(
            "qkv.bias"
        ):  # that of the keys has no gradient but rounding, which AdamW makes large
            torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-4, atol=1e-5)
    start = build_model(spec["model"]["factory"], spec["model"]["args"], seed=5)
    assert torch.equal(state["blocks.0.expand.weight"], start.get_parameter("blocks.0.expand.weight"))


def test_other_groups_are_another_training():
    """The comparison above would notice groups that are lost: weight decay and rates matter in four steps."""
    losses, _ = plain(spec_of(stages=2), range(1, 9), by_hand)
    single, _ = plain(
        spec_of(stages=2),
        range(1, 9),
        lambda trained: (
            [{"params": [p]} for p in list(trained.values())[:2]] + [{"params": list(trained.values())[2:]}]
        ),
    )
    assert losses != pytest.approx(single, rel=1e-3)


@pytest.mark.parametrize(
    ("groups", "freeze", "told"),
    [
        (
            [{"match": ["*.biass"], "weight_decay": 0}],
            [],
            r"groups\[0\]\.match: no parameter is called '\*\.biass'",
        ),
        (
            [{"match": ["blocks.0.*"], "weight_decay": 0}],
            ["blocks.0.*"],
            r"no parameter is called 'blocks\.0\.\*'",
        ),
        (
            [{"match": ["*"], "lr": 1.0}, {"match": ["*.bias"], "lr": 2.0}],
            [],
            r"groups\[1\].*is in groups before it",
        ),
        (
            [{"match": ["head.weight"], "lr": 1.0}],
            [],
            r"'head\.weight' is the same parameter as 'embed\.token\.weight'",
        ),
        (
            [{"match": ["*.bias"], "weigth_decay": 0}],
            [],
            r"groups\[0\] sets weigth_decay, which AdamW does not know",
        ),
        ([], ["blocks.7.*"], r"model\.freeze: no parameter is called 'blocks\.7\.\*'"),
        ([], ["*"], "nothing to train: all of its .* parameters are frozen"),
    ],
)
def test_what_means_no_parameter_is_refused_by_name_before_training(groups, freeze, told):
    with (
        pytest.raises((AttemptFailure, ModelError), match=told),
        Workers(spec_of(stages=2, groups=groups, freeze=freeze, schedule="none")),
    ):
        pass


def test_a_parameter_is_in_the_first_group_that_matches_it():
    groups = (ParameterGroup(("*.bias",), {"lr": 1.0}), ParameterGroup(("b.*",), {"lr": 2.0}))
    names = ["a.weight", "a.bias", "b.weight", "b.bias"]
    tensors = [torch.nn.Parameter(torch.zeros(1)) for _ in names]
    found = parameter_groups(groups, names, tensors)
    of = {id(p): name for name, p in zip(names, tensors, strict=True)}
    assert [[of[id(p)] for p in group["params"]] for group in found] == [
        ["a.weight"],
        ["a.bias", "b.bias"],
        ["b.weight"],
    ]
    check_parameter_groups(groups, names, {})


def test_a_group_without_parameters_goes_on_with_the_rate_that_its_schedule_had_come_to():
    groups = (ParameterGroup(("*.bias",), {"lr": 0.5}),)

    def made(names):
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in names]
        optimizer = torch.optim.SGD(parameter_groups(groups, names, parameters), lr=1.0)
        called = {id(p): name for name, p in zip(names, parameters, strict=True)}
        # by what it was one step before, as torch's chainable forms are
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1), lambda p: called[id(p)]

    first, schedule, name_of = made(["a.weight", "a.bias"])
    first.step()
    schedule.step()
    saved, state = save_groups(first, name_of, schedule), schedule.state_dict()
    second, again, name_of = made(["a.weight"])  # the bias is on another mesh now
    load_schedule(again, state, load_groups(second, name_of, saved))
    second.step()
    again.step()
    assert [group["lr"] for group in second.param_groups] == pytest.approx([0.01, 0.005])
